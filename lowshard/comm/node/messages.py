"""The messages of a group of one node, through the rings of `lowshard.comm.node.message_rings`."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from lowshard.comm.mailbox import Mailbox, MessageWork
from lowshard.comm.node.calls import Calls
from lowshard.comm.node.message_rings import CAME_BYTES, CODE, ENTRY_HEAD_BYTES, FULL, NUMBER, PENDING
from lowshard.comm.node.node_memory import NodeMemory
from lowshard.comm.node.node_rendezvous import (
    CAME,
    ENTRY_BYTES,
    FAILED,
    FAULTY,
    FLOWS,
    LATE,
    LEFT,
    MISSING,
    OK,
    SIZE,
    UNEQUAL,
)
from lowshard.comm.node.pipe import FLOW_WORDS
from lowshard.errors import BufferMismatchError, CommError, LowshardError

Array = Any

_TOLD_WITHIN_S = 0.5

address_of = MPI.Get_address


class NodeMailbox(Mailbox):
    """A mailbox whose messages go through shared memory; MPI moves none of them."""

    def __init__(
        self, mailbox: Mailbox, context: np.ndarray, compiled: Calls, memory: NodeMemory, owner: object
    ) -> None:  # fmt: skip
        """Take the place of a mailbox.

        Args:
            mailbox: of the same group.
            context: of the group's compiled calls.
            compiled: these.
            memory: of this process and its peers.
            owner: the communicator, whose memory messages under way need.
        """
        super().__init__(
            mailbox._mpi, mailbox._comm, mailbox._ranks, mailbox._rank, mailbox.lookout, mailbox._timeout_s,
            mailbox._tag, mailbox._post, mailbox.watched,
        )  # fmt: skip
        self._compiled, self._memory, self._owner = compiled, memory, weakref.ref(owner)
        self._short_bytes = int(context[ENTRY_BYTES]) - ENTRY_HEAD_BYTES
        self._context, self._ctx = context, address_of(context)
        # Started messages go on in a thread, beside whatever the caller's runs.
        self._own_context = context.copy()
        self._own_flows = np.zeros((int(context[SIZE]), FLOW_WORDS), np.int64)
        self._own_context[FLOWS] = address_of(self._own_flows)
        self._own_ctx = address_of(self._own_context)
        self.waiting: dict[tuple[str, int], deque[object]] = {}

    def start_send(self, buf: Array, dst: int) -> MessageWork:
        """Start a send."""
        compiled, ctx, at, size = self._compiled, self._own_ctx, address_of(buf), buf.nbytes
        line, number, me = ("send", dst), FULL, object()
        self._queue(line, me)

        def advance() -> bool:
            nonlocal number
            if number == FULL:
                if self.waiting[line][0] is not me:
                    return False
                number = compiled.post(ctx, dst, at, size, 0)
                if number == FULL:
                    return False
                self._next(line)
            return buf.nbytes <= self._short_bytes or bool(compiled.is_taken(ctx, dst, number))

        return self._work(advance, f"recv from rank {self._rank}", dst)

    def start_recv(self, buf: Array, src: int) -> MessageWork:
        """Start a recv."""
        compiled, ctx, at, size = self._compiled, self._own_ctx, address_of(buf), buf.nbytes
        line, me = ("recv", src), object()
        self._queue(line, me)

        def advance() -> bool:
            assert buf is not None  # it lives as long as this
            if self.waiting[line][0] is not me:
                return False
            code = compiled.receive_if_come(ctx, src, at, size)
            if code == PENDING:
                return False
            self._next(line)
            self._map_new()
            if code != OK:
                self.end(self._own_context, code, "recv", size, src)
            return True

        return self._work(advance, f"send to rank {self._rank}", src)

    def _work(self, advance: Callable[[], bool], what: str, peer: int) -> MessageWork:
        work = MessageWork(self._post, self, advance, self._finisher(what, peer))
        work.owner = self._owner()
        return work

    def send(self, buf: Array, dst: int) -> None:
        """Send and wait."""
        if ("send", dst) in self.waiting:  # what was started before comes first
            self.keep_going(self.start_send(buf, dst)).wait()
            return
        code = self._compiled.send(self._ctx, dst, address_of(buf), buf.nbytes)
        if code != OK:
            self.end(self._context, code, "send", buf.nbytes, dst)

    def recv(self, buf: Array, src: int) -> None:
        """Receive and wait."""
        if ("recv", src) in self.waiting:
            self.keep_going(self.start_recv(buf, src)).wait()
            return
        code = self._compiled.receive(self._ctx, src, address_of(buf), buf.nbytes)
        self._map_new()
        if code != OK:
            self.end(self._context, code, "recv", buf.nbytes, src)

    def run_all(self, messages: Sequence[tuple[bool, Array, int]]) -> None:
        """Start messages, (sends, buffer, peer) each, and wait for all of them."""
        if self.waiting:
            super().run_all(messages)
            return
        rows = np.array(
            [(peer, address_of(buf), buf.nbytes, sends, 0, 0, 0, 0) for sends, buf, peer in messages],
            np.int64,
        )
        code = self._compiled.run_group(self._ctx, address_of(rows), len(rows))
        self._map_new()
        if code == FULL:
            # Those that were posted go on as they are; the rest waits its turn.
            works = [
                self._start_posted(buf, peer, int(row[NUMBER])) if sends and row[NUMBER] != FULL
                else self.start_send(buf, peer) if sends else self.start_recv(buf, peer)
                for (sends, buf, peer), row in zip(messages, rows, strict=True)
            ]  # fmt: skip
            self.wait_for_all(works)
            return
        if code != OK:
            peer = int(self._context[MISSING])
            name = next("send" if sends else "recv" for sends, _, p in messages if p == peer)
            self.end(self._context, code, name, 0, peer)
        failed: LowshardError | None = None
        for (_, buf, peer), row in zip(messages, rows, strict=True):
            if row[CODE] != OK:
                self._context[CAME] = row[CAME_BYTES]
                try:
                    self.end(self._context, int(row[CODE]), "recv", buf.nbytes, peer)
                except LowshardError as error:
                    failed = failed or error
        if failed is not None:
            raise failed

    def _start_posted(self, buf: Array, dst: int, number: int) -> MessageWork:
        """Return a send that is posted."""
        compiled, ctx = self._compiled, self._own_ctx

        def advance() -> bool:
            return buf.nbytes <= self._short_bytes or bool(compiled.is_taken(ctx, dst, number))

        return self._work(advance, f"recv from rank {self._rank}", dst)

    def end(self, context: np.ndarray, code: int, name: str, size: int, peer: int) -> None:
        """Raise what a message ended with."""
        if code == UNEQUAL:
            raise BufferMismatchError(
                f"recv: rank {peer} sent {context[CAME]} bytes, this rank expects {size}"
            )
        if code == FAULTY:
            self._await_failure()
            raise CommError(
                f"recv: the memory of rank {peer} could not be read, or it has given up to send; set "
                f"LOWSHARD_CROSS_MEMORY=off if it lives and may not be read"
            )
        if code == FAILED:
            raise self.lookout.failure()
        if code == LEFT:
            raise self.lookout.left(self.watched[peer])
        assert code == LATE
        what = f"recv from rank {self._rank}" if name == "send" else f"send to rank {self._rank}"
        raise self.lookout.late(what, [peer], self._timeout_s, [self.watched[peer]])

    def _await_failure(self) -> None:
        """Raise what made a peer give up, if the failure channel tells of it within a moment."""
        end_s = time.monotonic() + _TOLD_WITHIN_S
        flag = ctypes.c_int64.from_address(self.lookout.flag_address)
        while time.monotonic() < end_s:
            if flag.value:
                raise self.lookout.failure()
            time.sleep(0.01)

    def _map_new(self) -> None:
        if self._memory.wanted[0]:
            self._memory.map_new()

    def _queue(self, line: tuple[str, int], message: object) -> None:
        self.waiting.setdefault(line, deque()).append(message)

    def _next(self, line: tuple[str, int]) -> None:
        """Let the first of a line go, and the next one to its place."""
        self.waiting[line].popleft()
        if not self.waiting[line]:
            del self.waiting[line]
