"""`cupy.ndarray` and CuPy's functions of arrays: NumPy does the arithmetic, each call is an operation on a stream."""

from __future__ import annotations

import ctypes
import math
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy import _memory, _streams
from cupy._memory import Access, accesses_of
from cupy._pinned import ON_DEVICE, copy_async
from cupy._streams import UNSUPPORTED, CUDARuntimeError, Work
from cupy.checker import LOCK, OFF, count, need, report, where

Host = npt.NDArray[Any]

_DTYPES = "?bhilqBHILQefdFDpP"  # of NumPy, that CuPy has
_VIEWS = {
    "broadcast_to", "expand_dims", "flip", "moveaxis", "ravel", "reshape", "rollaxis", "split", "squeeze", "swapaxes",
    "transpose",
}  # fmt: skip
"""Functions whose results lie in the memory of their arguments."""
_ASKED_OF_THE_HOST = {"argwhere", "flatnonzero", "nonzero", "unique"}
"""Functions whose results have a size that only the device knows."""
CUPYS_OWN = {
    "arange", "array", "asarray", "ascontiguousarray", "asnumpy", "copyto", "empty", "empty_like", "full", "ones",
    "zeros", "zeros_like",
}  # fmt: skip
"""Functions of this module that are CuPy's."""


def _current() -> Any:
    from cupy.cuda import get_current_stream

    return get_current_stream()


class MemoryPointer:
    """An address in memory of the device, which it keeps from being given back."""

    device_id = 0

    def __init__(self, mem: Any, offset: int = 0) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr + offset - self.mem.ptr)

    def copy_from_device_async(self, source: MemoryPointer, size: int, stream: Any = None) -> None:
        copy_async(self.ptr, source.ptr, size, ON_DEVICE, (stream or _current()).ptr)


_thread = threading.local()


def hooks() -> list[Any]:
    """Return what this thread wants to be told of when memory is taken."""
    if not hasattr(_thread, "hooks"):
        _thread.hooks = []
    return _thread.hooks  # type: ignore[no-any-return]


