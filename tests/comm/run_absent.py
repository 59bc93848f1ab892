"""Ranks of which one does not call: the others are told so in time, and by its number.

Usage: run_absent.py late|gone|making. "late": rank 1 lives on and stays away from one call after the other, each on a
communicator of its own. "gone": rank 1 ends its program, as if it were done. Rank 0 prints a line of JSON a call: how
it ended on the ranks that were there. "making RANKS LATE_S TIMEOUT_S": these ranks come that much later than the others
to make a communicator; each rank prints a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI
from support.comm_kit import outcome

from lowshard import comm as lc
from lowshard.errors import CommError

WORLD = MPI.COMM_WORLD
ABSENT = 1
LATE_S, ASLEEP_S, GONE_S = 0.6, 2.0, 20.0


def calls(comm: lc.Communicator) -> dict[str, Callable[[], Any]]:
    """Return calls by name."""
    small, large = np.zeros(6), np.zeros(60_000)
    whole = np.zeros(6 * comm.size)
    counts, displs = [2] * comm.size, [0] * comm.size
    return {
        "all_reduce": lambda: comm.all_reduce(small, small),
        "large all_reduce": lambda: comm.all_reduce(large, large),
        "all_gather": lambda: comm.all_gather(small, whole),
        "broadcast": lambda: comm.broadcast(large, ABSENT),
        "all_to_all_v": lambda: comm.all_to_all_v(
            small, counts, displs, whole, counts, [2 * i for i in range(comm.size)]
        ),
        "barrier": lambda: comm.barrier(),
        "split": lambda: comm.split(0),
        "started": lambda: comm.start.all_reduce(small, small).wait(),
        "recv": lambda: comm.recv(small, ABSENT),
        "large send": lambda: comm.send(large, ABSENT),
        "grouped": lambda: grouped(comm, large),
        "many small sends": lambda: many_sends(comm, small),
    }


def many_sends(comm: lc.Communicator, buf: np.ndarray) -> None:
    for _ in range(300):
        comm.send(buf, ABSENT)


def grouped(comm: lc.Communicator, buf: np.ndarray) -> None:
    with comm.grouped():
        comm.send(buf, ABSENT)
        comm.recv(buf.copy(), ABSENT)


def late() -> None:
    for name in calls(lc.from_mpi(WORLD, "cpu")):
        comm = lc.from_mpi(WORLD, "cpu", timeout_s=LATE_S)
        ends: tuple[Any, ...] = ("", "", 0.0, "")
        WORLD.Barrier()
        if comm.rank == ABSENT and name == "many small sends":
            time.sleep(ASLEEP_S)  # outside MPI, which would take messages that nobody asks for
        if comm.rank != ABSENT:
            begun_s = time.monotonic()
            ends = (*outcome(calls(comm)[name]), time.monotonic() - begun_s)
            ends = (*ends, outcome(lambda comm=comm: comm.barrier())[0])  # type: ignore[misc]
        rows = WORLD.gather(ends, 0)
        if rows is not None:
            print(json.dumps([name, [row for rank, row in enumerate(rows) if rank != ABSENT]]), flush=True)
    WORLD.Barrier()
    os._exit(0)  # there are messages of ours that nobody takes any more


def gone() -> None:
    comm = lc.from_mpi(WORLD, "cpu", timeout_s=GONE_S)
    if comm.rank == ABSENT:
        return
    begun_s = time.monotonic()
    try:
        comm.barrier()
    except CommError as error:
        took_s = time.monotonic() - begun_s
        if comm.rank == 0:
            print(json.dumps(["barrier", [[type(error).__name__, str(error), took_s, ""]]]), flush=True)
        raise


def making() -> None:
    late, late_s, timeout_s = sys.argv[2].split(","), float(sys.argv[3]), float(sys.argv[4])
    WORLD.Barrier()
    begun_s = time.monotonic()
    if str(WORLD.rank) in late:
        time.sleep(late_s)
    name, text = outcome(lambda: lc.from_mpi(WORLD, "cpu", timeout_s=timeout_s).barrier())
    took_s = time.monotonic() - begun_s
    left = WORLD.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
    print(json.dumps([WORLD.rank, name, text, took_s, left]), flush=True)
    if name:
        time.sleep(2.0)  # until the others have printed theirs
        os._exit(0)


if __name__ == "__main__":
    {"late": late, "gone": gone, "making": making}[sys.argv[1]]()
