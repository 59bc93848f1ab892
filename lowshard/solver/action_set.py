"""ActionSet: the rows an op offers for given operand layouts, and the actions made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import inf, prod
from typing import Any, NamedTuple, Protocol, get_args

import numpy as np

from lowshard import dtypes
from lowshard.argument import as_shape, brief, choice, instance, items, mapping, truth, whole
from lowshard.bounded import bounded_cache
from lowshard.errors import LayoutError, SolverError
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.placement import Partial, Placement, Replicated, Sharded
from lowshard.solver.action import (
    Action,
    AxisAssignment,
    Result,
    cut_by_others,
    group_bytes,
    is_reduced_to_shards,
    one_row_an_axis,
)
from lowshard.solver.transition import Prices, collective_of, price_bytes

OPERANDS = "layouts are a sequence of Layout, one a tensor operand"
_ROWS = "rows are a sequence of AxisAssignment"
_R = Replicated()


class Solver(Protocol):
    """Anything that picks one action: `(ActionSet, layouts) -> Action`.

    It reads `action_set.candidates(axis)` or `action_set.actions()` and returns `action_set.action(rows)`.
    """

    def __call__(self, action_set: ActionSet, layouts: Sequence[Layout], /) -> Action:
        """Return the action to take for operands that come in `layouts`."""
        ...


class Finalize(Protocol):
    """Called on the action that was picked; returns it or one in its place."""

    def __call__(self, action: Action, /) -> Action:
        """Return the action to take."""
        ...


class Candidate(NamedTuple):
    """One row on one mesh axis, priced for the operands as they come."""

    row_index: int
    """Its place in `axis_assignments`: earlier ones win ties."""
    row: AxisAssignment
    cost_bytes: float
    reduces_to_shards: bool
    """A partial operand would become sharded: what `allow_partial_to_sharded` is about."""
    moves_bytes: tuple[float, ...]
    """The part of the price that each operand's move makes up; the rest are collectives inside the op."""


class Priced(NamedTuple):
    """Every row on one mesh axis, by its index: infinite where it is not feasible."""

    costs: list[float]
    reduces: list[bool]
    moves: list[list[tuple[float, bool]]]
    """For each operand, each row's price and whether P becomes S."""


