"""Streams, events, captures and waits of the host: what is ordered with what, and when it is done.

Each operation has a vector clock: of every stream, how many of its operations come before. It runs at once where all of
these have run, which is nearly always so; else when they have, in the thread that waits or in one of this module. What
nothing orders and touches the same bytes is a race, whichever has run first.

What one thread of the host has waited for, all threads know: they tell each other in ways that are not seen here.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from cupy import _memory, checker
from cupy._memory import Access, serials
from cupy.checker import LAG, LIMIT_S, LOCK, OFF, Misuse, count, need, report, where

LEGACY, PER_THREAD = (0, 1), 2
NOT_READY, UNSUPPORTED, INVALIDATED, UNJOINED, ISOLATION, IMPLICIT, CAPTURED = (
    600,
    900,
    901,
    904,
    905,
    906,
    907,
)
"""Errors of CUDA: those from 900 on are about captures."""
GLOBAL, RELAXED = 0, 2
"""Modes of a capture."""
_MOST_RECORDS = 256  # of a block


class CUDARuntimeError(RuntimeError):
    """CuPy's."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"cudaError {status}: said by the stand-in")


class Work:
    """What an operation does, made anew for each replay of a graph: `run` returns what it has touched."""

    stuck = ""
    """Why it will never be ready, as far as is known."""

    def __init__(self, run: Callable[[], Sequence[Access]], ready: Callable[[], bool] = lambda: True) -> None:
        self.run, self.ready = run, ready


Clock = dict["Stream", int]


class Stream:
    """A stream of the device."""

    def __init__(self, ptr: int, is_blocking: bool) -> None:
        self.ptr, self.is_blocking = ptr, is_blocking
        self.clock: Clock = {}
        self.count = self.done = self.asked = 0
        self.queue: deque[Operation] = deque()
        self.capture: Capture | None = None
        self.is_over = False
        """Whether it was destroyed, and the host knows that all of it is done."""

    def __str__(self) -> str:
        return "the default stream" if self.ptr in LEGACY else f"stream {self.ptr:#x}"


class Operation:
    """Something that was put on a stream."""

    def __init__(self, name: str, stream: Stream, work: Work, place: str, made: float) -> None:
        self.name, self.stream, self.work, self.place, self.made = name, stream, work, place, made
        self.index, self.clock, self.serial = stream.count, dict(stream.clock), next(serials)
        self.stuck_since = 0.0

    def precedes(self, other: Operation) -> bool:
        """Say whether it is over before another one begins."""
        stream = self.stream
        return stream is other.stream or stream.is_over or self.index <= other.clock.get(stream, 0)

    def can_run(self) -> bool:
        """Say whether all that it comes after has run, and it is ready itself."""
        before = (stream.done >= n for stream, n in self.clock.items() if stream is not self.stream)
        return all(before) and self.work.ready()


class Capture:
    """What is recorded for a CUDA graph."""

    def __init__(self, mode: int) -> None:
        self.mode, self.is_broken = mode, False
        self.operations: list[tuple[str, Callable[[], Work], str]] = []
        self.unjoined: set[Stream] = set()


class Event:
    """An event: what its stream had been given when it was recorded."""

    stream: Stream | None = None
    capture: Capture | None = None
    recorded_s, asked = 0.0, 0

    def __init__(self) -> None:
        self.clock: Clock = {}


streams: dict[int, Stream] = {0: Stream(0, True)}
events: dict[int, Event] = {}
known: Clock = {}
"""How many operations of each stream the host knows to be done."""
host_saw_more: list[Callable[[], None]] = []
of_thread = threading.local()
"""`stream`: its default one; `groups`: of NCCL calls that are not ended."""
_destroyed: set[Stream] = set()
_captures: set[Capture] = set()
_waiting: dict[Stream, None] = {}  # with operations that have not run
_pump: list[threading.Thread] = []
_advancing: list[bool] = []


def stream_at(ptr: int) -> Stream:
    """Return a stream by its handle."""
    if ptr == PER_THREAD:
        if not hasattr(of_thread, "stream"):
            of_thread.stream = Stream(ptr, True)
        return of_thread.stream  # type: ignore[no-any-return]
    need(ptr in LEGACY or ptr in streams, f"stream {ptr:#x} was destroyed, or never made")
    return streams[0 if ptr in LEGACY else ptr]


def destroy_stream(ptr: int) -> None:
    """Forget the handle of a stream; what it has been given is still done."""
    with LOCK:
        _destroyed.add(streams.pop(ptr))
        host_sees({})


def put(ptr: int, name: str, run: Any, kind: str = "", make: Callable[[], Work] | None = None) -> None:
    """Put an operation on a stream, run it as soon as may be, and add to the count of its kind."""
    if kind:
        count(kind)
    if OFF:
        run()
        return
    with LOCK:
        stream = stream_at(ptr)
        for other in _ordered_with(stream) if stream.capture is None else ():
            if other.capture is not None:
                raise _broken(IMPLICIT, other.capture)
        _put(stream, name, make or partial(Work, run), where())


