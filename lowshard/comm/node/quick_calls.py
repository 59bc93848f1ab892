"""The public collectives where they were made before: one compiled step, no check nor record in Python.

The first call of its kind takes the long way (`lowshard.comm.protocol`) and is entered in a table then
(`lowshard.comm.node.call_table`). Whatever differs from then on, be it a dtype or a flag of an array, takes the long
way too.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np

from lowshard.comm import check
from lowshard.comm.activity import CALL_BYTES, Activity
from lowshard.comm.call import Call
from lowshard.comm.call_cache import key_of
from lowshard.comm.node import call_row as r
from lowshard.comm.node import call_table as t
from lowshard.comm.node.call_runner import address_of
from lowshard.comm.node.messages import NodeMailbox
from lowshard.comm.node.node_plan import NodePlans, Spans
from lowshard.comm.node.node_rendezvous import FAULTY, MISSING, OK, UNEQUAL
from lowshard.comm.work import Op, Order, Stream

Array = Any

(
    ALL_GATHER, ALL_TO_ALL, BROADCAST, GATHER, SCATTER, ALL_REDUCE, REDUCE_SCATTER, REDUCE, BARRIER, ALL_TO_ALL_V,
    SEND, RECV, SEND_RECV,
) = range(13)  # fmt: skip
_ORDERS = ("fast", "tree", "rank")
_REDUCTIONS = {
    (op, order): 16 * i
    for i, (op, order) in enumerate(
        (op, order) for op in ("sum", "avg", "min", "max", "prod") for order in _ORDERS
    )
}
_ROOT = 1 << 12
"""What is asked, as a number: collective, plus its reduction, plus its root (or number of counts) times this."""

_ENTRIES = 128
_COUNTS_KEPT = 256


class Table:
    """The calls of one communicator that compiled code finds by itself."""

    def __init__(self, ctx: int, activity: Activity) -> None:
        self._activity = activity
        self._head = np.zeros(t.HEAD_WORDS, np.int64)
        self._entries = np.zeros((1, t.ENTRY_WORDS), np.int64)  # most communicators make few calls
        self._kept: dict[int, tuple[Call, Any]] = {}
        head = self._head
        head[t.CONTEXT], head[t.ARRAY_TYPE] = ctx, id(np.ndarray)
        head[t.TEXT], head[t.RING] = activity.text_address, activity.ring_address
        head[t.RING_COUNT] = activity.count_address
        head[t.ENTRIES] = address_of(self._entries)
        self.address = address_of(head)

    def __del__(self) -> None:
        self._activity.forget(self._kept)

    def last(self) -> Call:
        """Return the call that was run last."""
        return self._kept[int(self._head[t.LAST])][0]

    def add(self, act: int, call: Call, row: np.ndarray, send: Array | None, recv: Array | None) -> None:
        """Enter a call, for buffers such as these."""
        dtypes = [buf.dtype for buf in (send, recv) if buf is not None]
        dtype = id(dtypes[0]) if dtypes else 0
        elems = [t.NONE if buf is None else buf.size for buf in (send, recv)]
        if len(self._kept) * 4 >= len(self._entries) * 3:
            self._renew()
        at = self._free(act, dtype, *elems)
        if at is None:
            self._renew()
            at = self._free(act, dtype, *elems)
            assert at is not None
        encoded = np.zeros(CALL_BYTES, np.uint8)
        encoded[: len(call.record.encoded)] = np.frombuffer(call.record.encoded, np.uint8)
        name = self._activity.name(call.record)
        self._kept[name] = call, (encoded, row, dtypes)
        self._entries[at] = act, dtype, *elems, address_of(row), address_of(encoded), 0, name

    def _free(self, act: int, dtype: int, send_elems: int, recv_elems: int) -> int | None:
        """Return the place of an entry that may be written: an empty one, or that of the same call."""
        mask = len(self._entries) - 1
        first = int(t.place_of.py_func(act, dtype, send_elems, recv_elems, mask))
        for i in range(t.PROBES):
            at = (first + i) & mask
            entry = self._entries[at].tolist()
            if not entry[t.ROW] or entry[: t.ROW] == [act, dtype, send_elems, recv_elems]:
                return at
        return None

    def _renew(self) -> None:
        """Empty the table; sizes that never come back must not fill it."""
        self._unread = [*self.take_uses(), *self._unread]
        self._activity.forget(self._kept)
        self._kept.clear()
        self._entries = np.zeros((_ENTRIES, t.ENTRY_WORDS), np.int64)
        self._head[t.ENTRIES], self._head[t.MASK] = address_of(self._entries), _ENTRIES - 1

    _unread: Iterable[tuple[Call, int]] = ()

    def take_uses(self) -> list[tuple[Call, int]]:
        """Return the calls and how often each was run since this was asked."""
        used = [*self._unread]
        self._unread = ()
        for entry in self._entries:
            if entry[t.USES]:
                used.append((self._kept[int(entry[t.NAME])][0], int(entry[t.USES])))
                entry[t.USES] = 0
        return used


class QuickCalls(NodePlans):
    """The collectives, each by the table if it may be."""

    _table: Table | None = None
    _quick: Callable[..., int]
    _head: int

    def _open_table(self) -> None:
        """Begin to keep a table, once the context is laid out."""
        self._acts: dict[object, int] = {}
        self._acts_made = 0
        if self.size > 1 and arrays_are_as_expected():
            self._table = Table(self._ctx, self._activity)
            self._head, self._quick = self._table.address, self._compiled.quick
            self.traffic.sources.append(self._table.take_uses)
        else:
            self._close_table()

    def _close_table(self) -> None:
        """Take the long way from here on."""
        self._quick, self._head = _unknown, 0

    def _ran(self, act: int, send: int, recv: int) -> bool:
        """Run a call by the table and say whether it was there; buffers by their `id`, 0 for none."""
        if self._batch is not None or (self._worker is not None and not self._worker.idle):
            return False
        if not self._turn.acquire(False):
            self._not_its_turn("a collective")
        try:
            sequence = self._sequence + 1
            code = self._quick(self._head, act, sequence, send, recv)
            if code == t.UNKNOWN:
                return False
            self._sequence = sequence
        finally:
            self._turn.release()
        if code != OK:
            self._after(code)
        return True

    def _after(self, code: int) -> None:
        """Map what peers have made, and raise what a call ended with."""
        if code & t.NEW_SEGMENTS:
            self._place.memory.map_new()
        assert self._table is not None
        call, code = self._table.last(), code & ~t.NEW_SEGMENTS
        try:
            if code == UNEQUAL:
                self._unequal(call.text, call.prepared)
            self._end(code, call.text)
        finally:
            self._activity.leave()

    def _learn(self, act: int, key: object, send: Array | None, recv: Array | None) -> None:
        """Enter a call that has just been made the long way, if a row is all there is to it."""
        if self._table is None or self._batch is not None:
            return
        call = self._calls.get(key)
        if call is None:
            return
        buffers = [buf for buf in (send, recv) if buf is not None]
        if any(type(buf) is not np.ndarray or buf.dtype is not buffers[0].dtype for buf in buffers):
            return
        row = call.prepared
        if row is None and call.name in ("send", "recv", "send_recv"):
            row = call.prepared = self._message_row(call, act, send, recv)
        if isinstance(row, Spans):
            row = self._exchange_row(call, send, recv)
        if row is not None:
            self._table.add(act, call, row, send, recv)

    # ---- the collectives, as in Communicator

    def all_gather(
        self, send: Array, recv: Array | None = None, *, shared: bool = False, stream: Stream = None
    ) -> Array | None:
        """Put every rank's `send` into `recv` on all ranks; see `Communicator.all_gather`."""
        if stream is not None:
            return self._on_stream(stream, "all_gather", send, recv, shared=shared)
        if shared:
            return super().all_gather(send, recv, shared=True)
        if not self._ran(ALL_GATHER, id(send), id(recv)):
            super().all_gather(send, recv)
            self._learn(ALL_GATHER, ("all_gather", key_of(send)), send, recv)
        return None

    def all_to_all(self, send: Array, recv: Array, *, stream: Stream = None) -> None:
        """Send part j of `send` to rank j; see `Communicator.all_to_all`."""
        if stream is not None:
            self._on_stream(stream, "all_to_all", send, recv)
            return
        if not self._ran(ALL_TO_ALL, id(send), id(recv)):
            super().all_to_all(send, recv)
            self._learn(ALL_TO_ALL, ("all_to_all", key_of(send)), send, recv)

    def all_to_all_v(
        self, send: Array, send_counts: Sequence[int], send_displs: Sequence[int], recv: Array,
        recv_counts: Sequence[int], recv_displs: Sequence[int],
        *, stream: Stream = None,
    ) -> None:  # fmt: skip
        """Send parts of any length to the others; see `Communicator.all_to_all_v`."""
        if stream is not None:
            self._on_stream(
                stream, "all_to_all_v", send, send_counts, send_displs, recv, recv_counts, recv_displs
            )
            return
        spans = send_counts, send_displs, recv_counts, recv_displs
        try:
            key = *map(tuple, spans), send.ndim, recv.ndim
        except (AttributeError, TypeError):
            super().all_to_all_v(send, send_counts, send_displs, recv, recv_counts, recv_displs)
            return
        act = self._acts.get(key, t.NONE)
        if act == t.NONE or not self._ran(act, id(send), id(recv)):
            super().all_to_all_v(send, send_counts, send_displs, recv, recv_counts, recv_displs)
            known = self._counts_key(send, send_counts, send_displs, recv, recv_counts, recv_displs)
            if known in self._calls:
                if act == t.NONE:
                    act = self._new_act(key)
                self._learn(act, known, send, recv)

    def _new_act(self, key: object) -> int:
        """Return a number for an exchange of some counts."""
        if len(self._acts) >= _COUNTS_KEPT:
            self._acts.clear()
        self._acts_made += 1
        self._acts[key] = ALL_TO_ALL_V + _ROOT * self._acts_made
        return self._acts[key]

    def broadcast(
        self, buf: Array | None, root: int = 0, *, shared: bool = False, stream: Stream = None
    ) -> Array | None:
        """Copy root's `buf` into every rank's `buf`; see `Communicator.broadcast`."""
        if stream is not None:
            return self._on_stream(stream, "broadcast", buf, root, shared=shared)
        if shared:
            return super().broadcast(buf, root, shared=True)
        mine = self.rank == root
        act = _rooted(BROADCAST, root)
        if not self._ran(act, id(buf) if mine else 0, 0 if mine else id(buf)):
            super().broadcast(buf, root)
            self._learn(act, ("broadcast", key_of(buf), root), buf if mine else None, None if mine else buf)
        return None

    def gather(self, send: Array, recv: Array | None, root: int = 0, *, stream: Stream = None) -> None:
        """Put every rank's `send` into root's `recv`; see `Communicator.gather`."""
        if stream is not None:
            self._on_stream(stream, "gather", send, recv, root)
            return
        mine = self.rank == root
        act = _rooted(GATHER, root)
        if not self._ran(act, id(send), id(recv) if mine else 0):
            super().gather(send, recv, root)
            self._learn(act, ("gather", key_of(send), root), send, recv if mine else None)

    def scatter(self, send: Array | None, recv: Array, root: int = 0, *, stream: Stream = None) -> None:
        """Put part i of root's `send` into rank i's `recv`; see `Communicator.scatter`."""
        if stream is not None:
            self._on_stream(stream, "scatter", send, recv, root)
            return
        mine = self.rank == root
        act = _rooted(SCATTER, root)
        if not self._ran(act, id(send) if mine else 0, id(recv)):
            super().scatter(send, recv, root)
            self._learn(act, ("scatter", key_of(recv), root), send if mine else None, recv)

    def all_reduce(
        self, send: Array, recv: Array | None = None, op: Op = "sum", order: Order = "fast",
        *, shared: bool = False, stream: Stream = None,
    ) -> Array | None:  # fmt: skip
        """Reduce element by element over all ranks; see `Communicator.all_reduce`."""
        if stream is not None:
            return self._on_stream(stream, "all_reduce", send, recv, op, order, shared=shared)
        if (type(op), type(order)) != check.NAMES:
            op, order = check.names(op, order)  # type: ignore[assignment]  # checked where a call is made
        if shared:
            return super().all_reduce(send, recv, op, order, shared=True)
        act = _reducing(ALL_REDUCE, op, order)
        if not self._ran(act, id(send), id(recv)):
            super().all_reduce(send, recv, op, order)
            self._learn(act, ("all_reduce", key_of(send), op, order), send, recv)
        return None

    def reduce_scatter(
        self, send: Array, recv: Array, op: Op = "sum", order: Order = "fast", *, stream: Stream = None
    ) -> None:
        """Reduce over all ranks and keep this rank's part; see `Communicator.reduce_scatter`."""
        if stream is not None:
            self._on_stream(stream, "reduce_scatter", send, recv, op, order)
            return
        if (type(op), type(order)) != check.NAMES:
            op, order = check.names(op, order)  # type: ignore[assignment]  # checked where a call is made
        act = _reducing(REDUCE_SCATTER, op, order)
        if not self._ran(act, id(send), id(recv)):
            super().reduce_scatter(send, recv, op, order)
            self._learn(act, ("reduce_scatter", key_of(send), op, order), send, recv)

    def reduce(
        self, send: Array, recv: Array | None, op: Op = "sum", root: int = 0, order: Order = "fast",
        *, stream: Stream = None,
    ) -> None:  # fmt: skip
        """Reduce over all ranks into root's `recv`; see `Communicator.reduce`."""
        if stream is not None:
            self._on_stream(stream, "reduce", send, recv, op, root, order)
            return
        if (type(op), type(order)) != check.NAMES:
            op, order = check.names(op, order)  # type: ignore[assignment]  # checked where a call is made
        mine = self.rank == root
        act = _rooted(_reducing(REDUCE, op, order), root)
        if not self._ran(act, id(send), id(recv) if mine else 0):
            super().reduce(send, recv, op, root, order)
            self._learn(act, ("reduce", key_of(send), op, root, order), send, recv if mine else None)

    def send(self, buf: Array, dst: int, *, stream: Stream = None) -> None:
        """Send `buf` to rank `dst`; see `Communicator.send`."""
        if stream is not None:
            self._on_stream(stream, "send", buf, dst)
            return
        act = _rooted(SEND, dst)
        if ("send", dst) in self._mailbox.waiting or not self._sent(act, id(buf), 0):
            super().send(buf, dst)
            self._learn(act, ("send", key_of(buf), dst), buf, None)

    def recv(self, buf: Array, src: int, *, stream: Stream = None) -> None:
        """Receive into `buf` what rank `src` sends; see `Communicator.recv`."""
        if stream is not None:
            self._on_stream(stream, "recv", buf, src)
            return
        act = _rooted(RECV, src)
        if ("recv", src) in self._mailbox.waiting or not self._sent(act, 0, id(buf)):
            super().recv(buf, src)
            self._learn(act, ("recv", key_of(buf), src), None, buf)

    def send_recv(self, send: Array, dst: int, recv: Array, src: int, *, stream: Stream = None) -> None:
        """Send to rank `dst` and receive from rank `src` at once; see `Communicator.send_recv`."""
        if stream is not None:
            self._on_stream(stream, "send_recv", send, dst, recv, src)
            return
        both = dst * self.size + src if type(dst) is int and type(src) is int else -1
        act = _rooted(SEND_RECV, both)
        if self._mailbox.waiting or not self._sent(act, id(send), id(recv)):
            super().send_recv(send, dst, recv, src)
            self._learn(act, ("send_recv", key_of(send), dst, key_of(recv), src), send, recv)

    def _sent(self, act: int, send: int, recv: int) -> bool:
        """Run messages by the table and say whether they were there."""
        if self._batch is not None or (self._worker is not None and not self._worker.idle):
            return False
        if not self._turn.acquire(False):
            self._not_its_turn("a message")
        try:
            code = self._quick(self._head, act, 0, send, recv)
        finally:
            self._turn.release()
        if code == t.UNKNOWN:
            return False
        if code & t.NEW_SEGMENTS:
            self._place.memory.map_new()
            code &= ~t.NEW_SEGMENTS
        if code != OK:
            assert self._table is not None
            row = self._table.last().prepared
            assert isinstance(self._mailbox, NodeMailbox)
            peer, size = int(self._context[MISSING]), int(row[r.RECV_BYTES])
            if row[r.KIND] != r.SEND and code in (UNEQUAL, FAULTY):
                peer = int(row[r.FIRST + (row[r.KIND] == r.SEND_RECEIVE)])
            name = "send" if row[r.KIND] == r.SEND or (send and peer == row[r.FIRST]) else "recv"
            try:
                self._mailbox.end(self._context, code, name, size, peer)
            finally:
                self._activity.leave()
        return True

    def _message_row(self, call: Call, act: int, send: Array | None, recv: Array | None) -> np.ndarray | None:
        if not isinstance(self._mailbox, NodeMailbox):
            return None
        peers, sizes = act // _ROOT, [0 if buf is None else buf.nbytes for buf in (send, recv)]
        if call.name == "send_recv":
            return r.row_of(r.SEND_RECEIVE, 0, *sizes, r.APART, *divmod(peers, self.size))
        return r.row_of(r.RECEIVE if send is None else r.SEND, 0, *sizes, r.ANY, peers)

    def barrier(self) -> None:
        """Return once every rank has called it; see `Communicator.barrier`."""
        if not self._ran(BARRIER, 0, 0):
            super().barrier()
            self._learn(BARRIER, "barrier", None, None)


