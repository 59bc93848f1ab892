"""Paths over placements: the steps that plans are made of, what they cost, and what they never do."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.layouts import layouts, meshes
from support.moves import placements_of

from lowshard import DeviceMesh, Layout, plan_redistribute, predict_redistribute
from lowshard.box import contains, intersect, volume
from lowshard.cost import ClusterProfile, Curve, Piece
from lowshard.errors import PlanError
from lowshard.placement import parse_placement
from lowshard.redistribute_plan import RedistributePlan
from lowshard.step_cost import Prices, prices_of

PROFILE = ClusterProfile.default()


def plan_of(
    text: str, grid: tuple[int, ...], cost: ClusterProfile | None = None, node_size: int | None = None,
    shape: tuple[int, ...] = (4096, 4096), dtype: str = "float32",
) -> RedistributePlan:  # fmt: skip
    mesh = DeviceMesh(grid, ("a", "b", "c")[: len(grid)])
    before, after = ([parse_placement(p) for p in side.split(",")] for side in text.split("->"))
    src = Layout(mesh, shape, dtype, before)
    return plan_redistribute(src, src.with_placements(after), cost, node_size)


@pytest.mark.parametrize("cost", [None, PROFILE], ids=["by bytes", "by seconds"])
@pytest.mark.parametrize(
    ("text", "grid", "kinds"),
    [
        ("S0->R", (4,), ["all_gather"]),
        ("S0->S1", (4,), ["all_to_all"]),
        ("P->S0", (4,), ["reduce_scatter"]),
        ("P->R", (4,), ["all_reduce"]),
        ("P:max->R", (4,), ["all_reduce"]),
        ("R->S1", (4,), ["slice"]),
        ("R->P", (4,), ["keep_one"]),
        ("S0->P", (4,), ["exchange"]),
        ("S0->S0", (4,), []),
        ("S0,S1->S1,S0", (2, 2), ["exchange"]),
        ("S0,R->R,S0", (2, 2), ["exchange"]),
        ("S0,S0->R,S0", (2, 2), ["exchange"]),
        ("R,S0->S0,S0", (2, 2), ["exchange"]),
        ("S1,S0->S1,R", (2, 4), ["all_gather"]),
        ("P,S0->R,S1", (2, 2), ["exchange", "all_gather"]),
        ("S0,P->S0,R", (2, 4), ["all_reduce"]),
        ("P,P->S0,S0", (2, 2), ["reduce_scatter"]),
    ],
)
def test_the_steps_of_a_transition_have_the_names_of_the_field(
    text: str, grid: tuple[int, ...], kinds: list[str], cost: ClusterProfile | None
) -> None:
    assert [step.kind for step in plan_of(text, grid, cost).steps] == kinds


@pytest.mark.parametrize("cost", [None, PROFILE], ids=["by bytes", "by seconds"])
def test_a_step_with_the_name_of_a_collective_moves_what_that_collective_moves(
    cost: ClusterProfile | None,
) -> None:
    """Over n ranks: a part of (n - 1) / n of the whole operand, twice for an all_reduce."""
    grid = (2, 3)  # axes of the same length would hide a step along the wrong one
    named = set()
    for before, after in product(product(("R", "S0", "S1", "P"), repeat=2), repeat=2):
        for step in plan_of(f"{','.join(before)}->{','.join(after)}", grid, cost, shape=(36, 36)).steps:
            if step.kind in ("slice", "keep_one", "exchange"):
                continue
            named.add(step.kind)
            n = math.prod(step.src.mesh.axis_size(axis) for axis in step.axes)
            for rank in range(6):
                whole_bytes = max(step.src.local_bytes(rank), step.dst.local_bytes(rank))
                times = 2 if step.kind == "all_reduce" else 1
                assert step.received_bytes(rank) == times * whole_bytes * (n - 1) // n, str(step)
    assert named == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}


def test_across_nodes_a_reduction_crosses_once_a_node() -> None:
    plan = plan_of("P,P->R,R", (2, 4), PROFILE, node_size=4)
    assert [(s.kind, s.axes) for s in plan.steps] == [
        ("reduce_scatter", ("b",)), ("all_reduce", ("a",)), ("all_gather", ("b",)),
    ]  # fmt: skip
    flat = plan_of("P,P->R,R", (2, 4), None, node_size=4)
    assert [s.kind for s in flat.steps] == ["all_reduce"]

    def crossing(plan: RedistributePlan) -> int:
        pieces = [p for s in plan.steps for e in s.exchanges for r in range(8) for p in e.incoming(r)]
        return sum(p.elems for p in pieces if p.src_rank // 4 != p.dst_rank // 4)

    assert crossing(plan) < crossing(flat)


@pytest.mark.parametrize(
    ("text", "grid", "dtype"),
    [
        ("P,P->R,R", (2, 4), "bfloat16"),
        ("P,P->R,R", (2, 3), "float32"),
        ("P:avg,P:avg->R,R", (2, 4), "int32"),
    ],
)
def test_what_is_rounded_or_ordered_otherwise_axis_by_axis_is_folded_at_once(
    text: str, grid: tuple[int, int], dtype: str
) -> None:
    for node_size in (None, grid[1]):
        plan = plan_of(text, grid, PROFILE, node_size, dtype=dtype)
        assert [len(step.folded) for step in plan.steps if step.folded] == [2]


@given(st.data())
def test_no_chain_takes_longer_than_the_direct_way_nor_holds_more_than_both_ends(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    src = data.draw(layouts(mesh, dtype="float32"))
    dst = data.draw(layouts(mesh, src.shape, "float32"))
    node_size = data.draw(st.sampled_from([None, 1, 2, 4]))
    plan = plan_redistribute(src, dst, PROFILE, node_size)
    least = plan_redistribute(src, dst, None, node_size)
    assert plan.predicted_s <= least.predicted_s * 1.001 + 1e-9
    most = max(src.local_bytes(r) for r in mesh.ranks) + max(dst.local_bytes(r) for r in mesh.ranks)
    for step in plan.steps:
        assert max(step.dst.local_bytes(r) for r in mesh.ranks) <= most
        assert step.predicted_s > 0
    here = src
    for step in plan.steps:
        for part in step.exchanges:
            assert part.src == here
            here = part.dst
    assert here == dst


@given(st.data())
def test_each_element_that_a_rank_lacks_comes_once_from_the_nearest_holder(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    src = data.draw(layouts(mesh, dtype="float32", partial=False))
    dst = data.draw(layouts(mesh, src.shape, "float32", partial=False))
    node_size = data.draw(st.sampled_from([1, 2, 4, 8]))
    for step in plan_redistribute(src, dst, None, node_size).steps:
        for part in step.exchanges:
            for rank in mesh.ranks:
                pieces = part.incoming(rank)
                assert sum(p.elems for p in pieces) == dst.local_elems(rank)
                own = intersect(dst.box(rank), src.box(rank))
                held = 0 if own is None else volume(own)
                assert sum(p.elems for p in pieces if p.src_rank == rank) == held
                for piece in pieces:
                    assert contains(src.box(piece.src_rank), piece.box)
                    near = [r for r in mesh.ranks if r // node_size == rank // node_size
                            and contains(src.box(r), piece.box)]  # fmt: skip
                    assert not near or piece.src_rank in near
            both = [sorted((p.src_rank, p.dst_rank, p.box) for r in mesh.ranks for p in side(r))
                    for side in (part.incoming, part.outgoing)]  # fmt: skip
            assert both[0] == both[1]


def test_predictions_are_kept_and_equal_what_the_plan_says() -> None:
    mesh = DeviceMesh((2, 2), ("a", "b"))
    every = [Layout(mesh, (64, 96), "float32", c) for c in product(placements_of(2), repeat=2)]
    for src, dst in random.Random(1).sample(list(product(every, repeat=2)), 60):
        for cost in (None, PROFILE):
            plan = plan_redistribute(src, dst, cost)
            assert predict_redistribute(src, dst, cost) == plan.predicted_s
            assert plan_redistribute(src, dst, cost) is plan
            assert (plan.predicted_s == 0) == (not plan.steps)


def test_a_profile_without_a_curve_is_helped_out() -> None:
    only = Curve("all_gather", "node", 2, (Piece(1e-6, 1e-9),))
    prices = Prices(ClusterProfile((only,)))
    assert prices.seconds("all_gather", 2, 1000, "network") == pytest.approx(only.seconds(2, 1000))
    assert prices.seconds("all_reduce", 2, 1000) == pytest.approx(Prices().seconds("all_reduce", 2, 1000))
    assert prices.seconds("all_gather", 1, 1000) == 0
    assert prices_of(PROFILE) is prices_of(PROFILE)
    slow, fast = (Curve("all_gather", "node", n, (Piece(s, 0.0),)) for n, s in ((2, 1e-6), (8, 1e-4)))
    both = Prices(ClusterProfile((slow, fast))).seconds("all_gather", 4, 1000)  # 4 is half way from 2 to 8
    assert both == pytest.approx((slow.seconds(4, 0) * fast.seconds(4, 0)) ** 0.5)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda data: data["steps"][0].update(kind="teleport"),
            "kind: expected 'all_gather' or .* got 'teleport'",
        ),
        (lambda data: data["steps"][0]["exchanges"][0].pop("src"), "not a valid redistribution plan"),
        (lambda data: data.update(dst=data["src"]), "do not lead from its src to its dst"),
        (lambda data: data.update(steps=[]), "do not lead from its src to its dst"),
        (lambda data: data["steps"][0].update(kind="slice"), "step 1 of this plan is not what leads"),
        (
            lambda data: data["steps"][0].update(note=1),
            "`note`; the keys are kind, axes, exchanges, predicted_s",
        ),
    ],
)
def test_a_plan_that_was_spoilt_is_refused(change: object, text: str) -> None:
    data = plan_of("S0->R", (2,)).to_json()
    change(data)  # type: ignore[operator]
    with pytest.raises(PlanError, match=text):
        RedistributePlan.from_json(data)
