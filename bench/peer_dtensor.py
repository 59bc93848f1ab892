"""PyTorch's DTensor over gloo, one process a rank: `python -m lowshard.bench.peer_dtensor REQUEST`.

Each round does one redistribute, into a new result as DTensor always does, and then the floor in the same processes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from lowshard.bench.bench_transition import Transition, floor_of, transitions
from lowshard.settings import change, environment


def main() -> int:
    """Start the ranks, and wait for them."""
    request = json.loads(sys.argv[1])
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=work, args=(rank, request, os.path.join(folder, "store")))
            for rank in range(request["ranks"])
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
    size = request["ranks"]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
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
        "peer": "dtensor", "transition": transition.name, "mesh": list(transition.grid),
        "bytes": side * side * 4, "wrong_on_rank_0": wrong, "version": torch.__version__,
        "seconds": statistics.median(s for s, _ in pairs), "floor_s": statistics.median(f for _, f in pairs),
        "ratio": statistics.median(s / f for s, f in pairs),
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


if __name__ == "__main__":
    sys.exit(main())