@dataclass(frozen=True)
class ActionSet:
    """What an op offers a solver: rows in order of preference, and the layouts the operands come in."""

    axis_assignments: tuple[AxisAssignment, ...]
    layouts: tuple[Layout, ...]
    results: tuple[Result, ...]
    op: str = "op"
    extras: tuple[tuple[str, Any], ...] = ()
    """Arguments of the op that are no tensors, by name."""
    prices: Prices = "published"
    finalize: Finalize | None = field(default=None, compare=False)
    refused: tuple[object, ...] = field(default=(), compare=False)
    """Published rows that are left out because they do not preserve values, and why."""

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the first operand; all operands lie on it."""
        return self.layouts[0].mesh

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Global shape of the first result."""
        return self.results[0].shape

    def candidates(self, axis: int) -> tuple[Candidate, ...]:
        """Return the rows that are feasible on a mesh axis, in order, with their prices."""
        found = self._candidates
        try:
            return found[axis if type(axis) is int else whole(axis, "axis is an integer", LayoutError)]
        except IndexError:
            raise LayoutError(
                f"axis is one of the {len(found)} mesh axes, counted from 0, got {brief(axis)}"
            ) from None

    @cached_property
    def _candidates(self) -> tuple[tuple[Candidate, ...], ...]:
        return tuple(
            tuple(
                Candidate(
                    index,
                    row,
                    priced.costs[index],
                    priced.reduces[index],
                    tuple(m[index][0] for m in priced.moves),
                )
                for index, row in enumerate(self.axis_assignments)
                if priced.costs[index] != inf
            )
            for priced in self.priced
        )

    @cached_property
    def priced(self) -> tuple[Priced, ...]:
        """For each mesh axis every row's price."""
        rows, layouts, prices, mesh = self.axis_assignments, self.layouts, self.prices, self.mesh
        placements = [layout.placements for layout in layouts]
        held_bytes = [group_bytes(layout, prices) for layout in layouts]
        fits = _Feasibility(layouts, placements, self.results)
        columns = list(zip(*[row.needed_inputs for row in rows], strict=True))
        special = [i for i, row in enumerate(rows) if row.only or row.inner]
        alike = fits.is_roomy and not any(rows[i].only for i in special)
        found = []
        like: dict[object, Priced] = {}
        for axis, size in enumerate(mesh.shape):
            held = [p[axis] for p in placements]
            bytes_ = [b[axis] for b in held_bytes]
            key = (size, *held, *bytes_)
            if alike and key in like:  # another axis that everything is alike on
                found.append(like[key])
                continue
            moves = [
                _moves(held[k], column, size, bytes_[k], fits, k, axis, prices)
                for k, column in enumerate(columns)
            ]
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
            if fits.short_results:
                costs = [c if fits.result(row, axis) else inf for c, row in zip(costs, rows, strict=True)]
            like[key] = Priced(costs, reduces, moves)
            found.append(like[key])
        return tuple(found)

    def actions(self) -> Iterator[Action]:
        """Yield every feasible action: the first mesh axis is the outermost, rows come in order."""
        for chosen in product(*self._candidates):
            rows = [candidate.row for candidate in chosen]
            if self.commute(rows):
                yield self.action(rows)

    @cached_property
    def may_not_commute(self) -> bool:
        """Whether rows of different mesh axes may exclude each other: an operand comes as a max, min or product."""
        return any(op not in (None, "sum", "avg") for layout in self.layouts for op in layout.partials)

    def commute(self, rows: Sequence[AxisAssignment]) -> bool:
        """Return whether rows of mesh axes go together: no tensor may be a max along one and a sum along another."""
        if not self.may_not_commute:
            return True
        families = [self.families(row) for row in rows]
        return all(len({f for f in each if f is not None}) < 2 for each in zip(*families, strict=True))

    def families(self, row: AxisAssignment) -> tuple[str | None, ...]:
        """Return how each operand and result of a row is still to be reduced: "sum", "max", "min", "prod" or not."""
        return tuple(_family(p) for p in (*row.needed_inputs, *row.outputs(len(self.results))))

    def action(self, rows: Sequence[AxisAssignment]) -> Action:
        """Return the action of one row a mesh axis.

        Raises:
            LayoutError: not one row a mesh axis.
        """
        rows = items(rows, _ROWS, LayoutError)
        one_row_an_axis(rows, self.mesh)
        for row in rows:
            instance(row, AxisAssignment, _ROWS, LayoutError)
        made = Action(self.op, self.extras, self.layouts, tuple(rows), self.results, self.prices, self)
        return made if self.finalize is None else self.finalize(made)

    def need_candidates(self) -> None:
        """Raise SolverError when a mesh axis has no feasible row."""
        for name, here in zip(self.mesh.axis_names, self.priced, strict=True):
            if min(here.costs) == inf:
                rows = "; ".join(map(str, self.axis_assignments))
                raise SolverError(
                    f"{self.op}: no feasible action: on mesh axis {name!r} no row of the rule can be reached from "
                    f"{', '.join(map(str, self.layouts))}. Rows: {rows}. Redistribute the operands first"
                )


