"""What reductions over a node are made of: schedules, blocks combined and divided, 16-bit floats and float32."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import mode

pytest.importorskip("numba")
from lowshard.comm.node.combine import (
    COMBINE,
    DIVIDE,
    HALVES,
    ITEM,
    NARROW,
    NATIVE,
    OPS,
    WIDE_ITEM,
    WIDEN,
    accumulator,
    recipe_of,
    schedule,
)
from lowshard.comm.node.fold import scratch_blocks
from lowshard.selftest.arrays import hard

UFUNCS: dict[str, np.ufunc] = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
NUMPY = {name: np.dtype(getattr(ml_dtypes, name, None) or name) for name in (*NATIVE, *HALVES)}
# Each pair costs a second where nothing is compiled yet.
PAIRS = mode.sample([(name, op) for name in NATIVE for op in OPS], 8, "pairs of test_node_combine")


def function(dtype: str, op: str, place: int) -> Callable[..., None]:
    """Return a compiled function of a recipe, which takes addresses and counts."""
    recipe = recipe_of(dtype, op)
    address = int(recipe.words[place])
    assert address
    args = {COMBINE: 5}.get(place, 3)
    call = ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * args)(address)
    call.keeps = recipe  # type: ignore[attr-defined]
    return call


def room(values: np.ndarray, shift: int = 0) -> np.ndarray:
    """Return a copy of values, `shift` bytes behind a multiple of 64, with the whole memory as its base."""
    whole = np.full(values.nbytes + 192, 0xA5, np.uint8)
    first = -whole.ctypes.data % 64 + shift
    part = whole[first : first + values.nbytes]
    part[...] = values.view(np.uint8)
    return part.view(values.dtype)


def at(values: np.ndarray) -> int:
    return int(values.ctypes.data)


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(f"u{values.dtype.itemsize}")


def same_but_nans(got: np.ndarray, expected: np.ndarray) -> None:
    """Demand equal bits; of a NaN only that it is one."""
    with np.errstate(all="ignore"):
        nan = np.isnan(expected.astype(np.float64))
        assert np.array_equal(np.isnan(got.astype(np.float64)), nan)
    wrong = np.flatnonzero((bits(got) != bits(expected)) & ~nan)
    assert not len(wrong), [(i, got[i], expected[i]) for i in wrong[:5]]


# ---- schedules


def tree(ranks: list[int]) -> Any:
    if len(ranks) == 1:
        return ranks[0]
    half = (len(ranks) + 1) // 2
    return (tree(ranks[:half]), tree(ranks[half:]))


@pytest.mark.parametrize("order", ["tree", "rank", "fast"])
def test_a_schedule_builds_the_documented_expression(order: str) -> None:
    for ranks in [*range(2, 34), 63, 64, 65]:
        steps = schedule(ranks, order)
        assert steps.dtype == np.int64
        assert steps.shape == (ranks - 1, 3)
        assert steps.flags.c_contiguous
        places: dict[int, Any] = {i: i for i in range(ranks)}
        for into, left, right in steps.tolist():
            made = (places[left], places[right])
            for used in (left, right):
                if used >= ranks:
                    del places[used]  # a temporary is used once
            assert into == -1 or into >= ranks, "an operand is written over"
            assert into not in places, "a temporary is lost"
            places[into] = made
        assert [into for into in steps[:, 0].tolist() if into < 0] == [-1]
        assert steps[-1, 0] == -1
        assert set(places) == {*range(ranks), -1}, "a temporary is left over"
        expected: Any = tree(list(range(ranks)))
        if order == "rank":
            expected = 0
            for rank in range(1, ranks):
                expected = (expected, rank)
        assert places[-1] == expected
        # Fetched and widened operands and two results lie in the scratch memory beside the temporaries.
        assert ranks + 1 + int(steps[:, 0].max()) - ranks + 1 <= scratch_blocks(ranks)


def test_one_rank_has_nothing_to_do() -> None:
    assert schedule(1, "tree").shape == schedule(1, "rank").shape == (0, 3)


# ---- blocks


@pytest.mark.parametrize(("dtype", "op"), PAIRS)
def test_blocks_are_combined_as_numpy_does(dtype: str, op: str, rng: np.random.Generator) -> None:
    combine = function(dtype, op, COMBINE)
    item = NUMPY[dtype].itemsize
    pool = hard((400,), dtype)
    for n in [0, 1, 2, 3, 64 // item - 1, 64 // item, 64 // item + 1, 333, 16_384 // item + 5]:
        for shifts in ((0, 0, 0), (item, 3 * item, 0), (5 * item, 2 * item, item), (1, 3, 2)):
            left, right = (room(rng.choice(pool, n), shift) for shift in shifts[:2])
            into = room(np.zeros(n, NUMPY[dtype]), shifts[2])
            with np.errstate(all="ignore"):
                expected = UFUNCS[op](left, right)
            combine(at(into), at(left), at(right), n, n % 2)
            same_but_nans(into, expected)
            around = np.full(192, 0xA5, np.uint8)
            whole: Any = into.base
            while whole.base is not None:
                whole = whole.base
            first = at(into) - at(whole)
            outside = np.concatenate([whole[:first], whole[first + into.nbytes :]])
            assert np.array_equal(outside, around[: len(outside)]), "written beside the result"


@pytest.mark.parametrize(("dtype", "op"), PAIRS[:3])
def test_a_result_may_lie_over_an_operand(dtype: str, op: str, rng: np.random.Generator) -> None:
    combine = function(dtype, op, COMBINE)
    for n in (7, 1000):
        left, right = (room(hard((n,), dtype, side)) for side in range(2))
        with np.errstate(all="ignore"):
            expected = UFUNCS[op](left, right)
        for over in (left, right):
            operands = [left.copy(), right.copy()]
            into = operands[0] if over is left else operands[1]
            combine(at(into), at(operands[0]), at(operands[1]), n, 1)
            same_but_nans(into, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_division_is_the_correctly_rounded_one(dtype: str, rng: np.random.Generator) -> None:
    divide = function(dtype, "sum", DIVIDE)
    values = hard((700,), dtype)
    for divisor in (1, 2, 3, 7, 10, 100, 4097, (1 << 24) + 1):
        got = values.copy()
        with np.errstate(all="ignore"):
            expected = values / NUMPY[dtype].type(divisor)
        divide(at(got), len(got), divisor)
        same_but_nans(got, expected)


def test_a_recipe_says_what_an_element_takes_and_has_no_more_than_it_needs() -> None:
    for dtype, op in [("int16", "max"), ("float64", "sum"), ("bfloat16", "sum"), ("float16", "min")]:
        words = recipe_of(dtype, op).words
        wide = accumulator(dtype)
        assert wide == ("float32" if dtype in HALVES else dtype)
        assert (words[ITEM], words[WIDE_ITEM]) == (NUMPY[dtype].itemsize, NUMPY[wide].itemsize)
        assert bool(words[WIDEN]) == bool(words[NARROW]) == (dtype in HALVES)
        assert bool(words[DIVIDE]) == wide.startswith("float")
        assert words.flags.c_contiguous
    assert recipe_of("float64", "sum") is recipe_of("float64", "sum")


def test_functions_of_different_recipes_are_different() -> None:
    """Code out of the cache is linked by name: two that share one would be one."""
    recipes = [recipe_of(dtype, op) for dtype, op in PAIRS]
    combiners = [int(recipe.words[COMBINE]) for recipe in recipes]
    assert len(set(combiners)) == len(PAIRS)
    assert recipe_of("bfloat16", "sum").words[WIDEN] != recipe_of("float16", "sum").words[WIDEN]
    assert recipe_of("bfloat16", "sum").words[NARROW] != recipe_of("float16", "sum").words[NARROW]
    assert recipe_of("bfloat16", "sum").words[COMBINE] == recipe_of("float32", "sum").words[COMBINE]


# ---- 16 bits


def every_pattern(dtype: str) -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(NUMPY[dtype])


@pytest.mark.parametrize("dtype", HALVES)
def test_all_65536_patterns_are_widened_exactly(dtype: str) -> None:
    widen = function(dtype, "sum", WIDEN)
    narrow = every_pattern(dtype)
    for shift in (0, 2):
        source, into = room(narrow, shift), np.zeros(len(narrow), np.float32)
        widen(at(into), at(source), len(narrow))
        with np.errstate(all="ignore"):
            same_but_nans(into, narrow.astype(np.float32))


@pytest.mark.parametrize("dtype", HALVES)
def test_all_65536_values_their_neighbours_and_the_ties_between_them_are_narrowed_right(dtype: str) -> None:
    narrow = function(dtype, "sum", NARROW)
    with np.errstate(all="ignore"):
        exact = every_pattern(dtype).astype(np.float32)
        above = every_pattern(dtype)[np.minimum(np.arange(1 << 16) + 1, (1 << 16) - 1)].astype(np.float32)
        middle = ((exact.astype(np.float64) + above.astype(np.float64)) / 2).astype(np.float32)
    values = [exact, middle]
    for base in (exact, middle):  # and one step of float32 to both sides
        values += [(base.view(np.uint32) + np.uint32(step)).view(np.float32) for step in (1, (1 << 32) - 1)]
    source = np.concatenate(values)
    into = np.zeros(len(source), NUMPY[dtype])
    narrow(at(into), at(source), len(source))
    with np.errstate(all="ignore"):
        same_but_nans(into, source.astype(NUMPY[dtype]))
        finite = ~np.isnan(exact)
    assert np.array_equal(bits(into)[: 1 << 16][finite], bits(every_pattern(dtype))[finite])


@pytest.mark.parametrize("dtype", HALVES)
def test_any_float32_is_narrowed_right(dtype: str, rng: np.random.Generator) -> None:
    narrow = function(dtype, "sum", NARROW)
    count = 1 << (24 if mode.full() else 20)
    source = rng.integers(0, 1 << 32, count, np.uint64).astype(np.uint32).view(np.float32)
    into = np.zeros(count, NUMPY[dtype])
    narrow(at(into), at(source), count)
    with np.errstate(all="ignore"):
        same_but_nans(into, source.astype(NUMPY[dtype]))


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the modes are set through glibc's fenv_t of x86-64",
)
@pytest.mark.parametrize("dtype", HALVES)
def test_conversions_are_the_same_in_a_process_that_flushes_subnormals_or_rounds_up(dtype: str) -> None:
    widen, narrow = (function(dtype, "sum", place) for place in (WIDEN, NARROW))
    source = every_pattern(dtype)
    wide = [np.zeros(len(source), np.float32) for _ in range(2)]
    back = [np.zeros(len(source), source.dtype) for _ in range(2)]
    libm = ctypes.CDLL("libm.so.6")
    kept, changed = (ctypes.c_uint32 * 8)(), (ctypes.c_uint32 * 8)()
    libm.fegetenv(kept)
    ctypes.memmove(changed, kept, ctypes.sizeof(kept))
    changed[7] |= 0xC040  # of MXCSR: rounding up, results and operands that are subnormal become zero
    for turn, environment in enumerate((kept, changed)):
        libm.fesetenv(environment)
        widen(at(wide[turn]), at(source), len(source))
        narrow(at(back[turn]), at(wide[0]), len(source))
        libm.fesetenv(kept)
    assert np.array_equal(bits(wide[0]), bits(wide[1]))
    assert np.array_equal(bits(back[0]), bits(back[1]))
