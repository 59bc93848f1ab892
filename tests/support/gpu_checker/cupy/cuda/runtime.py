"""`cupy.cuda.runtime`: the functions of CUDA that lowshard calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cupy import _memory, _pinned, _streams
from cupy._pinned import copy_async as memcpyAsync
from cupy._pinned import lock as _lock
from cupy._pinned import unlock as hostUnregister
from cupy._streams import CUDARuntimeError
from cupy._streams import query_event as eventQuery
from cupy._streams import query_stream as streamQuery
from cupy._streams import record_event as eventRecord
from cupy._streams import wait_for_device as deviceSynchronize
from cupy._streams import wait_for_event as eventSynchronize
from cupy._streams import wait_for_stream as streamSynchronize

__all__ = [
    "CUDARuntimeError",
    "deviceSynchronize",
    "eventQuery",
    "eventRecord",
    "eventSynchronize",
    "hostUnregister",
    "memcpyAsync",
    "streamQuery",
    "streamSynchronize",
]

memoryTypeUnregistered, memoryTypeHost, memoryTypeDevice, memoryTypeManaged = range(4)
streamNonBlocking = 1
streamCaptureModeGlobal, streamCaptureModeThreadLocal, streamCaptureModeRelaxed = range(3)
_MEMORY_BYTES = 80 << 30
_UUID = b"gpu checker 0001"


def getDeviceCount() -> int:
    """Return the number of GPUs: one."""
    return 1


def getDevice() -> int:
    """Return the number of the current GPU."""
    return 0


def setDevice(device: int) -> None:
    """Make a GPU the current one."""
    if device != 0:
        raise CUDARuntimeError(101)  # cudaErrorInvalidDevice


def deviceGetPCIBusId(device: int) -> str:
    """Return the address of a GPU."""
    return "0000:01:00.0"


def deviceGetUuid(device: int) -> bytes:
    """Return what tells a GPU from all others."""
    return _UUID


def getDeviceProperties(device: int) -> dict[str, Any]:
    """Return what a GPU is."""
    about = {"name": b"GPU checker", "totalGlobalMem": _MEMORY_BYTES, "major": 9, "minor": 0, "uuid": _UUID}
    return about | {"multiProcessorCount": 2}


def runtimeGetVersion() -> int:
    """Return CUDA's version."""
    return 13000


def driverGetVersion() -> int:
    """Return the newest version of CUDA that the driver takes."""
    return 13000


def memGetInfo() -> tuple[int, int]:
    """Return the bytes that are free, and all there are."""
    return _MEMORY_BYTES // 2, _MEMORY_BYTES


def streamIsCapturing(ptr: int) -> bool:
    """Say whether a stream records for a graph."""
    return _streams.stream_at(ptr).capture is not None


def streamWaitEvent(ptr: int, event: int, flags: int = 0) -> None:
    """Have a stream wait for an event."""
    _streams.order_after_event(event, ptr)


def hostRegister(address: int, size: int, flags: int) -> None:
    """Page-lock memory of the host."""
    _lock(address, size)


def pointerGetAttributes(address: int) -> SimpleNamespace:
    """Return where memory lies."""
    if _memory.is_device(address):
        return SimpleNamespace(device=0, devicePointer=address, hostPointer=0, type=memoryTypeDevice)
    kind = memoryTypeHost if _pinned.is_locked(address) else memoryTypeUnregistered
    return SimpleNamespace(device=0, devicePointer=0, hostPointer=address, type=kind)
