"""Position-dependent weights for sums over an array's bits, which identify its content.

An array's bits are units: bytes where an element is one byte, else pieces of 16 bits, read as signed. The unit at
position `i` of the whole array, counted row-major, has for each of SUMS sums the weight `factor[i // BLOCK_UNITS] *
table[i % BLOCK_UNITS]`; a sum is taken modulo 2^32. So the sums of the parts of any partition add up to the whole's.

Table entries are odd and distinct, so one changed unit changes every sum, and so do two swapped units of a block.
Factors are odd, by the steps of SplitMix64 (G. Steele et al., "Fast splittable pseudorandom number generators",
OOPSLA 2014): any other change is missed about once in 2^32, or less.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

SUMS = 2
BLOCK_UNITS = 2048
STEP, FIRST_FACTOR, SECOND_FACTOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
FIRST_SHIFT, SECOND_SHIFT, LAST_SHIFT = 30, 27, 31


def unit_bytes(itemsize_bytes: int) -> int:
    """Return the bytes of a unit of elements of so many bytes."""
    return 1 if itemsize_bytes % 2 else 2


def mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the SplitMix64 outputs of states `numbers * STEP`, uint64 of the same shape."""
    z = numbers * np.uint64(STEP)
    z = (z ^ (z >> np.uint64(FIRST_SHIFT))) * np.uint64(FIRST_FACTOR)
    z = (z ^ (z >> np.uint64(SECOND_SHIFT))) * np.uint64(SECOND_FACTOR)
    return z ^ (z >> np.uint64(LAST_SHIFT))


def factors(blocks: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """Return the factors of blocks, uint32 [..., SUMS]: the two halves of one SplitMix64 output, made odd."""
    z = mixed(blocks.astype(np.uint64) + np.uint64(1))
    return np.stack([z.astype(np.uint32), (z >> np.uint64(32)).astype(np.uint32)], axis=-1) | np.uint32(1)


@cache
def table() -> npt.NDArray[np.int16]:
    """Return the weights within a block, int16 [SUMS, BLOCK_UNITS], read-only: odd, distinct in a row."""
    made = np.empty((SUMS, BLOCK_UNITS), np.int16)
    for row in range(SUMS):
        drawn = mixed(np.arange(1, 1 << 15, dtype=np.uint64) + np.uint64(row << 32))
        order = np.argsort(drawn, kind="stable")[:BLOCK_UNITS]
        made[row] = (2 * order + 1).astype(np.uint16).view(np.int16)
    made.flags.writeable = False
    return made
