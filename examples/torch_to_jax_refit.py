"""Train in torch on two ranks, serve in JAX on two others: weights pass from one to the other as MXFP8.

    lowshard run -n 4 examples/torch_to_jax_refit.py

Ranks 0 and 1 train with torch's FSDP2, which shards every parameter by rows; ranks 2 and 3 serve with tensor
parallelism in JAX. Neither imports the other's library. Each describes its shardings in its own terms (DTensors,
PartitionSpecs); all ranks get both as layouts and plan from them. Sources are the optimizer's own parameters, in place.
The senders quantise the weights, so half of the bytes of bf16 are sent; JAX computes from the received codes and
scales.

Output of rank 0:

    version 1: loss 0.3..., outputs of JAX within 5 % of torch's: True
    version 2: loss 0.2..., outputs of JAX within 5 % of torch's: True
    version 3: loss 0.2..., outputs of JAX within 5 % of torch's: True
    0.52 of the bytes of bf16 travelled
"""

import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from lowshard import DeviceMesh, Layout
from lowshard import comm as lc
from lowshard.kernels import MXFP8Tensor
from lowshard.reshard import MXFP8ReshardTransform, Refit, build_reshard_plan

WIDTHS = IN, HIDDEN, OUT = 64, 256, 32
WEIGHTS = ("0.weight", "2.weight")  # these travel as MXFP8, the biases as they are
VERSIONS, STEPS = 3, 20
X = np.random.default_rng(0).standard_normal((128, IN)).astype(np.float32)
Y = np.sin(X @ np.random.default_rng(1).standard_normal((IN, OUT)).astype(np.float32) / 4)


def trainer(folder: str) -> tuple[dict[str, Layout], dict[str, Any], Callable[[], Any]]:
    """Return the layouts of a torch model, this rank's parts, and what trains it on and gives loss and outputs."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from lowshard.interop import torch as lt

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", 2), rank=MPI.COMM_WORLD.rank, world_size=2
    )  # fmt: skip
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(IN, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, OUT))
    fully_shard(model.to(torch.bfloat16))
    rule = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = (torch.from_numpy(a).bfloat16() for a in (X, Y))
    half = slice(64 * dist.get_rank(), 64 * dist.get_rank() + 64)  # of the batch

    def train() -> Any:
        for _ in range(STEPS):
            rule.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x[half]).float(), y[half].float())
            loss.backward()
            rule.step()
        with torch.no_grad():
            found = model(x).float()
        return float(torch.nn.functional.mse_loss(found, y.float())), found.numpy()

    parts = dict(model.named_parameters())
    mine = {name: param.to_local().detach() for name, param in parts.items()}
    return {name: lt.layout(param) for name, param in parts.items()}, mine, train


def server(comm: lc.Communicator) -> tuple[dict[str, Layout], dict[str, Any], Callable[[Any], np.ndarray]]:
    """Return the layouts of a JAX model, the buffers it is served from, and what computes its outputs."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from lowshard.interop import jax as lj

    mesh = DeviceMesh((2,), ("tp",), ranks=(2, 3))  # of this job
    specs = {
        "0.weight": ((HIDDEN, IN), P("tp", None)),
        "0.bias": ((HIDDEN,), P("tp")),
        "2.weight": ((OUT, HIDDEN), P(None, "tp")),
        "2.bias": ((OUT,), P()),
    }
    layouts = {name: lj.layout(spec, shape, jnp.bfloat16, mesh=mesh) for name, (shape, spec) in specs.items()}
    buffers: dict[str, Any] = {}
    for name, layout in layouts.items():
        shape = layout.local_shape(MPI.COMM_WORLD.rank)
        if name in WEIGHTS:
            codes = np.empty(shape, np.uint8), np.empty((shape[0], shape[1] // 32), np.uint8)
            buffers[name] = MXFP8Tensor(*codes)
        else:
            buffers[name] = comm.empty(shape, "bfloat16")

    @jax.jit
    def linear(x: Any, codes: Any, scale: Any) -> Any:
        weight = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
        weight *= jnp.repeat(jnp.exp2(scale.astype(jnp.float32) - 127), 32, axis=1)
        return x @ weight.T

    def outputs(held: Any) -> np.ndarray:
        hidden = jax.nn.relu(linear(X, held["0.weight"].data, held["0.weight"].scale) + held["0.bias"])
        term = np.asarray(linear(hidden, held["2.weight"].data, held["2.weight"].scale))
        whole = np.empty_like(term)
        comm.all_reduce(term, whole)  # each server has half of the hidden units
        return whole + held["2.bias"].astype(np.float32)

    return layouts, buffers, outputs


with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
    trains = comm.rank < 2
    folder = MPI.COMM_WORLD.bcast(tempfile.mkdtemp(prefix="lowshard-example-") if comm.rank == 0 else None)
    halves = comm.split(int(trains), comm.rank)
    layouts, arrays, run = trainer(folder) if trains else server(halves)
    said = MPI.COMM_WORLD.allgather({name: layout.to_json() for name, layout in layouts.items()})
    train, serve = ({n: Layout.from_json(x) for n, x in said[rank].items()} for rank in (0, 2))
    plan = build_reshard_plan(train, serve)

    buffers = {n: a for n, a in arrays.items() if isinstance(a, MXFP8Tensor)}
    transform = MXFP8ReshardTransform(WEIGHTS, buffers, convert_on_send=True)
    mine, out = (arrays, {}) if trains else ({}, {n: a for n, a in arrays.items() if n not in buffers})
    with Refit(plan, comm, mine, out, transform) as refit:
        for version in range(1, VERSIONS + 1):
            loss, found = run() if trains else (None, None)
            report = refit.push(version) if trains else refit.pull()
            served = None if trains else run(refit.weights)
            rows = MPI.COMM_WORLD.gather(served)
            if rows:
                off = np.sqrt(
                    np.mean((rows[2] - found) ** 2) / np.mean(found**2)
                )  # what 8 bits of a weight cost
                near = bool(off < 0.05 and (rows[2] == rows[3]).all())
                print(f"version {version}: loss {loss:.2f}, outputs of JAX within 5 % of torch's: {near}")
    if comm.rank == 0:
        print(
            f"{report.sent_bytes / sum(a.nbytes for a in mine.values()):.2f} of the bytes of bf16 travelled"
        )
        shutil.rmtree(folder)
