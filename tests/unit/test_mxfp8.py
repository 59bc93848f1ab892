"""MXFP8 against a slow twin: every code tried for every element, every exponent for every scale."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lowshard
from lowshard.errors import BufferMismatchError, DTypeError, KernelError, LowshardError
from lowshard.kernels import (
    MXFP8Tensor,
    dequantize_mxfp8,
    quantize_mxfp8,
    reference,
    swizzle_scales,
    unswizzle_scales,
)

ELEMS = ("e4m3", "e5m2")
MODES = ("rceil", "floor", "even", "ceil")
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
BITS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
combos = pytest.mark.parametrize(("elem", "mode"), [(e, m) for e in ELEMS for m in MODES])

MANTISSA_BITS = {"e4m3": 3, "e5m2": 2}
BIAS = {"e4m3": 7, "e5m2": 15}
EMAX = {"e4m3": 8, "e5m2": 15}
MAXIMUM = {"e4m3": 448.0, "e5m2": 57344.0}


# ------------------------------------------------------------------------------------------ the slow twin
@cache
def code_values(elem):
    """Value of each of the 256 codes, straight from the definition of the format."""
    m, bias = MANTISSA_BITS[elem], BIAS[elem]
    values = []
    for code in range(256):
        sign, field, mantissa = code >> 7, (code & 0x7F) >> m, code & (2**m - 1)
        if elem == "e4m3" and code & 0x7F == 0x7F:
            value = float("nan")
        elif elem == "e5m2" and field == 31:
            value = float("nan") if mantissa else float("inf")
        elif field == 0:
            value = mantissa * 2.0 ** (1 - bias - m)
        else:
            value = (1 + mantissa / 2**m) * 2.0 ** (field - bias)
        values.append(-value if sign else value)
    return np.array(values)


def slow_codes(y, elem):
    """Try every finite positive code on every magnitude; the nearest wins, of two the even one."""
    magnitudes, inverse = np.unique(np.abs(y), return_inverse=True)
    positive = code_values(elem)[:0x80]
    codes = np.flatnonzero(np.isfinite(positive))
    chosen = np.empty(len(magnitudes), np.uint8)
    for start in range(0, len(magnitudes), 4096):
        part = magnitudes[start : start + 4096]
        distance = np.abs(part[:, None] - positive[codes][None, :])
        nearest = distance == distance.min(axis=1, keepdims=True)
        assert (nearest.sum(axis=1) <= 2).all()
        even_wins = np.where(nearest, 2 - (codes % 2), 0)  # 2 for even, 1 for odd, 0 for farther codes
        chosen[start : start + 4096] = codes[even_wins.argmax(axis=1)]
    return chosen[inverse].reshape(y.shape) | (np.signbit(y).astype(np.uint8) << 7)


def slow_scales(amax, elem, mode):
    """Try every exponent from -127 to 127 and take the one that the definition of the mode names."""
    unique, inverse = np.unique(amax, return_inverse=True)
    power = np.ldexp(1.0, np.arange(-127, 128))
    if mode == "even":  # round half up to the width of the element's mantissa first
        fraction, exponent = np.frexp(unique)
        steps = 2.0 ** (MANTISSA_BITS[elem] + 1)
        unique = np.ldexp(np.floor(fraction * steps + 0.5) / steps, exponent)
    if mode in ("floor", "even"):  # the largest power of two whose 2^emax-fold is not above
        count = (power[None, :] * 2.0 ** EMAX[elem] <= unique[:, None]).sum(axis=1)
        byte = np.maximum(count - 1, 0)
    else:  # the smallest power of two under which the maximum stays within a limit
        limit = MAXIMUM[elem] if mode == "rceil" else 2.0 ** EMAX[elem]
        byte = (power[None, :] * limit < unique[:, None]).sum(axis=1)
    return byte[inverse].astype(np.uint8)


def slow_quantize(v, elem, mode):
    """Quantise float64 blocks [blocks, 32]; every step is exact in float64."""
    finite = np.isfinite(v).all(axis=1)
    safe = np.where(finite[:, None], v, 0.0)
    scale = slow_scales(np.abs(safe).max(axis=1), elem, mode)
    codes = slow_codes(safe / np.ldexp(1.0, scale.astype(int) - 127)[:, None], elem)
    scale[~finite] = 0xFF
    codes[~finite] = 0x7F
    return codes, scale


def exact(x):
    """float64 values of an array, without a warning for signalling NaN."""
    with np.errstate(invalid="ignore"):
        return x.astype(np.float32).astype(np.float64)


def assert_like_twin(x, elem, mode):
    q = quantize_mxfp8(x, elem, mode)
    codes, scale = slow_quantize(exact(x).reshape(-1, 32), elem, mode)
    np.testing.assert_array_equal(q.scale.reshape(-1), scale)
    np.testing.assert_array_equal(q.data.reshape(-1, 32), codes)
    assert (q.shape, q.elem) == (x.shape, elem)


def random_fp32_blocks(seed, blocks=600):
    """fp32 blocks over the whole exponent range, subnormals, zeros and non-finite values among them."""
    rng = np.random.default_rng(seed)
    top = rng.integers(0, 255, (blocks, 1))
    field = np.clip(top - rng.integers(0, 30, (blocks, 32)), 0, 254)
    bits = (field << 23) | rng.integers(0, 1 << 23, (blocks, 32)) | (rng.integers(0, 2, (blocks, 32)) << 31)
    bits = np.where(rng.random((blocks, 32)) < 0.05, bits & (1 << 31), bits)
    odd = rng.random((blocks, 32)) < 0.001
    bits = np.where(odd, rng.choice([0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00000], bits.shape), bits)
    return bits.astype(np.uint32).view(np.float32)


# ------------------------------------------------------------------------------- quantise against the twin
@combos
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_pattern_as_block_maximum_is_as_the_twin(dtype, elem, mode):
    rng = np.random.default_rng(1)
    magnitude = np.arange(1 << 15)
    largest, spread = {"bfloat16": (0x7F7F, 24 << 7), "float16": (0x7BFF, 24 << 10)}[dtype]
    top = np.minimum(magnitude, largest)
    rest = np.maximum(top[:, None] - rng.integers(0, spread, (1 << 15, 6)), 0)
    bits = np.zeros((1 << 15, 32), np.uint16)
    bits[:, 0] = magnitude
    bits[:, 1] = magnitude | 0x8000
    bits[:, 2:8] = rest | (rng.integers(0, 2, rest.shape) << 15)
    assert_like_twin(bits.view(DTYPES[dtype]), elem, mode)


@combos
@pytest.mark.parametrize("maximum", [0x0001, 0x007F, 0x04E0, 0x0A10, 0x3F80, 0x3FE1, 0x477F, 0x7F7F])
def test_every_bf16_pattern_as_element_is_as_the_twin(maximum, elem, mode):
    pattern = np.arange(31 * 2115, dtype=np.uint32).astype(np.uint16)  # all, and the first 29 again
    pattern[(pattern & 0x7FFF) > maximum] = 0
    bits = np.full((len(pattern) // 31, 32), maximum, np.uint16)
    bits[:, 1:] = pattern.reshape(-1, 31)
    assert_like_twin(bits.view(ml_dtypes.bfloat16), elem, mode)


@combos
@pytest.mark.parametrize("seed", range(3))
def test_random_fp32_over_the_whole_range_is_as_the_twin(seed, elem, mode):
    assert_like_twin(random_fp32_blocks(seed), elem, mode)


@combos
def test_fp32_ties_and_their_neighbours_are_as_the_twin(elem, mode):
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
            assert_like_twin(np.ldexp(blocks, exponent), elem, mode)


@combos
def test_fp32_maxima_around_every_mode_boundary_are_as_the_twin(elem, mode):
    significand = np.array([1.0, 1.5, 1.75, 2 - 2.0**-3, 2 - 2.0**-4, 2.0], np.float32)
    maxima = np.ldexp(significand[:, None], np.arange(-149, 127)[None, :]).astype(np.float32).reshape(-1)
    maxima = np.concatenate(
        [maxima, np.nextafter(maxima, np.float32(np.inf)), np.nextafter(maxima, np.float32(0))]
    )
    blocks = np.zeros((len(maxima), 32), np.float32)
    blocks[:, 5] = -maxima
    blocks[:, 6:] = np.random.default_rng(2).uniform(-1, 1, (len(maxima), 26)) * maxima[:, None]
    assert_like_twin(blocks, elem, mode)


@combos
def test_fp32_subnormals_are_as_the_twin_under_every_scale_that_can_see_them_and_beyond(elem, mode):
    tiny = np.array(
        [1, 2, 3, 0x200000, 0x3FFFFF, 0x400000, 0x400001, 0x600000, 0x7FFFFF, 0x800000], np.uint32
    )
    maxima = np.arange(0, 50, dtype=np.uint32)[:, None] << 23  # scale bytes 0 to about 40
    blocks = np.zeros((len(maxima), 32), np.uint32)
    blocks[:, :10] = np.minimum(tiny, np.maximum(maxima, 0x7FFFFF))
    blocks[:, 10:20] = blocks[:, :10] | (1 << 31)
    blocks[:, 31:] = maxima
    assert_like_twin(blocks.view(np.float32), elem, mode)


fp32_bits = st.one_of(
    st.integers(0, (1 << 32) - 1),
    st.sampled_from([0, 1 << 31, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001]),
    st.integers(0x3F000000, 0x43E10000),
)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(fp32_bits, min_size=32, max_size=32), st.sampled_from(ELEMS), st.sampled_from(MODES))
def test_any_fp32_block_is_as_the_twin(bits, elem, mode):
    assert_like_twin(np.array([bits], np.uint32).view(np.float32), elem, mode)


# ------------------------------------------------------------------------------------ facts worked by hand
@pytest.mark.parametrize(
    ("mode", "scale", "code"),
    [("floor", 127, 0x7E), ("even", 127, 0x7E), ("rceil", 128, 0x76), ("ceil", 128, 0x76)],
)
def test_a_maximum_of_449_is_clamped_only_by_the_modes_that_clamp(mode, scale, code):
    x = np.zeros(32, np.float32)
    x[0], x[1] = 449.0, -1.0
    q = quantize_mxfp8(x, "e4m3", mode)
    assert (q.scale.tolist(), q.data[0]) == ([scale], code)
    assert q.data[1] == (0xB8 if scale == 127 else 0xB0)  # -1 = 1.000 * 2^0, field 7; under scale 2 field 6


def test_defaults_are_e4m3_and_rceil_and_bfloat16():
    x = random_fp32_blocks(7)
    q = quantize_mxfp8(x)
    assert q.elem == "e4m3"
    np.testing.assert_array_equal(q.data, quantize_mxfp8(x, "e4m3", "rceil").data)
    assert dequantize_mxfp8(q).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
@combos
def test_zero_blocks_get_scale_zero_and_keep_their_signs(dtype, elem, mode):
    x = np.zeros((2, 32), DTYPES[dtype])
    x[1, ::2] = -0.0
    q = quantize_mxfp8(x, elem, mode)
    assert q.scale.tolist() == [[0], [0]]
    assert q.data[0].tolist() == [0] * 32
    assert q.data[1].tolist() == [0x80, 0] * 16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@combos
def test_one_nan_or_inf_makes_its_whole_block_nan_and_no_other(dtype, bad, elem, mode):
    x = np.ones(96, DTYPES[dtype])
    x[40] = bad
    q = quantize_mxfp8(x, elem, mode, min_scale_byte=1)
    assert q.scale[1] == 0xFF
    assert (q.data[32:64] == 0x7F).all()
    assert (q.scale[[0, 2]] < 0xFF).all()
    assert np.isnan(dequantize_mxfp8(q, "float32")[32:64]).all()
    assert (dequantize_mxfp8(q, "float32")[np.r_[0:32, 64:96]] == 1).all()


@combos
def test_min_scale_byte_lifts_low_scales_and_elements_follow(elem, mode):
    x = random_fp32_blocks(5)
    plain = quantize_mxfp8(x, elem, mode)
    lifted = quantize_mxfp8(x, elem, mode, min_scale_byte=60)
    np.testing.assert_array_equal(lifted.scale, np.maximum(plain.scale, 60))
    high = plain.scale[:, 0] >= 60
    np.testing.assert_array_equal(lifted.data[high], plain.data[high])
    scaled = exact(x[~high]) / 2.0 ** (60 - 127)
    np.testing.assert_array_equal(lifted.data[~high], slow_codes(scaled, elem))
    assert quantize_mxfp8(np.zeros(32, np.float32), elem, mode, min_scale_byte=1).scale.tolist() == [1]


# -------------------------------------------------------------------------------------------- dequantise
def round_once(value, precision_bits, emin, emax):
    """Round a fraction to a binary float: nearest, ties to even, overflow to Inf."""
    if value == 0:
        return 0.0
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if Fraction(2) ** exponent > value:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, emin) - precision_bits + 1)
    rounded = round(value / step) * step
    return float("inf") if rounded >= Fraction(2) ** (emax + 1) else float(rounded)


@pytest.mark.parametrize("elem", ELEMS)
@pytest.mark.parametrize(
    ("dtype", "form"),
    [("bfloat16", (8, -126, 127)), ("float16", (11, -14, 15)), ("float32", (24, -126, 127))],
)
def test_every_scale_and_code_dequantises_to_the_product_rounded_once(elem, dtype, form):
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scale = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    got = dequantize_mxfp8(MXFP8Tensor(codes, scale, elem), dtype)
    assert got.dtype == DTYPES[dtype]

    values = code_values(elem)
    rounded = cache(lambda value: round_once(value, *form))
    expected = np.empty((256, 256))
    for s in range(256):
        for c in range(256):
            if s == 255 or np.isnan(values[c]):
                expected[s, c] = np.nan
            elif np.isinf(values[c]):
                expected[s, c] = values[c]
            else:
                product = Fraction(abs(values[c])) * Fraction(2) ** (s - 127)
                expected[s, c] = np.copysign(rounded(product), values[c])
    got64 = got.astype(np.float64)
    np.testing.assert_array_equal(got64, expected)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got64)[~nan], np.signbit(expected)[~nan])
    assert len(np.unique(got.view(BITS[dtype])[nan])) == 1  # one NaN pattern, whatever the NaN code


@pytest.mark.parametrize("dtype", DTYPES)
@combos
def test_a_second_quantisation_keeps_every_value(dtype, elem, mode):
    rng = np.random.default_rng(11)
    exponent = rng.integers(-10, 8, (400, 1)) if dtype == "float16" else rng.integers(-90, 100, (400, 1))
    x = np.ldexp(rng.standard_normal((400, 64)), exponent).astype(DTYPES[dtype])
    once = dequantize_mxfp8(quantize_mxfp8(x, elem, mode), dtype)
    twice = dequantize_mxfp8(quantize_mxfp8(once, elem, mode), dtype)
    assert np.isfinite(once.astype(np.float32)).all()
    np.testing.assert_array_equal(once.view(BITS[dtype]), twice.view(BITS[dtype]))


# --------------------------------------------------------------------------------- buffers and memory order
def moderate(seed, blocks, dtype):
    """Blocks [blocks, 32] within the range of each dtype, a few NaN among them."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        return random_fp32_blocks(seed, blocks).clip(-6e4, 6e4).astype(DTYPES[dtype])


