"""Cases of the communicator contract: ranks that ask for different things, arguments that are wrong on one rank, and
agreements: all ranks raise one error, or none does."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from support.comm_kit import (
    LONG,
    case,
    compared,
    compared_before,
    equal_everywhere,
    outcome,
    put,
    refused,
    same,
    told,
)
from support.mismatch import Board, Mismatch, line_of, mismatches, wrong_arguments

from lowshard import errors
from lowshard.comm import Communicator, collective_step
from lowshard.comm.agreement import share, share_text
from lowshard.comm.work import Work
from lowshard.errors import BufferMismatchError, LowshardError, MismatchError

HERE = Path(__file__).name


def agree(comm: Communicator, digest: bytes, error: Exception | None, what: str) -> None:
    """Meet with a digest, or an error that the block raises."""
    with collective_step(comm, what) as step:
        step.digest = digest
        if error is not None:
            raise error


def go_on(comm: Communicator) -> None:
    """Demand that the communicator is as good as before: small, large, shared, in groups."""
    for elems in (3, LONG):
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
        for elems in (5, LONG):
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


@case()
def agreement_passes_where_all_agree(comm: Communicator, rng: np.random.Generator) -> None:
    for digest in (b"", b"short", bytes(range(16)), bytes(range(16)) + b"what follows does not count"):
        agree(comm, digest, None, "this call")
    tail = bytes(range(16)) + bytes([comm.rank])
    agree(comm, tail, None, "this call")


@case()
def an_error_of_any_rank_is_raised_on_all(comm: Communicator, rng: np.random.Generator) -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, LowshardError)]
    for i, cls in enumerate(classes):
        bad = i % comm.size
        with told(cls=cls.__name__, rank=bad):
            error = (
                cls(f"the rule; rank {comm.rank} \N{RIGHTWARDS ARROW} wrong") if comm.rank == bad else None
            )
            name, text = outcome(lambda error=error: agree(comm, b"same", error, "plan of w"))
            assert name == cls.__name__
            assert text == f"plan of w: rank {bad}: the rule; rank {bad} \N{RIGHTWARDS ARROW} wrong"
            assert equal_everywhere(comm, name + text)
    agree(comm, b"same", None, "the next call")


@case()
def of_several_errors_the_lowest_ranks_is_raised_on_all(comm: Communicator, rng: np.random.Generator) -> None:
    bad = sorted(int(r) for r in rng.permutation(comm.size)[: max(1, comm.size - 1)])
    kinds = [errors.PlanError, errors.BufferMismatchError, errors.MeshError]
    error = kinds[comm.rank % 3](f"from {comm.rank}" * (comm.rank + 1)) if comm.rank in bad else None
    # Digests differ too; the error is the better news.
    name, text = outcome(lambda: agree(comm, bytes([comm.rank]), error, "fill"))
    assert name == kinds[bad[0] % 3].__name__
    assert text == f"fill: rank {bad[0]}: " + f"from {bad[0]}" * (bad[0] + 1)
    assert equal_everywhere(comm, name + text)


@case()
def an_error_of_no_class_of_ours_becomes_a_lowshard_error(
    comm: Communicator, rng: np.random.Generator
) -> None:
    class OwnError(errors.PlanError):
        pass

    last = comm.size - 1
    for error in (ValueError("no such dim"), KeyError("w"), OwnError("mine"), RuntimeError("")):
        with told(error=repr(error)):
            mine = error if comm.rank == last else None
            name, text = outcome(lambda mine=mine: agree(comm, b"", mine, "load"))
            assert name == "LowshardError"
            assert text == f"load: rank {last}: {type(error).__name__}: {error}"
            assert equal_everywhere(comm, name + text)


@case()
def different_digests_are_a_mismatch_on_all(comm: Communicator, rng: np.random.Generator) -> None:
    if comm.size == 1:
        return
    for odd in range(comm.size):
        with told(odd=odd):
            digest = hashlib.sha256(b"other" if comm.rank == odd else b"one").digest()
            name, text = outcome(lambda digest=digest: agree(comm, digest, None, "execute"))
            assert name == MismatchError.__name__
            assert text.startswith("execute: ")
            assert f"[{odd}]" in text
            assert str([r for r in range(comm.size) if r != odd]) in text
            assert equal_everywhere(comm, name + text)
    # The last byte that counts, and a digest that differs from a shorter one by a zero byte only.
    name, _ = outcome(lambda: agree(comm, bytes(15) + bytes([comm.rank]), None, "x"))
    assert name == MismatchError.__name__


@case()
def records_and_texts_are_shared_in_rank_order(comm: Communicator, rng: np.random.Generator) -> None:
    control = comm.control
    rows = share(control, np.array([comm.rank, -comm.rank]))
    assert [list(map(int, row)) for row in rows] == [[r, -r] for r in range(comm.size)]
    texts = ["", "a\0", "\N{GREEK SMALL LETTER ALPHA}" * 40, "x" * 5000]
    for first in range(4):
        said = share_text(control, texts[(comm.rank + first) % 4])
        assert said == [texts[(r + first) % 4] for r in range(comm.size)]
    assert share_text(control, "") == [""] * comm.size


@case()
def control_is_over_host_memory_and_the_same_ranks(comm: Communicator, rng: np.random.Generator) -> None:
    control = comm.control
    assert (control.rank, control.size) == (comm.rank, comm.size)
    if comm.xp is np and comm.transport not in ("nccl", "staged"):
        assert control is comm
