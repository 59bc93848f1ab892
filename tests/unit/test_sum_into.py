"""Sums of float arrays on every engine: fp32 additions from left to right, and one rounding at the end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import engines, mode
from support.float_twin import DTYPES, bits_of, decode, encode, infinity, patterns, sign_bit, swapped
from support.places import places

from lowshard.kernels import sum_into

engine = engines.fixture()

dtypes = st.sampled_from(list(DTYPES))


def slow_sum(terms, dtype):
    """Patterns of the sum of float64 terms; float64 holds two fp32 so well that its own rounding does not show."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = terms[0]
        for term in terms[1:]:
            total = decode(encode(total + term, "float32"), "float32")
    return encode(total, dtype)


def assert_patterns(got, expected, dtype):
    """Assert patterns, NaNs as a class: which NaN a sum gives is not said."""
    nan = (expected & (sign_bit(dtype) - 1)) > infinity(dtype)
    np.testing.assert_array_equal((got & (sign_bit(dtype) - 1)) > infinity(dtype), nan)
    np.testing.assert_array_equal(got[~nan], expected[~nan])


def random_patterns(seed, shape, dtype, kind):
    """Patterns of a dtype: any at all, or of magnitudes that meet in a sum."""
    rng = np.random.default_rng(seed)
    if kind == "any":
        return rng.integers(0, 1 << (32 if dtype == "float32" else 16), shape)
    return encode(rng.standard_normal(shape) * np.ldexp(1.0, rng.integers(-4, 5, shape)), dtype)


@engines.many
@given(
    st.data(), st.lists(st.integers(1, 6), max_size=4), dtypes, st.lists(dtypes, min_size=1, max_size=6),
    st.booleans(), st.sampled_from(["any", "near"]),
)  # fmt: skip
def test_any_sources_at_any_places_sum_as_the_twin_and_nothing_else_changes(
    data, shape, dtype, kinds, accumulate, kind
):
    bits = random_patterns(0, shape, dtype, kind)
    parts = [random_patterns(i + 1, shape, source, kind) for i, source in enumerate(kinds)]
    sources = []
    for source, part in zip(kinds, parts, strict=True):
        form = swapped(source) if data.draw(st.booleans()) else DTYPES[source]
        sources.append(data.draw(places(shape, form)).holding(patterns(part, source)))
    place = data.draw(places(shape, swapped(dtype) if data.draw(st.booleans()) else DTYPES[dtype]))
    arena = place.arena(9)
    place.view(arena)[...] = patterns(bits, dtype)
    before = arena.copy()
    out = place.view(arena)
    assert sum_into(out, sources, accumulate) is out
    values = [decode(part, source) for source, part in zip(kinds, parts, strict=True)]
    expected = slow_sum([decode(bits, dtype), *values] if accumulate else values, dtype)
    result = np.asarray(out, DTYPES[dtype], copy=True)
    assert_patterns(bits_of(result), expected, dtype)
    place.expect(before, arena, result)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("count", mode.sample([1, 2, 3, 8], 2, "long sums"))
def test_long_arrays_sum_as_the_twin(engine, dtype, accumulate, count):
    size = engine.pick(150_001, 3001)  # more than two tiles, and no multiple of a vector
    kinds = [list(DTYPES)[i % 3] for i in range(count)]
    parts = [random_patterns(i, size, kind, "near") for i, kind in enumerate(kinds)]
    bits = random_patterns(99, size, dtype, "near")
    out = patterns(bits, dtype).copy()
    sum_into(out, [patterns(p, k) for p, k in zip(parts, kinds, strict=True)], accumulate=accumulate)
    values = [decode(p, k) for p, k in zip(parts, kinds, strict=True)]
    expected = slow_sum([decode(bits, dtype), *values] if accumulate else values, dtype)
    np.testing.assert_array_equal(bits_of(out), expected)


def test_a_sum_of_16_bit_floats_is_rounded_once():
    out = np.array([256.0], DTYPES["bfloat16"])
    sum_into(out, [np.ones(1, DTYPES["bfloat16"])] * 8)
    assert float(out[0]) == 264  # one at a time in bf16 it would stay at 256
    half = np.array([2048.0], np.float16)
    sum_into(half, [np.array([1.0], np.float16), np.array([0.001], np.float32)])
    assert float(half[0]) == 2050  # above the tie, which 1.0 alone would be


def test_the_order_of_the_sources_is_the_order_of_the_additions():
    big, small = np.array([2.0**24], np.float32), np.array([1.0], np.float32)
    out = np.zeros(1, np.float32)
    assert sum_into(out, [big, small, small], accumulate=False)[0] == 2.0**24
    assert sum_into(out, [small, small, big], accumulate=False)[0] == 2.0**24 + 2


def test_without_accumulate_what_out_held_counts_for_nothing():
    out = patterns([0x7FC00000, 0x7F800000, 0x3F800000], "float32").copy()
    sum_into(out, np.array([-0.0, 2.0, 3.0], np.float32), accumulate=False)
    assert bits_of(out).tolist() == [
        1 << 31,
        0x40000000,
        0x40400000,
    ]  # minus zero too: nothing was added to it


# ------------------------------------------------------------------------------------------------ errors
