"""A 64-bit checksum of raw bytes, at the speed of reading: by the CPU, or of many pieces by the GPU that has them.

Each word of 64 bits is mixed with its place by steps that can be undone (add, xor with a shift of itself, multiply by
an odd number), and the results are added up. So whatever changes within one word shows, always: a sum of which one
term differs differs. What changes in several words, or changes places, shows but for one case in 2^64. The steps are
those that hash functions end with (A. Appleby, MurmurHash3, fmix64; G. Steele et al., "Fast splittable pseudorandom
number generators", OOPSLA 2014).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from lowshard.kernels.cuda.cuda_engine import CudaEngine
from lowshard.kernels.engine import engine_for
from lowshard.transfer.buckets import Bucket

Array = Any

_STEP, _FACTOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
_FIRST_SHIFT, _LAST_SHIFT = 32, 29
_MASK = (1 << 64) - 1


def checksum(buffer: Array) -> int:
    """Return the checksum of the bytes of an array of the host; it is C-contiguous."""
    raw = buffer.reshape(-1).view(np.uint8)
    if raw.ctypes.data % 8:
        raw = raw.copy()
    words = raw[: raw.size // 8 * 8].view(np.uint64)
    tail = int.from_bytes(raw[words.size * 8 :].tobytes(), "little")
    ends = _mixed(tail, words.size) + _mixed(raw.size, words.size + 1)
    return (int(sums()(words)) + ends) & _MASK


def seal(slot: Array, bucket: Bucket, version: int, sums: Array, expected: Array | None = None) -> None:
    """Write a version and the checksums of a bucket's pieces, uint64, less what is expected. No GPU is waited for."""
    if not isinstance(slot, np.ndarray):
        cast(CudaEngine, engine_for(slot)).checksum(slot, sums, expected, bucket.runs, version)
        return
    parts = (slot[p.offset_bytes : p.offset_bytes + p.size_bytes] for p in bucket.pieces)
    sums[:] = np.array([version, *map(checksum, parts)], np.uint64)
    sums -= np.uint64(0) if expected is None else expected


def _mixed(word: int, place: int) -> int:
    word = (word + (place + 1) * _STEP) & _MASK
    word = (word ^ word >> _FIRST_SHIFT) * _FACTOR & _MASK
    return word ^ word >> _LAST_SHIFT


@cache
def sums() -> Any:
    """Return the compiled function, or the plain one where Numba is missing."""
    try:
        from lowshard.compiled import Signature, digest_of, load_native

        name = f"mixed_sum_{digest_of([Path(__file__)])}"
        call = load_native(name, lambda: reshard_mixed_sum, Signature(("uint64[1]",), "uint64")).call
    except ImportError:
        return _plain
    return lambda words: call(words.__array_interface__["data"][0], words.size)


def reshard_mixed_sum(words: Any) -> Any:
    """Return the sum of all words, each mixed with its place."""
    step, factor = np.uint64(_STEP), np.uint64(_FACTOR)
    first, last = np.uint64(_FIRST_SHIFT), np.uint64(_LAST_SHIFT)
    total, place = np.uint64(0), np.uint64(0)
    for i in range(words.size):
        place = place + step
        word = words[i] + place
        word = (word ^ (word >> first)) * factor
        total = total + (word ^ (word >> last))
    return total


def _plain(words: Any) -> int:
    places = np.arange(1, words.size + 1, dtype=np.uint64) * np.uint64(_STEP)
    mixed = words + places
    mixed = (mixed ^ mixed >> np.uint64(_FIRST_SHIFT)) * np.uint64(_FACTOR)
    return int((mixed ^ mixed >> np.uint64(_LAST_SHIFT)).sum(dtype=np.uint64))
