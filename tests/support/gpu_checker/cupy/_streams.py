"""Streams, events, captures and waits of the host: what is ordered with what, and when it is done.

Each operation has a vector clock: of every stream, how many of its operations come before. It runs at once where all of
these have run, which is nearly always so; else when they have, in the thread that waits or in one of this module. What
nothing orders and touches the same bytes is a race, whichever has run first.

What one thread of the host has waited for, all threads know: they tell each other in ways that are not seen here.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cupy import _memory
from cupy._memory import Access, serials
from cupy.checker import LAG, LIMIT_S, LOCK, OFF, Misuse, at_exit, count, need, report, where

Run = Callable[[], Sequence[Access]]
"""Does the work and returns what it has touched."""
LEGACY, PER_THREAD = (0, 1), 2
_PAUSE_S = 0.0002


SUCCESS, NOT_READY, DESTROYED = 0, 600, 709
UNSUPPORTED, INVALIDATED, UNJOINED, ISOLATION, IMPLICIT, CAPTURED_EVENT = 900, 901, 904, 905, 906, 907
"""Statuses of CUDA: those from 900 on are about captures."""
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
"""Modes of a capture."""


class CUDARuntimeError(RuntimeError):
    """CuPy's."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"cudaError {status}: said by the stand-in")


class Work:
    """What an operation does, made anew for each replay of a graph."""

    def __init__(self, run: Run, ready: Callable[[], bool] | None = None) -> None:
        self.run, self.ready = run, ready
        self.stuck = ""
        """Why it will never be ready, as far as is known."""


@dataclass(eq=False)
class Operation:
    """Something that was put on a stream."""

    name: str
    stream: Stream
    index: int
    clock: dict[Stream, int]
    work: Work
    place: str
    made: float = math.inf
    serial: int = field(default_factory=lambda: next(serials))
    stuck_since: float = 0.0

    @property
    def is_known(self) -> bool:
        """Whether the host knows that it is done."""
        return self.stream.is_over or known.get(self.stream, 0) >= self.index

    def precedes(self, other: Operation) -> bool:
        """Say whether it is over before another one begins."""
        return (
            self.stream is other.stream
            or self.stream.is_over
            or self.index <= other.clock.get(self.stream, 0)
        )

    def can_run(self) -> bool:
        """Say whether all that it comes after has run, and it is ready itself."""
        if any(stream.done < index for stream, index in self.clock.items() if stream is not self.stream):
            return False
        return self.work.ready is None or self.work.ready()


@dataclass(eq=False)
class Capture:
    """What is recorded for a CUDA graph."""

    mode: int
    thread: int
    operations: list[tuple[str, Callable[[], Work], str]] = field(default_factory=list)
    status: int = SUCCESS
    unjoined: set[Stream] = field(default_factory=set)


@dataclass(eq=False)
class Stream:
    """A stream of the device."""

    ptr: int
    is_blocking: bool
    clock: dict[Stream, int] = field(default_factory=dict)
    count: int = 0
    done: int = 0
    queue: deque[Operation] = field(default_factory=deque)
    capture: Capture | None = None
    is_destroyed: bool = False
    _is_over: bool = False
    asked: tuple[int, int] = (0, 0)
    """What a query asked for last, and how often."""

    @property
    def is_over(self) -> bool:
        """Whether it was destroyed, and the host knows that all of it is done."""
        self._is_over = self._is_over or (self.is_destroyed and known.get(self, 0) >= self.count)
        return self._is_over

    def __str__(self) -> str:
        name = "the default stream" if self.ptr in LEGACY else f"stream {self.ptr:#x}"
        return name if self.is_blocking else f"non-blocking {name}"


@dataclass(eq=False)
class Event:
    """An event: what its stream had been given when it was recorded."""

    clock: dict[Stream, int] | None = None
    capture: Capture | None = None
    stream: Stream | None = None
    asked: int = 0
    recorded_s: float = 0.0


streams: dict[int, Stream] = {0: Stream(0, True)}
events: dict[int, Event] = {}
known: dict[Stream, int] = {}
"""How many operations of each stream the host knows to be done."""
host_saw_more: list[Callable[[], None]] = []
_thread = threading.local()
_waiting: dict[Stream, None] = {}  # with operations that have not run
_pump: list[threading.Thread] = []
_advancing: list[bool] = []
_captures: dict[Capture, None] = {}


