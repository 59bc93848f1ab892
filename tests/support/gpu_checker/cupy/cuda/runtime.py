"""`cupy.cuda.runtime`: the functions of CUDA that lowshard calls, under CuPy's names."""

from __future__ import annotations

from typing import Any

from cupy import _pinned, _streams

CUDARuntimeError = _streams.CUDARuntimeError
deviceSynchronize = _streams.wait_for_device
eventQuery, eventSynchronize, eventRecord = (
    _streams.query_event,
    _streams.wait_for_event,
    _streams.record_event,
)
streamQuery, streamSynchronize = _streams.query_stream, _streams.wait_for_stream
streamWaitEvent = _streams.order_after_event
memcpyAsync, hostRegister, hostUnregister = _pinned.copy_async, _pinned.lock, _pinned.unlock

_UUID = b"gpu checker 0001"
_ABOUT = {"name": b"GPU checker", "totalGlobalMem": 80 << 30, "major": 9, "minor": 0, "uuid": _UUID}
_ANSWERS: dict[str, Any] = {
    "getDeviceCount": 1, "getDevice": 0, "deviceGetPCIBusId": "0000:01:00.0", "deviceGetUuid": _UUID,
    "getDeviceProperties": {**_ABOUT, "multiProcessorCount": 2}, "runtimeGetVersion": 13000, "driverGetVersion": 13000,
    "memGetInfo": (40 << 30, 80 << 30), "setDevice": None,
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _ANSWERS:
        raise AttributeError(name)
    return lambda *args: _ANSWERS[name]


def streamIsCapturing(ptr: int) -> bool:
    return _streams.stream_at(ptr).capture is not None
