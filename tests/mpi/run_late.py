"""Calls on NCCL compared late over MPI ranks, with a stand-in for NCCL whose work is never done.

Usage: run_late.py [exit]. Rank 0 prints the names of the checks that held. With "exit" the program ends with calls that
are not compared, and closes nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI
from support.comm_kit import outcome, refused
from support.nccl_stand_in import World, stuck_communicator

from lowshard.comm import Communicator
from lowshard.comm.build import build_host
from lowshard.errors import MismatchError

WORLD = MPI.COMM_WORLD
N, RANK = WORLD.size, WORLD.rank
SOON_S = 10.0


def made() -> Communicator:
    return stuck_communicator(World(N), build_host(WORLD), late=True)


def a_slow_rank_holds_up_nobody() -> None:
    comm, buf = made(), np.zeros(4)
    if RANK == N - 1:
        time.sleep(1.5)
    begun = time.monotonic()
    for _ in range(500):
        comm.all_reduce(buf, buf)
    took_s = time.monotonic() - begun
    assert took_s < 1.0, took_s
    comm.barrier()
    assert RANK == N - 1 or time.monotonic() - begun > 1.0  # what waits for the others does
    comm.close()


def calls_that_differ_are_named_on_all_ranks() -> None:
    comm, buf = made(), np.zeros(4)
    for i in range(200):
        if i == 150 and RANK == N - 1:
            comm.broadcast(buf)
        else:
            comm.all_reduce(buf, buf)
    says = "call #151", f"rank {N - 1} asked for broadcast", "asked for all_reduce"
    work_says = outcome(lambda: comm.start.broadcast(buf).wait(timeout_s=60.0))
    assert work_says[0] == "MismatchError", work_says
    assert len(set(WORLD.allgather(work_says[1]))) == 1
    refused(comm.barrier, MismatchError, *says)
    assert comm._transport._handle.ended == "abort"
    comm.close()


def a_wait_finds_the_mismatch() -> None:
    comm = made()
    work = comm.start.broadcast(np.zeros(3 + (RANK == 0)))
    begun = time.monotonic()
    refused(lambda: work.wait(timeout_s=60.0), MismatchError, "call #1", r"float64\[3\]", r"float64\[4\]")
    assert time.monotonic() - begun < SOON_S
    comm.close()


CHECKS: list[Callable[[], None]] = [
    a_slow_rank_holds_up_nobody,
    calls_that_differ_are_named_on_all_ranks,
    a_wait_finds_the_mismatch,
]


def end_early() -> None:
    comm, buf = made(), np.zeros(4)
    for _ in range(1000):
        comm.all_reduce(buf, buf)
        end_s = time.perf_counter() + 1e-4
        while time.perf_counter() < end_s:
            pass
    WORLD.Barrier()


if __name__ == "__main__" and sys.argv[1:] == ["exit"]:
    end_early()
elif __name__ == "__main__":
    for check in CHECKS:
        check()
        WORLD.Barrier()
        if RANK == 0:
            print(check.__name__, flush=True)
