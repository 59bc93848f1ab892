"""Plans that take one layout of an array to another: frozen data, no arrays, no communicator.

A plan is a chain of exact box exchanges. In an exchange every rank receives just the elements of its
destination box that it does not hold, each from one rank; partial terms come along and are folded in
a fixed order where they arrive. A reduction to a replicated result takes two exchanges: each replica
folds its share, then the shares are gathered.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from lowshard.box import Box, Interval, full_box, shape_of, split_interval, volume
from lowshard.errors import LowshardError, PlanError
from lowshard.layout import Layout
from lowshard.placement import ReduceOp


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


@dataclass(frozen=True)
class Exchange:
    """One step: every rank of `dst` gets the elements of its box, each from one rank of `src`."""

    src: Layout
    dst: Layout
    folded: tuple[int, ...] = ()
    """Positions of src's mesh axes whose partial terms are folded on arrival."""
    fresh: tuple[int, ...] = ()
    """Positions of dst's mesh axes that become partial: coordinate 0 keeps the value, the others hold
    the identity of the op (avg: all keep the value)."""
    node_size: int | None = None
    _pieces: dict[int, tuple[Piece, ...]] = field(default_factory=dict, repr=False, compare=False, hash=False)

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
        found = self._pieces.get(rank)
        if found is None:
            found = self._pieces[rank] = tuple(self._incoming(rank))
        return found

    def outgoing(self, rank: int) -> tuple[Piece, ...]:
        """Return what a rank gives, by destination rank, in the order of the wire."""
        if rank not in self.src.mesh:
            return ()
        return tuple(
            p for dst in sorted(self.dst.mesh.ranks) for p in self.incoming(dst) if p.src_rank == rank
        )

    def sent_bytes(self, rank: int) -> int:
        """Return the bytes a rank sends to others."""
        return sum(p.elems for p in self.outgoing(rank) if p.dst_rank != rank) * self.src.itemsize_bytes

    def received_bytes(self, rank: int) -> int:
        """Return the bytes a rank receives from others."""
        return sum(p.elems for p in self.incoming(rank) if p.src_rank != rank) * self.src.itemsize_bytes

    def moves_bytes(self) -> bool:
        """Return True when any rank receives anything from another."""
        return any(p.src_rank != rank for rank in self.dst.mesh.ranks for p in self.incoming(rank))

    def _incoming(self, rank: int) -> Iterator[Piece]:
        if rank not in self.dst.mesh or self.fill_op(rank) is not None:
            return
        coord = self.dst.mesh.coord(rank)
        box = self.dst.box_at(coord)
        if volume(box) == 0:
            return
        mesh = self.src.mesh
        # Positions along src's axes: what is fixed by the lane (partial axes that stay partial), by
        # the term, and by the cell of the grid; the rest are replicas to choose from.
        lane = [a for a, op in enumerate(self.src.partials) if op is not None and a not in self.folded]
        cutters = [a for dim in self.src.cutters for a in dim]
        copies = [a for a in range(mesh.ndim) if a not in lane and a not in cutters and a not in self.folded]
        spans = [list(_overlaps(self.src, dim, interval)) for dim, interval in enumerate(box)]
        at = [0] * mesh.ndim
        for a in lane:
            at[a] = coord[a]
        for term, folded in enumerate(product(*(range(mesh.shape[a]) for a in self.folded))):
            for a, c in zip(self.folded, folded, strict=True):
                at[a] = c
            for cell in product(*spans):
                for dim, (where, _) in enumerate(cell):
                    for a, c in zip(self.src.cutters[dim], where, strict=True):
                        at[a] = c
                source = self._nearest(rank, at, copies)
                yield Piece(source, rank, tuple(interval for _, interval in cell), term)

    def _nearest(self, rank: int, at: list[int], copies: list[int]) -> int:
        """Return which of the replicas of a source cell serves `rank`.

        Itself if it is one; else one of its node; else the one at its own place along the replicated
        axes, or by its place in the destination mesh when the meshes differ: readers spread evenly.
        """
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
            "kind": "exchange",
            "src": self.src.to_json(),
            "dst": self.dst.to_json(),
            "folded": list(self.folded),
            "fresh": list(self.fresh),
            "node_size": self.node_size,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Exchange:
        """Return the step that `to_json` wrote."""
        return cls(
            Layout.from_json(data["src"]),
            Layout.from_json(data["dst"]),
            tuple(data["folded"]),
            tuple(data["fresh"]),
            data["node_size"],
        )

    def __str__(self) -> str:
        fold = f", {self.op} of {self.terms} terms in tree order" if self.folded else ""
        return f"exchange {self.src} -> {self.dst}{fold}"


