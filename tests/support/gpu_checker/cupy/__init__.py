"""CuPy and NCCL on a machine without a GPU, checking how lowshard uses them; see README.md beside this package."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as _numpy

from cupy import checker as checker
from cupy import cuda as cuda
from cupy._array import (
    arange,
    array,
    asarray,
    ascontiguousarray,
    asnumpy,
    copyto,
    empty,
    empty_like,
    full,
    ndarray,
    ones,
    zeros,
    zeros_like,
)
from cupy._array import (
    function as _function,
)
from cupy._kernels import RawKernel, RawModule
from cupy.cuda import get_default_memory_pool

__version__ = "14.2.0"
__all__ = [
    "RawKernel",
    "RawModule",
    "arange",
    "array",
    "asarray",
    "ascontiguousarray",
    "asnumpy",
    "checker",
    "copyto",
    "cuda",
    "empty",
    "empty_like",
    "full",
    "get_default_memory_pool",
    "ndarray",
    "ones",
    "zeros",
    "zeros_like",
]


def show_config() -> None:
    """Say what this is."""
    print(f"the GPU checker, in {os.path.dirname(__file__)}, on Python {sys.version}")


def __getattr__(name: str) -> Any:
    found = None if name.startswith("_") else getattr(_numpy, name, None)
    if found is None:
        raise AttributeError(f"the stand-in for CuPy has no {name}")
    if isinstance(found, (type, float)) or not callable(found):
        return found
    globals()[name] = _function(name)
    return globals()[name]
