"""The choices of a graph as an integer linear program, for graphs too wide to eliminate and for budgets that bind.

Binary: which way each op runs, which layout each free leaf takes. Continuous, and whole once those are: which layout
each tensor comes in and each use needs, which copy each new copy is made of, which copies are held after each use.
Solved by HiGHS (Huangfu, Hall: Math. Prog. Comp. 10, 2018) through SciPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lowshard.errors import DependencyError, SolverError
from lowshard.solver.graph.graph_schedule import Assignment
from lowshard.solver.graph.space import Space

COLUMNS_MOST = 150_000
_TOLERANCE = 1e-7
"""By how much HiGHS lets a reduced cost be on the wrong side: its bound is lowered by as much, in units of `worth`."""


class Answer(NamedTuple):
    """What the program was solved to."""

    assignment: Assignment | None
    """None: nothing was found in time."""
    bound: float
    """No assignment is better than this."""
    is_infeasible: bool
    """Proved: nothing fits."""


def need_scipy() -> Any:
    """Return scipy's optimize module, or raise DependencyError with the extra that installs it."""
    try:
        from scipy import optimize
    except ImportError as error:
        raise DependencyError(
            "integer programs are solved by SciPy's HiGHS, which is not installed: pip install 'lowshard[solve]'. "
            "Graphs that dynamic programming can do (chains, trees, anything narrow) need it only where a budget binds"
        ) from error
    return optimize


def has_scipy() -> bool:
    """Whether SciPy is there."""
    try:
        need_scipy()
    except DependencyError:
        return False
    return True


class _Rows:
    """Linear constraints, collected term by term."""

    def __init__(self) -> None:
        self.row: list[int] = []
        self.column: list[int] = []
        self.value: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        at = len(self.low)
        for column, value in terms:
            self.row.append(at)
            self.column.append(column)
            self.value.append(value)
        self.low.append(low)
        self.high.append(high)