def stream_at(ptr: int) -> Stream:
    """Return a stream by its handle."""
    if ptr == PER_THREAD:
        if not hasattr(_thread, "stream"):
            _thread.stream = Stream(ptr, True)
        return _thread.stream  # type: ignore[no-any-return]
    stream = streams.get(0 if ptr in LEGACY else ptr)
    need(stream is not None, f"stream {ptr:#x} was destroyed, or never made")
    assert stream is not None
    return stream


def put(ptr: int, name: str, make: Callable[[], Work], kind: str = "") -> None:
    """Put an operation on a stream, run it as soon as may be, and add to the count of its kind."""
    if kind:
        count(kind)
    if OFF:
        make().run()
        return
    place = where()
    with LOCK:
        stream = stream_at(ptr)
        if stream.capture is not None:
            stream.capture.operations.append((name, make, place))
            return
        if stream.is_blocking and any(other.capture for other in _orders_with(stream)):
            raise _invalidated(IMPLICIT, *(other.capture for other in _orders_with(stream)))
        operation = _enqueue(stream, name, make(), place, math.inf)
        advance(operation)


def replay(capture: Capture, made: int, ptr: int) -> None:
    """Put what a graph has recorded on a stream."""
    with LOCK:
        stream = stream_at(ptr)
        for name, make, place in capture.operations:
            if stream.capture is not None:
                stream.capture.operations.append((name, make, place))
            else:
                advance(_enqueue(stream, name, make(), place, made))


def _orders_with(stream: Stream) -> list[Stream]:
    """Return the streams that CUDA orders with a blocking one by itself."""
    if stream.ptr in LEGACY:
        return [other for other in streams.values() if other.is_blocking and other is not stream]
    return [streams[0]]


def _clock_of(stream: Stream) -> dict[Stream, int]:
    """Return what comes before anything that a stream is given now."""
    if stream.is_blocking:
        for other in _orders_with(stream):
            merge(stream.clock, other.clock)
    return dict(stream.clock)


def _enqueue(stream: Stream, name: str, work: Work, place: str, made: float) -> Operation:
    merge(stream.clock, known)
    _clock_of(stream)
    stream.count += 1
    stream.clock[stream] = stream.count
    for gone in [other for other in stream.clock if other.is_over]:
        del stream.clock[gone]
        known.pop(gone, None)
    operation = Operation(name, stream, stream.count, dict(stream.clock), work, place, made)
    stream.queue.append(operation)
    _waiting[stream] = None
    return operation


def merge(clock: dict[Stream, int], other: dict[Stream, int]) -> None:
    """Have a clock come after another one too."""
    for stream, index in other.items():
        if index > clock.get(stream, 0):
            clock[stream] = index


# ---- running


def advance(mine: Operation | None = None) -> None:
    """Run whatever can run.

    Raises:
        Misuse: `mine` ran, and broke a rule; that others did is told in a report alone.
    """
    with LOCK:
        if _advancing:  # by what runs: this goes on behind it
            return
        _advancing.append(True)
        try:
            error = _run_what_can(mine)
        finally:
            _advancing.clear()
        if _waiting and not _pump:
            _pump.append(threading.Thread(target=_keep_running, name="gpu checker", daemon=True))
            _pump[0].start()
    if error is not None:
        raise error


def _run_what_can(mine: Operation | None) -> Misuse | None:
    error: Misuse | None = None
    has_run = True
    while has_run:
        has_run = False
        for stream in list(_waiting):
            while stream.queue and stream.queue[0].can_run():
                operation, has_run = stream.queue[0], True
                try:
                    _run(operation)
                except Misuse as misuse:
                    error = misuse if operation is mine else error
                finally:
                    stream.queue.popleft()
                    stream.done = operation.index
            if not stream.queue:
                _waiting.pop(stream, None)
    return error


def _keep_running() -> None:
    while True:
        time.sleep(_PAUSE_S)
        with LOCK:
            advance()
            _tell_of_the_stuck(LIMIT_S)
            if not _waiting:
                _pump.clear()
                return


