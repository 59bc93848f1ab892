"""Cases of the communicator contract: ranks that ask for different things, and arguments that are wrong on one rank."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from support.agreement_cases import agree, equal_everywhere
from support.comm_kit import case, compared, compared_before, long, outcome, put, refused, same, told
from support.mismatch import Board, Mismatch, line_of, mismatches, wrong_arguments

from lowshard.comm import Communicator
from lowshard.comm.work import Work
from lowshard.errors import BufferMismatchError, MismatchError

HERE = Path(__file__).name


def go_on(comm: Communicator) -> None:
    """Demand that the communicator is as good as before: small, large, shared, in groups."""
    for elems in (3, long(comm)):
        buf = put(comm, np.full(elems, float(comm.rank + 1)))
        comm.all_reduce(buf, buf)
        same(buf, np.full(elems, comm.size * (comm.size + 1) / 2))
    comm.barrier()


@contextmanager
def untouched(comm: Communicator) -> Iterator[Board]:
    """Give a board; at the end nothing may have been written to it, and the communicator goes on."""
    board = Board(comm)
    yield board
    board.check()
    go_on(comm)


def check_mismatch(comm: Communicator, entry: Mismatch, odd: int, ends: tuple[str, str]) -> None:
    """Demand the error for a mismatch: its class, who asked for what and where, the same on all ranks."""
    name, text = ends
    assert name == MismatchError.__name__, f"expected MismatchError, got {name or 'no error'}: {text}"
    assert re.search(rf"rank {odd}\b", text), text
    for says, ask in ((entry.one_says, entry.one), (entry.other_says, entry.other)):
        pattern = rf"{says}[^;]* at {re.escape(line_of(ask))}\b"
        assert re.search(pattern, text), f"the text has no {pattern!r}: {text}"
    assert equal_everywhere(comm, text), f"not the same text on all ranks: {text}"


# ---- cases


@case(compared, compared_before)
def ranks_that_ask_for_different_things_are_all_told(comm: Communicator, rng: np.random.Generator) -> None:
    odds = [0, comm.size - 1]
    for i, entry in enumerate(mismatches(Board(comm))):
        odd = odds[i % 2]
        with told(mismatch=entry.name, odd=odd), untouched(comm) as board:
            # Made anew, for the board of this turn.
            entry = mismatches(board)[i]
            before = comm.traffic.sent_bytes, dict(comm.traffic.calls)
            ends = outcome(entry.other if comm.rank == odd else entry.one)
            assert before == (comm.traffic.sent_bytes, dict(comm.traffic.calls))
            check_mismatch(comm, entry, odd, ends)


@case(compared, compared_before)
def an_agreement_that_meets_a_call_is_a_mismatch(comm: Communicator, rng: np.random.Generator) -> None:
    for odd in {0, comm.size - 1}:
        for wrong in (None, BufferMismatchError("its own trouble")):
            buf = put(comm, np.ones(7, np.float32))

            def call(odd: int = odd, wrong: BufferMismatchError | None = wrong, buf: Any = buf) -> None:
                if comm.rank == odd:
                    agree(comm, b"plan of w", wrong, "execute")
                else:
                    comm.all_reduce(buf, buf)

            name, text = outcome(call)
            if wrong is None:
                assert name == MismatchError.__name__, text
                assert "execute" in text
                assert "all_reduce float32[7]" in text
            else:
                assert (name, "its own trouble" in text) == (BufferMismatchError.__name__, True), text
            assert equal_everywhere(comm, re.sub(r"call #\d+", "", text))
            same(buf, np.ones(7, np.float32))
            comm._transport.sequence += comm.rank == odd  # for the comparison of later texts alone
    go_on(comm)


@case(lambda way: way.size >= 4, compared, compared_before)
def a_mismatch_in_a_group_concerns_nobody_else(comm: Communicator, rng: np.random.Generator) -> None:
    group = comm.split(comm.rank % 2)
    assert group is not None
    for i, entry in enumerate(mismatches(Board(group))):
        if i % 4:
            continue
        with told(mismatch=entry.name), untouched(group) as board:
            entry = mismatches(board)[i]
            if comm.rank % 2:
                check_mismatch(group, entry, 0, outcome(entry.other if group.rank == 0 else entry.one))
            else:
                go_on(group)
        go_on(comm)
    group.close()


@case(compared, compared_before)
def what_is_wrong_in_itself_is_refused(comm: Communicator, rng: np.random.Generator) -> None:
    with untouched(comm) as board:
        for cls, word, wrong in wrong_arguments(board):
            refused(wrong, cls, word)


@case(compared, compared_before)
def mismatches_of_started_calls_are_told_by_each_wait(comm: Communicator, rng: np.random.Generator) -> None:
    with untouched(comm) as board:
        odd = comm.rank == comm.size - 1
        works: list[Work] = []
        for elems in (5, long(comm)):
            send, recv = board.send(elems), board.recv(elems)
            buf = put(comm, np.full(elems, 1.0))
            works += [
                comm.start.all_reduce(send, recv, "min") if odd else comm.start.all_reduce(send, recv, "max"),
                comm.start.all_reduce(buf, buf),
                comm.start.barrier() if odd else comm.start.broadcast(recv, 1),
            ]
        texts = [outcome(work.wait) for work in works]
        assert [name for name, _ in texts] == ["MismatchError", "", "MismatchError"] * 2, texts
        same(buf, np.full(elems, float(comm.size)))
        for i in (0, 2, 3, 5):  # not where the thread is, nor where it is waited for
            assert re.search(rf"rank {comm.size - 1} asked for .* at {re.escape(HERE)}:\d+", texts[i][1])
        assert equal_everywhere(comm, "".join(text for _, text in texts))
