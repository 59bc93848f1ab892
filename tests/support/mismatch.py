"""What ranks may ask for that does not go together, and what is wrong in itself: the table of check_cases.

Each call stands on a line of its own, which errors name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from support.comm_kit import LONG, Canvas, put

from lowshard.comm import Communicator
from lowshard.errors import BufferMismatchError, CommError, DTypeError, LowshardError
from lowshard.selftest.collective_cases import starts

Array = Any
Ask = Callable[[], object]

HERE = Path(__file__).name


def line_of(ask: Ask) -> str:
    """Return file and line of a lambda of this module, as errors name it."""
    return f"{HERE}:{ask.__code__.co_firstlineno}"


@dataclass(frozen=True)
class Mismatch:
    """What differs; what most ranks ask for and what the odd one does; patterns of both in the error."""

    name: str
    one_says: str
    one: Ask
    other_says: str
    other: Ask


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


def mismatches(board: Board) -> list[Mismatch]:
    """Return the ways in which one rank may differ; each call stands on a line of its own."""
    c, n, big = board.comm, board.comm.size, LONG
    send, recv, found = board.send, board.recv, list[tuple[str, str, Ask, str, Ask]]()
    for few, more in ((5, 6), (big, big + 1), (5, big), (0, 1)):
        found += [
            ("counts of all_reduce",
             rf"all_reduce float64\[{few}\]", lambda k=few: c.all_reduce(send(k), recv(k)),
             rf"all_reduce float64\[{more}\]", lambda k=more: c.all_reduce(send(k), recv(k))),
            ("counts of all_gather",
             rf"all_gather float64\[{few}\]", lambda k=few: c.all_gather(send(k), recv(k * n)),
             rf"all_gather float64\[{more}\]", lambda k=more: c.all_gather(send(k), recv(k * n))),
        ]  # fmt: skip
    for e in (5, big):
        found += [
            ("dtypes",
             "float64", lambda e=e: c.all_reduce(send(e), recv(e)),
             "int64", lambda e=e: c.all_reduce(send(e, np.int64), recv(e, np.int64))),
            ("dtypes of a broadcast",
             "float64", lambda e=e: c.broadcast(recv(e), 1),
             "float32", lambda e=e: c.broadcast(recv(e, np.float32), 1)),
            ("ops",
             "sum", lambda e=e: c.all_reduce(send(e), recv(e), "sum"),
             "max", lambda e=e: c.all_reduce(send(e), recv(e), "max")),
            ("orders",
             "fast", lambda e=e: c.reduce_scatter(send(e * n), recv(e)),
             "tree", lambda e=e: c.reduce_scatter(send(e * n), recv(e), order="tree")),
            ("roots of a broadcast",
             "root=0", lambda e=e: c.broadcast(recv(e), 0),
             "root=1", lambda e=e: c.broadcast(recv(e), 1)),
            ("roots of a reduce",
             "root=0", lambda e=e: c.reduce(send(e), recv(e), root=0),
             "root=1", lambda e=e: c.reduce(send(e), recv(e), root=1)),
            ("all_reduce against all_gather",
             "all_reduce", lambda e=e: c.all_reduce(send(e), recv(e)),
             "all_gather", lambda e=e: c.all_gather(send(e), recv(e * n))),
            ("gather against scatter",
             "gather", lambda e=e: c.gather(send(e), recv(e * n)),
             "scatter", lambda e=e: c.scatter(send(e * n), recv(e))),
            ("all_reduce against barrier",
             "all_reduce", lambda e=e: c.all_reduce(send(e), recv(e)),
             "barrier", lambda: c.barrier()),
            ("all_reduce against split",
             "all_reduce", lambda e=e: c.all_reduce(send(e), recv(e)),
             "split", lambda: c.split(0)),
            ("counts of all_gather_v",
             rf"recv_counts=\[{e}, {e}", lambda e=e: c.all_gather_v(send(e), recv(e * n), [e] * n, starts([e] * n)),
             rf"recv_counts=\[.*{e - 1}", lambda e=e: c.all_gather_v(send(e), recv(e * n), *one_more(c, e))),
            ("counts of all_to_all_v",
             rf"sends {e} elements", lambda e=e: c.all_to_all_v(*even(board, e), *even(board, e, True)),
             rf"expects {e - 1} ", lambda e=e: c.all_to_all_v(*even(board, e), *expecting_less(board, e))),
            ("counts of all_to_all",
             rf"float64\[{e * n}\]", lambda e=e: c.all_to_all(send(e * n), recv(e * n)),
             rf"float64\[{e * n + n}\]", lambda e=e: c.all_to_all(send(e * n + n), recv(e * n + n))),
        ]  # fmt: skip
    return [Mismatch(*one) for one in found]


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


def wrong_arguments(board: Board) -> list[tuple[type[LowshardError], str, Ask]]:
    """Return (class, telling word, call that is wrong in itself)."""
    c, n, send, recv = board.comm, board.comm.size, board.send, board.recv
    found: list[tuple[type[LowshardError], str, Ask]] = [(CommError, "color", lambda: c.split(-2))]
    for k in (4, LONG):
        found += [
            (BufferMismatchError, "as many", lambda k=k: c.all_reduce(send(k), recv(k - 1))),
            (BufferMismatchError, "one dtype", lambda k=k: c.all_reduce(send(k), recv(k, np.float32))),
            (BufferMismatchError, "None", lambda k=k: c.all_reduce(send(k), None)),
            (BufferMismatchError, "contiguous", lambda k=k: c.all_reduce(send(2 * k)[::2], recv(k))),
            (BufferMismatchError, "array", lambda k=k: c.all_reduce([0.0] * k, recv(k))),
            (DTypeError, "complex64", lambda k=k: c.all_reduce(send(k).astype(np.complex64), recv(k))),
            (CommError, "op is one of", lambda k=k: c.all_reduce(send(k), recv(k), "mean")),
            (CommError, "order is one of", lambda k=k: c.all_reduce(send(k), recv(k), "sum", "any")),
            (CommError, "root is a rank", lambda k=k: c.broadcast(recv(k), n)),
            (BufferMismatchError, "leaves a buffer",
             lambda k=k: c.all_to_all_v(*even(board, k), recv(k * n), [k] * n, [k * n - 1] * n)),
            (BufferMismatchError, "own recv_counts",
             lambda k=k: c.all_gather_v(send(k - 1), recv(k * n), [k] * n, starts([k] * n))),
        ]  # fmt: skip
    if c.xp is np:
        fixed, foreign = np.zeros(4), np.zeros(4, np.dtype(np.float64).newbyteorder())
        fixed.flags.writeable = False
        found += [
            (BufferMismatchError, "read-only", lambda: c.all_reduce(send(4), fixed)),
            (BufferMismatchError, "byte order", lambda: c.all_reduce(foreign, foreign)),
        ]
    return found
