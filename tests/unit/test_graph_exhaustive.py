"""GraphSolver against trying every assignment, on random graphs of up to 8 ops; every plan is run on real arrays."""

from __future__ import annotations

import re
from math import inf

import numpy as np
import pytest
from support import mode
from support.random_graph import exhaustive, random_graph, random_profile, random_rates

from lowshard import DeviceMesh
from lowshard.errors import BudgetError
from lowshard.op import prove
from lowshard.solver import Graph, GraphSolver, GreedyReshard, solve_graph
from lowshard.solver.graph.space import Space

GRAPHS = 200
LOOKED_AT_MOST = 60_000


@pytest.mark.parametrize("number", mode.sample(range(GRAPHS), 8, "random graphs"))
def test_no_assignment_is_better(number: int, rng: np.random.Generator) -> None:
    while True:  # draws that are too many to try all of are drawn again
        ops = 1 + number % 8
        on_two = ops <= 3 and number % 16 < 8
        mesh = (
            DeviceMesh((2, 2), ("tp", "dp")) if on_two else DeviceMesh((int(rng.choice([2, 3, 4])),), ("tp",))
        )
        graph = random_graph(rng, ops)
        solver = GraphSolver(profile=random_profile(rng), rates=random_rates(rng))
        space = Space(graph.bind(), mesh, solver.timing, "extended")
        found = exhaustive(space, None, LOOKED_AT_MOST)
        if found is not None:
            break
    plan = solver.solve(graph, mesh)
    assert plan.bound <= found[0] * (1 + 1e-9)
    assert plan.price >= found[0] * (1 - 1e-9)
    if plan.gap == 0:
        np.testing.assert_allclose(plan.price, found[0], rtol=1e-9)
    prove(plan)
    greedy = solve_graph(graph, mesh, GreedyReshard(allow_partial_to_sharded=True), prices=solver)
    assert plan.price <= greedy.price * (1 + 1e-9)
    prove(greedy)
    space = Space(graph.bind(), mesh, solver.timing, "extended", spreads=True)
    check_budget(graph, mesh, solver, space, int(plan.peak_bytes * rng.uniform(0.5, 1.0)))


def check_budget(graph: Graph, mesh: DeviceMesh, solver: GraphSolver, space: Space, budget: int) -> None:
    best = exhaustive(space, budget, LOOKED_AT_MOST)
    tight = GraphSolver(solver.profile, solver.rates, budget_bytes=budget)
    try:
        plan = tight.solve(graph, mesh)
    except BudgetError as error:
        check_refusal(str(error), best, space)
        return
    assert plan.peak_bytes <= budget
    if best is not None:
        np.testing.assert_allclose(plan.price, best[0], rtol=2e-6)
    prove(plan)


def check_refusal(text: str, best: tuple[float, int] | None, space: Space) -> None:
    """Nothing fits, what the text says would do does, and a byte less does not."""
    assert best is None or best[0] == inf
    least = re.search(r"would do is (\d+) bytes", text)
    assert least
    assert "was found" not in text
    enough = exhaustive(space, int(least[1]), LOOKED_AT_MOST)
    assert enough is None or enough[0] < inf
    too_little = exhaustive(space, int(least[1]) - 1, LOOKED_AT_MOST)
    assert too_little is None or too_little[0] == inf


def test_of_small_graphs_nearly_all_are_proved(rng: np.random.Generator, full: bool) -> None:
    graphs, proved = (400 if full else 40), 0
    for number in range(graphs):
        graph, mesh = random_graph(rng, 1 + number % 4), DeviceMesh((int(rng.choice([2, 3, 4])),), ("tp",))
        plan = GraphSolver(random_profile(rng), random_rates(rng)).solve(graph, mesh)
        assert plan.bound <= plan.price
        proved += plan.gap == 0
    print(f"gap 0: {proved} of {graphs}")
    assert proved >= 0.95 * graphs
