"""The choices of a graph as a mixed-integer linear program, solved by HiGHS through SciPy's `milp`.

Binary: which way each op runs, which layout each free leaf takes. Continuous, and whole once those are: which layout
each tensor comes in and each use needs, which copy each new copy is made of, which copies are held after each use.
HiGHS: Huangfu, Hall: Math. Prog. Comp. 10, 2018.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lowshard.errors import SolverError
from lowshard.solver.graph.space import Assignment, Space

Array = np.ndarray[Any, Any]
_SCALE = 1e4
"""What a price that is worth reaching, and the largest tensor, come to in the program: HiGHS' tolerances are absolute,
1e-6 for its gap and for rows, 1e-7 for reduced costs.
"""
_BIG = 1e30
_SWEEPS = 4


def has_scipy() -> bool:
    """Whether SciPy is installed."""
    try:
        from scipy import optimize  # noqa: F401
    except ImportError:
        return False
    return True


class Answer(NamedTuple):
    """What the program was solved to."""

    assignment: Assignment | None
    """None: nothing was found in time, or nothing fits."""
    bound: float
    """No assignment is better than this."""
    is_infeasible: bool
    """Proved: nothing fits."""


class _Place(NamedTuple):
    """Where a tensor may lie: a column for each layout."""

    layouts: list[int]
    columns: Array


class Program:
    """The program of a space: the least price within a budget, or the least that the fullest device must hold."""

    def __init__(self, space: Space, budget_bytes: float | None = None, minimises_peak: bool = False) -> None:
        self.space, self._minimises_peak = space, minimises_peak
        self._cost: list[Array] = []
        self._upper: list[Array] = []
        self._columns = self._rows = 0
        self._entries: list[tuple[Array, Array, Array]] = []
        self._limits: list[tuple[Array, Array]] = []
        self._whole: list[Array] = []
        self._changes: list[list[tuple[Array, Array]]] = [[] for _ in range(space.steps + 2)]
        self._counts_bytes = minimises_peak or budget_bytes is not None
        self._one_of([0.0])  # so that a graph without tensors has a program
        self._ways = [self._one_of([c.price for c in ways]) for ways in space.choices]
        for step, ways in enumerate(space.choices):
            self._hold(range(step, step + 1), self._ways[step], [c.temporary_bytes for c in ways])
        self._come = [self._source(t) for t in range(len(space.family))]
        for tensor in range(len(space.family)):
            self._add_moves(tensor)
        if self._counts_bytes:
            self._add_memory(budget_bytes)

    def solve(self, time_limit_s: float, worth: float = np.inf) -> Answer:
        """Return the best assignment found in time; `worth` is a price that is known to be reached."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_matrix

        cost, upper = np.concatenate(self._cost), np.concatenate(self._upper)
        if self._minimises_peak:  # the last column, alone
            unit, cost = self._byte_unit, np.eye(1, len(cost), len(cost) - 1)[0]
        else:
            unit = (worth if worth < np.inf else float(cost.max(initial=0.0))) / _SCALE or 1.0
            upper[cost > worth * (1 + 1e-6)] = 0
            cost = cost / unit
        whole = np.zeros(len(cost))
        whole[np.concatenate(self._whole)] = 1
        row, column, value = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        low, high = (np.concatenate(part) for part in zip(*self._limits, strict=True))
        matrix = csr_matrix((value, (row, column)), (self._rows, len(cost)))
        found = milp(
            cost,
            integrality=whole,
            bounds=Bounds(0.0, upper),
            constraints=LinearConstraint(matrix, low, high),
            options={"time_limit": max(0.1, time_limit_s), "mip_rel_gap": 0.0},
        )
        if found.status == 2:
            return Answer(None, np.inf, True)
        if found.status not in (0, 1):
            raise SolverError(f"HiGHS did not solve the graph: {found.message}")
        low = found.get("mip_dual_bound")
        bound = -np.inf if low is None else float(low) * unit
        return Answer(None if found.x is None else self._assignment(found.x), bound, False)

    def _assignment(self, x: Array) -> Assignment:
        space = self.space
        leaves = {}
        for leaf in space.leaf_layouts:
            layouts, columns = self._come[leaf]
            leaves[leaf] = layouts[int(np.argmax(x[columns]))]
        picks = zip(space.choices, self._ways, strict=True)
        return Assignment(leaves, tuple(ways[int(np.argmax(x[columns]))] for ways, columns in picks))

    # ---- columns and rows

    def _new(self, costs: Array, upper: float = 1.0) -> Array:
        """Return new columns, each from 0 on."""
        first, self._columns = self._columns, self._columns + len(costs)
        self._cost.append(costs)
        self._upper.append(np.full(len(costs), upper))
        return np.arange(first, self._columns)

    def _constrain(self, count: int, low: float, high: float) -> Array:
        """Return new rows."""
        first, self._rows = self._rows, self._rows + count
        self._limits.append((np.full(count, low), np.full(count, high)))
        return np.arange(first, self._rows)

    def _put(self, rows: Array, columns: Array, values: float | Array) -> None:
        self._entries.append((rows, columns, np.broadcast_to(values, len(columns))))

    def _one_of(self, costs: Sequence[float]) -> Array:
        columns = self._new(np.array(costs, np.float64))
        self._whole.append(columns)
        self._put(self._constrain(1, 1, 1).repeat(len(costs)), columns, 1.0)
        return columns

    def _by_way(self, step: int, layouts: Sequence[int]) -> _Place:
        """Return where the ways of an op put, or need, a tensor."""
        every = list(dict.fromkeys(layouts))
        if len(every) == len(layouts):
            return _Place(every, self._ways[step])
        columns, rows = self._new(np.zeros(len(every))), self._constrain(len(every), 0, 0)
        place = {x: i for i, x in enumerate(every)}
        self._put(rows, columns, -1.0)
        self._put(rows[[place[x] for x in layouts]], self._ways[step], 1.0)
        return _Place(every, columns)

    def _source(self, tensor: int) -> _Place:
        space = self.space
        if tensor in space.leaf_layouts:
            layouts = space.leaf_layouts[tensor]
            return _Place(layouts, self._one_of(np.zeros(len(layouts)).tolist()))
        step, k = space.producer[tensor]
        return self._by_way(step, [c.outputs[k] for c in space.choices[step]])

    def _add_moves(self, tensor: int) -> None:
        """Every use is served from the source or from what an earlier use needed."""
        space, family, source = self.space, self.space.family[tensor], self._come[tensor]
        held = range(space.born(tensor), space.last_use[tensor] + 1)
        self._hold(held, source.columns, [family.bytes[x] for x in source.layouts])
        copies: dict[int, int] = {}
        earlier, uses = [source], space.uses[tensor]
        for place, (step, k, fixed) in enumerate(uses):
            if fixed is None:
                needs = self._by_way(step, [c.inputs[k] for c in space.choices[step]])
            else:
                needs = _Place([fixed], self._one_of([0.0]))
            met = self._constrain(len(needs.layouts), 0, 0)
            self._put(met, needs.columns, -1.0)
            for copy in earlier:
                prices = family.table(copy.layouts, needs.layouts)
                a, b = np.nonzero(prices < np.inf)
                arcs, out = self._new(prices[a, b]), self._constrain(len(copy.layouts), -np.inf, 0)
                self._put(met[b], arcs, 1.0)
                self._put(out[a], arcs, 1.0)
                self._put(out, copy.columns, -1.0)
            reuses = space.timing.reuses
            if reuses:
                earlier.append(needs)
            if self._counts_bytes:
                after = uses[place + 1][0] if place + 1 < len(uses) else space.copies_until[tensor] + 1
                copies = self._copies(tensor, copies if reuses else {}, needs)
                columns, layouts = np.array(list(copies.values())), list(copies)
                self._hold(
                    range(step, after if reuses else step + 1), columns, [family.bytes[x] for x in layouts]
                )

    # ---- memory

    def _copies(self, tensor: int, before: dict[int, int], needs: _Place) -> dict[int, int]:
        """Return a column for each layout that a copy may be held in after a use."""
        source = self._come[tensor]
        come, need = ({x: int(c) for x, c in zip(*place, strict=True)} for place in (source, needs))
        layouts = list(dict.fromkeys((*before, *need)))
        columns = self._new(np.zeros(len(layouts)))
        now = dict(zip(layouts, columns.tolist(), strict=True))
        for x, column in now.items():
            if x in before:
                row = self._constrain(1, 0, np.inf).repeat(2)
                self._put(row, np.array([column, before[x]]), np.array([1.0, -1.0]))
            if x in need:  # held beside the source, unless that lies so itself
                terms = [(column, 1.0), (need[x], -1.0), *([(come[x], 1.0)] if x in come else [])]
                row = self._constrain(1, 0, np.inf).repeat(len(terms))
                self._put(row, np.array([c for c, _ in terms]), np.array([v for _, v in terms]))
        return now

    def _hold(self, steps: range, columns: Array, sizes: Sequence[int]) -> None:
        if self._counts_bytes and any(sizes):
            self._changes[steps.start].append((columns, np.array(sizes, np.float64)))
            self._changes[steps.stop].append((columns, -np.array(sizes, np.float64)))

    def _add_memory(self, budget_bytes: float | None) -> None:
        """What is held at a step is what was held before, what comes, and less what goes."""
        largest = max((float(b.max()) for terms in self._changes for _, b in terms), default=0.0) or 1.0
        unit = self._byte_unit = largest / _SCALE
        steps = self.space.steps + 1
        held = self._new(np.zeros(steps), np.inf if budget_bytes is None else budget_bytes / unit)
        rows = self._constrain(steps, 0, 0)
        self._put(rows, held, -1.0)
        self._put(rows[1:], held[:-1], 1.0)
        for row, terms in zip(rows, self._changes, strict=False):
            for columns, sizes in terms:
                self._put(np.full(len(columns), row), columns, sizes / unit)
        if self._minimises_peak:
            peak = self._new(np.ones(1), np.inf)
            below = self._constrain(steps, -np.inf, 0)
            self._put(below, held, 1.0)
            self._put(below, peak.repeat(steps), -1.0)


