"""What torch does over gloo, one process a rank: `python -m lowshard.bench.rival_torch REQUEST`; needs torch.

"redistribute": DTensor, a redistribute a round into a new result, as it always does, and then the floor. "fsdp": the
training of `bench fsdp` by FSDP2, or by DDP. Rank 0 prints a JSON object a line.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from lowshard.bench.bench_fsdp import reset_peak, status_mib
from lowshard.bench.bench_transition import Transition, floor_of, transitions
from lowshard.settings import change, environment


def main() -> int:
    """Start the ranks, and wait for them."""
    request = json.loads(sys.argv[1])
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = [
            context.Process(target=work, args=(rank, request, store)) for rank in range(request["ranks"])
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


def work(rank: int, request: Any, store: str) -> None:
    """Measure on one rank; rank 0 prints."""
    import torch
    import torch.distributed as dist

    change("GLOO_SOCKET_IFNAME", environment().get("GLOO_SOCKET_IFNAME", "lo"))
    torch.set_num_threads(1)
    base_mib = status_mib("VmRSS")
    size = request["ranks"]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    if request["what"] == "fsdp":
        every: list[Any] = [None] * size
        dist.all_gather_object(every, _train(size, request) | {"base_mib": base_mib})
        if rank == 0:
            print(json.dumps({"ranks": every}), flush=True)
    else:
        meshes: dict[tuple[int, ...], Any] = {}
        for size_bytes in request["sizes"]:
            for transition in transitions(request["names"], size, size_bytes):
                row = _measure(transition, rank, size, request["rounds"], meshes)
                if rank == 0:
                    print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def _measure(
    transition: Transition, rank: int, size: int, rounds: int, meshes: dict[tuple[int, ...], Any]
) -> dict[str, Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    def placed(words: tuple[str, ...]) -> list[Any]:
        kinds = {"R": Replicate, "P": Partial}
        return [kinds[w]() if w in kinds else Shard(int(w[1:])) for w in words]

    if transition.grid not in meshes:
        meshes[transition.grid] = init_device_mesh("cpu", transition.grid)
    before, after = transition.placements
    local = torch.from_numpy(transition.value(transition.src.box(rank)))
    side = transition.side
    whole = DTensor.from_local(
        local, meshes[transition.grid], placed(before), run_check=False, shape=torch.Size((side, side)),
        stride=(side, 1),
    )  # fmt: skip
    wanted = transition.value(transition.dst.box(rank), transition.terms)
    target = placed(after)

    def move() -> Any:
        return whole.redistribute(placements=target).to_local()

    wrong = int(np.count_nonzero(move().numpy() != wanted))
    floor = floor_of(transition, wanted.size)
    pairs = [(_wall_s(move, size), _wall_s(floor, size)) for _ in range(rounds)]
    return {
        "wrong": wrong, "version": torch.__version__,
        "seconds": [own for own, _ in pairs], "floor_s": [least for _, least in pairs],
    }  # fmt: skip


def _wall_s(action: Callable[[], object], size: int) -> float:
    import torch
    import torch.distributed as dist

    dist.barrier()
    begin_s = time.perf_counter()
    made = action()
    span = torch.tensor([begin_s, time.perf_counter()], dtype=torch.float64)
    del made
    every = [torch.zeros(2, dtype=torch.float64) for _ in range(size)]
    dist.all_gather(every, span)
    return max(float(e[1]) for e in every) - min(float(e[0]) for e in every)


def _train(world: int, request: Any) -> dict[str, Any]:
    """Train, and return the figures of this rank."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mode, dims = request["mode"], request["dims"]

    def layers() -> nn.Sequential:
        made: list[nn.Module] = []
        for i, (into, out) in enumerate(pairwise(dims)):
            linear: nn.Module = nn.Linear(into, out)
            last = i == len(dims) - 2
            made.append(linear if last else nn.Sequential(linear, nn.GELU(approximate="tanh")))
        return nn.Sequential(*made)

    torch.manual_seed(0)
    if mode == "none":
        model: nn.Module = nn.parallel.DistributedDataParallel(layers())
    else:
        with torch.device("meta"):
            model = layers()
        replicas = world // request["intra"]
        mesh = (
            init_device_mesh("cpu", (replicas, request["intra"]), mesh_dim_names=("replica", "shard"))
            if mode == "hybrid"
            else init_device_mesh("cpu", (world,))
        )
        keep = mode in ("sgo", "sgo-replicated")
        for child in model.children():
            fully_shard(child, mesh=mesh, reshard_after_forward=not keep)
        fully_shard(model, mesh=mesh, reshard_after_forward=not keep)
        model.to_empty(device="cpu")
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    walls, cpus = [], []
    for step in range(request["warmup"] + request["steps"]):
        if step == request["warmup"]:
            reset_peak()
        x, y = torch.randn(request["batch"], dims[0]), torch.randn(request["batch"], dims[-1])
        dist.barrier()
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.barrier()
        if step >= request["warmup"]:
            walls.append(time.perf_counter() - began_s)
            cpus.append(time.process_time() - began_cpu_s)
    return {
        "walls_s": walls, "cpus_s": cpus, "peak_mib": status_mib("VmHWM"), "torch": torch.__version__,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