def addresses(q):
    return q.data.ctypes.data, q.scale.ctypes.data


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_buffers_are_filled_in_place_and_given_back(dtype):
    x = moderate(3, 600, dtype).reshape(-1, 64)
    fresh = quantize_mxfp8(x, "e5m2")
    out = MXFP8Tensor(np.full(x.shape, 0xAA, np.uint8), np.full((len(x), 2), 0xAA, np.uint8), "e5m2")
    before = addresses(out)
    assert quantize_mxfp8(x, "e5m2", out=out) is out
    assert addresses(out) == before
    np.testing.assert_array_equal(out.data, fresh.data)
    np.testing.assert_array_equal(out.scale, fresh.scale)

    values = np.full(x.shape, 7, DTYPES[dtype])
    address = values.ctypes.data
    assert dequantize_mxfp8(fresh, dtype, out=values) is values
    assert values.ctypes.data == address
    np.testing.assert_array_equal(values.view(BITS[dtype]), dequantize_mxfp8(fresh, dtype).view(BITS[dtype]))


def strided_views(dtype):
    """Views whose strides, alignment and byte order differ; the last dim is a multiple of 32."""
    base = moderate(4, 6 * 8 * 4, dtype)
    raw = np.empty(base.nbytes + 1, np.uint8)
    raw[1:] = base.reshape(-1).view(np.uint8)
    misaligned = raw[1:].view(DTYPES[dtype])
    assert not misaligned.flags.aligned
    yield "transposed", base.reshape(64, 96).T
    yield "columns", base.reshape(48, 128)[:, 32:96]
    yield "odd offset", base.reshape(48, 128)[3::2, 7:71]
    yield "stepped", base.reshape(24, 256)[:, ::2]
    yield "reversed", base.reshape(24, 256)[::-1, ::-1]
    yield "three dims", base.reshape(6, 32, 32).transpose(1, 0, 2)
    yield "last dim first", base.reshape(32, 6, 32).transpose(2, 1, 0)
    yield "four dims", base.reshape(2, 3, 32, 32)[:, ::2].transpose(1, 0, 3, 2)
    yield "broadcast", np.broadcast_to(base.reshape(24, 256)[0], (3, 2, 256))
    yield "misaligned", misaligned.reshape(24, 256)
    yield "misaligned strided", misaligned.reshape(24, 256)[1::2, 3:131]
    yield "one dim", base.reshape(-1)[5:1029:2]
    if dtype != "bfloat16":
        yield "other byte order", base.astype(base.dtype.newbyteorder()).reshape(24, 256)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_alignment_and_byte_order_of_x_change_nothing(dtype):
    for name, view in strided_views(dtype):
        expected = quantize_mxfp8(np.array(view, DTYPES[dtype], order="C"))
        got = quantize_mxfp8(view)
        np.testing.assert_array_equal(got.data, expected.data, err_msg=name)
        np.testing.assert_array_equal(got.scale, expected.scale, err_msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_may_be_strided_too(dtype):
    x = np.linspace(-3, 5, 4 * 6 * 64).reshape(4, 6, 64).astype(DTYPES[dtype])
    expected = quantize_mxfp8(x)
    data = np.zeros((64, 6, 8), np.uint8)
    scale = np.zeros((6, 4, 5), np.uint8)
    out = MXFP8Tensor(data[:, :, ::2].transpose(2, 1, 0), scale.transpose(1, 0, 2)[:, :, 1::2])
    quantize_mxfp8(x, out=out)
    np.testing.assert_array_equal(out.data, expected.data)
    np.testing.assert_array_equal(out.scale, expected.scale)
    assert not data[:, :, 1::2].any()
    assert not scale[:, :, ::2].any()

    wide = np.zeros((64, 6, 8), DTYPES[dtype])
    target = wide[:, :, 1::2].transpose(2, 1, 0)
    assert dequantize_mxfp8(out, dtype, out=target) is target
    np.testing.assert_array_equal(target, dequantize_mxfp8(expected, dtype))
    assert not wide[:, :, ::2].any()


def test_a_target_of_the_other_byte_order_gets_the_same_values():
    q = quantize_mxfp8(np.linspace(-3, 5, 64, dtype=np.float32))
    swapped = np.zeros(64, np.dtype(np.float32).newbyteorder())
    dequantize_mxfp8(q, "float32", out=swapped)
    np.testing.assert_array_equal(swapped, dequantize_mxfp8(q, "float32"))


@pytest.mark.parametrize(
    ("shape", "columns"),
    [((3, 2049 * 32), slice(None)), ((3, 2051 * 32), slice(32, -32)), ((5000, 96), slice(0, 64))],
)
def test_arrays_larger_than_a_tile_are_as_one_call_of_the_reference(shape, columns):
    x = np.random.default_rng(8).standard_normal(shape, dtype=np.float32)[:, columns]
    q = quantize_mxfp8(x)
    bits = np.ascontiguousarray(x).view(np.uint32).reshape(-1, 32)
    codes, scale = reference.quantize_bits(bits, reference.E4M3, "rceil")
    np.testing.assert_array_equal(q.data.reshape(-1, 32), codes)
    np.testing.assert_array_equal(q.scale.reshape(-1), scale)
    values = np.ldexp(code_values("e4m3")[codes], scale.astype(int)[:, None] - 127).astype(np.float32)
    np.testing.assert_array_equal(dequantize_mxfp8(q, "float32").reshape(-1, 32), values)


@pytest.mark.parametrize("shape", [(0,), (0, 64), (5, 0), (3, 0, 32)])
def test_empty_arrays_work(shape):
    q = quantize_mxfp8(np.zeros(shape, np.float32))
    assert q.shape == shape
    assert q.scale.shape == (*shape[:-1], shape[-1] // 32)
    assert dequantize_mxfp8(q).shape == shape
    assert quantize_mxfp8(np.zeros(shape, np.float32), out=q) is q


def test_wire_bytes_counts_codes_and_scales():
    q = quantize_mxfp8(np.ones((4, 64), np.float32))
    assert q.wire_bytes == 4 * 64 + 4 * 2


# ------------------------------------------------------------------------------------------------ errors
class OnGpu:
    """What a kernel sees of a GPU array: the protocol attribute, and no NumPy array."""

    @property
    def __cuda_array_interface__(self):
        raise AssertionError("it must not be asked")


ONES = np.ones((2, 64), np.float32)
GOOD = quantize_mxfp8(ONES)
READ_ONLY = np.zeros((2, 64), np.uint8)
READ_ONLY.flags.writeable = False
ARENA = np.zeros(2 * 64 * 4, np.uint8)


def tensor(data_shape, scale_shape, elem="e4m3"):
    return MXFP8Tensor(np.zeros(data_shape, np.uint8), np.zeros(scale_shape, np.uint8), elem)


@pytest.mark.parametrize(
    ("call", "error", "builtin", "text"),
    [
        (lambda: quantize_mxfp8(ONES[:, :40]), KernelError, ValueError, r"multiple of 32.*\[2, 40\].*padded for you"),
        (lambda: quantize_mxfp8(np.float32(1) + np.zeros(())), KernelError, ValueError, "NumPy array"),
        (lambda: quantize_mxfp8(np.zeros((), np.float32)), KernelError, ValueError, "at least one dim"),
        (lambda: quantize_mxfp8(ONES.tolist()), KernelError, ValueError, r"NumPy array, got builtins.list; write"),
        (lambda: quantize_mxfp8(OnGpu()), KernelError, ValueError, "GPU kernels are not in this version yet"),
        (lambda: quantize_mxfp8(ONES.astype(np.float64)), DTypeError, TypeError, "got float64; convert it first"),
        (lambda: quantize_mxfp8(ONES.astype(np.int32)), DTypeError, TypeError, "got int32"),
        (lambda: quantize_mxfp8(ONES, "e3m4"), KernelError, ValueError, '"e4m3" or "e5m2", got \'e3m4\''),
        (lambda: quantize_mxfp8(ONES, ["e4m3"]), KernelError, ValueError, "e5m2"),
        (lambda: quantize_mxfp8(ONES, mode="round"), KernelError, ValueError, "one of rceil, floor, even, ceil"),
        (lambda: quantize_mxfp8(ONES[:0], mode="round"), KernelError, ValueError, "one of rceil"),
        (lambda: quantize_mxfp8(ONES, min_scale_byte=255), KernelError, ValueError, "0 to 254.*got 255"),
        (lambda: quantize_mxfp8(ONES, min_scale_byte=-1), KernelError, ValueError, "0 to 254"),
        (lambda: quantize_mxfp8(ONES, min_scale_byte=1.0), KernelError, ValueError, "0 to 254"),
        (lambda: quantize_mxfp8(ONES, out=ONES), KernelError, ValueError, "out must be an MXFP8Tensor"),
        (lambda: quantize_mxfp8(ONES, "e5m2", out=GOOD), BufferMismatchError, ValueError, 'out is for "e4m3"'),
        (lambda: quantize_mxfp8(ONES, out=tensor((2, 32), (2, 1))), BufferMismatchError, ValueError,
         r"out.data must be uint8 \[2, 64\], got uint8 \[2, 32\]"),
        (lambda: quantize_mxfp8(ONES, out=MXFP8Tensor(READ_ONLY, GOOD.scale)), BufferMismatchError, ValueError,
         "writeable"),
        (lambda: quantize_mxfp8(ARENA.view(np.float32).reshape(2, 64),
                                out=MXFP8Tensor(ARENA[:128].reshape(2, 64), GOOD.scale)),
         BufferMismatchError, ValueError, "out.data must not share memory with x"),
        (lambda: quantize_mxfp8(ONES, out=MXFP8Tensor(ARENA[:128].reshape(2, 64), ARENA[4:8].reshape(2, 2))),
         BufferMismatchError, ValueError, "out.data must not share memory with out.scale"),
        (lambda: MXFP8Tensor(GOOD.data, GOOD.data), BufferMismatchError, ValueError,
         r"\[2, 64\] needs scale \[2, 2\], got \[2, 64\]"),
        (lambda: tensor((2, 33), (2, 1)), KernelError, ValueError, "last dim of data must be a multiple of 32"),
        (lambda: tensor((), ()), KernelError, ValueError, "at least one dim"),
        (lambda: MXFP8Tensor(GOOD.data.view(np.int8), GOOD.scale), DTypeError, TypeError, "data.view"),
        (lambda: MXFP8Tensor(GOOD.data, GOOD.scale.astype(np.float32)), DTypeError, TypeError, "got float32"),
        (lambda: MXFP8Tensor(OnGpu(), GOOD.scale), KernelError, ValueError, "data is a GPU array"),
        (lambda: MXFP8Tensor(GOOD.data, GOOD.scale, "fp8"), KernelError, ValueError, "e4m3"),
        (lambda: dequantize_mxfp8(GOOD.data), KernelError, ValueError, "takes an MXFP8Tensor, got ndarray"),
        (lambda: dequantize_mxfp8(GOOD, "float64"), DTypeError, TypeError, "got dtype float64"),
        (lambda: dequantize_mxfp8(GOOD, "no such"), DTypeError, TypeError, "no such"),
        (lambda: dequantize_mxfp8(GOOD, out=ONES.copy()), BufferMismatchError, ValueError,
         r"out must be bfloat16 \[2, 64\], got float32"),
        (lambda: dequantize_mxfp8(GOOD, "float32", out=OnGpu()), KernelError, ValueError, "out is a GPU array"),
        (lambda: dequantize_mxfp8(GOOD, "float32", out=ONES[:1].copy()), BufferMismatchError, ValueError,
         r"got float32 \[1, 64\]"),
        (lambda: dequantize_mxfp8(MXFP8Tensor(ARENA[:128].reshape(2, 64), GOOD.scale), "float32",
                                  out=ARENA.view(np.float32).reshape(2, 64)),
         BufferMismatchError, ValueError, "must not share memory with q.data"),
        (lambda: swizzle_scales(np.zeros(4, np.uint8)), KernelError, ValueError, r"2-D array.*got \[4\]"),
        (lambda: swizzle_scales(np.zeros((4, 4), np.int8)), DTypeError, TypeError, "expected uint8, got int8"),
        (lambda: swizzle_scales(OnGpu()), KernelError, ValueError, "GPU array"),
        (lambda: unswizzle_scales(np.zeros(512, np.uint8), 129, 4), BufferMismatchError, ValueError,
         "expected 1024 bytes, got 512"),
        (lambda: unswizzle_scales(np.zeros(512, np.uint8), -1, 4), KernelError, ValueError, "rows must be"),
        (lambda: unswizzle_scales(np.zeros(512, np.uint8), 1, 4.0), KernelError, ValueError, "cols must be"),
    ],
)  # fmt: skip
def test_wrong_calls_raise_the_named_error_with_the_rule_in_its_text(call, error, builtin, text):
    with pytest.raises(error, match=text) as caught:
        call()
    assert isinstance(caught.value, builtin)
    assert isinstance(caught.value, LowshardError)


# -------------------------------------------------------------------------------------------- 128x4 layout
@pytest.mark.parametrize("shape", [(1, 1), (32, 4), (128, 4), (129, 5), (300, 10), (256, 12), (0, 3), (3, 0)])
def test_swizzled_scales_lie_where_the_layout_says_and_come_back(shape):
    rows, cols = shape
    scale = np.random.default_rng(9).integers(1, 255, shape, dtype=np.uint8)
    tile_cols = -(-cols // 4)
    expected = np.zeros(-(-rows // 128) * tile_cols * 512, np.uint8)
    for row in range(rows):
        for col in range(cols):
            tile = row // 128 * tile_cols + col // 4
            inside = (row % 32) * 16 + (row % 128) // 32 * 4 + col % 4
            expected[tile * 512 + inside] = scale[row, col]
    swizzled = swizzle_scales(scale)
    np.testing.assert_array_equal(swizzled, expected)
    np.testing.assert_array_equal(unswizzle_scales(swizzled, rows, cols), scale)
    np.testing.assert_array_equal(swizzle_scales(np.asfortranarray(scale)), expected)


# ------------------------------------------------------------------------------------------------- imports
def test_importing_the_kernels_loads_no_optional_library():
    heavy = "numba cupy mpi4py yaml safetensors ml_dtypes matplotlib rich tokenizers"
    code = f"import sys, lowshard.kernels; print([m for m in {heavy.split()!r} if m in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(lowshard.__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr
