"""The 128x4 layout of scale bytes on every engine, byte by byte from its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import engines
from support.places import places

from lowshard.kernels import swizzle_scales, unswizzle_scales

engine = engines.fixture(("plain", "numba", "cuda on host"))


def slow_swizzle(scale):
    """Place one byte at a time; zero where none falls."""
    rows, cols = scale.shape
    tile_cols = -(-cols // 4)
    expected = np.zeros(-(-rows // 128) * tile_cols * 512, np.uint8)
    for row in range(rows):
        for col in range(cols):
            tile = row // 128 * tile_cols + col // 4
            inside = (row % 32) * 16 + (row % 128) // 32 * 4 + col % 4
            expected[tile * 512 + inside] = scale[row, col]
    return expected


def random_scale(shape):
    return np.random.default_rng(9).integers(1, 255, shape, dtype=np.uint8)


@pytest.mark.parametrize("shape", [(1, 1), (32, 4), (128, 4), (129, 5), (300, 10), (256, 12), (0, 3), (3, 0)])
def test_swizzled_scales_lie_where_the_layout_says_and_come_back(shape):
    scale = random_scale(shape)
    expected = slow_swizzle(scale)
    swizzled = swizzle_scales(scale)
    np.testing.assert_array_equal(swizzled, expected)
    np.testing.assert_array_equal(unswizzle_scales(swizzled, *shape), scale)
    np.testing.assert_array_equal(swizzle_scales(np.asfortranarray(scale)), expected)


@given(st.data(), st.integers(1, 140), st.integers(1, 9))
def test_scales_at_any_place_are_read_and_written_in_place(data, rows, cols):
    scale = random_scale((rows, cols))
    expected = slow_swizzle(scale)
    view = data.draw(places((rows, cols), np.uint8)).holding(scale)
    out = np.full(len(expected) + 3, 0xAA, np.uint8)
    window = out[1:-2]
    assert swizzle_scales(view, out=window) is window
    np.testing.assert_array_equal(window, expected)
    assert out[[0, -2, -1]].tolist() == [0xAA] * 3

    place = data.draw(places((rows, cols), np.uint8))
    arena = place.arena(1)
    before = arena.copy()
    target = place.view(arena)
    assert unswizzle_scales(window, rows, cols, out=target) is target
    place.expect(before, arena, scale)


def test_padding_is_written_as_zero_and_dropped_unread():
    swizzled = swizzle_scales(np.full((33, 5), 9, np.uint8), out=np.full(1024, 0xAA, np.uint8))
    assert np.count_nonzero(swizzled) == 33 * 5
    swizzled[swizzled == 0] = 77
    assert (unswizzle_scales(swizzled, 33, 5) == 9).all()
