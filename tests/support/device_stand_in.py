"""A stand-in for CuPy's streams, events and page-locked memory on machines without a GPU.

Its arrays are NumPy's. Its streams do nothing by themselves: what is queued happens once somebody has asked a
few times whether it is done, or has waited. A copy to the host is seen there only then; a copy to the device is
seen at once (tests read arrays without waiting), but page-locked memory that changes before the stream has got
to that copy is a `MisuseError`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from lowshard.errors import CommError, StreamError

DEVICE = 0
DEFAULT_STREAM = 7
LAG = 3  # times that something queued answers that it is not done


class MisuseError(AssertionError):
    """The code under test asked for something that CUDA or NCCL does not promise to do."""


def need(ok: bool, what: str) -> None:
    if not ok:
        raise MisuseError(what)


class StandInStream:
    """Takes operations and does them when it is waited for."""

    def __init__(self, host: DeviceStandIn, ptr: int) -> None:
        self.ptr = ptr
        self.synchronized = 0
        self.queue: list[Callable[[], None]] = []
        self.finished = 0
        self._host, self._asked = host, 0

    @property
    def issued(self) -> int:
        """Operations that were ever queued."""
        return self.finished + len(self.queue)

    def push(self, operation: Callable[[], None]) -> None:
        """Queue an operation."""
        with self._host.lock:
            self.queue.append(operation)

    def flush(self, up_to: int | None = None) -> None:
        """Do what is queued, up to a number of operations."""
        with self._host.lock:
            end = self.issued if up_to is None else up_to
            while self.finished < end:
                operation = self.queue.pop(0)
                self.finished += 1
                operation()

    def asked(self, up_to: int) -> bool:
        """Answer whether operations are done; now and then, they are."""
        with self._host.lock:
            if self.finished >= up_to:
                return True
            self._asked += 1
            if self._asked % (LAG + 1):
                return False
            self.flush(up_to)
            return True

    @property
    def done(self) -> bool:
        return self.asked(self.issued)

    def synchronize(self) -> None:
        self.synchronized += 1
        self.flush()

    def wait_event(self, event: StandInEvent) -> None:
        self._host.log.append(("wait", self.ptr, event))
        self.push(event.finish)

    def __enter__(self) -> StandInStream:
        self._host.need_device("a stream entered")
        self._host.stack.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        need(self._host.stack.pop() is self, "streams are left in the order they were entered")


class StandInEvent:
    """A place in a stream."""

    def __init__(self, host: DeviceStandIn) -> None:
        self._host = host
        self._stream: StandInStream | None = None
        self._mark = 0

    def record(self, stream: StandInStream) -> None:
        self._host.log.append(("record", stream.ptr, self))
        self._stream, self._mark = stream, stream.issued

    @property
    def done(self) -> bool:
        self._host.check()
        return self._stream is None or self._stream.asked(self._mark)

    def finish(self) -> None:
        if self._stream is not None:
            self._stream.flush(self._mark)


class DeviceStandIn:
    """One rank's device: what `Binding` takes of it."""

    def __init__(self, device: int = DEVICE) -> None:
        self.device = device
        """Its number; a thread begins on device 0."""
        self.fault = ""
        """A CUDA error that the device has come to, as `Binding`'s events tell it."""
        self.captured: StandInStream | None = None
        """The stream that a graph records."""
        self.kept: list[list[Any]] = []
        """The lists that memory was kept in, once for each call that was captured."""
        self.lock = threading.RLock()
        self.local = threading.local()
        self.default = StandInStream(self, DEFAULT_STREAM)
        self.streams = [self.default]
        self.log: list[tuple[Any, ...]] = []
        """What was asked of streams: ("record" or "wait", stream, event), ("fetch" or "store", stream, bytes)."""
        self.spans: dict[int, int] = {}
        """Addresses that were asked for since the last call of NCCL, and the bytes that lie there."""
        self.used = False
        self.locked: list[np.ndarray] = []
        self.locked_bytes: list[int] = []
        """The length of everything that was ever locked."""
        self.synchronized = 0
        self.selected: list[tuple[str, int]] = []
        self.device_of: Callable[[np.ndarray], int] = lambda array: self.device

    @property
    def stack(self) -> list[StandInStream]:
        """The streams that this thread has entered."""
        if not hasattr(self.local, "stack"):
            self.local.stack = []
        return self.local.stack  # type: ignore[no-any-return]

    @property
    def stream(self) -> StandInStream:
        """This thread's current stream."""
        return self.stack[-1] if self.stack else self.default

    def capturing(self, stream: StandInStream) -> bool:
        return stream is self.captured

    @contextmanager
    def keep_memory(self, kept: list[Any]) -> Iterator[None]:
        self.kept.append(kept)
        yield

    def check(self, stream: object = None) -> None:
        need(self.captured is None, "the driver forbids to ask for errors while it records a stream")
        if self.fault:
            raise CommError(f"the GPU reports {self.fault}")

    @property
    def current(self) -> int:
        """The number of this thread's current device."""
        return getattr(self.local, "device", 0)

    def stream_of(self, device_id: int = -1) -> StandInStream:
        """Return this thread's current stream of a device; -1: of the current one."""
        need((self.current if device_id < 0 else device_id) == self.device, "the stream of another device")
        return self.stream

    def on_stream(self, stream: StandInStream, device: int) -> StandInStream:
        """Return what makes a stream current; refuse what is none, as the real one does."""
        if not isinstance(stream, StandInStream):
            raise StreamError(f"stream is a stream of the stand-in, got {type(stream).__name__}")
        return stream

    def new_event(self) -> StandInEvent:
        self.need_device("an event made")
        return StandInEvent(self)

    def need_device(self, what: str) -> None:
        need(self.current == self.device, f"{what} while device {self.current} is current, not {self.device}")

    def new_stream(self) -> StandInStream:
        self.need_device("a stream made")
        self.streams.append(StandInStream(self, 1000 + len(self.streams)))
        return self.streams[-1]

    def pointer(self, array: np.ndarray) -> int:
        if self.used:
            self.spans.clear()
            self.used = False
        at = int(array.ctypes.data)
        self.spans[at] = max(self.spans.get(at, 0), array.nbytes)
        return at

    def select(self, device: int) -> None:
        self.selected.append((threading.current_thread().name, device))
        self.local.device = device

    def synchronize(self) -> None:
        self.synchronized += 1
        for stream in self.streams:
            stream.flush()

    def lock_memory(self, array: np.ndarray) -> Callable[[], None]:
        need(array.ctypes.data % 4096 == 0 and array.nbytes % 4096 == 0, "other memory would be locked too")
        array.fill(0xCD)
        self.locked.append(array)
        self.locked_bytes.append(array.nbytes)

        def unlock() -> None:
            self.locked[:] = [other for other in self.locked if other is not array]

        return unlock

    def fetch(self, host: int, device: int, n_bytes: int, stream: int) -> None:
        self._check("fetch", host, device, n_bytes, stream)
        content = ctypes.string_at(device, n_bytes)
        self.stream.push(lambda: ctypes.memmove(host, content, n_bytes) and None)

    def store(self, device: int, host: int, n_bytes: int, stream: int) -> None:
        self._check("store", host, device, n_bytes, stream)
        content = ctypes.string_at(host, n_bytes)
        ctypes.memmove(device, content, n_bytes)

        def late() -> None:
            need(
                ctypes.string_at(host, n_bytes) == content,
                "a slot was overwritten before the device had read it",
            )

        self.stream.push(late)

    def copy(self, target: int, source: int, n_bytes: int, stream: int) -> None:
        self.log.append(("copy", stream, n_bytes))
        need(stream == self.stream.ptr, f"copy on stream {stream}, not on the current one")
        for at in (target, source):
            need(self.covers(at, n_bytes), f"copy: {n_bytes} bytes at {at}: no such array")
        need(source + n_bytes <= target or target + n_bytes <= source, "a copy of memory onto itself")
        ctypes.memmove(target, source, n_bytes)

    def covers(self, at: int, n_bytes: int) -> bool:
        """Say whether so many bytes lie in one array that the code under test has asked the address of."""
        return any(begin <= at and at + n_bytes <= begin + n for begin, n in self.spans.items())

    def _check(self, name: str, host: int, device: int, n_bytes: int, stream: int) -> None:
        self.log.append((name, stream, n_bytes))
        need(stream == self.stream.ptr, f"{name} on stream {stream}, not on the current one")
        need(n_bytes > 0, f"{name} of {n_bytes} bytes")
        need(self.covers(device, n_bytes), f"{name}: {n_bytes} bytes at {device}: no such array")
        locked = any(
            m.ctypes.data <= host and host + n_bytes <= m.ctypes.data + m.nbytes for m in self.locked
        )
        need(locked, f"{name}: {n_bytes} bytes at {host} are not page-locked memory of this rank")
