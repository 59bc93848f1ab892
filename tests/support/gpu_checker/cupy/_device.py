"""The device: whose memory is whose, what streams do with it, what is ordered with what, and when it is done.

Blocks of memory come from a pool that has an arena for each stream, as CuPy's: what is freed goes to the next that
takes as much on that stream, at once, whatever other streams still do with it. A page-locked part of the host is a
block too, for as long as it is locked.

Each operation has a vector clock: of every stream, how many of its operations come before. It runs at once where all of
these have run, which is nearly always so; else when they have, in the thread that waits or in one of this module. What
nothing orders and touches the same bytes is a race, whichever has run first. What one thread of the host has waited
for, all threads know: they tell each other in ways that are not seen here.
"""

from __future__ import annotations

import bisect
import itertools
import math
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cupy import checker
from cupy.checker import LAG, LOCK, OFF, Misuse, count, need, report, where

LEGACY, PER_THREAD = 0, 2
UNSUPPORTED, INVALIDATED, ISOLATION, CAPTURED = 900, 901, 905, 907  # errors of CUDA about captures
GLOBAL, RELAXED = 0, 2  # modes of a capture
_MOST_RECORDS = 256  # of a block
GRAIN_BYTES = 512
_MOST_PIECES = 4096  # of a strided array: above, the gaps count as touched too
_LIVES = 8  # of a block that are remembered
handles, serials = itertools.count(0x5000, 16), itertools.count(1)
"""Numbers everything that happens in the process: an operation may touch what lived when it was asked for."""


class Access(NamedTuple):
    """Bytes that an operation reads or writes: from `low` to `high`, or pieces: first addresses and ends, ascending."""

    low: int
    high: int
    writes: bool
    pieces: Any = None

    def crosses(self, other: Access) -> bool:
        if self.high <= other.low or other.high <= self.low:
            return False
        if self.pieces is None and other.pieces is None:
            return True
        sides = [one.pieces or (np.array([one.low]), np.array([one.high])) for one in (self, other)]
        (begins, ends), (begins_2, ends_2) = sides
        first = np.searchsorted(ends, begins_2, side="right")  # the first that ends behind each beginning
        inside = first < len(begins)
        return bool((begins[first[inside]] < ends_2[inside]).any())

    def covers(self, other: Access) -> bool:
        return self.pieces is None and self.low <= other.low and other.high <= self.high


class Block:
    """Memory that is handed out whole."""

    def __init__(self, begin: int, capacity: int, arena: Any = None, raw: Any = None) -> None:
        self.begin, self.capacity, self.arena, self._raw = begin, capacity, arena, raw
        self.lives: deque[list[float]] = deque(maxlen=_LIVES)  # when they began and ended, and their bytes
        self.records: list[tuple[Access, Operation]] = []  # what touched it; see `_run`
        blocks[begin] = self
        bisect.insort(begins_of_blocks, begin)

    def begin_life(self, size: int) -> Block:
        self.lives.append([next(serials), math.inf, size])
        return self


blocks: dict[int, Block] = {}
begins_of_blocks: list[int] = []
_unused: defaultdict[tuple[Any, int], list[Block]] = defaultdict(list)


