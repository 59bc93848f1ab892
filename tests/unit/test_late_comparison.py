"""Calls on NCCL that are compared after they were made: nobody waits, and what differs is named all the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import chain, repeat
from typing import TypeVar

import numpy as np
import pytest
from support import mode
from support.case_table import some_cases
from support.comm_cases import Way, cases_for, run_case
from support.comm_kit import refused
from support.nccl_stand_in import World, run_stand_in, stuck_communicator

from lowshard import comm as lc
from lowshard.comm import Communicator, late_comparison
from lowshard.errors import BufferMismatchError, CommError, LowshardError, MismatchError, TimedOut

T = TypeVar("T")

SOON_S = 5.0
"""Much less than the deadline of a wait, much more than the comparison takes."""


def run_stuck(
    size: int, function: Callable[[Communicator], T], timeout_s: float = 60.0, loopback_s: float = 60.0
) -> list[T]:
    """Run `function(comm)` in threads, on communicators of which no work is ever done."""
    world = World(size)

    def work(loopback: Communicator) -> T:
        return function(stuck_communicator(world, loopback, timeout_s, late=True))

    return lc.run_loopback(size, work, loopback_s)


def ended(comm: Communicator) -> str:
    assert comm.transport == "nccl"
    return str(comm._transport._handle.ended)


def told(
    call: Callable[[], object],
    cls: type[LowshardError],
    *says: str,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Check that a call raises an error soon, or after some such calls, as it comes late.

    `after` is called once before, and may raise it as well: the comparison can be done before the call it names is.
    """
    raised: list[LowshardError] = []
    end_s = time.monotonic() + SOON_S
    calls = chain([after], repeat(call))
    while not raised and time.monotonic() < end_s:
        try:
            next(calls)()
        except LowshardError as error:
            raised.append(error)
        time.sleep(0.01)
    assert [type(error) for error in raised] == [cls], raised
    assert all(text in str(raised[0]) for text in says), raised


@pytest.mark.parametrize(
    ("name", "size"),
    [
        (name, size)
        for size in mode.sample([2, 3, 4], 1, "NCCL ranks compared late")
        for name in cases_for(Way(size, "nccl", late=True), some_cases(25, "NCCL compared late"))
    ],
)
def test_the_contract_holds_where_calls_are_compared_late(name: str, size: int) -> None:
    run_stand_in(size, lambda comm: run_case(name, comm), late=True)


def test_a_rank_goes_on_while_the_others_have_not_called() -> None:
    went_on = threading.Event()

    def check(comm: Communicator) -> None:
        buf = np.zeros(4)
        if comm.rank == 1:
            assert went_on.wait(SOON_S), "rank 0 waits for rank 1"
        for _ in range(300):
            comm.all_reduce(buf, buf)
            comm.all_to_all_v(buf, [1, 1], [0, 1], np.zeros(4), [1, 1], [0, 1])
        went_on.set()
        comm.barrier()

    run_stuck(2, check)


def test_calls_that_differ_end_in_one_named_error_on_all_ranks_and_nccl_is_aborted() -> None:
    def check(comm: Communicator) -> None:
        buf = np.zeros(4)
        comm.all_reduce(buf, buf)
        says = (
            "call #2",
            "rank 0 asked for broadcast float64[4] root=0 at test_late_comparison.py:",
            "rank 1 asked for all_reduce",
        )
        told(
            lambda: comm.all_gather(np.zeros(2), np.zeros(4)),
            MismatchError,
            *says,
            after=lambda: comm.all_reduce(buf, buf) if comm.rank else comm.broadcast(buf),
        )
        assert ended(comm) == "abort"
        # Every later call and wait says it again.
        refused(comm.barrier, MismatchError, "call #2")
        refused(lambda: comm.start.broadcast(buf).wait(), MismatchError, "call #2")
        comm.close()

    run_stuck(2, check)


def test_a_wait_of_the_host_finds_the_mismatch_long_before_its_deadline() -> None:
    def check(comm: Communicator) -> None:
        begun = time.monotonic()
        refused(
            lambda: comm.start.broadcast(np.zeros(4 + comm.rank)).wait(timeout_s=60.0),
            MismatchError,
            "call #1",
            r"broadcast float64\[4\]",
            r"float64\[5\]",
        )
        assert time.monotonic() - begun < SOON_S
        assert ended(comm) == "abort"

    run_stuck(2, check)


@pytest.mark.parametrize("end", ["barrier", "split", "close", "shared"])
def test_what_waits_for_the_other_ranks_compares_first(end: str) -> None:
    def check(comm: Communicator) -> None:
        calls = {
            "barrier": comm.barrier, "split": lambda: comm.split(0), "close": comm.close,
            "shared": lambda: comm.broadcast(np.zeros(2) if comm.rank == 0 else None, shared=True),
        }  # fmt: skip

        def work() -> None:
            if comm.rank == 1:
                comm.broadcast(np.zeros(3))
            calls[end]()

        refused(
            work,
            MismatchError,
            "call #1",
            "rank 1 asked for broadcast float64",
            f"rank 0 asked for {end.replace('shared', 'broadcast')}",
        )
        assert ended(comm) == "abort"

    run_stuck(2, check)