def _reducing(act: int, op: Any, order: Any) -> int:
    try:
        return act + _REDUCTIONS[op, order]
    except (KeyError, TypeError):  # the long way says what is wrong with it
        return t.NONE


def _rooted(act: int, root: Any) -> int:
    return act + _ROOT * root if type(root) is int and 0 <= root < 1 << 32 and act >= 0 else t.NONE


def _unknown(*args: int) -> int:
    return t.UNKNOWN


@cache
def arrays_are_as_expected() -> bool:
    """Say whether array objects are laid out in memory as `lowshard.comm.node.call_table` reads them."""
    if object.__basicsize__ != t.HEADER_BYTES or sys.byteorder != "little" or sys.maxsize < 2**62:
        return False
    frozen = np.arange(6.0)
    frozen.flags.writeable = False
    for array in (
        np.zeros(5, np.int8),
        np.zeros((2, 3, 4), np.float32),
        np.array(1),
        frozen,
        np.zeros(9)[::2],
    ):
        words = (ctypes.c_int64 * 9).from_address(id(array))
        kind, data, count, dims, _, _, dtype, flags = words[1:]
        count, flags = count & 0xFFFFFFFF, flags & 0xFFFFFFFF
        if (kind, data, count, dtype) != (id(np.ndarray), array.ctypes.data, array.ndim, id(array.dtype)):
            return False
        if list((ctypes.c_int64 * count).from_address(dims) if count else ()) != list(array.shape):
            return False
        known = array.flags
        if (bool(flags & 1), bool(flags & 0x400)) != (known.c_contiguous, known.writeable):
            return False
    return True
