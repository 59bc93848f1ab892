"""Prices of graphs that were proved to be the least, written down at f0101dd: whatever solves graphs reaches them.

Each line of tests/data/graph_prices.json is a graph as a graph file holds it (or an example's name), a mesh, what the
solver was given, and the price of its plan, whose gap was 0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import mode

from lowshard import DeviceMesh
from lowshard.cost import OPS, ClusterProfile, Curve, Piece
from lowshard.solver import GraphSolver, Rates
from lowshard.solver.graph.graph_file import load_graph

ROWS = json.loads((Path(__file__).parents[1] / "data" / "graph_prices.json").read_text())
OPTIONS = ("objective", "allow_partial_to_sharded", "keep_activations", "node_size", "budget_bytes")
EXACT = 1e-9


def profile_of(row: dict[str, Any]) -> ClusterProfile | None:
    """One price a message and one a byte everywhere; sums add a tenth of the latter."""
    if "alpha_beta" not in row:
        return None
    alpha, beta = row["alpha_beta"]
    sums = ("all_reduce", "reduce_scatter", "reduce")
    return ClusterProfile(
        tuple(
            Curve(op, level, 2, (Piece(alpha, beta, beta / 10 if op in sums else 0.0),))  # type: ignore[arg-type]
            for level in ("node", "network")
            for op in OPS
        )
    )


@pytest.mark.parametrize("row", mode.sample(ROWS, 15, "graph prices"), ids=lambda row: str(ROWS.index(row)))
def test_the_price_is_the_one_written_down(row: dict[str, Any]) -> None:
    graph, sizes = load_graph(row["graph"])
    mesh = DeviceMesh(*(tuple(part) for part in row["mesh"]))
    rates = Rates(*row["rates"]) if "rates" in row else None
    options = {name: row[name] for name in OPTIONS if name in row}
    solver = GraphSolver(profile_of(row), rates, **options)
    plan = solver.solve(graph, mesh, sizes, row.get("rules", "extended"))
    assert plan.price == pytest.approx(row["price"], rel=EXACT, abs=0.0)
