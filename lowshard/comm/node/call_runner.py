"""How a planned call gets at memory: through slots, straight out of buffers, or by way of memory that all ranks map."""

from __future__ import annotations

import ctypes
from typing import Any

from lowshard.comm.call import Call
from lowshard.comm.call_comparison import differ
from lowshard.comm.mailbox import Mailbox
from lowshard.comm.node.call_row import ANY, APART, OWN_PART_ONLY, row_of
from lowshard.comm.node.calls import Calls
from lowshard.comm.node.group_block import GroupContext, Place, address_of
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
)
from lowshard.comm.transport import Run, Transport
from lowshard.errors import CommError

Array = Any

STEP = "step"
"""Name of what transports ask of each other beside the users' calls."""


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
        row = row_of(kind, self.sign(call), *sizes, ANY, *numbers)

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
        row = row_of(kind, self.sign(call), *sizes, OWN_PART_ONLY if in_place else APART, *numbers)
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
