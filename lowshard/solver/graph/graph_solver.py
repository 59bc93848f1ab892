"""GraphSolver: the layouts of a whole graph, and the walk that gives each op to a per-op solver."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf
from typing import get_args

from lowshard.argument import brief, choice, instance, real, whole
from lowshard.cost import ClusterProfile
from lowshard.errors import BudgetError, DependencyError, LayoutError, MeshError, SolverError
from lowshard.mesh import DeviceMesh
from lowshard.solver.action import Solver
from lowshard.solver.graph.bound_graph import BoundGraph, Graph
from lowshard.solver.graph.graph_plan import PROVED, GraphMove, GraphPlan, show_bytes
from lowshard.solver.graph.graph_rates import Objective, Rates, Timing
from lowshard.solver.graph.program import Program, WayPrices, has_scipy
from lowshard.solver.graph.space import Assignment, Choice, Schedule, Space, holders, is_feasible, schedule
from lowshard.solver.greedy import GreedyReshard, pick
from lowshard.solver.table import Rules

WAYS_MOST = 4_000
"""Of all ops together that go to HiGHS at once; of more the best go first."""
NO_SCIPY = "op by op, for want of SciPy: pip install 'lowshard[solve]'"


@dataclass(frozen=True, slots=True)
class GraphSolver:
    """Picks the layouts of a whole graph at once: least compute + collectives + redistribution, within the memory.

    `solve` gives a graph to SciPy's HiGHS. Without SciPy it is GreedyReshard's walk, and the plan's `method` says so.
    Deterministic but for the time limit: where that may strike, solve on one rank and send the plan to the others.
    Never worse than GreedyReshard at the same prices.

    It chooses among all rows of each op on each mesh axis, also where they make shards without elements. Free inputs
    and weights lie whole or as an op needs them, within a budget cut in any other way too, but never as terms. Replicas
    may become terms, shards and other terms may not. A plan with `gap` 0 is the cheapest of these by a millionth.

    Args:
        profile: the cluster's cost profile; None for the built-in default.
        rates: of one device; by default what the profile states, else a CPU core's order of magnitude.
        objective: "seconds", or "volume" or "published": the byte prices of `pick`, without compute.
        budget_bytes: what a device may hold at any step: weights, live tensors and copies, temporaries. By default the
            mesh's own budget.
        allow_partial_to_sharded: whether a partial tensor may be reduced to shards.
        keep_activations: inputs and results stay to the end, as a backward pass needs them.
        node_size: ranks a node; None for one node.
        time_limit_s: for HiGHS. What is found by then is returned with its gap.
    """

    profile: ClusterProfile | None = None
    rates: Rates | None = None
    objective: Objective = "seconds"
    budget_bytes: float | None = None
    allow_partial_to_sharded: bool = True
    keep_activations: bool = False
    node_size: int | None = None
    time_limit_s: float = 15.0

    def __post_init__(self) -> None:
        rule = "objective is 'seconds', 'volume' or 'published'"
        choice(self.objective, get_args(Objective), rule, SolverError)
        if self.profile is not None:
            instance(self.profile, ClusterProfile, "profile is a ClusterProfile or None", SolverError)
        if self.rates is not None:
            instance(self.rates, Rates, "rates is a Rates or None", SolverError)
        if self.budget_bytes is not None:
            rule = "budget_bytes is a number of bytes above 0 such as 4e9, or None"
            real(self.budget_bytes, rule, SolverError)
        if self.node_size is not None:
            whole(self.node_size, "node_size is a number of ranks >= 1, or None", SolverError, 1)
        real(self.time_limit_s, "time_limit_s is a number of seconds above 0", SolverError)
        for name in ("allow_partial_to_sharded", "keep_activations"):
            instance(getattr(self, name), bool, f"{name} is True or False", SolverError)

    @property
    def timing(self) -> Timing:
        """The prices it minimises."""
        rates = Rates.of(self.profile) if self.rates is None else self.rates
        return Timing(self.objective, self.profile, rates, self.node_size, self.allow_partial_to_sharded)

    def solve(
        self,
        graph: Graph | BoundGraph,
        mesh: DeviceMesh,
        sizes: Mapping[str, int] | None = None,
        rules: Rules = "extended",
    ) -> GraphPlan:
        """Return the best plan for a graph on a mesh that is found in time.

        Args:
            graph: the graph.
            mesh: where it runs.
            sizes: a number for each symbol of its shapes.
            rules: "extended", or "documented" for MAX's own sound rows alone.

        Raises:
            LayoutError: a symbol without a number, or shapes that do not fit.
            SolverError: an op has no row that can be used on this mesh, or nothing leads to a wanted layout.
            BudgetError: nothing fits; it names the tightest tensor and the smallest budget that would do.
            DependencyError: SciPy is not installed, and GreedyReshard finds no plan, or none that fits.
        """
        end_s = time.monotonic() + self.time_limit_s
        bound, budget = _bound(graph, mesh, sizes), _budget_of(self.budget_bytes, mesh)
        space = Space(bound, mesh, self.timing, rules, self.keep_activations, spreads=budget is not None)
        greedy = self._greedy(space)
        if not has_scipy():
            if greedy is None or not is_feasible(greedy, budget):
                raise DependencyError(
                    f"graph {bound.name!r}: GreedyReshard finds no plan{'' if greedy is None else ' that fits'}, and "
                    "SciPy, whose HiGHS solves whole graphs, is not installed: pip install 'lowshard[solve]'"
                )
            return _plan(space, greedy, 0.0, NO_SCIPY, budget, self.timing)
        if greedy is not None:
            space = space.including(greedy.assignment.leaves, greedy.assignment.choices)
        best = greedy if greedy is not None and is_feasible(greedy, budget) else None
        found, low = self._search(space, budget, best, end_s)
        # An op with too many ways to list may have better ones: then no bound is known.
        low = min(max(low, 0.0), found.price) if space.is_whole else 0.0
        is_walk = found is greedy and low < found.price * (1 - PROVED)
        return _plan(space, found, low, "greedy" if is_walk else "integer program", budget, self.timing)

    def _search(
        self, space: Space, budget: float | None, best: Schedule | None, end_s: float
    ) -> tuple[Schedule, float]:
        """Return the best schedule that fits, and a bound."""
        is_infeasible = False

        def solve(some: Space) -> float:
            """Look for a better one in a space, and return the bound of what is in it."""
            nonlocal best, is_infeasible
            worth = inf if best is None else best.price
            answer = Program(some, budget).solve(end_s - time.monotonic(), worth)
            is_infeasible = answer.is_infeasible
            if answer.assignment is not None:
                best = _cheaper(best, schedule(some, answer.assignment), budget)
            return min(answer.bound, worth)

        prices = WayPrices(space) if sum(map(len, space.choices)) > WAYS_MOST else None
        if prices is None:
            low = solve(space)
        else:  # first among the ways that look best, then among all that a better plan can have
            low = prices.low
            ranked, tried = _cheap_start(space, prices, None if best else budget)
            best = _cheaper(best, tried[-1], budget)
            solve(ranked.within(ranked.above_of(WAYS_MOST)))
            reach = inf if best is None else best.price - low
            if time.monotonic() < end_s and reach <= prices.above_of(4 * WAYS_MOST):
                low = max(low, solve(prices.within(reach)))
        if best is not None:
            return best, low
        if budget is None:
            raise _no_way(space.graph) if is_infeasible else self._too_late(space)
        if prices is not None:
            raise self._budget_error(space, min(tried, key=lambda one: one.peak_bytes), 0.0, budget)
        return self._leanest(space, budget), low

    def _leanest(self, space: Space, budget: float) -> Schedule:
        """Return the schedule whose fullest device holds the least, or raise BudgetError where that is too much."""
        answer = Program(space, minimises_peak=True).solve(self.time_limit_s)
        if answer.is_infeasible:
            raise _no_way(space.graph)
        if answer.assignment is None:
            raise self._too_late(space)
        leanest = schedule(space, answer.assignment)
        if not is_feasible(leanest, budget):
            raise self._budget_error(space, leanest, answer.bound, budget)
        return leanest

    def _too_late(self, space: Space) -> SolverError:
        return SolverError(
            f"graph {space.graph.name!r}: no plan was found within {self.time_limit_s:g} s; raise time_limit_s"
        )

    def _budget_error(self, space: Space, least: Schedule, bound: float, budget: float) -> BudgetError:
        step = max(range(len(least.memory_bytes)), key=least.memory_bytes.__getitem__)
        held = holders(space, least.assignment, step)
        bytes_, tensor, layout = held[0]
        nodes = space.graph.nodes
        where = nodes[step].label if step < len(nodes) else "the end"
        kinds = Counter[str]()
        for size, each, _ in held:
            kinds[space.graph.tensors[each].kind] += size
        together = ", ".join(f"{kind}s {show_bytes(size)}" for kind, size in kinds.most_common())
        info, need = space.graph.tensors[tensor], ceil(least.peak_bytes)
        limit = f"{budget:,.0f} bytes a device on mesh {space.mesh}"
        said, proved = f"graph {space.graph.name!r} does not fit into {limit}: it needs", ""
        if need > ceil(bound * (1 + 1e-4)):
            proved = f" that was found (none below {ceil(bound):,} does)"
        if bound <= budget:  # the search was cut short
            said = (
                f"graph {space.graph.name!r}: within {self.time_limit_s:g} s no plan was found that fits into {limit}; "
                "raise time_limit_s. The leanest that was found needs"
            )
        return BudgetError(
            f"{said} {need:,} bytes at {where} (step {step}), for {len(held)} tensors at once ({together}). The "
            f"tightest tensor is {info.kind} {info.name!r}, {bytes_:,} bytes a device even as "
            f"{space.family[tensor].layouts[layout]}, the largest of them. The smallest budget{proved} that would do "
            f"is {need} bytes: give budget_bytes={need}, or a mesh of more ranks"
        )

    def _greedy(self, space: Space) -> Schedule | None:
        try:
            return walk(space, GreedyReshard(allow_partial_to_sharded=self.allow_partial_to_sharded))
        except SolverError:
            return None


def solve_graph(
    graph: Graph | BoundGraph,
    mesh: DeviceMesh,
    solver: Solver | GraphSolver | None = None,
    sizes: Mapping[str, int] | None = None,
    rules: Rules = "extended",
    prices: GraphSolver | None = None,
) -> GraphPlan:
    """Return a solver's plan for a graph.

    A GraphSolver solves it as a whole. Any other solver is given one op after the other, operands coming as its earlier
    answers left them, leaves without a place replicated; what comes of it is priced as a GraphSolver would.

    Args:
        graph: the graph.
        mesh: where it runs.
        solver: a GraphSolver (the default), or any `(ActionSet, layouts) -> Action`.
        sizes: a number for each symbol.
        rules: as for `pick`.
        prices: the GraphSolver whose prices another solver's plan is told in.

    Raises:
        LayoutError: a graph that does not fit, or a symbol without a size.
        SolverError: no solver, or one that finds no action for an op.
    """
    if solver is None or isinstance(solver, GraphSolver):
        return (solver or GraphSolver()).solve(graph, mesh, sizes, rules)
    bound = _bound(graph, mesh, sizes)
    by = GraphSolver()
    if prices is not None:
        by = instance(prices, GraphSolver, "prices is a GraphSolver or None", SolverError)
    if not callable(solver):
        raise SolverError(
            f"a solver is a GraphSolver or a callable (ActionSet, layouts) -> Action, got {brief(solver)}"
        )
    space = Space(bound, mesh, by.timing, rules, by.keep_activations, given_only=True)
    found = walk(space, solver)
    name = type(solver).__name__ if not hasattr(solver, "__name__") else str(solver.__name__)
    return _plan(space, found, 0.0, name, _budget_of(by.budget_bytes, mesh), by.timing)


def _bound(graph: Graph | BoundGraph, mesh: DeviceMesh, sizes: Mapping[str, int] | None) -> BoundGraph:
    instance(mesh, DeviceMesh, "a graph is solved for a DeviceMesh", MeshError)
    if isinstance(graph, BoundGraph):
        return graph
    return instance(graph, Graph, "what is solved is a Graph, or what its bind returns", LayoutError).bind(
        sizes
    )


def walk(space: Space, solver: Solver) -> Schedule:
    """Give one op after the other to a solver, and price what comes of it."""
    graph, mesh = space.graph, space.mesh
    at: dict[int, int] = dict(space.given)
    for leaf in graph.leaves():
        if leaf not in at:
            at[leaf] = space.family[leaf].number(graph.layout(mesh, leaf, "R"))
    leaves = dict(at)
    choices = []
    known: dict[object, Choice] = {}
    for node in graph.nodes:
        held = tuple(at[t] for t in node.operands)
        key = (node.op, repr(node.args), held, tuple(id(space.family[t]) for t in node.operands))
        choice = known.get(key)
        if choice is None:
            layouts = [space.family[t].layouts[x] for t, x in zip(node.operands, held, strict=True)]
            action = pick(node.op, layouts, solver=solver, rules=space.rules, **dict(node.args))
            choice = space.choice(node, action.inputs, action.rows)
            if choice is None:  # rows of the solver's own
                choice = space.priced(node, action.inputs, action.rows)
            if choice is None:
                raise SolverError(f"{node.label}: no price is known for the action that was picked, {action}")
            known[key] = choice
        choices.append(choice)
        at.update(zip(node.results, choice.outputs, strict=True))
    return schedule(space, Assignment(leaves, tuple(choices)))


def _cheap_start(space: Space, prices: WayPrices, budget: float | None) -> tuple[WayPrices, list[Schedule]]:
    """Return prices of ways whose guess fits a budget, if that is found, and what was tried, the last one best."""
    tried = [schedule(space, prices.guess)]
    byte_price = prices.low / budget / 64 if budget else 0.0
    while byte_price and not is_feasible(tried[-1], budget) and len(tried) < 10:
        prices = WayPrices(space, byte_price)
        tried.append(schedule(space, prices.guess))
        byte_price *= 4
    return prices, tried


def _cheaper(best: Schedule | None, found: Schedule, budget: float | None) -> Schedule | None:
    """Return what was found where it fits and is better than the best so far."""
    is_better = is_feasible(found, budget) and (best is None or found.price < best.price)
    return found if is_better else best


def _no_way(graph: BoundGraph) -> SolverError:
    return SolverError(
        f"graph {graph.name!r}: no layouts lead to the wanted outputs by moves that can be made; an output wanted "
        "partial must come so from its op, and allow_partial_to_sharded=False bars P -> S"
    )


def _budget_of(given: float | None, mesh: DeviceMesh) -> float | None:
    budget = mesh.smallest_budget_bytes if given is None else given
    return None if budget is None else float(budget)


def _plan(
    space: Space, found: Schedule, bound: float, method: str, budget: float | None, timing: Timing
) -> GraphPlan:
    graph, assignment, family = space.graph, found.assignment, space.family
    actions = []
    for node, chosen in zip(graph.nodes, assignment.choices, strict=True):
        inputs = tuple(family[t].layouts[x] for t, x in zip(node.operands, chosen.inputs, strict=True))
        actions.append(space.action(node, inputs, chosen.rows))
    return GraphPlan(
        graph,
        space.mesh,
        tuple(family[t].layouts[assignment.layout(space, t)] for t in range(len(graph.tensors))),
        tuple(actions),
        tuple(
            GraphMove(
                m.tensor, m.step, family[m.tensor].layouts[m.src], family[m.tensor].layouts[m.dst], m.price
            )
            for m in found.moves
        ),
        found.compute,
        found.inner,
        found.memory_bytes,
        bound,
        "s" if timing.objective == "seconds" else "bytes",
        method,
        budget,
        timing.profile,
        timing.node_size,
    )