class PooledMemory:
    """Memory of the pool; goes back to it with its last owner."""

    device_id = 0
    _release = staticmethod(_memory.release)

    def __init__(self, size: int) -> None:
        stream = _current()
        block, is_new = _memory.allocate(size, stream.ptr)
        for hook in hooks():
            if is_new:
                hook.alloc_preprocess(device_id=0, mem_size=block.capacity)
            hook.malloc_preprocess(device_id=0, size=size, mem_size=block.capacity)
        if is_new and not OFF:
            _streams.refuse_in_capture()  # it asks the driver for memory
        self.ptr, self.size, self._block = block.begin, size, block
        if not OFF and not _streams.stream_at(stream.ptr).capture:

            def run() -> list[Access]:
                _memory.poison(block)
                return []

            _streams.put(stream.ptr, "an allocation", lambda: Work(run))

    def __del__(self, is_at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_at_exit():
            self._release(self._block)


def allocate(size: int) -> MemoryPointer:
    """Return memory of the current stream's arena."""
    return MemoryPointer(PooledMemory(size))


def supported(dtype: Any) -> np.dtype[Any]:
    """Return a dtype, or raise as CuPy does where it has none such."""
    found = np.dtype(dtype)
    if found.name == "bfloat16" or (found.kind != "V" and found.char in _DTYPES):
        return found  # type: ignore[no-any-return]
    raise ValueError(f"Unsupported dtype {found}")


def _operate(name: str, out: Host | None, reads: Sequence[Host], function: Callable[[], Any]) -> None:
    """Put an operation on the current stream that sets an array, or asks for a value, from others."""
    accesses = [] if OFF else [access for array in reads for access in accesses_of(array, False)]
    if out is not None and not OFF:
        accesses += accesses_of(out, True)
    for array in reads if out is None else (*reads, out):
        strides = [stride for stride, extent in zip(array.strides, array.shape, strict=True) if extent > 1]
        at = array.ctypes.data if array.size else 0
        is_aligned = all(word % array.dtype.alignment == 0 for word in (at, *strides))
        need(
            OFF or is_aligned or name in ("get", "copy"),
            f"{name} of an array that is not aligned to its elements",
        )

    def run() -> list[Access]:
        with np.errstate(all="ignore"):
            value = function()
        if out is not None:
            np.copyto(out, value, casting="unsafe")
        return accesses

    _streams.put(_current().ptr, f"cupy's {name}", lambda: Work(run), "cupy_operations")


def _compute(
    name: str, function: Callable[..., Any], args: Any, options: Any, out: ndarray | None = None
) -> Any:
    """Return a new array that an operation fills with what NumPy's function returns, or fill `out`."""
    arrays: list[Host] = []

    def bare(value: Any) -> Any:
        """Return an argument as NumPy takes it, and note the arrays in it."""
        if isinstance(value, ndarray):
            arrays.append(value._host)
            return value._host
        if isinstance(value, (list, tuple)) and any(
            isinstance(part, (ndarray, list, tuple)) for part in value
        ):
            return type(value)(bare(part) for part in value)
        if isinstance(value, np.ndarray) and value.ndim:
            raise TypeError(f"Unsupported type {type(value)}")
        return value

    args, options = bare(tuple(args)), {key: bare(value) for key, value in options.items()}
    values: list[Any] = []
    stream = _streams.stream_at(_current().ptr)
    with LOCK:  # else what is ahead may be done in between, after its result was used
        is_early = bool(
            stream.queue or stream.capture or any(one.done < n for one, n in stream.clock.items())
        )
    if out is None:
        # The shape of the result: of the result, where all that it comes after has run, else of any.
        with np.errstate(all="ignore"):
            values.append(function(*args, **options))
        if isinstance(values[0], (list, tuple)):
            raise TypeError(f"the checker's {name} has one result")
        out = empty(np.shape(values[0]), getattr(values[0], "dtype", None) or np.asarray(values[0]).dtype)
    if is_early:
        values.clear()
    _operate(name, out._host, arrays, lambda: values.pop() if values else function(*args, **options))
    return out


class _Flags:
    """`ndarray.flags`, which say nothing of writing."""

    def __init__(self, flags: Any) -> None:
        self.c_contiguous, self.f_contiguous = flags.c_contiguous, flags.f_contiguous
        self.owndata = flags.owndata


class ndarray:
    """An array on the device; NumPy sees its memory as `_host`."""

    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]
    _data: MemoryPointer | None = None

    def __init__(
        self, shape: Any = (), dtype: Any = float, memptr: Any = None, strides: Any = None, order: str = "C"
    ) -> None:
        shape = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(map(int, shape))
        kind = supported(dtype) if memptr is None else np.dtype(dtype)
        low = high = 0
        if strides is not None:
            ends = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
            low, high = sum(min(0, end) for end in ends), sum(max(0, end) for end in ends) + kind.itemsize
        size = math.prod(shape) * kind.itemsize if strides is None else high - low
        if memptr is None:
            from cupy.cuda import get_allocator

            memptr = get_allocator()(size)
        self._memory = memptr
        self.base: ndarray | None = None
        raw: Any = (ctypes.c_char * max(size, 1)).from_address(memptr.ptr + low)
        self._host: Host = np.ndarray(shape, kind, raw, -low, strides)

    def _view(self, host: Host) -> ndarray:
        made = ndarray.__new__(ndarray)
        made._host, made._memory, made.base = host, self._memory, self
        return made

    # ---- what it is

    dtype = property(lambda self: self._host.dtype)
    shape = property(lambda self: self._host.shape)
    strides = property(lambda self: self._host.strides)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    nbytes = property(lambda self: self._host.nbytes)
    itemsize = property(lambda self: self._host.itemsize)
    flags = property(lambda self: _Flags(self._host.flags))
    T = property(lambda self: self._view(self._host.T))

    @property
    def device(self) -> Any:
        from cupy.cuda import Device

        return Device(0)

    @property
    def data(self) -> MemoryPointer:
        if self._data is None:
            at = int(self._host.__array_interface__["data"][0])
            self._data = MemoryPointer(self._memory.mem, at - self._memory.mem.ptr)
        return self._data

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        strides = None if self._host.flags.c_contiguous else self.strides
        about = {"shape": self.shape, "typestr": self.dtype.str, "strides": strides, "version": 3}
        return {**about, "data": (self.data.ptr, False)}

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self) -> Iterator[ndarray]:
        return (self[i] for i in range(len(self)))

    def __array__(self, *args: Any, **options: Any) -> Host:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, out: Any = None, **options: Any) -> Any:
        if method != "__call__":
            return NotImplemented
        return _compute(ufunc.__name__, ufunc, args, options, out[0] if isinstance(out, tuple) else out)

    # ---- to the host

    def get(
        self, stream: Any = None, order: str = "C", out: Host | None = None, blocking: bool = True
    ) -> Host:
        """Return a copy on the host, once the device has made it."""
        stream = stream or _current()
        if _streams.stream_at(stream.ptr).capture is not None:
            raise CUDARuntimeError(UNSUPPORTED)
        count("device_to_host_copies")
        count("pcie_bytes", self.nbytes)
        made = np.empty(self.shape, self.dtype) if out is None else out
        with stream:
            _operate("get", None, [self._host], lambda: np.copyto(made, self._host))
        stream.synchronize()
        return made

    def item(self) -> Any:
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    # ---- views and copies

    def view(self, dtype: Any = None) -> ndarray:
        return self._view(self._host.view(self.dtype if dtype is None else np.dtype(dtype)))

    def reshape(self, *shape: Any, order: str = "C") -> ndarray:
        """Return the array in another shape: a view if that can be."""
        seen = self._host.reshape(*shape)
        is_copy = bool(seen.size) and not np.may_share_memory(seen, self._host)
        return self.copy().reshape(*shape) if is_copy else self._view(seen)

    def flatten(self, order: str = "C") -> ndarray:
        return self.copy().reshape(-1)

    def transpose(self, *axes: Any) -> ndarray:
        return self._view(self._host.transpose(*axes))

    def copy(self, order: str = "C") -> ndarray:
        return self.astype(self.dtype)

    def astype(self, dtype: Any, order: str = "K", copy: bool = True, **options: Any) -> ndarray:
        """Return a copy of another dtype."""
        kind = supported(dtype)
        if not copy and kind == self.dtype:
            return self
        made = empty(self.shape, kind)
        is_copy = kind == self.dtype and self._host.flags.c_contiguous
        count("device_to_device_copies", is_copy)
        _operate("copy" if is_copy else "astype", made._host, [self._host], lambda: self._host)
        return made

    def fill(self, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        _operate("fill", self._host, [], lambda: value)

    def __getitem__(self, key: Any) -> Any:
        bare, indices = _bare_key(key)
        if not indices:
            return self._view(self._host[bare])
        return _compute("take", lambda a, *_: a[bare], (self, *indices), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        bare, indices = _bare_key(key)
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        reads = [array._host for array in (*indices, value) if isinstance(array, ndarray)]
        given = value._host if isinstance(value, ndarray) else value
        if not indices:
            target = self._host[bare]
            if isinstance(given, np.ndarray) and _is_same(given, target):
                return
            count("device_to_device_copies", isinstance(value, ndarray))
            _operate("copy" if isinstance(value, ndarray) else "fill", target, reads, lambda: given)
            return
        whole = accesses_of(self._host, True)

        def run() -> list[Access]:
            self._host[bare] = given
            return [access for array in reads for access in accesses_of(array, False)] + whole

        _streams.put(_current().ptr, "cupy's scatter", lambda: Work(run), "cupy_operations")


def _is_same(one: Host, other: Host) -> bool:
    return one.ctypes.data == other.ctypes.data and one.shape == other.shape and one.strides == other.strides


def _bare_key(key: Any) -> tuple[tuple[Any, ...], list[ndarray]]:
    """Return an index as NumPy takes it, and the arrays in it: those of truth values are asked of the device."""
    parts, indices = key if isinstance(key, tuple) else (key,), []
    bare = []
    for part in parts:
        if isinstance(part, (list, np.ndarray)) and np.ndim(part):
            part = asarray(np.asarray(part))
        if isinstance(part, ndarray):
            indices.append(part)
            part = part.get() if part.dtype == bool else part._host
        bare.append(part)
    if not any(part is Ellipsis for part in bare):
        bare.append(...)  # NumPy returns a view then, and never a number
    return tuple(bare), indices


def _add_methods() -> None:
    """Give arrays the operators, and the methods that are NumPy's functions."""
    both = (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift", "rshift", "and", "or", "xor",
    )  # fmt: skip
    alone = ("eq", "ne", "lt", "le", "gt", "ge", "neg", "invert", "abs")
    functions = (
        "all", "any", "argmax", "argmin", "argsort", "cumsum", "max", "mean", "min", "prod", "ravel", "repeat",
        "squeeze", "sum", "swapaxes",
    )  # fmt: skip
    for name in (*both, *alone):
        plain = getattr(operator, f"__{name}__")
        setattr(ndarray, f"__{name}__", lambda *args, name=name, plain=plain: _compute(name, plain, args, {}))
    for name in both:
        plain = getattr(operator, f"__{name}__")
        setattr(
            ndarray, f"__r{name}__", lambda a, b, name=name, plain=plain: _compute(name, plain, (b, a), {})
        )
        setattr(
            ndarray, f"__i{name}__", lambda a, b, name=name, plain=plain: _compute(name, plain, (a, b), {}, a)
        )
    for name in functions:
        setattr(ndarray, name, lambda a, *args, name=name, **options: function(name)(a, *args, **options))
    for name in ("bool", "float", "format", "index", "int", "repr"):  # the host waits for the value
        setattr(ndarray, f"__{name}__", lambda a, *args, name=name: getattr(a.get(), f"__{name}__")(*args))


def function(name: str) -> Callable[..., Any]:
    """Return CuPy's function of a name, as NumPy has it."""
    plain = getattr(np, name)

    def call(*args: Any, out: Any = None, **options: Any) -> Any:
        if name in _ASKED_OF_THE_HOST:
            found = plain(args[0].get(), *args[1:], **options)
            return tuple(map(asarray, found)) if isinstance(found, tuple) else asarray(found)
        if name == "ix_":
            return tuple(
                array._view(view) for array, view in zip(args, plain(*[a._host for a in args]), strict=True)
            )
        if name in _VIEWS:
            made = plain(args[0]._host, *args[1:], **options)
            if isinstance(made, list):
                return [args[0]._view(part) for part in made]
            if np.may_share_memory(made, args[0]._host):
                return args[0]._view(made)
        return _compute(name, plain, args, options, out)

    return call


# ---- new arrays


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype)


def full(shape: Any, value: Any, dtype: Any = None) -> ndarray:
    made = empty(shape, np.asarray(value).dtype if dtype is None else dtype)
    made.fill(value)
    return made


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 0, dtype)


