"""The stream a caller names for a call: CuPy's, torch's or an address becomes CuPy's current one.

CuPy keeps a current stream for each thread and device, and all that lowshard launches goes there. So `stream=` of a
call is a matter of making that stream current while the call runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lowshard.errors import StreamError

__all__ = ["on_device", "on_stream"]

Stream = Any  # CuPy's, torch's, any with `__cuda_stream__`, or an address; CuPy ships no types

_RULE = (
    "stream is a stream of CuPy or torch, an object with __cuda_stream__, or the address of a cudaStream_t"
)


@contextmanager
def on_stream(stream: Stream, device: int | None = None) -> Iterator[None]:
    """Make a stream CuPy's current one on its device, and that device the thread's current one; put both back after."""
    if stream is None:
        yield
        return
    address, of_device = _address(stream)
    if device is not None and of_device is not None and of_device != device:
        raise StreamError(
            f"the buffers lie on device {device}, and stream {address:#x} belongs to device {of_device}; "
            "pass a stream of the buffers' device"
        )
    import cupy

    with on_device(cupy, device):
        kinds = (cupy.cuda.Stream, getattr(cupy.cuda, "ExternalStream", cupy.cuda.Stream))
        with stream if isinstance(stream, kinds) else _foreign(cupy, address, stream):
            yield


@contextmanager
def on_device(cupy: Any, device: int | None) -> Iterator[None]:
    """Make a device the thread's current one and put the old one back after; None leaves all as it is."""
    before = None if device is None else int(cupy.cuda.runtime.getDevice())
    if device is None or before == device:
        yield
        return
    cupy.cuda.runtime.setDevice(device)
    try:
        yield
    finally:
        cupy.cuda.runtime.setDevice(before)


class _Foreign:
    """An address under the protocol that CuPy takes streams by; keeps its owner alive."""

    def __init__(self, address: int, owner: object) -> None:
        self._address, self._owner = address, owner

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


def _foreign(cupy: Any, address: int, owner: object) -> Any:
    if address == 0:
        return cupy.cuda.Stream.null
    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14; it warns of the older class
        return cupy.cuda.Stream.from_external(_Foreign(address, owner))
    return cupy.cuda.ExternalStream(address)


def _address(stream: Stream) -> tuple[int, int | None]:
    """Return a stream's address and the device it says it belongs to, if any."""
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream, None
    if hasattr(stream, "cuda_stream"):  # torch
        device = getattr(getattr(stream, "device", None), "index", None)
        return int(stream.cuda_stream), device
    if hasattr(stream, "ptr") and hasattr(stream, "device_id"):  # CuPy; -1 where it does not know
        device = int(stream.device_id)
        return int(stream.ptr), device if device >= 0 else None
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1]), None
    raise StreamError(f"{_RULE}; got {type(stream).__name__}")
