"""Meshes, layouts, actions and plans as values: equal ones have equal digests, and what is written is read back."""

from __future__ import annotations

import copy
import json
import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lowshard import DeviceMesh, Layout, Replicated, Sharded, plan_redistribute
from lowshard.errors import LayoutError, MeshError, PlanError
from lowshard.placement import parse_placement
from lowshard.rules import load_rules
from lowshard.solver import Action, Graph, GraphPlan, GraphSolver, GreedyReshard, action_set, pick
from lowshard.solver.assignment import replicated_row
from lowshard.solver.greedy import clear_picks

MESH = DeviceMesh((2,), ("x",))
X = Layout(MESH, (4, 4), "float32", (Sharded(0),))


def padded(value: Any) -> Action:
    return pick("pad", [X], pads=[(0, 0), (1, 1)], value=value)


def plan_of(value: Any) -> GraphPlan:
    graph = Graph()
    x = graph.input("x", (4, 4))
    graph.output(graph.op("pad", x, pads=[(0, 0), (1, 1)], value=value))
    return GraphSolver().solve(graph, MESH)


# ---- budgets


def with_budget(budget: Any) -> Layout:
    return Layout(DeviceMesh((2,), ("x",), budget), (4, 4), "float32", (Replicated(),))


def test_a_budget_of_a_rank_outside_the_mesh_decides_nothing() -> None:
    mesh = DeviceMesh((2,), ("x",), {0: 10**6, 1: 2 * 10**6, 7: 1})
    assert mesh.smallest_budget_bytes == 10**6
    assert DeviceMesh((2,), ("x",), {7: 1}).smallest_budget_bytes is None
    assert DeviceMesh((2,), ("x",), {}).smallest_budget_bytes is None
    assert DeviceMesh((2,), ("x",), {0: 3, 4: 2, 7: 1}, ranks=(4, 7)).smallest_budget_bytes == 1
    layout = Layout(mesh, (4, 4), "float32", (Replicated(),))
    assert action_set("relu", [layout]).mesh.smallest_budget_bytes == 10**6
    assert pick("relu", [layout], solver=GreedyReshard()).moves_nothing
    graph = Graph()
    graph.output(graph.op("relu", graph.input("x", (4, 4))))
    assert GraphSolver().solve(graph, mesh).budget_bytes == 10**6
    rules = load_rules("pure-fsdp")
    whole = rules.mesh(2)
    for of_ranks, fits in (({0: 10**6, 7: 1}, True), ({}, True), ({0: 1}, False)):
        budgeted = DeviceMesh(whole.shape, whole.axis_names, of_ranks)
        assert rules.check({"w": (("embed", "mlp"), (8, 8))}, mesh=budgeted).ok is fits


def test_a_budget_is_below_two_to_the_63() -> None:
    most = (1 << 63) - 1
    mesh = DeviceMesh((2,), ("x",), most)
    assert DeviceMesh.from_json(json.loads(json.dumps(mesh.to_json()))) == mesh
    for budget in (1 << 63, 2.0**63, {0: 2**70}, math.inf, math.nan):
        with pytest.raises(MeshError, match="below 2\\^63"):
            DeviceMesh((2,), ("x",), budget)


# ---- equal values, equal digests


@pytest.mark.parametrize(
    ("a", "b"),
    [(1000, 1000.0), (1000, np.float32(1000)), ({0: 1000, 1: 5}, {1: 5.0, 0: 1000.0}), (0, -0.0)],
)
def test_equal_meshes_and_layouts_have_equal_digests(a: Any, b: Any) -> None:
    first, second = with_budget(a), with_budget(b)
    assert first.mesh == second.mesh
    assert hash(first.mesh) == hash(second.mesh)
    assert json.dumps(first.mesh.to_json()) == json.dumps(second.mesh.to_json())
    assert first == second
    assert first.digest() == second.digest()
    actions = [action_set("relu", [x]).action([replicated_row(1)]) for x in (first, second)]
    assert actions[0].digest() == actions[1].digest()