class IntegerProgram:
    """The program of a space."""

    def __init__(self, space: Space, budget_bytes: float | None = None, minimises_peak: bool = False) -> None:
        self.space = space
        self._cost: list[float] = []
        self._whole: list[int] = []
        self._rows = _Rows()
        self._way: list[list[int]] = []
        self._come: list[dict[int, int]] = []
        self._peak = self._column(1.0) if minimises_peak else None
        self._priced = not minimises_peak
        self._always: list[tuple[int, float]] = []
        self._unbounded: list[int] = [] if self._peak is None else [self._peak]
        self._steps: list[list[tuple[int, float]]] = [[] for _ in range(space.steps + 1)]
        has_memory = minimises_peak or budget_bytes is not None
        for offered in space.choices:
            ways = [self._column(c.price if self._priced else 0.0, whole=True) for c in offered]
            self._rows.add([(w, 1.0) for w in ways], 1, 1)
            self._way.append(ways)
            if has_memory:
                terms = [(w, float(c.temporary_bytes)) for w, c in zip(ways, offered, strict=True)]
                self._steps[len(self._way) - 1] += [t for t in terms if t[1]]
        for tensor in range(len(space.family)):
            self._come.append(self._source(tensor))
        for tensor in range(len(space.family)):
            self._tensor(tensor, has_memory)
        base = None
        if has_memory and self._always:  # what is held at every step is added up once
            base = self._column()
        # A unit in which numbers are near 1.
        self._unit = max((v for terms in (self._always, *self._steps) for _, v in terms), default=1.0) or 1.0
        if base is not None:
            scaled = [(c, v / self._unit) for c, v in self._always]
            self._rows.add([*scaled, (base, -1.0)], 0, 0)
            self._unbounded.append(base)
        if has_memory:
            for terms in self._steps:
                if not terms and base is None:
                    continue
                scaled = [(c, v / self._unit) for c, v in terms]
                if base is not None:
                    scaled.append((base, 1.0))
                if self._peak is not None:
                    self._rows.add([*scaled, (self._peak, -1.0)], -np.inf, 0.0)
                if budget_bytes is not None:
                    self._rows.add(scaled, -np.inf, budget_bytes / self._unit)

    @property
    def columns(self) -> int:
        """Number of variables."""
        return len(self._cost)

    def solve(self, time_limit_s: float, worth: float = np.inf) -> Answer:
        """Return the best assignment that is found in time."""
        optimize = need_scipy()
        from scipy.sparse import csr_matrix

        rows = self._rows
        cost = np.array(self._cost)
        scale = 1.0
        if self._peak is None:
            cost[cost > worth * (1 + 1e-6)] = np.inf
            scale = (worth if worth < np.inf else float(cost[cost < np.inf].max(initial=0.0))) or 1.0
        upper = np.where(cost == np.inf, 0.0, 1.0)
        upper[self._unbounded] = np.inf
        integral = np.zeros(len(cost))
        integral[self._whole] = 1
        matrix = csr_matrix((rows.value, (rows.row, rows.column)), (len(rows.low), len(cost)))
        found = optimize.milp(
            np.where(cost == np.inf, 0.0, cost) / scale,
            integrality=integral,
            bounds=optimize.Bounds(0.0, upper),
            constraints=optimize.LinearConstraint(matrix, rows.low, rows.high),
            options={"time_limit": float(time_limit_s), "mip_rel_gap": 1e-9, "presolve": True},
        )
        if found.status == 2:  # never true of a price that was reached
            return Answer(None, np.inf, True) if worth == np.inf else Answer(None, -np.inf, False)
        if found.status not in (0, 1):
            raise SolverError(f"HiGHS did not solve the graph: {found.message}")
        bound = getattr(found, "mip_dual_bound", None)
        if bound is None:
            low = -np.inf
        elif self._peak is not None:
            low = float(bound) * self._unit
        else:
            low = (float(bound) - _TOLERANCE) * scale
        if found.x is None:
            return Answer(None, low, False)
        return Answer(self._assignment(found.x), low, False)

    def _assignment(self, x: Any) -> Assignment:
        space = self.space
        choices = tuple(
            offered[int(np.argmax(x[ways]))] for offered, ways in zip(space.choices, self._way, strict=True)
        )
        leaves = {
            leaf: max(self._come[leaf].items(), key=lambda item: x[item[1]])[0] for leaf in space.leaf_layouts
        }
        return Assignment(leaves, choices)

    def _column(self, cost: float = 0.0, whole: bool = False) -> int:
        self._cost.append(cost)
        if whole:
            self._whole.append(len(self._cost) - 1)
        return len(self._cost) - 1

    def _source(self, tensor: int) -> dict[int, int]:
        """Return the column of each layout that a tensor can come in."""
        space = self.space
        layouts = space.source_layouts(tensor)
        if tensor in space.leaf_layouts:
            found = {x: self._column(whole=len(layouts) > 1) for x in layouts}
            self._rows.add([(c, 1.0) for c in found.values()], 1, 1)
            return found
        step, k = space.producer[tensor]
        found = {x: self._column() for x in layouts}
        self._tie(
            found, [(c.outputs[k], w) for c, w in zip(space.choices[step], self._way[step], strict=True)]
        )
        return found

    def _tie(self, columns: dict[int, int], ways: Sequence[tuple[int, int]]) -> None:
        """Make each layout's column the sum of the ways that give it."""
        for layout, column in columns.items():
            self._rows.add([(column, -1.0), *((w, 1.0) for x, w in ways if x == layout)], 0, 0)

    def _tensor(self, tensor: int, has_memory: bool) -> None:
        space, family = self.space, self.space.family[tensor]
        source, last = self._come[tensor], space.last_use[tensor]
        if has_memory:
            held = [(c, float(family.bytes[x])) for x, c in source.items()]
            if space.born(tensor) == 0 and last == space.steps and tensor in space.leaf_layouts:
                self._always += held
                held = []
            for step in range(space.born(tensor), last + 1) if held else ():
                self._steps[step] += held
        earlier: list[dict[int, int]] = [source]
        copies_held: dict[int, int] = {}
        uses = space.uses[tensor]
        for place, (step, k, fixed) in enumerate(uses):
            if fixed is None:
                offered = space.choices[step]
                needs = {x: self._column() for x in dict.fromkeys(c.inputs[k] for c in offered)}
                self._tie(needs, [(c.inputs[k], w) for c, w in zip(offered, self._way[step], strict=True)])
            else:
                needs = {fixed: self._column()}
                self._rows.add([(needs[fixed], 1.0)], 1, 1)
            into: dict[int, list[int]] = {x: [] for x in needs}
            for copies in earlier:
                for have, column in copies.items():
                    arcs = []
                    for need in needs:
                        price = family.move(have, need)
                        if price != np.inf:
                            arcs.append(self._column(price if self._priced else 0.0))
                            into[need].append(arcs[-1])
                    self._rows.add([*((a, 1.0) for a in arcs), (column, -1.0)], -np.inf, 0)
            for need, column in needs.items():
                self._rows.add([*((a, 1.0) for a in into[need]), (column, -1.0)], 0, 0)
            if not space.timing.reuses:
                if has_memory:
                    self._hold(tensor, {}, needs, range(step, step + 1))
                continue
            earlier.append(needs)
            if has_memory:
                end = uses[place + 1][0] if place + 1 < len(uses) else space.copies_until[tensor] + 1
                copies_held = self._hold(tensor, copies_held, needs, range(step, end))

    def _hold(
        self, tensor: int, before: dict[int, int], needs: dict[int, int], span: range
    ) -> dict[int, int]:
        """Return the columns of the copies that are there after a use, and count them at the steps of `span`."""
        source, family = self._come[tensor], self.space.family[tensor]
        now: dict[int, int] = {}
        for x in dict.fromkeys((*before, *needs)):
            column = now[x] = self._column()
            if x in before:
                self._rows.add([(column, 1.0), (before[x], -1.0)], 0, np.inf)
            if x in needs:
                same = [(source[x], 1.0)] if x in source else []
                self._rows.add([(column, 1.0), (needs[x], -1.0), *same], 0, np.inf)
        for step in span:
            self._steps[step] += [(c, float(family.bytes[x])) for x, c in now.items()]
        return now
