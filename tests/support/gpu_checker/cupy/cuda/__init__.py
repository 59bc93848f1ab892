"""`cupy.cuda`: devices, streams, events, graphs, where memory comes from, and CUDA's own calls, under CuPy's names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

from cupy import _device, _pinned
from cupy._array import allocate
from cupy._device import Event as Event
from cupy._device import of_thread, serials
from cupy.checker import LOCK, count, need

_UUID = b"gpu checker 0001"
_ABOUT = {"name": b"GPU checker", "totalGlobalMem": 80 << 30, "major": 9, "minor": 0, "uuid": _UUID}
runtime = SimpleNamespace(
    CUDARuntimeError=_device.CUDARuntimeError, streamWaitEvent=_device.order_after_event, setDevice=int,
    hostRegister=_pinned.lock, hostUnregister=_pinned.unlock, memcpyAsync=_pinned.copy_async,
    deviceGetPCIBusId="0000:01:00.{}".format, deviceGetUuid=lambda device: _UUID, getDevice=lambda: 0,
    getDeviceCount=lambda: 1, getDeviceProperties=lambda device: _ABOUT, memGetInfo=lambda: (40 << 30, 80 << 30),
    driverGetVersion=lambda: 13000, runtimeGetVersion=lambda: 13000,
    streamIsCapturing=lambda ptr: _device.stream_at(ptr).capture is not None,
)  # fmt: skip
for _name in ("eventQuery", "streamQuery"):
    setattr(runtime, _name, partial(_device.query, _name))
for _name in ("eventSynchronize", "streamSynchronize", "deviceSynchronize"):
    setattr(runtime, _name, partial(_device.wait, _name))


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


class Stream:
    """A stream; `with` makes it the current one."""

    null: Stream
    ptds: Stream
    device_id = -1
    done = property(lambda self: runtime.streamQuery(self.ptr) == 0)

    def __init__(self, non_blocking: bool = False, ptr: int | None = None, owner: Any = None) -> None:
        self.ptr = next(_device.handles) if ptr is None else ptr
        self._owner, self._owns = owner, ptr is None
        if ptr is None:
            _device.streams[self.ptr] = _device.Stream(self.ptr, not non_blocking)

    @classmethod
    def from_external(cls, stream: Any) -> Stream:
        return cls(ptr=stream.__cuda_stream__()[1], owner=stream)

    def __del__(self, is_at_exit: Any = sys.is_finalizing) -> None:
        if self._owns and not is_at_exit():  # what it has been given is still done
            with LOCK:
                _device.destroyed.add(_device.streams.pop(self.ptr))
                _device.host_sees({})

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

    def begin_capture(self, mode: int = _device.RELAXED) -> None:
        need(self.ptr in _device.streams and self.ptr > 0, "the default stream cannot be captured")
        _device.stream_at(self.ptr).capture = capture = _device.Capture(mode)
        _device.captures.add(capture)

    def end_capture(self) -> Graph:
        stream = _device.stream_at(self.ptr)
        capture, stream.capture = stream.capture, None
        _device.captures.discard(capture)
        if capture is None or capture.is_broken:
            raise _device.CUDARuntimeError(_device.INVALIDATED)
        return Graph(capture)


Stream.null, Stream.ptds = Stream(ptr=_device.LEGACY), Stream(ptr=_device.PER_THREAD)


class Graph:
    """A CUDA graph."""

    def __init__(self, capture: _device.Capture) -> None:
        self._capture, self._made = capture, next(serials)

    def launch(self, stream: Stream | None = None) -> None:
        count("graph_launches")
        with LOCK:
            for operation in self._capture.operations:
                to = _device.stream_at((stream or get_current_stream()).ptr)
                _device.put_made(to, *operation, self._made)


def get_current_stream(device_id: int = -1) -> Stream:
    return of_thread.current[-1] if of_thread.current else Stream.null


def get_allocator() -> Any:
    return of_thread.allocator or allocate


@contextmanager
def using_allocator(allocator: Any) -> Iterator[None]:
    before, of_thread.allocator = of_thread.allocator, allocator
    try:
        yield
    finally:
        of_thread.allocator = before


from cupy.cuda import nccl as nccl  # noqa: E402
