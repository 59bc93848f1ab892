"""How a call is made: looked up or checked and planned, then run in its turn, numbered, recorded and counted."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, NoReturn, TypeVar

import numpy as np

from lowshard.argument import truth
from lowshard.bounded import BoundedCache
from lowshard.comm import check
from lowshard.comm import collectives as table
from lowshard.comm.call import NO_BUFFER, Call, signature_of
from lowshard.comm.call_comparison import NO_ARRAY
from lowshard.comm.collectives import Collective, key_of, planned, text_of
from lowshard.comm.transport import Transport
from lowshard.comm.work import FirstFailure, Stream, ThreadWork, Work, Worker
from lowshard.errors import BufferMismatchError, CommError, LowshardError
from lowshard.foreign_array import is_foreign, like, view_in_call

Array = Any  # a NumPy or CuPy array; CuPy ships no types
T = TypeVar("T")

CALLS_BYTES = 4 << 20
"""What a communicator keeps of calls that were made before, at most."""
_CALL_BYTES = 2048
"""Of one call, beside some numbers for every rank."""
_PLANS_KEPT = 1024
_USES_KEPT = 200


class Traffic:
    """What this rank has called and moved since the communicator was made or `clear` was called.

    Moves count the elements that others were given. Reductions count what a reduce-scatter and an
    all-gather need; the transport's own algorithm may send more or less.
    """

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._sent_bytes = self._received_bytes = self._reached_bytes = 0
        self._uses: list[Call] = []
        self.sources: list[Callable[[], Iterable[tuple[Call, int]]]] = []
        """Each returns calls that were not counted here, and how often each was made since it was asked."""

    def count(self, call: Call) -> None:
        """Count one call; it is added up when somebody asks."""
        if call.uses == 0:
            if len(self._uses) >= _USES_KEPT:  # of calls that are made once, such as splits
                self._add_up()
            self._uses.append(call)
        call.uses += 1

    def add(self, name: str, sent_bytes: int, received_bytes: int, reached_bytes: int = 0) -> None:
        """Count one call by its numbers."""
        self._calls[name] += 1
        self._reached_bytes += reached_bytes
        self._sent_bytes += sent_bytes
        self._received_bytes += received_bytes

    @property
    def calls(self) -> Counter[str]:
        """Calls by collective name."""
        self._add_up()
        return self._calls

    @property
    def sent_bytes(self) -> int:
        """Bytes of this rank's elements that other ranks were given (once for each of them)."""
        self._add_up()
        return self._sent_bytes

    @property
    def received_bytes(self) -> int:
        """Bytes of other ranks' elements that this rank was given."""
        self._add_up()
        return self._received_bytes

    @property
    def reached_bytes(self) -> int:
        """Of `received_bytes`, those of boxes (`execute`, reshards, loads) that came by memory, not by messages."""
        self._add_up()
        return self._reached_bytes

    def __repr__(self) -> str:
        self._add_up()
        calls = ", ".join(f"{name} {count}" for name, count in sorted(self._calls.items())) or "no calls"
        sent, received, reached = self._sent_bytes, self._received_bytes, self._reached_bytes
        return f"<Traffic: {calls}; {sent} bytes sent, {received} received, {reached} of these by memory>"

    def clear(self) -> None:
        """Start from zero."""
        self._add_up()
        self._calls.clear()
        self._sent_bytes = self._received_bytes = self._reached_bytes = 0

    def _add_up(self) -> None:
        used, self._uses = [(call, call.uses) for call in self._uses], []
        for call, _ in used:
            call.uses = 0
        for call, times in chain(used, *(source() for source in self.sources)):
            self._calls[call.name] += times
            self._sent_bytes += times * call.sent_bytes
            self._received_bytes += times * call.received_bytes
            self._reached_bytes += times * call.reached_bytes


class _EndOfTurn(AbstractContextManager[None]):
    """Gives a turn back at the end of a block."""

    def __init__(self, turn: Any) -> None:
        self._turn = turn

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        self._turn.release()


