"""Random arrays that any process can make again from the same words."""

from __future__ import annotations

import zlib

import numpy as np

from lowshard import dtypes


def rng(*words: object) -> np.random.Generator:
    """Return a generator whose seed is these words."""
    return np.random.default_rng([zlib.crc32(str(word).encode()) for word in words])


def hard(shape: tuple[int, ...], dtype: str, *words: object) -> np.ndarray:
    """Return values that show mistakes: ordinary ones, any bit pattern, subnormals, NaN, Inf and signed zeros."""
    row, random = dtypes.get(dtype), rng(dtype, *words)
    count = int(np.prod(shape))
    if row.kind == "bool":
        return random.integers(0, 2, shape).astype(bool)
    pattern = np.dtype(f"u{row.itemsize_bytes}")
    patterns = np.frombuffer(random.bytes(count * row.itemsize_bytes), pattern).copy()
    if row.kind != "float":
        return patterns.view(row.numpy).reshape(shape)
    import ml_dtypes

    values = random.standard_normal(count).astype(np.float32).astype(row.numpy)
    chosen = random.random(count)
    smallest = np.float64(ml_dtypes.finfo(row.numpy).smallest_subnormal)  # type: ignore[no-untyped-call]
    subnormal = (smallest * random.integers(-4, 5, count)).astype(row.numpy)
    values = np.where(chosen < 0.20, patterns.view(row.numpy), values)
    values = np.where((chosen >= 0.20) & (chosen < 0.30), subnormal, values)
    for at, special in ((0.30, np.inf), (0.31, -np.inf), (0.32, np.nan), (0.33, 0.0), (0.34, -0.0)):
        values = np.where(
            (chosen >= at) & (chosen < at + 0.01), np.float32(special).astype(row.numpy), values
        )
    return values.astype(row.numpy, copy=False).reshape(shape)


def ordinary(shape: tuple[int, ...], dtype: str, *words: object) -> np.ndarray:
    """Return finite values of a normal distribution, or small integers."""
    row, random = dtypes.get(dtype), rng("ordinary", dtype, *words)
    if row.kind == "float":
        return random.standard_normal(shape).astype(np.float32).astype(row.numpy)
    return random.integers(0, 100, shape).astype(row.numpy)


def whole_numbers(shape: tuple[int, ...], dtype: str, *words: object) -> np.ndarray:
    """Return numbers whose sums are exact in any order."""
    return rng("whole", dtype, *words).integers(0, 4, shape).astype(dtypes.get(dtype).numpy)
