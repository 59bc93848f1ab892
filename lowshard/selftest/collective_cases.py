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
from lowshard.selftest.comparisons import Same, Tally
from lowshard.selftest.fold_cases import OPS, ORDERS, plain_fold

DTYPES = ("float32", "bfloat16", "int32")
_LENGTHS = (1, 1003, 70_000)
"""Elements a rank: one, an odd few, and more than a cache line's or a message's worth."""
_MARGIN_ELEMS = 4
_BLANK_BYTE = 0xA5

Draw = Callable[..., np.ndarray]
"""Makes an array of a shape and dtype from words."""


@dataclass(frozen=True)
class CollectiveCall:
    """A call that has not been made; `held` pairs each buffer with what it holds afterwards."""

    name: str
    args: tuple[Any, ...]
    what: str
    held: tuple[tuple[Any, np.ndarray], ...]

    def check(self, same: Same) -> None:
        """Compare all buffers."""
        for buf, expected in self.held:
            same(self.what, buf, expected)


class CollectiveCalls:
    """Makes calls for one rank.

    elems: what a rank sends, about. lent: its buffers lie in memory of `empty`. in_place: it works in place where a
    call allows that. draw: makes the data; of reductions too, else values that fit the order.
    """

    def __init__(
        self, comm: Communicator, dtype: str, elems: int, *, lent: bool = False, in_place: bool = False,
        draw: Draw | None = None,
    ) -> None:  # fmt: skip
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.dtype, self.elems, self.in_place = dtype, elems, in_place
        self._lent, self._draw = lent, draw

    def moves(self, roots: Sequence[int]) -> list[CollectiveCall]:
        """Return one call of each collective that only moves, for each root."""
        rooted = [make(root) for root in roots for make in (self.broadcast, self.gather, self.scatter)]
        return [self.all_gather(), self.all_gather_v(), self.all_to_all(), self.all_to_all_v(), *rooted]

    def reductions(self, op: str, order: str) -> list[CollectiveCall]:
        """Return one call of each collective that reduces."""
        return [
            self.all_reduce(op, order), self.reduce_scatter(op, order), self.reduce(op, self.size - 1, order)
        ]  # fmt: skip

    def all_gather(self) -> CollectiveCall:
        """In place this rank's part lies in recv."""
        parts = self._ranks("all_gather", self.elems)
        return self._gathered("all_gather", parts, [self.elems * rank for rank in range(self.size)])

    def all_gather_v(self) -> CollectiveCall:
        """Parts of different lengths, the last rank's first; in place as `all_gather`."""
        counts = [self.elems + 3 * rank for rank in range(self.size)]
        parts = [self._data(count, "all_gather_v", rank) for rank, count in enumerate(counts)]
        displs = [sum(counts[rank + 1 :]) for rank in range(self.size)]
        return self._gathered("all_gather_v", parts, displs, counts, displs)

    def _gathered(self, name: str, parts: list[np.ndarray], displs: list[int], *args: Any) -> CollectiveCall:
        whole = np.empty(sum(map(len, parts)), parts[0].dtype)
        for part, displ in zip(parts, displs, strict=True):
            whole[displ : displ + len(part)] = part
        send, recv, held = self._buffers(parts[self.rank], whole, displs[self.rank])
        return self._call(name, (send, recv, *args), held)

    def all_to_all(self) -> CollectiveCall:
        """In place send and recv are one buffer."""
        each = self.elems // self.size + 1
        sent = [part.reshape(self.size, each) for part in self._ranks("all_to_all", self.size * each)]
        got = np.concatenate([parts[self.rank] for parts in sent])
        send, recv, held = self._buffers(sent[self.rank].reshape(-1), got)
        return self._call("all_to_all", (send, recv), held)

    def all_to_all_v(self) -> CollectiveCall:
        """Different lengths, none for some pairs; never in place."""
        ranks = range(self.size)
        counts = [
            [(7 * src + 13 * dst) * self.elems // 20 % (2 * self.elems) for dst in ranks] for src in ranks
        ]
        sent = [self._data(sum(row) + 5, "all_to_all_v", src) for src, row in enumerate(counts)]
        displs, come = [starts(row) for row in counts], [row[self.rank] for row in counts]
        got = [sent[src][displs[src][self.rank] :][: come[src]] for src in ranks]
        recv, held = self._result(np.concatenate(got))
        args = self._put(sent[self.rank]), counts[self.rank], displs[self.rank], recv, come, starts(come)
        return self._call("all_to_all_v", args, held)

    def broadcast(self, root: int) -> CollectiveCall:
        """The other ranks' buffers hold something else before."""
        data = self._ranks("broadcast", self.elems)
        buf, held = self._result(data[root], 0, data[self.rank])
        return self._call("broadcast", (buf, root), held)

    def gather(self, root: int) -> CollectiveCall:
        """In place the root's part lies in recv."""
        parts = self._ranks("gather", self.elems)
        if self.rank == root:
            send, recv, held = self._buffers(parts[root], np.concatenate(parts), self.elems * root)
            return self._call("gather", (send, recv, root), held)
        send = self._put(parts[self.rank])
        return self._call("gather", (send, None, root), (send, parts[self.rank]))

    def scatter(self, root: int) -> CollectiveCall:
        """In place the root's part stays in send."""
        parts = self._ranks("scatter", self.elems)
        recv, held = self._result(parts[self.rank])
        if self.rank != root:
            return self._call("scatter", (None, recv, root), held)
        whole = self._put(np.concatenate(parts))
        if self.in_place:
            recv, held = whole[self.elems * root : self.elems * (root + 1)], (whole, np.concatenate(parts))
        return self._call("scatter", (whole, recv, root), held)

    def all_reduce(self, op: str, order: str) -> CollectiveCall:
        """Of so many elements that they do not divide by the ranks; in place send is recv."""
        terms = self._terms("all_reduce", self.elems // self.size * self.size + 1, order)
        send, recv, held = self._buffers(terms[self.rank], plain_fold(terms, op, order))
        unchanged = () if self.in_place else ((send, terms[self.rank]),)
        return self._call("all_reduce", (send, recv, op, order), held, *unchanged)

    def reduce_scatter(self, op: str, order: str) -> CollectiveCall:
        """In place recv is this rank's part of send."""
        each = self.elems // self.size + 1
        terms = self._terms("reduce_scatter", each * self.size, order)
        part = slice(each * self.rank, each * (self.rank + 1))
        expected, send = plain_fold(terms, op, order)[part], self._put(terms[self.rank])
        if self.in_place:
            return self._call("reduce_scatter", (send, send[part], op, order), (send[part], expected))
        recv, held = self._result(expected)
        return self._call("reduce_scatter", (send, recv, op, order), held, (send, terms[self.rank]))

    def reduce(self, op: str, root: int, order: str) -> CollectiveCall:
        """In place the root's send is its recv."""
        terms = self._terms("reduce", self.elems // self.size * self.size + 1, order)
        if self.rank == root:
            send, recv, held = self._buffers(terms[root], plain_fold(terms, op, order))
            return self._call("reduce", (send, recv, op, root, order), held)
        send = self._put(terms[self.rank])
        return self._call("reduce", (send, None, op, root, order), (send, terms[self.rank]))

    # ---- data and buffers

    def _call(self, name: str, args: tuple[Any, ...], *held: tuple[Any, np.ndarray]) -> CollectiveCall:
        said = "".join(
            f" {arg}" if isinstance(arg, str) else f" root={arg}"
            for arg in args
            if isinstance(arg, (str, int))
        )
        where = f"{'in place ' * self.in_place}on rank {self.rank} of {self.size}"
        return CollectiveCall(name, args, f"{name}{said} {self.dtype} [{self.elems}] {where}", held)

    def _data(self, elems: int, *words: object, usual: Draw = hard) -> np.ndarray:
        return (self._draw or usual)((elems,), self.dtype, *words)

    def _ranks(self, name: str, elems: int) -> list[np.ndarray]:
        return [self._data(elems, name, rank) for rank in range(self.size)]

    def _terms(self, name: str, elems: int, order: str) -> list[np.ndarray]:
        """Return what ranks reduce; "fast" promises no bits, so every order of its numbers gives the same."""
        usual = whole_numbers if order == "fast" else ordinary
        return [self._data(elems, name, rank, usual=usual) for rank in range(self.size)]

    def _put(self, data: np.ndarray) -> Any:
        if not self._lent:
            return put(self.comm.xp, data)
        buf = self.comm.empty(data.shape, data.dtype)
        buf[...] = put(self.comm.xp, data)
        return buf

    def _result(
        self, expected: np.ndarray, at: int = 0, before: Sequence[Any] = ()
    ) -> tuple[Any, tuple[Any, np.ndarray]]:
        """Return a buffer for a result, with some content before, and all memory around it with what it holds later."""
        kind, end = expected.dtype, _MARGIN_ELEMS + len(expected)
        held = np.full((end + _MARGIN_ELEMS) * kind.itemsize, _BLANK_BYTE, np.uint8).view(kind)
        held[_MARGIN_ELEMS + at :][: len(before)] = before
        whole = self._put(held)
        held[_MARGIN_ELEMS:end] = expected
        return whole[_MARGIN_ELEMS:end], (whole, held)

    def _buffers(
        self, mine: np.ndarray, expected: np.ndarray, at: int = 0
    ) -> tuple[Any, Any, tuple[Any, np.ndarray]]:
        """Return what this rank sends, and what `_result` does; in place the one is a part of the other."""
        recv, held = self._result(expected, at, mine if self.in_place else ())
        return recv[at : at + len(mine)] if self.in_place else self._put(mine), recv, held


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
        make([calls.all_gather(), calls.all_reduce("sum", "tree")], over=group)


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
        elif comm.rank == 0:
            comm.send(send, after)
            comm.recv(got, before)
        else:  # one after the other, so that no two ranks both wait to be received from
            comm.recv(got, before)
            comm.send(send, after)
        tally.same(f"{way} {dtype} of {elems} from rank {before}", got, given[before])
        comm.barrier()  # a message that is lost is missed here, not later for another one
