"""Solvers as values: what GreedyReshard picks, refuses and says; contexts; what is kept of picks."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from support.op_gate import MESHES, random_layout
from support.op_samples import SAMPLES

from lowshard import DeviceMesh, Layout, LowshardError, Partial, Replicated, Sharded, ShardingError
from lowshard.errors import BudgetError, LayoutError, PolicyError, SolverError
from lowshard.solver import (
    Action,
    ActionSet,
    AxisAssignment,
    GreedyReshard,
    NoReshard,
    PartialsOnly,
    action_set,
    build_action_set,
    clear_picks,
    current_solver,
    force_replicated,
    pick,
    solver,
)
from lowshard.solver.greedy import needed_bytes

R, P = Replicated(), Partial("sum")
Rng = np.random.Generator


def lay(
    shape: Sequence[int], *placements: Any, mesh: DeviceMesh | None = None, dtype: str = "float32"
) -> Layout:
    return Layout(mesh or DeviceMesh((4,), ("tp",)), shape, dtype, placements)


def random_case(
    rng: Rng, op: str, rules: str, mesh: DeviceMesh | None = None
) -> tuple[list[Layout], dict[str, Any]]:
    arrays, args = SAMPLES[op](rng)
    if mesh is None:
        shape = MESHES[int(rng.integers(len(MESHES)))]
        mesh = DeviceMesh(shape, ("dp", "tp", "pp")[: len(shape)])
    ops = ("sum", "avg", "max", "min", "prod")[: 5 if rules == "extended" else 1]
    return [random_layout(rng, mesh, x, ops) for x in arrays], args


# ---- the choice


def exhaustive(found: ActionSet, budget: float | None, allows_shards: bool, allowed: set[Any]) -> Any:
    """Return the documented choice by trying every combination, or why there is none."""
    every = [
        c
        for c in product(*(found.candidates(a) for a in range(found.mesh.ndim)))
        if found.commute([x.row for x in c])
    ]
    if not every:
        return SolverError
    if budget is not None:
        every = [c for c in every if needed_bytes(found, [x.row for x in c]) <= budget]
        if not every:
            return BudgetError
    every = [c for c in every if allows_shards or not any(x.reduces_to_shards for x in c)]
    every = [c for c in every if all(found.transitions(a, x.row) <= allowed for a, x in enumerate(c))]
    if not every:
        return PolicyError
    best = every[0]
    for combination in every[1:]:
        if sum(x.cost_bytes for x in combination) < sum(x.cost_bytes for x in best):
            best = combination
    rows = tuple(x.row for x in best)
    moves = [m.collective for each in found.action(rows).reshards for m in each]
    # Nested or split anew.
    return PolicyError if "all_to_all" in moves and ("S", "S") not in allowed else rows


@pytest.mark.parametrize("rules", ["documented", "extended"])
def test_greedy_is_the_exhaustive_choice(rules: str, rng: Rng, full: bool) -> None:
    kinds: set[Any] = set()
    for _ in range(3000 if full else 300):
        op = str(rng.choice(["matmul", "add", "relu", "softmax", "where", "gather", "concat", "mul", "max"]))
        shape = MESHES[int(rng.integers(len(MESHES)))]
        budget = None if rng.random() < 0.3 else int(rng.integers(1, 400))
        mesh = DeviceMesh(shape, ("dp", "tp", "pp")[: len(shape)], budget)
        layouts, args = random_case(rng, op, rules, mesh)
        found = action_set(op, layouts, rules=rules, **args)  # type: ignore[arg-type]
        allows = bool(rng.integers(2))
        allowed = {pair for pair in product("PRS", repeat=2) if rng.random() < 0.8}
        expected = exhaustive(found, budget, allows, allowed)
        greedy = GreedyReshard(allow_partial_to_sharded=allows, allowed_transitions=allowed)
        if isinstance(expected, type):
            kinds.add(expected)
            with pytest.raises(expected):
                greedy(found, layouts)
        else:
            kinds.add("picked")
            assert greedy(found, layouts).rows == expected
    assert {"picked", BudgetError} <= kinds


@pytest.mark.parametrize("rules", ["documented", "extended"])
def test_partial_never_becomes_sharded_on_any_axis_when_the_flag_is_off(
    rules: str, rng: Rng, full: bool
) -> None:
    seen = 0
    for op in sorted(SAMPLES):
        for _ in range(60 if full else 6):
            layouts, args = random_case(rng, op, rules)
            try:
                action = pick(op, layouts, rules=rules, **args)  # type: ignore[arg-type]
            except SolverError:
                continue
            for source, wanted in zip(layouts, action.inputs, strict=True):
                for have, need in zip(source.placements, wanted.placements, strict=True):
                    seen += isinstance(have, Partial)
                    assert not (isinstance(have, Partial) and isinstance(need, Sharded)), action.explain()
    assert seen > 50


def test_extended_is_never_priced_above_documented(rng: Rng, full: bool) -> None:
    for op in sorted(SAMPLES):
        for _ in range(40 if full else 4):
            layouts, args = random_case(rng, op, "documented")
            for flag in (False, True):
                s = GreedyReshard(allow_partial_to_sharded=flag)
                try:
                    theirs = pick(op, layouts, solver=s, rules="documented", **args)
                except SolverError:
                    continue
                ours = pick(op, layouts, solver=s, **args)
                assert ours.cost_bytes <= theirs.cost_bytes + 1e-9, f"{ours.explain()}\n{theirs.explain()}"


def test_rows_whose_reductions_do_not_commute_are_not_combined() -> None:
    """A masked lookup leaves a sum to do, a table that is a max leaves a max: not both of one tensor."""
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    table = lay((8, 4), Sharded(0), Partial("max"), mesh=mesh)
    ids = lay((6,), R, R, mesh=mesh)
    found = action_set("gather", [table, ids], axis=0)
    by_axis = [{str(c.row.output) for c in found.candidates(a)} for a in range(2)]
    assert ("P" in by_axis[0], "P:max" in by_axis[1]) == (True, True)
    picked = pick("gather", [table, ids], axis=0)
    assert {str(p) for p in picked.outputs[0].placements} != {"P", "P:max"}
    assert all(len({op for op in x.outputs[0].partials if op}) < 2 for x in found.actions())


# ---- the budget


def test_a_budget_is_inclusive_and_the_smallest_that_would_do_does() -> None:
    def given(budget: float | None) -> list[Layout]:
        mesh = DeviceMesh((4,), ("tp",), budget)
        return [lay((64, 64), R, mesh=mesh), lay((64, 64), R, mesh=mesh)]

    picked = {b: str(pick("matmul", given(b)).inputs[0].placements[0]) for b in (32768, 32767, 20479)}
    assert picked == {32768: "R", 32767: "S0", 20479: "S1"}
    with pytest.raises(BudgetError) as caught:
        pick("matmul", given(8191))
    text = str(caught.value)
    assert "tightest tensor is operand 0, float32[64,64] tp=R: 4,096 bytes" in text
    least = int(re.search(r"smallest budget that would do is (\d+) bytes", text)[1])  # type: ignore[index]
    pick("matmul", given(least))
    with pytest.raises(BudgetError):
        pick("matmul", given(least - 1))
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, LowshardError)


def test_a_policy_error_says_what_to_pass() -> None:
    mesh = DeviceMesh((4,), ("tp",), 4095)
    given = lay((1024,), P, mesh=mesh)
    with pytest.raises(
        PolicyError, match=r"allow_partial_to_sharded=True.*\n.*operand 0(.*\n)+.*not allowed: P -> S"
    ):
        pick("relu", [given])
    assert pick("relu", [given], solver=GreedyReshard(allow_partial_to_sharded=True)).inputs[
        0
    ].placements == (Sharded(0),)


# ---- saying so


def test_on_reshard_warns_or_raises_with_the_candidates() -> None:
    given = [lay((4, 8), Sharded(0)), lay((8, 6), Sharded(1))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pick("matmul", given)
    with pytest.warns(
        UserWarning, match=r"(?s)operands must move.*all_to_all.*axis +operand 0 +operand 1.*chosen"
    ):
        pick("matmul", given, solver=GreedyReshard(on_reshard="warn"))
    with pytest.raises(ShardingError, match=r"(?s)redistribute\(local, src, Layout.parse.*chosen"):
        pick("matmul", given, solver=GreedyReshard("raise"))
    kept = [lay((4, 8), Sharded(1)), lay((8, 6), Sharded(0))]
    assert pick("matmul", kept, solver=GreedyReshard("raise")).moves_nothing
    with pytest.raises(ShardingError, match="on_reshard"):
        GreedyReshard("loud")  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match="allow_partial_to_sharded is True or False"):
        GreedyReshard(allow_partial_to_sharded=np.ones(2))  # type: ignore[arg-type]


def test_an_explanation_names_moves_prices_and_the_choice() -> None:
    given = [lay((4, 8), P), lay((8, 6), P)]
    text = pick("matmul", given, rules="documented").explain()
    assert "tp: P -> R by all_reduce, 192 bytes" in text
    assert "operand 1: float32[8,6] tp=P, as it comes" in text
    assert len(re.findall("chosen", text)) == 1
    inside = pick("softmax", [lay((4, 8000), Sharded(1))]).explain()
    assert "all-reduce a maximum or sums" in inside
    # A refused published row is told of.
    assert "refused: (Sk, Sq)" in pick("gather", [lay((8, 4), R), lay((4,), R)], axis=0).explain()
    # A pick that was made before has the same text.
    clear_picks()
    pick("matmul", [lay((64, 8), R), lay((8, 8), R)])
    again = pick("matmul", [lay((128, 8), R), lay((8, 8), R)]).explain()
    clear_picks()
    assert again == pick("matmul", [lay((128, 8), R), lay((8, 8), R)]).explain()


# ---- other solvers


def test_no_reshard_and_partials_only() -> None:
    add = [lay((4, 8), P), lay((4, 8), R)]
    assert NoReshard()(action_set("negate", add[:1]), add[:1]).outputs[0].placements == (P,)
    with pytest.raises(SolverError, match="NoReshard"):
        pick("relu", add[:1], solver=NoReshard())
    assert pick("relu", add[:1], solver=PartialsOnly()).inputs[0].placements == (R,)
    with pytest.raises(ShardingError, match="PartialsOnly"):
        pick("argsort", [lay((4, 8), Sharded(1))], solver=PartialsOnly())
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    both = lay((4, 8), Sharded(0), P, mesh=mesh)
    assert pick("relu", [both], solver=PartialsOnly()).inputs[0].placements == (Sharded(0), R)
    assert pick("relu", [both], solver=force_replicated).inputs[0].placements == (R, R)


def test_any_callable_is_a_solver_and_finalize_has_the_last_word() -> None:
    given = lay((8, 8), R)

    def last(offered: ActionSet, layouts: Sequence[Layout]) -> Action:
        assert list(layouts) == [given]
        return list(offered.actions())[-1]

    assert pick("relu", [given], solver=last).inputs[0].placements == (Sharded(1),)
    seen = []

    def finalize(action: Action) -> Action:
        seen.append(action)
        return action

    found = build_action_set([AxisAssignment((R,), R)], layouts=[given], finalize=finalize)
    assert GreedyReshard()(found, [given]) is seen[0]


def test_what_a_solver_returns_is_an_action_of_the_op_on_the_layouts() -> None:
    """Anything was returned, to fail where it was run or, of another op, not at all."""
    mesh = DeviceMesh((2,), ("a",))
    mine, other = (Layout(mesh, shape, "float32", (Replicated(),)) for shape in ((4, 4), (8, 4)))
    for wrong, said in (
        (None, "a solver returns an Action, got None"),
        (pick("exp", [mine]), "got one of exp on float32[4,4] a=R"),
        (pick("relu", [other]), "got one of relu on float32[8,4] a=R"),
    ):
        with pytest.raises(SolverError, match=re.escape(said)):
            pick("relu", [mine], solver=lambda action_set, layouts: wrong)  # noqa: B023, called in this turn


def test_solvers_are_bound_by_context() -> None:
    given = [lay((8, 8), P)]
    strict = GreedyReshard(allow_partial_to_sharded=True)
    assert current_solver() == GreedyReshard()
    with solver(strict):
        assert current_solver() is strict
        assert pick("relu", given).inputs[0].placements == (Sharded(0),)
        with NoReshard(), pytest.raises(SolverError):
            pick("relu", given)
        assert current_solver() is strict
    with pytest.raises(KeyError), solver(strict):
        raise KeyError
    assert current_solver() == GreedyReshard()

    @solver(strict)
    def inside() -> Any:
        return current_solver()

    assert inside() is strict


# ---- values


def test_an_action_survives_a_pickle(rng: Rng) -> None:
    for op in sorted(SAMPLES):
        layouts, args = random_case(rng, op, "extended")
        action = pick(op, layouts, **args)
        again = pickle.loads(pickle.dumps(action))
        assert again == action
        assert again.digest() == action.digest()
        assert again.inputs == action.inputs
        assert again.outputs == action.outputs
        assert again.cost_bytes == action.cost_bytes
        assert hash(again) == hash(action)


def test_operands_nested_in_another_order_are_no_match() -> None:
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    inner = Layout.from_spec(mesh, (8, 4), "float32", (("dp", "tp"),))
    outer = Layout.from_spec(mesh, (8, 4), "float32", (("tp", "dp"),))
    kept = pick("add", [outer, outer])
    assert kept.inputs == (outer, outer)
    assert kept.outputs[0] == outer
    mixed = pick("add", [outer, inner])
    assert mixed.inputs[0].spec == mixed.inputs[1].spec
    assert mixed.cost_bytes > 0


@pytest.mark.parametrize(
    ("op", "shapes", "args", "text"),
    [
        ("mutmul", [(2, 2), (2, 2)], {}, "no rule for op 'mutmul'; did you mean matmul"),
        ("matmul", [(2, 3), (2, 3)], {}, "share K"),
        ("reshape", [(2, 3)], {"shape": [-1, -1]}, "one extent may be -1"),
        ("sum", [(2, 3)], {"axis": 2}, "axis is a dim from -2 to 1"),
        ("add", [(2, 3), (4, 3)], {}, "extents are equal or 1"),
        ("concat", [(2, 3), (2, 4)], {"axis": 0}, "shapes agree but for dim 0"),
        ("rms_norm", [(2, 3), (4,)], {}, "trailing dims of x"),
        ("attention", [(1, 3, 4, 2), (1, 2, 4, 2), (1, 2, 4, 2)], {}, "multiple of the 2 KV heads"),
    ],
)
def test_wrong_calls_say_what_was_expected(op: str, shapes: Any, args: Any, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        pick(op, [lay(s, R) for s in shapes], **args)


def test_operands_lie_on_one_mesh() -> None:
    other = DeviceMesh((4,), ("dp",))
    with pytest.raises(LayoutError, match="operands lie on one mesh"):
        pick("add", [lay((4, 4), R), lay((4, 4), R, mesh=other)])
    pick("add", [lay((4, 4), R)] * 2)  # what is kept of it is not for operands on two meshes
    with pytest.raises(LayoutError, match="operands lie on one mesh"):
        pick("add", [lay((4, 4), R), lay((4, 4), R, mesh=other)])
    with pytest.raises(LayoutError, match="'documented' or 'extended'"):
        pick("add", [lay((4, 4), R)] * 2, rules="all")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="got none"):
        build_action_set([], layouts=[])


# ---- what is kept


@pytest.mark.parametrize("rules", ["documented", "extended"])
def test_a_pick_does_not_depend_on_what_was_picked_before(rules: str, rng: Rng, full: bool) -> None:
    """Every op, over lengths of any dim in random order: kept and fresh picks have the same digest."""
    compared = 0
    for op in sorted(SAMPLES) * (20 if full else 2):
        layouts, args = random_case(rng, op, rules)
        if rng.random() < 0.4:  # vectors: the dim that counts is the one that the op works along
            vector, own = SAMPLES[op](rng)
            layouts, args = [lay(x.shape, R, dtype=x.dtype.name) for x in vector], own
        dim, wanted = int(rng.integers(2)), layouts[0].shape
        calls = []
        for extent in rng.choice([0, 1, 2, 3, 4, 6, 8, 12, 24, 48, 1000], 6):
            alike = bool(rng.integers(2))
            moved = [
                x.with_shape((*x.shape[:dim], int(extent), *x.shape[dim + 1 :]))
                if x.ndim > dim and wanted[dim : dim + 1] == x.shape[dim : dim + 1] and (alike or k == 0)
                else x
                for k, x in enumerate(layouts)
            ]
            calls.append(
                (moved, {**args, **({"value": rng.choice([1, 1.0, True])} if "value" in args else {})})
            )
        clear_picks()
        kept: list[str | None] = [digest_of(op, moved, own, rules) for moved, own in calls]
        for (moved, own), before in zip(calls, kept, strict=True):
            clear_picks()
            assert digest_of(op, moved, own, rules) == before, f"{op} {own} {list(map(str, moved))}"
            compared += before is not None
    assert compared > len(SAMPLES)


def digest_of(op: str, layouts: Sequence[Layout], args: dict[str, Any], rules: str) -> str | None:
    try:
        return pick(op, layouts, rules=rules, **args).digest()  # type: ignore[arg-type]
    except (LayoutError, SolverError):
        return None
