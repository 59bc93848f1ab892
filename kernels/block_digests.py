"""Digests of blocks of an array: by them it is told which blocks have changed, without a copy of what they held.

A block is one cache line or several; its bytes are little-endian words w[0..n) of 64 bits. A key is n random words k
and two random numbers A and B of 128 bits:

```
S      = sum over even j of ((w[j] + k[j]) mod 2^64) * ((w[j+1] + k[j+1]) mod 2^64), mod 2^128
digest = ((S mod 2^64) * A + (S div 2^64) * B mod 2^128) div 2^64
```

Two blocks that differ have one digest with a probability of 2^-63 at most, whatever they hold, since the key is secret.
Sources: NH of UMAC (Black et al., CRYPTO 1999) with words of 64 bits, and multiply-shift for vectors (Dietzfelbinger,
STACS 1996), whose probabilities of 2^-64 add up.
"""

from __future__ import annotations

import secrets
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowshard.kernels.buffer import Array

LINE_BYTES = 64
DIGEST_LINES = (1, 2)
"""Cache lines of the blocks whose digests are made by compiled code."""
DIGEST_BYTES = 8
_FOLD_WORDS = 4
"""A and B, the low word of each first."""
_PIECE_BLOCKS = 1 << 16
"""Blocks that are looked at together where nothing is compiled."""
_LOW = np.uint64((1 << 32) - 1)
_HALF = np.uint64(32)
Words = npt.NDArray[np.uint64]


def new_key(block_bytes: int) -> Words:
    """Return a key for blocks of so many bytes, a multiple of 64: k, A, B."""
    count = block_bytes // 8 + _FOLD_WORDS
    return np.frombuffer(secrets.token_bytes(8 * count), np.uint64)


class BlockDigests(NamedTuple):
    """What is kept of blocks.

    Attributes:
        key: secret; for blocks of their size.
        values: uint64 [blocks], where the array lies; made anew by each search.
    """

    key: Words
    values: Array


def plain_digests(blocks: npt.NDArray[np.uint8], key: Words) -> Words:
    """Return the digests of blocks, uint64 [blocks].

    Args:
        blocks: uint8 [blocks, bytes], C-contiguous.
        key: for blocks of so many bytes.
    """
    made = np.empty(len(blocks), np.uint64)
    words = blocks.view(np.uint64)
    for at in range(0, len(blocks), _PIECE_BLOCKS):
        made[at : at + _PIECE_BLOCKS] = _digests(words[at : at + _PIECE_BLOCKS], key)
    return made


def _digests(words: Words, key: Words) -> Words:
    count = words.shape[1]
    low, high = np.zeros(len(words), np.uint64), np.zeros(len(words), np.uint64)
    for j in range(0, count, 2):
        more = _product(words[:, j] + key[j], words[:, j + 1] + key[j + 1])
        low, high = _sum((low, high), more)
    a_low, a_high, b_low, b_high = key[count:]
    one, other = _product(low, a_low), _product(high, b_low)
    _, folded = _sum((one[0], one[1] + low * a_high), (other[0], other[1] + high * b_high))
    return folded


def _product(a: Words, b: Any) -> tuple[Words, Words]:
    """Return the low and the high words of products of words."""
    a0, a1, b0, b1 = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    cross, other = a1 * b0, a0 * b1
    middle = (a0 * b0 >> _HALF) + (cross & _LOW) + (other & _LOW)
    return a * b, a1 * b1 + (cross >> _HALF) + (other >> _HALF) + (middle >> _HALF)


def _sum(a: tuple[Words, Words], b: tuple[Words, Words]) -> tuple[Words, Words]:
    """Return sums of pairs of words, mod 2^128."""
    low = a[0] + b[0]
    return low, a[1] + b[1] + (low < a[0])
