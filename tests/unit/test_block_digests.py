"""Digests of blocks: by the formula with Python's integers, in both twins, and what is found by them."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
from support import mode
from support.cuda_host import host_cuda_engine

from lowshard.box import full_box
from lowshard.kernels.block_digests import BlockDigests, new_key, plain_digests
from lowshard.kernels.change_search import Room
from lowshard.kernels.changes import ChangeBoxes
from lowshard.kernels.cuda.cuda_changes import DeviceSearch
from lowshard.kernels.plain_changes import PlainSearch
from lowshard.kernels.reference import BLOCK_ELEMS


def _by_formula(block: bytes, key: np.ndarray) -> int:
    words = [int.from_bytes(block[at : at + 8], "little") for at in range(0, len(block), 8)]
    k, (a0, a1, b0, b1) = [int(x) for x in key[:-4]], (int(x) for x in key[-4:])
    mask = (1 << 64) - 1
    total = sum(
        ((words[j] + k[j]) & mask) * ((words[j + 1] + k[j + 1]) & mask) for j in range(0, len(words), 2)
    )
    total &= (1 << 128) - 1
    folded = (total & mask) * (a0 | a1 << 64) + (total >> 64) * (b0 | b1 << 64)
    return (folded & (1 << 128) - 1) >> 64


no_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="g++, which builds the kernels, is not on PATH"
)
every_twin = pytest.mark.parametrize("twin", ["compiled", "plain", pytest.param("cuda", marks=no_compiler)])


def _twin(made: ChangeBoxes, name: str) -> ChangeBoxes:
    if name == "plain":
        made._search = lambda array: PlainSearch()  # type: ignore[method-assign]
    if name == "cuda":
        made._search = lambda array: DeviceSearch(host_cuda_engine(), np)  # type: ignore[method-assign]
    return made


@every_twin
@pytest.mark.parametrize("block_bytes", [64, 128, 320])
def test_digests_are_those_of_the_formula(rng: np.random.Generator, block_bytes: int, twin: str) -> None:
    """Random blocks, and those whose sums carry furthest: all bits set, or none."""
    key = new_key(block_bytes)
    blocks = rng.integers(0, 256, (500, block_bytes), dtype=np.uint8)
    blocks[0], blocks[1] = 0, 255
    keys = [key, np.full_like(key, 2**64 - 1), np.zeros_like(key)]
    for each in keys:
        wanted = [_by_formula(block.tobytes(), each) for block in blocks]
        assert plain_digests(blocks, each).tolist() == wanted
        boxes = _twin(ChangeBoxes([full_box(blocks.shape)], 1, block_bytes), twin)
        kept = BlockDigests(each, np.zeros(500, np.uint64))
        boxes.find_by_digests(blocks, kept, Room(), False, is_first=True)
        assert kept.values.tolist() == wanted


def test_a_key_is_never_the_same() -> None:
    assert len({new_key(64).tobytes() for _ in range(100)}) == 100


@every_twin
def test_what_differs_is_what_a_comparison_finds(rng: np.random.Generator, twin: str) -> None:
    """Of arrays of several boxes, strides and widths: the same text as of the blocks compared with a copy."""
    cases = (2000 if mode.full() else 150) // (10 if twin == "cuda" else 1)
    for _ in range(cases):
        itemsize = int(rng.choice([1, 2, 4, 8]))
        block = int(rng.choice([64, 128])) // itemsize
        shape = (*rng.integers(1, 6, int(rng.integers(0, 3))).tolist(), block * int(rng.integers(1, 70)))
        room = rng.integers(0, 256, (*shape[:-1], shape[-1] * itemsize + 64), dtype=np.uint8)
        begin = 8 * int(rng.integers(8))
        old = room[..., begin : begin + shape[-1] * itemsize].view(f"u{itemsize}")
        cut = block * int(rng.integers(0, shape[-1] // block + 1))
        some = [(*full_box(shape)[:-1], side) for side in ((cut, shape[-1]), (0, cut)) if side[0] < side[1]]
        new = old.copy()
        picked = rng.random(new.shape) < rng.choice([0, 0.001, 0.01, 0.3, 1])
        new[picked] ^= 1 << int(rng.integers(8 * itemsize))
        boxes, plain = ChangeBoxes(some, itemsize, block), ChangeBoxes(some, itemsize, block)
        wanted = plain.find(new, old, Room(), False)
        boxes = _twin(boxes, twin)
        kept = BlockDigests(new_key(block * itemsize), np.zeros(boxes.units, np.uint64))
        first = boxes.find_by_digests(old, kept, Room(), True, is_first=True)
        assert first.text is None
        found = boxes.find_by_digests(new, kept, Room(), False)
        assert found.text is not None
        assert wanted.text is not None
        assert found.text.tobytes() == wanted.text.tobytes()
        assert found[:3] == wanted[:3]
        assert found.changed_elems == found.units * block
        out = old.copy()
        boxes.write(out, found)
        assert out.tobytes() == new.tobytes()
        again = boxes.find_by_digests(new, kept, Room(), True)
        assert (again.units, again.changed_elems) == (0, 0)
        may_stop = boxes.find_by_digests(old, kept, Room(), True)
        assert (may_stop.text is None) == (plain.find(old, new, Room(), True).text is None)


def test_every_flipped_bit_and_every_exchange_is_found(rng: np.random.Generator) -> None:
    """Whatever bit of a block flips, words that change places, and what adds up to nothing."""
    key = new_key(64)
    block = rng.integers(0, 256, 64, dtype=np.uint8)
    others = []
    for bit in range(512):
        other = block.copy()
        other[bit // 8] ^= 1 << bit % 8
        others.append(other)
    words = block.view(np.uint64)
    for i in range(8):
        for j in range(i):
            swapped, shifted = words.copy(), words.copy()
            swapped[[i, j]] = swapped[[j, i]]
            shifted[i] ^= np.uint64(1 << 63)
            shifted[j] ^= np.uint64(1 << 63)
            others += [swapped.view(np.uint8), shifted.view(np.uint8)]
    digests = plain_digests(np.stack([block, *others]), key)
    assert len(set(digests.tolist())) == 1 + len(others)


def test_one_bit_of_an_mxfp8_tensor_costs_one_block() -> None:
    """Of a width that no compiled code is for as well."""
    for itemsize, block in ((2, BLOCK_ELEMS), (4, BLOCK_ELEMS), (4, 3 * BLOCK_ELEMS)):
        array = np.zeros((64, 12 * BLOCK_ELEMS), f"u{itemsize}")
        boxes = ChangeBoxes([full_box(array.shape)], itemsize, block)
        kept = BlockDigests(new_key(boxes.unit_bytes), np.empty(boxes.units, np.uint64))
        boxes.find_by_digests(array, kept, Room(), True, is_first=True)
        array[63, 17] ^= 1
        found: Any = boxes.find_by_digests(array, kept, Room(), True)
        assert (found.units, found.changed_elems) == (1, block)
        assert found.text.size <= boxes.unit_bytes + 3
