"""How a call is made: looked up or checked and planned, then run in its turn, numbered, recorded and counted."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import get_ident
from time import monotonic
from typing import Any, NamedTuple, NoReturn, TypeVar

from lowshard.comm import collectives as table
from lowshard.comm.call import Call, signature_of
from lowshard.comm.collectives import Collective, planned
from lowshard.comm.transport import Run, Transport
from lowshard.comm.work import FirstFailure, Stream, ThreadWork, Work, Worker
from lowshard.errors import CommError
from lowshard.foreign_array import is_foreign, view_in_call

Array = Any  # a NumPy or CuPy array; CuPy ships no types
T = TypeVar("T")

_HALVES = Call("send", "a half of send_recv", 0), Call("recv", "a half of send_recv", 0)
MOST_PLANS = 2048
"""That a communicator keeps; then it makes them anew."""


class Calls(dict[str, int]):
    """Calls by name, 0 of what was not called; a Counter takes twice as long to count one."""

    def __missing__(self, name: str) -> int:
        return 0


class Traffic:
    """What this rank has called and moved since the communicator was made or `clear` was called.

    Moves count the elements that others were given, messages as soon as they are checked. Reductions count what a
    reduce-scatter and an all-gather need; the transport's own algorithm may send more or less.

    Attributes:
        calls: calls by collective name.
        sent_bytes: bytes of this rank's elements that other ranks were given (once for each of them).
        received_bytes: bytes of other ranks' elements that this rank was given.
        reached_bytes: of `received_bytes`, those of boxes (`execute`, reshards, loads) that came by memory, not by
            messages.
    """

    def __init__(self) -> None:
        self.calls = Calls()
        self.sent_bytes = self.received_bytes = self.reached_bytes = 0

    def add(self, name: str, sent_bytes: int, received_bytes: int, reached_bytes: int = 0) -> None:
        """Count one call by its numbers."""
        self.calls[name] += 1
        self.sent_bytes += sent_bytes
        self.received_bytes += received_bytes
        self.reached_bytes += reached_bytes

    def __repr__(self) -> str:
        calls = ", ".join(f"{name} {count}" for name, count in sorted(self.calls.items())) or "no calls"
        sent, received, reached = self.sent_bytes, self.received_bytes, self.reached_bytes
        return f"<Traffic: {calls}; {sent} bytes sent, {received} received, {reached} of these by memory>"

    def clear(self) -> None:
        """Start from zero."""
        self.__init__()  # type: ignore[misc]


class Planned(NamedTuple):
    """A call of the table for buffers of one dtype and size, and what runs it from them."""

    call: Call
    run: Run


class _EndOfTurn(AbstractContextManager[None]):
    """Gives a turn back at the end of a block."""

    def __init__(self, turn: Any) -> None:
        self._turn = turn

    def __exit__(self, *exc: object) -> None:
        self._turn.release()


class Caller:
    """What makes the calls of one communicator on its transport.

    Attributes:
        transport: moves the bytes.
        traffic: what was called and moved.
        lock: held by the thread that is in a call. Threads that call at once would do so in another order on each rank.
        batch: messages of a grouped() block that is open.
        failure: of the calls that were started.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.traffic, self.failure = Traffic(), FirstFailure()
        self.lock = threading.RLock()
        self.batch: list[tuple[Call, Array, int]] | None = None
        self._batch_thread: int | None = None  # whose block it is
        self._plans: dict[Any, Planned] = {}
        self._ready, self._launch = transport.buffers.ready, transport.launch
        self._activity = transport.activity
        self._end_of_turn = _EndOfTurn(self.lock)
        self._worker: Worker | None = None
        self._lines: dict[tuple[str, int], Worker] = {}
        _callers.add(self)

    def close(self) -> None:
        """Close the transport, once what was started has ended; see `Communicator.close`."""
        t = self.transport
        self.end_threads()
        if t.closed:
            return
        if self.in_group() and not t.failed:
            raise CommError("a communicator is not closed in a grouped() block of its own; end it first")
        self._plans.clear()  # so that the next call comes to `open`
        self.failure.take()  # an exception ends the block, or it was raised
        if not self.lock.acquire(False):
            if not t.failed:
                self._not_its_turn("close")
            t.closed = True  # the call that is going on reads what would be given back
            return
        try:
            t.close()
        finally:
            self.lock.release()

    def open(self) -> None:
        """Raise CommError where the communicator is closed."""
        if self.transport.closed:
            raise CommError(
                f"this {self.transport.name} communicator is closed, or MPI is, or this process was forked from its "
                "rank; make a new one"
            )

    def settle_all(self) -> BaseException | None:
        """Wait for all that was started; return an error of it that nobody was told of."""
        for worker in self._workers():
            worker.settle()
        self.transport.settle()
        return self.failure.take()

    def end_threads(self) -> None:
        """Have the threads of started calls end; those of calls that are started later are new."""
        for worker in self._workers():
            worker.end()

    def _workers(self) -> list[Worker]:
        return [worker for worker in (self._worker, *self._lines.values()) if worker is not None]

    # ---- a call

    def call(
        self, what: Collective, detail: tuple[Any, ...], send: Array | None, recv: Array | None, stream: Stream = None
    ) -> None:  # fmt: skip
        """Make a call of the table."""
        if stream is not None:
            with self._on(stream):
                self.call(what, detail, send, recv)
            return
        plan, send, recv = self._planned(what, detail, send, recv)
        if self.batch is None and self._launch is None:
            self._run(plan.call, plan.run, send, recv)  # as `run` does, a step less
        else:
            self.run(plan.call, plan.run, send, recv)

    def run(self, call: Call, run: Run, *args: Any) -> None:
        """Run a call: in turn after those that were started, numbered, recorded, counted."""
        if self.batch is not None and not (self._worker is not None and self._worker.is_current()):
            self._no_batch(call.name)
        if self._launch is None:
            self._run(call, run, *args)
        else:
            self._launch(call, self._run, call, run, *args)

    def _run(self, call: Call, run: Run, *args: Any) -> None:
        t, activity = self.transport, self._activity
        self.enter(call.name)
        t.sequence += 1
        activity.made.append((call, t.sequence, monotonic()))
        activity.depth += 1
        try:
            run(*args)
        finally:
            activity.depth -= 1
            self.lock.release()
        self.traffic.add(call.name, call.sent_bytes, call.received_bytes, call.reached_bytes)

    def _planned(
        self, what: Collective, detail: tuple[Any, ...], send: Array | None, recv: Array | None
    ) -> tuple[Planned, Array, Array]:
        """Return the plan for these arguments, which are checked, and the buffers as arrays of `xp`."""
        ready = self._ready
        try:
            if send is not None and recv is not None:
                found = self._plans.get((what, detail, send.dtype, send.size, recv.dtype, recv.size))
            else:
                found = self._plans.get(_key(what, detail, send, recv))
            if found is not None and (send is None or ready(send)) and (recv is None or ready(recv, True)):
                return found, send, recv
        except (AttributeError, TypeError):  # not an array; counts that cannot be hashed
            pass
        self.open()
        t = self.transport
        if not t.buffers.holds(send, recv) and is_foreign(send, recv):
            send, recv = view_in_call(send, what.arrays[0]), view_in_call(recv, what.arrays[1], writes=True)
            return self._planned(what, detail, send, recv)
        asked = what.check(t, send, recv, *detail)
        text = what.text(send, recv, *detail)
        call = self.make(what.name, text, asked.sent_bytes, asked.received_bytes)
        run = planned(t, what, call, asked.dtype, asked.elems, *(asked.detail or detail))
        made = Planned(call, run)
        with suppress(TypeError):  # counts that cannot be hashed
            self._keep(_key(what, detail, send, recv), made)
        return made, send, recv

    def _keep(self, key: Any, plan: Planned) -> None:
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        self._plans[key] = plan

    def make(
        self, name: str, text: str, sent_bytes: int = 0, received_bytes: int = 0, reached_bytes: int = 0
    ) -> Call:
        """Return a call of this communicator; its ranks compare the text."""
        signature = signature_of(text, self.transport.group)
        return Call(name, text, signature, sent_bytes, received_bytes, reached_bytes)

    def enter(self, what: str) -> None:
        """Begin a call of this thread, after those that were started; `lock.release` ends it."""
        if self._worker is not None:
            self._worker.settle()
            self.transport.come_after()
        if not self.lock.acquire(False):
            self._not_its_turn(what)
        if self.transport.ended:  # its memory may be another communicator's by now
            self.lock.release()
            self.open()

    def turn(self, what: str) -> AbstractContextManager[None]:
        """Take the turn of this thread for a `with` block; see `Communicator.turn`."""
        self.enter(what)
        return self._end_of_turn

    def _not_its_turn(self, what: str) -> NoReturn:
        raise CommError(
            f"one thread at a time calls a communicator, but thread {threading.current_thread().name!r} of rank "
            f"{self.transport.rank} called {what} while another was in a call; split() the communicator, once for "
            "each thread"
        )

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        """Make a stream current for a block, or raise what is wrong with it."""
        with self.transport.buffers.current(stream, self.in_group()) as wrong:
            if wrong is not None:
                raise wrong
            yield

    # ---- messages

    def message(self, name: str, buf: Array, peer: int, stream: Stream = None) -> None:
        """Make a send or a recv, or keep it for the end of this thread's group."""
        if stream is not None:
            with self._on(stream):
                self.message(name, buf, peer)
            return
        checked = self.checked_message(name, buf, peer)
        if self._launch is not None:
            self._launch(checked[0], self._run_message, *checked, begins=self.batch is None)
        elif self.batch is not None and self._batch_thread == get_ident():
            self.batch.append(checked)
        else:
            self._run_message(*checked)

    def checked_message(self, name: str, buf: Array, peer: int) -> tuple[Call, Array, int]:
        """Check a message, count it, and return the call with its flat buffer and the peer."""
        try:
            plan = self._plans.get((name, peer, buf.dtype, buf.size))
        except AttributeError:  # not an array
            plan = None
        sends = name == "send"
        if plan is None or not self._ready(buf, not sends):
            plan, buf = self._message_plan(name, buf, peer)
        traffic, call = self.traffic, plan[0]
        traffic.calls[name] += 1
        if sends:
            traffic.sent_bytes += call.sent_bytes
        else:
            traffic.received_bytes += call.received_bytes
        return call, buf if buf.ndim == 1 else buf.reshape(-1), peer

    def _message_plan(self, name: str, buf: Array, peer: int) -> tuple[Planned, Array]:
        if name == "send":
            plan, buf, _ = self._planned(table.SEND, (peer,), buf, None)
        else:
            plan, _, buf = self._planned(table.RECV, (peer,), None, buf)
        self._keep((name, peer, buf.dtype, buf.size), plan)
        return plan, buf

    def _run_message(self, call: Call, buf: Array, peer: int) -> None:
        if self.batch is not None and self.in_group():
            self.batch.append((call, buf, peer))
            return
        self.settle(call.name, peer)
        alone = not self._lines  # else messages that were started run in threads of their own
        if alone:
            self.enter(call.name)
        self._activity.enter(call, 0)
        try:
            (self.transport.send if call.name == "send" else self.transport.recv)(buf, peer)
        finally:
            self._activity.leave()
            if alone:
                self.lock.release()

    def swap(self, dst: int, src: int, send: Array, recv: Array, stream: Stream = None) -> None:
        """Send and receive at once."""
        if stream is not None:
            with self._on(stream):
                self.swap(dst, src, send, recv)
            return
        if self.in_group():
            self.message("send", send, dst)
            self.message("recv", recv, src)
            return
        (call, _), s, r = self._planned(table.SEND_RECV, (dst, src), send, recv)
        self.settle("send", dst)
        self.settle("recv", src)
        self.enter(call.name)
        halves = (_HALVES[0], s, dst), (_HALVES[1], r, src)
        self._activity.enter(call, 0)
        try:
            self.transport.run_batch(self, [(half, buf.reshape(-1), peer) for half, buf, peer in halves])
        finally:
            self._activity.leave()
            self.lock.release()
        self.traffic.add(call.name, call.sent_bytes, call.received_bytes)

    def __enter__(self) -> None:
        """Keep messages of this thread from now on: the block of `Communicator.grouped`."""
        if self.batch is not None:
            raise CommError("grouped() blocks do not nest; end the outer one first")
        self.batch, self._batch_thread = [], get_ident()

    def __exit__(self, kind: object, *exc: object) -> None:
        """Run the messages of the block together; after an exception, forget them."""
        batch, self.batch, self._batch_thread = self.batch, None, None
        if batch and kind is None:
            self.open()
            self.transport.run_batch(self, batch)

    def in_group(self) -> bool:
        """Say whether a grouped() block of this thread is open."""
        return self.batch is not None and self._batch_thread in (None, get_ident())

    def _no_batch(self, name: str) -> None:
        """Raise if a grouped() block is open."""
        if self.batch is not None:
            raise CommError(f"only send and recv are allowed in a grouped() block, not {name}; end it first")

    # ---- what a transport asks for when calls are started; see `lowshard.comm.transport.Front`

    def settle(self, name: str, peer: int) -> None:
        """Wait for what was started before a message, where threads run it."""
        if self._worker is not None:
            self._worker.settle()
            self.transport.come_after()
        if self._lines and (name, peer) in self._lines:
            self._lines[name, peer].settle()

    def in_thread(self, name: str, call: Callable[[], Any]) -> Work:
        """Give a call to the communicator's thread."""
        self._no_batch(name)
        if self._worker is None:
            self._worker = Worker(f"lowshard {self.transport.name} rank {self.transport.rank}")
        work = ThreadWork(call, f"{name} on rank {self.transport.rank}", failure=self.failure)
        self._worker.submit(work)
        return work

    def in_line(self, name: str, peer: int, call: Callable[[], Any]) -> Work:
        """Give a message to a thread of its own: it waits for one rank only."""
        work = ThreadWork(call, f"{name} of rank {self.transport.rank}", failure=self.failure)
        line = self._lines.get((name, peer))
        if line is None:  # those of one pair stay in order
            line = self._lines[name, peer] = Worker(f"lowshard {name} rank {self.transport.rank} {peer}")
        line.submit(work)
        return work


def _key(
    what: Collective, detail: tuple[Any, ...], send: Array | None, recv: Array | None
) -> tuple[Any, ...]:
    """Return what a plan is kept under."""
    sent = (None, 0) if send is None else (send.dtype, send.size)
    return what, detail, *sent, *((None, 0) if recv is None else (recv.dtype, recv.size))


_callers: weakref.WeakSet[Caller] = weakref.WeakSet()
"""Of this process."""


def end_with_mpi() -> None:
    """Refuse all calls that go over MPI, which is being finalized: it would end the process."""
    for caller in list(_callers):
        if not caller.transport.closed and caller.transport.end_with_mpi():
            caller._plans.clear()


def _close_in_child() -> None:
    """Leave a forked process none of its parent's communicators: its calls would be taken for the rank's."""
    for caller in list(_callers):
        caller.transport.closed = caller.transport.ended = True
        caller._plans.clear()


os.register_at_fork(after_in_child=_close_in_child)
