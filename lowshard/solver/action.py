"""What an op offers a solver (ActionSet), and what one chooses: a row a mesh axis (Action). Frozen, no arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import inf
from typing import Any, Protocol, get_args

from lowshard import dtypes
from lowshard.argument import as_shape, brief, instance, items, mapping, one_of, truth, whole
from lowshard.content_hash import text_digest
from lowshard.errors import LayoutError, SolverError
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.placement import Placement, Sharded
from lowshard.solver.assignment import (
    HOW,
    AxisAssignment,
    Collective,
    Prices,
    Result,
    Style,
    collective_of,
    cut_by_others,
    group_bytes,
    one_row_an_axis,
    price_bytes,
    replicated_row,
)
from lowshard.solver.pricing import Candidate, Priced, family_of, price_rows
from lowshard.solver.table import RULES, Call, Rules, check_names, check_rules, offer
from lowshard.solver.table.op_argument import PerShard, freeze_args, plain_args, told_apart

OPERANDS = "layouts are a sequence of Layout, one a tensor operand"
Transition = tuple[str, str]
"""From and to: the letters of two placements on a mesh axis, "P", "R" or "S"."""
_ROWS = "rows are a sequence of AxisAssignment"


@dataclass(frozen=True, slots=True)
class Reshard:
    """What one operand undergoes on one mesh axis."""

    operand: int
    mesh_axis: str
    source: Placement
    target: Placement
    collective: Collective
    cost_bytes: float

    def __str__(self) -> str:
        return f"{self.mesh_axis}: {self.source} -> {self.target} by {self.collective}, {self.cost_bytes:,.0f} bytes"


@dataclass(frozen=True, eq=False)
class Action:
    """One row for each mesh axis: how the operands of an op shall lie, and how its results then lie.

    Made by `ActionSet.action`. Equal, with an equal digest, on every rank that picks from the same layouts. An argument
    that is 2 is not equal to one that is 2.0: of integers, the two are multiplied by in other ways.
    """

    op: str
    args: tuple[tuple[str, Any], ...]
    sources: tuple[Layout, ...]
    """The layouts that the operands come in."""
    rows: tuple[AxisAssignment, ...]
    """One a mesh axis."""
    results: tuple[Result, ...]
    prices: Prices = "published"
    action_set: ActionSet | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, value in self.args:
            if isinstance(value, PerShard) and len(value.values) != self.mesh.size:
                raise LayoutError(
                    f"{self.op}: a PerShard has a value for each rank of mesh {self.mesh}, {name} has "
                    f"{len(value.values)} for {self.mesh.size}"
                )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Action):
            return NotImplemented
        return self is other or self._compared == other._compared

    def __hash__(self) -> int:
        return hash(self._compared)

    @cached_property
    def _compared(self) -> tuple[Any, ...]:
        return self.op, told_apart(self.args), self.sources, self.rows, self.results, self.prices

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the first operand."""
        return self.sources[0].mesh

    @cached_property
    def inputs(self) -> tuple[Layout, ...]:
        """The layout each tensor operand is needed in, in order. The source itself where nothing moves."""
        found = []
        for k, source in enumerate(self.sources):
            placements = self._style.split(row.needed_inputs[k] for row in self.rows)
            if self._style.order is None and placements == source.placements:
                found.append(source)
                continue
            made = self._style.layout(self.mesh, source.shape, source.dtype, placements)
            found.append(source if made == source else made)
        return tuple(found)

    @cached_property
    def outputs(self) -> tuple[Layout, ...]:
        """The layout each result comes out in, in order."""
        count = len(self.results)
        by_axis = [row.outputs(count) for row in self.rows]
        return tuple(
            self._style.layout(self.mesh, r.shape, r.dtype, [row[k] for row in by_axis])
            for k, r in enumerate(self.results)
        )

    @cached_property
    def reshards(self) -> tuple[tuple[Reshard, ...], ...]:
        """For each operand, what it undergoes on each mesh axis where its placement changes."""
        return tuple(tuple(self._reshards(k)) for k in range(len(self.sources)))

    @cached_property
    def cost_bytes(self) -> float:
        """What the moves of the operands and the collectives inside the op are priced at, in bytes."""
        moved = sum(r.cost_bytes for operand in self.reshards for r in operand)
        inner = [
            row.inner_bytes(n, self.prices) / cut_by_others(self.sources[0], axis)
            for axis, (row, n) in enumerate(zip(self.rows, self.mesh.shape, strict=True))
            if row.inner
        ]
        return moved + sum(inner)

    @property
    def moves_nothing(self) -> bool:
        """True when every operand is needed as it comes."""
        return self.inputs == self.sources

    def explain(self) -> str:
        """Return the action as text: operands, what moves, results, and every candidate row with its price."""
        return _explain(self)

    @cached_property
    def _digest(self) -> str:
        layouts = [layout.digest() for layout in self.sources]
        rows = [(str(row), [(name, float(own)) for name, own in row.inner], row.only) for row in self.rows]
        return text_digest(repr((self.op, self.args, layouts, rows, self.results, self.prices))).hex()

    def digest(self) -> str:
        """Return 32 hex digits that two actions share exactly when they are equal."""
        return self._digest

    def __str__(self) -> str:
        inputs = ", ".join(",".join(map(str, layout.placements)) for layout in self.inputs)
        outputs = ", ".join(",".join(map(str, layout.placements)) for layout in self.outputs)
        return f"{self.op} ({inputs}) -> ({outputs}), {self.cost_bytes:,.0f} bytes"

    # ---- how rows become layouts

    @cached_property
    def _style(self) -> Style:
        return Style.of(self.sources)

    def _reshards(self, k: int) -> list[Reshard]:
        source, target = self.sources[k], self.inputs[k]
        found = []
        bytes_ = group_bytes(source, self.prices)
        for axis, (src, dst) in enumerate(zip(source.placements, target.placements, strict=True)):
            if src == dst:
                continue
            name = collective_of(src, dst, self.prices)
            size = self.mesh.shape[axis]
            price = price_bytes(name, size, bytes_[axis], self.prices)
            found.append(Reshard(k, self.mesh.axis_names[axis], src, dst, name, price))
        if not found and source != target:  # the same placements, nested in another order
            axes = [a for dim in source.sharding_axes if len(dim) > 1 for a in dim]
            size, axis = 1, axes[0]
            for a in axes:
                size *= self.mesh.shape[a]
            price = price_bytes("all_to_all", size, source.size_bytes, self.prices)
            place = source.placements[axis]
            found.append(Reshard(k, self.mesh.axis_names[axis], place, place, "all_to_all", price))
        return found


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
    finalize: Callable[[Action], Action] | None = field(default=None, compare=False)
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
                Candidate(index, row, priced.costs[index], priced.reduces[index])
                for index, row in enumerate(self.axis_assignments)
                if priced.costs[index] != inf
            )
            for priced in self.priced
        )

    @cached_property
    def priced(self) -> tuple[Priced, ...]:
        """For each mesh axis every row's price."""
        return price_rows(self.axis_assignments, self.layouts, self.results, self.prices)

    def transitions(self, axis: int, row: AxisAssignment) -> set[Transition]:
        """Return how a row changes the placements of the operands on a mesh axis."""
        moves = [(x.placements[axis], y) for x, y in zip(self.layouts, row.needed_inputs, strict=True)]
        return {
            (str(a)[0], str(b)[0])
            for a, b in moves
            if a != b and not (isinstance(a, Sharded) and isinstance(b, Sharded) and a.dim == b.dim)
        }

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
        return tuple(family_of(p) for p in (*row.needed_inputs, *row.outputs(len(self.results))))

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


