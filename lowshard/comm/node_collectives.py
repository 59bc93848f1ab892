"""Ranks on several nodes: large payloads by way of windows, memory that all ranks of a node see.

Every rank exchanges its own part with the other nodes, one copy a node, while the others of its node do the same with
theirs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.box import split_interval
from lowshard.comm.call import Call
from lowshard.comm.default_collectives import Run
from lowshard.comm.mpi import MPICommunicator
from lowshard.comm.node.communicator import NodeCommunicator
from lowshard.comm.node_map import Seating
from lowshard.comm.protocol import Communicator
from lowshard.comm.reduction import fold

Array = Any
Span = tuple[int, int]  # elements, and where they begin

WINDOW_BYTES = 2 << 20
"""Payloads of so many bytes and more go by way of windows; for smaller ones MPI takes fewer steps."""
PIECE_BYTES = 64 << 20
"""What a call puts into a window at a time."""


class Windows(Communicator):
    """What ranks on several nodes do by way of windows; its parts are the subclass's.

    Attributes:
        flat: MPI among all ranks.
        node: the ranks of this node, who share memory.
        seating: which ranks share a node.
    """

    flat: MPICommunicator
    node: NodeCommunicator
    seating: Seating
    _home: int
    """The node of this rank."""
    _contacts: list[int]
    """The rank of each other node that this one sends its part to."""
    _serves: list[int]
    """The ranks of other nodes that send theirs to this one."""

    # ---- between nodes

    def _large(self, size_bytes: int) -> bool:
        return size_bytes >= WINDOW_BYTES

    def _cross(self, send: Array, to: Mapping[int, Span], recv: Array, come: Mapping[int, Span]) -> None:
        """Send parts to ranks of other nodes, and receive parts from some."""
        nothing = (0, 0)
        sent = [to.get(r, nothing) for r in range(self.size)]
        received = [come.get(r, nothing) for r in range(self.size)]
        self.flat._all_to_all_v(
            send, [n for n, _ in sent], [at for _, at in sent],
            recv, [n for n, _ in received], [at for _, at in received],
        )  # fmt: skip

    def _spread(
        self, own: Array | None, window: Array, counts: Sequence[int], displs: Sequence[int], source: int = -1
    ) -> None:
        """Put every rank's part into the windows of all nodes, and meet.

        Collective: all ranks of the communicator call this.

        Args:
            own: this rank's part, or None where it lies in the window.
            window: of this node.
            counts: elements of each rank's part.
            displs: where they go.
            source: a node whose window has everything already, -1 for none.
        """
        n, at = counts[self.rank], displs[self.rank]
        place = window[at : at + n]
        if own is None:
            own = place
        else:
            place[...] = own
        to = {r: (n, 0) for r in self._contacts if self.seating.home(r) != source}
        if self._home == source:
            self._cross(own, to, _nothing(own.dtype), {})
        else:
            self._cross(own, to, window, {r: (counts[r], displs[r]) for r in self._serves})
        self.node._barrier()

    def _from_root(self, buf: Array | None, elems: int, dtype: Any, root: int) -> Array:
        """Return a window with root's buffer.

        Collective: all ranks of the communicator call this.
        """
        window = self.node._common(elems, dtype)
        counts, displs = self._cut(elems)
        source = self.seating.home(root)
        if self._home == source:
            if self.rank == root:
                window[...] = buf
            self.node._barrier()
            to = {r: (counts[r], displs[r]) for r in self._serves}
            self._cross(window, to, _nothing(dtype), {})
        else:
            sender = self.seating.contact(self.rank, source)
            self._cross(_nothing(dtype), {}, window, {sender: (counts[self.rank], displs[self.rank])})
        self._spread(None, window, counts, displs, source)
        return window

    def _partial(self, call: Call, send: Array, op: str) -> Array:
        """Return a window with the reduction over this node's ranks, in the dtype that it is finished in.

        Collective: all ranks of the communicator call this.
        """
        wide = partial_dtype(send.dtype, op)
        assert wide is not None
        if wide != send.dtype:
            widened = self.node.empty(send.size, wide)
            widened[...] = send
            send = widened
        return self.node._shared_all_reduce(call, send, "sum" if op == "avg" else op, "fast")

    def _finish(
        self, partial: Array, counts: Sequence[int], displs: Sequence[int], own: Array, op: str
    ) -> None:
        """Reduce the parts that are this rank's over all nodes into `own`, rounded once.

        Collective: all ranks of the communicator call this.
        """
        n, at = counts[self.rank], displs[self.rank]
        terms = np.empty((len(self._contacts), n), partial.dtype)
        self._cross(
            partial, {r: (counts[r], displs[r]) for r in self._serves},
            terms.reshape(-1), {r: (n, n * i) for i, r in enumerate(self._contacts)},
        )  # fmt: skip
        # In the nodes' order: where nodes are equal, a power of two and in rank order, the bits are the tree's.
        operands = [*terms[: self._home], partial[at : at + n], *terms[self._home :]]
        fold(operands, own, op, divisor=self.size if op == "avg" else 1)

    def _reduced(self, call: Call, send: Array, op: str) -> Array:
        """Return a window with the reduction over all ranks.

        Collective: all ranks of the communicator call this.
        """
        counts, displs = self._cut(send.size)
        partial = self._partial(call, send, op)
        own = np.empty(counts[self.rank], send.dtype)
        self._finish(partial, counts, displs, own, op)
        # The rank that receives a part of the result has sent that part of the operand itself: it is free.
        window = partial if partial.dtype == send.dtype else self.node._common(send.size, send.dtype)
        self._spread(own, window, counts, displs)
        return window

    # ---- plans of reductions

    def _plan_all_reduce(self, call: Call, dtype: Any, elems: int, op: str, order: str) -> Run:
        pieces = self._pieces(dtype, elems, elems, op, order)
        if not pieces:
            return super()._plan_all_reduce(call, dtype, elems, op, order)

        def run(send: Array, recv: Array) -> None:
            self._verify(call)
            s, r = send.reshape(-1), recv.reshape(-1)
            if len(pieces) > 1 and np.may_share_memory(s, r) and s.ctypes.data != r.ctypes.data:
                s = s.copy()
            for start, stop in pieces:
                r[start:stop] = self._reduced(call, s[start:stop], op)

        return run

    def _plan_reduce_scatter(self, call: Call, dtype: Any, elems: int, op: str, order: str) -> Run:
        pieces, size = self._pieces(dtype, elems, elems * self.size, op, order), self.size
        if not pieces:
            return super()._plan_reduce_scatter(call, dtype, elems, op, order)

        def run(send: Array, recv: Array) -> None:
            self._verify(call)
            rows, r = send.reshape(size, elems), recv.reshape(-1)
            if len(pieces) > 1 and np.may_share_memory(rows, r):
                rows = rows.copy()
            for start, stop in pieces:
                n = stop - start
                partial = self._partial(call, rows[:, start:stop].reshape(-1), op)
                self._finish(partial, [n] * size, [n * i for i in range(size)], r[start:stop], op)

        return run

    def _plan_reduce(self, call: Call, dtype: Any, elems: int, op: str, root: int, order: str) -> Run:
        pieces, zero = self._pieces(dtype, elems, elems, op, order), [0] * self.size
        if not pieces:
            return super()._plan_reduce(call, dtype, elems, op, root, order)

        def run(send: Array, recv: Array | None) -> None:
            self._verify(call)
            s, r = send.reshape(-1), None if recv is None else recv.reshape(-1)
            if (
                r is not None
                and len(pieces) > 1
                and np.may_share_memory(s, r)
                and s.ctypes.data != r.ctypes.data
            ):
                s = s.copy()
            for start, stop in pieces:
                counts, displs = self._cut(stop - start)
                own = np.empty(counts[self.rank], dtype)
                self._finish(self._partial(call, s[start:stop], op), counts, displs, own, op)
                to_root = [own.size if i == root else 0 for i in range(self.size)]
                if r is None:
                    self._all_to_all_v(own, to_root, zero, own[:0], zero, zero)
                else:
                    self._all_to_all_v(own, to_root, zero, r[start:stop], counts, displs)

        return run

    def _pieces(self, dtype: Any, elems: int, whole: int, op: str, order: str) -> list[Span]:
        """Return the ranges of elements that a reduction of `whole` elements is made in; none where it goes flat.

        Args:
            dtype: of the operands.
            elems: elements that the ranges are of.
            whole: elements of an operand.
            op: the operation.
            order: "fast" alone leaves the order to us.
        """
        wide = partial_dtype(dtype, op)
        if order != "fast" or wide is None or not self._large(whole * dtype.itemsize):
            return []
        return _ranges(elems, whole * wide.itemsize)

    # ---- results that the ranks of a node share

    def _shared_all_gather(self, call: Call, send: Array) -> Array:
        self._verify(call)
        window = self.node._common(send.size * self.size, send.dtype)
        self._spread(send, window, [send.size] * self.size, [send.size * i for i in range(self.size)])
        return window

    def _shared_all_reduce(self, call: Call, send: Array, op: str, order: str) -> Array:
        self._verify(call)
        if order == "fast" and partial_dtype(send.dtype, op) is not None:
            return self._reduced(call, send, op)
        counts, displs = self._cut(send.size)
        own = np.empty(counts[self.rank], send.dtype)
        fold(self._terms(send, counts, displs), own, op, order)
        window = self.node._common(send.size, send.dtype)
        self._spread(own, window, counts, displs)
        return window

    def _shared_broadcast(self, call: Call, buf: Array | None, root: int) -> Array:
        self._verify(call)
        about = "" if buf is None or self.rank != root else json.dumps([buf.dtype.name, list(buf.shape)])
        name, shape = json.loads(self._share_texts(about)[root])
        flat = None if buf is None else buf.reshape(-1)
        return self._from_root(flat, math.prod(shape), dtypes.get(name).numpy, root).reshape(shape)

    # ---- primitives

    def _all_gather_v(self, send: Array, recv: Array, counts: Sequence[int], displs: Sequence[int]) -> None:
        whole_bytes = sum(counts) * recv.itemsize
        if not self._large(whole_bytes):
            self.flat._all_gather_v(send, recv, counts, displs)
            return
        pieces = -(-whole_bytes // PIECE_BYTES)
        if pieces > 1 and np.may_share_memory(send, recv):
            send = send.copy()
        for i in range(pieces):
            spans = [split_interval((0, n), pieces, i) for n in counts]
            sizes = [stop - start for start, stop in spans]
            places = [sum(sizes[:r]) for r in range(self.size)]
            window = self.node._common(sum(sizes), recv.dtype)
            self._spread(send[slice(*spans[self.rank])], window, sizes, places)
            for (start, stop), displ, place in zip(spans, displs, places, strict=True):
                recv[displ + start : displ + stop] = window[place : place + stop - start]

    def _broadcast(self, buf: Array, root: int) -> None:
        if not self._large(buf.nbytes):
            self.flat._broadcast(buf, root)
            return
        for start, stop in _ranges(buf.size, buf.nbytes):
            part = buf[start:stop]
            window = self._from_root(part, part.size, part.dtype, root)
            if self.rank != root:
                part[...] = window


def partial_dtype(dtype: Any, op: str) -> Any:
    """Return the dtype that nodes hand on their partial results in, or None where only whole operands will do."""
    row = dtypes.get(dtype)
    if row.kind == "float":
        return row.accumulator.numpy
    if row.kind in ("int", "uint"):
        if op != "avg":
            return row.numpy
        if row.itemsize_bytes == 8:
            return None  # the sum may not fit 64 bits where the mean does
        return np.dtype(np.int64 if row.kind == "int" else np.uint64)
    return None


def _ranges(elems: int, whole_bytes: int) -> list[Span]:
    """Return the ranges of elements in which so many bytes go through a window, each as large as others."""
    pieces = min(-(-whole_bytes // PIECE_BYTES), max(elems, 1))
    return [split_interval((0, elems), pieces, i) for i in range(pieces)]


def _nothing(dtype: Any) -> Array:
    return np.empty(0, dtype)
