"""Calls on NCCL that are compared after they were made: nobody waits, and what differs is named all the same.

NCCL stands still here: it does nothing, as where the calls of ranks differ, until it is aborted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.comm_kit import outcome, refused
from support.gpu import Answers, on_gpu, recorded, run_nccl
from support.starting import start_ranks

from lowshard.comm import Communicator
from lowshard.errors import MismatchError

SOON_S = 5.0
"""Much less than the deadline of a wait, much more than the comparison takes."""


def run_still(check: Callable[[Communicator], object], **options: Any) -> None:
    """Run a check on two ranks over an NCCL that does nothing."""
    run_nccl(2, check, still=True, **{"late": True, **options})


def zeros(comm: Communicator, elems: int = 4) -> Any:
    return on_gpu(comm, np.zeros(elems))


def told(call: Callable[[], object], cls: str, *says: str, first: Callable[[], object] | None = None) -> None:
    """Check that a call raises an error soon, or after some such calls, as it comes late; or `first`, which is called
    before: the comparison can be done before the call it names is."""
    found, end_s = outcome(first or call), time.monotonic() + SOON_S
    while not found[0] and time.monotonic() < end_s:
        time.sleep(0.01)
        found = outcome(call)
    assert found[0] == cls, found
    assert all(text in found[1] for text in says), found


def test_a_rank_goes_on_while_the_others_have_not_called() -> None:
    went_on = threading.Event()

    def check(comm: Communicator) -> None:
        buf, other = zeros(comm), zeros(comm)
        if comm.rank == 1:
            assert went_on.wait(SOON_S), "rank 0 waits for rank 1"
        for _ in range(100):
            comm.all_reduce(buf, buf)
            comm.all_to_all_v(buf, [1, 1], [0, 1], other, [1, 1], [0, 1])
        went_on.set()
        comm.barrier()

    run_still(check)


def test_calls_that_differ_end_in_one_named_error_on_all_ranks_and_nccl_is_aborted() -> None:
    def check(comm: Communicator) -> None:
        buf = zeros(comm)
        comm.all_reduce(buf, buf)
        told(
            lambda: comm.all_gather(buf[:2], zeros(comm)), "MismatchError",
            "call #2", "rank 0 asked for broadcast float64[4] root=0 at test_late.py:", "rank 1 asked for all_reduce",
            first=lambda: comm.all_reduce(buf, buf) if comm.rank else comm.broadcast(buf),
        )  # fmt: skip
        assert recorded(comm).ended == "abort"
        # Every later call and wait says it again.
        refused(comm.barrier, MismatchError, "call #2")
        refused(lambda: comm.start.broadcast(buf).wait(), MismatchError, "call #2")

    run_still(check)


@pytest.mark.whole
@pytest.mark.parametrize("end", ["wait", "barrier", "split", "close", "shared"])
def test_what_waits_for_the_other_ranks_compares_first(end: str, answers: Answers) -> None:
    """A wait of the host finds the mismatch long before its deadline."""

    def check(comm: Communicator) -> None:
        calls: dict[str, Callable[[], object]] = {
            "barrier": comm.barrier, "split": lambda: comm.split(0), "close": comm.close,
            "shared": lambda: comm.broadcast(zeros(comm) if comm.rank == 0 else None, shared=True),
            "wait": lambda: comm.start.broadcast(buf).wait(timeout_s=60.0),
        }  # fmt: skip
        buf, begun = zeros(comm, 3 + comm.rank), time.monotonic()
        comm.control.barrier()

        def work() -> None:
            if end == "wait":
                answers.status = Answers.NEVER
            elif comm.rank == 1:
                comm.broadcast(buf)
            calls[end]()

        asked = "broadcast" if end in ("shared", "wait") else end
        refused(work, MismatchError, "call #1", r"1 asked for broadcast float64\[4\]", f"0 asked for {asked}")
        assert time.monotonic() - begun < SOON_S
        assert recorded(comm).ended == "abort"

    run_still(check)


def test_a_rank_that_stops_calling_is_named_when_the_time_is_over() -> None:
    stop = threading.Event()

    def check(comm: Communicator) -> None:
        buf, nccl = zeros(comm), comm._transport._nccl  # type: ignore[attr-defined]
        comm.all_reduce(buf, buf)
        if comm.rank == 1:
            stop.wait(SOON_S)
            nccl.failed = True  # no destroy beside an abort
            return
        comm.broadcast(buf)
        time.sleep(0.3)
        told(
            nccl.ask, "TimedOut", "ranks [1] did not come", "this rank called broadcast float64[4]", "call #2"
        )
        assert recorded(comm).ended == "abort"
        stop.set()

    run_still(check, timeout_s=0.5)


EARLY_END = """
import time
from mpi4py import MPI
from support.checked_gpu import checked_gpu
from support.gpu import Recorded, has_gpu
has_gpu() or checked_gpu().__enter__()
from lowshard.comm.build import build_host
from lowshard.comm.nccl import nccl_communicator
from lowshard.comm.nccl_bindings import Binding
nccl, world = Binding.load().nccl, MPI.COMM_WORLD
still = Recorded(nccl.NcclCommunicator(1, nccl.get_unique_id(), 0), still=True)
still.rank_id, still.size = lambda: world.rank, lambda: 2
comm = nccl_communicator(still, world.rank, 2, build_host(world), late=True)
buf = comm.xp.zeros(4)
for _ in range(1000):
    comm.all_reduce(buf, buf)
    end_s = time.perf_counter() + 1e-4
    while time.perf_counter() < end_s:
        pass
world.Barrier()
"""


@pytest.mark.mpi
@pytest.mark.full_only
def test_a_program_may_end_with_calls_that_are_not_compared(tmp_path: Path) -> None:
    (tmp_path / "early_end.py").write_text(EARLY_END)
    for _ in range(6):  # without care for its threads, every third such end was a crash
        start_ranks(tmp_path / "early_end.py", 2, timeout_s=80).ok()