def test_a_rank_that_stops_calling_is_named_when_the_time_is_over() -> None:
    stop = threading.Event()

    def check(comm: Communicator) -> None:
        buf = np.zeros(4)
        comm.all_reduce(buf, buf)
        if comm.rank == 1:
            stop.wait(SOON_S)
            return
        comm.broadcast(buf)
        time.sleep(0.3)
        told(
            lambda: comm._transport._nccl.ask(),
            TimedOut,
            "ranks [1] did not come",
            "this rank called broadcast float64[4]",
            "call #2",
        )
        assert ended(comm) == "abort"
        stop.set()

    run_stuck(2, check, loopback_s=0.5)


def test_counts_that_do_not_fit_are_named() -> None:
    def check(comm: Communicator) -> None:
        buf = np.zeros(8)
        comm.all_to_all_v(buf, [2, 2], [0, 4], np.zeros(8), [2, 2], [0, 4])
        counts = [3, 3 if comm.rank else 1]
        told(
            lambda: comm.broadcast(buf),
            MismatchError,
            "call #2",
            "rank 0 sends 1 elements to rank 1",
            "expects 3",
            after=lambda: comm.all_to_all_v(buf, counts, [0, 4], np.zeros(8), [3, 3], [0, 4]),
        )

    run_stuck(2, check)


def test_what_is_wrong_with_the_arguments_of_one_rank_is_raised_on_all() -> None:
    def check(comm: Communicator) -> None:
        wrong = np.zeros(8)[::2]
        if comm.rank == 1:
            refused(lambda: comm.broadcast(wrong), BufferMismatchError, "rank 1", "contiguous")
        else:
            first = np.zeros(4)
            told(
                comm.barrier, BufferMismatchError, "rank 1", "contiguous", after=lambda: comm.broadcast(first)
            )
        assert ended(comm) == "abort"

    run_stuck(2, check)


def test_what_all_ranks_do_wrong_leaves_the_communicator_as_it_is() -> None:
    def check(comm: Communicator) -> None:
        for _ in range(2):
            refused(lambda: comm.broadcast(np.zeros(8)[::2]), BufferMismatchError, "rank 0", "contiguous")
            comm.barrier()
        comm.close()
        assert ended(comm) == "destroy"

    run_stand_in(2, check, late=True)


@pytest.mark.parametrize("level", ["off", "full"])
def test_other_levels_of_checks_stay_as_they_are(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWSHARD_CHECK", level)

    def check(comm: Communicator) -> None:
        assert comm._transport._late is None
        if level == "full":
            refused(lambda: comm.broadcast(np.zeros(2 + comm.rank)), MismatchError, "call #1")
            assert not [call for call in comm._transport._handle.calls if call[0] == "broadcast"]
        else:
            comm.broadcast(np.zeros(2 + comm.rank))

    run_stuck(2, check)


def test_where_nccls_communicator_is_its_makers_the_error_says_that_it_is_not_aborted() -> None:
    world = World(2)

    def check(beside: Communicator) -> None:
        comm = stuck_communicator(world, beside, owned=False, late=True)
        told(
            comm.barrier,
            MismatchError,
            "call #1",
            "is its maker's: abort it there",
            after=lambda: comm.broadcast(np.zeros(2 + comm.rank)),
        )
        assert not ended(comm)

    lc.run_loopback(2, check)


def test_a_rank_that_is_thousands_of_calls_ahead_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_comparison, "MOST_AHEAD", 10)
    calls = [0, 0]

    def check(comm: Communicator) -> None:
        buf = np.zeros(4)
        if comm.rank == 1:
            time.sleep(0.3)
            assert calls[0] == 10
        for _ in range(30):
            comm.broadcast(buf)
            calls[comm.rank] += 1
        comm.barrier()

    run_stuck(2, check)


def test_groups_are_compared_late_too() -> None:
    def check(comm: Communicator) -> None:
        group = comm.split(comm.rank % 2)
        assert group.transport == "nccl"
        assert group._transport._late is not None
        assert group._transport._late is not comm._transport._late  # type: ignore[attr-defined]
        buf = np.full(3, float(comm.rank))
        group.all_reduce(buf, buf)
        group.barrier()
        assert buf[0] == {0: 2.0, 1: 4.0}[comm.rank % 2]
        group.close()
        comm.close()

    run_stand_in(4, check, late=True)


def test_a_host_that_fails_ends_in_an_error_not_in_silence() -> None:
    def check(comm: Communicator) -> None:
        assert comm._transport._late is not None

        def broken(signature: int) -> bool:
            raise ZeroDivisionError("broken")

        comm._transport._late._host.compare = broken  # type: ignore[method-assign]
        told(lambda: comm.broadcast(np.zeros(2)), CommError, "could not be compared", "ZeroDivisionError")

    run_stuck(2, check)
