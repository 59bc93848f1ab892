"""Planned calls run: the first time, and again.

The first time a call goes through slots, straight out of its buffers, or by way of memory that all ranks map. It is
entered in a table then (`lowshard.comm.node.call_table`), out of which one compiled step runs it again, with no check
nor record in Python: 64 bytes take a third of the time. Whatever differs, be it a dtype or a flag of an array, takes
the long way.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np

from lowshard.comm.call import CALL_BYTES, Activity, Call
from lowshard.comm.call_comparison import differ
from lowshard.comm.mailbox import Mailbox
from lowshard.comm.node import call_table as t
from lowshard.comm.node.calls import Calls
from lowshard.comm.node.group_block import GroupContext, Place, address_of
from lowshard.comm.node.messages import NodeMailbox
from lowshard.comm.node.node_rendezvous import (
    CARD_BYTES,
    CARDS,
    DIFFERENT,
    FAILED,
    FAULTY,
    LATE,
    LEFT,
    MISSING,
    OK,
    STAMP,
    UNEQUAL,
)
from lowshard.comm.transport import Run, Transport
from lowshard.errors import CommError

Array = Any

STEP = "step"
"""Name of what transports ask of each other beside the users' calls."""
_ENTRIES = 128
_KEYS_KEPT = 1024


class CallRunner:
    """Two ways to memory, and how calls end, for the calls of one transport.

    Attributes:
        over: the transport, whose ranks compare their calls.
        place: where the group's cards and slots lie.
        mailbox: who watches, and who is watched.
        context: what compiled code works on; `ctx` is its address.
        compiled: the compiled calls.
    """

    def __init__(
        self, over: Transport, place: Place, mailbox: Mailbox, context: GroupContext, compiled: Calls
    ) -> None:
        self.over, self.place, self.mailbox, self.compiled = over, place, mailbox, compiled
        self.context, self.ctx = context, context.address

    # ---- how calls end

    def end(self, code: int, text: str) -> None:
        """Raise what a meeting ended with."""
        if code == OK:
            return
        if code == DIFFERENT:
            differ(self.over, text)
        if code == FAULTY:
            raise CommError(
                f"{text}: the memory of a rank could not be read; set LOWSHARD_CROSS_MEMORY=off to go without"
            )
        self.over.failed = True
        if code == FAILED:
            raise self.mailbox.lookout.failure()
        if code == LEFT:
            raise self.mailbox.lookout.left(self.mailbox.watched[int(self.context.words[MISSING])])
        assert code == LATE
        missing = self._missing()
        watched = [self.mailbox.watched[rank] for rank in missing]
        raise self.mailbox.lookout.late(text, missing, self.over.timeout_s, watched)

    def _missing(self) -> list[int]:
        """Return the ranks whose stamps are behind this rank's; where none is, the one that was waited for."""
        cards = int(self.context.words[CARDS])
        stamps = [
            ctypes.c_int64.from_address(cards + rank * CARD_BYTES).value for rank in range(self.over.size)
        ]
        behind = [rank for rank, stamp in enumerate(stamps) if stamp < self.context.words[STAMP]]
        return behind or [int(self.context.words[MISSING])]

    def sign(self, call: Call) -> int:
        """Return the signature that ranks compare as they meet; 0 for none."""
        return 0 if self.over.check == "off" else call.signature

    def checked(self, call: Call, run: Run) -> Run:
        """Return a run that compares whole texts first, where that is asked for."""
        if self.over.check != "full" or self.over.size == 1 or call.name == STEP:
            return run
        call.prepared = None  # the row is not all of it

        def compared(*buffers: Any) -> Any:
            self.over.verify(call)
            return run(*buffers)

        return compared

    # ---- two ways to memory

    def small(self, call: Call, kind: int, sizes: tuple[int, int], *numbers: int) -> Run:
        """Return a run through the slots.

        Args:
            call: the call.
            kind: of row.
            sizes: bytes of send and of recv.
            numbers: what the kind takes beside.
        """
        ctx, perform = self.ctx, self.compiled.perform
        row = t.row_of(kind, self.sign(call), *sizes, t.ANY, *numbers)

        def run(send: Array | None, recv: Array | None) -> None:
            at, to = 0 if send is None else address_of(send), 0 if recv is None else address_of(recv)
            code = perform(ctx, address_of(row), at, to)
            if code:
                self.end(code, call.text)

        call.prepared = row
        return self.checked(call, run)

    def large(
        self, call: Call, kind: int, sizes: tuple[int, int], *numbers: int, in_place: bool = True,
        stages_recv: bool = True, reaches: bool = True,
    ) -> Run:  # fmt: skip
        """Return a run that works on the buffers where they lie.

        Args:
            call: the call.
            kind: of row.
            sizes: bytes of send and of recv.
            numbers: what the kind takes beside.
            in_place: whether both buffers may be one, or one this rank's part of the other; else what is sent is
                copied before it is written over.
            stages_recv: whether others read or write recv; where only this rank does it is never staged.
            reaches: whether others read or write any of the buffers.
        """
        memory, ctx = self.place.memory, self.ctx
        perform, may_lie_so = self.compiled.perform, self.compiled.may_lie_so
        row = t.row_of(kind, self.sign(call), *sizes, t.OWN_PART_ONLY if in_place else t.APART, *numbers)
        wanted = memory.wanted.data

        def run(send: Array | None, recv: Array | None) -> None:
            at, to = 0 if send is None else address_of(send), 0 if recv is None else address_of(recv)
            if not may_lie_so(ctx, address_of(row), at, to):
                assert send is not None
                send = send.copy()
                at = address_of(send)
            code = perform(ctx, address_of(row), at, to)
            if wanted[0]:
                memory.map_new()
            if code:
                self.end(code, call.text)

        if reaches and not memory.reads_across:
            return self.checked(call, self._staged(call, run, in_place, stages_recv))
        call.prepared = row
        return self.checked(call, run)

    def _staged(self, call: Call, run: Run, in_place: bool, stages_recv: bool) -> Run:
        """Return a run by way of memory that all ranks map, for where private memory cannot be read."""
        memory, signature = self.place.memory, self.sign(call)

        def staged(send: Array | None, recv: Array | None) -> None:
            inner = [None if buf is None else memory.arena.array(buf.size, buf.dtype) for buf in (send, recv)]
            if send is recv and in_place:
                inner[1] = inner[0]
            for outer, copy in ((recv, inner[1]), (send, inner[0])):
                if outer is not None and copy is not None:
                    copy[...] = outer.reshape(-1)
            self.map_all(signature, call.text)
            if not stages_recv:
                run(inner[0], recv)
                return
            run(*inner)
            if recv is not None:
                recv.reshape(-1)[...] = inner[1]

        return staged

    def map_all(self, signature: int, text: str) -> None:
        """Map the segments of all ranks, which have made what they need; ranks compare their calls as they meet."""
        self.end(self.compiled.barrier(self.ctx, signature), text)
        self.place.memory.map_new()
        self.end(self.compiled.barrier(self.ctx, signature), text)


