"""The same training by torch FSDP2 on CPU over gloo, for `lowshard bench fsdp --compare-torch`; needs torch."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from lowshard.bench.fsdp_step import reset_peak, status_mib


def worker(rank: int, world: int, request: dict[str, Any], store: str, folder: str) -> None:
    """Train on one rank and write its figures."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    base_mib = status_mib("VmRSS")
    mode, dims = request["mode"], request["dims"]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)

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
    found = {
        "rank": rank, "wall_s": statistics.median(walls), "min_wall_s": min(walls),
        "cpu_s": statistics.median(cpus), "base_mib": base_mib, "steady_mib": status_mib("VmRSS"),
        "peak_mib": status_mib("VmHWM"), "torch": torch.__version__,
    }  # fmt: skip
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main(request_file: str, folder: str) -> None:
    """Start the ranks and wait for them."""
    import torch.multiprocessing as mp

    request = json.loads(Path(request_file).read_text())
    with tempfile.TemporaryDirectory() as place:
        args = (request["ranks"], request, str(Path(place) / "store"), folder)
        mp.spawn(worker, args=args, nprocs=request["ranks"], join=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