def ones(shape: Any, dtype: Any = float) -> ndarray:
    return full(shape, 1, dtype)


def empty_like(array: ndarray, dtype: Any = None) -> ndarray:
    return empty(array.shape, dtype or array.dtype)


def zeros_like(array: ndarray, dtype: Any = None) -> ndarray:
    return zeros(array.shape, dtype or array.dtype)


def arange(*args: Any, dtype: Any = None) -> ndarray:
    """Return numbers in a row, made on the device."""
    values = np.arange(*args, dtype=dtype)
    made = empty(values.shape, values.dtype)
    _operate("arange", made._host, [], lambda: values)
    return made


def array(
    value: Any, dtype: Any = None, copy: bool | None = True, order: str = "K", *, blocking: bool = False
) -> ndarray:
    """Return a new array; one of the host goes by way of page-locked memory, and is not waited for."""
    if isinstance(value, ndarray):
        return value.astype(value.dtype if dtype is None else dtype, copy=copy is True)
    if isinstance(value, (list, tuple)) and any(isinstance(part, ndarray) for part in value):
        return function("stack")([asarray(part) for part in value])  # type: ignore[no-any-return]
    values = np.array(value, dtype, order="C")
    made = empty(values.shape, supported(values.dtype))
    stream = _current()
    if not OFF and _streams.stream_at(stream.ptr).capture is not None:
        report(
            f"an upload of {values.nbytes} bytes within a capture, at {where()}: its event is never done, and CuPy "
            "gives no page-locked memory back any more"
        )
    count("host_to_device_copies")
    count("uploads")
    count("pcie_bytes", values.nbytes)
    _operate("upload", made._host, [], lambda: values)
    if blocking:
        stream.synchronize()
    return made


def asarray(value: Any, dtype: Any = None, order: str | None = None, *, blocking: bool = False) -> ndarray:
    return array(value, dtype, copy=None, blocking=blocking)


def ascontiguousarray(value: Any, dtype: Any = None) -> ndarray:
    found = asarray(value, dtype)
    return found if found.flags.c_contiguous else found.copy()


def asnumpy(value: Any, **options: Any) -> Host:
    return value.get() if isinstance(value, ndarray) else np.asarray(value)


def copyto(target: ndarray, source: Any, casting: str = "same_kind", where: Any = None) -> None:
    if not isinstance(target, ndarray):
        raise TypeError("dst must be cupy.ndarray")
    target[...] = source


_add_methods()
