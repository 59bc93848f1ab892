"""`cupy.cuda`: devices, streams, events, graphs, and where memory comes from, under CuPy's names."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

from cupy import _array, _streams
from cupy._array import MemoryPointer
from cupy._memory import serials
from cupy.checker import count, need
from cupy.cuda import runtime

_handles = itertools.count(0x5000, 16)
_thread = threading.local()


class Device:
    """The one GPU."""

    compute_capability = "90"
    attributes = {"MultiProcessorCount": 2}  # noqa: RUF012  # as CuPy has it

    def __init__(self, device: Any = 0) -> None:
        self.id = 0 if device is None else int(device)

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (Device, int)) and int(other) == self.id

    def __hash__(self) -> int:
        return self.id

    def use(self) -> None:
        pass

    def synchronize(self) -> None:
        runtime.deviceSynchronize()


class Event:
    """A point in a stream. It is destroyed with the object, as CuPy's."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.ptr = next(_handles)
        self._events = _streams.events
        self._events[self.ptr] = _streams.Event()

    def __del__(self) -> None:
        self._events.pop(self.ptr, None)  # also at the end of the process, when modules are gone

    @property
    def done(self) -> bool:
        """Whether it is; an error counts as "no", as in CuPy."""
        return bool(runtime.eventQuery(self.ptr) == 0)

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

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: Any = None
    ) -> None:
        self._owns, self._of = not (null or ptds), None
        self.ptr = next(_handles) if self._owns else 2 * ptds
        self.device_id = 0 if self._owns else -1
        self._destroy: Callable[[int], None] = _streams.destroy_stream
        if self._owns:
            _streams.add_stream(_streams.Stream(self.ptr, not non_blocking))

    @classmethod
    def from_external(cls, stream: Any) -> Stream:
        made = cls(null=True)
        made.ptr, made._of = stream.__cuda_stream__()[1], stream
        return made

    def __del__(self) -> None:
        if self._owns:
            self._destroy(self.ptr)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.ptr == self.ptr

    def __hash__(self) -> int:
        return self.ptr

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr

    def __enter__(self) -> Stream:
        _stack().append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _stack().pop()

    def use(self) -> Stream:
        _stack()[-1] = self
        return self

    @property
    def done(self) -> bool:
        """Whether all is that it was given; an error counts as "no", as in CuPy."""
        return bool(runtime.streamQuery(self.ptr) == 0)

    def synchronize(self) -> None:
        runtime.streamSynchronize(self.ptr)

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        runtime.streamWaitEvent(self.ptr, event.ptr)

    def is_capturing(self) -> bool:
        return runtime.streamIsCapturing(self.ptr)

    def begin_capture(self, mode: int | None = None) -> None:
        _streams.begin_capture(self.ptr, runtime.streamCaptureModeRelaxed if mode is None else mode)

    def end_capture(self) -> Graph:
        return Graph(_streams.end_capture(self.ptr))


Stream.null, Stream.ptds = Stream(null=True), Stream(ptds=True)


class Graph:
    """A CUDA graph."""

    def __init__(self, capture: _streams.Capture) -> None:
        self._capture, self._made = capture, next(serials)

    def launch(self, stream: Stream | None = None) -> None:
        count("graph_launches")
        _streams.replay(self._capture, self._made, (stream or get_current_stream()).ptr)


def _stack() -> list[Stream]:
    if not hasattr(_thread, "stack"):
        _thread.stack = [Stream.null]
    return _thread.stack  # type: ignore[no-any-return]


def get_current_stream(device_id: int = -1) -> Stream:
    return _stack()[-1]


# ---- memory

Allocator = Callable[[int], MemoryPointer]


def get_allocator() -> Allocator:
    return getattr(_thread, "allocator", None) or _array.allocate


class using_allocator:
    """Has this thread's arrays come from somewhere else."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator

    def __enter__(self) -> None:
        self._before = getattr(_thread, "allocator", None)
        _thread.allocator = self._allocator

    def __exit__(self, *exc: object) -> None:
        _thread.allocator = self._before


class MemoryHook:
    """Told of each piece of memory that is taken: `malloc` from the pool, `alloc` by the pool from the device."""

    def __enter__(self) -> MemoryHook:
        _array.hooks().append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _array.hooks().remove(self)

    def alloc_preprocess(self, **given: Any) -> None:
        pass

    def malloc_preprocess(self, **given: Any) -> None:
        pass


class MemoryPool:
    """The pool; there is one."""

    def __init__(self, allocator: Any = None) -> None:
        need(allocator is None, "the checker has no memory of NCCL's own (nccl4py)")

    def malloc(self, size: int) -> MemoryPointer:
        return _array.allocate(size)

    def free_all_blocks(self) -> None:
        """Give unused memory back: nothing to do."""


def get_default_memory_pool() -> MemoryPool:
    """Return the pool."""
    return MemoryPool()


from cupy.cuda import nccl as nccl  # noqa: E402