@dataclass(frozen=True)
class RedistributePlan:
    """The steps from `src` to `dst`; equal on every rank. `lowshard.execute` runs it."""

    src: Layout
    dst: Layout
    steps: tuple[Exchange, ...]
    _digest: str = field(default="", repr=False, compare=False)

    @property
    def world_size(self) -> int:
        """The smallest communicator that holds every rank of both meshes."""
        return max(max(self.src.mesh.ranks), max(self.dst.mesh.ranks)) + 1

    def sent_bytes(self, rank: int) -> int:
        """Return the bytes a rank sends to others over all steps."""
        return sum(step.sent_bytes(rank) for step in self.steps)

    def received_bytes(self, rank: int) -> int:
        """Return the bytes a rank receives from others over all steps."""
        return sum(step.received_bytes(rank) for step in self.steps)

    def explain(self) -> str:
        """Return the plan as text: the layouts, each step, and the bytes of each rank."""
        lines = [f"from  {self.src}", f"to    {self.dst}"]
        if not self.steps:
            lines.append("      nothing to do: every rank already holds its result")
        for number, step in enumerate(self.steps, 1):
            lines.append(f"step {number}: {step}")
        ranks = range(self.world_size)
        sent, received = [self.sent_bytes(r) for r in ranks], [self.received_bytes(r) for r in ranks]
        lines.append(f"moves {sum(sent):,} bytes in all")
        shown = list(ranks)[:16]
        lines.extend(f"  rank {r}: sends {sent[r]:,}, receives {received[r]:,}" for r in shown)
        if len(shown) < self.world_size:
            lines.append(
                f"  ... {self.world_size - len(shown)} more ranks, at most {max(received):,} received"
            )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads back."""
        return {
            "src": self.src.to_json(),
            "dst": self.dst.to_json(),
            "steps": [step.to_json() for step in self.steps],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RedistributePlan:
        """Return the plan that `to_json` wrote.

        Raises:
            PlanError: a field is missing or does not fit.
        """
        try:
            steps = tuple(Exchange.from_json(step) for step in data["steps"])
            return cls(Layout.from_json(data["src"]), Layout.from_json(data["dst"]), steps)
        except (KeyError, TypeError) as error:
            if isinstance(error, LowshardError):
                raise
            raise PlanError(
                f"this JSON is no redistribution plan ({type(error).__name__}: {error})"
            ) from error

    def digest(self) -> str:
        """Return 32 hex digits that two plans share exactly when they are equal."""
        if not self._digest:
            text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
            object.__setattr__(self, "_digest", hashlib.blake2b(text.encode(), digest_size=16).hexdigest())
        return self._digest

    def __str__(self) -> str:
        return self.explain()


_PLANS: dict[tuple[str, str, int | None], RedistributePlan] = {}
_PLANS_KEPT = 4096


def plan_redistribute(
    src: Layout, dst: Layout, cost: object = None, node_size: int | None = None
) -> RedistributePlan:
    """Return the plan that moves an array from layout `src` to layout `dst`.

    Pure: every process gets the same plan from the same layouts. Plans are kept and given again.

    Args:
        src: what the ranks hold; any placements, any mesh.
        dst: what they shall hold; the same global shape and dtype, on any mesh.
        cost: a cluster's cost profile. There is one kind of step so far, so nothing is chosen by it.
        node_size: ranks a node (rank r is on node r // node_size): copies on the own node are
            preferred as sources.

    Raises:
        PlanError: global shapes or dtypes differ, or node_size is below 1.
    """
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise PlanError(
            f"source and destination are layouts of one array: {src.dtype}{list(src.shape)} is not "
            f"{dst.dtype}{list(dst.shape)}; reshape or cast is a separate step"
        )
    if node_size is not None and node_size < 1:
        raise PlanError(f"node_size is a number of ranks >= 1, got {node_size}")
    key = (src.digest(), dst.digest(), node_size)
    plan = _PLANS.get(key)
    if plan is None:
        plan = RedistributePlan(src, dst, _steps(src, dst, node_size))
        if len(_PLANS) >= _PLANS_KEPT:
            _PLANS.clear()
        _PLANS[key] = plan
    return plan


def _steps(src: Layout, dst: Layout, node_size: int | None) -> tuple[Exchange, ...]:
    one_grid = (src.mesh.shape, tuple(src.mesh.ranks)) == (dst.mesh.shape, tuple(dst.mesh.ranks))
    if one_grid and (src.cutters, src.splits, src.partials) == (dst.cutters, dst.splits, dst.partials):
        return ()
    kept = [a for a, op in enumerate(src.partials) if one_grid and op is not None and op == dst.partials[a]]
    folded = tuple(a for a, op in enumerate(src.partials) if op is not None and a not in kept)
    fresh = tuple(a for a, op in enumerate(dst.partials) if op is not None and a not in kept)
    if folded:
        share = _share_of_replicas(dst)
        if share is not None:
            return (
                Exchange(src, share, folded, fresh, node_size),
                Exchange(share, dst, (), fresh, node_size),
            )
    return (Exchange(src, dst, folded, fresh, node_size),)


def _share_of_replicas(dst: Layout) -> Layout | None:
    """Return dst with its replicas each holding a share of the box, or None if it cannot be shared."""
    copies = [
        name
        for a, name in enumerate(dst.mesh.axis_names)
        if dst.partials[a] is None and dst.mesh.shape[a] > 1 and not any(a in dim for dim in dst.cutters)
    ]
    extents = shape_of(dst.box_at([0] * dst.mesh.ndim))  # the first shard is the largest
    if not copies or max(extents, default=0) <= 1:
        return None
    widest = extents.index(max(extents))
    names = [[dst.mesh.axis_names[a] for a in dim] for dim in dst.cutters]
    names[widest] += copies
    return Layout._make(dst.mesh, dst.shape, dst.dtype, names, dst.splits, dst.partials)


def _overlaps(layout: Layout, dim: int, wanted: Interval) -> Iterator[tuple[tuple[int, ...], Interval]]:
    """Yield the coordinates of the axes that cut a dim, and what they hold of the wanted interval."""
    mesh, axes = layout.mesh, layout.cutters[dim]

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