def _run(operation: Operation) -> None:
    raced: set[Operation] = set()
    is_alone = len(_waiting) == 1 and len(operation.stream.queue) == 1
    for access in operation.work.run():
        block = _memory.block_at(access.low)
        if block is None or block.arena is not None:
            block = _memory.block_of(
                access, operation.name, operation.serial, operation.made, operation.place
            )
        for old, by in block.records:
            is_race = (old.writes or access.writes) and access.crosses(old) and not by.precedes(operation)
            if is_race and by not in raced:
                raced.add(by)
                verbs = ["writes" if one.writes else "reads" for one in (access, old)]
                report(
                    f"race: {operation.name} on {operation.stream} {verbs[0]}, at {operation.place}, what {by.name} on "
                    f"{by.stream} {verbs[1]}, at {by.place}, and nothing orders the two"
                )
        block.remember(access, operation, is_alone)


def _tell_of_the_stuck(after_s: float) -> str:
    """Report work that will never be ready, if it has been so for a while; return what was found."""
    now, found = time.monotonic(), ""
    for stream in _waiting:
        operation = stream.queue[0]
        if not operation.work.stuck:
            continue
        operation.stuck_since = operation.stuck_since or now
        if now - operation.stuck_since >= after_s:
            found = f"{operation.work.stuck}, at {operation.place}"
            report(found)
    return found


@at_exit
def _tell_at_exit() -> None:
    with LOCK:
        advance()
        _tell_of_the_stuck(0.0)


# ---- what the host knows


def host_sees(clock: dict[Stream, int]) -> None:
    """Note that the host knows of these operations that they are done."""
    if any(known.get(stream, 0) < index for stream, index in clock.items()):
        count("host_waits")
        merge(known, clock)
        for look in host_saw_more:
            look()


def _is_done(clock: dict[Stream, int]) -> bool:
    return all(stream.done >= index for stream, index in clock.items())


def host_waits(clock: dict[Stream, int], what: str) -> None:
    """Return once operations are done.

    Raises:
        Misuse: they never will be.
    """
    need(not open_groups(), f"{what} within a group of NCCL calls that is not ended: it waits for ever")
    end = time.monotonic() + LIMIT_S
    while True:
        with LOCK:
            advance()
            if _is_done(clock):
                host_sees(clock)
                return
            stuck = _tell_of_the_stuck(0.0)
            if stuck:
                raise Misuse(stuck)
        need(time.monotonic() < end, f"{what} has waited for {LIMIT_S:g} s: it hangs")
        time.sleep(_PAUSE_S)


def open_groups() -> int:
    """Return how many groups of NCCL calls this thread has begun and not ended; `cuda.nccl` sets it."""
    return getattr(_thread, "groups", 0)


def set_open_groups(number: int) -> None:
    """Set what `open_groups` returns."""
    _thread.groups = number


# ---- captures


def _invalidated(status: int, *captures: Capture | None) -> CUDARuntimeError:
    """Return the error of a call that breaks captures."""
    for capture in captures:
        if capture is not None:
            capture.status = INVALIDATED
    return CUDARuntimeError(status)


def refuse_in_capture() -> None:
    """Raise for a call that a capture forbids by its mode, such as to allocate or to wait.

    Raises:
        CUDARuntimeError: a capture forbids it; that capture can record nothing any more.
    """
    for capture in _captures:
        if capture.mode == GLOBAL or (
            capture.mode == THREAD_LOCAL and capture.thread == threading.get_ident()
        ):
            raise _invalidated(UNSUPPORTED, capture)


def begin_capture(ptr: int, mode: int) -> None:
    """Have a stream record what it is given."""
    if ptr in LEGACY:
        raise CUDARuntimeError(UNSUPPORTED)
    with LOCK:
        stream = stream_at(ptr)
        if stream.capture is not None:
            raise CUDARuntimeError(1)
        stream.capture = Capture(mode, threading.get_ident())
        _captures[stream.capture] = None


def end_capture(ptr: int) -> Capture:
    """Have a stream record no more, and return what it has."""
    with LOCK:
        capture = stream_at(ptr).capture
        if capture is None:
            raise CUDARuntimeError(1)
        if capture.mode != RELAXED and capture.thread != threading.get_ident():
            raise CUDARuntimeError(908)
        for stream in streams.values():
            if stream.capture is capture:
                stream.capture = None
        _captures.pop(capture, None)
        if capture.status or capture.unjoined:
            raise CUDARuntimeError(capture.status or UNJOINED)
        return capture


