"""`cupy.cuda`: whose memory is whose, what streams do with it, what is ordered with what, and when it is done.

Blocks of memory come from a pool that has an arena for each stream, as CuPy's: what is freed goes to the next that
takes as much on that stream, at once, whatever other streams still do with it.

Each operation has a vector clock: of every stream, how many of its operations come before. It runs at once where all of
these have run, which is nearly always so; else when they have, in the thread that waits or in one of this module. What
nothing orders and touches the same bytes is a race, whichever has run first. What one thread of the host has waited
for, all threads know: they tell each other in ways that are not seen here.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from cupy import _memory, checker
from cupy._memory import Access, Block, block_of, serials
from cupy.checker import LAG, OFF, Misuse, count, locked, need, report, where

_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3
_KINDS = {_TO_DEVICE: "host_to_device", _TO_HOST: "device_to_host", _ON_DEVICE: "device_to_device"}
_MOST_RECORDS = 256  # of a block
_GRAIN_BYTES = 512
_POISON = 0xA5  # what nobody can take for a result
_ABOUT = {"name": b"GPU checker", "totalGlobalMem": 80 << 30, "major": 9, "minor": 0}
_handles = itertools.chain([0], itertools.count(0x5000, 16))  # the first is the default stream's


_unused: defaultdict[tuple[int, int], list[Block]] = defaultdict(list)


class MemoryPointer(NamedTuple):
    """An address in memory of the device, which it keeps from being given back."""

    mem: Any
    ptr: int

    def copy_from_device_async(self, source: MemoryPointer, size: int) -> None:
        runtime.memcpyAsync(self.ptr, source.ptr, size, 3, get_current_stream().ptr)


def allocate(size: int) -> MemoryPointer:
    """Return memory of the current stream's arena."""
    stream, owner = get_current_stream(), set[int]()
    capacity = max(1, -(-size // _GRAIN_BYTES)) * _GRAIN_BYTES
    with locked():
        count("allocations")
        if not (unused := _unused[stream.ptr, capacity]):
            raw = np.empty(capacity + 2 * _GRAIN_BYTES, np.uint8)  # with room behind: no two blocks touch
            begin = int(raw.ctypes.data) + -int(raw.ctypes.data) % _GRAIN_BYTES
            unused.append(Block(begin, capacity, stream.ptr, raw))
        block = unused.pop()
        block.lives.append([next(serials), math.inf, size])
    weakref.finalize(owner, _release, block).atexit = False
    if not OFF and stream.capture is None:
        put("an allocation", lambda: ctypes.memset(block.begin, _POISON, capacity) and ())
    return MemoryPointer(owner, block.begin)


def _release(block: Block) -> None:
    with locked():
        block.lives[-1][1] = next(serials)
        _unused[block.arena, block.end - block.begin].append(block)


def get_allocator() -> Any:
    return of_thread.allocator


def using_allocator(allocator: Any) -> AbstractContextManager[Any]:
    return patch.object(of_thread, "allocator", allocator)


# ---- streams, events, graphs


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}: said by the stand-in")
        self.status = status


Clock = dict[int, int]
"""Of streams by their addresses, how many operations. It is replaced, not changed, but for these two."""
_ran: Clock = {}  # of each stream
_known: Clock = {}  # to the host to be done
_over: set[int] = set()  # streams that nobody has any more, and the host knows that all of theirs is done


def _covers(clock: Clock, asked: Clock) -> bool:
    return all(clock.get(ptr, 0) >= index or ptr in _over for ptr, index in asked.items())


has_run, is_known = partial(_covers, _ran), partial(_covers, _known)


def merged(*clocks: Clock) -> Clock:
    found = Clock()
    for clock in clocks:
        for ptr, index in clock.items():
            if index > found.get(ptr, 0) and ptr not in _over:
                found[ptr] = index
    return found


_Run = Callable[[], Sequence[Access]]
_Ready = Callable[[], str | None]
_What = tuple[str, _Run, _Ready, str]


class Operation:
    """Something that was put on a stream: `run` returns what it has touched.

    `ready` returns None where it can run, else "", or why it never will. What a graph repeats is asked again.
    """

    stuck: str | None = ""

    def __init__(self, what: _What, at: Stream, made: float) -> None:
        self.name, self.run, self.ready, self.place = what
        self.at, self.index, self.clock = at.ptr, at.count, at.clock
        self.serial, self.made = next(serials), made

    def precedes(self, other: Operation) -> bool:
        return self.at == other.at or self.at in _over or self.index <= other.clock.get(self.at, 0)

    def can_run(self) -> bool:
        self.stuck = self.ready() if has_run(self.clock) else ""
        return self.stuck is None


class Graph:
    """A CUDA graph, or what is recorded for one."""

    def __init__(self) -> None:
        self.is_broken, self.made = False, math.inf
        self.operations: list[_What] = []

    def launch(self, stream: Stream | None = None) -> None:
        with locked():
            for what in self.operations:
                _put(stream or get_current_stream(), what, self.made)


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

    def record(self, stream: Any = None) -> Event:
        with locked():
            of = stream or get_current_stream()
            self.capture, self.clock, self.asked = of.capture, of.comes_after(), 0
            self.recorded_s = time.perf_counter()
        return self

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
        with locked():
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
        return Event().record(self)

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
        both = [other.clock for other in others if other.is_blocking and self.is_blocking]
        self.clock = merged(self.clock, *both)
        return self.clock


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
    with locked():
        _put(get_current_stream() if ptr is None else stream_at(ptr), (name, run, ready, where()))


def _put(stream: Stream, what: _What, made: float = math.inf) -> None:
    if stream.capture is not None:
        stream.capture.operations.append(what)
        return
    stream.count, stream.asked = stream.count + 1, 0
    stream.clock = merged(_known, stream.comes_after())
    stream.queue.append(Operation(what, stream, made))
    stream.clock = stream.clock | {stream.ptr: stream.count}
    _waiting[stream] = None
    advance()


_pump: list[threading.Thread] = []
_advancing: list[bool] = []


def advance() -> None:
    """Run what can be run."""
    with locked():
        if _advancing:  # by what runs: this goes on behind it
            return
        _advancing.append(True)
        try:
            while stream := next((one for one in _waiting if one.queue[0].can_run()), None):
                operation = stream.queue.popleft()
                _ran[operation.at] = operation.index
                if not stream.queue:
                    del _waiting[stream]
                with suppress(Misuse):  # which was reported
                    _run(operation)
        finally:
            _advancing.clear()
        if _waiting and not _pump:
            _pump.append(threading.Thread(target=_keep_running, name="gpu checker", daemon=True))
            _pump[0].start()


def _keep_running() -> None:
    while _pump:
        time.sleep(checker.PAUSE_S)
        with locked():
            advance()
            if not _waiting:
                _pump.clear()


def _run(operation: Operation) -> None:
    """Run an operation, and compare what it touches with what others have touched before."""
    name, place = operation.name, operation.place
    for access in operation.run():
        block, kept = block_of(access, name, place, operation.serial, operation.made), []
        for old, by in block.records[-_MOST_RECORDS:]:
            is_ordered = by.precedes(operation)
            if not is_ordered and access.conflicts_with(old):
                report(
                    f"race: {name} on stream {operation.at:#x}, at {place}, and {by.name} on {by.at:#x}, at "
                    f"{by.place}, touch the same bytes, one writes them, and nothing orders the two"
                )
            is_covered = access.low <= old.low and old.high <= access.high and access.writes >= old.writes
            # Where nothing else waits for its turn, all that follows comes after what the host knows.
            is_past = not _waiting and is_known({by.at: by.index})
            if not (is_ordered and is_covered) and not is_past:
                kept.append((old, by))
        block.records = [*kept, (access, operation)]


# ---- waits of the host and of streams


def stuck() -> bool:
    """Report and raise what keeps work from ever being ready; return False where nothing is known to."""
    for operation in (stream.queue[0] for stream in _waiting):
        need(not operation.stuck, operation.stuck or "", operation.place)
    return False


def _host_sees(clock: Clock) -> bool:
    """Note that the host knows of these operations that they are done, if they are."""
    advance()
    if is_done := has_run(clock):
        if not is_known(clock):
            count("host_waits")
            _known.update(merged(_known, clock))
            _memory.settle()
        for ptr in [one for one in _known if one not in streams and _known[one] >= _ran[one]]:
            _over.add(ptr)
            del _known[ptr], _ran[ptr]
    return is_done


def host_waits(clock: Clock, what: str = "a wait of the host") -> None:
    need(not of_thread.groups, f"{what} within a group of NCCL calls that is not ended: it waits for ever")

    def is_over() -> bool:
        with locked():
            return _host_sees(clock) or stuck()

    checker.wait_until(is_over, what)


def wait(find: Callable[..., Event | Stream], *ptr: int) -> None:
    with locked():
        awaited = find(*ptr)
        refuse_in_capture(awaited.capture)
        clock = awaited.comes_after()
    host_waits(clock)


def _wait_for_all() -> None:
    with locked():
        refuse_in_capture(*(stream.capture for stream in streams.values()))
        clock = _ran | {ptr: stream.count for ptr, stream in streams.items()}
    host_waits(clock)


def _query(find: Callable[[int], Event | Stream], ptr: int) -> int:
    """Return CUDA's status: the first answers are "not ready", of what the host does not know to be done."""
    with locked():
        asked = find(ptr)
        if asked.capture is not None:
            asked.capture.is_broken = True
            return 900
        clock = asked.comes_after()
        asked.asked += not is_known(clock)
        return 0 if is_known(clock) or (asked.asked > LAG and _host_sees(clock)) else 600


def _order_after_event(ptr: int, event_ptr: int, flags: int = 0) -> None:
    with locked():
        event, stream = _event_at(event_ptr), stream_at(ptr)
        if stream.capture is not event.capture:
            refuse_in_capture(stream.capture, event.capture)
        stream.clock = merged(stream.clock, event.clock)


def _copy_async(to: int, source: int, size: int, kind: int, ptr: int) -> None:
    count("pcie_bytes", size * (kind != _ON_DEVICE))
    has = [getattr(_memory.block_at(at), "arena", None) is not None for at in (source, to)]
    need(has == [kind != _TO_DEVICE, kind != _TO_HOST], f"the memory is not where kind {kind} has it")
    host = {_TO_DEVICE: source, _TO_HOST: to, _ON_DEVICE: 0}[kind]
    slot = _memory.locked_at(host, size)
    is_pageable = bool(host) and slot is None
    if is_pageable:
        report(f"an asynchronous copy of pageable memory, which CUDA makes wait, at {where()}")

    def run() -> list[Access]:
        _memory.copy_bytes(to, source, size, slot)
        touched = Access(source, source + size, False), Access(to, to + size, True)
        return [one for one in touched if not (is_pageable and one.low == host)]

    put(f"a copy ({_KINDS[kind]})", run, f"{_KINDS[kind]}_copies", ptr)
    if is_pageable:
        wait(stream_at, ptr)
    elif slot is not None and not OFF and stream_at(ptr).capture is None:
        _memory.close(slot, host, size, kind == _TO_HOST, partial(is_known, {ptr: stream_at(ptr).count}))


class Device(nullcontext[None]):
    attributes = {"MultiProcessorCount": 2}  # noqa: RUF012  # as CuPy has it

    def __init__(self, device: int = 0) -> None:
        super().__init__()
        self.id = device

    def synchronize(self) -> None:
        runtime.deviceSynchronize()


def get_elapsed_time(begin: Event, end: Event) -> float:
    return max(1e-3, 1e3 * (end.recorded_s - begin.recorded_s))


runtime: Any = SimpleNamespace(
    CUDARuntimeError=CUDARuntimeError, streamWaitEvent=_order_after_event, memcpyAsync=_copy_async,
    eventQuery=partial(_query, _event_at), streamQuery=partial(_query, stream_at),
    eventSynchronize=partial(wait, _event_at), streamSynchronize=partial(wait, stream_at),
    deviceSynchronize=_wait_for_all, hostRegister=_memory.lock, hostUnregister=_memory.unlock,
    setDevice=int, getDevice=lambda: 0, getDeviceCount=lambda: 1, deviceGetPCIBusId="0000:01:00.{}".format,
    getDeviceProperties=lambda device: _ABOUT, memGetInfo=lambda: (40 << 30, 80 << 30),
    driverGetVersion=lambda: 13000, runtimeGetVersion=lambda: 13000,
    streamIsCapturing=lambda ptr: stream_at(ptr).capture is not None,
)  # fmt: skip