class _Feasibility:
    """Whether a need can be met: the conditions that MAX documents. Shards without elements are never made anew."""

    def __init__(
        self, layouts: Sequence[Layout], placements: Sequence[Sequence[Placement]], results: Sequence[Result]
    ) -> None:
        self.layouts, self.placements, self.results = layouts, placements, results
        self.mesh = layouts[0].mesh
        widest = max(self.mesh.shape)
        self.is_roomy = not any(n < self.mesh.size for layout in layouts for n in layout.shape)
        self.short_results = any(n < widest for r in results for n in r.shape)
        self.in_use = [
            {p[a].dim for p in placements if isinstance(p[a], Sharded)}  # type: ignore[attr-defined]  # a Sharded
            for a in range(self.mesh.ndim)
        ]

    def need(self, k: int, axis: int, need: Sharded) -> bool:
        layout, dim = self.layouts[k], need.dim
        held = self.placements[k][axis]
        if isinstance(held, Sharded) and held.dim == dim:
            return True
        if dim >= layout.ndim:
            return False
        size, least = self.mesh.shape[axis], layout.shape[dim]
        if layout.cutters[dim]:  # other axes cut it: what is left is the least that a rank holds
            least = self._least_held(layout, dim)
            if least == 0 or (least == 1 and size > 1):
                return False
        elif least == 1:
            return False
        return dim in self.in_use[axis] or least >= size

    def _least_held(self, layout: Layout, dim: int) -> int:
        if "ceil" in layout.splits:
            return min(layout.local_shape(rank)[dim] for rank in self.mesh.ranks)
        return layout.shape[dim] // prod(self.mesh.shape[axis] for axis in layout.cutters[dim])

    def result(self, row: AxisAssignment, axis: int) -> bool:
        """A result whose cut dim is shorter than the mesh axis would be made of empty shards.

        Only where the dim is new: a result dim as long as the operand's was judged there.
        """
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


def _family(placement: Placement) -> str | None:
    if not isinstance(placement, Partial):
        return None
    return "sum" if placement.op == "avg" else placement.op


def _moves(
    have: Placement,
    needs: Sequence[Placement],
    size: int,
    tensor_bytes: float,
    fits: _Feasibility,
    k: int,
    axis: int,
    prices: Prices,
) -> list[tuple[float, bool]]:
    """Return for each need the price of bringing an operand to it, and whether P becomes S."""
    # Many rows, few different needs: each is priced once. Rules share their placements, so their identity will do,
    # which is quicker to look up than their value.
    known: dict[int, tuple[float, bool]] = {}
    found = []
    for need in needs:
        move = known.get(id(need))
        if move is None:
            move = known[id(need)] = _move(have, need, size, tensor_bytes, fits, k, axis, prices)
        found.append(move)
    return found


def _move(
    have: Placement,
    need: Placement,
    size: int,
    tensor_bytes: float,
    fits: _Feasibility,
    k: int,
    axis: int,
    prices: Prices,
) -> tuple[float, bool]:
    if type(have) is type(need):
        if have == need or (isinstance(have, Sharded) and have.dim == need.dim):  # type: ignore[attr-defined]
            return _FREE  # of another split rule, the action keeps the operand's
        if isinstance(have, Partial):
            return _NEVER
    if isinstance(need, Sharded):
        if not fits.need(k, axis, need):
            return _NEVER
        if isinstance(have, Replicated):
            return _FREE
    name = collective_of(have, need, prices)
    return price_bytes(name, size, tensor_bytes, prices), is_reduced_to_shards(have, need)


_FREE = (0.0, False)
_NEVER = (inf, False)