class Caller:
    """What makes the calls of one communicator on its transport.

    Attributes:
        transport: moves the bytes.
        traffic: what was called and moved.
        calls: those that were made before, by what they ask for.
        lock: held by the thread that is in a call. Threads that call at once would do so in another order on each rank.
        batch: messages of a grouped() block that is open.
        failure: of the calls that were started.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.traffic, self.failure = Traffic(), FirstFailure()
        size = transport.size
        # A call holds some numbers for every rank, of which closures have a part that is not seen by weighing.
        self.calls = BoundedCache[Any, Call](None, CALLS_BYTES, lambda key, call: _CALL_BYTES + 64 * size)
        self.lock = threading.RLock()
        self.batch: list[tuple[Call, Array, int]] | None = None
        self._batch_thread: int | None = None  # whose block it is
        self._activity = transport.activity
        self._end_of_turn = _EndOfTurn(self.lock)
        self._agreed_plans: set[str] = set()
        self._worker: Worker | None = None
        self._lines: dict[tuple[str, int], Worker] = {}
        self._quick = quick = transport.quick
        self._acts: Any = {}
        self._ended_with_mpi = False
        if quick is not None:
            self._acts, self._run_quick, self._head = quick.acts, quick.run, quick.head
            self.traffic.sources.append(quick.take_uses)
        _callers.add(self)

    def leave_to_parent(self) -> None:
        """Refuse all calls in a forked child: made there they would be taken for calls of its parent."""
        self._acts = {}
        self.transport.closed = self.transport.ended = self.transport.forked = True
        self.lock = threading.RLock()  # a thread that is not here may have held it
        self._end_of_turn = _EndOfTurn(self.lock)
        self._worker, self._lines, self.batch = None, {}, None

    def end_with_mpi(self) -> None:
        """Refuse all calls that go over MPI, which is being finalized."""
        if not self.transport.closed and self.transport.end_with_mpi():
            self._ended_with_mpi, self._acts = True, {}

    def close(self) -> None:
        """Close the transport, once what was started has ended; see `Communicator.close`."""
        t = self.transport
        self.end_threads()
        if t.closed:
            return
        if self.in_group() and not t.failed:
            raise CommError(
                "a communicator is not closed in a grouped() block of its own; end the block first"
            )
        self._acts = {}
        self.failure.take()  # an exception ends the block, or it was raised
        if not self.lock.acquire(blocking=False):
            if not t.failed:
                self._not_its_turn("close")
            t.closed = True  # the call that is going on reads what would be given back
            return
        try:
            t.close()
        finally:
            self.lock.release()

    def open(self) -> None:
        """Raise CommError where the communicator is closed, or its parent's."""
        if self.transport.forked:
            raise CommError(
                f"this {self.transport.name} communicator is that of the process which forked this one, and its calls "
                "are left to that; here a run_loopback makes ranks of its own"
            )
        if self.transport.closed:
            raise CommError(
                f"this {self.transport.name} communicator ended with MPI; call MPI.Finalize() after its last call"
                if self._ended_with_mpi
                else f"this {self.transport.name} communicator is closed; make a new one"
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

    def turn(self, what: str) -> AbstractContextManager[None]:
        """Take the turn of this thread for a `with` block; see `Communicator.turn`."""
        self.enter(what)
        return self._end_of_turn

    # ---- into a call

    def again(self, key: object, send: int, recv: int) -> bool:
        """Run a call by the transport's table and say whether it was there; buffers by their `id`, 0 for none."""
        try:
            act = self._acts.get(key)
        except TypeError:  # counts that cannot be hashed
            return False
        if act is None or self.batch is not None or (self._worker is not None and not self._worker.idle):
            return False
        if not self.lock.acquire(False):
            self._not_its_turn("a collective")
        t, quick = self.transport, self._quick
        assert quick is not None
        try:
            sequence = t.sequence + 1
            code = self._run_quick(self._head, act, sequence, send, recv)
            if code == quick.unknown:
                return False
            t.sequence = sequence
        finally:
            self.lock.release()
        if code:
            quick.ended(code)
        return True

    def sent_again(self, key: object, send: int, recv: int, line: object) -> bool:
        """The same for messages, unless one of this line (of any, where it is None) waits."""
        act = self._acts.get(key)
        if act is None or self.batch is not None or (self._worker is not None and not self._worker.idle):
            return False
        quick = self._quick
        assert quick is not None
        if quick.waiting and (line is None or line in quick.waiting):
            return False
        if not self.lock.acquire(False):
            self._not_its_turn("a message")
        try:
            code = self._run_quick(self._head, act, 0, send, recv)
        finally:
            self.lock.release()
        if code == quick.unknown:
            return False
        if code:
            quick.message_ended(code, bool(send))
        return True

    def call(
        self, what: Collective, key: tuple[Any, ...], send: Array | None, recv: Array | None, stream: Stream = None
    ) -> None:  # fmt: skip
        """Make a call the long way: look it up, else check its arguments and plan it; `key` is name and detail."""
        if stream is not None:
            self.on_stream(stream, what.name, lambda: self.call(what, key, send, recv))
            return
        if what.known_by == "either":
            by = recv if send is None else send
        else:
            by = recv if what.known_by == "recv" else send
        known_as = (key, key_of(by))
        call = self._known(known_as, send, recv)
        if call is None:
            self.open()
            if not self.transport.buffers.holds(send, recv) and is_foreign(send, recv):
                try:
                    send = view_in_call(send, what.arrays[0])
                    recv = view_in_call(recv, what.arrays[1], writes=True)
                except LowshardError as error:
                    self.refuse(error, what.name + NO_ARRAY)
                self.call(what, key, send, recv)
                return
            t, detail = self.transport, key[1:]
            try:
                asked = what.check(t, send, recv, *detail)
            except LowshardError as error:
                self.refuse(error, what.text(send, recv, *detail))
            moved = asked.sent_bytes, asked.received_bytes
            call = self.make(what.name, what.text(send, recv, *detail), *moved)
            call.elems = _elems_of(send), _elems_of(recv)
            detail = detail if asked.detail is None else asked.detail
            call.run = planned(t, what, call, asked.dtype, asked.elems, *detail)
            self.keep(known_as, call)
        self.do(call, send, recv)
        self._learn(key, call, send, recv)

    def _learn(self, key: tuple[Any, ...], call: Call, send: Array | None, recv: Array | None) -> None:
        """Enter a call that has just been made the long way in the transport's table, if it keeps one."""
        if self._quick is not None and self.batch is None and not self.transport.closed:
            self._quick.learn(key, call, send, recv)

    def do(self, call: Call, *buffers: Any) -> None:
        """Run a call: in turn after those that were started, numbered, counted, recorded."""
        if self.batch is not None and not (self._worker is not None and self._worker.is_current()):
            self._no_batch(call.name)
        launch = self.transport.launch
        if launch is None:
            self._run(call, *buffers)
        else:
            launch(call, self._run, call, *buffers)

    def _run(self, call: Call, *buffers: Any) -> None:
        t = self.transport
        self.enter(call.name)
        t.sequence += 1
        self._activity.enter(call.record, t.sequence)
        try:
            call.run(*buffers)
        finally:
            self._activity.leave()
            self.lock.release()
        self.traffic.count(call)

    def enter(self, what: str) -> None:
        """Begin a call of this thread, after those that were started; `lock.release` ends it.

        Raises:
            CommError: another thread is in a call of this communicator, or it is closed.
        """
        if self._worker is not None:
            self._worker.settle()
            self.transport.come_after()
        if not self.lock.acquire(blocking=False):
            self._not_its_turn(what)
        if self.transport.ended:  # its memory may be another communicator's by now
            self.lock.release()
            self.open()

    def _not_its_turn(self, what: str) -> NoReturn:
        raise CommError(
            f"one thread at a time calls a communicator, but thread {threading.current_thread().name!r} of rank "
            f"{self.transport.rank} called {what} while another was in a call; split() the communicator, once for "
            "each thread"
        )

    def refuse(self, error: LowshardError, text: str) -> NoReturn:
        """Raise what is wrong with this rank's arguments, on all ranks; `text` is what it asked for."""
        t = self.transport
        if t.check == "off" or t.size == 1 or t.closed:
            raise error
        self.enter(text.removesuffix(NO_ARRAY))
        try:
            t.sequence += 1  # on the others this is a call like any
            t.refuse(text, error)
        finally:
            self.lock.release()

    def _known(self, key: object, send: Array | None, recv: Array | None) -> Call | None:
        """Return the call for these arguments if it was made before and the buffers are as they must be."""
        try:
            call = self.calls.get(key)
        except TypeError:  # an argument that cannot be hashed, so a wrong one
            return None
        if call is None or self.transport.closed:
            return None
        ready = self.transport.buffers.ready
        for buf, elems, writes in ((send, call.elems[0], False), (recv, call.elems[1], True)):
            if buf is None:
                if elems != NO_BUFFER:
                    return None
            elif not ready(buf, writes) or buf.size != elems:
                return None
        return call if send is None or recv is None or recv.dtype == send.dtype else None

    def make(self, name: str, text: str, sent_bytes: int, received_bytes: int) -> Call:
        """Return a call of this communicator; its ranks compare the text."""
        signature = signature_of(text, self.transport.group)
        return Call(name, text, signature, sent_bytes=sent_bytes, received_bytes=received_bytes)

    def keep(self, key: object, call: Call) -> Call:
        """Keep a call for the next time, and return it."""
        try:
            return self.calls.put(key, call)
        except TypeError:  # counts that cannot be hashed
            return call

    # ---- streams

    def on_stream(self, stream: Stream, name: str, make: Callable[[], T]) -> T:
        """Make a call with a stream current; all ranks refuse it where one rank's stream is wrong."""
        with self.transport.buffers.current(stream, self.in_group()) as wrong:
            if wrong is None:
                return make()
        return self.refuse_stream(wrong, name)

    def refuse_stream(self, error: LowshardError, name: str) -> NoReturn:
        """Raise what is wrong with the stream of a call."""
        if name in ("send", "recv", "send_recv"):  # calls of two ranks, which no other would refuse
            raise error
        self.refuse(error, f"{name} on a stream")

    # ---- messages

    def message_call(self, key: tuple[str, int], buf: Array, stream: Stream = None) -> None:
        """Make a send or a recv, whose key is its name and the peer, the long way."""
        if stream is not None:
            self.on_stream(stream, key[0], lambda: self.message_call(key, buf))
            return
        call, flat = self._one_message(key, buf)
        step, launch = self._run_message, self.transport.launch
        if launch is None:
            step(call, flat, key[1])
        else:
            launch(call, step, call, flat, key[1], begins=self.batch is None)
        send, recv = (buf, None) if key[0] == "send" else (None, buf)
        self._learn(key, call, send, recv)

    def _one_message(self, key: tuple[str, int], buf: Array) -> tuple[Call, Array]:
        """Return the call of a send or a recv, checked, and its flat buffer."""
        (name, peer), sends, t = key, key[0] == "send", self.transport
        known_as = (key, key_of(buf))
        call = self._known(known_as, buf, None) if sends else self._known(known_as, None, buf)
        if call is None:
            self.open()
            buf = t.buffers.flat(view_in_call(buf, "buf", not sends), "buf", writes=not sends)
            self._is_peer(peer, "dst" if sends else "src")
            text = f"{name} {text_of(buf)} {'to' if sends else 'from'} rank {peer}"
            call = self.make(name, text, *((buf.nbytes, 0) if sends else (0, buf.nbytes)))
            call.elems = (buf.size, NO_BUFFER) if sends else (NO_BUFFER, buf.size)
            self.keep((key, key_of(buf)), call)
            call.run = t.send if sends else t.recv
        return call, buf if buf.ndim == 1 else buf.reshape(-1)

    def _run_message(self, call: Call, buf: Array, peer: int) -> None:
        """Run a send or a recv, or keep it for the end of this thread's group."""
        if self.in_group():
            self.traffic.count(call)
            assert self.batch is not None
            self.batch.append((call, buf, peer))
            return
        self.settle(call.name, peer)
        alone = not self._lines  # else messages that were started run in threads of their own
        if alone:
            self.enter(call.name)
        self._activity.enter(call.record, 0)
        try:
            call.run(buf, peer)
        finally:
            self._activity.leave()
            if alone:
                self.lock.release()
        self.traffic.count(call)

    def swap(self, key: tuple[str, int, int], send: Array, recv: Array, stream: Stream = None) -> None:
        """Send and receive at once; the key is "send_recv" with both peers."""
        if stream is not None:
            self.on_stream(stream, key[0], lambda: self.swap(key, send, recv))
            return
        (name, dst, src), t = key, self.transport
        if self.in_group():
            self.message_call(("send", dst), send)
            self.message_call(("recv", src), recv)
            return
        known_as = (key, key_of(send), key_of(recv))
        call = self.calls.get(known_as)
        s, r = send, recv
        if call is None or t.closed or not (t.buffers.ready(s) and t.buffers.ready(r, True)):
            self.open()
            s, r = view_in_call(send, "send"), view_in_call(recv, "recv", writes=True)
            s, r = t.buffers.flat(s, "send"), t.buffers.flat(r, "recv", writes=True)
            self._is_peer(dst, "dst")
            self._is_peer(src, "src")
            text = f"{name} {text_of(s)} to rank {dst}, {text_of(r)} from rank {src}"
            call = self.keep(known_as, self.make(name, text, s.nbytes, r.nbytes))
        self.settle("send", dst)
        self.settle("recv", src)
        self.enter(name)
        halves = [Call("send", call.text, 0, run=t.send), Call("recv", call.text, 0, run=t.recv)]
        self._activity.enter(call.record, 0)
        try:
            t.run_batch(self, [(halves[0], s.reshape(-1), dst), (halves[1], r.reshape(-1), src)])
        finally:
            self._activity.leave()
            self.lock.release()
        self.traffic.count(call)
        self._learn(key, call, send, recv)

    def _is_peer(self, peer: int, name: str) -> None:
        rank, size = self.transport.rank, self.transport.size
        if type(peer) is not int or not 0 <= peer < size or peer == rank:
            if size == 1:
                raise CommError(
                    f"{name} is another rank of the communicator, and this one has a single rank; start more"
                )
            marks = "; there is no MPI.ANY_SOURCE or MPI.PROC_NULL here" * str(peer).startswith("-")
            raise CommError(
                f"{name} is another rank of the communicator, 0 to {size - 1} but not {rank}, got {peer}{marks}"
            )

    @contextmanager
    def grouped(self) -> Iterator[None]:
        """Keep messages until the end of a block, then run them together; see `Communicator.grouped`."""
        if self.batch is not None:
            raise CommError("grouped() blocks do not nest; end the outer one first")
        self.batch, self._batch_thread = [], threading.get_ident()
        try:
            yield
            batch, self.batch = self.batch, None
            if batch:
                self.open()
                self.transport.run_batch(self, batch)
        finally:
            self.batch = self._batch_thread = None

    def in_group(self) -> bool:
        """Say whether a grouped() block of this thread is open."""
        return self.batch is not None and self._batch_thread in (None, threading.get_ident())

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

    def message(self, name: str, buf: Array, peer: int) -> None:
        """Make a call of `send` or `recv`."""
        self.message_call((name, peer), buf)

    def checked_message(self, name: str, buf: Array, peer: int) -> tuple[Call, Array]:
        """Check a message, count it, and return the call with its flat buffer."""
        call, flat = self._one_message((name, peer), buf)
        self.traffic.count(call)
        return call, flat

    # ---- shared results

    def is_shared(self, shared: object, name: str) -> bool:
        """Return whether a result is to be shared, where the argument is not False."""
        try:
            return truth(shared, "shared is True or False", CommError)
        except LowshardError as error:
            self.refuse(error, name + NO_ARRAY)

    def shared(
        self, what: Collective, send: Array | None, recv: Array | None, stream: Stream, *detail: Any
    ) -> Array:
        """Run a collective whose result the ranks of a node share, and return it read-only."""
        name, t = what.name, self.transport
        if stream is not None:
            return self.on_stream(stream, name, lambda: self.shared(what, send, recv, None, *detail))
        if is_foreign(send):
            try:
                seen = view_in_call(send, what.arrays[0])
            except LowshardError as error:
                self.refuse(error, name + NO_ARRAY)
            return like(self.shared(what, seen, recv, None, *detail), send)
        rooted = what is table.BROADCAST
        op, order = detail if what is table.ALL_REDUCE else ("sum", "fast")
        text = f"{name} shared root={detail[0]}" if rooted else f"{name} shared {text_of(send)} {op} {order}"
        try:
            self.open()
            if recv is not None:
                raise BufferMismatchError("shared=True returns the result: pass no recv beside it")
            if rooted:
                table.is_rank(t, detail[0])
            flat = None
            if not rooted or self.transport.rank == detail[0]:
                flat = t.buffers.flat(send, what.arrays[0])
            if what is table.ALL_REDUCE:
                check.reducible(flat, op, order)
        except LowshardError as error:
            self.refuse(error, text)
        signed = self.calls.get(("shared", text))
        if signed is None:
            signed = self.keep(("shared", text), self.make(name, text, 0, 0))
        sent, received = table.shared_bytes(t, what, flat)
        call = Call(name, text, signed.signature, sent_bytes=sent, received_bytes=received)
        made: list[Array] = []

        def run() -> None:
            made.append(table.share(t, what, call, send if rooted else flat, *detail))

        call.run = run
        try:
            self.do(call)
        finally:
            call.run = _nothing  # the record of calls keeps this one for a while, but no buffer
        result = made.pop()  # the record of calls keeps this one for a while, but not its result
        if not rooted:
            assert send is not None
            shape = send.shape
            if what is table.ALL_GATHER:
                shape = (self.transport.size * (shape[0] if shape else 1), *shape[1:])
            result = result.reshape(shape)
        if isinstance(result, np.ndarray):
            result.flags.writeable = False
        return result

    # ---- agreements; see `lowshard.comm.agreement`

    def agrees_without_waiting(self, signature: int, text: str) -> bool:
        """Say whether ranks need not meet to agree on a plan."""
        if not self.transport.agrees:
            return text in self._agreed_plans
        with self.turn(text):
            self.transport.agree_late(signature, text)
        return True

    def has_agreed(self, text: str) -> None:
        """Remember, where there is nothing but the GPU to compare over, that all ranks have agreed on a plan."""
        if not self.transport.compares:
            if len(self._agreed_plans) >= _PLANS_KEPT:
                self._agreed_plans.clear()
            self._agreed_plans.add(text)


def _elems_of(buf: Array | None) -> int:
    return NO_BUFFER if buf is None else int(buf.size)


def _nothing() -> None:
    """What a call that is over runs."""


_callers: weakref.WeakSet[Caller] = weakref.WeakSet()
"""Of this process."""


def end_with_mpi() -> None:
    """Refuse all calls that go over MPI, which is being finalized: it would end the process."""
    for caller in list(_callers):
        caller.end_with_mpi()


def _leave_to_parent() -> None:
    for caller in list(_callers):
        if caller.transport.size > 1:
            caller.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
