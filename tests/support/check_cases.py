"""Cases of the communicator contract: ranks that ask for different things, and arguments that are wrong on one rank."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from support.agreement_cases import equal_everywhere
from support.comm_kit import case, compared, compared_before, outcome, put, same, told
from support.every_call import long
from support.mismatch import Board, Mismatch, line_of, mismatches, wrong_arguments

from lowshard.comm import Communicator, agree
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
    others = [rank for rank in range(comm.size) if rank != odd]
    group = f"ranks? {', '.join(map(str, others))}"
    for who, says, ask in (
        (group, entry.one_says, entry.one),
        (f"rank {odd}", entry.other_says, entry.other),
    ):
        pattern = rf"\b{who} asked for [^;]*{says}[^;]* at {re.escape(line_of(ask))}\b"
        if entry.pair_says:
            lines = {"one": re.escape(line_of(entry.one)), "other": re.escape(line_of(entry.other))}
            pattern = entry.pair_says.format(odd=odd, **lines)
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
            entry = list(mismatches(board))[i]
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
            assert name == MismatchError.__name__, text
            assert "execute" in text
            assert "all_reduce float32[7]" in text
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
            entry = list(mismatches(board))[i]
            if comm.rank % 2:
                check_mismatch(group, entry, 0, outcome(entry.other if group.rank == 0 else entry.one))
            else:
                go_on(group)
        go_on(comm)
    group.close()


@case(compared, compared_before)
def many_mismatches_in_a_row_cost_nothing_for_good(comm: Communicator, rng: np.random.Generator) -> None:
    large = 16 << 20  # of which no page is touched
    send = put(comm, np.zeros(large, np.int8))

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:lowshard") if comm.xp is np else 0

    def ask(turns: int) -> None:
        for turn in range(turns):
            odd = turn % comm.size == comm.rank
            op = "max" if odd else "min"
            name, _ = outcome(lambda op=op: comm.all_reduce(send, op=op, shared=True))  # type: ignore[misc]
            assert name == MismatchError.__name__
        go_on(comm)

    ask(6)  # what one needs at a time
    before = mapped()
    ask(60)  # 960 MiB of results that were never made
    assert mapped() <= before + 1, f"{mapped() - before} more segments of shared memory than before"


@case(compared, compared_before)
def what_is_wrong_on_one_rank_is_raised_on_all(comm: Communicator, rng: np.random.Generator) -> None:
    for i in range(len(wrong_arguments(Board(comm)))):
        odd = i % comm.size
        with untouched(comm) as board:
            name, cls, pattern, right, wrong = wrong_arguments(board)[i]
            with told(wrong=name, odd=odd):
                ends = outcome(wrong if comm.rank == odd else right)
                assert ends[0] == cls.__name__, f"expected {cls.__name__}, got {ends}"
                assert re.search(rf"^rank {odd}: .*{pattern}", ends[1]), ends[1]
                assert equal_everywhere(comm, "".join(ends)), f"not the same text on all ranks: {ends[1]}"
    # Everything that counts calls on each rank is in step still.
    group = comm.split(0)
    assert group is not None
    go_on(group)
    group.close()
    for i, entry in enumerate(mismatches(Board(comm))):
        if i < 3:
            check_mismatch(comm, entry, 0, outcome(entry.other if comm.rank == 0 else entry.one))


@case(compared, compared_before)
def of_two_ranks_that_are_wrong_the_lowest_is_told(comm: Communicator, rng: np.random.Generator) -> None:
    with untouched(comm) as board:
        send, recv = board.send(4), board.recv(4)
        if comm.rank == comm.size - 1:
            ends = outcome(lambda: comm.all_reduce(send, board.recv(3)))
        elif comm.rank == comm.size - 2:
            ends = outcome(lambda: comm.all_reduce(send, board.recv(4, np.int64)))
        else:
            ends = outcome(lambda: comm.all_reduce(send, recv))
        assert ends[0] == BufferMismatchError.__name__, ends
        assert ends[1].startswith(f"rank {comm.size - 2}: send and recv have one dtype"), ends[1]
        assert equal_everywhere(comm, "".join(ends))


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
        for i in (0, 2, 3, 5):
            assert re.search(rf"rank {comm.size - 1} asked for .* at {re.escape(HERE)}:\d+", texts[i][1]), (
                texts[i]
            )
        # Not where the thread is, nor where it is waited for.
        lines = [line for i in (0, 2) for line in re.findall(rf"{re.escape(HERE)}:(\d+)", texts[i][1])]
        first = mismatches_of_started_calls_are_told_by_each_wait.__code__.co_firstlineno
        assert {int(line) - first for line in lines} <= set(range(9, 13)), (first, lines)
        assert equal_everywhere(comm, "".join(text for _, text in texts))
