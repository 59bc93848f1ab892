"""Meshes, layouts, actions and plans as values: equal ones have equal digests, and what is written is read back."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import numpy as np
import pytest

from lowshard import DeviceMesh, Layout, Replicated, Sharded
from lowshard.errors import LayoutError
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


# ---- equal values, equal digests


@pytest.mark.parametrize(
    ("a", "b"), [(1000, 1000.0), (1000, np.float32(1000)), ({0: 1000, 1: 5}, {1: 5.0, 0: 1000.0}), (0, -0.0)]
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
