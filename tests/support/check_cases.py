"""Cases of the communicator contract: ranks that ask for different things, and arguments that are wrong on one rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from support.agreement_cases import equal_everywhere
from support.comm_kit import CannotRun, Canvas, case, outcome, put, same, told
from support.every_call import long, starts

from lowshard.comm import Communicator
from lowshard.comm.work import Work
from lowshard.errors import (
    BufferMismatchError,
    CommError,
    DTypeError,
    LowshardError,
    MismatchError,
)

Array = Any
Ask = Callable[[], object]

HERE = Path(__file__).name


def compared(comm: Communicator) -> None:
    """Say where ranks do not compare what they ask for."""
    if comm.size == 1:
        raise CannotRun("one rank agrees with itself")
    if comm._check == "off":
        raise CannotRun("ranks do not compare what they ask for here")


def line_of(ask: Ask) -> str:
    """Return file and line where a lambda of this module is, as errors name it."""
    return f"{HERE}:{ask.__code__.co_firstlineno}"  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Mismatch:
    """Two calls that do not go together.

    Attributes:
        name: what differs.
        one: what most ranks ask for.
        other: what the odd rank asks for.
        one_says: patterns of the first call in the error.
        other_says: patterns of the second one.
    """

    name: str
    one: Ask
    other: Ask
    one_says: str
    other_says: str


class Board:
    """Buffers with canaries that no call may have touched."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._canvases: list[Canvas] = []

    def recv(self, elems: int, dtype: Any = np.float64) -> Array:
        """Return a buffer for a result."""
        canvas = Canvas(self.comm, elems, np.dtype(dtype))
        self._canvases.append(canvas)
        return canvas.buf

    def send(self, elems: int, dtype: Any = np.float64) -> Array:
        """Return a buffer to be sent."""
        return put(self.comm, np.zeros(elems, dtype))

    def check(self) -> None:
        """Demand that nothing was written."""
        for canvas in self._canvases:
            canvas.check(Canvas.blank(canvas.buf.size, canvas.buf.dtype))


def mismatches(board: Board) -> Iterable[Mismatch]:
    """Yield the ways in which one rank may differ; each call stands on a line of its own."""
    comm, n, big = board.comm, board.comm.size, long(board.comm)
    send, recv = board.send, board.recv

    def mismatch(name: str, one: Ask, one_says: str, other: Ask, other_says: str) -> Mismatch:
        return Mismatch(name, one, other, one_says, other_says)

    for few, more in ((5, 6), (big, big + 1), (5, big), (0, 1)):
        yield mismatch(
            f"all_reduce counts {few} {more}",
            lambda few=few: comm.all_reduce(send(few), recv(few)),
            rf"all_reduce float64\[{few}\]",
            lambda more=more: comm.all_reduce(send(more), recv(more)),
            rf"all_reduce float64\[{more}\]",
        )
        yield mismatch(
            f"all_gather counts {few} {more}",
            lambda few=few: comm.all_gather(send(few), recv(few * n)),
            rf"all_gather float64\[{few}\]",
            lambda more=more: comm.all_gather(send(more), recv(more * n)),
            rf"all_gather float64\[{more}\]",
        )
    for elems in (5, big):
        yield mismatch(
            "float64 against int64",
            lambda elems=elems: comm.all_reduce(send(elems), recv(elems)),
            "float64",
            lambda elems=elems: comm.all_reduce(send(elems, np.int64), recv(elems, np.int64)),
            "int64",
        )
        yield mismatch(
            "float64 against float32",
            lambda elems=elems: comm.broadcast(recv(elems), 1),
            "float64",
            lambda elems=elems: comm.broadcast(recv(elems, np.float32), 1),
            "float32",
        )
        yield mismatch(
            "sum against max",
            lambda elems=elems: comm.all_reduce(send(elems), recv(elems), "sum"),
            "sum",
            lambda elems=elems: comm.all_reduce(send(elems), recv(elems), "max"),
            "max",
        )
        yield mismatch(
            "fast against tree",
            lambda elems=elems: comm.reduce_scatter(send(elems * n), recv(elems)),
            "fast",
            lambda elems=elems: comm.reduce_scatter(send(elems * n), recv(elems), order="tree"),
            "tree",
        )
        yield mismatch(
            "roots of a broadcast",
            lambda elems=elems: comm.broadcast(recv(elems), 0),
            "root=0",
            lambda elems=elems: comm.broadcast(recv(elems), 1),
            "root=1",
        )
        yield mismatch(
            "roots of a reduce",
            lambda elems=elems: comm.reduce(send(elems), recv(elems), root=0),
            "root=0",
            lambda elems=elems: comm.reduce(send(elems), recv(elems), root=1),
            "root=1",
        )
        yield mismatch(
            "all_reduce against all_gather",
            lambda elems=elems: comm.all_reduce(send(elems), recv(elems)),
            "all_reduce",
            lambda elems=elems: comm.all_gather(send(elems), recv(elems * n)),
            "all_gather",
        )
        yield mismatch(
            "gather against scatter",
            lambda elems=elems: comm.gather(send(elems), recv(elems * n)),
            "gather",
            lambda elems=elems: comm.scatter(send(elems * n), recv(elems)),
            "scatter",
        )
        yield mismatch(
            "all_reduce against barrier",
            lambda elems=elems: comm.all_reduce(send(elems), recv(elems)),
            "all_reduce",
            lambda: comm.barrier(),
            "barrier",
        )
        yield mismatch(
            "all_reduce against split",
            lambda elems=elems: comm.all_reduce(send(elems), recv(elems)),
            "all_reduce",
            lambda: comm.split(0),
            "split",
        )
        yield mismatch(
            "all_gather_v counts",
            lambda elems=elems: comm.all_gather_v(send(elems), recv(elems * n), [elems] * n, starts([elems] * n)),
            rf"recv_counts=\[{elems}, {elems}",
            lambda elems=elems: comm.all_gather_v(send(elems), recv(elems * n), *one_more(comm, elems)),
            rf"recv_counts=\[.*{elems - 1}",
        )  # fmt: skip
        yield mismatch(
            "all_to_all_v counts",
            lambda elems=elems: comm.all_to_all_v(*even(board, elems), *even(board, elems, True)),
            "all_to_all_v",
            lambda elems=elems: comm.all_to_all_v(*even(board, elems), *expecting_less(board, elems)),
            rf"recv_counts=\[.*{elems - 1}",
        )
        yield mismatch(
            "all_to_all counts",
            lambda elems=elems: comm.all_to_all(send(elems * n), recv(elems * n)),
            rf"float64\[{elems * n}\]",
            lambda elems=elems: comm.all_to_all(send(elems * n + n), recv(elems * n + n)),
            rf"float64\[{elems * n + n}\]",
        )
        yield mismatch(
            "shared or not",
            lambda elems=elems: comm.all_reduce(send(elems), recv(elems)),
            "all_reduce float64",
            lambda elems=elems: comm.all_reduce(send(elems), shared=True),
            "all_reduce shared",
        )
        yield mismatch(
            "shared counts",
            lambda elems=elems: comm.all_gather(send(elems), shared=True),
            rf"all_gather shared float64\[{elems}\]",
            lambda elems=elems: comm.all_gather(send(elems + 1), shared=True),
            rf"all_gather shared float64\[{elems + 1}\]",
        )
        yield mismatch(
            "shared ops",
            lambda elems=elems: comm.all_reduce(send(elems), op="min", shared=True),
            "min",
            lambda elems=elems: comm.all_reduce(send(elems), op="avg", shared=True),
            "avg",
        )
    yield mismatch(
        "shared roots",
        lambda: comm.broadcast(send(5), 0, shared=True),
        "root=0",
        lambda: comm.broadcast(send(5), 1, shared=True),
        "root=1",
    )
    yield mismatch(
        "shared all_reduce against split",
        lambda: comm.all_reduce(send(5), shared=True),
        "all_reduce shared",
        lambda: comm.split(1),
        "split",
    )


