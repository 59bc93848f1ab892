"""Sums over all elements of all shards whose bits do not depend on how the elements are sharded.

Blocks of 32 elements, which no shard boundary splits, are summed in a fixed tree in float64. The sums of blocks are
added exactly, as integers: one wide fixed-point number in limbs of 32 bits (a Kulisch accumulator), which is an integer
sum over ranks in any order, and is rounded once at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from lowshard.foreign_array import host_of
from lowshard.kernels.engine import host_engine

Array = Any  # a NumPy or CuPy array; CuPy ships no types

BLOCK_ELEMS = 32
_LIMB_BITS = 32
_LOWEST = 1074  # the smallest subnormal float64 is 2 ** -1074
_LIMBS = (2046 + 53) // _LIMB_BITS + 3
WORDS = _LIMBS + 2
"""int64 words of a sum: its limbs, the number of blocks that were Inf, and of those that were NaN."""
_CHUNK_ELEMS = 1 << 20
SMALLEST_SUM = 2.0**-900
"""What a sum of powers has lost by underflow is nothing beside this."""


def block_sums(terms: Array) -> Array:
    """Return the sums of blocks of 32 float64 terms `[n]`, n a multiple of 32, each in one fixed tree."""
    part = terms.reshape(-1, 4, 8)
    lanes = ((part[:, 0] + part[:, 1]) + part[:, 2]) + part[:, 3]
    half = lanes[:, :4] + lanes[:, 4:]
    quarter = half[:, :2] + half[:, 2:]
    return quarter[:, 0] + quarter[:, 1]


def power_sum(flat: Array, p: float, xp: Any, scale: float = 1.0) -> np.ndarray:
    """Return the exact sum of block sums of |x / scale|^p of a flat array as words `[WORDS]` int64."""
    words = np.zeros(WORDS, np.int64)
    compiled = p == 2 and scale == 1 and flat.size % BLOCK_ELEMS == 0 and _compiled_for(flat)
    for start in range(0, flat.size, _CHUNK_ELEMS):
        if compiled:
            part = flat[start : start + _CHUNK_ELEMS]
            sums = np.empty(part.size // BLOCK_ELEMS)
            compiled(part, sums, sums.view(np.uint64), words)
            carry(words)
            continue
        chunk = flat[start : start + _CHUNK_ELEMS].astype(np.float64)
        if chunk.size % BLOCK_ELEMS:
            chunk = xp.concatenate([chunk, xp.zeros(-chunk.size % BLOCK_ELEMS)])
        with np.errstate(over="ignore", invalid="ignore"):  # Inf and NaN are counted
            chunk = chunk if scale == 1 else chunk / scale
            terms = chunk * chunk if p == 2 else xp.abs(chunk) ** p
            sums = block_sums(terms)
        add_exactly(words, host_of(sums))
    return words


def _compiled_for(flat: Array) -> Callable[..., None] | None:
    """Return a compiled kernel that does what `block_sums` and `add_exactly` do with squares, where there is one."""
    if not isinstance(flat, np.ndarray) or flat.dtype != np.float32 or host_engine().name != "numba":
        return None
    from lowshard.kernels.cpu.cpu_optimizer import square_sums_kernel

    return square_sums_kernel()


def add_exactly(words: np.ndarray, values: np.ndarray) -> None:
    """Add float64 values of 0 and more, exactly."""
    good = np.isfinite(values)
    words[-2] += np.count_nonzero(np.isinf(values))
    words[-1] += np.count_nonzero(np.isnan(values))
    bits = np.where(good, values, 0.0).view(np.uint64)
    exponent = (bits >> np.uint64(52)).astype(np.int64)
    mantissa = bits & np.uint64((1 << 52) - 1)
    mantissa |= (exponent > 0).astype(np.uint64) << np.uint64(52)
    at = np.maximum(exponent, 1) - 1
    limb, shift = at >> 5, (at & 31).astype(np.uint64)
    low32, word = np.uint64(0xFFFFFFFF), np.uint64(32)
    low, high = (mantissa & low32) << shift, (mantissa >> word) << shift
    # high < 2^21 * 2^31, so both halves and their carry fit 64 bits.
    high += low >> word
    for offset, part in ((0, low & low32), (1, high & low32), (2, high >> word)):
        # Each part is below 2^32: sums of up to 2^16 of them are exact in float64.
        for first in range(0, part.size, 1 << 16):
            some = slice(first, first + (1 << 16))
            sums = np.bincount(limb[some], part[some].astype(np.float64), minlength=1)
            words[offset : offset + sums.size] += sums.astype(np.int64)
    carry(words)


def carry(words: np.ndarray) -> None:
    """Bring every limb below 2^32, so that ranks can be summed without overflow."""
    for index in range(_LIMBS - 1):
        words[index + 1] += words[index] >> _LIMB_BITS
        words[index] &= (1 << _LIMB_BITS) - 1


def value_of(words: np.ndarray) -> float:
    """Return the number that words stand for, rounded once; NaN where a block was NaN, else Inf where one was Inf."""
    if words[-1] or words[-2]:
        return math.nan if words[-1] else math.inf
    total = sum(int(word) << (_LIMB_BITS * index) for index, word in enumerate(words[:-2].tolist()))
    try:
        return float(Fraction(total, 1 << _LOWEST))
    except OverflowError:
        return math.inf
