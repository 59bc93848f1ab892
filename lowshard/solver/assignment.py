"""Rows of rules: valid on any one mesh axis, from placements of operands to those of results. Frozen values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Literal, NamedTuple

from lowshard.argument import instance, whole
from lowshard.bounded import bounded_cache
from lowshard.dtypes import Kind
from lowshard.errors import LayoutError
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.placement import Partial, Placement, Replicated, Sharded

Prices = Literal["published", "volume"]
"""Two price lists. "published" is that of MAX's GreedyReshard (modular/modular, max.experimental.sharding): bytes of
the whole tensor, whatever the other mesh axes cut; an all-to-all costs what an all-gather costs; R to P is impossible.
"volume" is what a rank sends on a ring: bytes of the part that the other mesh axes leave to a group, an all-to-all at
its true volume. No price of "volume" is above the published one.
"""
Collective = Literal[
    "noop",
    "local_slice",
    "keep_one_copy",
    "all_gather",
    "all_to_all",
    "all_reduce",
    "reduce_scatter",
    "exchange",
    "infeasible",
]


def collective_of(src: Placement, dst: Placement, prices: Prices = "published") -> Collective:
    """Return the collective that takes `src` to `dst` on one mesh axis."""
    # "published" knows no R to P, and does not reduce min, max or prod; "volume" does both.
    if src == dst:
        return "noop"
    if isinstance(src, Partial):
        if prices == "published" and src.op not in ("sum", "avg"):
            return "infeasible"
        if isinstance(dst, Replicated):
            return "all_reduce"
        return "reduce_scatter" if isinstance(dst, Sharded) else "infeasible"
    if isinstance(src, Replicated):
        if isinstance(dst, Sharded):
            return "local_slice"
        return "keep_one_copy" if prices == "volume" else "infeasible"
    if isinstance(dst, Replicated):
        return "all_gather"
    return "all_to_all" if isinstance(dst, Sharded) else "infeasible"


def price_bytes(
    collective: Collective, size: int, tensor_bytes: float, prices: Prices = "published"
) -> float:
    """Return the bytes a collective over `size` ranks is priced at; 0 over one rank, infinite if infeasible."""
    # Ring volumes of B bytes that a group holds together: Thakur, Rabenseifner, Gropp, Optimization of Collective
    # Communication Operations in MPICH, 2005.
    if size == 1 or collective in ("noop", "local_slice", "keep_one_copy"):
        return 0.0
    if collective == "infeasible":
        return inf
    if collective == "exchange":  # B is the busiest rank's bytes times N
        return tensor_bytes / size
    ring = tensor_bytes * (size - 1) / size
    if collective == "all_reduce":
        return 2 * ring
    return ring / size if collective == "all_to_all" and prices == "volume" else ring


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


@bounded_cache(1 << 18)
def replicated_row(operands: int) -> AxisAssignment:
    """Return the row with everything replicated."""
    return AxisAssignment((Replicated(),) * operands, Replicated())


@dataclass(frozen=True, slots=True)
class Style:
    """What the layouts of one op share beside placements: how mesh axes nest on a dim, and the split rule of each."""

    order: tuple[int, ...] | None
    """The order in which mesh axes nest on one dim; None for mesh order."""
    ceil: tuple[bool, ...]
    """Mesh axes whose cuts follow the ceiling rule."""

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> Style:
        """Return the style that operands give to all of an op's layouts."""
        # The order of the first operand that has another than mesh order; a ceiling cut on an axis cuts everything so.
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
        if self.order is None or all(len(dim) < 2 for dim in made.sharding_axes):
            return made
        names = mesh.axis_names
        rank_of = {axis: place for place, axis in enumerate(self.order)}
        spec = [[names[a] for a in sorted(dim, key=rank_of.__getitem__)] for dim in made.sharding_axes]
        return Layout._make(mesh, shape, made.dtype, spec, made.splits, made.partials)


def group_bytes(source: Layout, prices: Prices) -> list[float]:
    """Return B of `price_bytes` for each mesh axis: bytes of an operand that the ranks along it hold together."""
    # "published" takes the whole tensor; "volume" what the other mesh axes, as the operand comes, leave to one group.
    whole = float(source.size_bytes)
    sizes = source.mesh.shape
    if prices == "published":
        return [whole] * len(sizes)
    cut = [axis for dim in source.sharding_axes for axis in dim]
    if not cut:
        return [whole] * len(sizes)
    share = whole / prod([sizes[axis] for axis in cut])
    return [share * size if axis in cut else share for axis, size in enumerate(sizes)]


def cut_by_others(source: Layout, axis: int) -> int:
    """Return over how many ranks the other mesh axes cut an operand as it comes."""
    return prod(source.mesh.shape[other] for dim in source.sharding_axes for other in dim if other != axis)


def nesting_of(layout: Layout) -> tuple[int, ...] | None:
    """Return the order of mesh axes that a layout nests by, or None where mesh order does."""
    if all(len(dim) < 2 or tuple(sorted(dim)) == dim for dim in layout.sharding_axes):
        return None
    order = list(range(layout.mesh.ndim))
    for dim in layout.sharding_axes:
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