def one_more(comm: Communicator, elems: int) -> tuple[list[int], list[int]]:
    """Return counts and places in which another rank's part is shorter, and this one's is as it was."""
    counts = [elems] * comm.size
    counts[(comm.rank + 1) % comm.size] = elems - 1
    return counts, starts(counts)


def even(board: Board, elems: int, recv: bool = False) -> tuple[Array, list[int], list[int]]:
    """Return one side of an exchange of equal parts."""
    n = board.comm.size
    make = board.recv if recv else board.send
    return make(elems * n), [elems] * n, starts([elems] * n)


def expecting_less(board: Board, elems: int) -> tuple[Array, list[int], list[int]]:
    """Return the receiving side of an exchange in which one part is expected to be shorter than it is."""
    counts, displs = one_more(board.comm, elems)
    return board.recv(elems * board.comm.size), counts, displs


def go_on(comm: Communicator) -> None:
    """Demand that the communicator is as good as before: small, large, shared, in groups."""
    for elems in (3, long(comm)):
        buf = put(comm, np.full(elems, float(comm.rank + 1)))
        comm.all_reduce(buf, buf)
        same(buf, np.full(elems, comm.size * (comm.size + 1) / 2))
    comm.barrier()


@contextmanager
def untouched(comm: Communicator) -> Any:
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
        # all_to_all_v tells the counts of each rank, which differ.
        if who == group and "all_to_all_v" in says:
            pattern = rf"all_to_all_v .* at {re.escape(line_of(ask))}\b"
        assert re.search(pattern, text), f"the text has no {pattern!r}: {text}"
    assert equal_everywhere(comm, text), f"not the same text on all ranks: {text}"


# ---- cases


@case
def ranks_that_ask_for_different_things_are_all_told(comm: Communicator, rng: np.random.Generator) -> None:
    compared(comm)
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


@case
def a_mismatch_in_a_group_concerns_nobody_else(comm: Communicator, rng: np.random.Generator) -> None:
    compared(comm)
    if comm.size < 4:
        raise CannotRun("there are no two groups of two ranks")
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


