"""One call of each collective, with its buffers and what they hold afterwards; and all that a rank runs of them.

The calls' data comes from words, so every rank works out by itself what all of them give and get. The tests make the
same calls on every transport, in place, from and into memory of `Communicator.empty`, and started.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.comm import Communicator
from lowshard.selftest.arrays import hard, ordinary, put, settle, whole_numbers
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.fold_cases import OPS, ORDERS, plain_fold

DTYPES = ("float32", "bfloat16", "int32")
_LENGTHS = (1, 1003, 70_000)
"""Elements a rank: one, an odd few, and more than a cache line's or a message's worth."""
_MARGIN_BYTES = 16
_BLANK_BYTE = 0xA5


@dataclass(frozen=True)
class CollectiveCall:
    """A call that has not been made; `held` pairs each buffer with what it holds afterwards."""

    name: str
    args: tuple[Any, ...]
    what: str
    held: tuple[tuple[Any, np.ndarray], ...]

    def check(self, same: Callable[[str, Any, np.ndarray], None]) -> None:
        """Compare all buffers."""
        for buf, expected in self.held:
            same(self.what, buf, expected)


@dataclass(frozen=True)
class CollectiveCalls:
    """Makes calls for one rank.

    elems: what a rank sends, about. in_place: it works in place where a call allows that. draw: makes the data from a
    shape, a dtype and words; by default hard values, and for reductions such as fit the order. place: makes a buffer.
    """

    comm: Communicator
    dtype: str
    elems: int
    in_place: bool = False
    draw: Callable[..., np.ndarray] | None = None
    place: Callable[[np.ndarray], Any] | None = None

    def moves(self, roots: Sequence[int]) -> list[CollectiveCall]:
        """Return one call of each collective that only moves, for each root."""
        rooted = [self.make(name, root) for root in roots for name in ("broadcast", "gather", "scatter")]
        return [*map(self.make, ("all_gather", "all_gather_v", "all_to_all", "all_to_all_v")), *rooted]

    def reductions(self, op: str, order: str) -> list[CollectiveCall]:
        """Return one call of each collective that reduces."""
        names = ("all_reduce", "reduce_scatter", "reduce")
        return [self.make(name, self.comm.size - 1, op, order) for name in names]

    def make(self, name: str, root: int = 0, op: str = "sum", order: str = "tree") -> CollectiveCall:
        """Return a call of a collective."""
        made: CollectiveCall = getattr(self, f"_{name}")(root, op, order)
        return made

    def _all_gather(self, *_: Any) -> CollectiveCall:
        parts = self._ranks(self.elems, "all_gather")
        return self._exchange(
            "all_gather", self._of(parts), np.concatenate(parts), at=self.elems * self.comm.rank
        )

    def _all_gather_v(self, *_: Any) -> CollectiveCall:
        # Parts of different lengths, the last rank's first.
        counts = [self.elems + 3 * rank for rank in range(self.comm.size)]
        displs = [sum(counts[rank + 1 :]) for rank in range(self.comm.size)]
        parts = [self._data(count, hard, "all_gather_v", rank) for rank, count in enumerate(counts)]
        whole = np.concatenate(parts[::-1])
        return self._exchange("all_gather_v", self._of(parts), whole, counts, displs, at=self._of(displs))

    def _all_to_all(self, *_: Any) -> CollectiveCall:
        each = self.elems // self.comm.size + 1
        sent = [part.reshape(-1, each) for part in self._ranks(self.comm.size * each, "all_to_all")]
        return self._exchange(
            "all_to_all", self._of(sent).reshape(-1), np.concatenate([self._of(parts) for parts in sent])
        )

    def _all_to_all_v(self, *_: Any) -> CollectiveCall:
        # Different lengths, none for some pairs; never in place.
        ranks, n = range(self.comm.size), self.elems
        counts = [[(7 * src + 13 * dst) * (n + 1) // 20 % (2 * n + 1) for dst in ranks] for src in ranks]
        sent = [self._data(sum(row) + 5, hard, "all_to_all_v", src) for src, row in enumerate(counts)]
        displs, come = [starts(row) for row in counts], [*map(self._of, counts)]
        recv, held = self._result(
            np.concatenate([sent[src][self._of(displs[src]) :][: come[src]] for src in ranks])
        )
        args = self._put(self._of(sent)), self._of(counts), self._of(displs), recv, come, starts(come)
        return self._call("all_to_all_v", args, held)

    def _broadcast(self, root: int, *_: Any) -> CollectiveCall:
        data = self._ranks(self.elems, "broadcast")
        buf, held = self._result(data[root], 0, self._of(data))
        return self._call("broadcast", (buf, root), held)

    def _gather(self, root: int, *_: Any) -> CollectiveCall:
        parts, here = self._ranks(self.elems, "gather"), self.comm.rank == root
        return self._exchange(
            "gather", self._of(parts), np.concatenate(parts), root, at=self.elems * root, here=here
        )

    def _scatter(self, root: int, *_: Any) -> CollectiveCall:
        parts = self._ranks(self.elems, "scatter")
        recv, held = self._result(self._of(parts))
        if self.comm.rank != root:
            return self._call("scatter", (None, recv, root), held)
        whole = self._put(np.concatenate(parts))
        kept = whole, np.concatenate(parts)
        if self.in_place:  # its part stays where it is
            return self._call("scatter", (whole, whole[self.elems * root :][: self.elems], root), kept)
        return self._call("scatter", (whole, recv, root), held, kept)

    def _all_reduce(self, _: int, op: str, order: str) -> CollectiveCall:
        # Of so many elements that they do not divide by the ranks.
        terms = self._terms(self.elems // self.comm.size * self.comm.size + 1, order, "all_reduce")
        return self._exchange("all_reduce", self._of(terms), plain_fold(terms, op, order), op, order)

    def _reduce(self, root: int, op: str, order: str) -> CollectiveCall:
        terms = self._terms(self.elems // self.comm.size * self.comm.size + 1, order, "reduce")
        folded, here = plain_fold(terms, op, order), self.comm.rank == root
        return self._exchange("reduce", self._of(terms), folded, op, root, order, here=here)

    def _reduce_scatter(self, _: int, op: str, order: str) -> CollectiveCall:
        each = self.elems // self.comm.size + 1
        terms = self._terms(each * self.comm.size, order, "reduce_scatter")
        part = slice(each * self.comm.rank, each * (self.comm.rank + 1))
        expected, send = plain_fold(terms, op, order)[part], self._put(self._of(terms))
        if self.in_place:  # recv is a part of send
            return self._call("reduce_scatter", (send, send[part], op, order), (send[part], expected))
        recv, held = self._result(expected)
        return self._call("reduce_scatter", (send, recv, op, order), held, (send, self._of(terms)))

    # ---- data and buffers

    def _exchange(
        self, name: str, mine: np.ndarray, expected: np.ndarray, *args: Any, at: int = 0, here: bool = True
    ) -> CollectiveCall:
        """Return a call of send and recv, where a result is `here`; in place the one lies `at` a place of the other."""
        if self.in_place and here:
            recv, held = self._result(expected, at, mine)
            return self._call(name, (recv[at : at + len(mine)], recv, *args), held)
        send = self._put(mine)
        if not here:
            return self._call(name, (send, None, *args), (send, mine))
        recv, held = self._result(expected)
        return self._call(name, (send, recv, *args), held, (send, mine))

    def _call(self, name: str, args: tuple[Any, ...], *held: tuple[Any, np.ndarray]) -> CollectiveCall:
        said = [f"root={arg}" if isinstance(arg, int) else arg for arg in args if isinstance(arg, (str, int))]
        where = f"{'in place ' * self.in_place}on rank {self.comm.rank} of {self.comm.size}"
        what = " ".join([name, *said, self.dtype, f"[{self.elems}]", where])
        return CollectiveCall(name, args, what, held)

    def _of(self, ranks: Any) -> Any:
        return ranks[self.comm.rank]

    def _data(self, elems: int, usual: Callable[..., np.ndarray], *words: object) -> np.ndarray:
        return (self.draw or usual)((elems,), self.dtype, *words)

    def _ranks(self, elems: int, name: str, usual: Callable[..., np.ndarray] = hard) -> list[np.ndarray]:
        return [self._data(elems, usual, name, rank) for rank in range(self.comm.size)]

    def _terms(self, elems: int, order: str, name: str) -> list[np.ndarray]:
        # "fast" promises no bits: its numbers are such that every order gives the same.
        return self._ranks(elems, name, whole_numbers if order == "fast" else ordinary)

    def _put(self, data: np.ndarray) -> Any:
        return self.place(data) if self.place else put(self.comm.xp, data)

    def _result(
        self, expected: np.ndarray, at: int = 0, before: Sequence[Any] | np.ndarray = ()
    ) -> tuple[Any, tuple[Any, np.ndarray]]:
        """Return a buffer for a result, with some content before, and all memory around it with what it holds later."""
        kind, begin = expected.dtype, _MARGIN_BYTES // expected.itemsize
        inside = slice(begin, begin + len(expected))
        held = np.full(expected.nbytes + 2 * _MARGIN_BYTES, _BLANK_BYTE, np.uint8).view(kind)
        held[begin + at :][: len(before)] = before
        whole = self._put(held)
        held[inside] = expected
        return whole[inside], (whole, held)


def starts(counts: Sequence[int]) -> list[int]:
    """Return the displacements of parts that lie one behind the other."""
    return [sum(counts[:i]) for i in range(len(counts))]


def run_every_collective(comm: Communicator, tally: Tally) -> None:
    """Run every call as one rank and compare. Collective: all ranks of the communicator call this."""

    def meet() -> None:
        # Ranks may share a GPU: they wait for each other once arrays are made, since to allocate memory may mean to
        # wait for the whole device.
        if comm.xp is not np:
            settle(comm.xp)
            comm.control.barrier()

    def make(calls: list[CollectiveCall], within: float = 0.0, over: Communicator = comm) -> None:
        for call in calls:
            meet()
            getattr(over, call.name)(*call.args)
            call.check(lambda what, got, expected: tally.same(what, got, expected, within=within))
        settle(comm.xp)

    comm.barrier()
    for dtype in DTYPES:
        for elems in _LENGTHS:
            make(CollectiveCalls(comm, dtype, elems, in_place=elems == 1003).moves(range(comm.size)))
            _pass_around(comm, dtype, elems, meet, tally)
        for op in OPS:
            for order in ORDERS:
                # A fast average may be the sum of operands that were divided first, each rounded.
                within = comm.size * 2.0**-23 if (op, order, dtype) == ("avg", "fast", "float32") else 0.0
                make(CollectiveCalls(comm, dtype, 1003, in_place=op == "max").reductions(op, order), within)
    group = comm.split(comm.rank % 2, -comm.rank)  # the even and the odd ranks, last one first
    assert group is not None
    with group:
        calls = CollectiveCalls(group, "float32", 1003)
        make([calls.make("all_gather"), calls.make("all_reduce")], over=group)


def _pass_around(comm: Communicator, dtype: str, elems: int, meet: Callable[[], None], tally: Tally) -> None:
    """Send to the next rank and receive from the one before, in every way."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for way in ("send and recv", "send_recv", "grouped") if comm.size > 1 else ():
        given = [hard((elems,), dtype, way, rank) for rank in range(comm.size)]
        send, got = put(comm.xp, given[comm.rank]), put(comm.xp, np.zeros(elems, dtypes.get(dtype).numpy))
        meet()
        if way == "send_recv":
            comm.send_recv(send, after, got, before)
        elif way == "grouped":
            with comm.grouped():
                comm.send(send, after)
                comm.recv(got, before)
        else:  # one after the other, so that no two ranks both wait to be received from
            if comm.rank:
                comm.recv(got, before)
            comm.send(send, after)
            if not comm.rank:
                comm.recv(got, before)
        tally.same(f"{way} {dtype} of {elems} from rank {before}", got, given[before])
        comm.barrier()  # a message that is lost is missed here, not later for another one
