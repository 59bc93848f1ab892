"""A 64-bit checksum of raw bytes: Fletcher's two sums over 64-bit words, on the CPU at the speed of reading.

J. G. Fletcher, "An Arithmetic Checksum for Serial Transmissions", IEEE Trans. Communications 30 (1982), with words of
64 bits and sums modulo 2^64: every flipped bit shows, and so do words that changed places.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

Array = Any


def checksum(buffer: Array) -> int:
    """Return the checksum of an array's bytes; it is C-contiguous."""
    raw = buffer.reshape(-1).view(np.uint8)
    if not isinstance(raw, np.ndarray):
        raw = raw.get()
    words = raw[: raw.size // 8 * 8].view(np.uint64) if raw.ctypes.data % 8 == 0 else None
    if words is None:
        raw = raw.copy()
        words = raw[: raw.size // 8 * 8].view(np.uint64)
    first, second = _sums()(words)
    tail = int.from_bytes(raw[words.size * 8 :].tobytes(), "little")
    first = (int(first) + tail) % (1 << 64)
    second = (int(second) + first + raw.size) % (1 << 64)
    mixed: int = (first * 0x9E3779B97F4A7C15 ^ second) % (1 << 64)
    return mixed


@cache
def _sums() -> Any:
    try:
        from numba import types

        from lowshard.compiled import compile_cached
    except ImportError:
        return _plain
    words = types.Array(types.uint64, 1, "C", readonly=True)
    pair = types.UniTuple(types.uint64, 2)
    return compile_cached(fletcher, pair(words))


def fletcher(words: Any) -> Any:
    """Return the sum of all words, and the sum of all such sums on the way."""
    first = np.uint64(0)
    second = np.uint64(0)
    for i in range(words.size):
        first = first + words[i]
        second = second + first
    return first, second


def _plain(words: Any) -> tuple[int, int]:
    if not words.size:
        return 0, 0
    with np.errstate(over="ignore"):
        weights = np.arange(words.size, 0, -1, dtype=np.uint64)
        return int(words.sum(dtype=np.uint64)), int((words * weights).sum(dtype=np.uint64))
