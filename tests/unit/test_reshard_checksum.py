"""The checksum of pieces on their way: whatever changes within a word shows, wherever it lies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.cuda_host import host_cuda_engine
from support.gpu import needs_compiler

from lowshard.transfer.buckets import Bucket, Piece
from lowshard.transfer.mover import _plain, checksum, seal, sums


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


@needs_compiler
@pytest.mark.parametrize("most_ctas", [0, 1])
def test_a_gpu_has_the_same_and_tells_what_differs(rng: np.random.Generator, most_ctas: int) -> None:
    engine = host_cuda_engine()
    launcher: Any = engine._launcher
    launcher.most_ctas = most_ctas
    sizes = [*range(1, 34), 4088, 4095, 4096, 4097, 8192, 12_345, 3]
    offsets = np.cumsum([0, *(-(-size // 16) * 16 for size in sizes)]).tolist()
    pieces = [Piece(None, -1, (), *place) for place in zip(offsets, sizes, strict=False)]
    bucket = Bucket(tuple(pieces), offsets[-1])
    raw = launcher.to_device(rng.integers(0, 1 << 62, offsets[-1] // 8)).view(np.uint8)
    sums, wanted, differences = np.zeros((3, 1 + len(sizes)), np.uint64)
    seal(raw, bucket, (1 << 63) - 1, wanted)
    engine.checksum(raw, sums, None, bucket.runs, (1 << 63) - 1)
    np.testing.assert_array_equal(sums, wanted)
    raw[offsets[-3] + sizes[-2] - 1] ^= 1
    engine.checksum(raw, differences, sums, bucket.runs, 7)
    assert np.flatnonzero(differences).tolist() == [0, len(sizes) - 1]
    seal(raw, bucket, 7, wanted, sums)
    np.testing.assert_array_equal(differences, wanted)
