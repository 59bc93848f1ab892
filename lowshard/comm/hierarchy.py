"""Ranks on several nodes as one communicator: shared memory inside the nodes, messages between them.

Large payloads go by way of windows: memory that all ranks of a node see. Every rank exchanges its own part with the
other nodes, one copy a node, while the others of its node do the same with theirs. Small payloads, and what each
rank has for each other, are left to MPI among all ranks.

How ranks are numbered and how many share a node does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from lowshard import dtypes
from lowshard.box import split_interval
from lowshard.comm.call import Call
from lowshard.comm.collectives import ALL_REDUCE, cut, shape_at_root, share
from lowshard.comm.mpi import EXCHANGE_TAG, ByMailbox, MPITransport
from lowshard.comm.node.group_block import Place, lend_group
from lowshard.comm.node.node_memory import NodeMemory
from lowshard.comm.node.node_reach import NodeReach
from lowshard.comm.node.node_transport import Lent, NodeTransport, members_of
from lowshard.comm.node_map import Seating
from lowshard.comm.reduction import fold
from lowshard.comm.transport import Planner, Run, Transport
from lowshard.comm.wait_guard import Lookout
from lowshard.errors import TimedOut

Array = Any
Span = tuple[int, int]  # elements, and where they begin

WINDOW_BYTES = 2 << 20
"""Payloads of so many bytes and more go by way of windows; for smaller ones MPI takes fewer steps."""
PIECE_BYTES = 64 << 20
"""What a call puts into a window at a time."""


class HierarchicalTransport(ByMailbox, Transport):
    """Ranks on several nodes.

    Attributes:
        flat: MPI among all ranks.
        node: the ranks of this node, who share memory.
        seating: which ranks share a node.
    """

    name = "mpi"

    def __init__(self, flat: MPITransport, seating: Seating, memory: NodeMemory, block: int) -> None:
        """Make one out of its parts, which it closes.

        Args:
            flat: among all ranks.
            seating: of its ranks.
            memory: of the processes of this node.
            block: address of a block that `lend_group` has lent to this node's ranks.
        """
        super().__init__(
            flat.rank, flat.size, group=flat.group, timeout_s=flat.timeout_s, activity=flat.activity
        )
        self.flat, self.seating = flat, seating
        self.mailbox, self._memory = flat.mailbox, memory
        self.mailbox.reserve(EXCHANGE_TAG + 1)
        self._home = seating.home(self.rank)
        local = seating.nodes[self._home]
        place = local.index(self.rank)
        mailbox = self.mailbox.part(local, place, 0)
        mailbox.lookout = _NodeLookout(mailbox.lookout, local)
        self.node = NodeTransport(
            Place(memory, tuple(seating.seats[r][1] for r in local), block), place, mailbox,
            group=f"{flat.group}/node", timeout_s=self.timeout_s, activity=self.activity,
        )  # fmt: skip
        self.node.check = "off"  # calls are compared among all ranks before any part begins
        others = [node for node in range(len(seating.nodes)) if node != self._home]
        self._contacts = [seating.contact(self.rank, node) for node in others]
        self._serves = [
            r for node in others for r in seating.nodes[node] if seating.contact(r, self._home) == self.rank
        ]
        self._lends = False

    @property
    def node_size(self) -> int | None:
        """Ranks a node, where all have as many and they are numbered node by node."""
        nodes = self.seating.nodes
        size = len(nodes[0])
        in_order = all(list(ranks) == list(range(i * size, (i + 1) * size)) for i, ranks in enumerate(nodes))
        return size if in_order else None

    def way_between(self, one: int, other: int) -> tuple[str, str]:
        if self.seating.home(one) != self.seating.home(other):
            return self.flat.way_between(one, other)[0], "they are on different nodes"
        if self.seating.home(one) == self._home:
            return self.node.way_between(one, other)
        return "shared memory", "they are on one node, which is not this rank's"

    def empty(self, shape: int | Sequence[int], dtype: Any) -> Array:
        """Return an array, not filled, in memory that the other ranks of the node read where it lies."""
        return self.node.empty(shape, dtype)

    def new_reach(self) -> NodeReach:
        homes = [self.seating.home(rank) for rank in range(self.size)]
        return NodeReach(self.node.runner, homes, self._home)

    def fold(self, terms: Sequence[Array], out: Array, op: str, divisor: int = 1) -> None:
        """Write the reduction of arrays of any strides into `out`, in tree order; a step of this rank alone."""
        self.node.fold(terms, out, op, divisor)

    # ---- primitives

    def compare(self, signature: int) -> bool:
        return self.flat.compare(signature)

    def gather_facts(self, record: np.ndarray) -> np.ndarray:
        return self.flat.gather_facts(record)

    def all_to_all_v(
        self, send: Array, send_counts: Sequence[int], send_displs: Sequence[int], recv: Array,
        recv_counts: Sequence[int], recv_displs: Sequence[int],
    ) -> None:  # fmt: skip
        self.flat.all_to_all_v(send, send_counts, send_displs, recv, recv_counts, recv_displs)

    def gather(self, send: Array, recv: Array | None, root: int) -> None:
        self.flat.gather(send, recv, root)

    def scatter(self, send: Array | None, recv: Array, root: int) -> None:
        self.flat.scatter(send, recv, root)

    def barrier(self) -> None:
        self.flat.barrier()

    def _plan_barrier(self, call: Call, dtype: Any, elems: int) -> Run:
        if self.check == "off":
            return lambda send, recv: self.flat.barrier()
        return lambda send, recv: self.verify(call)  # which nobody is through with before all have come

    def native_all_reduce(self, send: Array, recv: Array, op: str) -> bool:
        return self.flat.native_all_reduce(send, recv, op)

    def native_reduce_scatter(self, send: Array, recv: Array, op: str) -> bool:
        return self.flat.native_reduce_scatter(send, recv, op)

    # ---- between nodes

    def _large(self, size_bytes: int) -> bool:
        return size_bytes >= WINDOW_BYTES

    def _cross(self, send: Array, to: Mapping[int, Span], recv: Array, come: Mapping[int, Span]) -> None:
        """Send parts to ranks of other nodes, and receive parts from some."""
        nothing = (0, 0)
        sent = [to.get(r, nothing) for r in range(self.size)]
        received = [come.get(r, nothing) for r in range(self.size)]
        self.flat.all_to_all_v(
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
        self.node.barrier()

    def _from_root(self, buf: Array | None, elems: int, dtype: Any, root: int) -> Array:
        """Return a window with root's buffer.

        Collective: all ranks of the communicator call this.
        """
        window = self.node.common(elems, dtype)
        counts, displs = cut(self, elems)
        source = self.seating.home(root)
        if self._home == source:
            if self.rank == root:
                window[...] = buf
            self.node.barrier()
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
        return share(self.node, ALL_REDUCE, call, send, "sum" if op == "avg" else op, "fast")

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
        counts, displs = cut(self, send.size)
        partial = self._partial(call, send, op)
        own = np.empty(counts[self.rank], send.dtype)
        self._finish(partial, counts, displs, own, op)
        # The rank that receives a part of the result has sent that part of the operand itself: it is free.
        window = partial if partial.dtype == send.dtype else self.node.common(send.size, send.dtype)
        self._spread(own, window, counts, displs)
        return window

    # ---- plans of reductions

    def _plan_all_reduce(self, call: Call, dtype: Any, elems: int, op: str, order: str) -> Run | None:
        pieces = self._pieces(dtype, elems, elems, op, order)
        if not pieces:
            return None

        def run(send: Array, recv: Array) -> None:
            self.verify(call)
            r = recv.reshape(-1)
            s = _kept_whole(send.reshape(-1), r, pieces)
            for start, stop in pieces:
                r[start:stop] = self._reduced(call, s[start:stop], op)

        return run

    def _plan_reduce_scatter(self, call: Call, dtype: Any, elems: int, op: str, order: str) -> Run | None:
        pieces, size = self._pieces(dtype, elems, elems * self.size, op, order), self.size
        if not pieces:
            return None

        def run(send: Array, recv: Array) -> None:
            self.verify(call)
            rows, r = send.reshape(size, elems), recv.reshape(-1)
            if len(pieces) > 1 and np.may_share_memory(rows, r):
                rows = rows.copy()
            for start, stop in pieces:
                n = stop - start
                partial = self._partial(call, rows[:, start:stop].reshape(-1), op)
                self._finish(partial, [n] * size, [n * i for i in range(size)], r[start:stop], op)

        return run

    def _plan_reduce(self, call: Call, dtype: Any, elems: int, op: str, root: int, order: str) -> Run | None:
        pieces, zero = self._pieces(dtype, elems, elems, op, order), [0] * self.size
        if not pieces:
            return None

        def run(send: Array, recv: Array | None) -> None:
            self.verify(call)
            r = None if recv is None else recv.reshape(-1)
            s = _kept_whole(send.reshape(-1), r, pieces)
            for start, stop in pieces:
                counts, displs = cut(self, stop - start)
                own = np.empty(counts[self.rank], dtype)
                self._finish(self._partial(call, s[start:stop], op), counts, displs, own, op)
                to_root = [own.size if i == root else 0 for i in range(self.size)]
                if r is None:
                    self.all_to_all_v(own, to_root, zero, own[:0], zero, zero)
                else:
                    self.all_to_all_v(own, to_root, zero, r[start:stop], counts, displs)

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
        self.verify(call)
        window = self.node.common(send.size * self.size, send.dtype)
        self._spread(send, window, [send.size] * self.size, [send.size * i for i in range(self.size)])
        return window

    def _shared_all_reduce(self, call: Call, send: Array, op: str, order: str) -> Array:
        self.verify(call)
        if order == "fast" and partial_dtype(send.dtype, op) is not None:
            return self._reduced(call, send, op)
        counts, displs = cut(self, send.size)
        own = np.empty(counts[self.rank], send.dtype)
        fold(self.terms(send, counts, displs), own, op, order)
        window = self.node.common(send.size, send.dtype)
        self._spread(own, window, counts, displs)
        return window

    def _shared_broadcast(self, call: Call, buf: Array | None, root: int) -> Array:
        self.verify(call)
        dtype, shape = shape_at_root(self, buf, root)
        flat = None if buf is None else buf.reshape(-1)
        return self._from_root(flat, math.prod(shape), dtype, root).reshape(shape)

    # ---- moves of many bytes

    def all_gather_v(self, send: Array, recv: Array, counts: Sequence[int], displs: Sequence[int]) -> None:
        whole_bytes = sum(counts) * recv.itemsize
        if not self._large(whole_bytes):
            self.flat.all_gather_v(send, recv, counts, displs)
            return
        pieces = -(-whole_bytes // PIECE_BYTES)
        if pieces > 1 and np.may_share_memory(send, recv):
            send = send.copy()
        for i in range(pieces):
            spans = [split_interval((0, n), pieces, i) for n in counts]
            sizes = [stop - start for start, stop in spans]
            places = [sum(sizes[:r]) for r in range(self.size)]
            window = self.node.common(sum(sizes), recv.dtype)
            self._spread(send[slice(*spans[self.rank])], window, sizes, places)
            for (start, stop), displ, place in zip(spans, displs, places, strict=True):
                recv[displ + start : displ + stop] = window[place : place + stop - start]

    def broadcast(self, buf: Array, root: int) -> None:
        if not self._large(buf.nbytes):
            self.flat.broadcast(buf, root)
            return
        for start, stop in _ranges(buf.size, buf.nbytes):
            part = buf[start:stop]
            window = self._from_root(part, part.size, part.dtype, root)
            if self.rank != root:
                part[...] = window

    plans: ClassVar[Mapping[str, Planner]] = {
        "all_reduce": _plan_all_reduce,
        "reduce_scatter": _plan_reduce_scatter,
        "reduce": _plan_reduce,
        "barrier": _plan_barrier,
    }
    shared_plans: ClassVar[Mapping[str, Planner]] = {
        "all_gather": _shared_all_gather,
        "all_reduce": _shared_all_reduce,
        "broadcast": _shared_broadcast,
    }

    # ---- groups and life

    def split(self, color: int | None, key: int) -> Transport | None:
        asked = self.gather_facts(
            np.array([-1 if color is None else color, key, self.mailbox.next_tag], np.int64)
        )
        tag = int(asked[:, 2].max())
        self.mailbox.reserve(tag + 1)
        groups = {c: members_of(asked, c) for c in {int(row[0]) for row in asked} - {-1}}
        seatings = {c: self.seating.part(ranks) for c, ranks in groups.items()}
        # The first of a group's ranks on a node lends what they meet in.
        ranks = groups.get(-1 if color is None else color, [])
        local = [r for r in ranks if self.seating.home(r) == self._home]
        lent = Lent(lambda: lend_group(self._memory, len(local))) if local[:1] == [self.rank] else Lent(None)
        places = self.gather_facts(lent.facts)
        lent.check(places, self._memory)
        spans = {c for c, seating in seatings.items() if len(seating.nodes) > 1}
        comm = None
        if spans:
            # MPI has no split that can be given up. All ranks are here, since they were compared a moment ago.
            mpi = self.flat._mpi
            comm = self.flat._comm.Split(
                color if color in spans else mpi.UNDEFINED, ranks.index(self.rank) if ranks else 0
            )
        self._lends = self._lends or bool(groups)
        if color is None:
            return None
        name, rank = f"{self.group}/{tag}.{color}", ranks.index(self.rank)
        # Messages of all groups go over the communicator that the side channel watches.
        mailbox = self.mailbox.part(ranks, rank, tag)
        at = self._memory.address(self.seating.seats[local[0]][1], *(int(word) for word in places[local[0]]))
        if color not in spans:
            members = tuple(self.seating.seats[r][1] for r in ranks)
            return NodeTransport(
                Place(self._memory, members, at), rank, mailbox, group=name, timeout_s=self.timeout_s,
                activity=self.activity,
            )  # fmt: skip
        flat = MPITransport(
            comm, owned=True, lookout=self.flat._lookout, group=name, timeout_s=self.timeout_s,
            activity=self.activity, mailbox=mailbox,
        )  # fmt: skip
        if seatings[color].shares:
            return HierarchicalTransport(flat, seatings[color], self._memory, at)
        return flat

    def end(self) -> None:
        super().end()
        self.failed = self.failed or self.node.failed
        self.node.close()
        if self._lends and self.mailbox._comm is self.flat._comm:
            return  # messages of its groups go over it
        self.flat.failed = self.flat.failed or self.failed
        self.flat.close()


class _NodeLookout(Lookout):
    """What waits inside a node look at: ranks are named as all others know them."""

    def __init__(self, whole: Lookout, ranks: Sequence[int]) -> None:
        super().__init__(whole.watch, whole.activity)
        self._whole, self._ranks = whole, ranks
        self.flag_address, self._flag = whole.flag_address, whole._flag

    def late(
        self, what: str, missing: Sequence[int], timeout_s: float, watched: Sequence[int] = ()
    ) -> TimedOut:
        """Return the error for a wait whose time is over; see `Lookout.late`."""
        return super().late(what, [self._ranks[r] for r in missing], timeout_s, watched)


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


def _kept_whole(send: Array, recv: Array | None, pieces: Sequence[Span]) -> Array:
    """Return an operand that no earlier piece of the result is written over: a copy where it is not in place."""
    moved = recv is not None and np.may_share_memory(send, recv) and send.ctypes.data != recv.ctypes.data
    return send.copy() if moved and len(pieces) > 1 else send


def _nothing(dtype: Any) -> Array:
    return np.empty(0, dtype)
