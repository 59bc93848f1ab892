"""Casts between bf16, fp16 and fp32 on every engine, against a slow twin that rounds explicitly."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import engines
from support.float_twin import (
    DTYPES,
    bits_of,
    decode,
    encode,
    infinity,
    patterns,
    quiet_nan,
    sign_bit,
    swapped,
)
from support.places import places

from lowshard.kernels import cast

engine = engines.fixture()

pairs = pytest.mark.parametrize("dst", DTYPES)


def assert_cast(x, src, dst):
    """Assert every pattern of a cast; `x` is native."""
    got = cast(x, dst)
    assert (got.dtype, got.shape) == (DTYPES[dst], x.shape)
    np.testing.assert_array_equal(bits_of(got), encode(decode(bits_of(x), src), dst))


# ------------------------------------------------------------------------------------------------ values
@pairs
@pytest.mark.parametrize("src", ["bfloat16", "float16"])
def test_every_16_bit_pattern_is_as_the_twin(src, dst):
    assert_cast(patterns(np.arange(1 << 16), src), src, dst)


@cache
def fp32_around_every_boundary(dst):
    """fp32 patterns: every value of a 16-bit type, every midpoint between two, and the neighbours of all."""
    if dst == "bfloat16":
        offsets = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
        return ((np.arange(1 << 16)[:, None] << 16) + offsets).reshape(-1)
    value = decode(np.arange(0x7C00), "float16")
    upper = np.append(value[1:], 65536.0)
    points = encode(np.concatenate([value, (value + upper) / 2, [65536.0, 131008.0]]), "float32")
    near = np.concatenate([points, points + 1, np.maximum(points - 1, 0)])
    return np.concatenate([near, near | sign_bit("float32")])


@cache
def twin_around_every_boundary(dst):
    return encode(decode(fp32_around_every_boundary(dst), "float32"), dst)


@pytest.mark.parametrize("dst", ["bfloat16", "float16"])
def test_fp32_at_and_around_every_rounding_boundary_is_as_the_twin(dst):
    x = patterns(fp32_around_every_boundary(dst), "float32")
    got = bits_of(cast(x, dst))
    np.testing.assert_array_equal(got, twin_around_every_boundary(dst))


@pytest.mark.parametrize("dst", ["bfloat16", "float16"])
def test_the_twin_agrees_with_numpy_and_ml_dtypes_wherever_the_value_is_no_nan(dst):
    x = patterns(fp32_around_every_boundary(dst), "float32")
    number = ~np.isnan(x)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = bits_of(x.astype(DTYPES[dst]))
    np.testing.assert_array_equal(twin_around_every_boundary(dst)[number], expected[number])
    np.testing.assert_array_equal(bits_of(cast(x, dst))[number], expected[number])


@pytest.mark.parametrize("src", ["bfloat16", "float16"])
def test_widening_agrees_with_numpy_and_ml_dtypes_wherever_the_value_is_no_nan(src):
    x = patterns(np.arange(1 << 16), src)
    with np.errstate(invalid="ignore"):
        expected = x.astype(np.float32)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(bits_of(cast(x, "float32"))[number], bits_of(expected)[number])


@engines.many
@given(st.integers(0, (1 << 32) - 1), st.sampled_from(list(DTYPES)), st.integers(1, 3000))
def test_any_fp32_patterns_are_as_the_twin(seed, dst, count):
    assert_cast(patterns(np.random.default_rng(seed).integers(0, 1 << 32, count), "float32"), "float32", dst)


@pairs
@pytest.mark.parametrize("src", DTYPES)
def test_a_nan_becomes_the_quiet_nan_of_its_sign_widening_too(src, dst):
    first, last = infinity(src) + 1, sign_bit(src) - 1
    payloads = np.unique(
        np.r_[first, first + 1, quiet_nan(src) - 1, quiet_nan(src), quiet_nan(src) + 1, last]
    )
    if src == "float32":
        payloads = np.unique(np.r_[payloads, [0x7F80FFFF, 0x7F810000, 0x7F801FFF, 0x7F802000, 0x7FFF0000]])
    for sign in (0, 1):
        x = patterns(payloads | (sign_bit(src) if sign else 0), src)
        expected = quiet_nan(dst) | (sign_bit(dst) if sign else 0)
        assert np.unique(bits_of(cast(x, dst))).tolist() == [expected]


# ----------------------------------------------------------------------------------------------- buffers
@engines.many
@given(
    st.data(), st.lists(st.integers(1, 5), max_size=5), st.sampled_from(list(DTYPES)), st.sampled_from(list(DTYPES))
)  # fmt: skip
def test_arrays_at_any_place_are_read_and_written_in_place_and_nothing_beside_them(data, shape, src, dst):
    bits = np.random.default_rng(1).integers(0, 1 << (16 if src != "float32" else 32), shape)
    x = patterns(bits, src)
    x_place = data.draw(places(shape, swapped(src) if data.draw(st.booleans()) else DTYPES[src]))
    place = data.draw(places(shape, swapped(dst) if data.draw(st.booleans()) else DTYPES[dst]))
    arena = place.arena(2)
    before = arena.copy()
    out = place.view(arena)
    assert cast(x_place.holding(x), dst, out=out) is out
    place.expect(before, arena, patterns(encode(decode(bits, src), dst), dst))


@pairs
def test_0d_and_empty_arrays_and_aliases_of_dtypes_work(dst):
    scalar = cast(np.array(1.5, np.float32), dst)
    assert (scalar.shape, scalar.dtype, float(scalar)) == ((), DTYPES[dst], 1.5)
    assert cast(np.zeros((3, 0, 2), np.float16), np.dtype(DTYPES[dst])).shape == (3, 0, 2)
    alias = {"bfloat16": "bf16", "float16": "fp16", "float32": "f32"}[dst]
    assert cast(np.ones(3, np.float32), alias).dtype == DTYPES[dst]
    out = np.zeros((0, 2), DTYPES[dst])
    assert cast(np.zeros((0, 2), np.float32), dst, out=out) is out


# ------------------------------------------------------------------------------------------------ errors
