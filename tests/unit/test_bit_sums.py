"""Weighted sums of bits: both engines agree, parts add up, and what changes shows."""

from __future__ import annotations

import numpy as np
import pytest
from support import mode

from lowshard.box import Box, full_box
from lowshard.kernels import bit_sums as front
from lowshard.kernels import unit_weights
from lowshard.kernels.bit_sums import content_sum
from lowshard.kernels.cpu import bit_digest
from lowshard.kernels.engine import host_engine
from lowshard.kernels.plain import PlainEngine
from lowshard.kernels.runs import whole_array_runs

DTYPES = ("uint8", "int16", "float32", "float64", "complex128")


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    size = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
    return rng.integers(0, 256, size, dtype=np.uint8).view(dtype).reshape(shape)


def _shape(rng: np.random.Generator) -> tuple[int, ...]:
    if rng.random() < 0.3:
        return int(rng.integers(1, 90)), int(rng.integers(1, 700))
    return tuple(rng.integers(0 if rng.random() < 0.1 else 1, 8, rng.integers(0, 6)).tolist())


def _part(x: np.ndarray, box: Box) -> np.ndarray:
    return x[(*(slice(a, b) for a, b in box), ...)]


def _tree(rng: np.random.Generator, box: Box, depth: int) -> list[Box]:
    """Cut a box into disjoint boxes that cover it."""
    if depth == 0 or not box:
        return [box]
    dim = int(rng.integers(len(box)))
    at = int(rng.integers(box[dim][0], box[dim][1] + 1))
    halves = [(*box[:dim], side, *box[dim + 1 :]) for side in ((box[dim][0], at), (at, box[dim][1]))]
    return [one for half in halves for one in _tree(rng, half, depth - 1)]


def test_parts_add_up_in_both_engines(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = (host_engine(), PlainEngine())
    for _ in range(3000 if mode.full() else 120):
        shape = _shape(rng)
        x = _random(rng, shape, str(rng.choice(DTYPES)))
        whole = content_sum(x, full_box(shape), shape)
        total = np.zeros(2, np.uint32)
        for box in _tree(rng, full_box(shape), int(rng.integers(0, 4))):
            engine = engines[int(rng.integers(2))]
            monkeypatch.setattr(front, "host_engine", lambda engine=engine: engine)
            part = _part(x, box)
            total += content_sum(np.array(part, order="F") if rng.random() < 0.5 else part, box, shape)
        assert (total == whole).all(), (shape, x.dtype)


def test_where_an_array_begins_does_not_matter(rng: np.random.Generator) -> None:
    """Lines of memory are read whole, and what of them is beside the array does not count."""
    for dtype in ("uint8", "uint16", "float32"):
        kind, shape = np.dtype(dtype), (3, 1501)
        x = _random(rng, shape, dtype)
        whole = content_sum(x, full_box(shape), shape)
        for begin in range(66):
            room = rng.integers(0, 256, x.nbytes + 200, dtype=np.uint8)
            moved = np.ndarray(shape, kind, room, begin)
            moved[...] = x
            assert (content_sum(moved, full_box(shape), shape) == whole).all(), (dtype, begin)
            n = int(rng.integers(1, 80))
            few = content_sum(moved[1:2, :n], ((1, 2), (0, n)), shape)
            assert (few == content_sum(x[1:2, :n].copy(), ((1, 2), (0, n)), shape)).all(), (dtype, begin, n)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float64"])
def test_long_runs_are_read_in_several_places_at_a_time(rng: np.random.Generator, dtype: str) -> None:
    """Runs as long as the blocks of all places, a unit less and more; as far apart as places are, and farther."""
    itemsize, block = np.dtype(dtype).itemsize, unit_weights.BLOCK_UNITS
    # At other places than its multiples an array is summed the plain way.
    width = unit_weights.unit_bytes(itemsize)
    elem_units = itemsize // width
    several, farthest = bit_digest.STREAMS * block, bit_digest.STREAMS * block * bit_digest.MOST_APART
    for units in (several, 2 * several + 3 * block, farthest, farthest + several + block // 2):
        for elems in (units // elem_units + more for more in (-1, 0, 1)):
            room = rng.integers(0, 256, (elems + 8) * itemsize, dtype=np.uint8)
            x = room[width * int(rng.integers(8 // width)) :][: elems * itemsize].view(dtype)
            whole, first = (elems + 2 * block,), int(rng.choice([0, block, int(rng.integers(2 * block))]))
            box = ((first, first + elems),)
            runs = whole_array_runs(x.shape, x.strides, (1,), itemsize, 1)
            plain = PlainEngine().bit_digest(x, runs, first)
            assert (content_sum(x, box, whole) == plain).all(), (elems, first)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_flipped_bit_and_a_swap_show_wherever_they_are(rng: np.random.Generator, dtype: str) -> None:
    shape = (40, 310)
    x = _random(rng, shape, dtype)
    before = content_sum(x, full_box(shape), shape)
    flat = x.reshape(-1)
    raw = flat.view(np.uint8)
    for _ in range(2000 if mode.full() else 200):
        at, bit = int(rng.integers(raw.size)), int(rng.integers(8))
        raw[at] ^= 1 << bit
        assert (content_sum(x, full_box(shape), shape) != before).all()
        raw[at] ^= 1 << bit
        i, j = rng.integers(flat.size, size=2).tolist()
        if flat[i].tobytes() != flat[j].tobytes():
            flat[[i, j]] = flat[[j, i]]
            assert (content_sum(x, full_box(shape), shape) != before).any()
            flat[[i, j]] = flat[[j, i]]


def test_equal_neighbours_of_small_values_that_change_places_in_pairs_show(rng: np.random.Generator) -> None:
    """The worst case of a weighted sum: differences of one, whose weights may cancel."""
    x = rng.integers(0, 2, 4096).astype(np.uint8)
    seen = {tuple(content_sum(x, full_box(x.shape), x.shape).tolist())}
    kept = {x.tobytes()}
    for _ in range(20_000 if mode.full() else 2_000):
        ones, zeros = np.flatnonzero(x == 1), np.flatnonzero(x == 0)
        x[rng.choice(ones, 2, replace=False)] = 0
        x[rng.choice(zeros, 2, replace=False)] = 1
        kept.add(x.tobytes())
        seen.add(tuple(content_sum(x, full_box(x.shape), x.shape).tolist()))
    assert len(seen) == len(kept)


def test_weights_are_odd_and_differ() -> None:
    for row in unit_weights.table().view(np.uint16):
        assert (row % 2 == 1).all()
        assert len(set(row.tolist())) == unit_weights.BLOCK_UNITS
    factors = unit_weights.factors(np.arange(100_000))
    assert (factors % 2 == 1).all()
    assert len(np.unique(factors.view(np.uint64))) == 100_000
