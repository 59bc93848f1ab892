"""Every collective once or more, compared with NumPy: what ranks of any kind run.

What each rank gives comes from seeds, so every rank works out by itself what all of them should get.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lowshard.comm import Communicator
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.device_arrays import put, settle
from lowshard.selftest.plain_fold import OPS, plain_fold
from lowshard.selftest.random_arrays import hard, ordinary, whole_numbers

DTYPES = ("float32", "bfloat16", "int32")
_ELEMS = (1, 1003, 70_000)
"""Elements a rank: one, an odd few, and more than a cache line's or a message's worth."""


class EveryCollective:
    """The calls of one rank."""

    def __init__(self, comm: Communicator, tally: Tally) -> None:
        self._comm, self._tally = comm, tally
        self._xp = comm.xp

    def run(self) -> None:
        """Run all calls."""
        for call in (
            self._moves,
            self._to_and_from_a_root,
            self._all_to_all_v,
            self._reductions,
            self._messages,
            self._split,
        ):
            call()
            settle(self._xp)

    # ---- what is given and got

    def _give(
        self, what: str, elems: int, dtype: str, make: Callable[..., np.ndarray] = hard
    ) -> list[np.ndarray]:
        """Return what every rank gives, the same on all ranks."""
        return [make((elems,), dtype, what, rank) for rank in range(self._comm.size)]

    def _put(self, array: np.ndarray) -> Any:
        return put(self._xp, array)

    def _empty(self, elems: int, dtype: np.dtype[Any]) -> Any:
        """Return an array of zeros, so that nothing right is in it by chance."""
        return put(self._xp, np.zeros(elems, dtype))

    def _meet(self) -> None:
        """Wait for the other ranks before a call on a GPU that they may share."""
        # Arrays have been made by then: to allocate memory may mean to wait for the whole device.
        if self._xp is not np:
            settle(self._xp)
            self._comm.control.barrier()

    def _same(self, what: str, got: Any, expected: np.ndarray, within: float = 0.0) -> None:
        where = f"on rank {self._comm.rank} of {self._comm.size}"
        self._tally.same(f"{what} {where}", got, expected, within=within)

    # ---- the calls

    def _moves(self) -> None:
        comm, rank, size = self._comm, self._comm.rank, self._comm.size
        comm.barrier()
        for dtype in DTYPES:
            for elems in _ELEMS:
                given = self._give("all_gather", elems, dtype)
                recv = self._empty(elems * size, given[0].dtype)
                send = self._put(given[rank])
                self._meet()
                comm.all_gather(send, recv)
                self._same(f"all_gather {dtype} [{elems}]", recv, np.concatenate(given))
                given = self._give("all_to_all", elems * size, dtype)
                recv = self._empty(elems * size, given[0].dtype)
                send = self._put(given[rank])
                self._meet()
                comm.all_to_all(send, recv)
                expected = np.concatenate([whole[rank * elems : (rank + 1) * elems] for whole in given])
                self._same(f"all_to_all {dtype} [{elems * size}]", recv, expected)
            counts = [100 * r for r in range(size)]
            displs = [3 + sum(counts[:r]) for r in range(size)]
            parts = [hard((count,), dtype, "all_gather_v", r) for r, count in enumerate(counts)]
            recv = self._empty(3 + sum(counts), parts[0].dtype)
            send = self._put(parts[rank])
            self._meet()
            comm.all_gather_v(send, recv, counts, displs)
            expected = np.concatenate([np.zeros(3, parts[0].dtype), *parts])
            self._same(f"all_gather_v {dtype} counts {counts}", recv, expected)

    def _to_and_from_a_root(self) -> None:
        comm, rank, size = self._comm, self._comm.rank, self._comm.size
        for dtype in DTYPES:
            for root in range(size):
                mine = rank == root
                whole = hard((1003 * size,), dtype, "root", root)
                buf = self._put(whole) if mine else self._empty(whole.size, whole.dtype)
                self._meet()
                comm.broadcast(buf, root)
                self._same(f"broadcast {dtype} [{whole.size}] root={root}", buf, whole)
                part = self._empty(1003, whole.dtype)
                send = self._put(whole) if mine else None
                self._meet()
                comm.scatter(send, part, root)
                expected = whole[1003 * rank : 1003 * (rank + 1)]
                self._same(f"scatter {dtype} [{whole.size}] root={root}", part, expected)
                recv = self._empty(whole.size, whole.dtype) if mine else None
                send = self._put(expected)
                self._meet()
                comm.gather(send, recv, root)
                if mine:
                    self._same(f"gather {dtype} [1003] root={root}", recv, whole)

    def _all_to_all_v(self) -> None:
        comm, rank, size = self._comm, self._comm.rank, self._comm.size
        counts = [[(7 * src + 13 * dst) % 50 for dst in range(size)] for src in range(size)]
        for dtype in DTYPES:
            given = [hard((sum(row) + 5,), dtype, "all_to_all_v", src) for src, row in enumerate(counts)]
            starts = [_starts(row) for row in counts]
            taken = [row[rank] for row in counts]
            recv = self._empty(sum(taken), given[0].dtype)
            send = self._put(given[rank])
            self._meet()
            comm.all_to_all_v(send, counts[rank], starts[rank], recv, taken, _starts(taken))
            expected = [whole[starts[src][rank] :][: taken[src]] for src, whole in enumerate(given)]
            self._same(f"all_to_all_v {dtype} counts {counts[rank]}", recv, np.concatenate(expected))

    def _reductions(self) -> None:
        comm, rank, size = self._comm, self._comm.rank, self._comm.size
        for dtype in DTYPES:
            for op in OPS:
                for order in ("tree", "rank", "fast"):
                    # "fast" promises no bits, so its numbers are such that every order gives the same.
                    make = whole_numbers if order == "fast" else ordinary
                    folded = "tree" if order == "fast" else order
                    of = f"op={op} order={order} {dtype}"
                    given = self._give("reduce", 1003 * size, dtype, make)
                    total = plain_fold(given, op, folded)
                    send = self._put(given[rank])
                    recv = self._empty(send.size, total.dtype)
                    self._meet()
                    comm.all_reduce(send, recv, op=op, order=order)  # type: ignore[arg-type]
                    # A fast average may be the sum of operands that were divided first, each rounded.
                    eps = {"float32": 2.0**-23, "float64": 2.0**-52}.get(dtype, 0.0)
                    within = size * eps if (op, order) == ("avg", "fast") else 0.0
                    self._same(f"all_reduce {of} [{send.size}]", recv, total, within=within)
                    part = self._empty(1003, total.dtype)
                    self._meet()
                    comm.reduce_scatter(send, part, op=op, order=order)  # type: ignore[arg-type]
                    mine = total[1003 * rank : 1003 * (rank + 1)]
                    self._same(f"reduce_scatter {of} [{send.size}]", part, mine, within=within)
                    root = size - 1
                    recv = self._empty(send.size, total.dtype) if rank == root else None
                    self._meet()
                    comm.reduce(send, recv, op=op, root=root, order=order)  # type: ignore[arg-type]
                    if rank == root:
                        self._same(f"reduce {of} [{send.size}] root={root}", recv, total, within=within)

    def _messages(self) -> None:
        comm, rank, size = self._comm, self._comm.rank, self._comm.size
        if size < 2:
            return
        after, before = (rank + 1) % size, (rank - 1) % size
        for dtype in DTYPES:
            for elems in _ELEMS:
                for way in ("send and recv", "send_recv", "grouped"):
                    given = self._give(way, elems, dtype)
                    send, got = self._put(given[rank]), self._empty(elems, given[0].dtype)
                    self._meet()
                    if way == "send_recv":
                        comm.send_recv(send, after, got, before)
                    elif way == "grouped":
                        with comm.grouped():
                            comm.send(send, after)
                            comm.recv(got, before)
                    elif rank == 0:
                        comm.send(send, after)
                        comm.recv(got, before)
                    else:  # one after the other, so that no two ranks both wait to be received from
                        comm.recv(got, before)
                        comm.send(send, after)
                    self._same(f"{way} {dtype} [{elems}] from rank {before}", got, given[before])
                    comm.barrier()  # a message that is lost is missed here, not later for another one

    def _split(self) -> None:
        comm, rank, size = self._comm, self._comm.rank, self._comm.size
        group = comm.split(rank % 2, -rank)  # the even and the odd ranks, last one first
        assert group is not None
        members = [r for r in reversed(range(size)) if r % 2 == rank % 2]
        given = self._give("split", 1003, "float32", ordinary)
        with group:
            recv = self._empty(1003 * len(members), given[0].dtype)
            send = self._put(given[rank])
            self._meet()
            group.all_gather(send, recv)
            self._same(
                f"all_gather within ranks {members}", recv, np.concatenate([given[r] for r in members])
            )
            total = self._empty(1003, given[0].dtype)
            self._meet()
            group.all_reduce(send, total, order="tree")
            expected = plain_fold([given[r] for r in members], "sum", "tree")
            self._same(f"all_reduce sum tree within ranks {members}", total, expected)
            settle(self._xp)


def _starts(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts))]
