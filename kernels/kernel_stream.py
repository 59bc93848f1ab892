"""The `stream=` argument of every kernel call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from itertools import chain
from typing import Any, TypeVar, cast

from lowshard.errors import KernelError
from lowshard.foreign_array import gpu_of
from lowshard.gpu_stream import Stream, on_stream
from lowshard.kernels.mxfp8_tensor import MXFP8Tensor, SwizzledMXFP8

__all__ = ["Stream", "takes_stream"]

Call = TypeVar("Call", bound=Callable[..., Any])


def takes_stream(call: Call) -> Call:
    """Make a call run with its `stream` argument current on the GPU of its arrays; None keeps the current one."""

    @wraps(call)
    def with_stream(*args: Any, stream: Stream = None, **options: Any) -> Any:
        if stream is None:
            return call(*args, **options)
        device = _device_of(chain(args, options.values()))
        if device is None:
            raise KernelError(
                f"stream= of {call.__name__} is for GPU arrays, and none of these lies on a GPU; leave it out"
            )
        with on_stream(stream, device):
            return call(*args, **options)

    return cast("Call", with_stream)


def _device_of(values: Iterable[object]) -> int | None:
    for value in values:
        array = value.data if isinstance(value, (MXFP8Tensor, SwizzledMXFP8)) else value
        for each in array if isinstance(array, (list, tuple)) else [array]:
            device = gpu_of(each)
            if device is not None:
                return device
    return None
