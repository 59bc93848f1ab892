"""Run by every rank of a job: random reshards seeded alike, then many refits, each checked.

Arguments: how many reshards, the seed, how many refits. Rank 0 prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from mpi4py import MPI
from support.reshard_cases import random_case, run_case

from lowshard import comm as lc
from lowshard.comm import Communicator
from lowshard.reshard import DimSharding, Refit, TensorLayout, build_reshard_plan


def holds() -> dict[str, int]:
    """Return what this process holds: memory, open files, mappings, threads."""
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return {
        "rss_kib": int(fields["VmRSS"].split()[0]),
        "files": len(os.listdir("/proc/self/fd")),
        "mappings": Path("/proc/self/maps").read_text().count("\n"),
        "threads": int(fields["Threads"]),
    }


def refits(comm: Communicator, count: int, shown: bool, checksums: bool) -> dict[str, object]:
    """Do many refits of a model with all ranks as sources and destinations, and say what has grown."""
    n = comm.size
    gated = DimSharding(96 * n, n, chunks=2)
    src = {
        "fc1": TensorLayout.sharded((96 * n, 64), "float32", {"tp": (n, 1)}, {0: gated}, by={0: "tp"}),
        "fc2": TensorLayout.sharded((64, 96 * n), "float32", {"tp": (n, 1)}, {1: "tp"}),
        "norm": TensorLayout.sharded((777,), "float32", {"dp": (n, 1)}),
        "rows": TensorLayout.sharded((96 * n, 64), "float32", {"tp": (n, 1)}, {0: "tp"}),  # long runs: read across
    }  # fmt: skip
    dst = {
        "fc1": TensorLayout.sharded((96 * n, 64), "float32", {"tp": (n, 1)}, {1: "tp"}),
        "fc2": TensorLayout.sharded((64, 96 * n), "float32", {"dp": (n, 1)}),
        "norm": TensorLayout.sharded((777,), "float32", {"tp": (n, 1)}, {0: "tp"}),
        "rows": TensorLayout.sharded((96 * n, 64), "float32", {"dp": (n, 1)}),
    }
    make = comm.empty if shown else np.empty
    mine = {k: make(x.local_shape(comm.rank), np.float32) for k, x in src.items()}  # type: ignore[operator]
    out = {k: np.zeros(x.local_shape(comm.rank) or (), np.float32) for k, x in dst.items()}
    before: dict[str, int] = {}
    seen: list[tuple[int, ...]] = []
    with Refit(build_reshard_plan(src, dst), comm, mine, out, checksums=checksums) as refit:
        for version in range(count):
            for array in mine.values():
                array[...] = version
            refit.push(version)
            assert refit.version == version
            assert all((a == version).all() for a in refit.weights.values())
            seen.append(tuple(a.ctypes.data for a in refit.weights.values()))
            if version == count // 5:
                before = holds()
        after = holds()
        crosses = MPI.COMM_WORLD.allreduce(any(made._mover.reads_across for made in refit._movers), MPI.LOR)
    assert set(seen) == set(seen[:2]), "addresses have changed"
    place = getattr(comm._transport, "place", None)
    may_cross = place is not None and place.memory.reads_across and comm.size > 1
    assert crosses == (may_cross and not shown and not checksums)
    return {name: after[name] - before[name] for name in before}


if __name__ == "__main__":
    count, seed, times = map(int, sys.argv[1:])
    with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
        rng = np.random.default_rng(seed)
        for number in range(count):
            case = random_case(rng, comm.size)
            node_only = (
                comm.size > 1
                and getattr(comm._transport, "place", None) is None
                and case.way in ("direct", "slots")
            )
            if node_only:
                continue
            sent = comm.traffic.sent_bytes
            moved, _ = run_case(comm, case, number % 2 == 0)
            assert moved == case.plan.sent_bytes(comm.rank)
            counted = comm.traffic.sent_bytes - sent  # messages have checksums and padding too
            assert counted >= moved
            assert (
                counted == moved or case.way == "messages" or getattr(comm._transport, "place", None) is None
            )
        ways = ((False, True), (True, False), (False, False)) if times else ()
        grown = {f"shown {shown}, checksums {sums}": refits(comm, times, shown, sums) for shown, sums in ways}
        rows = MPI.COMM_WORLD.gather(grown)
        if comm.rank == 0:
            print(json.dumps({"right": count, "ranks": comm.size, "grown": rows}))
