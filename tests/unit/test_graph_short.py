"""GraphSolver on random graphs with short and uneven extents: plans run, no plan is below a bound, with budgets too.

Small graphs are searched through as well, over every layout by which `action_set` offers rows, whatever the solver's
space holds.
"""

from __future__ import annotations

import re
from math import inf

import numpy as np
import pytest
from support import mode
from support.every_plan import any_mesh, every_way, short_graph
from support.random_graph import exhaustive, random_profile, random_rates

from lowshard import DeviceMesh
from lowshard.errors import BudgetError, SolverError
from lowshard.op import prove
from lowshard.solver import (
    Graph,
    GraphPlan,
    GraphSolver,
    GreedyReshard,
    PartialsOnly,
    force_replicated,
    solve_graph,
)
from lowshard.solver.graph.space import Space

GRAPHS = 5000
OTHERS = (GreedyReshard(), GreedyReshard(allow_partial_to_sharded=True), PartialsOnly(), force_replicated)
LOOKED_AT_MOST = 20_000
HURRIED = "raise time_limit_s"
OPS_MOST = 3
"""Of graphs that are searched through."""


@pytest.mark.parametrize("number", mode.sample(range(GRAPHS), 4, "short graphs"))
def test_a_short_graph(number: int, rng: np.random.Generator) -> None:
    mesh, ops = any_mesh(rng), 2 + number % 7
    graph = short_graph(rng, ops, mesh)
    profile, rates = (random_profile(rng), random_rates(rng)) if number % 2 else (None, None)
    solver = GraphSolver(profile, rates)
    plan = solver.solve(graph, mesh)
    prove(plan)
    assert plan.gap == 0 or plan.method == "integer program"  # which may run out of time
    assert_none_is_cheaper(plan, graph, solver)
    budget = int(plan.peak_bytes * rng.uniform(0.4, 1.0))
    tight = GraphSolver(profile, rates, budget_bytes=budget, time_limit_s=3)
    space = Space(graph.bind(), mesh, solver.timing, "extended", spreads=True)
    every = every_way(space, space.graph, "extended") if ops <= OPS_MOST else None
    if every is not None:
        assert_best(plan, exhaustive(every, None, LOOKED_AT_MOST))
    try:
        fitting = tight.solve(graph, mesh)
    except BudgetError as error:
        assert_refused(error, budget, every, tight, graph, mesh)
        return
    except SolverError as error:
        if HURRIED not in str(error):  # a busy machine's
            raise
        return
    prove(fitting)
    assert fitting.peak_bytes <= budget
    assert fitting.price >= plan.bound * (1 - 1e-6)
    assert_none_is_cheaper(fitting, graph, tight)
    if every is not None:
        assert_best(fitting, exhaustive(every, budget, LOOKED_AT_MOST))


def assert_none_is_cheaper(plan: GraphPlan, graph: Graph, solver: GraphSolver) -> None:
    """No per-op solver's plan that fits is below the bound."""
    for other in OTHERS:
        try:
            found = solve_graph(graph, plan.mesh, other, prices=solver)
        except SolverError:
            continue
        if plan.budget_bytes is None or found.peak_bytes <= plan.budget_bytes:
            assert found.price >= plan.bound * (1 - 1e-6)


def assert_best(plan: GraphPlan, found: tuple[float, int] | None) -> None:
    """No assignment is below the bound, and none is cheaper where that was proved."""
    if found is not None:
        assert found[0] >= plan.bound * (1 - 2e-6)
        assert plan.gap > 0 or plan.price <= found[0] * (1 + 2e-6)


def assert_refused(
    error: BudgetError, budget: int, every: Space | None, tight: GraphSolver, graph: Graph, mesh: DeviceMesh
) -> None:
    """Nothing fits, and what the error says would do does."""
    if every is not None and HURRIED not in str(error):
        found = exhaustive(every, budget, LOOKED_AT_MOST)
        assert found is None or found[0] == inf
    least = re.search(r"would do is (\d+) bytes", str(error))
    assert least
    enough = int(least[1])
    prove(GraphSolver(tight.profile, tight.rates, budget_bytes=enough).solve(graph, mesh))
