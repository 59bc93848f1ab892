"""Flat plans, strategies, partial sums and norms: what FSDP decides and adds without any rank."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowshard.errors import DTypeError, LayoutError
from lowshard.fsdp import FlatPlan, Param, Precision
from lowshard.fsdp.flat_plan import flat_boxes
from lowshard.fsdp.norm import add_exactly, block_sums, power_sum, value_of
from lowshard.fsdp.tree_sum import TreeSum
from lowshard.fsdp.unit_layout import ModelPlan

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def params(draw: st.DrawFn) -> list[Param]:
    keeps = st.sampled_from([1, 1, 4, 32, "row", "tensor"])
    made = draw(st.lists(st.tuples(shapes, keeps), min_size=1, max_size=6))
    return [Param(f"p{i}", shape, keep=keep) for i, (shape, keep) in enumerate(made)]


@given(params(), st.integers(1, 9))
def test_shards_hold_every_element_once_and_cut_no_block(listed: list[Param], shards: int) -> None:
    try:
        plan = FlatPlan.plan(listed, shards)
    except LayoutError:
        assert any(param.keep_elems > 1 for param in listed)
        return
    seen = {param.name: np.zeros(param.elems, int) for param in listed}
    for rank in range(shards):
        for piece in plan.pieces(rank):
            seen[piece.name][piece.param_lo : piece.param_hi] += 1
            keep = next(p for p in listed if p.name == piece.name).keep_elems
            elems = plan.by_name[piece.name].elems
            assert piece.param_lo % keep == 0
            assert piece.param_hi % keep == 0 or piece.param_hi == elems
            assert 0 <= piece.shard_lo < piece.shard_hi <= plan.shard_elems
    assert all((count == 1).all() for count in seen.values())
    assert plan.shard_elems % 32 == 0
    assert plan.size == shards * plan.shard_elems
    flat = np.arange(plan.size)
    for name, view in plan.views(flat).items():
        assert view.size == 0 or np.shares_memory(view, flat)
        assert view.shape == plan.by_name[name].shape
        assert view.size == 0 or view.reshape(-1)[0] == plan.by_name[name].offset
    assert FlatPlan.from_json(plan.to_json()) == plan
    assert FlatPlan.from_json(plan.to_json()).digest == plan.digest


def test_padding_is_small_and_places_do_not_depend_on_the_number_of_shards() -> None:
    listed = [Param("a", (1, 4096, 40)), Param("b", (37, 53)), Param("c", ())]
    plans = [FlatPlan.plan(listed, shards) for shards in (1, 2, 3, 8, 64)]
    assert len({plan.entries for plan in plans}) == 1
    for plan in plans:
        assert plan.padding < 32 * (len(listed) + plan.shards)


@given(params(), st.integers(1, 5), st.integers(1, 5))
def test_any_sharding_is_copied_to_any_other(listed: list[Param], a: int, b: int) -> None:
    listed = [Param(p.name, p.shape) for p in listed]
    one, other = FlatPlan.plan(listed, a), FlatPlan.plan(listed, b)
    whole = np.arange(1, one.size + 1)
    goal = np.zeros(other.size, int)
    for rank, shard in itertools.product(range(a), range(b)):
        lo, _ = one.range(rank)
        into, _ = other.range(shard)
        for copy in one.intersect(other, rank, shard):
            source = whole[lo + copy.src_lo : lo + copy.src_lo + copy.elems]
            goal[into + copy.dst_lo : into + copy.dst_lo + copy.elems] = source
    for name, view in other.views(goal).items():
        assert (view == one.views(whole)[name]).all()


@given(st.lists(st.integers(1, 6), max_size=4), st.data())
def test_boxes_cover_an_interval_in_order(shape: list[int], data: st.DataObject) -> None:
    n = math.prod(shape)
    lo = data.draw(st.integers(0, n))
    hi = data.draw(st.integers(lo, n))
    index = np.arange(n).reshape(shape)
    at = lo
    boxes = list(flat_boxes(tuple(shape), lo, hi))
    for box, start, stop in boxes:
        part = index[tuple(slice(*interval) for interval in box)].reshape(-1)
        assert start == at
        assert part.tolist() == list(range(start, stop))
        at = stop
    assert at == hi
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


# ---- partial sums


@pytest.mark.parametrize("terms", [1, 2, 3, 4, 7, 8, 16])
def test_a_tally_is_the_tree(terms: int, rng: np.random.Generator) -> None:
    given_terms = [rng.standard_normal(50).astype(np.float32) for _ in range(terms)]

    def tree(listed: list[np.ndarray]) -> np.ndarray:
        half = (len(listed) + 1) // 2
        return listed[0] if len(listed) == 1 else np.asarray(tree(listed[:half]) + tree(listed[half:]))

    tree_sum = TreeSum(50, np.float32, np)
    for _ in range(2):  # again, with the arrays it has
        for term in given_terms[:-1]:
            kept = term.copy()
            tree_sum.add(term)
            assert (term == kept).all()
        out = given_terms[-1].copy()
        tree_sum.finish(out)
        assert out.tobytes() == tree(given_terms).tobytes()
    assert tree_sum.bytes <= 200 * max(1, terms.bit_length())


def test_a_term_that_is_missing_is_zeros(rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal(9).astype(np.float32) for _ in range(2))
    a[0] = -0.0
    one, other = TreeSum(9, np.float32, np), TreeSum(9, np.float32, np)
    for tree_sum, missing in ((one, None), (other, np.zeros(9, np.float32))):
        tree_sum.add(a)
        tree_sum.add(missing)
        tree_sum.add(missing)
    x, y = b.copy(), b.copy()
    one.finish(x)
    other.finish(y)
    assert x.tobytes() == y.tobytes()


# ---- norms


@given(st.lists(st.floats(0, allow_infinity=False), min_size=1, max_size=40), st.randoms())
def test_sums_are_exact_in_any_order(values: list[float], random: Any) -> None:
    words = power_sum(np.zeros(0), 2, np)
    add_exactly(words, np.array(values))
    shuffled = list(values)
    random.shuffle(shuffled)
    parts = [power_sum(np.zeros(0), 2, np) for _ in range(3)]
    for i, value in enumerate(shuffled):
        add_exactly(parts[i % 3], np.array([value]))
    total = sum(map(Fraction, values))
    try:
        wanted = float(total)
    except OverflowError:
        wanted = math.inf
    assert value_of(words) == wanted
    assert value_of(sum(parts[1:], parts[0])) == wanted


def test_a_norm_does_not_depend_on_the_cut(rng: np.random.Generator) -> None:
    flat = (rng.standard_normal(96_000) * np.exp(rng.standard_normal(96_000) * 5)).astype(np.float32)
    whole = value_of(power_sum(flat, 2, np))
    assert abs(whole - math.fsum(np.square(flat.astype(np.float64)))) <= 1e-12 * whole
    for block in flat[:9600].reshape(-1, 32):  # compiled code sums float32, NumPy the rest: in the same tree
        assert value_of(power_sum(block, 2, np)) == value_of(power_sum(block.astype(np.float64), 2, np))
    for _ in range(20):
        cuts = np.sort(rng.integers(0, 3000, 3)) * 32
        parts = [power_sum(part, 2, np) for part in np.split(flat, cuts)]
        assert value_of(sum(parts[1:], parts[0])) == whole
    assert block_sums(np.ones(64)).tolist() == [32.0, 32.0]
    for bad in (np.inf, -np.inf):
        flat[17] = bad
        assert (
            value_of(power_sum(flat, 2, np))
            == value_of(power_sum(flat.astype(np.float64), 2, np))
            == math.inf
        )
    flat[95_000] = np.nan
    assert math.isnan(value_of(power_sum(flat, 2, np)))
    assert math.isnan(value_of(power_sum(flat.astype(np.float64), 2, np)))


# ---- values


@pytest.mark.parametrize(
    ("units", "says"),
    [
        ({}, "at least one unit"),
        ({"u": [Param("w", (2,)), Param("w", (2,))]}, "two parameters"),
        ({"u": [Param("w", (2,), tie="v")]}, "tied to 'v'"),
        ({"u": [Param("w", (2,)), Param("v", (3,), tie="w")]}, "same shape"),
        ({"u": [Param("w", (2,)), Param("v", (2,), tie="w", trainable=False)]}, "both trainable"),
        ({"u": [Param("w", (2,)), Param("v", (2,), "bfloat16")]}, "one dtype"),
        ({"u": [Param("w", (2,), "float64")]}, "float64"),
        ({"u": ["w"]}, "Param"),
    ],
)
def test_models_that_cannot_be(units: Any, says: str) -> None:
    with pytest.raises((LayoutError, DTypeError), match=says):
        ModelPlan.plan(units, 2, Precision(), 32)


def test_quantised_wires_need_whole_blocks() -> None:
    units = {"u": [Param("w", (64,))]}
    with pytest.raises(LayoutError, match="multiple of 32"):
        ModelPlan.plan(units, 2, Precision(wire="mxfp8"), 16)
    ModelPlan.plan(units, 2, Precision(wire="mxfp8"), 64)
