"""Run by the ranks of one node, to each of which the system tells another cache: reductions and exchanges of all sizes
around the thresholds. Rank 0 prints how it ended.
"""

from __future__ import annotations

import os

import numpy as np
from mpi4py import MPI

from lowshard.comm import from_mpi
from lowshard.comm.node import node_memory
from lowshard.errors import LowshardError

WORLD = MPI.COMM_WORLD
RANK = WORLD.Get_rank()
KIB, MIB = 1 << 10, 1 << 20

node_memory.cached_result_bytes = lambda: [64 * KIB, 1 * MIB, 8 * MIB, 1 << 40][RANK]
os.sched_getaffinity = lambda pid: set(range(64))  # ranks that share cores are handed nothing


def outcome() -> str:
    try:
        comm = from_mpi(WORLD, "cpu", timeout_s=20)
    except LowshardError as error:
        return f"{type(error).__name__}: {error}"
    wrong = []
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
