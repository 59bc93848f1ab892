"""The published solver's truth table: same placements, same collectives, same prices; where a published row is unsound,
a pick that preserves values instead."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from support import mode
from support.recorded import oracle

from lowshard import DeviceMesh, Layout, Partial, Replicated, Sharded, ShardingError
from lowshard.errors import BudgetError, PolicyError
from lowshard.solver import (
    AxisAssignment,
    GreedyReshard,
    NoReshard,
    PartialsOnly,
    action_set,
    build_action_set,
    pick,
)
from lowshard.solver.greedy import needed_bytes

DATA: dict[str, Any] = oracle("max_greedy")
ITEM = {1: "int8", 2: "float16", 4: "float32", 8: "float64"}
OUR_NAME = {"allgather": "all_gather", "allreduce": "all_reduce"}


def placement(code: str) -> Any:
    if code == "R":
        return Replicated()
    return {"P": Partial("sum"), "A": Partial("avg")}.get(code) or Sharded(int(code[1:]))


def layout(mesh: DeviceMesh, given: dict[str, Any]) -> Layout:
    placements = tuple(placement(c) for c in given["placements"])
    return Layout(mesh, given["shape"], ITEM[given.get("itemsize", 4)], placements)


def codes(lay: Layout) -> list[str]:
    return [str(p).replace("P:avg", "A") for p in lay.placements]


def moves(action: Any) -> list[list[dict[str, Any]]]:
    def told(m: Any) -> dict[str, Any]:
        ends = {"from": str(m.source), "to": str(m.target)}
        return {"mesh_axis": m.mesh_axis, **ends, "collective": m.collective, "cost_bytes": m.cost_bytes}

    return [[told(m) for m in operand] for operand in action.reshards]


def expected_moves(expected: dict[str, Any]) -> list[list[dict[str, Any]]]:
    return [
        [{**move, "collective": OUR_NAME.get(move["collective"], move["collective"])} for move in operand]
        for operand in expected["reshard"]
    ]


def mesh_of(case: dict[str, Any]) -> DeviceMesh:
    return DeviceMesh(case["mesh"]["shape"], case["mesh"]["axes"], case.get("memory_budget_bytes_per_device"))


@pytest.mark.parametrize("case", mode.sample(DATA["cases"], 50, "published cases"), ids=lambda c: c["id"])
def test_a_published_case(case: dict[str, Any]) -> None:
    mesh = mesh_of(case)
    layouts = [layout(mesh, given) for given in case["inputs"]]
    solver = GreedyReshard(**case["flag"])
    expected = case["expected"]
    if "error" in expected:
        kind = {"budget": BudgetError, "policy": PolicyError}[expected["error"]]
        with pytest.raises(kind):
            pick(case["op"], layouts, solver=solver, rules="documented", **case["args"])
        return
    action = pick(case["op"], layouts, solver=solver, rules="documented", **case["args"])
    if expected["numeric_check"] != "ok":
        newer = case["expected_newer_picker"]
        if isinstance(newer, dict) and newer["numeric_check"] == "ok":
            assert [codes(x) for x in action.inputs] == newer["inputs"]
            assert action.cost_bytes == newer["cost_bytes"]
        else:
            assert [codes(x) for x in action.inputs] != expected["inputs"]
        return
    assert [codes(x) for x in action.inputs] == expected["inputs"]
    assert codes(action.outputs[0]) == expected["output"]
    assert action.cost_bytes == expected["cost_bytes"]
    assert moves(action) == expected_moves(expected)


LETTERS = [(a, b) for a in "PRS" for b in "PRS" if a != b or a == "S"]


def test_what_is_not_allowed_is_never_chosen(rng: np.random.Generator, full: bool) -> None:
    """Beside trying every action on the published cases, with random sets of allowed transitions."""
    seen = set()
    for case, rules in product(DATA["cases"], ("documented", "extended")):
        budget, flag = mesh_of(case).smallest_budget_bytes, case["flag"]["allow_partial_to_sharded"]
        layouts = [layout(mesh_of(case), given) for given in case["inputs"]]
        found = action_set(case["op"], layouts, rules, **case["args"])
        fits = [
            (
                x.cost_bytes,
                x.rows,
                {(str(m.source)[0], str(m.target)[0]) for each in x.reshards for m in each},
            )
            for x in found.actions()
            if budget is None or needed_bytes(found, x.rows) <= budget
        ]
        for _ in range(20 if full else 2):
            allowed = {pair for pair in LETTERS if rng.random() < 0.6}
            left = [x for x in fits if x[2] <= allowed and (flag or ("P", "S") not in x[2])]
            greedy = GreedyReshard("silent", flag, allowed)
            seen.add((bool(left), bool(fits)))
            if left:
                assert greedy(found, layouts).rows == min(left, key=lambda x: x[0])[1], (case["id"], allowed)
            else:
                with pytest.raises(PolicyError if fits else BudgetError):
                    greedy(found, layouts)
    assert len(seen) == 3


def test_a_refusal_says_which_transitions_to_allow() -> None:
    given = Layout(DeviceMesh((4,), ("tp",)), (8, 8), "float32", (Partial(),))
    greedy = GreedyReshard(allowed_transitions=[("S", "R")])
    with pytest.raises(
        PolicyError, match=r"(?s)'tp' .*\(P -> R, P -> S\): .*=True and add .*'S'.*not allowed: P -> S"
    ):
        pick("relu", [given], solver=greedy)
    mesh = DeviceMesh((2, 2), ("a", "b"))
    nested = [Layout.from_spec(mesh, (8,), "float32", [names]) for names in (("a", "b"), ("b", "a"))]
    with pytest.raises(PolicyError, match="nesting"):
        pick("add", nested, solver=greedy)
    for wrong in ("PR", ["PR"], [("P",)], [("S0", "R")], 3, {("P", "R"): 1}):
        with pytest.raises(ShardingError, match="allowed_transitions is a set of pairs"):
            GreedyReshard(allowed_transitions=wrong)  # type: ignore[arg-type]


SOLVERS = {
    "NoReshard": NoReshard(),
    "PartialsOnly": PartialsOnly(),
    "GreedyReshard(False)": GreedyReshard(allow_partial_to_sharded=False),
    "GreedyReshard(True)": GreedyReshard(allow_partial_to_sharded=True),
}


@pytest.mark.parametrize("number", range(len(DATA["cost_free_solvers"])))
def test_a_published_case_of_the_other_solvers(number: int) -> None:
    case = DATA["cost_free_solvers"][number]
    mesh = DeviceMesh(case["mesh"], ("tp",))
    given = layout(mesh, case["input"])
    rows = [AxisAssignment(tuple(map(placement, r["needs"])), placement(r["out"])) for r in case["rule_rows"]]
    found = build_action_set(rows, layouts=[given])
    expected = case["expected_input_placement"]
    if isinstance(expected, dict):
        with pytest.raises(ShardingError):
            SOLVERS[case["solver"]](found, [given])
    else:
        assert codes(SOLVERS[case["solver"]](found, [given]).inputs[0]) == expected


@pytest.mark.parametrize("case", [c for c in DATA["chains"] if "steps" in c], ids=lambda c: c["id"])
def test_a_published_chain(case: dict[str, Any]) -> None:
    mesh = mesh_of(case)
    known = {name: layout(mesh, given) for name, given in case["tensors"].items()}
    solver = GreedyReshard(allow_partial_to_sharded=case["allow_partial_to_sharded"])
    total = 0.0
    for step in case["steps"]:
        action = pick(step["op"], [known[n] for n in step["inputs"]], solver=solver, rules="documented")
        known[step["out"]] = action.outputs[0]
        total += action.cost_bytes
        assert codes(action.outputs[0]) == step["placement"], step
        came = [{k: v for k, v in m.items()} for operand in moves(action) for m in operand]
        wanted = [
            {k: OUR_NAME.get(v, v) if k == "collective" else v for k, v in m.items() if k != "tensor"}
            for m in step["reshard"]
        ]
        assert came == wanted, step
    assert total == case["total_cost_bytes"]
