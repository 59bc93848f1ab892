"""`cupy.cuda.runtime`: the functions of CUDA that lowshard calls, under CuPy's names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cupy import _memory, _pinned, _streams

CUDARuntimeError = _streams.CUDARuntimeError
deviceSynchronize = _streams.wait_for_device
eventQuery, eventRecord, eventSynchronize = (
    _streams.query_event,
    _streams.record_event,
    _streams.wait_for_event,
)
streamQuery, streamSynchronize = _streams.query_stream, _streams.wait_for_stream
memcpyAsync, hostUnregister = _pinned.copy_async, _pinned.unlock

memoryTypeUnregistered, memoryTypeHost, memoryTypeDevice = range(3)
streamCaptureModeGlobal, streamCaptureModeThreadLocal, streamCaptureModeRelaxed = range(3)
_MEMORY_BYTES = 80 << 30
_UUID = b"gpu checker 0001"


def getDeviceCount() -> int:
    return 1


def getDevice() -> int:
    return 0


def setDevice(device: int) -> None:
    if device != 0:
        raise CUDARuntimeError(101)  # cudaErrorInvalidDevice


def deviceGetPCIBusId(device: int) -> str:
    return "0000:01:00.0"


def deviceGetUuid(device: int) -> bytes:
    return _UUID


def getDeviceProperties(device: int) -> dict[str, Any]:
    about = {"name": b"GPU checker", "totalGlobalMem": _MEMORY_BYTES, "major": 9, "minor": 0, "uuid": _UUID}
    return about | {"multiProcessorCount": 2}


def runtimeGetVersion() -> int:
    return 13000


def driverGetVersion() -> int:
    return 13000


def memGetInfo() -> tuple[int, int]:
    return _MEMORY_BYTES // 2, _MEMORY_BYTES


def streamIsCapturing(ptr: int) -> bool:
    return _streams.stream_at(ptr).capture is not None


def streamWaitEvent(ptr: int, event: int, flags: int = 0) -> None:
    _streams.order_after_event(event, ptr)


def hostRegister(address: int, size: int, flags: int) -> None:
    _pinned.lock(address, size)


def pointerGetAttributes(address: int) -> SimpleNamespace:
    if _memory.is_device(address):
        return SimpleNamespace(device=0, devicePointer=address, hostPointer=0, type=memoryTypeDevice)
    kind = memoryTypeHost if _pinned.is_locked(address) else memoryTypeUnregistered
    return SimpleNamespace(device=0, devicePointer=0, hostPointer=address, type=kind)
