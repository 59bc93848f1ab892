"""What small calls cost beside mpi4py's on two ranks, in turns: prints microseconds by call as JSON."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from lowshard import comm as lc

WORLD = MPI.COMM_WORLD
ME, OTHER = WORLD.rank, 1 - WORLD.rank
TURNS, CALLS = 41, 200
BYTES, MESSAGE_BYTES = 64, 960


def pairs(comm: lc.Communicator) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Return ours and mpi4py's of each call."""
    n = BYTES // 4
    a, b, half = np.ones(n, np.float32), np.empty(n, np.float32), np.ones(n // 2, np.float32)
    sent = [np.ones(MESSAGE_BYTES, np.uint8) for _ in range(4)]
    came = [np.empty(MESSAGE_BYTES, np.uint8) for _ in range(4)]

    def grouped(k: int) -> None:
        with comm.grouped():
            for i in range(k):
                comm.send(sent[i], OTHER)
                comm.recv(came[i], OTHER)

    def started(k: int) -> None:
        works = [comm.start.send(sent[i], OTHER) for i in range(k)]
        works += [comm.start.recv(came[i], OTHER) for i in range(k)]
        for work in works:
            work.wait()

    def plain(k: int) -> None:
        MPI.Request.Waitall(
            [WORLD.Isend(sent[i], OTHER) for i in range(k)] + [WORLD.Irecv(came[i], OTHER) for i in range(k)]
        )

    return {
        "barrier": (comm.barrier, WORLD.Barrier),
        "all_reduce": (lambda: comm.all_reduce(a, b), lambda: WORLD.Allreduce(a, b)),
        "all_gather": (lambda: comm.all_gather(half, b), lambda: WORLD.Allgather(half, b)),
        "broadcast": (lambda: comm.broadcast(a), lambda: WORLD.Bcast(a)),
        "reduce_scatter": (lambda: comm.reduce_scatter(a, half), lambda: WORLD.Reduce_scatter_block(a, half)),
        "all_to_all": (lambda: comm.all_to_all(a, b), lambda: WORLD.Alltoall(a, b)),
        "grouped 1": (lambda: grouped(1), lambda: plain(1)),
        "grouped 4": (lambda: grouped(4), lambda: plain(4)),
        "started 1": (lambda: started(1), lambda: plain(1)),
        "started 4": (lambda: started(4), lambda: plain(4)),
    }


def took_us(call: Callable[[], object]) -> float:
    """Return the time of a call, the slower rank's."""
    WORLD.Barrier()
    begun_s = time.perf_counter()
    for _ in range(CALLS):
        call()
    return float(WORLD.allreduce(time.perf_counter() - begun_s, MPI.MAX)) / CALLS * 1e6


with lc.from_mpi(WORLD, "cpu") as comm:
    found = {}
    for name, both in pairs(comm).items():
        times = [[took_us(call) for call in both] for _ in range(TURNS)]
        found[name] = [statistics.median(column) for column in zip(*times, strict=True)]
    if ME == 0:
        print(json.dumps(found), flush=True)