def allocate(size: int, arena: Any) -> Block:
    capacity = max(1, -(-size // GRAIN_BYTES)) * GRAIN_BYTES
    with LOCK:
        count("allocations")
        if _unused[arena, capacity]:
            return _unused[arena, capacity].pop().begin_life(size)
        raw = np.empty(capacity + 2 * GRAIN_BYTES, np.uint8)  # there is room behind it: no two blocks touch
        begin = int(raw.ctypes.data) + -int(raw.ctypes.data) % GRAIN_BYTES
        return Block(begin, capacity, arena, raw).begin_life(size)


def release(block: Block) -> None:
    with LOCK:
        block.lives[-1][1] = next(serials)
        _unused[block.arena, block.capacity].append(block)


def block_at(address: int) -> Block | None:
    with LOCK:
        index = bisect.bisect_right(begins_of_blocks, address) - 1
        block = blocks[begins_of_blocks[index]] if index >= 0 else None
    return block if block is not None and address < block.begin + block.capacity + GRAIN_BYTES // 2 else None


def block_of(access: Access, name: str, place: str, serial: int, made: float = math.inf) -> Block:
    """Return the block of an access that was asked for at some time, by a CUDA graph that was made at another."""
    block: Any = block_at(access.low)
    verb = "writes" if access.writes else "reads"
    what = f"{name} {verb} {access.high - access.low} bytes at {access.low:#x}"
    need(block is not None, f"{what}, which is no memory of the device", place)
    sizes = [size for born, died, size in block.lives if born < min(serial, made) and serial < died]
    is_long_ago = len(block.lives) == _LIVES and serial < block.lives[0][0]
    graph = " of a graph that is replayed" if made < math.inf else ""
    need(bool(sizes) or is_long_ago, f"{what}{graph}, which was freed before", place)
    size, offset = (sizes or [block.capacity])[0], access.low - block.begin
    is_inside = access.high <= block.begin + size
    need(is_inside, f"{what}, out of bounds: at offset {offset} of {size} bytes", place)
    return block  # type: ignore[no-any-return]


def accesses_of(array: np.ndarray[Any, Any], writes: bool) -> list[Access]:
    """Return what an operation touches that reads or writes every element of a NumPy array."""
    if not array.size:
        return []
    dims = [(extent, stride) for extent, stride in zip(array.shape, array.strides, strict=True) if extent > 1]
    ends = [(extent - 1) * stride for extent, stride in dims]
    low = int(array.ctypes.data) + sum(min(0, end) for end in ends)
    high, inner, gaps = low + sum(map(abs, ends)) + array.itemsize, array.itemsize, list[tuple[int, int]]()
    for stride, extent in sorted((abs(stride), extent) for extent, stride in dims if stride):
        if stride == inner and not gaps:
            inner *= extent
        else:
            gaps.append((extent, stride))
    if not gaps or math.prod(extent for extent, _ in gaps) > _MOST_PIECES:
        return [Access(low, high, writes)]
    begins = np.array([low], np.int64)
    for extent, stride in gaps:
        begins = (begins[:, None] + np.arange(extent) * stride).reshape(-1)
    begins.sort()
    return [Access(low, high, writes, (begins, begins + inner))]


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}: said by the stand-in")
        self.status = status


class Work:
    """What an operation does, made anew for each replay of a graph: `run` returns what it has touched."""

    stuck = ""  # why it will never be ready, as far as is known

    def __init__(self, run: Callable[[], Sequence[Access]], ready: Callable[[], bool] | None = None) -> None:
        self.run, self.ready = run, ready or (lambda: True)


Clock = dict["Stream", int]


class Stream:
    """A stream of the device."""

    def __init__(self, ptr: int, is_blocking: bool) -> None:
        self.ptr, self.is_blocking = ptr, is_blocking
        self.clock: Clock = {}
        self.count = self.done = self.asked = 0
        self.queue: deque[Operation] = deque()
        self.capture: Capture | None = None
        self.is_over = False  # it was destroyed, and the host knows that all of it is done

    def comes_after(self) -> Clock:
        """Return what comes before anything that it is given now: CUDA orders blocking ones with the default one."""
        others = streams.values() if self.ptr == LEGACY else [streams[LEGACY]]
        merge(self.clock, *(other.clock for other in others if other.is_blocking and self.is_blocking))
        return dict(self.clock)


class Operation:
    """Something that was put on a stream, whose clock it takes."""

    def __init__(self, name: str, stream: Stream, work: Work, place: str, made: float) -> None:
        self.name, self.stream, self.work, self.place, self.made = name, stream, work, place, made
        self.index, self.clock, self.serial = stream.count, dict(stream.clock), next(serials)

    def precedes(self, other: Operation) -> bool:
        return self.stream.is_over or self.index <= other.clock.get(self.stream, 0)

    def can_run(self) -> bool:
        before = (stream.done >= n for stream, n in self.clock.items() if stream is not self.stream)
        return all(before) and self.work.ready()


class Capture:
    """What is recorded for a CUDA graph."""

    def __init__(self, mode: int) -> None:
        self.mode, self.is_broken = mode, False
        self.operations: list[tuple[str, Callable[[], Work], str]] = []


class Event:
    """CuPy's: what its stream had been given when it was recorded. It is destroyed with the object."""

    capture: Capture | None = None
    recorded_s, asked = 0.0, 0
    done = property(lambda self: sys.modules["cupy.cuda"].runtime.eventQuery(self.ptr) == 0)

    def __init__(self, **options: bool) -> None:
        self.ptr, self.clock = next(handles), Clock()
        events[self.ptr] = self

    def record(self, stream: Any = None) -> None:
        with LOCK:
            of = stream_at(current_ptr() if stream is None else stream.ptr)
            self.capture, self.clock, self.asked = of.capture, of.comes_after(), 0
            self.recorded_s = time.perf_counter()

    def synchronize(self) -> None:
        sys.modules["cupy.cuda"].runtime.eventSynchronize(self.ptr)


streams: dict[int, Stream] = {LEGACY: Stream(LEGACY, True)}
events: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()
known: Clock = {}  # of each stream, how many operations the host knows to be done
host_saw_more: list[Callable[[], None]] = []
destroyed: set[Stream] = set()
captures: set[Capture] = set()
_waiting: dict[Stream, None] = {}  # with operations that have not run
_pump: list[threading.Thread] = []
_advancing: list[bool] = []


class _OfThread(threading.local):
    """What a thread has: CuPy's streams, the last of which is current, its default stream, NCCL's groups and calls."""

    def __init__(self) -> None:
        self.current, self.default = list[Any](), Stream(PER_THREAD, True)
        self.groups, self.calls, self.allocator = 0, list[Any](), None


of_thread = _OfThread()


def current_ptr() -> int:
    return of_thread.current[-1].ptr if of_thread.current else LEGACY


def stream_at(ptr: int) -> Stream:
    need(ptr in streams or ptr == PER_THREAD, f"stream {ptr:#x} was destroyed, or never made")
    return of_thread.default if ptr == PER_THREAD else streams[ptr]


def put(name: str, run: Any, kind: str = "", ptr: int = -1, make: Callable[[], Work] | None = None) -> None:
    if kind:
        count(kind)
    if OFF:
        run()
        return
    with LOCK:
        put_made(stream_at(current_ptr() if ptr < 0 else ptr), name, make or partial(Work, run), where())


def put_made(stream: Stream, name: str, make: Callable[[], Work], place: str, made: float = math.inf) -> None:
    if stream.capture is not None:
        stream.capture.operations.append((name, make, place))
        return
    stream.count, stream.asked = stream.count + 1, 0
    merge(stream.clock, known, stream.comes_after(), {stream: stream.count})
    for gone in [other for other in stream.clock if other.is_over]:
        del stream.clock[gone]
    stream.queue.append(Operation(name, stream, make(), place, made))
    _waiting[stream] = None
    advance(stream.queue[-1])


def merge(clock: Clock, *others: Clock) -> None:
    for other in others:
        for stream, index in other.items():
            if index > clock.get(stream, 0) and not stream.is_over:
                clock[stream] = index


def advance(mine: Operation | None = None) -> None:
    error = None
    with LOCK:
        if _advancing:  # by what runs: this goes on behind it
            return
        _advancing.append(True)
        try:
            while stream := next((one for one in _waiting if one.queue[0].can_run()), None):
                try:
                    _run(stream.queue[0])
                except Misuse as misuse:
                    error = misuse if stream.queue[0] is mine else error
                finally:
                    stream.done = stream.queue.popleft().index
                    if not stream.queue:
                        del _waiting[stream]
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
            if not _waiting:
                _pump.clear()


def _run(operation: Operation) -> None:
    """Run an operation, and compare what it touches with what others have touched before."""
    name, stream, place = operation.name, operation.stream, operation.place
    # Where nothing else waits for its turn, all that follows comes after what the host knows.
    is_alone = len(_waiting) == 1 and len(stream.queue) == 1
    for access in operation.work.run():
        block, kept = block_of(access, name, place, operation.serial, operation.made), []
        for old, by in block.records[-_MOST_RECORDS:]:
            is_ordered = by.precedes(operation)
            if not is_ordered and (old.writes or access.writes) and access.crosses(old):
                report(
                    f"race: {name} on stream {stream.ptr:#x}, at {place}, and {by.name} on {by.stream.ptr:#x}, at "
                    f"{by.place}, touch the same bytes, one writes them, and nothing orders the two"
                )
            is_needless = is_ordered and access.covers(old) and access.writes >= old.writes
            if not is_needless and not (is_alone and is_known({by.stream: by.index})):
                kept.append((old, by))
        block.records = [*kept, (access, operation)]


def _stuck() -> None:
    """Report and raise what keeps work from ever being ready."""
    for operation in (stream.queue[0] for stream in _waiting):
        need(not operation.work.stuck, operation.work.stuck, operation.place)


checker.at_exit += [advance, _stuck]


def is_known(clock: Clock) -> bool:
    return all(known.get(stream, 0) >= index or stream.is_over for stream, index in clock.items())


def host_sees(clock: Clock) -> None:
    """Note that the host knows of these operations that they are done."""
    if not is_known(clock):
        count("host_waits")
        merge(known, clock)
        for look in host_saw_more:
            look()
    for stream in [one for one in destroyed if is_known({one: one.count})]:
        stream.is_over = True
        destroyed.discard(stream)
        known.pop(stream, None)


def _is_done(clock: Clock) -> bool:
    advance()
    return all(stream.done >= index for stream, index in clock.items())


def host_waits(clock: Clock, what: str) -> None:
    need(not of_thread.groups, f"{what} within a group of NCCL calls that is not ended: it waits for ever")

    def is_over() -> bool:
        with LOCK:
            if is_done := _is_done(clock):
                host_sees(clock)
            else:
                _stuck()
            return is_done

    checker.wait_until(is_over, what)


def _broken(status: int, *those: Capture | None) -> CUDARuntimeError:
    """Return the error of a call that breaks captures: they can record nothing any more."""
    for capture in those:
        if capture is not None:
            capture.is_broken = True
    return CUDARuntimeError(status)


def refuse_in_capture(*those: Capture | None) -> None:
    """Raise for a call, such as to wait, that these captures and those of mode GLOBAL forbid."""
    if found := [one for one in captures if one in those or one.mode == GLOBAL]:
        raise _broken(UNSUPPORTED, *found)


def _event(name: str, handle: int) -> Event:
    if handle not in events:
        report(f"{name} of event {handle:#x}, which was destroyed, at {where()}")
        raise CUDARuntimeError(709)
    return events[handle]


def order_after_event(ptr: int, handle: int, flags: int = 0) -> None:
    with LOCK:
        event, stream = _event("streamWaitEvent", handle), stream_at(ptr)
        if stream.capture is not event.capture and {stream.capture, event.capture} & captures:
            raise _broken(ISOLATION, stream.capture, event.capture)
        merge(stream.clock, event.clock)


def _look(name: str, handle: int) -> tuple[Any, Clock]:
    """Return what a call asks or waits for, and its clock."""
    if name.startswith("event"):
        event = _event(name, handle)
        refuse_in_capture()
        if event.capture is not None:
            raise _broken(CAPTURED, event.capture)
        return event, event.clock
    if name.startswith("device"):
        refuse_in_capture(*captures)
        return None, {stream: stream.count for stream in [*streams.values(), *_waiting]}
    stream = stream_at(handle)
    refuse_in_capture(stream.capture)
    return stream, stream.comes_after()


def query(name: str, handle: int) -> int:
    """Return CUDA's status: the first answers are "not ready", of what the host does not know to be done."""
    with LOCK:
        try:
            awaited, clock = _look(name, handle)
        except CUDARuntimeError as error:
            return error.status
        if not is_known(clock):
            awaited.asked += 1
            if not _is_done(clock) or awaited.asked <= LAG:
                return 600
            host_sees(clock)
        return 0


def wait(name: str, handle: int = 0) -> None:
    with LOCK:
        clock = _look(name, handle)[1]
    host_waits(clock, name)
