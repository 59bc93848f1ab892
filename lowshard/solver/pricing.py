"""What each row of a rule costs on each mesh axis, for operands as they come, and whether it is feasible there."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import NamedTuple

from lowshard.layout import Layout
from lowshard.placement import Partial, Placement, Replicated, Sharded
from lowshard.solver.assignment import (
    AxisAssignment,
    Prices,
    Result,
    collective_of,
    cut_by_others,
    group_bytes,
    is_reduced_to_shards,
    price_bytes,
)


class Candidate(NamedTuple):
    """One row on one mesh axis, priced for the operands as they come."""

    row_index: int
    """Its place in `axis_assignments`: earlier ones win ties."""
    row: AxisAssignment
    cost_bytes: float
    reduces_to_shards: bool
    """A partial operand would become sharded: what `allow_partial_to_sharded` is about."""


class Priced(NamedTuple):
    """Every row on one mesh axis, by its index: infinite where it is not feasible."""

    costs: list[float]
    reduces: list[bool]


def price_rows(
    rows: Sequence[AxisAssignment], layouts: Sequence[Layout], results: Sequence[Result], prices: Prices
) -> tuple[Priced, ...]:
    """Return for each mesh axis every row's price."""
    mesh = layouts[0].mesh
    pricer = _Pricer(layouts, results, prices)
    columns = list(zip(*[row.needed_inputs for row in rows], strict=True))
    special = [i for i, row in enumerate(rows) if row.only or row.inner]
    alike = pricer.is_roomy and not any(rows[i].only for i in special)
    found = []
    like: dict[object, Priced] = {}
    for axis, size in enumerate(mesh.shape):
        key = (size, *[p[axis] for p in pricer.placements], *[b[axis] for b in pricer.bytes])
        if alike and key in like:  # another axis that everything is alike on
            found.append(like[key])
            continue
        moves = [pricer.moves(k, axis, column) for k, column in enumerate(columns)]
        if len(moves) == 2:
            costs = [a[0] + b[0] for a, b in zip(*moves, strict=True)]
            reduces = [a[1] or b[1] for a, b in zip(*moves, strict=True)]
        else:
            costs = [sum([move[0] for move in each]) for each in zip(*moves, strict=True)]
            reduces = [any([move[1] for move in each]) for each in zip(*moves, strict=True)]
        for i in special:
            row = rows[i]
            wrong = row.only and mesh.axis_names[axis] not in row.only
            inside = row.inner_bytes(size, prices) / cut_by_others(layouts[0], axis)
            costs[i] = inf if wrong else costs[i] + inside
        if pricer.short_results:
            costs = [c if pricer.result(row, axis) else inf for c, row in zip(costs, rows, strict=True)]
        like[key] = Priced(costs, reduces)
        found.append(like[key])
    return tuple(found)


_FREE = (0.0, False)
_NEVER = (inf, False)


class _Pricer:
    """What moves cost, and whether a need can be met: the conditions that MAX documents. Shards without elements are
    never made anew.
    """

    def __init__(self, layouts: Sequence[Layout], results: Sequence[Result], prices: Prices) -> None:
        self.layouts, self.results, self.prices = layouts, results, prices
        self.placements = placements = [layout.placements for layout in layouts]
        self.bytes = [group_bytes(layout, prices) for layout in layouts]
        self.mesh = layouts[0].mesh
        widest = max(self.mesh.shape)
        self.is_roomy = not any(n < self.mesh.size for layout in layouts for n in layout.shape)
        self.short_results = any(n < widest for r in results for n in r.shape)
        self.in_use = [
            {p[a].dim for p in placements if isinstance(p[a], Sharded)}  # type: ignore[attr-defined]  # a Sharded
            for a in range(self.mesh.ndim)
        ]

    def moves(self, k: int, axis: int, needs: Sequence[Placement]) -> list[tuple[float, bool]]:
        """Return for each need the price of bringing an operand to it, and whether P becomes S."""
        # Many rows, few different needs: each is priced once. Rules share their placements, so their identity will
        # do, which is quicker to look up than their value.
        known: dict[int, tuple[float, bool]] = {}
        found = []
        for need in needs:
            move = known.get(id(need))
            if move is None:
                move = known[id(need)] = self._move(k, axis, need)
            found.append(move)
        return found

    def _move(self, k: int, axis: int, need: Placement) -> tuple[float, bool]:
        have = self.placements[k][axis]
        if type(have) is type(need):
            if have == need or (isinstance(have, Sharded) and have.dim == need.dim):  # type: ignore[attr-defined]
                return _FREE  # of another split rule, the action keeps the operand's
            if isinstance(have, Partial):
                return _NEVER
        if isinstance(need, Sharded):
            if not self._can_cut(k, axis, need):
                return _NEVER
            if isinstance(have, Replicated):
                return _FREE
        name = collective_of(have, need, self.prices)
        price = price_bytes(name, self.mesh.shape[axis], self.bytes[k][axis], self.prices)
        return price, is_reduced_to_shards(have, need)

    def _can_cut(self, k: int, axis: int, need: Sharded) -> bool:
        layout, dim = self.layouts[k], need.dim
        if dim >= layout.ndim:
            return False
        size, least = self.mesh.shape[axis], layout.shape[dim]
        if layout.sharding_axes[dim]:  # other axes cut it: what is left is the least that a rank holds
            least = self._least_held(layout, dim)
            if least == 0 or (least == 1 and size > 1):
                return False
        elif least == 1:
            return False
        return dim in self.in_use[axis] or least >= size

    def _least_held(self, layout: Layout, dim: int) -> int:
        if "ceil" in layout.splits:
            return min(layout.local_shape(rank)[dim] for rank in self.mesh.ranks)
        return layout.shape[dim] // prod(self.mesh.shape[axis] for axis in layout.sharding_axes[dim])

    def result(self, row: AxisAssignment, axis: int) -> bool:
        """A result whose cut dim is shorter than the mesh axis would be made of empty shards."""
        out = row.output
        if isinstance(out, tuple) or not isinstance(out, Sharded):
            return True
        size = self.mesh.shape[axis]
        for result in self.results:
            if out.dim >= len(result.shape):
                return False
            extent = result.shape[out.dim]
            if extent < size and not any(
                isinstance(need, Sharded) and need.dim < layout.ndim and layout.shape[need.dim] == extent
                for need, layout in zip(row.needed_inputs, self.layouts, strict=True)
            ):
                return False
        return True


def family_of(placement: Placement) -> str | None:
    """Return how a placement is still to be reduced: "sum", "max", "min", "prod"; None where it is whole."""
    if not isinstance(placement, Partial):
        return None
    return "sum" if placement.op == "avg" else placement.op
