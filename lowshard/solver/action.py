"""Rows, moves and actions: what a solver chooses among and what it chooses. Frozen values, no arrays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lowshard.argument import instance, whole
from lowshard.dtypes import Kind
from lowshard.errors import LayoutError
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.placement import Partial, Placement, Sharded
from lowshard.solver.transition import Collective, Prices, collective_of, price_bytes

if TYPE_CHECKING:
    from lowshard.solver.action_set import ActionSet

How = Literal["local", "mask", "scale", "statistics", "scan", "pairs", "halo"]
HOW: dict[str, str] = {
    "local": "every rank runs the op on its own shards",
    "mask": "every rank looks up the rows it holds and leaves zeros for the others",
    "scale": "every rank divides its own sum by the whole extent",
    "statistics": "ranks all-reduce a maximum or sums along the cut dim, then finish on their own shards",
    "scan": "ranks scan their own shards, then add the totals of the ranks before them",
    "pairs": "ranks gather everyone's best candidates and pick among them",
    "halo": "ranks exchange just the runs along the cut dim that the new split puts elsewhere",
}

EVERY_KIND: frozenset[Kind] = frozenset(("float", "int", "uint", "bool", "scale"))


_MOST_RESULTS = 1 << 16


@dataclass(frozen=True, slots=True)
class AxisAssignment:
    """One row of a rule: valid on any one mesh axis.

    Operands placed like `needed_inputs` there give a result placed like `output`; with several results, `output`
    may be a tuple of placements, one a result. The result equals that of the unsharded op: integers exactly (they wrap
    around), floats but for the rounding of partial terms to their dtype, which must hold the terms.
    """

    needed_inputs: tuple[Placement, ...]
    output: Placement | tuple[Placement, ...]
    how: How = "local"
    """How a rank computes its part, a key of `HOW`."""
    inner: tuple[tuple[Collective, float], ...] = ()
    """Collectives inside the op: the name, and the bytes that a rank puts in (of an exchange: that the busiest one
    receives, times the ranks), were no other mesh axis to cut the operands."""
    only: tuple[str, ...] = ()
    """The mesh axes that the row is valid on; empty: any."""
    kinds: frozenset[Kind] = EVERY_KIND
    """The kinds of dtype that the row holds for: an average of integers is rounded, so it passes through no sum."""
    finite_only: bool = False
    """Whether what stands beside a partial operand must be finite: infinity times a term of 0, or times terms of both
    signs, is NaN, where the unsharded op gives infinity."""

    def outputs(self, count: int) -> tuple[Placement, ...]:
        """Return one placement a result."""
        if isinstance(self.output, tuple):
            return self.output
        count = whole(count, f"an op has 0 to {_MOST_RESULTS} results", LayoutError, 0, _MOST_RESULTS)
        return (self.output,) * count

    def holds_for(self, kind: Kind | None) -> bool:
        """Return whether the row holds for operands of a kind of dtype.

        None stands for operands without a common arithmetic (`lowshard.solver.table.common_kind`): then only rows
        without partials hold.
        """
        if kind is not None:
            return instance(kind, str, "a kind of dtype is text or None", LayoutError) in self.kinds
        return not any(isinstance(p, Partial) for p in (*self.needed_inputs, *self.outputs(1)))

    def inner_bytes(self, size: int, prices: Prices) -> float:
        """Return what the collectives inside the op are priced at over `size` ranks."""
        return sum(
            price_bytes(name, size, own * size if name == "all_gather" else own, prices)
            for name, own in self.inner
        )

    def __str__(self) -> str:
        out = ",".join(map(str, self.output)) if isinstance(self.output, tuple) else str(self.output)
        notes: list[str] = [] if self.how == "local" else [self.how]
        if self.kinds != EVERY_KIND:
            notes.append("/".join(sorted(self.kinds)))
        if self.finite_only:
            notes.append("finite")
        return f"({', '.join(map(str, self.needed_inputs))}) -> {out}" + (
            f" [{', '.join(notes)}]" if notes else ""
        )


class Result(NamedTuple):
    """Global shape and dtype of one result of an op."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Reshard:
    """What one operand undergoes on one mesh axis."""

    operand: int
    mesh_axis: str
    source: Placement
    target: Placement
    collective: Collective
    cost_bytes: float

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "operand": self.operand,
            "mesh_axis": self.mesh_axis,
            "from": str(self.source),
            "to": str(self.target),
            "collective": self.collective,
            "cost_bytes": self.cost_bytes,
        }

    def __str__(self) -> str:
        return f"{self.mesh_axis}: {self.source} -> {self.target} by {self.collective}, {self.cost_bytes:,.0f} bytes"


