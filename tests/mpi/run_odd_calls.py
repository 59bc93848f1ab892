"""Ranks that make odd calls, all of `support.odd_calls`; on several nodes where LOWSHARD_NODE_SIZE says so."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest
from mpi4py import MPI
from support.comm_cases import run_case
from support.odd_calls import ODD_CALLS

from lowshard import comm as lc
from lowshard.comm import large_count
from lowshard.errors import CommError

with lc.from_mpi(MPI.COMM_WORLD, device="cpu", timeout_s=30) as comm:
    for call in ODD_CALLS.values():
        call(comm)
    ways = sorted({pair["way"] for pair in comm.explain(json=True)["pairs"]})
    if comm.rank == 0:
        sys.stdout.write(f"{ways}\n{comm.explain()}\n")
    if len(comm.reach.peers) == comm.size:  # all that rank 0 may share with the others is in use
        gc.collect()
        comm.barrier()
        comm.all_gather(np.ones(1), shared=True)  # takes back what the groups before had
        sizes, kept = (256 << 20, 16 << 20, 1 << 20, 64 << 10, 4 << 10), []
        for size_bytes in sizes if comm.rank == 0 else ():
            with contextlib.suppress(CommError):
                while True:
                    kept.append(comm.empty(size_bytes, np.uint8))
        parts = np.ones(1 << 18)
        calls: list[Callable[[], object]] = [
            lambda: comm.split(0),
            lambda: comm.all_gather(parts, shared=True),
            lambda: comm.all_reduce(parts, shared=True),
            lambda: comm.broadcast(parts if comm.rank == 0 else None, shared=True),
        ]
        for attempt in calls:
            with pytest.raises(CommError, match="rank 0 can share no more memory"):
                attempt()
        kept.clear()
        for attempt in calls:
            attempt()

    large_count.MOST_ELEMS, large_count.BLOCK_BYTES = 100, 64  # these are messages of gigabytes from here on
    for name in (
        "every_collective_may_be_started",
        "a_group_exchanges_with_all_at_once_and_keeps_the_order_of_each_pair",
        "a_message_of_another_length_in_a_group_is_refused_and_leaves_nothing_behind",
    ):
        run_case(name, comm)
    ODD_CALLS["overlapping"](comm)

# A rank ends while a thread of it still waits for the others, and by itself or by MPI.Finalize.
whole = lc.from_mpi(MPI.COMM_WORLD, device="cpu", timeout_s=30)
group = whole.split(whole.rank // 2)
if group is not None and group.size == 2 and group.rank == 0:
    waits = group.start.barrier()
    with pytest.raises(TimeoutError):
        waits.wait(0.05)
if whole.size == 2:
    ones = np.ones(3, np.float32)
    whole.all_reduce(ones, ones)
    whole.all_reduce(ones, ones)
    MPI.Finalize()
    for call in (
        lambda: whole.all_reduce(ones, ones),
        lambda: whole.send_recv(ones, 1 - whole.rank, ones.copy(), 1 - whole.rank),
        lambda: whole.split(0),
        whole.start.barrier().wait,
    ):
        with pytest.raises(CommError, match="ended with MPI"):
            call()
    with pytest.raises(CommError, match=r"MPI.Init\(\)"):
        lc.from_mpi(MPI.COMM_WORLD, device="cpu")
    whole.close()
    time.sleep(0.1)  # for what waits to look around
