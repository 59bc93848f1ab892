"""The communicator contract: collectives over raw buffers, the same on every transport.

Everything users see lives here once: checks, reductions in a fixed order, counting of traffic. How bytes
move is the transport's (`lowshard.comm.transport`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from lowshard.box import split_interval
from lowshard.comm import check
from lowshard.comm.reduction import divide, fold
from lowshard.comm.transport import Transport
from lowshard.errors import CommError

Array = Any  # a NumPy or CuPy array; CuPy ships no types
Op = Literal["sum", "avg", "min", "max", "prod"]
Order = Literal["fast", "tree", "rank"]

# Below this a reduction gathers whole operands and folds them locally: one message instead of two.
_ONE_MESSAGE_BYTES = 4096


class Communicator(Transport):
    """Collectives over the buffers of a group of ranks.

    Buffers are C-contiguous arrays of `xp` with a dtype of the table; counts are in elements. Every
    method but the attributes is collective: all ranks of the communicator call it, in one order
    (`send` and `recv`: the two ranks concerned). Results are written into the buffers given.
    """

    @property
    def control(self) -> Communicator:
        """A communicator over host memory for checks and small facts; itself on a CPU."""
        return self

    # ---- moves

    def all_gather(self, send: Array, recv: Array) -> None:
        """Put every rank's `send` into `recv` on all ranks, in rank order.

        Collective: all ranks of the communicator call this. recv holds size x send elements. In
        place: pass this rank's own part of recv as send.

        Raises:
            BufferMismatchError: shape, dtype, device or memory order do not fit.
            CommError: the communicator is closed.
        """
        s, r = self._flat(send, "send"), self._flat(recv, "recv", writes=True)
        check.same_dtype(s, r)
        check.need(
            r.size == s.size * self.size,
            "all_gather",
            "recv holds size x send elements",
            s.size * self.size,
            r.size,
        )
        self.traffic.add("all_gather", s.nbytes * (self.size - 1), s.nbytes * (self.size - 1))
        self._all_gather_v(s, r, [s.size] * self.size, [s.size * i for i in range(self.size)])

    def all_gather_v(
        self, send: Array, recv: Array, recv_counts: Sequence[int], recv_displs: Sequence[int]
    ) -> None:
        """Put every rank's `send`, of its own length, into `recv` on all ranks.

        Collective: all ranks of the communicator call this. `recv_counts[i]` elements of rank i land
        at `recv_displs[i]`. In place: pass this rank's own part of recv as send.

        Raises:
            BufferMismatchError: counts do not fit the buffers, or the buffers are not as required.
            CommError: the communicator is closed.
        """
        s, r = self._flat(send, "send"), self._flat(recv, "recv", writes=True)
        check.same_dtype(s, r)
        counts, displs = check.spans("recv", self.size, r, recv_counts, recv_displs)
        check.need(
            s.size == counts[self.rank],
            "all_gather_v",
            "send holds its own recv_counts entry",
            counts[self.rank],
            s.size,
        )
        moved = (sum(counts) - s.size) * s.itemsize
        self.traffic.add("all_gather_v", s.nbytes * (self.size - 1), moved)
        self._all_gather_v(s, r, counts, displs)

    def all_to_all(self, send: Array, recv: Array) -> None:
        """Send part j of `send` to rank j, and put what rank i sent into part i of `recv`.

        Collective: all ranks of the communicator call this. Both hold the same number of elements, a
        multiple of size.

        Raises:
            BufferMismatchError: as for all_gather, or the elements do not divide by size.
            CommError: the communicator is closed.
        """
        s, r = self._flat(send, "send"), self._flat(recv, "recv", writes=True)
        check.same_dtype(s, r)
        check.need(r.size == s.size, "all_to_all", "recv holds as many elements as send", s.size, r.size)
        check.need(
            s.size % self.size == 0,
            "all_to_all",
            f"elements divide by size {self.size} (else use all_to_all_v)",
            f"a multiple of {self.size}",
            s.size,
        )
        each = s.size // self.size
        counts, displs = [each] * self.size, [each * i for i in range(self.size)]
        self.traffic.add("all_to_all", s.nbytes - each * s.itemsize, r.nbytes - each * r.itemsize)
        self._all_to_all_v(s, counts, displs, r, counts, displs)

    def all_to_all_v(
        self,
        send: Array,
        send_counts: Sequence[int],
        send_displs: Sequence[int],
        recv: Array,
        recv_counts: Sequence[int],
        recv_displs: Sequence[int],
    ) -> None:
        """Send `send_counts[j]` elements at `send_displs[j]` to rank j, and receive likewise.

        Collective: all ranks of the communicator call this. Counts may be 0 and differ; send parts
        may overlap, receive parts must not.

        Raises:
            BufferMismatchError: a count or displacement leaves its buffer, or as for all_gather.
            CommError: the communicator is closed.
        """
        s, r = self._flat(send, "send"), self._flat(recv, "recv", writes=True)
        check.same_dtype(s, r)
        sc, sd = check.spans("send", self.size, s, send_counts, send_displs)
        rc, rd = check.spans("recv", self.size, r, recv_counts, recv_displs)
        check.need(
            sc[self.rank] == rc[self.rank],
            "all_to_all_v",
            "a rank sends itself what it receives from itself",
            sc[self.rank],
            rc[self.rank],
        )
        own = sc[self.rank]
        self.traffic.add("all_to_all_v", (sum(sc) - own) * s.itemsize, (sum(rc) - own) * r.itemsize)
        self._all_to_all_v(s, sc, sd, r, rc, rd)

    def broadcast(self, buf: Array, root: int = 0) -> None:
        """Copy root's `buf` into every rank's `buf`.

        Collective: all ranks of the communicator call this.

        Raises:
            BufferMismatchError: as for all_gather.
            CommError: the communicator is closed, or there is no such root.
        """
        b = self._flat(buf, "buf", writes=self.rank != root)
        self._root(root)
        mine = self.rank == root
        self.traffic.add("broadcast", b.nbytes * (self.size - 1) if mine else 0, 0 if mine else b.nbytes)
        self._broadcast(b, root)

    def gather(self, send: Array, recv: Array | None, root: int = 0) -> None:
        """Put every rank's `send` into root's `recv`, in rank order; others pass recv=None.

        Collective: all ranks of the communicator call this.

        Raises:
            BufferMismatchError: as for all_gather, or root passed no recv.
            CommError: the communicator is closed, or there is no such root.
        """
        s = self._flat(send, "send")
        self._root(root)
        r = self._root_buffer(recv, "recv", root, s, s.size * self.size)
        mine = self.rank == root
        self.traffic.add("gather", 0 if mine else s.nbytes, s.nbytes * (self.size - 1) if mine else 0)
        self._gather(s, r, root)

    def scatter(self, send: Array | None, recv: Array, root: int = 0) -> None:
        """Put part i of root's `send` into rank i's `recv`; others pass send=None.

        Collective: all ranks of the communicator call this.

        Raises:
            BufferMismatchError: as for all_gather, or root passed no send.
            CommError: the communicator is closed, or there is no such root.
        """
        r = self._flat(recv, "recv", writes=True)
        self._root(root)
        s = self._root_buffer(send, "send", root, r, r.size * self.size)
        mine = self.rank == root
        self.traffic.add("scatter", r.nbytes * (self.size - 1) if mine else 0, 0 if mine else r.nbytes)
        self._scatter(s, r, root)

    def send(self, buf: Array, dst: int) -> None:
        """Send `buf` to rank `dst`, which calls `recv`.

        Raises:
            BufferMismatchError: as for all_gather.
            CommError: the communicator is closed, or dst is no other rank of it.
        """
        b = self._flat(buf, "buf")
        self._peer(dst, "dst")
        self.traffic.add("send", b.nbytes, 0)
        self._send(b, dst)

    def recv(self, buf: Array, src: int) -> None:
        """Receive into `buf` what rank `src` sends; sizes and dtypes agree.

        Raises:
            BufferMismatchError: as for all_gather.
            CommError: the communicator is closed, or src is no other rank of it.
        """
        b = self._flat(buf, "buf", writes=True)
        self._peer(src, "src")
        self.traffic.add("recv", 0, b.nbytes)
        self._recv(b, src)

    def barrier(self) -> None:
        """Return once every rank has called it.

        Collective: all ranks of the communicator call this.
        """
        self._open()
        self.traffic.add("barrier", 0, 0)
        self._barrier()

    # ---- reductions

    def all_reduce(self, send: Array, recv: Array, op: Op = "sum", order: Order = "fast") -> None:
        """Reduce every rank's `send` elementwise and put the result into every rank's `recv`.

        Collective: all ranks of the communicator call this. In place: pass one array as both.
        bf16, fp16 and fp8 accumulate in float32 and are rounded once.

        Args:
            send: this rank's operand.
            recv: the result, as many elements as send.
            op: sum, avg (integers: floor), min, max or prod.
            order: "tree" (balanced binary tree over ranks) and "rank" (one after the other) give the
                same bits on every transport; "fast" is the transport's own.

        Raises:
            BufferMismatchError: as for all_gather.
            CommError: the communicator is closed; unknown op or order.
            DTypeError: the op makes no sense for the dtype (avg of bool).
        """
        s, r = self._flat(send, "send"), self._flat(recv, "recv", writes=True)
        check.same_dtype(s, r)
        check.reducible(s, op, order)
        check.need(r.size == s.size, "all_reduce", "recv holds as many elements as send", s.size, r.size)
        counts, displs = self._cut(s.size)
        moved = (s.size - counts[self.rank]) * s.itemsize + counts[self.rank] * (self.size - 1) * s.itemsize
        self.traffic.add("all_reduce", moved, moved)
        if order == "fast" and self._native(self._native_all_reduce, s, r, op):
            return
        if s.nbytes <= _ONE_MESSAGE_BYTES:
            n = s.size
            terms = self.xp.empty((self.size, n), s.dtype)
            self._all_gather_v(s, terms.reshape(-1), [n] * self.size, [n * i for i in range(self.size)])
            fold(list(terms), r, op, order)
        else:
            own = r[displs[self.rank] : displs[self.rank] + counts[self.rank]]
            fold(self._terms(s, counts, displs), own, op, order)
            self._all_gather_v(own, r, counts, displs)

    def reduce_scatter(self, send: Array, recv: Array, op: Op = "sum", order: Order = "fast") -> None:
        """Reduce every rank's `send` elementwise and put part i of the result into rank i's `recv`.

        Collective: all ranks of the communicator call this. send holds size x recv elements. op and
        order: as for all_reduce.

        Raises:
            BufferMismatchError: as for all_gather.
            CommError: the communicator is closed; unknown op or order.
            DTypeError: the op makes no sense for the dtype.
        """
        s, r = self._flat(send, "send"), self._flat(recv, "recv", writes=True)
        check.same_dtype(s, r)
        check.reducible(s, op, order)
        check.need(
            s.size == r.size * self.size,
            "reduce_scatter",
            "send holds size x recv elements",
            r.size * self.size,
            s.size,
        )
        self.traffic.add("reduce_scatter", r.nbytes * (self.size - 1), r.nbytes * (self.size - 1))
        if order == "fast" and self._native(self._native_reduce_scatter, s, r, op):
            return
        counts, displs = [r.size] * self.size, [r.size * i for i in range(self.size)]
        fold(self._terms(s, counts, displs), r, op, order)

    def reduce(
        self, send: Array, recv: Array | None, op: Op = "sum", root: int = 0, order: Order = "fast"
    ) -> None:
        """Reduce every rank's `send` elementwise into root's `recv`; others pass recv=None.

        Collective: all ranks of the communicator call this. op and order: as for all_reduce.

        Raises:
            BufferMismatchError: as for all_gather, or root passed no recv.
            CommError: the communicator is closed; no such root; unknown op or order.
            DTypeError: the op makes no sense for the dtype.
        """
        s = self._flat(send, "send")
        self._root(root)
        check.reducible(s, op, order)
        r = self._root_buffer(recv, "recv", root, s, s.size)
        counts, displs = self._cut(s.size)
        own = self.xp.empty(counts[self.rank], s.dtype)
        out = (s.size - counts[self.rank]) * s.itemsize
        back = 0 if self.rank == root else own.nbytes
        self.traffic.add("reduce", out + back, own.nbytes * (self.size - 1) + (out if r is not None else 0))
        fold(self._terms(s, counts, displs), own, op, order)
        zero = [0] * self.size
        to_root = [own.size if i == root else 0 for i in range(self.size)]
        if r is None:
            self._all_to_all_v(own, to_root, zero, own[:0], zero, zero)
        else:
            self._all_to_all_v(own, to_root, zero, r, counts, displs)

    def _native(self, call: Callable[[Array, Array, str], bool], send: Array, recv: Array, op: str) -> bool:
        """Try the transport's own reduction; an average is its sum, divided."""
        if op != "avg":
            return call(send, recv, op)
        # The sum of integers might wrap in their own width, which the exchange sums in 64 bits.
        if send.dtype.kind in "iu" or not call(send, recv, "sum"):
            return False
        divide(recv, self.size)
        return True

    def _terms(self, send: Array, counts: Sequence[int], displs: Sequence[int]) -> list[Array]:
        """Return every rank's operand for this rank's part, in rank order: an exact exchange."""
        n = counts[self.rank]
        terms = self.xp.empty((self.size, n), send.dtype)
        self._all_to_all_v(
            send, counts, displs, terms.reshape(-1), [n] * self.size, [n * i for i in range(self.size)]
        )
        return list(terms)

    def _cut(self, elems: int) -> tuple[list[int], list[int]]:
        """Return the balanced split of elements over ranks as counts and displacements."""
        parts = [split_interval((0, elems), self.size, i) for i in range(self.size)]
        return [stop - start for start, stop in parts], [start for start, _ in parts]

    # ---- groups

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Return the communicator of the ranks with the same colour, ordered by key, then rank.

        Collective: all ranks of the communicator call this. A rank with color=None gets None.

        Raises:
            CommError: the communicator is closed, or color is negative.
        """
        self._open()
        if color is not None and color < 0:
            raise CommError(f"split takes a color >= 0, or None for a rank that takes no part; got {color}")
        self.traffic.add("split", 0, 0)
        return self._split(color, key)
