"""One call of every collective, with its buffers and what they must hold afterwards: to be called or to be started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from support.comm_kit import Canvas, get, lend, put, same

from lowshard.comm import Communicator

Array = Any
Check = Callable[[], None]

SHORT = 37


def long(comm: Communicator) -> int:
    """Return an element count that goes straight from buffer to buffer; ranks of a node have slots for short ones."""
    return int(getattr(comm._transport, "_small_bytes", 16 << 10)) // 4 + 1000


@dataclass(frozen=True)
class Prepared:
    """A call that has not been made.

    Attributes:
        name: of the collective.
        args: what it takes.
        check: demands the right content of all buffers, once the call is over.
    """

    name: str
    args: tuple[Any, ...]
    check: Check


class Preparer:
    """Makes calls for this rank; every rank draws the data of all."""

    def __init__(
        self, comm: Communicator, rng: np.random.Generator, *, elems: int, lent: bool = False,
        in_place: bool = False,
    ) -> None:  # fmt: skip
        """Say what the calls shall be like.

        Args:
            comm: the communicator.
            rng: the same on all ranks.
            elems: of what one rank sends, about.
            lent: whether this rank's buffers lie in memory of `empty`.
            in_place: whether this rank works in place where a call allows it.
        """
        self.comm, self.rng, self.elems, self.lent, self.in_place = comm, rng, elems, lent, in_place
        self.dtype = np.dtype(np.float32)  # small whole numbers: sums in any order are exact
        self._pool = rng.integers(-50, 50, 10007).astype(self.dtype)  # a prime: no part is as long

    def draw(self, *shape: int) -> np.ndarray:
        """Return data of all ranks."""
        return np.resize(np.roll(self._pool, int(self.rng.integers(self._pool.size))), shape)

    def lay(self, data: np.ndarray) -> Array:
        """Return a buffer that holds data."""
        return lend(self.comm, data) if self.lent else put(self.comm, np.ascontiguousarray(data))

    def canvas(self, elems: int) -> Canvas:
        """Return a buffer for a result."""
        return Canvas(self.comm, elems, self.dtype, self.lent)

    def all(self) -> list[Prepared]:
        """Return one call of each collective that has buffers."""
        last = self.comm.size - 1
        return [
            self.all_gather(),
            self.all_gather_v(),
            self.all_to_all(),
            self.all_to_all_v(),
            self.broadcast(last),
            self.gather(0),
            self.scatter(last),
            self.all_reduce("sum", "tree"),
            self.all_reduce("max", "fast"),
            self.reduce_scatter("min", "rank"),
            self.reduce("sum", last, "tree"),
        ]

    def all_gather(self) -> Prepared:
        """In place this rank's part lies in recv."""
        n, rank = self.elems, self.comm.rank
        parts = self.draw(self.comm.size, n)
        recv, send = self.canvas(n * self.comm.size), self.lay(parts[rank])
        if self.in_place:
            own = recv.buf[n * rank : n * (rank + 1)]
            own[...] = send
            send = own
        return Prepared("all_gather", (send, recv.buf), lambda: recv.check(parts.reshape(-1)))

    def all_gather_v(self) -> Prepared:
        """Parts of different lengths, the last rank's first."""
        size, rank = self.comm.size, self.comm.rank
        counts = [self.elems + 3 * i for i in range(size)]
        displs = [sum(counts[i + 1 :]) for i in range(size)]
        parts = [self.draw(count) for count in counts]
        recv, send = self.canvas(sum(counts)), self.lay(parts[rank])
        if self.in_place:
            own = recv.buf[displs[rank] : displs[rank] + counts[rank]]
            own[...] = send
            send = own
        whole = np.concatenate(parts[::-1])
        return Prepared("all_gather_v", (send, recv.buf, counts, displs), lambda: recv.check(whole))

    def all_to_all(self) -> Prepared:
        """In place send and recv are one buffer."""
        size, rank = self.comm.size, self.comm.rank
        each = self.elems // size + 1
        sent = self.draw(size, size, each)
        recv, send = self.canvas(size * each), self.lay(sent[rank].reshape(-1))
        if self.in_place:
            recv.buf[...] = send
            send = recv.buf
        return Prepared(
            "all_to_all",
            (send, recv.buf),
            lambda: recv.check(np.ascontiguousarray(sent[:, rank]).reshape(-1)),
        )

    def all_to_all_v(self) -> Prepared:
        """Different lengths, none for some pairs."""
        size, rank = self.comm.size, self.comm.rank
        counts = self.rng.integers(0, 2 * self.elems // size + 2, (size, size))
        counts[self.rng.random((size, size)) < 0.2] = 0
        sent = [[self.draw(int(n)) for n in row] for row in counts]
        to, come = [int(n) for n in counts[rank]], [int(n) for n in counts[:, rank]]
        send = self.lay(np.concatenate(sent[rank]))
        recv = self.canvas(sum(come))
        expected = np.concatenate([sent[peer][rank] for peer in range(size)])
        args = (send, to, starts(to), recv.buf, come, starts(come))
        return Prepared("all_to_all_v", args, lambda: recv.check(expected))

    def broadcast(self, root: int) -> Prepared:
        """From a root that is not the first rank."""
        data = self.draw(self.comm.size, self.elems)
        buf = self.canvas(self.elems)
        buf.buf[...] = put(self.comm, data[self.comm.rank])
        return Prepared("broadcast", (buf.buf, root), lambda: buf.check(data[root]))

    def gather(self, root: int) -> Prepared:
        """In place the root's part lies in recv."""
        n, rank = self.elems, self.comm.rank
        parts = self.draw(self.comm.size, n)
        send = self.lay(parts[rank])
        if rank != root:
            return Prepared("gather", (send, None, root), lambda: same(send, parts[rank]))
        recv = self.canvas(n * self.comm.size)
        if self.in_place:
            own = recv.buf[n * root : n * (root + 1)]
            own[...] = send
            send = own
        return Prepared("gather", (send, recv.buf, root), lambda: recv.check(parts.reshape(-1)))

    def scatter(self, root: int) -> Prepared:
        """In place the root's part stays in send."""
        n, rank = self.elems, self.comm.rank
        parts = self.draw(self.comm.size, n)
        recv = self.canvas(n)
        if rank != root:
            return Prepared("scatter", (None, recv.buf, root), lambda: recv.check(parts[rank]))
        whole = self.lay(parts.reshape(-1))
        if self.in_place:
            own = whole[n * root : n * (root + 1)]
            return Prepared("scatter", (whole, own, root), lambda: same(whole, parts.reshape(-1)))
        return Prepared("scatter", (whole, recv.buf, root), lambda: recv.check(parts[root]))

    def _reduced(self, op: str, terms: np.ndarray) -> np.ndarray:
        ufunc = {"sum": np.add, "min": np.minimum, "max": np.maximum}[op]
        return np.asarray(ufunc.reduce(terms, 0))

    def all_reduce(self, op: str, order: str) -> Prepared:
        """Of so many elements that they do not divide by the ranks."""
        n = self.elems // self.comm.size * self.comm.size + 1
        terms = self.draw(self.comm.size, n)
        recv, send = self.canvas(n), self.lay(terms[self.comm.rank])
        if self.in_place:
            recv.buf[...] = send
            send = recv.buf
        expected = self._reduced(op, terms)
        mine = None if self.in_place else terms[self.comm.rank]
        return Prepared("all_reduce", (send, recv.buf, op, order), checker(recv, expected, send, mine))

    def reduce_scatter(self, op: str, order: str) -> Prepared:
        """In place recv is this rank's part of send."""
        n, rank = self.elems // self.comm.size + 1, self.comm.rank
        terms = self.draw(self.comm.size, n * self.comm.size)
        part = slice(n * rank, n * (rank + 1))
        expected = self._reduced(op, terms)[part]
        send = self.lay(terms[rank])
        if self.in_place:
            return Prepared(
                "reduce_scatter", (send, send[part], op, order), lambda: same(send[part], expected)
            )
        recv = self.canvas(n)
        check = checker(recv, expected, send, terms[rank])
        return Prepared("reduce_scatter", (send, recv.buf, op, order), check)

    def reduce(self, op: str, root: int, order: str) -> Prepared:
        """In place the root's send is its recv."""
        n, rank = self.elems // self.comm.size * self.comm.size + 1, self.comm.rank
        terms = self.draw(self.comm.size, n)
        send = self.lay(terms[rank])
        if rank != root:
            return Prepared("reduce", (send, None, op, root, order), lambda: same(send, terms[rank]))
        recv = self.canvas(n)
        if self.in_place:
            recv.buf[...] = send
            send = recv.buf
        expected = self._reduced(op, terms)
        return Prepared("reduce", (send, recv.buf, op, root, order), lambda: recv.check(expected))


def starts(counts: list[int]) -> list[int]:
    """Return the displacements of parts that lie one behind the other."""
    return [sum(counts[:i]) for i in range(len(counts))]


def checker(recv: Canvas, expected: np.ndarray, send: Array, unchanged: np.ndarray | None) -> Check:
    """Return a check of a result, and of an operand that must be as it was."""

    def check() -> None:
        recv.check(expected)
        if unchanged is not None:
            assert get(send).tobytes() == unchanged.tobytes(), "what is sent was written to"

    return check
