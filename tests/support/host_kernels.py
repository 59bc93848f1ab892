"""What the tests of the CUDA sources on the host share: inputs of every kind, and results beside the plain engine's."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import mode
from support.cuda_host import HostCudaEngine, host_cuda_engine

from lowshard.kernels import MXFP8Tensor, SwizzledMXFP8
from lowshard.kernels.engine import Engine
from lowshard.kernels.plain import PlainEngine
from lowshard.kernels.reference import ELEMS, MODES
from lowshard.selftest.arrays import hard_blocks
from lowshard.selftest.kernel_cases import through

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
FLUSHES = platform.machine() in ("x86_64", "AMD64")

any_dtype = pytest.mark.parametrize("dtype", DTYPES)
any_elem = pytest.mark.parametrize("elem", ELEMS)
any_mode = pytest.mark.parametrize("scale_mode", mode.sample(MODES, 2, "modes of the host"))

WAYS = ("usual", *mode.sample(("one CTA", "large grid", "flushing"), 1, "ways of the host"))
"""To run a kernel: a grid as large as the work, one CTA; subnormals flushed, as in kernels that CuPy compiles."""


def engine_that_runs(way: str) -> HostCudaEngine:
    if way == "flushing" and not FLUSHES:
        pytest.skip(f"{platform.machine()}: the host build flushes subnormals on x86 alone")
    return {
        "usual": lambda: host_cuda_engine(),
        "one CTA": lambda: host_cuda_engine(most_ctas=1),
        "large grid": lambda: host_cuda_engine(multiprocessors=10**6),
        "flushing": lambda: host_cuda_engine(flush=True),
    }[way]()


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="g++, which builds the kernels, is not on PATH"
)


def raw(array: Any) -> Any:
    return np.ascontiguousarray(array).view(np.uint8)


def assert_same(result: Any, expected: Any) -> None:
    for a, b in zip(parts(result), parts(expected), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        np.testing.assert_array_equal(raw(a), raw(b))


def parts(result: Any) -> tuple[Any, ...]:
    if isinstance(result, (MXFP8Tensor, SwizzledMXFP8)):
        return result.data, result.scale
    return result if isinstance(result, tuple) else (result,)


def assert_as_plain(engine: Engine, call: Callable[..., Any], *args: Any) -> Any:
    """Make a call through both engines; it makes its own output arrays."""
    with through(PlainEngine()):
        expected = call(*args)
    with through(engine):
        result = call(*args)
    assert_same(result, expected)
    return result


def floats(bits: Any, dtype: str) -> Any:
    """Return bit patterns as an array of a float dtype."""
    size = DTYPES[dtype].itemsize
    return np.ascontiguousarray(bits, np.uint32 if size == 4 else np.uint16).view(DTYPES[dtype])


def blocks(rng: np.random.Generator, dtype: str, count: int) -> Any:
    """Return hard blocks [count, 32], others each time."""
    return hard_blocks((count, 32), dtype, int(rng.integers(1 << 60)))


def at_offset(array: Any, offset: int) -> Any:
    """Return a copy of an array that begins `offset` bytes after a 64-byte boundary."""
    space = np.zeros(array.nbytes + offset + 64, np.uint8)
    skip = -space.ctypes.data % 64 + offset
    copy = space[skip : skip + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def strided(rng: np.random.Generator, array: Any) -> Any:
    """Return an array of the same values whose outer dims lie in any order, with gaps, some reversed."""
    order = [*rng.permutation(array.ndim - 1).tolist(), array.ndim - 1]
    gap = [int(g) for g in rng.integers(0, 3, array.ndim)]
    gap[-1] *= int(rng.choice([1, 8, 32]))
    space = np.zeros([array.shape[i] + g for i, g in zip(order, gap, strict=True)], array.dtype)
    view = space[tuple(slice(g, None) for g in gap)].transpose(np.argsort(order))
    for dim in range(array.ndim - 1):
        if rng.random() < 0.3:
            view = np.flip(view, dim)
    view[...] = array
    return view
