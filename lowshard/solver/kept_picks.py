"""What was picked before: by equal layouts, and by layouts that differ in the row count alone.

Prices are linear in the row count (tokens, or batch), all else fixed: an operand has it as an extent or not. So a
pick holds for a whole range of counts, which is worked out from the candidates' prices when a second count comes along.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, inf
from typing import Any

from lowshard.layout import Layout
from lowshard.solver.action import Action, ActionSet
from lowshard.solver.assignment import Result, replicated_row
from lowshard.solver.pricing import Candidate
from lowshard.solver.table import Call, offer
from lowshard.solver.table.elementwise_rules import COMPARISONS, NONLINEAR, TESTS

_ROUNDING = 1e-9

_UNARY = frozenset(
    (*NONLINEAR, *TESTS, "negate", "passthrough", "cast", "mul_scalar", "add_scalar", "fused_silu")
)
_BROADCAST = frozenset(
    (*COMPARISONS, "add", "sub", "mul", "div", "pow", "mod", "maximum", "minimum", "where")
)
_ALONG_AXIS = frozenset(
    ("softmax", "logsoftmax", "cumsum", "sum", "mean", "max", "min", "argmax", "argmin", "sort")
)
_NORM = frozenset(("layer_norm", "rms_norm"))
_TWO = _NORM | {"matmul"}


def counting_operands(op: str, layouts: Sequence[Layout], args: dict[str, Any]) -> tuple[int, ...]:
    """Return the operands whose dim 0 is the row count, which the results have in common; () if there is none."""
    first = layouts[0]
    if any(x.mesh is not first.mesh and x.mesh != first.mesh for x in layouts):
        return ()
    if not first.shape or (op in _TWO and len(layouts) < 2):
        return ()
    if op == "matmul":
        return (0,) if len(first.shape) > 1 and len(layouts[1].shape) == 2 else ()
    if op in _UNARY:
        return (0,)
    if op in _NORM:
        return (0,) if len(layouts[1].shape) < len(first.shape) else ()
    if op in _ALONG_AXIS:
        axis = args.get("axis", -1)
        return (0,) if type(axis) is int and axis % len(first.shape) else ()
    if op in _BROADCAST:
        ndim = max(len(x.shape) for x in layouts)
        # A whole extent of 1 would be taken for a broadcast one.
        counts = {x.shape[0] for x in layouts if len(x.shape) == ndim}
        if len(counts) == 1:
            return tuple(k for k, x in enumerate(layouts) if len(x.shape) == ndim)
    return ()


def has_row_count(action_set: ActionSet, counting: Sequence[int]) -> bool:
    """Return whether what is offered depends on the row count in its prices alone, and every result has it as dim 0."""
    count = action_set.layouts[counting[0]].shape[0]
    has_it = all(r.shape and r.shape[0] == count for r in action_set.results)
    return has_it and not action_set.may_not_commute


def shape_key(layouts: Sequence[Layout], counting: Sequence[int]) -> tuple[Any, ...]:
    """Return what layouts have in common that differ in the row count alone."""
    key: list[Any] = [layouts[0].mesh]
    for k, x in enumerate(layouts):
        key += (x.shape[1:] if k in counting else x.shape, x.dtype, x.spec, x.splits, x.partials)
    return (counting, *key)


class Pattern:
    """A pick, and the row counts that it holds for."""

    __slots__ = ("action_set", "allows_shards", "counting", "has_inner", "places", "rows", "span")

    def __init__(
        self, action_set: ActionSet, action: Action, counting: tuple[int, ...], allows_shards: bool
    ) -> None:
        self.action_set, self.counting, self.rows = action_set, counting, action.rows
        self.has_inner = any(row.inner for row in action.rows)
        self.places = (
            [action_set.axis_assignments.index(row) for row in action.rows] if self.has_inner else []
        )
        self.span: tuple[float, float] | None = None
        self.allows_shards = allows_shards

    def action(self, layouts: tuple[Layout, ...]) -> Action | None:
        """Return the pick for another row count, or None where it may be another one."""
        count = layouts[self.counting[0]].shape[0]
        if self.span is None:
            self.span = self._span()
        if not self.span[0] <= count <= self.span[1]:
            return None
        found = self.action_set
        results = tuple(Result((count, *r.shape[1:]), r.dtype) for r in found.results)
        rows = self.rows
        if (
            self.has_inner
        ):  # what the collectives inside are over depends on the count: to the last bit, as when fresh
            call = Call(found.op, layouts, dict(found.extras), found.prices == "volume")
            offered = (replicated_row(len(layouts)), *offer(call).rows)
            rows = tuple(offered[i] for i in self.places)
        return Action.quick(found.op, found.extras, layouts, rows, results, found.prices)

    def _span(self) -> tuple[float, float]:
        found = self.action_set
        was = found.layouts[self.counting[0]].shape[0]
        least = max(2, found.mesh.size)  # below, shards may be empty, and rows infeasible
        if any("ceil" in layout.splits for layout in found.layouts):
            least = least**2  # k parts by the ceiling rule have elements each from (k - 1)^2 + 1 elements on
        if was < least:
            return was, was
        low, high = float(least), inf
        for axis, row in enumerate(self.rows):
            here = [c for c in found.candidates(axis) if self.allows_shards or not c.reduces_to_shards]
            winner = next(c for c in here if c.row == row)
            slope, base = self._line(winner, was)
            for other in here:
                if other is winner:
                    continue
                # other - winner keeps its sign on this side of where the two lines cross. Counts next to the crossing,
                # where both cost the same but for rounding, are left to a fresh pick.
                tilt, gap = self._line(other, was)
                tilt, gap = tilt - slope, gap - base
                if abs(tilt) * was <= _ROUNDING * (abs(slope) * was + abs(base)):
                    continue
                edge = -gap / tilt
                margin = _ROUNDING * abs(edge)
                if tilt > 0:
                    low = max(low, floor(edge + margin) + 1)
                else:
                    high = min(high, ceil(edge - margin) - 1)
        return low, high

    def _line(self, candidate: Candidate, was: int) -> tuple[float, float]:
        """Return slope and base of a candidate's price over the row count."""
        base = sum(b for k, b in enumerate(candidate.moves_bytes) if k not in self.counting)
        return (candidate.cost_bytes - base) / was, base
