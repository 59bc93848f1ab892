"""`cupy.ndarray` and CuPy's functions of arrays: NumPy does the arithmetic, each call is an operation on a stream."""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy import _memory, _streams
from cupy._memory import Access, accesses_of
from cupy.checker import LOCK, OFF, count, need, report, where

Host = npt.NDArray[Any]

_DTYPES = "?bhilqBHILQefdFDpP"  # of NumPy, that CuPy has
_ABOUT = ("dtype", "shape", "strides", "ndim", "size", "nbytes", "itemsize")
_POISON = 0xA5
"""What nobody can take for a result."""
of_thread = threading.local()
"""`allocator`, and `streams`, the last of which is current."""


def current_ptr() -> int:
    return sys.modules["cupy.cuda"].get_current_stream().ptr  # type: ignore[no-any-return]


class MemoryPointer:
    """An address in memory of the device, which it keeps from being given back."""

    def __init__(self, mem: Any, ptr: int) -> None:
        self.mem, self.ptr = mem, ptr

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr + offset)


class PooledMemory:
    """Memory of the pool; goes back to it with its last owner."""

    _release = staticmethod(_memory.release)

    def __init__(self, size: int) -> None:
        stream = current_ptr()
        self._block = block = _memory.allocate(size, stream)
        self.ptr, self.size = block.begin, size
        if not OFF and not _streams.stream_at(stream).capture:
            _streams.put(
                stream, "an allocation", lambda: ctypes.memset(block.begin, _POISON, block.capacity) and ()
            )

    def __del__(self, is_at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_at_exit():
            self._release(self._block)


def allocate(size: int) -> MemoryPointer:
    """Return memory of the current stream's arena."""
    made = PooledMemory(size)
    return MemoryPointer(made, made.ptr)


def _operate(name: str, out: Host | None, reads: Sequence[Host], function: Callable[[], Any]) -> None:
    """Put an operation on the current stream that sets an array, or asks for a value, from others."""
    accesses: list[Access] = []
    for array in () if OFF else (*reads, *([] if out is None else [out])):
        accesses += accesses_of(array, array is out)
        words = [stride for stride, extent in zip(array.strides, array.shape, strict=True) if extent > 1]
        words += [array.ctypes.data] * bool(array.size)
        is_aligned = all(word % array.dtype.alignment == 0 for word in words)
        need(is_aligned or name in ("get", "copy"), f"{name} of an array that is not aligned to its elements")

    def run() -> list[Access]:
        with np.errstate(all="ignore"):
            value = function()
        if out is not None:
            np.copyto(out, value, casting="unsafe")
        return accesses

    count("device_to_device_copies", name == "copy")
    _streams.put(current_ptr(), f"cupy's {name}", run, "cupy_operations")


def _bare(value: Any, arrays: list[ndarray]) -> Any:
    """Return an argument as NumPy takes it, and note the arrays in it."""
    if isinstance(value, ndarray):
        arrays.append(value)
        return value._host
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError(f"Unsupported type {type(value)}")
    return type(value)(_bare(one, arrays) for one in value) if type(value) in (list, tuple) else value


def _view(found: Any, arrays: list[ndarray]) -> Any:
    """Return NumPy's result as a view of one of some arrays, or None where it has memory of its own."""
    if isinstance(found, (list, tuple)):  # of split, ix_
        return type(found)(_view(one, arrays) for one in found)
    for one in arrays if isinstance(found, np.ndarray) else ():
        if not found.size or np.may_share_memory(found, one._host):
            return one if found is one._host else one._view(found)
    return None


def compute(name: str, function: Callable[..., Any], args: Any, options: Any, out: Any = None) -> Any:
    """Return what NumPy's function returns: views where that has views, else an array that an operation fills."""
    arrays: list[ndarray] = []
    args, options = _bare(tuple(args), arrays), {key: _bare(value, arrays) for key, value in options.items()}
    values: list[Any] = []
    stream = _streams.stream_at(current_ptr())
    with (
        LOCK,
        np.errstate(all="ignore"),
    ):  # else what is ahead may be done in between, after its result was used
        is_early = stream.queue or stream.capture or any(one.done < n for one, n in stream.clock.items())
        if (
            out is None
        ):  # the shape of the result is known only from one, be it of values that are not there yet
            values.append(function(*args, **options))
            if (seen := _view(values[0], arrays)) is not None:
                return seen
            out = ndarray(np.shape(values[0]), np.asarray(values[0]).dtype)
    if is_early:
        values.clear()
    reads = [] if name.endswith("_like") else [one._host for one in arrays]
    _operate(name, out._host, reads, lambda: values.pop() if values else function(*args, **options))
    return out


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array on the device; NumPy sees its memory as `_host`."""

    __cuda_array_interface__: Any = None
    flags = property(lambda self: SimpleNamespace(c_contiguous=self._host.flags.c_contiguous))
    T = property(lambda self: self._view(self._host.T))
    device = property(lambda self: sys.modules["cupy.cuda"].Device())

    def __init__(self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None) -> None:
        shape = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(map(int, shape))
        kind = np.dtype(dtype)
        if memptr is None and kind.name != "bfloat16" and kind.char not in _DTYPES:
            raise ValueError(f"Unsupported dtype {kind}")
        low, high = 0, math.prod(shape) * kind.itemsize
        if strides is not None:
            ends = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
            low, high = sum(min(0, end) for end in ends), sum(max(0, end) for end in ends) + kind.itemsize
        self._memory = memptr or getattr(of_thread, "allocator", allocate)(high)
        raw: Any = (ctypes.c_char * max(high - low, 1)).from_address(self._memory.ptr + low)
        self._host: Host = np.ndarray(shape, kind, raw, -low, strides)

    def _view(self, host: Host) -> ndarray:
        made = ndarray.__new__(ndarray)
        made._host, made._memory = host, self._memory
        return made

    def __getattr__(self, name: str) -> Any:
        """Return what NumPy's array has: a property, or a method that is an operation."""
        if name in _ABOUT:
            return getattr(self._host, name)
        method = None if name.startswith("_") else getattr(np.ndarray, name, None)
        if not callable(method):
            raise AttributeError(f"the checker's arrays have no {name}")
        return lambda *args, **options: compute(name, method, (self, *args), options)

    @property
    def data(self) -> MemoryPointer:
        return MemoryPointer(self._memory.mem, int(self._host.__array_interface__["data"][0]))

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self) -> Iterator[ndarray]:
        return (self[i] for i in range(len(self)))

    def __array__(self, *args: Any, **options: Any) -> Host:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, out: Any = (None,), **options: Any) -> Any:
        return compute(ufunc.__name__, ufunc, args, options, out[0])

    def get(self) -> Host:
        """Return a copy on the host, once the device has made it."""
        _streams.refuse_in_capture(_streams.stream_at(current_ptr()).capture)
        count("device_to_host_copies")
        count("pcie_bytes", self.nbytes)
        made = np.empty(self.shape, self.dtype)
        _operate("get", None, [self._host], lambda: np.copyto(made, self._host))
        _streams.wait_for_stream(current_ptr())
        return made

    def item(self) -> Any:
        return self.get().item()

    def fill(self, value: Any) -> None:
        self[...] = value

    def __getitem__(self, key: Any) -> Any:
        bare, indices = _bare_key(key)
        return compute("take", lambda host, *_: host[bare], (self, *indices), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        bare, indices = _bare_key(key)
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        reads = [one._host for one in (*indices, value) if isinstance(one, ndarray)]
        given = value._host if isinstance(value, ndarray) else value
        if indices:

            def scatter() -> Host:
                self._host[bare] = given
                return self._host

            _operate("scatter", self._host, reads, scatter)
            return
        target = self._host[bare]
        where_and_how = ("ctypes.data", "shape", "strides")
        if not reads or any(attrgetter(name)(given) != attrgetter(name)(target) for name in where_and_how):
            _operate("copy" if reads else "fill", target, reads, lambda: given)


def _bare_key(key: Any) -> tuple[Any, list[ndarray]]:
    """Return an index as NumPy takes it, and the arrays in it: those of truth values are asked of the device."""
    parts = key if isinstance(key, tuple) else (key,)
    bare = [
        getattr(one, "get" if one.dtype == bool else "_host") if isinstance(one, ndarray) else one
        for one in parts
    ]
    bare = [one() if callable(one) else one for one in bare]
    if not any(one is Ellipsis for one in bare):
        bare.append(...)  # NumPy returns a view then, and never a number
    return tuple(bare), [one for one in parts if isinstance(one, ndarray)]


for _name in ("bool", "float", "format", "index", "int", "repr"):  # the host waits for the value
    _dunder = f"__{_name}__"
    setattr(ndarray, _dunder, lambda self, *args, name=_dunder: getattr(self.get(), name)(*args))


# ---- functions that are CuPy's own


def empty(shape: Any, dtype: Any = float) -> ndarray:
    return ndarray(shape, dtype)


def empty_like(array: ndarray, dtype: Any = None) -> ndarray:
    return ndarray(array.shape, dtype or array.dtype)


def asarray(value: Any, dtype: Any = None, order: str = "C", *, blocking: bool = False) -> ndarray:
    """Return an array of the host on the device: by way of page-locked memory, and it is not waited for."""
    if isinstance(value, ndarray):
        return value if dtype is None else value.astype(dtype, copy=False)  # type: ignore[no-any-return]
    values = np.array(value, dtype, order="C")
    made = ndarray(values.shape, values.dtype)
    if not OFF and _streams.stream_at(current_ptr()).capture is not None:
        report(
            f"an upload of {values.nbytes} bytes within a capture, at {where()}: its event is never done, and CuPy "
            "gives no page-locked memory back any more"
        )
    for what, number in (("host_to_device_copies", 1), ("uploads", 1), ("pcie_bytes", values.nbytes)):
        count(what, number)
    _operate("upload", made._host, [], lambda: values)
    if blocking:
        _streams.wait_for_stream(current_ptr())
    return made


def array(value: Any, dtype: Any = None, copy: bool = True, *, blocking: bool = False) -> ndarray:
    return (
        value.astype(dtype or value.dtype)
        if isinstance(value, ndarray)
        else asarray(value, dtype, blocking=blocking)
    )


def asnumpy(value: ndarray) -> Host:
    return value.get()


def copyto(target: ndarray, source: Any) -> None:
    target[...] = source
