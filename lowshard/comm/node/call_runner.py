"""How a planned call gets at memory: through slots, straight out of buffers, or by way of memory that all ranks map."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from lowshard.comm.call import Call
from lowshard.comm.default_collectives import Run
from lowshard.comm.mailbox import Mailbox
from lowshard.comm.node.call_row import (
    ANY,
    APART,
    OWN_PART_ONLY,
    row_of,
)
from lowshard.comm.node.calls import Calls
from lowshard.comm.node.node_memory import NodeMemory
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
from lowshard.comm.protocol import Communicator
from lowshard.errors import CommError

Array = Any

address_of = MPI.Get_address  # a tenth of the time that NumPy takes to tell

FACT = 3
"""Signature of what communicators ask of each other beside the users' calls."""
STEP = "step"
"""Name of such a call."""


@dataclass(frozen=True)
class Place:
    """Where a group's cards and slots lie.

    Attributes:
        memory: of this process and its peers.
        members: the group's ranks as ranks of the node, in the group's order.
        block: address, in this process, of the lent block.
    """

    memory: NodeMemory
    members: tuple[int, ...]
    block: int


class NodeWays(Communicator):
    """Two ways to memory, and how calls end; the context they work on is the subclass's."""

    _place: Place
    _mailbox: Mailbox
    _context: np.ndarray
    _ctx: int
    _compiled: Calls

    # ---- how calls end

    def _end(self, code: int, text: str) -> None:
        """Raise what a meeting ended with."""
        if code == OK:
            return
        if code == DIFFERENT:
            self._differ(text)
        if code == FAULTY:
            raise CommError(
                f"{text}: the memory of a rank could not be read; set LOWSHARD_CROSS_MEMORY=off to go without"
            )
        self._failed = True
        if code == FAILED:
            raise self._mailbox.lookout.failure()
        if code == LEFT:
            raise self._mailbox.lookout.left(self._mailbox.watched[int(self._context[MISSING])])
        assert code == LATE
        missing = self._missing()
        watched = [self._mailbox.watched[rank] for rank in missing]
        raise self._mailbox.lookout.late(text, missing, self.timeout_s, watched)

    def _missing(self) -> list[int]:
        """Return the ranks whose stamps are behind this rank's; where none is, the one that was waited for."""
        cards = int(self._context[CARDS])
        stamps = [ctypes.c_int64.from_address(cards + rank * CARD_BYTES).value for rank in range(self.size)]
        behind = [rank for rank, stamp in enumerate(stamps) if stamp < self._context[STAMP]]
        return behind or [int(self._context[MISSING])]

    def _sign(self, call: Call) -> int:
        return 0 if self._check == "off" else call.signature

    def _checked(self, call: Call, run: Run) -> Run:
        """Return a run that compares whole texts first, where that is asked for."""
        if self._check != "full" or self.size == 1 or call.name == STEP:
            return run
        call.prepared = None  # the row is not all of it

        def compared(*buffers: Any) -> Any:
            self._verify(call)
            return run(*buffers)

        return compared

    # ---- two ways to memory

    def _small(self, call: Call, kind: int, sizes: tuple[int, int], *numbers: int) -> Run:
        """Return a run through the slots.

        Args:
            call: the call.
            kind: of row.
            sizes: bytes of send and of recv.
            numbers: what the kind takes beside.
        """
        ctx, perform = self._ctx, self._compiled.perform
        row = row_of(kind, self._sign(call), *sizes, ANY, *numbers)

        def run(send: Array | None, recv: Array | None) -> None:
            at, to = 0 if send is None else address_of(send), 0 if recv is None else address_of(recv)
            code = perform(ctx, address_of(row), at, to)
            if code:
                self._end(code, call.text)

        call.prepared = row
        return self._checked(call, run)

    def _large(
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
        memory, ctx = self._place.memory, self._ctx
        perform, may_lie_so = self._compiled.perform, self._compiled.may_lie_so
        row = row_of(kind, self._sign(call), *sizes, OWN_PART_ONLY if in_place else APART, *numbers)
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
                self._end(code, call.text)

        if reaches and not memory.reads_across:
            return self._checked(call, self._staged(call, run, in_place, stages_recv))
        call.prepared = row
        return self._checked(call, run)

    def _staged(self, call: Call, run: Run, in_place: bool, stages_recv: bool) -> Run:
        """Return a run by way of memory that all ranks map, for where private memory cannot be read."""
        memory, signature = self._place.memory, self._sign(call)

        def staged(send: Array | None, recv: Array | None) -> None:
            inner = [None if buf is None else memory.arena.array(buf.size, buf.dtype) for buf in (send, recv)]
            if send is recv and in_place:
                inner[1] = inner[0]
            for outer, copy in ((recv, inner[1]), (send, inner[0])):
                if outer is not None and copy is not None:
                    copy[...] = outer.reshape(-1)
            self._map_all(signature, call.text)
            if not stages_recv:
                run(inner[0], recv)
                return
            run(*inner)
            if recv is not None:
                recv.reshape(-1)[...] = inner[1]

        return staged

    def _map_all(self, signature: int, text: str) -> None:
        """Map the segments of all ranks, which have made what they need; ranks compare their calls as they meet."""
        self._end(self._compiled.barrier(self._ctx, signature), text)
        self._place.memory.map_new()
        self._end(self._compiled.barrier(self._ctx, signature), text)
