"""The published solver's truth table: same placements, same collectives, same prices; where a published row is unsound,
a pick that preserves values instead."""

from __future__ import annotations

from typing import Any

import pytest
from support import mode
from support.recorded import oracle

from lowshard import DeviceMesh, Layout, Partial, Replicated, Sharded, ShardingError
from lowshard.errors import BudgetError, PolicyError
from lowshard.solver import AxisAssignment, GreedyReshard, NoReshard, PartialsOnly, build_action_set, pick

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
    return [
        [
            {
                "mesh_axis": m.mesh_axis,
                "from": str(m.source),
                "to": str(m.target),
                "collective": m.collective,
                "cost_bytes": m.cost_bytes,
            }
            for m in operand
        ]
        for operand in action.reshards
    ]


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
