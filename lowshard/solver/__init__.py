"""Which layouts ops shall run in: rules as data, solvers that choose among them, what a choice costs and why."""

from __future__ import annotations

from lowshard.solver.action import (
    Action,
    ActionSet,
    Reshard,
    Solver,
    action_set,
    build_action_set,
    force_replicated_action_set,
)
from lowshard.solver.assignment import AxisAssignment, Result
from lowshard.solver.graph import Graph, GraphPlan, GraphSolver, Rates, solve_graph
from lowshard.solver.greedy import (
    GreedyReshard,
    NoReshard,
    PartialsOnly,
    clear_picks,
    current_solver,
    force_replicated,
    pick,
    solver,
)
from lowshard.solver.pricing import Candidate
from lowshard.solver.table import REFUSED
from lowshard.solver.table.op_argument import PerShard

__all__ = [
    "REFUSED", "Action", "ActionSet", "AxisAssignment", "Candidate", "Graph", "GraphPlan", "GraphSolver",
    "GreedyReshard", "NoReshard", "PartialsOnly", "PerShard", "Rates", "Reshard", "Result", "Solver", "action_set",
    "build_action_set", "clear_picks", "current_solver", "force_replicated", "force_replicated_action_set", "pick",
    "solve_graph", "solver",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