VALUES = (0, 0.0, -0.0, False, 1, 1.0, True, 0.5, math.inf, -math.inf, math.nan, float("nan"))


def test_actions_and_plans_are_equal_exactly_where_their_digests_are() -> None:
    for make in (padded, plan_of):
        made = []
        for value in VALUES:
            clear_picks()
            made.append(make(value))
        for a in made:
            for b in made:
                assert (a == b) is (a.digest() == b.digest()), (a, b)
    actions = [padded(value) for value in VALUES]
    assert len(set(actions)) == len({a.digest() for a in actions}) == len(VALUES) - 1


def test_the_bytes_inside_a_row_are_written_alike() -> None:
    offered = action_set("softmax", [Layout(MESH, (4, 4), "float32", (Sharded(1),))])
    row = next(row for row in offered.axis_assignments if row.inner)
    action = offered.action([row])
    inner = tuple((name, int(own)) for name, own in row.inner)
    other = replace(action, rows=(replace(row, inner=inner),))
    assert other == action
    assert other.digest() == action.digest()


def test_an_action_is_not_equal_to_other_things_and_is_to_its_copies() -> None:
    action = padded(2)
    assert action != "pad"
    assert action is not None
    for twin in (copy.copy(action), copy.deepcopy(action), pickle.loads(pickle.dumps(action))):
        assert twin == action
        assert hash(twin) == hash(action)


# ---- what is written is read


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan, 0.5, -0.0, 3])
def test_an_argument_that_is_not_finite_is_written(value: float) -> None:
    action = padded(value)
    plan = plan_of(value)
    json.dumps(plan.to_json(), allow_nan=False)
    for made in (action, plan):
        again = pickle.loads(pickle.dumps(made))
        assert math.isnan(value) or again == made  # NaN is itself no more
        assert again.digest() == made.digest()


@pytest.mark.parametrize(
    "text", [f"float32[{'9' * 19}] x=R", f"float32[{','.join('1' * 65)}] x=R", f"float32[0,{2**62}] x=R"]
)
def test_no_layout_is_parsed_that_cannot_be_made(text: str) -> None:
    with pytest.raises(LayoutError, match="extents"):
        Layout.parse(MESH, text)


@pytest.mark.parametrize("placement", [Sharded(-1), Sharded(-2, "ceil"), Sharded(3)])
def test_a_placement_is_read_from_its_text(placement: Sharded) -> None:
    assert parse_placement(str(placement)) == placement


def test_a_layout_is_parsed_with_a_dim_that_counts_from_the_end() -> None:
    assert Layout.parse(MESH, "float32[4,6] x=S-1") == Layout(MESH, (4, 6), "float32", (Sharded(1),))
    with pytest.raises(LayoutError, match="dims are 0 to 1"):
        Layout.parse(MESH, "float32[4,6] x=S-3")


def test_what_is_no_integer_is_not_in_a_mesh() -> None:
    assert 1 in MESH
    assert np.int64(1) in MESH
    assert np.array(1) in MESH
    for other in (np.array([1, 2]), np.array([1.0]), np.array([1, 0]), 1.0, "1", None, True, 2, -1):
        assert other not in MESH


# ---- integers of NumPy are integers


def test_a_node_size_of_numpy_is_one() -> None:
    src = Layout(DeviceMesh((2, 2), ("a", "b")), (8, 8), "float32", (Sharded(0), Replicated()))
    dst = src.with_placements((Replicated(), Sharded(1)))
    plan = plan_redistribute(src, dst, node_size=np.int64(2))  # type: ignore[arg-type]
    assert plan is plan_redistribute(src, dst, node_size=2)
    json.dumps(plan.to_json())
    for node_size in (0, True, 2.0, "2", np.float64(2)):
        with pytest.raises(PlanError, match="node_size is a number of ranks >= 1"):
            plan_redistribute(src, dst, node_size=node_size)  # type: ignore[arg-type]
