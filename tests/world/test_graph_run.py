"""run_graph on threads: outputs, laziness, what is wrong is said alike on every rank; and the traffic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import mode

from lowshard import DeviceMesh
from lowshard import comm as lc
from lowshard.errors import (
    BufferMismatchError,
    LayoutError,
    LowshardError,
    MeshError,
    MismatchError,
    VerificationError,
)
from lowshard.op import prove, run_graph, run_unsharded
from lowshard.op.graph_run import needed_steps, random_inputs, shard, whole
from lowshard.redistribute_plan import plan_redistribute
from lowshard.solver import (
    Graph,
    GraphPlan,
    GraphSolver,
    GreedyReshard,
    PartialsOnly,
    force_replicated,
    solve_graph,
)
from lowshard.solver.graph.graph_file import load_graph

SMALL = {"mlp": {"tokens": 12}, "attention": {"batch": 2, "length": 8}}


def two_ends() -> Graph:
    g = Graph("two ends")
    x = g.input("x", (12, 8), place="tp=S0")
    left = g.matmul(x, g.weight("a", (8, 6)), name="left")
    right = g.softmax(g.matmul(x, g.weight("b", (8, 10)), name="scores"), axis=0, name="right")
    g.output(left)
    g.output(right, place="tp=S1")
    return g


def run(
    plan: GraphPlan, arrays: dict[str, np.ndarray], size: int, outputs: list[str] | None = None
) -> list[dict[str, Any]]:
    def work(comm: lc.Communicator) -> dict[str, Any]:
        mine = {
            n: shard(plan.layout(n), v, comm.rank) if comm.rank in plan.mesh else None
            for n, v in arrays.items()
        }
        return run_graph(plan, mine, comm, outputs)

    return lc.run_loopback(size, work, 20)


SOLVERS: dict[str, Any] = {
    "graph": GraphSolver(),
    "greedy": GreedyReshard(allow_partial_to_sharded=True),
    "partials": PartialsOnly(),
    "replicated": force_replicated,
}
AXES: tuple[dict[str, int], ...] = ({"tp": 4}, {"dp": 2, "tp": 2}, {"tp": 3})
CASES = [(name, i, solver) for name in sorted(SMALL) for i in range(len(AXES)) for solver in SOLVERS]


@pytest.mark.parametrize(("name", "axes", "solver"), mode.sample(CASES, 8, "solvers"))
def test_any_solvers_answer_runs_to_the_unsharded_result(name: str, axes: int, solver: str) -> None:
    graph, sizes = load_graph(name)
    mesh = DeviceMesh(tuple(AXES[axes].values()), tuple(AXES[axes]))
    prove(solve_graph(graph, mesh, SOLVERS[solver], {**sizes, **SMALL[name]}))


def test_a_mesh_of_some_of_the_ranks_in_any_order() -> None:
    mesh = DeviceMesh((2, 2), ("dp", "tp"), ranks=[4, 1, 0, 3])
    prove(GraphSolver().solve(two_ends(), mesh))


def test_only_what_a_wanted_tensor_rests_on_is_run() -> None:
    plan = GraphSolver().solve(two_ends(), DeviceMesh((2,), ("tp",)))
    assert needed_steps(plan.graph, ["left"]) == [0]
    assert needed_steps(plan.graph, ["right"]) == [1, 2]
    arrays = random_inputs(plan.graph, 3)
    del arrays["b"]  # not read
    came = run(plan, arrays, 2, ["left"])
    expected = arrays["x"] @ arrays["a"]
    made = whole(plan.layout("left"), {r: came[r]["left"] for r in range(2)})
    np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-5)


def test_tensors_in_the_middle_can_be_asked_for() -> None:
    plan = GraphSolver().solve(two_ends(), DeviceMesh((2,), ("tp",)))
    arrays = random_inputs(plan.graph, 3)
    came = run(plan, arrays, 2, ["scores", "right"])
    for name, layout in (("scores", plan.layout("scores")), ("right", plan.output_layouts["right"])):
        made = whole(layout, {r: came[r][name] for r in range(2)})
        np.testing.assert_allclose(made, run_unsharded(plan.graph, arrays)[name], rtol=1e-5, atol=1e-5)
    with pytest.raises(LayoutError, match="no tensor 'middle'"):
        run(plan, arrays, 2, ["middle"])


def test_wrong_inputs_are_refused_on_every_rank() -> None:
    plan = GraphSolver().solve(two_ends(), DeviceMesh((2,), ("tp",)))
    arrays = random_inputs(plan.graph)
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({n: v for n, v in arrays.items() if n != "b"}, "reads 'b'"),
        ({**arrays, "a": arrays["a"].astype(np.float64)}, "'a' in .* got shape .* and dtype float64"),
        ({**arrays, "x": None}, "got NoneType"),
    ]
    for wrong, text in wrongs:
        errors: list[str] = []

        def work(comm: lc.Communicator, wrong: dict[str, Any] = wrong, errors: list[str] = errors) -> None:
            given = wrong if comm.rank == 1 else arrays
            mine = {n: None if v is None else shard(plan.layout(n), v, comm.rank) for n, v in given.items()}
            try:
                run_graph(plan, mine, comm)
            except BufferMismatchError as error:
                errors.append(str(error))

        lc.run_loopback(2, work, 10)
        assert len(errors) == 2
        with pytest.raises(BufferMismatchError, match=text):
            raise BufferMismatchError(errors[0])
    with pytest.raises(MeshError, match="the communicator has 1"):
        lc.run_loopback(1, lambda comm: run_graph(plan, arrays, comm), 10)


@pytest.mark.parametrize("which", ["plan", "inputs", "outputs", "text for outputs"])
def test_what_one_rank_passes_in_a_wrong_way_is_an_error_on_every_rank(which: str) -> None:
    plan = GraphSolver().solve(two_ends(), DeviceMesh((2,), ("tp",)))
    arrays = random_inputs(plan.graph)
    wrong: dict[str, dict[str, Any]] = {
        "plan": {"plan": None}, "inputs": {"inputs": None}, "outputs": {"outputs": [3]},
        "text for outputs": {"outputs": "left"},
    }  # fmt: skip

    def work(comm: lc.Communicator) -> str:
        mine = {n: shard(plan.layout(n), v, comm.rank) for n, v in arrays.items()}
        given: dict[str, Any] = {"plan": plan, "inputs": mine, "outputs": None}
        given |= wrong[which] if comm.rank else {}
        with pytest.raises(LowshardError) as caught:
            run_graph(comm=comm, **given)
        return str(caught.value)

    texts = lc.run_loopback(2, work, 10)
    assert texts[0] == texts[1]


def test_ranks_with_different_plans_are_told() -> None:
    mesh = DeviceMesh((2,), ("tp",))
    plans = [GraphSolver().solve(two_ends(), mesh), solve_graph(two_ends(), mesh, force_replicated)]
    assert plans[0].digest() != plans[1].digest()
    arrays = random_inputs(plans[0].graph)

    def work(comm: lc.Communicator) -> None:
        plan = plans[comm.rank]
        mine = {n: shard(plan.layout(n), v, comm.rank) for n, v in arrays.items()}
        with pytest.raises(
            MismatchError, match=r"ranks \[0\] have two ends on tp=2: .*; ranks \[1\] have two ends"
        ):
            run_graph(plan, mine, comm)

    lc.run_loopback(2, work, 10)


def test_ranks_that_want_other_outputs_are_told() -> None:
    plan = GraphSolver().solve(two_ends(), DeviceMesh((2,), ("tp",)))
    arrays = random_inputs(plan.graph)

    def work(comm: lc.Communicator) -> None:
        mine = {name: shard(plan.layout(name), x, comm.rank) for name, x in arrays.items()}
        for wanted in ((["left"], ["right"]), (["left", "right"], ["right", "left"])):
            with pytest.raises(MismatchError, match="outputs 'right'"):
                run_graph(plan, mine, comm, wanted[comm.rank])

    lc.run_loopback(2, work, 10)


def test_a_wrong_result_is_caught() -> None:
    """What `prove` compares: a plan whose moves were left out gives something else."""
    g = Graph("wrong")
    x = g.input("x", (8, 8), place="R")
    y = g.matmul(x, g.weight("w", (8, 8), place="tp=S1"), name="y")
    g.output(g.matmul(y, g.weight("v", (8, 8), place="tp=S0"), name="z"), place="R")
    plan = GraphSolver().solve(g, DeviceMesh((2,), ("tp",)))
    prove(plan)
    with pytest.raises(VerificationError, match="differs from the unsharded result"):
        prove(plan, tolerance=-1.0)


def test_the_traffic_is_that_of_the_plan() -> None:
    g = Graph("traffic")
    x = g.input("x", (64, 32), place="R")
    h = g.matmul(x, g.weight("up", (32, 128), place="tp=S1"), name="h")
    g.output(g.matmul(h, g.weight("down", (128, 32), place="tp=S0"), name="y"), place="R")
    mesh = DeviceMesh((4,), ("tp",))
    plan = GraphSolver().solve(g, mesh)
    assert plan.collectives == {"all_reduce": 1}
    arrays = random_inputs(plan.graph)

    def work(comm: lc.Communicator) -> None:
        mine = {n: shard(plan.layout(n), v, comm.rank) for n, v in arrays.items()}
        comm.traffic.clear()  # type: ignore[attr-defined]  # a loopback communicator counts
        run_graph(plan, mine, comm)
        routes = [plan_redistribute(m.src, m.dst, plan.profile, plan.node_size) for m in plan.moves]
        sent = sum(route.sent_bytes(comm.rank) for route in routes)
        assert comm.traffic.sent_bytes == sent == 2 * 3 * 64 * 32 * 4 // 4  # type: ignore[attr-defined]

    lc.run_loopback(4, work, 10)
