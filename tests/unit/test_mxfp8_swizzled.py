"""Scales that quantising writes in the 128x4 layout: the bytes of quantising to rows and swizzling, on every engine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import engines
from support.mxfp8_twin import COMBOS, DTYPES, ELEMS, moderate_blocks, random_fp32_blocks
from support.places import places

from lowshard.kernels import SwizzledMXFP8, dequantize_mxfp8, quantize_mxfp8, swizzle_scales

engine = engines.fixture()

# Whole tiles, and every kind of ragged edge: rows, columns, both, less than a tile, and none at all.
SHAPES = [(128, 128), (256, 256), (129, 128), (128, 160), (300, 352), (31, 96), (3, 4128), (0, 64), (5, 0)]


def matrix(shape, dtype="float32", seed=3):
    """Blocks of every scale, zeros, NaN and Inf among them."""
    blocks = int(np.prod(shape)) // 32
    x = random_fp32_blocks(seed, blocks) if dtype == "float32" else moderate_blocks(seed, blocks, dtype)
    return x.reshape(shape)


def assert_two_steps(got, x, *options):
    expected = quantize_mxfp8(x, *options)
    assert isinstance(got, SwizzledMXFP8)
    assert (got.shape, got.elem) == (x.shape, expected.elem)
    np.testing.assert_array_equal(got.data, expected.data)
    np.testing.assert_array_equal(got.scale, swizzle_scales(expected.scale))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elem", ELEMS)
def test_the_bytes_are_those_of_quantising_and_swizzling(shape, dtype, elem):
    x = matrix(shape, dtype)
    assert_two_steps(quantize_mxfp8(x, elem, scale_layout="128x4"), x, elem)


@pytest.mark.parametrize("combo", COMBOS)
@pytest.mark.parametrize("lowest", [0, 1, 130])
def test_every_mode_and_lowest_byte(combo, lowest):
    x = matrix((130, 160))
    q = quantize_mxfp8(x, *combo, min_scale_byte=lowest, scale_layout="128x4")
    assert_two_steps(q, x, *combo, None, lowest)


@pytest.mark.parametrize("streaming", [None, True, False])
def test_a_matrix_of_many_tiles(streaming, engine, monkeypatch):
    # Of Numba's engine: bands of 256 rows, and a last one of 76.
    monkeypatch.setattr("lowshard.kernels.cpu.cpu_engine.BAND_BYTES", 32 << 10)
    x = matrix(engine.pick((1100, 4096), (332, 1056)), "bfloat16")
    assert_two_steps(quantize_mxfp8(x, scale_layout="128x4", streaming=streaming), x)


@pytest.mark.parametrize("shape", SHAPES)
def test_out_is_written_whole_and_nothing_beside_it(shape):
    x = matrix(shape)
    made = quantize_mxfp8(x, scale_layout="128x4")
    space = np.full(made.data.size + made.scale.size + 9, 0xAA, np.uint8)
    data, scale = space[3 : 3 + made.data.size].reshape(shape), space[6 + made.data.size : -3]
    out = SwizzledMXFP8(data, scale)
    for _ in range(2):  # the second time over what the first one wrote
        assert quantize_mxfp8(x, out=out, scale_layout="128x4") is out
        np.testing.assert_array_equal(data, made.data)
        np.testing.assert_array_equal(scale, made.scale)
        scale[...] = 0xAA
    assert (space[:3] == 0xAA).all()
    assert (space[3 + made.data.size : 6 + made.data.size] == 0xAA).all()
    assert (space[-3:] == 0xAA).all()


@given(st.data(), st.sampled_from(list(DTYPES)), st.integers(1, 140), st.integers(1, 6), st.booleans())
def test_x_and_codes_may_lie_at_any_place(data, dtype, rows, columns, swap):
    shape = (rows, 32 * columns)
    x = matrix(shape, dtype)
    kind = np.dtype(DTYPES[dtype])
    source = data.draw(places(shape, kind.newbyteorder() if swap and dtype != "bfloat16" else kind)).holding(
        x
    )
    assert_two_steps(quantize_mxfp8(source, scale_layout="128x4"), x)

    place = data.draw(places(shape, np.uint8))
    arena = place.arena(1)
    before = arena.copy()
    made = quantize_mxfp8(x)
    out = SwizzledMXFP8(place.view(arena), np.full(swizzle_scales(made.scale).size, 0xAA, np.uint8))
    assert quantize_mxfp8(source, out=out, scale_layout="128x4") is out
    place.expect(before, arena, made.data)
    np.testing.assert_array_equal(out.scale, swizzle_scales(made.scale))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_those_of_the_scales_in_rows(shape, dtype):
    x = matrix(shape, "bfloat16")
    expected = dequantize_mxfp8(quantize_mxfp8(x), dtype)
    q = quantize_mxfp8(x, scale_layout="128x4")
    values = dequantize_mxfp8(q, dtype)
    assert values.dtype == expected.dtype
    np.testing.assert_array_equal(values.view(np.uint8), expected.view(np.uint8))
    out = np.zeros((shape[0], 2, shape[1]), DTYPES[dtype])[:, 1]
    assert dequantize_mxfp8(q, dtype, out) is out
    np.testing.assert_array_equal(np.ascontiguousarray(out).view(np.uint8), expected.view(np.uint8))
