"""Run by the ranks of one node, each of which has other values: its cache folder or its setting says so.

Argument: "agree" runs reductions and exchanges of all sizes around the thresholds; "wrong" has the last rank's setting
be wrong. Rank 0 prints how it ended.
"""

from __future__ import annotations

import os
import sys

import numpy as np
from mpi4py import MPI

from lowshard.calibration import calibration
from lowshard.comm import from_mpi
from lowshard.errors import LowshardError

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()
KIB, MIB = 1 << 10, 1 << 20
LAST_CACHE = [64 * KIB, 1 * MIB, 8 * MIB, 1 << 40]

mine = {
    "last_cache_bytes": LAST_CACHE[RANK % 4],
    "share_past_from_bytes": 4096 << 4 * RANK,
    "pipes_from_bytes": 4096 << 3 * RANK,
}
os.environ["LOWSHARD_CALIBRATION"] = ",".join(f"{name}={size}" for name, size in mine.items())
if sys.argv[1] == "wrong" and RANK == SIZE - 1:
    os.environ["LOWSHARD_CALIBRATION"] = "last_cache_bytes=much"
os.sched_getaffinity = lambda pid: set(range(64))  # ranks that share cores are handed nothing


def outcome() -> str:
    try:
        comm = from_mpi(WORLD, "cpu", timeout_s=20)
    except LowshardError as error:
        return f"{type(error).__name__}: {error}"
    wrong = []
    assert calibration().last_cache_bytes == LAST_CACHE[RANK % 4]  # kernels of a process go by its own
    halves = comm.split(RANK % 2, RANK)
    for group in (comm, halves):
        n = group.size
        for elems in (3, 2_000, 20_001, 100_000, 1_000_003):
            for shared in (False, True):
                mine = np.arange(elems, dtype=np.float32) % 1000 + group.rank
                total = n * (np.arange(elems, dtype=np.float32) % 1000) + n * (n - 1) // 2
                make = group.empty if shared else np.empty
                send, recv, every = (
                    make(elems, np.float32),
                    make(elems, np.float32),
                    make(n * elems, np.float32),
                )
                send[...] = mine
                group.all_reduce(send, recv)
                wrong += [f"all_reduce {elems} {shared}"] if (recv != total).any() else []
                recv[...] = mine
                group.all_reduce(recv, recv)
                wrong += [f"in place {elems} {shared}"] if (recv != total).any() else []
                group.reduce(send, recv, root=n - 1)
                wrong += [f"reduce {elems} {shared}"] if group.rank == n - 1 and (recv != total).any() else []
                group.all_gather(send, every)
                expected = np.concatenate([mine - group.rank + r for r in range(n)])
                wrong += [f"all_gather {elems} {shared}"] if (every != expected).any() else []
                group.send_recv(send, (group.rank + 1) % n, recv, (group.rank - 1) % n)
                expected = mine - group.rank + (group.rank - 1) % n
                wrong += [f"send_recv {elems} {shared}"] if (recv != expected).any() else []
    halves.close()
    comm.close()
    return ", ".join(wrong) or "right"


ends = WORLD.gather(outcome(), 0)
if ends is not None:
    print("\n".join(ends))
