"""Arrays of the selftest and the tests: random ones that any process can make again, and where they lie."""

from __future__ import annotations

import importlib
import zlib
from types import ModuleType
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.foreign_array import host_of

Shape = tuple[int, ...]


def rng(*words: object) -> np.random.Generator:
    """Return a generator whose seed is these words."""
    return np.random.default_rng([zlib.crc32(str(word).encode()) for word in words])


def hard(shape: Shape, dtype: str, *words: object) -> np.ndarray:
    """Return values that show mistakes: ordinary ones, any bit pattern, the ends of the range, subnormals, NaN, Inf."""
    row, random, count = dtypes.get(dtype), rng(dtype, *words), int(np.prod(shape))
    if row.kind == "bool":
        return random.integers(0, 2, shape).astype(bool)
    kind = np.dtype(f"u{row.itemsize_bytes}")
    patterns = np.frombuffer(random.bytes(count * row.itemsize_bytes), kind).copy()
    if row.kind == "scale":
        return patterns.view(row.numpy).reshape(shape)
    if row.kind == "float":
        limits = np.array([np.inf, np.nan, 0, 0, 0, 0], np.float32).astype(row.numpy).view(kind)
        special = np.concatenate([limits, limits[:1] - kind.type(1), np.arange(5).astype(kind)])  # subnormals
        special = np.concatenate([special, special | kind.type(1 << (row.bits - 1))])
        usual = random.standard_normal(count).astype(np.float32).astype(row.numpy).view(kind)
    else:
        ends = np.iinfo(row.numpy)
        special, usual = np.array([ends.min, ends.max, 0, 1], row.numpy).view(kind), patterns
    chosen = random.random(count)
    values = np.where(chosen < 0.2, patterns, usual)
    values = np.where(chosen > 0.85, special[random.integers(0, len(special), count)], values)
    return values.view(row.numpy).reshape(shape)


def hard_blocks(shape: Shape, dtype: str, *words: object) -> np.ndarray:
    """Return floats in blocks of 32 of every scale: all exponents, zeros, subnormals, at times NaN or Inf."""
    width, mantissa = {"bfloat16": (16, 7), "float16": (16, 10), "float32": (32, 23)}[dtype]
    random, count = rng(dtype, *words), int(np.prod(shape))
    blocks, top = -(-count // 32), (1 << (width - 1 - mantissa)) - 1
    field = np.clip(random.integers(0, top, (blocks, 1)) + random.integers(-12, 3, (blocks, 32)), 0, top - 1)
    field[random.random(blocks) < 0.05, random.integers(32)] = top
    field[random.random(blocks) < 0.1] = 0
    value = field << mantissa | random.integers(0, 1 << mantissa, (blocks, 32))
    value[random.random(blocks) < 0.02] = 0
    value |= random.integers(0, 2, (blocks, 32)) << (width - 1)
    values: np.ndarray = value.astype(f"u{width // 8}").view(dtypes.get(dtype).numpy)
    return values.reshape(-1)[:count].reshape(shape)


def ordinary(shape: Shape, dtype: str, *words: object) -> np.ndarray:
    """Return finite values of a normal distribution, or small integers."""
    row, random = dtypes.get(dtype), rng("ordinary", dtype, *words)
    if row.kind == "float":
        return random.standard_normal(shape).astype(row.numpy)
    return random.integers(0, 100, shape).astype(row.numpy)


def whole_numbers(shape: Shape, dtype: str, *words: object) -> np.ndarray:
    """Return numbers whose sums are exact in any order."""
    return rng("whole", dtype, *words).integers(0, 4, shape).astype(dtypes.get(dtype).numpy)


def bits(array: np.ndarray) -> np.ndarray:
    """Return the bit patterns of an array as unsigned integers of its width."""
    return np.ascontiguousarray(array).view(np.dtype(f"u{array.itemsize}")).reshape(array.shape)


def array_module(device: str) -> ModuleType:
    """Return numpy for "cpu", cupy for "cuda"."""
    return np if device == "cpu" else importlib.import_module("cupy")


def put(xp: ModuleType, array: np.ndarray) -> Any:
    """Return a new contiguous array there with these values."""
    return np.array(array, order="C") if xp is np else xp.asarray(np.ascontiguousarray(array))


def settle(xp: ModuleType) -> None:
    """Wait for the work on the current stream; an error of the device is raised here."""
    # Never for the whole device: there another rank's kernel may wait for this rank.
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()


def fill_pools(xp: ModuleType) -> None:
    """Take memory of the device and page-locked memory for CuPy's pools of the current stream, and give it back.

    CUDA allocates only while no kernel runs, and a kernel of NCCL may run until this rank comes.
    """
    if xp is not np:
        held = [xp.empty(bytes_, xp.uint8) for bytes_ in (64 << 20, *[1 << 20] * 16)]
        held.append(xp.asarray(host_of(held[1])))
        del held
        settle(xp)