# ---- again


class CallTable:
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


class QuickCalls:
    """The table of one transport, as `Transport.quick` has it.

    Attributes:
        acts: by key of a call, the number that it is known by in the table.
        waiting: messages that wait for others, by name and peer.
        head: address of the table.
        run: the compiled step.
        unknown: its code where a call is not in the table.
    """

    unknown: int = t.UNKNOWN

    def __init__(
        self, runner: CallRunner, activity: Activity, exchange_row: Callable[..., np.ndarray | None]
    ) -> None:
        self._runner, self._activity, self._exchange_row = runner, activity, exchange_row
        self._table = CallTable(runner.ctx, activity)
        self.acts: dict[object, int] = {}
        self._acts_made = 0
        self.waiting: dict[tuple[str, int], Any] = getattr(runner.mailbox, "waiting", {})
        self.head: int = self._table.address
        self.run: Callable[..., int] = runner.compiled.quick

    def take_uses(self) -> list[tuple[Call, int]]:
        """Return calls and how often each was run since this was asked."""
        return self._table.take_uses()

    def learn(self, key: tuple[Any, ...], call: Call, send: Array | None, recv: Array | None) -> None:
        """Enter a call that has just been made the long way, if a row is all there is to it."""
        buffers = [buf for buf in (send, recv) if buf is not None]
        if any(type(buf) is not np.ndarray or buf.dtype is not buffers[0].dtype for buf in buffers):
            return
        row = call.prepared
        if row is None and key[0] in ("send", "recv", "send_recv"):
            row = call.prepared = self._message_row(key, send, recv)
        if isinstance(row, tuple):  # spans of an exchange
            row = self._exchange_row(call, send, recv)
        if row is None:
            return
        try:
            act = self.acts.get(key)
        except TypeError:  # counts that cannot be hashed
            return
        if act is None:
            if len(self.acts) >= _KEYS_KEPT:
                self.acts.clear()
            self._acts_made += 1
            act = self.acts[key] = self._acts_made
        self._table.add(act, call, row, send, recv)

    def _message_row(self, key: tuple[Any, ...], send: Array | None, recv: Array | None) -> np.ndarray | None:
        if not isinstance(self._runner.mailbox, NodeMailbox):
            return None
        sizes = [0 if buf is None else buf.nbytes for buf in (send, recv)]
        if key[0] == "send_recv":
            return t.row_of(t.SEND_RECEIVE, 0, *sizes, t.APART, *key[1:])
        return t.row_of(t.RECEIVE if send is None else t.SEND, 0, *sizes, t.ANY, key[1])

    def _rest_of(self, code: int) -> int:
        """Map what peers have made, where a code says so, and return what else it says."""
        if code & t.NEW_SEGMENTS:
            self._runner.place.memory.map_new()
        return code & ~t.NEW_SEGMENTS

    def ended(self, code: int) -> None:
        """Do what is left after a collective that ended with this code, or raise."""
        call, code = self._table.last(), self._rest_of(code)
        if code == OK:
            return
        try:
            if code == UNEQUAL:
                call.prepared.differ(self._runner.over, call.text)
            self._runner.end(code, call.text)
        finally:
            self._activity.leave()

    def message_ended(self, code: int, sends: bool) -> None:
        """Do what is left after messages that ended with this code, or raise."""
        code = self._rest_of(code)
        if code == OK:
            return
        row, context, mailbox = self._table.last().prepared, self._runner.context, self._runner.mailbox
        assert isinstance(mailbox, NodeMailbox)
        peer, size = int(context.words[MISSING]), int(row[t.RECV_BYTES])
        if row[t.KIND] != t.SEND and code in (UNEQUAL, FAULTY):
            peer = int(row[t.FIRST + (row[t.KIND] == t.SEND_RECEIVE)])
        name = "send" if row[t.KIND] == t.SEND or (sends and peer == row[t.FIRST]) else "recv"
        try:
            mailbox.end(context.words, code, name, size, peer)
        finally:
            self._activity.leave()


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
