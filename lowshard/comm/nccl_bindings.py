"""The binding that GPU communicators stand on: CuPy's arrays, streams and NCCL."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from lowshard.errors import CommError, DependencyError
from lowshard.gpu_stream import on_stream

Array = Any

_DONE, _NOT_READY = 0, 600  # cudaSuccess, cudaErrorNotReady
_CAPTURE_FORBIDS = range(900, 909)
"""cudaErrorStreamCapture...: a capture, on this stream or another, forbids to ask."""
_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3  # cudaMemcpyKind
_NEEDS_CUPY = "pip install 'lowshard[cuda12]' or 'lowshard[cuda13]'"


@dataclass(frozen=True)
class Binding:
    """What the communicators need of CuPy and NCCL: the one place to put others."""

    nccl: Any
    """The module `cupy.cuda.nccl`, or one with its names and signatures; None where nothing asks for NCCL."""
    xp: ModuleType
    """The array module of the buffers."""
    stream: Callable[..., Any]
    """Returns this thread's current stream of a device, by default of the current one: `.ptr`, `.wait_event(event)`;
    `with stream:` makes it current."""
    on_stream: Callable[[Any, int], AbstractContextManager[Any]]
    """Makes a context in which a stream that a caller names is the current one of a device; see `gpu_stream`."""
    new_stream: Callable[[], Any]
    """Makes a stream that is not ordered with the default one. `.done` raises CommError for a CUDA error."""
    new_event: Callable[[], Any]
    """Makes an event: `.record(stream)`, `.done`, which raises CommError for a CUDA error."""
    check: Callable[[Any], None]
    """Raises CommError for a CUDA error that has come to a stream; does not wait."""
    capturing: Callable[[Any], bool]
    """Says whether a CUDA graph records a stream."""
    keep_memory: Callable[[list[Any]], AbstractContextManager[Any]]
    """Makes a context that adds to a list the memory of every array made in it, so that it is not used for others."""
    cuda_error: type[Exception]
    """What CuPy raises where CUDA refuses a call."""
    pointer: Callable[[Array], int]
    """Returns the address of an array's first element."""
    device: Callable[[Array], int]
    """Returns the number of the device an array lies on."""
    current: Callable[[], int]
    """Returns the number of the calling thread's current device."""
    select: Callable[[int], None]
    """Makes a device the calling thread's current one."""
    synchronize: Callable[[], None]
    """Waits for all work on the current device."""
    lock: Callable[[np.ndarray], Callable[[], None]]
    """Page-locks the memory of an array, so that the device copies it by itself; returns what undoes that."""
    fetch: Callable[[int, int, int, int], None]
    """Queues a copy to the host: (host address, device address, bytes, stream)."""
    store: Callable[[int, int, int, int], None]
    """Queues a copy to the device: (device address, host address, bytes, stream)."""
    copy: Callable[[int, int, int, int], None]
    """Queues a copy on the device: (address written, address read, bytes, stream)."""

    def of_device(self, device: int) -> Binding:
        """Return this binding with the streams of one device, whichever device a thread has made current."""
        return replace(self, stream=partial(self.stream, device_id=device))

    def on_device(self, device: int) -> OnDevice:
        """Return a context in which a device is the current one: kernels, events and new streams are that device's."""
        return OnDevice(self, device)

    @classmethod
    def load(cls, *, with_nccl: bool = True) -> Binding:
        """Return the installed libraries' binding."""
        cupy = _load_cupy()
        nccl = _load_cupys_nccl() if with_nccl else None
        runtime, (new_stream, new_event, check) = cupy.cuda.runtime, _makers(cupy)
        return cls(
            nccl=nccl,
            xp=cupy,
            stream=cupy.cuda.get_current_stream,
            on_stream=on_stream,
            new_stream=new_stream,
            new_event=new_event,
            check=check,
            capturing=lambda stream: bool(runtime.streamIsCapturing(stream.ptr)),
            keep_memory=lambda kept: _keep_memory(cupy, kept),
            cuda_error=runtime.CUDARuntimeError,
            pointer=lambda array: int(array.data.ptr),
            device=lambda array: int(array.device.id),
            current=runtime.getDevice,
            select=runtime.setDevice,
            synchronize=runtime.deviceSynchronize,
            lock=lambda array: _lock(runtime, array),
            fetch=lambda to, at, n, stream: runtime.memcpyAsync(to, at, n, _TO_HOST, stream),
            store=lambda to, at, n, stream: runtime.memcpyAsync(to, at, n, _TO_DEVICE, stream),
            copy=lambda to, at, n, stream: runtime.memcpyAsync(to, at, n, _ON_DEVICE, stream),
        )


class OnDevice:
    """Makes a device the thread's current one, and puts the one before back."""

    __slots__ = ("_before", "_binding", "_device")

    def __init__(self, binding: Binding, device: int) -> None:
        self._binding, self._device, self._before = binding, device, device

    def __enter__(self) -> None:
        self._before = self._binding.current()
        if self._before != self._device:
            self._binding.select(self._device)

    def __exit__(self, *exc: object) -> None:
        if self._before != self._device:
            self._binding.select(self._before)


def _load_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise DependencyError(f"GPU communicators need CuPy ({error}): {_NEEDS_CUPY}") from error
    return cupy


def _makers(cupy: Any) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[Any], None]]:
    """Return what makes streams and events whose `done` tells an error from "not yet", and what checks any stream.

    CuPy's own `done` is False for both, since `eventQuery` and `streamQuery` return their status and raise nothing.
    """
    runtime = cupy.cuda.runtime

    def ended(status: int) -> bool:
        if status in (_DONE, _NOT_READY) or status in _CAPTURE_FORBIDS:
            return status == _DONE
        error = runtime.CUDARuntimeError(status)
        raise CommError(
            f"the GPU reports {error}; no CUDA call of this process can succeed any more, so end it, and run it with "
            "CUDA_LAUNCH_BLOCKING=1 or under compute-sanitizer to see which kernel it was"
        ) from error

    class Stream(cupy.cuda.Stream):  # type: ignore[misc]
        @property
        def done(self) -> bool:
            return ended(runtime.streamQuery(self.ptr))

    class Event(cupy.cuda.Event):  # type: ignore[misc]
        @property
        def done(self) -> bool:
            return ended(runtime.eventQuery(self.ptr))

    def check(stream: Any) -> None:
        ended(runtime.streamQuery(stream.ptr))

    return lambda: Stream(non_blocking=True), lambda: Event(disable_timing=True), check


def _keep_memory(cupy: Any, kept: list[Any]) -> AbstractContextManager[Any]:
    allocate = cupy.cuda.get_allocator()

    def allocate_and_keep(n_bytes: int) -> Any:
        kept.append(allocate(n_bytes))
        return kept[-1]

    return cupy.cuda.using_allocator(allocate_and_keep)  # type: ignore[no-any-return]


def _lock(runtime: Any, array: np.ndarray) -> Callable[[], None]:
    at = int(array.ctypes.data)
    try:
        runtime.hostRegister(at, array.nbytes, 0)
    except RuntimeError:  # CUDA's; without the lock the driver copies by way of its own buffers
        return lambda: None
    return lambda: runtime.hostUnregister(at)


def _load_cupys_nccl() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a missing library is a warning there, an error here
            from cupy.cuda import nccl
    except ImportError as error:
        raise DependencyError(f"NCCL communicators need CuPy ({error}): {_NEEDS_CUPY}") from error
    if not nccl.available:
        raise DependencyError(f"CuPy finds no NCCL library: {_NEEDS_CUPY} brings one")
    return nccl