class Solver(Protocol):
    """Picks one action: reads `action_set.candidates(axis)` or `.actions()`, and returns `action_set.action(rows)`."""

    def __call__(self, action_set: ActionSet, layouts: Sequence[Layout], /) -> Action:
        """Return the action to take for operands that come in `layouts`."""
        ...


def build_action_set(
    rows: Sequence[AxisAssignment],
    *,
    layouts: Sequence[Layout],
    extras: Mapping[str, Any] | None = None,
    result_shape: Sequence[int] | None = None,
    finalize: Callable[[Action], Action] | None = None,
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
        extras: arguments of the op that are no tensors; a `PerShard` gives each rank its own value.
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
        one_of(prices, get_args(Prices), "prices", LayoutError)
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


def action_set(op: str, layouts: Sequence[Layout], rules: Rules = "extended", **op_args: Any) -> ActionSet:
    """Return what an op offers a solver for operands in these layouts.

    Args:
        op: name of the op, such as "matmul".
        layouts: one a tensor operand, in order, all on one mesh.
        rules: "documented" (MAX's rows that preserve values, its byte prices) or "extended" (ours as well; volumes).
        **op_args: arguments that are no tensors (axis, shape, dims, ...).

    Raises:
        LayoutError: no such op, an argument that it does not have, or shapes and arguments that do not fit it.
    """
    check_rules(rules)
    operands = operand_layouts(layouts)
    extended = rules == "extended"
    check_names(op, op_args)
    args = plain_args(op, op_args)
    offered = offer(Call(op, operands, args, extended))
    rows = (replicated_row(len(operands)), *offered.rows) if operands else ()
    return build_action_set(
        rows,
        layouts=operands,
        extras=args,
        op=op,
        results=offered.results,
        prices="volume" if extended else "published",
        refused=offered.refused,
        fallback=False,
    )


# ---- as text

_SHOWN = 24


def _explain(action: Action) -> str:
    """Return an action as text of several lines; the candidate table comes last."""
    unit = "bytes of whole tensors" if action.prices == "published" else "bytes a rank sends"
    lines = [f"{action.op}{_args(action)}: {action.cost_bytes:,.0f} bytes ({unit}) on mesh {action.mesh}"]
    for k, (source, needed) in enumerate(zip(action.sources, action.inputs, strict=True)):
        moves = action.reshards[k]
        lines.append(f"  operand {k}: {source}" + ("" if moves else ", as it comes"))
        lines.extend(f"    {move}" for move in moves)
        if moves:
            lines.append(f'    by hand: redistribute(local, src, Layout.parse(mesh, "{needed}"), comm)')
    lines.extend(f"  result {k}: {layout}" for k, layout in enumerate(action.outputs))
    for name, size, row in zip(action.mesh.axis_names, action.mesh.shape, action.rows, strict=True):
        if row.how != "local" and size > 1:
            inner = ", ".join(f"{c} over {over:,.0f} bytes" for c, over in row.inner)
            lines.append(f"  {name}: {HOW[row.how]}" + (f" ({inner})" if inner else ""))
    offered = _offered(action)
    if offered is not None:
        lines.append(candidate_table(offered, chosen=action.rows))
    return "\n".join(lines)


def _offered(action: Action) -> ActionSet | None:
    """Return the action set that an action came from, made anew where it is not at hand; None for rows of no rule."""
    if action.action_set is not None or action.op not in RULES:
        return action.action_set
    rules: Rules = "documented" if action.prices == "published" else "extended"
    return action_set(action.op, action.sources, rules, **dict(action.args))


def arrows(transitions: Iterable[Transition]) -> str:
    """Return transitions as text."""
    return ", ".join(f"{a} -> {b}" for a, b in sorted(transitions))


def candidate_table(
    action_set: ActionSet,
    barred: Callable[[set[Transition]], set[Transition]] = lambda _: set(),
    chosen: Sequence[AxisAssignment] | None = None,
) -> str:
    """Return the candidate rows of each mesh axis as an aligned table, each with its price and its fate."""
    held = [layout.placements for layout in action_set.layouts]
    heads = ("axis", *(f"operand {k}" for k in range(len(held))), "result", "collectives", "bytes", "")
    body: list[tuple[str, ...]] = []
    for axis, name in enumerate(action_set.mesh.axis_names):
        for candidate in action_set.candidates(axis)[:_SHOWN]:
            row = candidate.row
            moves = [
                (placements[axis], need) for placements, need in zip(held, row.needed_inputs, strict=True)
            ]
            names = [collective_of(a, b, action_set.prices) for a, b in moves]
            names += [inner for inner, _ in row.inner]
            taken = chosen is not None and chosen[axis] == row
            bars = barred(action_set.transitions(axis, row))
            fate = "chosen" if taken else f"not allowed: {arrows(bars)}" if bars else ""
            if not fate and candidate.reduces_to_shards:
                fate = "only with allow_partial_to_sharded"
            outputs = row.outputs(len(action_set.results))
            body.append(
                (
                    name,
                    *(_arrow(a, b) for a, b in moves),
                    ",".join(map(str, dict.fromkeys(outputs))),
                    " + ".join(n for n in names if n != "noop") or "-",
                    f"{candidate.cost_bytes:,.0f}",
                    fate,
                )
            )
        hidden = len(action_set.candidates(axis)) - _SHOWN
        if hidden > 0:
            body.append((name, f"... {hidden} more", *[""] * (len(heads) - 2)))
    return "\n".join([*aligned([heads, *body]), *(f"refused: {text}" for text in action_set.refused)])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines, their columns one below the other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _arrow(held: Placement, need: Placement) -> str:
    return str(held) if held == need else f"{held}->{need}"


def _args(action: Action) -> str:
    return "(" + ", ".join(f"{n}={v}" for n, v in action.args) + ")" if action.args else ""
