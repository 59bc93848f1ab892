"""MXFP8 quantisation on every engine, against a slow twin and an implementation that is not ours."""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import engines, mode
from support.mxfp8_twin import (
    COMBOS,
    DTYPES,
    EMAX,
    MAXIMUM,
    assert_holds,
    assert_like_twin,
    code_values,
    exact,
    moderate_blocks,
    random_fp32_blocks,
    slow_codes,
    slow_quantize,
    some_combos,
)
from support.recorded import independent_mxfp8

from lowshard.kernels import dequantize_mxfp8, quantize_mxfp8
from lowshard.kernels.plain import PlainEngine
from lowshard.kernels.runs import whole_array_runs

engine = engines.fixture()


def combos(name):
    return pytest.mark.parametrize(("elem", "mode_"), some_combos(name))


# ----------------------------------------------------------------------------------- every 16-bit pattern
@cache
def pattern_as_maximum(dtype):
    """Blocks [32768, 32]: every magnitude of a 16-bit type once as the maximum, both signs of it."""
    rng = np.random.default_rng(1)
    magnitude = np.arange(1 << 15)
    largest, spread = {"bfloat16": (0x7F7F, 24 << 7), "float16": (0x7BFF, 24 << 10)}[dtype]
    top = np.minimum(magnitude, largest)
    rest = np.maximum(top[:, None] - rng.integers(0, spread, (1 << 15, 6)), 0)
    bits = np.zeros((1 << 15, 32), np.uint16)
    bits[:, 0] = magnitude
    bits[:, 1] = magnitude | 0x8000
    bits[:, 2:8] = rest | (rng.integers(0, 2, rest.shape) << 15)
    return bits.view(DTYPES[dtype])


@cache
def twin_of_pattern_as_maximum(dtype, elem, mode_):
    return slow_quantize(exact(pattern_as_maximum(dtype)), elem, mode_)


@combos("maxima")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_pattern_as_block_maximum_is_as_the_twin(engine, dtype, elem, mode_):
    x = pattern_as_maximum(dtype)
    codes, scale = twin_of_pattern_as_maximum(dtype, elem, mode_)
    rows = engine.rows(x, 2048, f"maxima {dtype} {elem} {mode_}")
    assert_holds(quantize_mxfp8(x[rows], elem, mode_), codes[rows], scale[rows])


# ------------------------------------------------------------------- an implementation that is not ours
@cache
def all_bf16_patterns():
    """bf16 bits [90916, 32]: every pattern as a block maximum, then as an element under twelve maxima."""
    return independent_mxfp8().input_allbf16(np.random.Generator(np.random.PCG64(7)))


@cache
def independently_quantized(elem, mode_):
    return independent_mxfp8().quantize(all_bf16_patterns(), "bf16", elem, mode_)


def test_all_bf16_patterns_are_as_an_independent_table_search_implementation_has_them(engine):
    x = all_bf16_patterns().view(ml_dtypes.bfloat16)
    for elem, mode_ in engine.pick(some_combos("independent"), mode.sample(COMBOS, 1, "independent")):
        codes, scale = independently_quantized(elem, mode_)
        assert_holds(quantize_mxfp8(x, elem, mode_), codes, scale.reshape(-1))


# ------------------------------------------------------------------------------------------- random blocks
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("elem", "mode_"), mode.sample(COMBOS, 1, "a million blocks"))
def test_a_million_random_blocks_are_as_the_plain_engine_and_a_sample_as_the_twin(engine, dtype, elem, mode_):
    rng = mode.rng(f"a million blocks {dtype} {elem} {mode_}")
    usual, few = (1_000_000, 20_000) if dtype == "float32" else (200_000, 10_000)
    usual = usual if mode.full() else usual // 4
    todo = 20_000 if engine.label == "plain" else engine.pick(usual, few)
    while todo > 0:
        blocks = min(todo, 50_000)
        todo -= blocks
        with np.errstate(over="ignore", invalid="ignore"):
            x = random_fp32_blocks(rng.integers(1 << 32), blocks).astype(DTYPES[dtype])
        q = quantize_mxfp8(x, elem, mode_)
        if engine.label != "plain":
            codes, scale = np.empty_like(q.data), np.empty_like(q.scale)
            runs = whole_array_runs(x.shape, x.strides, codes.strides, x.itemsize, 1)
            PlainEngine().quantize(x, codes, scale, runs, elem, mode_, 0)
            assert_holds(q, codes, scale[:, 0])
        some = slice(0, 1000)
        codes, scale = slow_quantize(exact(x[some]), elem, mode_)
        assert_holds(quantize_mxfp8(x[some], elem, mode_), codes, scale)
        np.testing.assert_array_equal(q.data[some], codes)


@given(
    st.integers(0, (1 << 32) - 1), st.sampled_from(list(DTYPES)), st.sampled_from(COMBOS), st.integers(1, 130)
)
def test_random_blocks_of_any_number_are_as_the_twin(seed, dtype, combo, blocks):
    with np.errstate(over="ignore", invalid="ignore"):
        x = random_fp32_blocks(seed, blocks).astype(DTYPES[dtype])
    assert_like_twin(x, *combo)