class WayPrices:
    """What a plan costs at the least, and for each way of each op by how much more a plan that has it does.

    Each op passes its price on to those that read its results, in equal shares, the least over its own ways for each of
    theirs; then back, and again. What is left over on the way adds up to a bound: sequential tree-reweighted message
    passing (Kolmogorov: IEEE Trans. PAMI 28, 2006). Exact on chains and trees without budgets. With a price on each
    byte of a tensor it is no bound, but its guess holds less.
    """

    def __init__(self, space: Space, byte_price: float = 0.0) -> None:
        self.space, self._byte_price = space, byte_price
        leaves = list(space.leaf_layouts)
        self._leaf = {t: i for i, t in enumerate(leaves)}
        self._own = [np.zeros(len(space.leaf_layouts[t])) for t in leaves]
        self._own += [np.array([c.price for c in ways]) for ways in space.choices]
        edges: list[tuple[int, int, Array]] = []
        for tensor in range(len(space.family)):
            edges += self._moves(tensor)
        ahead = sorted(edges, key=lambda e: e[1])
        back = [(head, tail, table.T) for tail, head, table in sorted(edges, key=lambda e: -e[0])]
        for _ in range(_SWEEPS):
            self._own, _ = _passed_on(self._own, ahead)
            self._own, _ = _passed_on(self._own, back)
        self.low = sum(float(own.min()) for own in self._own)
        self.guess = self._follow(ahead)
        _, self._above = _passed_on([own - own.min() for own in self._own], ahead)

    def _moves(self, tensor: int) -> list[tuple[int, int, Array]]:
        """Return a table for each op that reads a tensor; what a wanted output costs goes to its source."""
        space, first = self.space, len(self._leaf)
        if tensor in self._leaf:
            source, comes = self._leaf[tensor], space.leaf_layouts[tensor]
        else:
            step, k = space.producer[tensor]
            source, comes = first + step, [c.outputs[k] for c in space.choices[step]]
        self._own[source] += self._byte_price * np.array([space.family[tensor].bytes[x] for x in comes])
        found = []
        for step, k, fixed in space.uses[tensor]:
            needs = [c.inputs[k] for c in space.choices[step]] if fixed is None else [fixed]
            table = np.minimum(space.least_moves(tensor, comes, needs), _BIG)
            if fixed is None:
                found.append((source, first + step, table))
            else:
                self._own[source] += table[:, 0]
        return found

    def _follow(self, ahead: Sequence[tuple[int, int, Array]]) -> Assignment:
        """Return an assignment: for each op the way that adds the least to those before it."""
        added, picks = [own.copy() for own in self._own], [-1] * len(self._own)
        into: dict[int, list[tuple[int, Array]]] = {}
        for tail, head, table in ahead:
            into.setdefault(head, []).append((tail, table))
        for variable, own in enumerate(added):
            for tail, table in into.get(variable, ()):
                own += table[picks[tail]]
            picks[variable] = int(own.argmin())
        return self._assignment(picks)

    def _assignment(self, picks: Sequence[int]) -> Assignment:
        leaves = {t: self.space.leaf_layouts[t][picks[i]] for t, i in self._leaf.items()}
        ways = zip(self.space.choices, picks[len(leaves) :], strict=True)
        return Assignment(leaves, tuple(offered[way] for offered, way in ways))

    def above_of(self, most: int) -> float:
        """Return by how much the dearest of so many ways are above the bound; infinite where there are no more."""
        every = np.sort(np.concatenate(self._above))
        return float(every[most]) if most < len(every) else np.inf

    def within(self, above: float) -> Space:
        """Return the space of the ways that plans of at most `low` + `above` can have, and the best of each op."""
        stays = [prices <= max(above, float(prices.min())) for prices in self._above]
        leaves = {
            t: [x for x, stay in zip(self.space.leaf_layouts[t], stays[i], strict=True) if stay]
            for t, i in self._leaf.items()
        }
        ways = [
            [way for way, stay in zip(offered, kept, strict=True) if stay]
            for offered, kept in zip(self.space.choices, stays[len(leaves) :], strict=True)
        ]
        return self.space.restricted(ways, leaves)


def _passed_on(
    own: Sequence[Array], edges: Sequence[tuple[int, int, Array]]
) -> tuple[list[Array], list[Array]]:
    """Pass prices along edges, in order, and leave in the tables what each pair costs beyond its least.

    Returns what is left of each variable's prices, and what they came to before they were passed on.
    """
    came = [prices.copy() for prices in own]
    shares = Counter(tail for tail, _, _ in edges)
    for tail, head, table in edges:
        table += (came[tail] / shares[tail])[:, None]
        least = table.min(axis=0)
        table -= least
        came[head] += least
    return [0 * prices if v in shares else prices for v, prices in enumerate(came)], came
