"""Layouts for whole graphs of ops: the graph, the solver that looks at all of it, and the plan that comes of it."""

from __future__ import annotations

from lowshard.solver.graph.bound_graph import BoundGraph, Graph, Tensor
from lowshard.solver.graph.graph_plan import GraphMove, GraphPlan
from lowshard.solver.graph.graph_rates import Rates
from lowshard.solver.graph.graph_solver import GraphSolver, solve_graph

__all__ = ["BoundGraph", "Graph", "GraphMove", "GraphPlan", "GraphSolver", "Rates", "Tensor", "solve_graph"]
