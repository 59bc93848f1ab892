"""CuPy and NCCL on a machine without a GPU, checking how lowshard uses them; see README.md beside this package."""

from __future__ import annotations

from typing import Any

import numpy as _numpy

from cupy import _array, _kernels, checker, cuda

__version__ = "14.2.0"
__all__ = ["RawKernel", "RawModule", "checker", "cuda", "get_default_memory_pool", "ndarray"]

RawKernel, RawModule = _kernels.RawKernel, _kernels.RawModule
get_default_memory_pool, ndarray = cuda.get_default_memory_pool, _array.ndarray


def __getattr__(name: str) -> Any:
    """Return a function of arrays: the checker's own, or NumPy's as an operation of the device; or a type."""
    if name in _array.CUPYS_OWN:
        found = getattr(_array, name)
    else:
        found = None if name.startswith("_") else getattr(_numpy, name, None)
        if found is None:
            raise AttributeError(f"the stand-in for CuPy has no {name}")
        if callable(found) and not isinstance(found, type):
            found = _array.function(name)
    globals()[name] = found
    return found
