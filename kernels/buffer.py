"""Checks of the arrays given to a kernel: NumPy's, CuPy's or viewed as such, of the right form, not overlapping.

The checks read shapes, dtypes, strides and addresses only; no element is read and no GPU is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np

from lowshard.errors import BufferMismatchError, KernelError
from lowshard.foreign_array import READ_ONLY, base_view, is_cupy, view_of

# Larger results are written past the caches: nobody reads all of them again before they would be evicted anyway, and a
# line that is overwritten whole need not be read first.
STREAM_FROM_BYTES = 4 << 20

# Large results begin on a cache line, which lets kernels write whole lines past the caches.
_LINE_BYTES = 64
_ALIGNED_FROM_BYTES = 1 << 20

_APART = "give arrays of their own"

# Arrays of either library. They share the interface used here, and CuPy may not be installed.
Array = Any
Key = TypeVar("Key")


def is_gpu(array: object) -> bool:
    """Return True for a CuPy array. The type decides: no code of a foreign array runs."""
    return is_cupy(type(array))  # type: ignore[arg-type]  # types can be hashed


def require_array(array: object, name: str, writes: bool = False) -> Array:
    """Return a NumPy array as a plain ndarray, a CuPy array as it is, another library's as one of these."""
    if isinstance(array, np.ndarray):
        return base_view(array, name)
    if is_gpu(array):
        return array
    seen = view_of(array, name, writes)
    if seen is not array:
        return seen
    raise KernelError(
        f"{name} must be a NumPy or CuPy array, or another library's with DLPack, got {type(array).__module__}."
        f"{type(array).__qualname__}; write numpy.asarray({name}, dtype)"
    )


def require_out(
    out: object, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], writeable: bool = True
) -> Array:
    """Return a caller's buffer after checking shape, dtype and, if it is `writeable`, that it can be written."""
    array = require_array(out, name, writeable)
    if array.shape != shape or dtype_name(array.dtype) != dtype_name(dtype):
        raise BufferMismatchError(
            f"{name} must be {dtype.name} {list(shape)}, got {array.dtype.name} {list(array.shape)}"
        )
    if writeable and isinstance(array, np.ndarray) and not array.flags.writeable:
        raise BufferMismatchError(f"{name} {READ_ONLY}")
    return array


def require_apart(out: Array, out_name: str, other: Array, name: str) -> None:
    """Raise BufferMismatchError when two buffers share memory: kernels write while they still read."""
    if share_memory(out, other):
        raise BufferMismatchError(f"{out_name} must not share memory with {name}; pass a separate buffer")


def share_memory(a: Array, b: Array) -> bool:
    """Return whether two arrays have a byte in common, by their strides; True also where that is too hard to tell."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        may = np.may_share_memory(a, b)
    else:
        ours, theirs = address_range(a), address_range(b)
        may = bool(a.size and b.size) and ours[0] < theirs[1] and theirs[0] < ours[1]
    try:  # columns of one array cross and share none
        return may and np.shares_memory(_outline(a), _outline(b), max_work=100_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:  # no slices of one array are
        return True


def require_results_apart(
    results: Sequence[tuple[Key, Array]],
    rank: int,
    may_share: Callable[[Key, Key, bool], bool],
    sources: Sequence[tuple[Key, Array]] = (),
    name_of: Callable[[Key], str] = str,
) -> None:
    """Raise BufferMismatchError where a result shares memory with another result or with a source.

    One array behind two keys is let through where `may_share` says so of them, and of whether the second is a source.
    """
    rows = [*((*row, False) for row in results), *((*row, True) for row in sources)]
    begun: tuple[list[tuple[int, Key, Array]], ...] = ([], [])  # results, sources
    for begin, end, at in sorted((*address_range(a), at) for at, (_, a, _) in enumerate(rows) if a.size):
        key, array, is_source = rows[at]
        if not is_source and _overlaps_itself(array):
            raise BufferMismatchError(f"on rank {rank} elements of {name_of(key)} share memory; {_APART}")
        for kind in (0,) if is_source else (0, 1):
            begun[kind][:] = [row for row in begun[kind] if row[0] > begin]
            for _, other, there in begun[kind]:
                pair = (other, key) if is_source else (key, other)
                if place_of(there) == place_of(array):
                    is_wrong = not may_share(*pair, is_source or kind == 1)
                else:
                    is_wrong = share_memory(there, array)
                if is_wrong and (is_source or kind):
                    raise BufferMismatchError(
                        f"{name_of(pair[0])}: on rank {rank} its destination shares memory with the source of "
                        f"{name_of(pair[1])}, which is read while the other is written; {_APART}"
                    )
                if is_wrong:
                    raise BufferMismatchError(
                        f"on rank {rank} {name_of(other)} and {name_of(key)} share memory, so that one is written over "
                        f"the other; {_APART}"
                    )
        begun[is_source].append((end, key, array))


def _overlaps_itself(array: Array) -> bool:
    """Return whether elements of an array may share bytes, as those of a broadcast or of sliding windows do."""
    reach = array.dtype.itemsize
    for stride, extent in sorted(
        (abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1
    ):
        if stride < reach:
            return True
        reach += (extent - 1) * stride
    return False


def place_of(array: Array) -> tuple[object, ...]:
    """Return a key that is equal for two arrays only if they are the same."""
    strides = tuple(s for s, n in zip(array.strides, array.shape, strict=True) if n > 1)
    return address(array), array.shape, strides, array.dtype


def twins_of(arrays: Mapping[str, Array], make: Callable[[Array], Array]) -> dict[str, Array]:
    """Return a new array for each; an array that has several names gets one."""
    made: dict[tuple[object, ...], Array] = {}
    for array in arrays.values():
        if place_of(array) not in made:
            made[place_of(array)] = make(array)
    return {name: made[place_of(array)] for name, array in arrays.items()}


@cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return `dtype.name`, cached: NumPy computes it each time."""
    return str(dtype.name)


def address(array: Array) -> int:
    """Return the address of an array's first element, on the host or on its GPU."""
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])  # a third of the time of array.ctypes.data
    return int(array.data.ptr)


def address_range(array: Array) -> tuple[int, int]:
    """Return the first address of an array and the one after its last; equal for an empty array."""
    low = high = address(array)
    if not array.size:
        return low, high
    if array.flags.c_contiguous:
        return low, low + int(array.nbytes)
    for extent, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            low += (extent - 1) * stride
        else:
            high += (extent - 1) * stride
    return low, high + array.dtype.itemsize


def allocate(shape: tuple[int, ...], dtype: np.dtype[Any], like: Array) -> Array:
    """Return a new C-contiguous array where `like` lives: on the host, or on its GPU."""
    if is_gpu(like):
        import cupy

        with like.device:
            return cupy.empty(shape, dtype)
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes < _ALIGNED_FROM_BYTES or dtype.hasobject:
        return np.empty(shape, dtype)
    buffer = np.empty(size_bytes + _LINE_BYTES, np.uint8)
    start = -address(buffer) % _LINE_BYTES
    return buffer[start : start + size_bytes].view(dtype).reshape(shape)


class _Outline:
    """Shape, strides and address of an array, for NumPy's test of overlaps."""

    def __init__(self, array: Array) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{array.dtype.itemsize}",
            "shape": array.shape,
            "strides": array.strides,
            "data": (address(array), True),
        }


def _outline(array: Array) -> Array:
    # Nothing reads through this view, so a GPU address does no harm.
    return np.asarray(_Outline(array)) if is_gpu(array) else array