@combos("ties")
def test_fp32_ties_and_their_neighbours_are_as_the_twin(elem, mode_):
    finite = code_values(elem)[:0x80][np.isfinite(code_values(elem)[:0x80])]
    points = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2]).astype(np.float32)
    points = np.concatenate(
        [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))]
    )
    points = points[points <= MAXIMUM[elem]]
    points = np.concatenate([points, -points, np.zeros(-2 * len(points) % 31, np.float32)]).reshape(-1, 31)
    blocks = np.concatenate([np.full((len(points), 1), MAXIMUM[elem], np.float32), points], axis=1)
    for exponent in (-141, -135, -126, -118, -40, 0, 100, 127 - EMAX[elem]):  # down to fp32 subnormals
        with np.errstate(under="ignore"):
            assert_like_twin(np.ldexp(blocks, exponent), elem, mode_)


@combos("boundaries")
def test_fp32_maxima_around_every_mode_boundary_are_as_the_twin(elem, mode_):
    significand = np.array([1.0, 1.5, 1.75, 2 - 2.0**-3, 2 - 2.0**-4, 2.0], np.float32)
    maxima = np.ldexp(significand[:, None], np.arange(-149, 127)[None, :]).astype(np.float32).reshape(-1)
    maxima = np.concatenate(
        [maxima, np.nextafter(maxima, np.float32(np.inf)), np.nextafter(maxima, np.float32(0))]
    )
    blocks = np.zeros((len(maxima), 32), np.float32)
    blocks[:, 5] = -maxima
    blocks[:, 6:] = np.random.default_rng(2).uniform(-1, 1, (len(maxima), 26)) * maxima[:, None]
    assert_like_twin(blocks, elem, mode_)


@combos("subnormals")
def test_fp32_subnormals_are_as_the_twin_under_every_scale_that_can_see_them_and_beyond(elem, mode_):
    tiny = np.array(
        [1, 2, 3, 0x200000, 0x3FFFFF, 0x400000, 0x400001, 0x600000, 0x7FFFFF, 0x800000], np.uint32
    )
    maxima = np.arange(0, 50, dtype=np.uint32)[:, None] << 23  # scale bytes 0 to about 40
    blocks = np.zeros((len(maxima), 32), np.uint32)
    blocks[:, :10] = np.minimum(tiny, np.maximum(maxima, 0x7FFFFF))
    blocks[:, 10:20] = blocks[:, :10] | (1 << 31)
    blocks[:, 31:] = maxima
    assert_like_twin(blocks.view(np.float32), elem, mode_)


# ------------------------------------------------------------------------------------ facts worked by hand


def test_defaults_are_e4m3_and_rceil_and_bfloat16():
    x = random_fp32_blocks(7)
    q = quantize_mxfp8(x)
    assert q.elem == "e4m3"
    np.testing.assert_array_equal(q.data, quantize_mxfp8(x, "e4m3", "rceil").data)
    assert dequantize_mxfp8(q).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
@combos("zeros")
def test_zero_blocks_get_scale_zero_and_keep_their_signs(dtype, elem, mode_):
    x = np.zeros((2, 32), DTYPES[dtype])
    x[1, ::2] = -0.0
    q = quantize_mxfp8(x, elem, mode_)
    assert q.scale.tolist() == [[0], [0]]
    assert q.data[0].tolist() == [0] * 32
    assert q.data[1].tolist() == [0x80, 0] * 16


# Quiet and signalling NaN of both signs, and both infinities.
NON_FINITE = {
    "bfloat16": (0x7FC0, 0xFFC1, 0x7F81, 0xFFBF, 0x7F80, 0xFF80),
    "float16": (0x7E00, 0xFE01, 0x7C01, 0xFDFF, 0x7C00, 0xFC00),
    "float32": (0x7FC00000, 0xFFC00001, 0x7F800001, 0xFFBFFFFF, 0x7F800000, 0xFF800000),
}


@pytest.mark.parametrize("dtype", DTYPES)
@combos("not finite")
def test_one_nan_or_inf_anywhere_makes_its_whole_block_nan_and_no_other(dtype, elem, mode_):
    lane = np.arange(32)
    for bad in NON_FINITE[dtype]:
        x = np.ones((32, 3, 32), DTYPES[dtype])
        bits = x.view(np.uint32 if dtype == "float32" else np.uint16)
        bits[lane, 1, lane] = bad  # row i: lane i of its middle block
        q = quantize_mxfp8(x.reshape(32, 96), elem, mode_, min_scale_byte=1)
        assert (q.scale[:, 1] == 0xFF).all(), hex(bad)
        assert (q.data[:, 32:64] == 0x7F).all(), hex(bad)
        assert (q.scale[:, [0, 2]] < 0xFF).all()
        values = dequantize_mxfp8(q, "float32")
        assert np.isnan(values[:, 32:64]).all()
        assert (values[:, np.r_[0:32, 64:96]] == 1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@combos("lowest scale")
def test_min_scale_byte_lifts_low_scales_and_elements_follow(dtype, elem, mode_):
    x = moderate_blocks(5, 200, dtype)
    plain = quantize_mxfp8(x, elem, mode_)
    for lowest in (1, 60, 127, 254):
        lifted = quantize_mxfp8(x, elem, mode_, min_scale_byte=lowest)
        np.testing.assert_array_equal(lifted.scale, np.maximum(plain.scale, lowest))
        high = plain.scale[:, 0] >= lowest
        np.testing.assert_array_equal(lifted.data[high], plain.data[high])
        assert (~high).any()  # what follows is about something
        np.testing.assert_array_equal(
            lifted.data[~high], slow_codes(exact(x[~high]) / 2.0 ** (lowest - 127), elem)
        )
        zeros = quantize_mxfp8(np.zeros(32, DTYPES[dtype]), elem, mode_, min_scale_byte=lowest)
        assert zeros.scale.tolist() == [lowest]
