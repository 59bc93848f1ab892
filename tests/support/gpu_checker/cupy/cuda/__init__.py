"""`cupy.cuda`: devices, streams, events, graphs, and where memory comes from, under CuPy's names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cupy import _streams
from cupy._array import allocate, of_thread
from cupy._memory import serials
from cupy.checker import count
from cupy.cuda import runtime

_handles = itertools.count(0x5000, 16)


class Device:
    """The one GPU."""

    compute_capability = "90"
    attributes = {"MultiProcessorCount": 2}  # noqa: RUF012  # as CuPy has it

    def __init__(self, device: int = 0) -> None:
        self.id = device

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass

    def synchronize(self) -> None:
        runtime.deviceSynchronize()


class Event:
    """A point in a stream. It is destroyed with the object, as CuPy's."""

    done = property(lambda self: runtime.eventQuery(self.ptr) == 0)

    def __init__(self, **options: bool) -> None:
        self.ptr, self._events = next(_handles), _streams.events
        self._events[self.ptr] = _streams.Event()

    def __del__(self) -> None:
        self._events.pop(self.ptr, None)  # also at the end of the process, when modules are gone

    def record(self, stream: Any = None) -> None:
        runtime.eventRecord(self.ptr, (stream or get_current_stream()).ptr)

    def synchronize(self) -> None:
        runtime.eventSynchronize(self.ptr)


def get_elapsed_time(begin: Event, end: Event) -> float:
    """Return the milliseconds between the calls that recorded two events."""
    times = [_streams.events[event.ptr].recorded_s for event in (begin, end)]
    return max(1e-3, 1e3 * (times[1] - times[0]))


class Stream:
    """A stream; `with` makes it the current one."""

    null: Stream
    ptds: Stream
    device_id = -1
    done = property(lambda self: runtime.streamQuery(self.ptr) == 0)

    def __init__(self, non_blocking: bool = False, ptr: int | None = None, owner: Any = None) -> None:
        self.ptr = next(_handles) if ptr is None else ptr
        self._owner, self._destroy = owner, _streams.destroy_stream if ptr is None else int
        if ptr is None:
            _streams.streams[self.ptr] = _streams.Stream(self.ptr, not non_blocking)

    @classmethod
    def from_external(cls, stream: Any) -> Stream:
        return cls(ptr=stream.__cuda_stream__()[1], owner=stream)

    def __del__(self) -> None:
        self._destroy(self.ptr)

    def __enter__(self) -> Stream:
        _current().append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _current().pop()

    def synchronize(self) -> None:
        runtime.streamSynchronize(self.ptr)

    def record(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        runtime.streamWaitEvent(self.ptr, event.ptr)

    def begin_capture(self, mode: int = _streams.RELAXED) -> None:
        _streams.begin_capture(self.ptr, mode)

    def end_capture(self) -> Graph:
        return Graph(_streams.end_capture(self.ptr))


Stream.null, Stream.ptds = Stream(ptr=0), Stream(ptr=_streams.PER_THREAD)


class Graph:
    """A CUDA graph."""

    def __init__(self, capture: _streams.Capture) -> None:
        self._capture, self._made = capture, next(serials)

    def launch(self, stream: Stream | None = None) -> None:
        count("graph_launches")
        _streams.replay(self._capture, self._made, (stream or get_current_stream()).ptr)


def _current() -> list[Stream]:
    if not hasattr(of_thread, "streams"):
        of_thread.streams = [Stream.null]
    return of_thread.streams  # type: ignore[no-any-return]


def get_current_stream(device_id: int = -1) -> Stream:
    return _current()[-1]


def get_allocator() -> Any:
    return getattr(of_thread, "allocator", allocate)


@contextmanager
def using_allocator(allocator: Any) -> Iterator[None]:
    """Have this thread's arrays come from somewhere else."""
    before, of_thread.allocator = get_allocator(), allocator
    try:
        yield
    finally:
        of_thread.allocator = before


from cupy.cuda import nccl as nccl  # noqa: E402
