"""`cupy.ndarray` and CuPy's functions, which NumPy does, and lowshard's kernels, which are run by their host build.

Each call is an operation on a stream. The loads and stores of a launch are compared with the memory that is alive, with
each other (threads of a launch are not ordered), and with earlier operations.
"""

from __future__ import annotations

import ctypes
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.array_utils import byte_bounds

from cupy import cuda
from cupy._memory import Access, block_at
from cupy.checker import OFF, count, locked, need, report, where
from cupy.cuda import get_current_stream, put

Host = npt.NDArray[Any]

_DTYPES = "?bhilqBHILQefdFDpP"  # of NumPy, that CuPy has
_ABOUT = ("dtype", "shape", "strides", "ndim", "size", "nbytes", "itemsize")
_OF_UNKNOWN_SIZE = ("argwhere", "flatnonzero", "nonzero", "unique")  # the host waits for these
_ROOM = 1 << 21  # accesses of a launch that are compared
_seen = np.empty((_ROOM, 5), np.uint64)
_THREADS, _LANES = 256, 32
_FLUSHED = "quantize"  # these kernels run as CuPy compiles them: fp32 subnormals count as zero there
_LOAD, _ADD = 0, 2


def _operate(name: str, out: Host | None, reads: Sequence[Host], function: Callable[[], Any]) -> None:
    """Put an operation on the current stream that sets an array, or asks for a value, from others."""
    accesses: list[Access] = []
    for array in reads if out is None else [*reads, out]:
        accesses += [Access(*byte_bounds(array), array is out)] if array.size else []
        is_right = array.flags.aligned or name in ("get", "copy")
        need(is_right, f"{name} of an array that is not aligned to its elements")

    def run() -> list[Access]:
        with np.errstate(all="ignore"):
            value = function()
        if out is not None:
            np.copyto(out, value, casting="unsafe")
        return accesses

    put(f"cupy's {name}", run, "device_to_device_copies" if name == "copy" else "")


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
        cuda.wait(get_current_stream)
    # Under the lock: else what is ahead may be done in between, after the result of too early a call was used.
    with locked(), np.errstate(all="ignore"):
        stream = get_current_stream()
        is_early = stream.capture is not None or not cuda.has_run(stream.comes_after())
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
    flags = property(lambda self: self._host.flags)
    T = property(lambda self: self._view(self._host.T))
    device = property(lambda self: cuda.Device())
    data = property(lambda self: cuda.MemoryPointer(self._memory.mem, int(self._host.ctypes.data)))

    def __init__(self, shape: Any, dtype: Any = float, memptr: Any = None) -> None:
        shape = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(map(int, shape))
        kind = np.dtype(dtype)
        if memptr is None and kind.name != "bfloat16" and kind.char not in _DTYPES:
            raise ValueError(f"Unsupported dtype {kind}")
        size = math.prod(shape) * kind.itemsize
        self._memory = memptr or cuda.get_allocator()(size)
        raw: Any = (ctypes.c_char * max(size, 1)).from_address(self._memory.ptr)
        self._host: Host = np.ndarray(shape, kind, raw)

    def _view(self, host: Host) -> ndarray:
        made = ndarray.__new__(ndarray)
        made._host, made._memory = host, self._memory
        return made

    def __getattr__(self, name: str) -> Any:
        """Return what NumPy's array has: a property, or a method that is an operation."""
        if name in _ABOUT or name == "item":
            return getattr(self._host if name in _ABOUT else self.get(), name)
        method = None if name.startswith("_") else getattr(np.ndarray, name, None)
        if not callable(method):
            raise AttributeError(f"the checker's arrays have no {name}")
        return lambda *args, **options: compute(name, method, (self, *args), options)

    def __len__(self) -> int:
        return len(self._host)

    def __array__(self, *args: Any, **options: Any) -> Host:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, out: Any = (None,), **options: Any) -> Any:
        return compute(ufunc.__name__, ufunc, args, options, out[0])

    def get(self) -> Host:
        made = np.empty(self.shape, self.dtype)
        cuda.refuse_in_capture(get_current_stream().capture)
        count("device_to_host_copies")
        count("pcie_bytes", self.nbytes)
        _operate("get", None, [self._host], lambda: np.copyto(made, self._host))
        cuda.wait(get_current_stream)
        return made

    def fill(self, value: Any) -> None:
        self[...] = value

    def __getitem__(self, key: Any) -> Any:
        bare, indices = _bare_key(key)
        return compute("take", lambda host, *_: host[bare], (self, *indices), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        (bare, reads), is_copy = _bare_key(key), isinstance(value, ndarray)
        given = _bare(value, reads)
        target = self._host if reads[is_copy:] else self._host[bare]

        def run() -> Host:
            self._host[bare] = given
            return target

        if not is_copy or given.__array_interface__ != target.__array_interface__:  # as in `x[1:] += y`
            name = "scatter" if reads[is_copy:] else "copy" if is_copy else "fill"
            _operate(name, target, [one._host for one in reads], run)


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


def empty_like(array: ndarray, dtype: Any = None) -> ndarray:
    return ndarray(array.shape, dtype or array.dtype)


def asarray(value: Any, dtype: Any = None, order: str = "C", *, blocking: bool = False) -> ndarray:
    if isinstance(value, ndarray):
        return value if dtype is None else value.astype(dtype, copy=False)
    values = np.array(value, dtype, order="C")
    made = ndarray(values.shape, values.dtype)
    if get_current_stream().capture is not None:
        what = f"an upload of {values.nbytes} bytes within a capture, at {where()}"
        report(f"{what}: its event is never done, and CuPy gives no page-locked memory back any more")
    for kind, number in (("host_to_device_copies", 1), ("uploads", 1), ("pcie_bytes", values.nbytes)):
        count(kind, number)
    _operate("upload", made._host, [], lambda: values)
    return made


def copyto(target: ndarray, source: Any) -> None:
    target[...] = source


class RawModule:
    """A .cu file of lowshard's: the host build has been made whole, whatever the module is compiled for."""

    def __init__(self, *, code: str, options: tuple[str, ...] = ()) -> None:
        need('#include "' not in code, "an include of a file of one's own is left in the source")

    def get_function(self, name: str) -> Any:
        def launch(grid: Sequence[int], block: Sequence[int], args: Sequence[Any]) -> None:
            is_right = 0 < grid[0] < 1 << 31 and len(grid) == 1 and tuple(block) == (_THREADS,)
            is_right = is_right and all(type(arg) is int and -(1 << 63) <= arg < 1 << 64 for arg in args)
            need(
                is_right, f"kernel {name} has a grid of {grid}, blocks of {block}, 64 bits for each of {args}"
            )
            put(f"kernel {name}", functools.partial(_run, name, grid[0], args, where()), "launches")

        return (lambda *args: count("launches")) if OFF else launch


def RawKernel(code: str, name: str) -> Any:
    """Return a kernel that keeps its stream busy for some nanoseconds: `spin` of tests, `hold` of benchmarks."""
    need(name in ("spin", "hold"), f"the checker runs no kernel {name} of a test's own")

    def launch(grid: Sequence[int], block: Sequence[int], args: Sequence[Any]) -> None:
        ends_s: list[float] = []

        def ready() -> str | None:
            ends_s.append(time.monotonic() + int(args[0]) * 1e-9)
            return None if time.monotonic() >= ends_s[0] else ""

        put("a kernel that takes its time", list, ready=ready)

    return launch


def _run(name: str, ctas: int, args: Sequence[int], place: str) -> list[Access]:
    """Run a kernel to its end and return what it has touched. The lock is held: one launch at a time."""
    from support import cuda_host  # this needs lowshard, which imports cupy

    library = cuda_host.host_library()[0]
    need(hasattr(library, name), f"there is no kernel {name}", place)
    library.lowshard_trace(ctypes.c_void_p(_seen.ctypes.data), ctypes.c_size_t(_ROOM))
    error = cuda_host.run_on_host(name, ctas, _THREADS, args, (0, ctas), name.startswith(_FLUSHED))
    found = library.lowshard_trace(None, ctypes.c_size_t(0))
    need(not error, f"kernel {name}: {error}", place)
    count("launches_seen_in_part", found > _ROOM)
    rows = _seen[: min(found, _ROOM)].astype(np.int64)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    threads = np.where(rows[:, 4] == _ADD, -1, rows[:, 2] * _LANES + rows[:, 3])  # adds do not race with adds
    sides = np.stack([rows[:, 0], rows[:, 0] + rows[:, 1], threads])
    stores, loads = sides[:, rows[:, 4] != _LOAD], sides[:, rows[:, 4] == _LOAD]
    _compare_threads(name, place, stores, loads)
    return [*_by_block(loads, False), *_by_block(stores, True)]


def _compare_threads(name: str, place: str, stores: Any, loads: Any) -> None:
    """Report bytes that two threads of a launch touch, one of them writing: of first addresses, ends and threads."""
    (begins, ends, threads), (load_begins, load_ends, load_threads) = stores, loads
    if not len(begins):
        return
    last = np.maximum.accumulate(ends)
    # Of each: the one before, or itself, whose end is the last so far.
    widest = np.maximum.accumulate(np.where(ends == last, np.arange(len(ends)), 0))
    twice = (begins[1:] < last[:-1]) & (threads[1:] != threads[widest[:-1]])
    if twice.any():
        report(f"race: two threads of kernel {name} write byte {begins[1:][twice][0]:#x}, at {place}")
    behind = np.searchsorted(begins, load_begins, side="right")
    for near in (np.maximum(behind - 1, 0), np.minimum(behind, len(begins) - 1)):
        both = (begins[near] < load_ends) & (load_begins < ends[near]) & (load_threads != threads[near])
        if both.any():
            byte = load_begins[both][0]
            report(f"race: a thread of kernel {name} reads byte {byte:#x} and another writes it, at {place}")


def _by_block(side: Any, writes: bool) -> list[Access]:
    """Return loads or stores of a launch, together for each block of memory."""
    found, (begins, ends, _) = list[Access](), side
    while len(begins):
        block = block_at(int(begins[0]))
        inside = max(1, int(np.searchsorted(begins, block.end if block else 0)))
        found.append(Access(int(begins[0]), int(ends[:inside].max()), writes))
        begins, ends = begins[inside:], ends[inside:]
    return found