def build_action_set(
    rows: Sequence[AxisAssignment],
    *,
    layouts: Sequence[Layout],
    extras: Mapping[str, Any] | None = None,
    result_shape: Sequence[int] | None = None,
    finalize: Finalize | None = None,
    op: str = "op",
    results: Sequence[Result] | None = None,
    prices: Prices = "published",
    refused: Sequence[object] = (),
    fallback: bool = True,
) -> ActionSet:
    """Return the action set of some rows: those feasible on a mesh axis at least, then all-replicated.

    Args:
        rows: in order of preference. The all-replicated row is put at the end unless it is there already.
        layouts: how the operands come, in order; all on one mesh.
        extras: arguments of the op that are no tensors.
        result_shape: global shape of the result; the first operand's by default.
        finalize: called on the picked action.
        op: the op's name, for messages.
        results: shape and dtype of each result, in place of `result_shape`.
        prices: the price list, "published" (MAX's) or "volume".
        refused: published rows that were left out, for the explanation.
        fallback: whether to put the all-replicated row at the end; False where the rows begin with it.

    Raises:
        LayoutError: no layouts, layouts on different meshes, or a row that does not name every operand.
    """
    if fallback is not False:
        fallback = truth(fallback, "fallback is True or False", LayoutError)
    if fallback:  # rows of the caller's own
        choice(prices, get_args(Prices), f"prices is one of {', '.join(get_args(Prices))}", LayoutError)
    layouts = operand_layouts(layouts)
    if not layouts:
        raise LayoutError("an action set is made for the layouts of the operands: got none")
    mesh = layouts[0].mesh
    for layout in layouts[1:]:
        if layout.mesh is not mesh and layout.mesh != mesh:
            raise LayoutError(
                f"{op}: operands lie on one mesh: {mesh} of {layouts[0]} is not {layout.mesh} of {layout}; "
                "redistribute one of them to a layout on the other mesh first"
            )
    if fallback:  # rows of the caller's own
        rows = [instance(row, AxisAssignment, _ROWS, LayoutError) for row in items(rows, _ROWS, LayoutError)]
    for row in rows:
        if len(row.needed_inputs) != len(layouts):
            raise LayoutError(f"{op}: a row names every operand: {row} for {len(layouts)} operands")
    if results is None:
        rule = "result_shape is the extents of the result, each 0 or more"
        shape = layouts[0].shape if result_shape is None else as_shape(result_shape, rule, LayoutError)
        results = (Result(shape, layouts[0].dtype),)
    elif fallback:
        results = _results(results)
    kept = tuple(rows)
    if fallback:  # rows of the caller's own, perhaps with lists
        kept = tuple(map(_with_tuples, kept))
        replicated = replicated_row(len(layouts))
        kept = kept if kept and kept[-1] == replicated else (*kept, replicated)
    given = () if extras is None else freeze_args(mapping(extras, _EXTRAS, LayoutError))
    found = ActionSet(
        kept, layouts, tuple(results), op, given, prices, finalize, items(refused, _REFUSED, LayoutError)
    )
    if not fallback:
        return found
    stay = [i for i in range(len(kept)) if i == len(kept) - 1 or any(p.costs[i] != inf for p in found.priced)]
    if len(stay) == len(kept):
        return found
    rest = tuple(kept[i] for i in stay)
    return ActionSet(rest, layouts, found.results, op, found.extras, prices, finalize, tuple(refused))


_EXTRAS = "extras is a mapping of an op's arguments by name, or None"
_REFUSED = "refused is a sequence of rows that were left out"
_RESULTS = "results is a sequence of Result(shape, dtype)"


def _results(given: object) -> tuple[Result, ...]:
    found = []
    for result in items(given, _RESULTS, LayoutError):
        pair = items(result, _RESULTS, LayoutError)
        if len(pair) != 2:
            raise LayoutError(f"{_RESULTS}, got {brief(given)}")
        found.append(Result(as_shape(pair[0], _RESULTS, LayoutError), dtypes.get(pair[1]).name))
    return tuple(found)


def operand_layouts(layouts: Sequence[Layout]) -> tuple[Layout, ...]:
    """Return the layouts of an op's operands as a tuple, or raise LayoutError."""
    return tuple(instance(x, Layout, OPERANDS, LayoutError) for x in items(layouts, OPERANDS, LayoutError))


def force_replicated_action_set(*layouts: Layout, op: str = "op") -> ActionSet:
    """Return the action set whose one row has every operand and the result replicated."""
    return build_action_set([replicated_row(len(layouts))], layouts=layouts, op=op)


def _with_tuples(row: AxisAssignment) -> AxisAssignment:
    out = row.output if isinstance(row.output, Placement) else tuple(row.output)
    return replace(row, needed_inputs=tuple(row.needed_inputs), output=out)


@bounded_cache(1 << 18)
def replicated_row(operands: int) -> AxisAssignment:
    """Return the row with everything replicated."""
    return AxisAssignment((_R,) * operands, _R)


def freeze_args(args: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return arguments as a hashable value: sorted by name, lists as tuples, NumPy's scalars as Python's."""
    if not args:
        return ()
    return tuple((name, _freeze(args[name])) for name in sorted(args))


def _freeze(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(v) for v in value)
    return value.item() if isinstance(value, np.generic) else value