@dataclass(frozen=True, slots=True)
class Style:
    """What the layouts of one op share beside placements: how mesh axes nest on a dim, and the split rule of each."""

    order: tuple[int, ...] | None
    """The order in which mesh axes nest on one dim; None for mesh order."""
    ceil: tuple[bool, ...]
    """Mesh axes whose cuts follow the ceiling rule."""

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> Style:
        """Return the style that operands give to all of an op's layouts.

        The order is that of the first operand that has another than mesh order; an axis on which one operand is cut by
        the ceiling rule cuts everything so.
        """
        order = next((order for order in map(nesting_of, layouts) if order is not None), None)
        ndim = layouts[0].mesh.ndim
        return cls(order, tuple(any(x.splits[a] == "ceil" for x in layouts) for a in range(ndim)))

    def split(self, placements: Iterable[Placement]) -> tuple[Placement, ...]:
        """Return placements, one a mesh axis, with the split rule of each axis."""
        if not any(self.ceil):
            return tuple(placements)
        return tuple(
            Sharded(p.dim, "ceil") if ceil and isinstance(p, Sharded) else p
            for p, ceil in zip(placements, self.ceil, strict=True)
        )

    def layout(
        self, mesh: DeviceMesh, shape: tuple[int, ...], dtype: str, placements: Iterable[Placement]
    ) -> Layout:
        """Return the layout of these placements."""
        made = Layout(mesh, shape, dtype, self.split(placements))
        if self.order is None or all(len(dim) < 2 for dim in made.cutters):
            return made
        names = mesh.axis_names
        rank_of = {axis: place for place, axis in enumerate(self.order)}
        spec = [[names[a] for a in sorted(dim, key=rank_of.__getitem__)] for dim in made.cutters]
        return Layout._make(mesh, shape, made.dtype, spec, made.splits, made.partials)


@dataclass(frozen=True)
class Action:
    """One row for each mesh axis: how the operands of an op shall lie, and how its results then lie.

    Made by `ActionSet.action`. Equal, with an equal digest, on every rank that picks from the same layouts.
    """

    op: str
    args: tuple[tuple[str, Any], ...]
    sources: tuple[Layout, ...]
    """The layouts that the operands come in."""
    rows: tuple[AxisAssignment, ...]
    """One a mesh axis."""
    results: tuple[Result, ...]
    prices: Prices = "published"
    action_set: ActionSet | None = field(default=None, repr=False, compare=False, hash=False)

    @classmethod
    def quick(
        cls,
        op: str,
        args: tuple[tuple[str, Any], ...],
        sources: tuple[Layout, ...],
        rows: tuple[AxisAssignment, ...],
        results: tuple[Result, ...],
        prices: Prices,
    ) -> Action:
        """Return the action of these fields; as the constructor does, at a third of the time."""
        made = cls.__new__(cls)
        made.__dict__.update(
            op=op, args=args, sources=sources, rows=rows, results=results, prices=prices, action_set=None
        )
        return made

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
        from lowshard.solver.explanation import explain

        return explain(self)

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads back."""
        return {
            "op": self.op,
            "args": [[name, value] for name, value in self.args],
            "sources": [layout.to_json() for layout in self.sources],
            "rows": [_row_to_json(row) for row in self.rows],
            "results": [[list(r.shape), r.dtype] for r in self.results],
            "prices": self.prices,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Action:
        """Return the action that `to_json` wrote, checked against the rule of its op.

        Raises:
            PlanError: a field is missing or does not fit, or the rule has no such row.
        """
        from lowshard.solver.verification import read_action

        return read_action(data)

    @cached_property
    def _digest(self) -> str:
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), default=str)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

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
            axes = [a for dim in source.cutters if len(dim) > 1 for a in dim]
            size, axis = 1, axes[0]
            for a in axes:
                size *= self.mesh.shape[a]
            price = price_bytes("all_to_all", size, source.size_bytes, self.prices)
            place = source.placements[axis]
            found.append(Reshard(k, self.mesh.axis_names[axis], place, place, "all_to_all", price))
        return found


def group_bytes(source: Layout, prices: Prices) -> list[float]:
    """Return B of `price_bytes` for each mesh axis: bytes of an operand that the ranks along it hold together.

    "published" takes the whole tensor; "volume" what the other mesh axes, as the operand comes, leave to one group.
    """
    whole = float(source.size_bytes)
    sizes = source.mesh.shape
    if prices == "published":
        return [whole] * len(sizes)
    cut = [axis for dim in source.cutters for axis in dim]
    if not cut:
        return [whole] * len(sizes)
    share = whole / prod([sizes[axis] for axis in cut])
    return [share * size if axis in cut else share for axis, size in enumerate(sizes)]


def cut_by_others(source: Layout, axis: int) -> int:
    """Return over how many ranks the other mesh axes cut an operand as it comes."""
    return prod(source.mesh.shape[other] for dim in source.cutters for other in dim if other != axis)


def nesting_of(layout: Layout) -> tuple[int, ...] | None:
    """Return the order of mesh axes that a layout nests by, or None where mesh order does."""
    if all(len(dim) < 2 or tuple(sorted(dim)) == dim for dim in layout.cutters):
        return None
    order = list(range(layout.mesh.ndim))
    for dim in layout.cutters:
        for slot, axis in zip(sorted(dim), dim, strict=True):
            order[slot] = axis
    return tuple(order)


def one_row_an_axis(rows: Sequence[AxisAssignment], mesh: DeviceMesh) -> None:
    """Raise LayoutError unless there is one row for each mesh axis."""
    if len(rows) != mesh.ndim:
        raise LayoutError(f"an action has one row a mesh axis: mesh {mesh} has {mesh.ndim}, got {len(rows)}")


def is_reduced_to_shards(source: Placement, target: Placement) -> bool:
    """Return True for what `allow_partial_to_sharded` is about: a partial operand wanted sharded."""
    return isinstance(source, Partial) and isinstance(target, Sharded)


def _row_to_json(row: AxisAssignment) -> dict[str, Any]:
    out = [str(p) for p in row.output] if isinstance(row.output, tuple) else str(row.output)
    return {
        "needs": [str(p) for p in row.needed_inputs],
        "output": out,
        "how": row.how,
        "inner": [[name, own] for name, own in row.inner],
        "only": list(row.only),
        "kinds": sorted(row.kinds),
        "finite_only": row.finite_only,
    }
