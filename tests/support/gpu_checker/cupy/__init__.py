"""CuPy and NCCL on a machine without a GPU, checking how lowshard uses them; see README.md beside this package."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as _numpy

from cupy import _array, checker, cuda
from cupy._array import RawKernel, RawModule, asarray, copyto, empty_like, ndarray
from cupy.cuda import nccl  # noqa: F401

__version__ = "14.2.0"
__all__ = ["RawKernel", "RawModule", "asarray", "checker", "copyto", "cuda", "empty_like", "ndarray"]
array, empty = asarray, ndarray
get_default_memory_pool = partial(SimpleNamespace, free_all_blocks=int)


def __getattr__(name: str) -> Any:
    """Return NumPy's function as an operation of the device, or its type."""
    found = None if name.startswith("_") else getattr(_numpy, name, None)
    if found is None:
        raise AttributeError(f"the stand-in for CuPy has no {name}")
    if isinstance(found, type) or not callable(found):
        return found
    return lambda *args, out=None, **options: _array.compute(name, found, args, options, out)
