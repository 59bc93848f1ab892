"""Copies for arrays whose strides or byte order keep a kernel from working in place."""

from __future__ import annotations

import numpy as np

from lowshard.kernels.buffer import Array, allocate
from lowshard.kernels.engine import engine_for
from lowshard.kernels.runs import whole_array_runs


def contiguous(array: Array) -> Array:
    """Return a new C-contiguous copy in native byte order."""
    if isinstance(array, np.ndarray):
        return array.astype(array.dtype.newbyteorder("="), order="C")
    made = allocate(array.shape, array.dtype, array)
    _copy(array, made)
    return made


def assign(target: Array, values: Array) -> None:
    """Copy values into an array of the same shape and dtype, of any strides and byte order."""
    if isinstance(target, np.ndarray):
        target[...] = values
    else:
        _copy(values, target)


def _copy(src: Array, dst: Array) -> None:
    # CuPy's own copies would compile a kernel, which for bf16 asks for a CUDA toolkit.
    if src.size:
        itemsize = src.dtype.itemsize
        runs = whole_array_runs(src.shape, src.strides, dst.strides, itemsize, itemsize)
        engine_for(src, dst).copy(src, dst, runs)
