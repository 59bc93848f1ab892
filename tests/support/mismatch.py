"""What ranks may ask for that does not go together, and what is wrong on one rank alone: the table of check_cases.

Each call stands on a line of its own, which errors name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from support.comm_kit import Canvas, put
from support.every_call import long, starts

from lowshard.comm import Communicator
from lowshard.errors import BufferMismatchError, CommError, DTypeError, LowshardError

Array = Any
Ask = Callable[[], object]

HERE = Path(__file__).name


def line_of(ask: Ask) -> str:
    """Return file and line of a lambda of this module, as errors name it."""
    return f"{HERE}:{ask.__code__.co_firstlineno}"


@dataclass(frozen=True)
class Mismatch:
    """Two calls that do not go together.

    Attributes:
        name: what differs.
        one: what most ranks ask for.
        other: what the odd rank asks for.
        one_says: patterns of the first call in the error.
        other_says: patterns of the second one.
        pair_says: in place of both, what is said of a pair of ranks; {odd}, {one} and {other} stand for the odd rank
            and for the lines of the two calls.
    """

    name: str
    one: Ask
    other: Ask
    one_says: str
    other_says: str
    pair_says: str = ""


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
        yield Mismatch(
            "all_to_all_v counts",
            lambda elems=elems: comm.all_to_all_v(*even(board, elems), *even(board, elems, True)),
            lambda elems=elems: comm.all_to_all_v(*even(board, elems), *expecting_less(board, elems)),
            "",
            "",
            rf"send_counts\[j\] on rank i is recv_counts\[i\] on rank j, but in call #\d+ .*\brank \d+ sends {elems} "
            rf"elements to rank {{odd}} \(send_counts=[^()]* at {{one}}\), which expects {elems - 1} "
            r"\(recv_counts=[^()]* at {other}\)",
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
