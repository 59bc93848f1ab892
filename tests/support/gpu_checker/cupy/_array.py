"""`cupy.ndarray` and CuPy's functions of arrays: NumPy does the arithmetic, each call is an operation on a stream."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupy import _memory, _streams
from cupy._memory import Access, accesses_of
from cupy._streams import current_ptr, of_thread, put
from cupy.checker import LOCK, OFF, count, need, report, where

Host = npt.NDArray[Any]

_DTYPES = "?bhilqBHILQefdFDpP"  # of NumPy, that CuPy has
_ABOUT = ("dtype", "shape", "strides", "ndim", "size", "nbytes", "itemsize")
_OF_UNKNOWN_SIZE = ("argwhere", "flatnonzero", "nonzero", "unique")
"""Functions whose results have a size that only the device knows: the host waits."""
_POISON = 0xA5
"""What nobody can take for a result."""


def stream() -> _streams.Stream:
    return _streams.stream_at(current_ptr())


class MemoryPointer(NamedTuple):
    """An address in memory of the device, which it keeps from being given back."""

    mem: Any
    ptr: int

    def __add__(self, offset: int) -> MemoryPointer:  # type: ignore[override]
        return MemoryPointer(self.mem, self.ptr + offset)


class PooledMemory:
    """Memory of the pool; goes back to it with its last owner."""

    _release, _is_at_exit = staticmethod(_memory.release), staticmethod(sys.is_finalizing)

    def __init__(self, size: int) -> None:
        self._block = block = _memory.allocate(size, current_ptr())
        self.ptr = block.begin
        if not OFF and stream().capture is None:
            put("an allocation", lambda: ctypes.memset(block.begin, _POISON, block.capacity) and ())

    def __del__(self) -> None:
        if not self._is_at_exit():
            self._release(self._block)


def allocate(size: int) -> MemoryPointer:
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
    put(f"cupy's {name}", run, "cupy_operations")


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
    values: list[Any] = []
    args, options = _bare(tuple(args), arrays), {key: _bare(value, arrays) for key, value in options.items()}
    if name in _OF_UNKNOWN_SIZE:
        _streams.wait("streamSynchronize", current_ptr())
    # Under the lock: else what is ahead may be done in between, after the result of too early a call was used.
    with LOCK, np.errstate(all="ignore"):
        is_early = any(one.done < n for one, n in stream().clock.items()) or stream().capture is not None
        if out is None:
            values.append(function(*args, **options))  # for its shape, be it of values that are not there yet
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
    data = property(lambda self: MemoryPointer(self._memory.mem, int(self._host.ctypes.data)))

    def __init__(self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None) -> None:
        shape = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(map(int, shape))
        kind = np.dtype(dtype)
        if memptr is None and kind.name != "bfloat16" and kind.char not in _DTYPES:
            raise ValueError(f"Unsupported dtype {kind}")
        low, high = 0, math.prod(shape) * kind.itemsize
        if strides is not None:
            ends = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
            low, high = sum(min(0, end) for end in ends), sum(max(0, end) for end in ends) + kind.itemsize
        self._memory = memptr or (of_thread.allocator or allocate)(high)
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

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self) -> Iterator[ndarray]:
        return (self[i] for i in range(len(self)))

    def __array__(self, *args: Any, **options: Any) -> Host:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, out: Any = (None,), **options: Any) -> Any:
        return compute(ufunc.__name__, ufunc, args, options, out[0])

    def get(self) -> Host:
        _streams.refuse_in_capture(stream().capture)
        count("device_to_host_copies")
        count("pcie_bytes", self.nbytes)
        made = np.empty(self.shape, self.dtype)
        _operate("get", None, [self._host], lambda: np.copyto(made, self._host))
        _streams.wait("streamSynchronize", current_ptr())
        return made

    def item(self) -> Any:
        return self.get().item()

    def fill(self, value: Any) -> None:
        self[...] = value

    def __getitem__(self, key: Any) -> Any:
        bare, indices = _bare_key(key)
        return compute("take", lambda host, *_: host[bare], (self, *indices), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        (bare, reads), is_copy = _bare_key(key), isinstance(value, ndarray)
        given = _bare(value, reads)
        target = self._host if reads[is_copy:] else self._host[bare]

        def scatter() -> Host:
            self._host[bare] = given
            return self._host

        if reads[is_copy:]:
            _operate("scatter", target, [one._host for one in reads], scatter)
        elif not is_copy or given.__array_interface__ != target.__array_interface__:  # as in `x[1:] += y`
            _operate("copy" if is_copy else "fill", target, [one._host for one in reads], lambda: given)


def _bare_key(key: Any) -> tuple[Any, list[ndarray]]:
    """Return an index as NumPy takes it, and the arrays in it: those of truth values are asked of the device."""
    parts = key if isinstance(key, tuple) else (key,)
    indices = [one for one in parts if isinstance(one, ndarray)]
    bare = [one.get() if isinstance(one, ndarray) and one.dtype == bool else _bare(one, []) for one in parts]
    if not any(one is Ellipsis for one in bare):
        bare.append(...)  # NumPy returns a view then, and never a number
    return tuple(bare), indices


for _name in ("bool", "float", "format", "index", "int", "repr"):  # the host waits for the value
    _way = f"__{_name}__"
    setattr(ndarray, _way, lambda self, *args, way=_way: getattr(self.get(), way)(*args))


# ---- functions that are CuPy's own


def empty_like(array: ndarray, dtype: Any = None) -> ndarray:
    return ndarray(array.shape, dtype or array.dtype)


def asarray(value: Any, dtype: Any = None, order: str = "C", *, blocking: bool = False) -> ndarray:
    if isinstance(value, ndarray):
        return value if dtype is None else value.astype(dtype, copy=False)  # type: ignore[no-any-return]
    values = np.array(value, dtype, order="C")
    made = ndarray(values.shape, values.dtype)
    if not OFF and stream().capture is not None:
        what = f"an upload of {values.nbytes} bytes within a capture, at {where()}"
        report(f"{what}: its event is never done, and CuPy gives no page-locked memory back any more")
    for kind, number in (("host_to_device_copies", 1), ("uploads", 1), ("pcie_bytes", values.nbytes)):
        count(kind, number)
    _operate("upload", made._host, [], lambda: values)
    if blocking:
        _streams.wait("streamSynchronize", current_ptr())
    return made


def array(value: Any, dtype: Any = None, copy: bool = True, *, blocking: bool = False) -> ndarray:
    if not isinstance(value, ndarray):
        return asarray(value, dtype, blocking=blocking)
    return value.astype(dtype or value.dtype)  # type: ignore[no-any-return]


def copyto(target: ndarray, source: Any) -> None:
    target[...] = source
