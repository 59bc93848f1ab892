"""The checksum of pieces on their way: whatever changes within a word shows, wherever it lies."""

from __future__ import annotations

import numpy as np
import pytest

from lowshard.transfer.piece_checksum import _plain, checksum, sums


@pytest.mark.parametrize("size", [1, 8, 41, 264])
def test_every_bit_counts(rng: np.random.Generator, size: int) -> None:
    raw = rng.integers(0, 256, size).astype(np.uint8)
    found = {checksum(raw)}
    for bit in range(8 * size):
        raw[bit // 8] ^= 1 << bit % 8
        found.add(checksum(raw))
        raw[bit // 8] ^= 1 << bit % 8
    assert len(found) == 1 + 8 * size


def test_places_and_lengths_count(rng: np.random.Generator) -> None:
    words = rng.integers(0, 2**64, 32, np.uint64)
    found = {checksum(words)}
    for i in range(1, 32):
        words[[0, i]] = words[[i, 0]]
        found.add(checksum(words))
        words[[0, i]] = words[[i, 0]]
    found |= {checksum(np.zeros(n, np.uint8)) for n in range(40)}
    top = np.uint64(1 << 63)
    for i in range(1, 32):  # two flips that a plain sum of words would not see
        words[[0, i]] ^= top
        found.add(checksum(words))
        words[[0, i]] ^= top
    assert len(found) == 32 + 40 + 31


def test_it_is_the_same_without_numba_and_wherever_bytes_lie(rng: np.random.Generator) -> None:
    for size in (0, 1, 7, 8, 1000, 4099):
        raw = rng.integers(0, 256, size + 8).astype(np.uint8)
        words = raw[: size // 8 * 8].view(np.uint64)
        assert int(sums()(words)) == _plain(words)
        assert len({checksum(np.concatenate([raw[:i], raw[:size]])[i:]) for i in range(8)}) == 1
