"""MXFP8 dequantisation on every engine: the exact product of code and scale, rounded once."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import engines
from support.mxfp8_twin import BITS, COMBOS, DTYPES, ELEMS, code_values, random_fp32_blocks

from lowshard.kernels import MXFP8Tensor, dequantize_mxfp8, quantize_mxfp8

engine = engines.fixture()

# Precision in bits, lowest and highest exponent of a normal number.
FORMS = {"bfloat16": (8, -126, 127), "float16": (11, -14, 15), "float32": (24, -126, 127)}


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


@cache
def every_product(elem, dtype):
    """float64 [256, 256]: the value of each code under each scale byte, rounded once."""
    values = code_values(elem)
    rounded = cache(lambda value: round_once(value, *FORMS[dtype]))
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
    return expected


@pytest.mark.parametrize("elem", ELEMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_scale_and_code_dequantises_to_the_product_rounded_once(elem, dtype):
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scale = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    got = dequantize_mxfp8(MXFP8Tensor(codes, scale, elem), dtype)
    assert got.dtype == DTYPES[dtype]
    expected = every_product(elem, dtype)
    got64 = got.astype(np.float64)
    np.testing.assert_array_equal(got64, expected)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got64)[~nan], np.signbit(expected)[~nan])
    quiet = {"bfloat16": 0x7FC0, "float16": 0x7E00, "float32": 0x7FC00000}[dtype]
    assert np.unique(got.view(BITS[dtype])[nan]).tolist() == [quiet]  # whatever the NaN code and its sign


@given(
    st.integers(0, (1 << 32) - 1), st.sampled_from(ELEMS), st.sampled_from(list(DTYPES)), st.integers(1, 150)
)
def test_any_codes_next_to_each_other_dequantise_each_by_its_own_scale(seed, elem, dtype, blocks):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (blocks, 32), dtype=np.uint8)
    narrow = rng.integers(100, 150, (blocks, 1), dtype=np.uint8)
    wide = rng.integers(0, 256, (blocks, 1), dtype=np.uint8)
    scale = np.where(rng.random((blocks, 1)) < 0.5, narrow, wide)
    got = dequantize_mxfp8(MXFP8Tensor(codes, scale, elem), dtype)
    np.testing.assert_array_equal(got.astype(np.float64), every_product(elem, dtype)[scale, codes])


@given(st.integers(0, (1 << 32) - 1), st.sampled_from(COMBOS))
def test_a_second_quantisation_of_any_fp32_blocks_keeps_every_value_nan_blocks_and_zeros_too(seed, combo):
    once = dequantize_mxfp8(quantize_mxfp8(random_fp32_blocks(seed, 60), *combo), "float32")
    once = once[~np.isinf(once).any(axis=1)]  # a maximum just under 2^128 may round up to it, which is Inf
    assert len(once) > 50
    twice = dequantize_mxfp8(quantize_mxfp8(once, *combo), "float32")
    np.testing.assert_array_equal(once.view(np.uint32), twice.view(np.uint32))


@pytest.mark.parametrize("shape", [(0,), (0, 64), (5, 0), (3, 0, 32)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_arrays_work(shape, dtype):
    q = quantize_mxfp8(np.zeros(shape, DTYPES[dtype]))
    assert q.shape == shape
    assert q.scale.shape == (*shape[:-1], shape[-1] // 32)
    got = dequantize_mxfp8(q, dtype)
    assert (got.shape, got.dtype) == (shape, DTYPES[dtype])
    assert quantize_mxfp8(np.zeros(shape, DTYPES[dtype]), out=q) is q
    assert dequantize_mxfp8(q, dtype, out=got) is got
