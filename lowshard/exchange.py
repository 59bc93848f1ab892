"""Exact box exchanges: which rank gives which box to which other, and whose partial terms are folded on arrival.

In an exchange every rank receives just the elements of its destination box that it does not hold, each from one rank.
Frozen data: no arrays, no communicator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from lowshard.box import Box, Interval, full_box, intersect, split_interval, volume
from lowshard.errors import PlanError
from lowshard.layout import Layout
from lowshard.placement import ReduceOp
from lowshard.reading import reader
from lowshard.step_search import folded_axes, fresh_axes, state_of


@dataclass(frozen=True, slots=True)
class Piece:
    """One box that one rank gives another (or keeps) in an exchange."""

    src_rank: int
    dst_rank: int
    box: Box
    """In global coordinates."""
    term: int
    """Which partial term it belongs to: the row-major index over the folded mesh axes; else 0."""

    @property
    def elems(self) -> int:
        """Elements in the box."""
        return volume(self.box)


_OWN_BYTES, _PIECE_BYTES = 1 << 10, 512


@dataclass(frozen=True)
class Exchange:
    """Every rank of `dst` gets the elements of its box, each from one rank of `src`."""

    src: Layout
    dst: Layout
    folded: tuple[int, ...] = ()
    """Positions of src's mesh axes whose partial terms are folded on arrival."""
    fresh: tuple[int, ...] = ()
    """Positions of dst's mesh axes that become partial: coordinate 0 keeps the value, the others hold
    the identity of the op (avg: all keep the value)."""
    node_size: int | None = None
    _incoming: dict[int, tuple[Piece, ...]] = field(default_factory=dict, repr=False, compare=False)
    _outgoing: dict[int, tuple[Piece, ...]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def op(self) -> ReduceOp | None:
        """The op that folds the terms (avg folds as a sum, then divides), or None."""
        ops = {self.src.partials[a] for a in self.folded}
        if not ops:
            return None
        return "sum" if ops & {"sum", "avg"} else next(op for op in ops if op is not None)

    @property
    def divisor(self) -> int:
        """What a folded sum is divided by: the product of the folded avg axes."""
        return prod(self.src.mesh.shape[a] for a in self.folded if self.src.partials[a] == "avg")

    @property
    def terms(self) -> int:
        """Number of partial terms folded on arrival."""
        return prod(self.src.mesh.shape[a] for a in self.folded)

    def fill_op(self, rank: int) -> ReduceOp | None:
        """Return the op whose identity fills this rank's result, or None when it gets the value."""
        coord = self.dst.mesh.coord(rank)
        for axis in self.fresh:
            op = self.dst.partials[axis]
            if op != "avg" and coord[axis] != 0:
                return op
        return None

    def incoming(self, rank: int) -> tuple[Piece, ...]:
        """Return what a rank receives, its own kept pieces included, in the order of the wire."""
        found = self._incoming.get(rank)
        if found is None:
            found = self._incoming[rank] = tuple(self._pieces_to(rank))
        return found

    def outgoing(self, rank: int) -> tuple[Piece, ...]:
        """Return what a rank gives, by destination rank, in the order of the wire."""
        found = self._outgoing.get(rank)
        if found is None:
            found = self._outgoing[rank] = tuple(self._pieces_from(rank))
        return found

    @property
    def kept_bytes(self) -> int:
        """About how many bytes of memory this takes: the pieces of the ranks that were asked for are kept."""
        maps = (*self._incoming.values(), *self._outgoing.values())
        return _OWN_BYTES + _PIECE_BYTES * sum(map(len, maps))

    def sent_bytes(self, rank: int) -> int:
        """Return the bytes a rank sends to others."""
        return sum(p.elems for p in self.outgoing(rank) if p.dst_rank != rank) * self.src.itemsize_bytes

    def received_bytes(self, rank: int) -> int:
        """Return the bytes a rank receives from others."""
        return sum(p.elems for p in self.incoming(rank) if p.src_rank != rank) * self.src.itemsize_bytes

    def moves_bytes(self) -> bool:
        """Return True when any rank receives anything from another."""
        return any(p.src_rank != rank for rank in self.dst.mesh.ranks for p in self.incoming(rank))

    def _pieces_to(self, rank: int) -> Iterator[Piece]:
        if rank not in self.dst.mesh or self.fill_op(rank) is not None:
            return
        coord = self.dst.mesh.coord(rank)
        box = self.dst._box_at(coord)
        if volume(box) == 0:
            return
        mesh = self.src.mesh
        # Positions along src's axes: what is fixed by the lane (partial axes that stay partial), by
        # the term, and by the cell of the grid; the rest are replicas to choose from.
        lane, copies = self._lane(), self._copies()
        spans = [list(_overlaps(self.src, dim, interval)) for dim, interval in enumerate(box)]
        at = [0] * mesh.ndim
        for a in lane:
            at[a] = coord[a]
        for term, folded in enumerate(product(*(range(mesh.shape[a]) for a in self.folded))):
            for a, c in zip(self.folded, folded, strict=True):
                at[a] = c
            for cell in product(*spans):
                for dim, (where, _) in enumerate(cell):
                    for a, c in zip(self.src.sharding_axes[dim], where, strict=True):
                        at[a] = c
                source = self._nearest(rank, at, copies)
                yield Piece(source, rank, tuple(interval for _, interval in cell), term)

    def _pieces_from(self, rank: int) -> Iterator[Piece]:
        if rank not in self.src.mesh:
            return
        at = self.src.mesh.coord(rank)
        box = self.src._box_at(at)
        if volume(box) == 0:
            return
        lane, copies = self._lane(), self._copies()
        term = 0
        for a in self.folded:
            term = term * self.src.mesh.shape[a] + at[a]
        for taker in sorted(self.dst.mesh.ranks):
            coord = self.dst.mesh.coord(taker)
            if any(coord[a] != at[a] for a in lane):
                continue
            common = intersect(box, self.dst._box_at(coord))
            if common is None or self.fill_op(taker) is not None:
                continue
            if self._nearest(taker, list(at), copies) == rank:
                yield Piece(rank, taker, common, term)

    def _lane(self) -> list[int]:
        """Return the axes that are partial before and after: nothing crosses between their coordinates."""
        return [a for a, op in enumerate(self.src.partials) if op is not None and a not in self.folded]

    def _copies(self) -> list[int]:
        """Return the axes along which src is replicated."""
        sharding_axes = {a for dim in self.src.sharding_axes for a in dim}
        return [a for a, op in enumerate(self.src.partials) if op is None and a not in sharding_axes]

    def _nearest(self, rank: int, at: list[int], copies: list[int]) -> int:
        """Return which of the replicas of a source cell serves `rank`."""
        mesh = self.src.mesh
        if not copies:
            return mesh.rank(at)
        held = mesh.coord(rank) if rank in mesh else None
        if held is not None and all(held[a] == at[a] for a in range(mesh.ndim) if a not in copies):
            return rank
        holders = []
        for chosen in product(*(range(mesh.shape[a]) for a in copies)):
            for a, c in zip(copies, chosen, strict=True):
                at[a] = c
            holders.append(mesh.rank(at))
        if self.node_size:
            near = [h for h in holders if h // self.node_size == rank // self.node_size]
            if near and len(near) < len(holders):
                return near[rank % len(near)]
        if held is not None:
            for a in copies:
                at[a] = held[a]
            return mesh.rank(at)
        return holders[self.dst.mesh.ranks.index(rank) % len(holders)]

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads back."""
        return {
            "src": self.src.to_json(),
            "dst": self.dst.to_json(),
            "folded": list(self.folded),
            "fresh": list(self.fresh),
            "node_size": self.node_size,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Exchange:
        """Return the exchange that `to_json` wrote, checked; what is wrong raises PlanError with its place."""
        return _read(data)


@reader("exchange", PlanError)
def _read(
    src: Layout, dst: Layout, folded: tuple[int, ...], fresh: tuple[int, ...], node_size: int | None
) -> Exchange:
    if (src.shape, src.dtype) != (dst.shape, dst.dtype):
        raise PlanError(f"an exchange moves one array, got {src} and {dst}")
    if node_size is not None and node_size < 1:
        raise PlanError(f"node_size is a number of ranks >= 1, got {node_size}")
    if on_one_grid(src, dst):
        folds, makes = folded_axes(state_of(src), state_of(dst)), fresh_axes(state_of(src), state_of(dst))
    else:
        folds, makes = partial_axes(src), partial_axes(dst)
    if (folded, fresh) != (folds, makes):
        raise PlanError(
            f"from {src} to {dst} folds axes {folds} and makes {makes} partial, got {folded}, {fresh}"
        )
    return Exchange(src, dst, folded, fresh, node_size)


def on_one_grid(src: Layout, dst: Layout) -> bool:
    """Return True when both meshes are the same grid of the same ranks, whatever their axes are called."""
    return (src.mesh.shape, src.mesh.ranks) == (dst.mesh.shape, dst.mesh.ranks)


def partial_axes(layout: Layout) -> tuple[int, ...]:
    """Return the positions of the mesh axes that are partial."""
    return tuple(a for a, op in enumerate(layout.partials) if op is not None)


def _overlaps(layout: Layout, dim: int, wanted: Interval) -> Iterator[tuple[tuple[int, ...], Interval]]:
    """Yield the coordinates of the axes that cut a dim, and what they hold of the wanted interval."""
    mesh, axes = layout.mesh, layout.sharding_axes[dim]

    def descend(
        level: int, interval: Interval, where: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], Interval]]:
        start, stop = max(interval[0], wanted[0]), min(interval[1], wanted[1])
        if start >= stop:
            return
        if level == len(axes):
            yield where, (start, stop)
            return
        axis = axes[level]
        for part in range(mesh.shape[axis]):
            inner = split_interval(interval, mesh.shape[axis], part, layout.splits[axis])
            yield from descend(level + 1, inner, (*where, part))

    return descend(0, full_box(layout.shape)[dim], ())