def replay(capture: Capture, made: int, ptr: int) -> None:
    """Put what a graph has recorded on a stream."""
    with LOCK:
        for operation in capture.operations:
            _put(stream_at(ptr), *operation, made)


def _put(stream: Stream, name: str, make: Callable[[], Work], place: str, made: float = math.inf) -> None:
    if stream.capture is not None:
        stream.capture.operations.append((name, make, place))
        return
    stream.count, stream.asked = stream.count + 1, 0
    merge(stream.clock, known, _clock_of(stream), {stream: stream.count})
    for gone in [other for other in stream.clock if other.is_over]:
        del stream.clock[gone]
    operation = Operation(name, stream, make(), place, made)
    stream.queue.append(operation)
    _waiting[stream] = None
    advance(operation)


def _ordered_with(stream: Stream) -> list[Stream]:
    """Return the streams that CUDA orders with one by itself."""
    if not stream.is_blocking:
        return []
    others = streams.values() if stream.ptr in LEGACY else [streams[0]]
    return [other for other in others if other.is_blocking and other is not stream]


def _clock_of(stream: Stream) -> Clock:
    """Return what comes before anything that a stream is given now."""
    merge(stream.clock, *(other.clock for other in _ordered_with(stream)))
    return dict(stream.clock)


def merge(clock: Clock, *others: Clock) -> None:
    """Have a clock come after other ones too."""
    for other in others:
        for stream, index in other.items():
            if index > clock.get(stream, 0) and not stream.is_over:
                clock[stream] = index


# ---- running


def advance(mine: Operation | None = None) -> None:
    """Run whatever can run.

    Raises:
        Misuse: `mine` ran, and broke a rule; that others did is told in a report alone.
    """
    error, has_run = None, True
    with LOCK:
        if _advancing:  # by what runs: this goes on behind it
            return
        _advancing.append(True)
        try:
            while has_run:
                has_run = False
                for stream in list(_waiting):
                    while stream.queue and stream.queue[0].can_run():
                        operation, has_run = stream.queue[0], True
                        try:
                            _run(operation)
                        except Misuse as misuse:
                            error = misuse if operation is mine else error
                        stream.queue.popleft()
                        stream.done = operation.index
                    if not stream.queue:
                        _waiting.pop(stream, None)
        finally:
            _advancing.clear()
        if _waiting and not _pump:
            _pump.append(threading.Thread(target=_keep_running, name="gpu checker", daemon=True))
            _pump[0].start()
    if error is not None:
        raise error


def _keep_running() -> None:
    while _pump:
        time.sleep(checker.PAUSE_S)
        with LOCK:
            advance()
            _tell_of_the_stuck(LIMIT_S)
            if not _waiting:
                _pump.clear()


def _run(operation: Operation) -> None:
    """Run an operation, and compare what it touches with what others have touched before."""
    name, stream, place = operation.name, operation.stream, operation.place
    # Where nothing else waits for its turn, all that follows comes after what the host knows.
    is_alone = len(_waiting) == 1 and len(stream.queue) == 1
    for access in operation.work.run():
        block = _memory.block_of(access, name, place, operation.serial, operation.made)
        kept = []
        for old, by in block.records[-_MOST_RECORDS:]:
            is_ordered = by.precedes(operation)
            if not is_ordered and (old.writes or access.writes) and access.crosses(old):
                report(
                    f"race: {name} on {stream}, at {place}, and {by.name} on {by.stream}, at {by.place}, touch the same "
                    "bytes, one writes them, and nothing orders the two"
                )
            is_needless = is_ordered and access.covers(old) and access.writes >= old.writes
            if not is_needless and not (is_alone and is_known({by.stream: by.index})):
                kept.append((old, by))
        block.records = [*kept, (access, operation)]


def _tell_of_the_stuck(after_s: float = 0.0) -> str:
    """Report work that will never be ready, if it has been so for a while; return what was found."""
    now, found = time.monotonic(), ""
    for operation in (stream.queue[0] for stream in _waiting):
        if operation.work.stuck:
            operation.stuck_since = operation.stuck_since or now
            if now - operation.stuck_since >= after_s:
                found = f"{operation.work.stuck}, at {operation.place}"
                report(found)
    return found


def _look_at_exit() -> None:
    with LOCK:
        advance()
        _tell_of_the_stuck()


checker.at_exit.append(_look_at_exit)


# ---- what the host knows


def is_known(clock: Clock) -> bool:
    """Say whether the host knows of operations that they are done."""
    return all(known.get(stream, 0) >= index or stream.is_over for stream, index in clock.items())


def host_sees(clock: Clock) -> None:
    """Note that the host knows of these operations that they are done."""
    if not is_known(clock):
        count("host_waits")
        merge(known, clock)
        for look in host_saw_more:
            look()
    for stream in [one for one in _destroyed if is_known({one: one.count})]:
        stream.is_over = True
        _destroyed.discard(stream)
        known.pop(stream, None)