@case
def many_mismatches_in_a_row_cost_nothing_for_good(comm: Communicator, rng: np.random.Generator) -> None:
    compared(comm)
    large = 4 << 20
    send = put(comm, np.zeros(large, np.int8))
    maps = Path("/proc/self/maps").read_text().count("memfd:lowshard") if comm.xp is np else 0
    for turn in range(60):
        odd = turn % comm.size == comm.rank
        op = "max" if odd else "min"
        name, _ = outcome(lambda op=op: comm.all_reduce(send, op=op, shared=True))  # type: ignore[misc]
        assert name == MismatchError.__name__
    if comm.xp is np:  # 240 MiB of results that were never made
        assert Path("/proc/self/maps").read_text().count("memfd:lowshard") <= maps + comm.size
    go_on(comm)


@case
def what_is_wrong_on_one_rank_is_raised_on_all(comm: Communicator, rng: np.random.Generator) -> None:
    compared(comm)
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


def wrong_arguments(board: Board) -> list[tuple[str, type[LowshardError], str, Ask, Ask]]:
    """Return (name, class, pattern, right call, call that is wrong in itself)."""
    comm, n, send, recv = board.comm, board.comm.size, board.send, board.recv
    found: list[tuple[str, type[LowshardError], str, Ask, Ask]] = []
    for k in (4, long(comm)):
        all_reduce: Ask = lambda k=k: comm.all_reduce(send(k), recv(k))  # type: ignore[misc]  # noqa: E731
        broadcast: Ask = lambda k=k: comm.broadcast(recv(k), 0)  # type: ignore[misc]  # noqa: E731
        found += [
            ("short recv", BufferMismatchError, "as many", all_reduce,
             lambda k=k: comm.all_reduce(send(k), recv(k - 1))),
            ("recv of another dtype", BufferMismatchError, "one dtype", all_reduce,
             lambda k=k: comm.all_reduce(send(k), recv(k, np.float32))),
            ("no recv", BufferMismatchError, "None", all_reduce, lambda k=k: comm.all_reduce(send(k))),
            ("columns", BufferMismatchError, "contiguous", all_reduce,
             lambda k=k: comm.all_reduce(send(2 * k)[::2], recv(k))),
            ("a list", BufferMismatchError, "array", all_reduce, lambda k=k: comm.all_reduce([0.0] * k, recv(k))),
            ("a strange dtype", DTypeError, "complex64", all_reduce,
             lambda k=k: comm.all_reduce(send(k).astype(np.complex64), recv(k))),
            ("an unknown op", CommError, "op is one of", all_reduce,
             lambda k=k: comm.all_reduce(send(k), recv(k), "mean")),
            ("an unknown order", CommError, "order is one of", all_reduce,
             lambda k=k: comm.all_reduce(send(k), recv(k), "sum", "any")),
            ("a root that is none", CommError, "root is a rank", broadcast, lambda k=k: comm.broadcast(recv(k), n)),
            ("nothing to broadcast", BufferMismatchError, "array", broadcast, lambda: comm.broadcast(None, 0)),
            ("a count beyond the buffer", BufferMismatchError, "leaves a buffer",
             lambda k=k: comm.all_to_all_v(*even(board, k), *even(board, k, True)),
             lambda k=k: comm.all_to_all_v(*even(board, k), recv(k * n), [k] * n, [k * n - 1] * n)),
            ("own count", BufferMismatchError, "own recv_counts",
             lambda k=k: comm.all_gather_v(send(k), recv(k * n), [k] * n, starts([k] * n)),
             lambda k=k: comm.all_gather_v(send(k - 1), recv(k * n), [k] * n, starts([k] * n))),
            ("both shared and recv", BufferMismatchError, "pass no recv",
             lambda k=k: comm.all_gather(send(k), shared=True),
             lambda k=k: comm.all_gather(send(k), recv(k * n), shared=True)),
        ]  # fmt: skip
    found.append(("a negative color", CommError, "color", lambda: comm.split(0), lambda: comm.split(-2)))
    if comm.xp is np:
        fixed, foreign = np.zeros(4), np.zeros(4, np.dtype(np.float64).newbyteorder())
        fixed.flags.writeable = False
        right: Ask = lambda: comm.all_reduce(send(4), recv(4))  # noqa: E731
        found += [
            ("read-only", BufferMismatchError, "read-only", right, lambda: comm.all_reduce(send(4), fixed)),
            (
                "byte order",
                BufferMismatchError,
                "byte order",
                right,
                lambda: comm.all_reduce(foreign, foreign),
            ),
        ]
    return found


@case
def of_two_ranks_that_are_wrong_the_lowest_is_told(comm: Communicator, rng: np.random.Generator) -> None:
    compared(comm)
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


@case
def mismatches_of_started_calls_are_told_by_each_wait(comm: Communicator, rng: np.random.Generator) -> None:
    compared(comm)
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
        first = mismatches_of_started_calls_are_told_by_each_wait.__code__.co_firstlineno  # type: ignore[attr-defined]
        assert {int(line) - first for line in lines} <= set(range(9, 13)), (first, lines)
        assert equal_everywhere(comm, "".join(text for _, text in texts))