# ---- the calls of CUDA that ask, wait and order


def _of_live_event(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Have a call that is given the handle of an event report one that was destroyed, as CUDA does."""

    def decorate(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def checked(handle: int, *args: Any) -> Any:
            event = events.get(handle)
            if event is None:
                report(f"{name} of event {handle:#x}, which was destroyed, at {where()}")
                if name == "eventQuery":
                    return DESTROYED
                raise CUDARuntimeError(DESTROYED)
            return call(event, *args)

        return checked

    return decorate


def _locked(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def held(*args: Any) -> Any:
        with LOCK:
            return call(*args)

    return held


@_of_live_event("eventRecord")
@_locked
def record_event(event: Event, ptr: int) -> None:
    """Have an event stand for what a stream has been given so far."""
    stream = stream_at(ptr)
    event.capture, event.stream, event.asked = stream.capture, stream, 0
    event.recorded_s = time.perf_counter()
    event.clock = _clock_of(stream)


@_of_live_event("eventQuery")
@_locked
def query_event(event: Event) -> int:
    """Return CUDA's status of an event."""
    refuse_in_capture()
    if event.capture is not None:
        _invalidated(CAPTURED_EVENT, event.capture)
        return CAPTURED_EVENT
    if event.clock is None:
        return SUCCESS
    event.asked += 1
    return _answer(event.clock, event.asked)


@_of_live_event("eventSynchronize")
def wait_for_event(event: Event) -> None:
    """Have the host wait for an event."""
    refuse_in_capture()
    if event.capture is not None:
        raise _invalidated(CAPTURED_EVENT, event.capture)
    if event.clock is not None:
        host_waits(event.clock, "eventSynchronize")


@_of_live_event("streamWaitEvent")
@_locked
def order_after_event(event: Event, ptr: int) -> None:
    """Have what a stream is given from now on come after an event."""
    stream = stream_at(ptr)
    if event.capture is not None and event.capture in _captures:
        if stream.capture is None:
            stream.capture = event.capture
            stream.capture.unjoined.add(stream)
        elif stream.capture is not event.capture:
            raise _invalidated(902, stream.capture, event.capture)
        elif event.stream is not None:
            event.capture.unjoined.discard(event.stream)
    elif stream.capture is not None:
        raise _invalidated(ISOLATION, stream.capture)
    elif event.clock is not None:
        merge(stream.clock, event.clock)


@_locked
def query_stream(ptr: int) -> int:
    """Return CUDA's status of a stream."""
    stream = stream_at(ptr)
    if stream.capture is not None:
        _invalidated(UNSUPPORTED, stream.capture)
        return UNSUPPORTED
    refuse_in_capture()
    stream.asked = (stream.count, 1 + (stream.asked[1] if stream.asked[0] == stream.count else 0))
    return _answer({stream: stream.count}, stream.asked[1])


def _answer(clock: dict[Stream, int], asked: int) -> int:
    """Return a status: the first answers are "not ready", of what the host does not know to be done."""
    if all(known.get(stream, 0) >= index or stream.is_over for stream, index in clock.items()):
        return SUCCESS
    advance()
    if asked <= LAG or not _is_done(clock):
        return NOT_READY
    host_sees(clock)
    return SUCCESS


def wait_for_stream(ptr: int) -> None:
    """Have the host wait for all that a stream has been given."""
    with LOCK:
        stream = stream_at(ptr)
        if stream.capture is not None:
            raise _invalidated(UNSUPPORTED, stream.capture)
        refuse_in_capture()
        clock = _clock_of(stream)
    host_waits(clock, "streamSynchronize")


def wait_for_device() -> None:
    """Have the host wait for everything."""
    with LOCK:
        captures = [stream.capture for stream in streams.values() if stream.capture is not None]
        if captures:
            raise _invalidated(UNSUPPORTED, *captures)
        clock = {stream: stream.count for stream in [*streams.values(), *_waiting]}
    host_waits(clock, "deviceSynchronize")


def add_stream(stream: Stream) -> None:
    """Make a stream known."""
    with LOCK:
        streams[stream.ptr] = stream


def destroy_stream(ptr: int) -> None:
    """Forget the handle of a stream; what it has been given is still done."""
    with LOCK:
        stream = streams.pop(ptr, None)
        if stream is not None:
            stream.is_destroyed = True
