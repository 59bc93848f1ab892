"""`cupy.cuda`: whose memory is whose, what streams do with it, what is ordered with what, and when it is done.

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
import ctypes
import itertools
import math
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.array_utils import byte_bounds

from cupy import checker
from cupy.checker import LAG, LOCK, OFF, Misuse, count, need, report, where

_MOST_RECORDS = 256  # of a block
_GRAIN_BYTES = 512
_LIVES = 8  # of a block that are remembered
_POISON = 0xA5  # what nobody can take for a result
_UUID = b"gpu checker 0001"
_ABOUT = {"name": b"GPU checker", "totalGlobalMem": 80 << 30, "major": 9, "minor": 0, "uuid": _UUID}
_handles = itertools.chain([0], itertools.count(0x5000, 16))  # the first is the default stream's
serials = itertools.count(1)
"""Numbers everything that happens in the process: an operation may touch what lived when it was asked for."""


# ---- memory


class Access(NamedTuple):
    """Bytes that an operation reads or writes, from `low` to `high`: gaps count as touched."""

    low: int
    high: int
    writes: bool

    def crosses(self, other: Access) -> bool:
        return self.low < other.high and other.low < self.high


def accesses_of(array: np.ndarray[Any, Any], writes: bool) -> list[Access]:
    return [Access(*byte_bounds(array), writes)] if array.size else []


class Block:
    """Memory that is handed out whole."""

    def __init__(self, begin: int, capacity: int, arena: Any = None, raw: Any = None) -> None:
        self.begin, self.capacity, self.arena, self._raw = begin, capacity, arena, raw
        self.lives: deque[list[float]] = deque(maxlen=_LIVES)  # when they began and ended, and their bytes
        self.records: list[tuple[Access, Operation]] = []  # what touched it; see `_run`
        bisect.insort(blocks, self, key=_begin)

    def begin_life(self, size: int) -> Block:
        self.lives.append([next(serials), math.inf, size])
        return self


blocks: list[Block] = []  # by their addresses
_begin = attrgetter("begin")
_unused: defaultdict[tuple[int, int], list[Block]] = defaultdict(list)


class MemoryPointer(NamedTuple):
    """An address in memory of the device, which it keeps from being given back."""

    mem: Any
    ptr: int

    def copy_from_device_async(self, source: MemoryPointer, size: int) -> None:
        runtime.memcpyAsync(self.ptr, source.ptr, size, 3, get_current_stream().ptr)


class _Owner:
    """Keeps memory of the pool from being given back."""


def allocate(size: int) -> MemoryPointer:
    """Return memory of the current stream's arena."""
    stream, owner = get_current_stream(), _Owner()
    capacity = max(1, -(-size // _GRAIN_BYTES)) * _GRAIN_BYTES
    with LOCK:
        count("allocations")
        if unused := _unused[stream.ptr, capacity]:
            block = unused.pop()
        else:
            raw = np.empty(
                capacity + 2 * _GRAIN_BYTES, np.uint8
            )  # there is room behind it: no two blocks touch
            begin = int(raw.ctypes.data) + -int(raw.ctypes.data) % _GRAIN_BYTES
            block = Block(begin, capacity, stream.ptr, raw)
        block.begin_life(size)
    weakref.finalize(owner, _release, block).atexit = False
    if not OFF and stream.capture is None:
        put("an allocation", lambda: ctypes.memset(block.begin, _POISON, block.capacity) and ())
    return MemoryPointer(owner, block.begin)


def _release(block: Block) -> None:
    with LOCK:
        block.lives[-1][1] = next(serials)
        _unused[block.arena, block.capacity].append(block)


def get_allocator() -> Any:
    return of_thread.allocator


@contextmanager
def using_allocator(allocator: Any) -> Iterator[None]:
    before, of_thread.allocator = of_thread.allocator, allocator
    try:
        yield
    finally:
        of_thread.allocator = before


def block_at(address: int) -> Block | None:
    with LOCK:
        before = blocks[: bisect.bisect_right(blocks, address, key=_begin)][-1:]
    return next((one for one in before if address < one.begin + one.capacity + _GRAIN_BYTES // 2), None)


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


# ---- streams, events, graphs


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}: said by the stand-in")
        self.status = status


Clock = dict[int, int]
"""Of streams by their addresses, how many operations."""
_ran: Clock = {}  # of each stream
_known: Clock = {}  # to the host to be done
_over: set[int] = set()  # streams that nobody has any more, and the host knows that all of theirs is done
host_saw_more: list[Callable[[], None]] = []


def _covers(clock: Clock, asked: Clock) -> bool:
    return all(clock.get(ptr, 0) >= index or ptr in _over for ptr, index in asked.items())


has_run, is_known = partial(_covers, _ran), partial(_covers, _known)


def merge(clock: Clock, *others: Clock) -> None:
    for other in others:
        for ptr, index in other.items():
            if index > clock.get(ptr, 0) and ptr not in _over:
                clock[ptr] = index


_Run = Callable[[], Sequence[Access]]
_Ready = Callable[[], str | None]


class Operation:
    """Something that was put on a stream: `run` returns what it has touched.

    `ready` returns None where it can run, else "", or why it never will. What a graph repeats is asked again.
    """

    stuck: str | None = ""

    def __init__(self, name: str, at: Stream, run: _Run, ready: _Ready, place: str, made: float) -> None:
        self.name, self.at, self.run, self.ready, self.place, self.made = (
            name,
            at.ptr,
            run,
            ready,
            place,
            made,
        )
        self.index, self.clock, self.serial = at.count, dict(at.clock), next(serials)

    def precedes(self, other: Operation) -> bool:
        return self.at == other.at or self.at in _over or self.index <= other.clock.get(self.at, 0)

    def can_run(self) -> bool:
        if not has_run(self.clock):
            return False
        self.stuck = self.ready()
        return self.stuck is None


class Graph:
    """A CUDA graph, or what is recorded for one."""

    def __init__(self) -> None:
        self.is_broken, self.made = False, math.inf
        self.operations: list[tuple[str, _Run, _Ready, str]] = []

    def launch(self, stream: Stream | None = None) -> None:
        with LOCK:
            for operation in self.operations:
                _put(stream or get_current_stream(), *operation, self.made)


def refuse_in_capture(*those: Graph | None) -> None:
    """Raise for a call, such as to wait, that a capture forbids: it can record nothing any more."""
    found = [graph for graph in those if graph is not None]
    for graph in found:
        graph.is_broken = True
    if found:
        raise CUDARuntimeError(900)


class Event:
    """What its stream had been given when it was recorded. It is destroyed with the object."""

    capture: Graph | None = None
    recorded_s, asked = 0.0, 0
    done = property(lambda self: runtime.eventQuery(self.ptr) == 0)

    def __init__(self, **options: bool) -> None:
        self.ptr, self.clock = next(_handles), Clock()
        events[self.ptr] = self

    def record(self, stream: Any = None) -> None:
        with LOCK:
            of = stream or get_current_stream()
            self.capture, self.clock, self.asked = of.capture, of.comes_after(), 0
            self.recorded_s = time.perf_counter()

    def synchronize(self) -> None:
        runtime.eventSynchronize(self.ptr)

    def comes_after(self) -> Clock:
        return self.clock


class Stream:
    """A stream; `with` makes it the current one."""

    null: Stream
    device_id = -1
    capture: Graph | None = None
    done = property(lambda self: runtime.streamQuery(self.ptr) == 0)

    def __init__(self, non_blocking: bool = False) -> None:
        self.ptr, self.is_blocking = next(_handles), not non_blocking
        self.clock, self.queue = Clock(), deque[Operation]()
        self.count = self.asked = 0
        streams[self.ptr] = self

    @staticmethod
    def from_external(stream: Any) -> Stream:
        return stream_at(stream.__cuda_stream__()[1])

    def __enter__(self) -> Stream:
        of_thread.current.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        of_thread.current.pop()

    def synchronize(self) -> None:
        runtime.streamSynchronize(self.ptr)

    def record(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        runtime.streamWaitEvent(self.ptr, event.ptr)

    def begin_capture(self, mode: int = 2) -> None:
        need(self.ptr > 0, "the default stream cannot be captured")
        self.capture = Graph()

    def end_capture(self) -> Graph:
        graph, self.capture = self.capture, None
        if graph is None or graph.is_broken:
            raise CUDARuntimeError(901)
        graph.made = next(serials)
        return graph

    def comes_after(self) -> Clock:
        """Return what comes before anything that it is given now: CUDA orders blocking ones with the default one."""
        others = streams.values() if self is Stream.null else [Stream.null]
        merge(self.clock, *(other.clock for other in others if other.is_blocking and self.is_blocking))
        return dict(self.clock)


events: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()
streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
_waiting: dict[Stream, None] = {}  # with operations that have not run
Stream.null = Stream()


class _OfThread(threading.local):
    """What a thread has: CuPy's streams, the last of which is current, NCCL's groups and calls, an allocator."""

    def __init__(self) -> None:
        self.current, self.groups, self.calls, self.allocator = [Stream.null], 0, list[Any](), allocate


of_thread = _OfThread()


def get_current_stream(device_id: int = -1) -> Stream:
    return of_thread.current[-1]


def stream_at(ptr: int) -> Stream:
    need(ptr in streams, f"stream {ptr:#x} was destroyed, or never made")
    return streams[ptr]


def _event_at(ptr: int) -> Event:
    need(ptr in events, f"event {ptr:#x} was destroyed")
    return events[ptr]


# ---- operations


def put(name: str, run: Any, kind: str = "", ptr: int | None = None, ready: _Ready = lambda: None) -> None:
    if kind:
        count(kind)
    if OFF:
        run()
        return
    with LOCK:
        _put(get_current_stream() if ptr is None else stream_at(ptr), name, run, ready, where())


def _put(stream: Stream, name: str, run: _Run, ready: _Ready, place: str, made: float = math.inf) -> None:
    if stream.capture is not None:
        stream.capture.operations.append((name, run, ready, place))
        return
    stream.count, stream.asked = stream.count + 1, 0
    merge(stream.clock, _known, stream.comes_after())
    for ptr in _over & stream.clock.keys():
        del stream.clock[ptr]
    operation = Operation(name, stream, run, ready, place, made)
    stream.clock[stream.ptr] = stream.count
    stream.queue.append(operation)
    _waiting[stream] = None
    advance(operation)


_pump: list[threading.Thread] = []
_advancing: list[bool] = []


def advance(mine: Operation | None = None) -> None:
    error = None
    with LOCK:
        if _advancing:  # by what runs: this goes on behind it
            return
        _advancing.append(True)
        try:
            while stream := next((one for one in _waiting if one.queue[0].can_run()), None):
                try:
                    _run(stream)
                except Misuse as misuse:
                    error = misuse if stream.queue[0] is mine else error
                finally:
                    _ran[stream.ptr] = stream.queue.popleft().index
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


def _run(stream: Stream) -> None:
    """Run the next operation, and compare what it touches with what others have touched before."""
    operation = stream.queue[0]
    name, place = operation.name, operation.place
    # Where nothing else waits for its turn, all that follows comes after what the host knows.
    is_alone = len(_waiting) == 1 and len(stream.queue) == 1
    for access in operation.run():
        block, kept = block_of(access, name, place, operation.serial, operation.made), []
        for old, by in block.records[-_MOST_RECORDS:]:
            is_ordered = by.precedes(operation)
            if not is_ordered and (old.writes or access.writes) and access.crosses(old):
                report(
                    f"race: {name} on stream {stream.ptr:#x}, at {place}, and {by.name} on {by.at:#x}, at "
                    f"{by.place}, touch the same bytes, one writes them, and nothing orders the two"
                )
            is_covered = access.low <= old.low and old.high <= access.high and access.writes >= old.writes
            if not (is_ordered and is_covered) and not (is_alone and is_known({by.at: by.index})):
                kept.append((old, by))
        block.records = [*kept, (access, operation)]


# ---- waits of the host and of streams


def _stuck() -> None:
    """Report and raise what keeps work from ever being ready."""
    for operation in (stream.queue[0] for stream in _waiting):
        need(not operation.stuck, operation.stuck or "", operation.place)


checker.at_exit += [advance, _stuck]


def _host_sees(clock: Clock) -> bool:
    """Note that the host knows of these operations that they are done, if they are."""
    advance()
    if is_done := has_run(clock):
        if not is_known(clock):
            count("host_waits")
            merge(_known, clock)
            for look in host_saw_more:
                look()
        for ptr in [one for one in _known if one not in streams and _known[one] >= _ran[one]]:
            _over.add(ptr)
            del _known[ptr], _ran[ptr]
    return is_done


def host_waits(clock: Clock, what: str = "a wait of the host") -> None:
    need(not of_thread.groups, f"{what} within a group of NCCL calls that is not ended: it waits for ever")

    def is_over() -> bool:
        with LOCK:
            is_done = _host_sees(clock)
            if not is_done:
                _stuck()
            return is_done

    checker.wait_until(is_over, what)


def wait(find: Callable[..., Event | Stream], *ptr: int) -> None:
    with LOCK:
        awaited = find(*ptr)
        refuse_in_capture(awaited.capture)
        clock = awaited.comes_after()
    host_waits(clock)


def _wait_for_all() -> None:
    with LOCK:
        refuse_in_capture(*(stream.capture for stream in streams.values()))
        clock = _ran | {ptr: stream.count for ptr, stream in streams.items()}
    host_waits(clock)


def _query(find: Callable[[int], Event | Stream], ptr: int) -> int:
    """Return CUDA's status: the first answers are "not ready", of what the host does not know to be done."""
    with LOCK:
        asked = find(ptr)
        try:
            refuse_in_capture(asked.capture)
        except CUDARuntimeError as error:
            return error.status
        clock = asked.comes_after()
        asked.asked += not is_known(clock)
        return 0 if is_known(clock) or (asked.asked > LAG and _host_sees(clock)) else 600


def _order_after_event(ptr: int, event_ptr: int, flags: int = 0) -> None:
    with LOCK:
        event, stream = _event_at(event_ptr), stream_at(ptr)
        if stream.capture is not event.capture:
            refuse_in_capture(stream.capture, event.capture)
        merge(stream.clock, event.clock)


class Device(nullcontext[None]):
    compute_capability = "90"
    attributes = {"MultiProcessorCount": 2}  # noqa: RUF012  # as CuPy has it

    def __init__(self, device: int = 0) -> None:
        super().__init__()
        self.id = device

    def synchronize(self) -> None:
        runtime.deviceSynchronize()


def get_elapsed_time(begin: Event, end: Event) -> float:
    return max(1e-3, 1e3 * (end.recorded_s - begin.recorded_s))


runtime: Any = SimpleNamespace(
    CUDARuntimeError=CUDARuntimeError, eventQuery=partial(_query, _event_at), streamQuery=partial(_query, stream_at),
    eventSynchronize=partial(wait, _event_at), streamSynchronize=partial(wait, stream_at),
    deviceSynchronize=_wait_for_all, streamWaitEvent=_order_after_event, setDevice=int, getDevice=lambda: 0,
    deviceGetPCIBusId="0000:01:00.{}".format, deviceGetUuid=lambda device: _UUID, getDeviceCount=lambda: 1,
    getDeviceProperties=lambda device: _ABOUT, memGetInfo=lambda: (40 << 30, 80 << 30),
    driverGetVersion=lambda: 13000, runtimeGetVersion=lambda: 13000,
    streamIsCapturing=lambda ptr: stream_at(ptr).capture is not None,
)  # fmt: skip