def _is_done(clock: Clock) -> bool:
    advance()
    return all(stream.done >= index for stream, index in clock.items())


def host_waits(clock: Clock, what: str) -> None:
    """Return once operations are done."""
    groups = getattr(of_thread, "groups", 0)
    need(not groups, f"{what} within a group of NCCL calls that is not ended: it waits for ever")

    def is_over() -> bool:
        with LOCK:
            if _is_done(clock):
                host_sees(clock)
                return True
            if stuck := _tell_of_the_stuck():
                raise Misuse(stuck)
            return False

    checker.wait_until(is_over, what)


# ---- captures


def _broken(status: int, *captures: Capture) -> CUDARuntimeError:
    """Return the error of a call that breaks captures: they can record nothing any more."""
    for capture in captures:
        capture.is_broken = True
    return CUDARuntimeError(status)


def begin_capture(ptr: int, mode: int) -> None:
    with LOCK:
        stream = stream_at(ptr)
        if ptr in LEGACY or stream.capture is not None:
            raise CUDARuntimeError(UNSUPPORTED)
        stream.capture = Capture(mode)
        _captures.add(stream.capture)


def end_capture(ptr: int) -> Capture:
    with LOCK:
        capture = stream_at(ptr).capture
        if capture is None:
            raise CUDARuntimeError(1)
        for stream in streams.values():
            stream.capture = None if stream.capture is capture else stream.capture
        _captures.discard(capture)
        if capture.is_broken or capture.unjoined:
            raise CUDARuntimeError(INVALIDATED if capture.is_broken else UNJOINED)
        return capture


def refuse_in_capture(*captures: Capture | None) -> None:
    """Raise for a call, such as to wait, that these captures and those of mode GLOBAL forbid."""
    if found := [one for one in _captures if one in captures or one.mode == GLOBAL]:
        raise _broken(UNSUPPORTED, *found)


# ---- the calls of CUDA that ask, wait and order


def _event(handle: int, name: str) -> Event:
    if handle not in events:
        report(f"{name} of event {handle:#x}, which was destroyed, at {where()}")
        raise CUDARuntimeError(709)
    return events[handle]


def record_event(handle: int, ptr: int) -> None:
    """Have an event stand for what a stream has been given so far."""
    with LOCK:
        event, stream = _event(handle, "eventRecord"), stream_at(ptr)
        event.capture, event.stream, event.asked = stream.capture, stream, 0
        event.clock, event.recorded_s = _clock_of(stream), time.perf_counter()


def order_after_event(ptr: int, handle: int, flags: int = 0) -> None:
    """Have what a stream is given from now on come after an event."""
    with LOCK:
        event, stream = _event(handle, "streamWaitEvent"), stream_at(ptr)
        if stream.capture not in (None, event.capture):
            raise _broken(ISOLATION, stream.capture)  # type: ignore[arg-type]
        if event.capture not in _captures:
            merge(stream.clock, event.clock)
        elif stream.capture is None:
            stream.capture = event.capture
            event.capture.unjoined.add(stream)
        elif event.stream is not None:
            event.capture.unjoined.discard(event.stream)


def _awaited_event(handle: int, name: str) -> tuple[Any, Clock]:
    event = _event(handle, name)
    refuse_in_capture()
    if event.capture is not None:
        raise _broken(CAPTURED, event.capture)
    return event, event.clock


def _awaited_stream(ptr: int, name: str) -> tuple[Any, Clock]:
    stream = stream_at(ptr)
    refuse_in_capture(stream.capture)
    return stream, _clock_of(stream)


def _query(look: Callable[[int, str], tuple[Any, Clock]], name: str, handle: int) -> int:
    """Return CUDA's status: the first answers are "not ready", of what the host does not know to be done."""
    with LOCK:
        try:
            awaited, clock = look(handle, name)
        except CUDARuntimeError as error:
            return error.status
        if is_known(clock):
            return 0
        awaited.asked += 1
        if not _is_done(clock) or awaited.asked <= LAG:
            return NOT_READY
        host_sees(clock)
        return 0


def _wait(look: Callable[[int, str], tuple[Any, Clock]], name: str, handle: int) -> None:
    with LOCK:
        clock = look(handle, name)[1]
    host_waits(clock, name)


query_event = partial(_query, _awaited_event, "eventQuery")
query_stream = partial(_query, _awaited_stream, "streamQuery")
wait_for_event = partial(_wait, _awaited_event, "eventSynchronize")
wait_for_stream = partial(_wait, _awaited_stream, "streamSynchronize")


def wait_for_device() -> None:
    """Have the host wait for everything."""
    with LOCK:
        refuse_in_capture(*_captures)
        clock = {stream: stream.count for stream in [*streams.values(), *_waiting]}
    host_waits(clock, "deviceSynchronize")
