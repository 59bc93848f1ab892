"""Strategies: MAX's slices, hazards included; the checks; grouped queries; every element on a device once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.recorded import oracle

from lowshard import LowshardError
from lowshard.box import full_box, relative_slices
from lowshard.tiling import Tiling
from lowshard.weights import Segment, ShardingStrategy, Weight, scale_strategy
from lowshard.weights.quantization import expert_scales

S = ShardingStrategy


# ---- MAX's slices


def test_every_public_case_of_max() -> None:
    cases = oracle("max_strategies")["cases"]
    assert len(cases) > 50
    for case in cases:
        strategy = getattr(S, case["strategy"])(**case["args"])
        shape = tuple(case["shape"])
        if case["expected"] is None:
            with pytest.raises(
                {"ValueError": ValueError, "NotImplementedError": NotImplementedError}[case["error"]]
            ):
                strategy.pieces(shape, case["index"])
            continue
        got = [[list(interval) for interval in box] for box in strategy.pieces(shape, case["index"])]
        assert got == case["expected"], case
        assert strategy.concat_axis % len(shape) == case["concat_axis"]
        along = case[
            "concat_axis"
        ]  # large cases: an array that takes no memory and counts along the cut axis
        steps = np.arange(shape[along], dtype=np.int32).reshape(
            [-1 if d == along else 1 for d in range(len(shape))]
        )
        array = np.broadcast_to(steps, shape)[
            tuple(slice(0, None if d == along else 4) for d in range(len(shape)))
        ]
        parts = [array[tuple(slice(*i) for i in box)] for box in case["expected"]]
        out = strategy(array, case["index"])
        assert strategy.layout(shape).local_shape(case["index"]) == tuple(case["output_shape"])
        assert np.array_equal(out, np.concatenate(parts, case["concat_axis"]))


def test_every_public_scale_rule_of_max() -> None:
    weights = {
        "any": lambda k: S.columnwise(k), "rowwise": S.rowwise, "columnwise": S.columnwise,
        "rowwise / stacked_qkv / gate_up / segmented axis 0": S.rowwise,
        "head_aware_columnwise heads=32 head_dim=128": lambda k: S.head_aware_columnwise(k, 32, 128),
        "head_aware_columnwise heads=32 head_dim=64": lambda k: S.head_aware_columnwise(k, 32, 64),
    }  # fmt: skip
    for case in oracle("max_strategies")["scale_cases"]:
        strategy = weights[case["weight_strategy"]](case["num_devices"])
        args = (strategy, case["granularity"], tuple(case["weight_shape"]), case["block"])
        if "error" in case["expected"]:
            with pytest.raises(ValueError, match="does not divide"):
                scale_strategy(*args)
            continue
        got, said = scale_strategy(*args), case["expected"]["scale_strategy"]
        if said == "same as weight":
            assert got == strategy
        elif "heads=32 head_dim=1" in said:
            assert got == S.head_aware_columnwise(case["num_devices"], 32, 1)
        else:
            assert got == getattr(S, said.split(" ")[0])(case["num_devices"])


def test_every_public_expert_scale_map_of_max() -> None:
    for case in oracle("max_strategies")["moe_scale_cases"]:
        for row in case["expected"]:
            got = expert_scales(case["moe_dim"], case["block"], case["num_devices"], row["index"])
            assert [list(v) for v in (got.weight_half, got.gate, got.up, got.down)] == [
                row[k] for k in ("weight_half", "gate_scale", "up_scale", "down_scale")
            ]


def test_a_function_of_the_users_own() -> None:
    def every_other(weight: Any, index: int, num_devices: int) -> Any:
        return weight[index::num_devices]

    strategy = S(3, every_other)
    array = np.arange(7)
    assert strategy(array, 1).tolist() == [1, 4]
    assert strategy.shard(array, 0, 2).tolist() == [0, 2, 4, 6]
    assert strategy(Weight("w", array), 2).tolist() == [2, 5]
    assert [w.array.tolist() for w in Weight("w", array, strategy).shard(3)] == [[0, 3, 6], [1, 4], [2, 5]]
    assert strategy.sharded_axis is None
    with pytest.raises(ValueError, match="give it a method"):
        strategy.pieces((7,), 0)


@pytest.mark.parametrize(
    ("strategy", "shape", "error"),
    [
        (S.rowwise(2), (), IndexError), (S.columnwise(2), (4,), IndexError), (S.axiswise(2, 2), (4, 4), IndexError),
        (S.axiswise(-3, 2), (4, 4), IndexError), (S.gate_up(2), (4, 4), IndexError),
        (S.gate_up(2, axis=0), (5, 4), ValueError), (S.stacked_qkv(2, 2, 4), (25, 2), ValueError),
        (S.stacked_qkv(2, 2, 4), (27, 2), ValueError), (S.segmented(2, 0, [Segment(4)]), (9, 2), ValueError),
        (S.segmented(2, 0, [Segment(9)]), (4, 2), ValueError),
        (S.tensor_parallel(2), (4, 4), NotImplementedError), (S.expert_parallel(2), (4, 4), NotImplementedError),
        (S.grouped_qkv(2, 4, 2, 8), (63, 2), ValueError), (S.head_aware_columnwise(2, 2, 2), (4,), IndexError),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit(
    strategy: ShardingStrategy, shape: tuple[int, ...], error: type[Exception]
) -> None:
    array = np.zeros(shape)
    for call in (
        lambda: strategy.pieces(shape, 0), lambda: strategy(array, 0), lambda: strategy.layout(shape),
        lambda: strategy.shard(array, 0, 2), lambda: Weight("w", array, strategy).shard(2),
    ):  # fmt: skip
        with pytest.raises(error) as caught:
            call()
        assert isinstance(caught.value, LowshardError)


def test_devices_and_indices_are_checked() -> None:
    strategy = S.rowwise(3)
    for index in (-1, 3):
        with pytest.raises(IndexError, match="0 to 2"):
            strategy.pieces((4,), index)
        with pytest.raises(IndexError, match="0 to 2"):
            strategy(np.zeros(4), index)
    weight = Weight("w", np.zeros((4, 4)), strategy)
    with pytest.raises(ValueError, match="3 parts, 4 devices"):
        weight.shard([0, 1, 2, 3])
    with pytest.raises(ValueError, match="no sharding strategy"):
        Weight("w", np.zeros(3)).shard([0])
    parts = weight.shard(["a", "b", "c"])
    assert [(p.name, p.device, p.shape) for p in parts] == [
        ("w[0]", "a", (2, 4)), ("w[1]", "b", (1, 4)), ("w[2]", "c", (1, 4))]  # fmt: skip
    with pytest.raises(ValueError, match="part already"):
        parts[0].shard(["a", "b", "c"])
    with pytest.raises(ValueError, match="not cut again"):
        parts[0].sharding_strategy = strategy
    for make in (lambda: S.rowwise(0), lambda: S(2, None), lambda: S.rowwise("4")):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"strategy|shard"):
            make()


def test_a_head_aware_width_that_is_none_of_its_own_is_refused_where_it_is_used() -> None:
    strategy = S.head_aware_columnwise(2, 4, 2)
    for columns in (10, 7):
        assert strategy.pieces((3, columns), 1)  # as MAX: unchecked
        with pytest.raises(ValueError, match="8 columns"):
            strategy.layout((3, columns))
        with pytest.raises(ValueError, match="8 columns"):
            Weight("o", np.zeros((3, columns)), strategy).shard(2)


# ---- every element once


def held(tiling: Tiling) -> Counter[int]:
    ids = np.arange(tiling.size_elems).reshape(tiling.shape)
    return Counter(
        int(i)
        for rank in range(tiling.num_ranks)
        for tile in tiling.tiles(rank)
        for i in ids[relative_slices(tile.box, full_box(tiling.shape))].ravel()
    )


small = st.integers(0, 13)
counts = st.integers(1, 7)


@st.composite
def cut_weights(draw: st.DrawFn) -> tuple[ShardingStrategy, tuple[int, ...]]:
    k = draw(counts)
    heads, dim, rows, cols = draw(counts), draw(st.integers(1, 5)), draw(small), draw(small)
    kind = draw(st.integers(0, 8))
    if kind == 0:
        return S.rowwise(k), (rows, cols)
    if kind == 1:
        return S.columnwise(k), (rows, cols)
    if kind == 2:
        shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
        return S.axiswise(draw(st.integers(-len(shape), len(shape) - 1)), k), shape
    if kind == 3:
        return S.head_aware_columnwise(k, heads, dim), (rows, heads * dim)
    if kind == 4:
        return S.head_aware_columnwise(k, heads, 4 * dim), (rows, heads * dim * draw(st.sampled_from([2, 3])))
    if kind == 5:
        return S.stacked_qkv(k, heads, dim), (3 * heads * dim, cols)
    if kind == 6:
        axis = draw(st.integers(0, 2))
        shape = [draw(st.integers(1, 4)) for _ in range(3)]
        shape[axis] = 2 * rows
        return S.gate_up(k, axis), tuple(shape)
    segments = draw(
        st.lists(
            st.builds(Segment, small)
            | st.builds(lambda n, dim: Segment(n * dim, n), counts, st.integers(1, 4)),
            min_size=1,
            max_size=4,
        )
    )
    total = sum(s.size for s in segments)
    return S.segmented(k, draw(st.sampled_from([0, -2])), segments), (total, cols)


@given(cut_weights())
def test_pieces_of_all_devices_hold_each_element_once(case: tuple[ShardingStrategy, tuple[int, ...]]) -> None:
    strategy, shape = case
    tiling = strategy.layout(shape, "bf16")
    found = held(tiling)
    assert set(found.values()) <= {1}
    assert len(found) == np.prod(shape)
    array = np.arange(np.prod(shape)).reshape(shape)
    for index, part in enumerate(Weight("w", array, strategy).shard()):
        assert part.shape == tiling.local_shape(index) == part.array.shape
        assert np.array_equal(part.array, strategy(array, index))
        for tile in tiling.tiles(index):
            assert np.array_equal(
                part.array[relative_slices(tile.local, full_box(part.shape))],
                array[relative_slices(tile.box, full_box(shape))],
            )


@given(
    k=counts, kv=counts, per_group=st.integers(1, 5), dim=st.integers(1, 3),
    few=st.sampled_from(["replicate", "empty"]),
)  # fmt: skip
def test_a_key_value_head_is_where_its_queries_are(
    k: int, kv: int, per_group: int, dim: int, few: Any
) -> None:
    heads = kv * per_group
    make = {
        section: S.grouped_qkv(k, heads, kv, dim, few_kv=few, section=section)  # type: ignore[arg-type]
        for section in ("qkv", "q", "kv")
    }
    fused = make["qkv"].layout(((heads + 2 * kv) * dim, 2))
    queries, keys = make["q"].layout((heads * dim, 2)), make["kv"].layout((kv * dim, 2))
    assert set(held(queries).values()) == {1}
    copies = held(keys)
    assert len(copies) == kv * dim * 2
    if kv >= k or few == "empty":
        assert set(copies.values()) == {1}
    seen: Counter[int] = Counter()
    for rank in range(k):
        q = {h // dim for t in queries.tiles(rank) for h in range(*t.box[0])}
        mine = {h // dim for t in keys.tiles(rank) for h in range(*t.box[0])}
        assert {h // per_group for h in q} == mine
        seen.update(q)
        sections = [tuple(t.box[0]) for t in fused.tiles(rank)]
        assert {r for a, b in sections for r in range(a, b)} == (
            {h * dim + d for h in q for d in range(dim)}
            | {(heads + h) * dim + d for h in mine for d in range(dim)}
            | {(heads + kv + h) * dim + d for h in mine for d in range(dim)}
        )
    assert set(seen.values()) == {1}
    assert len(seen) == heads
    if few == "replicate" and kv < k <= heads and per_group >= -(-k // kv):
        assert all(queries.local_elems(r) for r in range(k))


def test_grouped_counts_as_asked() -> None:
    def heads_of(**args: Any) -> list[int]:
        tiling = S.grouped_qkv(4, 9, 3, 64, section="q", **args).layout((576, 1))
        return [tiling.local_shape(r)[0] // 64 for r in range(4)]

    assert heads_of() == [2, 1, 3, 3]
    assert heads_of(few_kv="empty") == [3, 3, 3, 0]
    with pytest.raises(ValueError, match="use at most 3"):
        S.grouped_qkv(4, 9, 3, 64, few_kv="refuse")
    with pytest.raises(ValueError, match="multiple of"):
        S.grouped_qkv(4, 9, 2, 64)
    with pytest.raises(ValueError, match="few_kv is one of"):
        S.grouped_qkv(4, 9, 3, 64, few_kv="share")  # type: ignore[arg-type]
    assert S.grouped_qkv(2, 9, 3, 64, section="q", axis=1).pieces((10, 576), 1) == [((0, 10), (384, 576))]
