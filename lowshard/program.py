"""One rank's side of an exchange, worked out once: what to pack, where it lands, what stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from lowshard.box import Box, relative_slices, shape_of, single_run
from lowshard.exchange import Exchange, Piece
from lowshard.placement import ReduceOp
from lowshard.redistribute import RedistributePlan

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One box of the wire: where it lies in a packed buffer and in the local array."""

    start: int
    """First element in the packed buffer."""
    shape: tuple[int, ...]
    index: Index
    """Slices that take the box out of the local array (of its term)."""
    term: int

    @property
    def stop(self) -> int:
        """One past the last element in the packed buffer."""
        return self.start + prod(self.shape)


@dataclass(frozen=True, slots=True)
class Side:
    """All that one rank sends, or all that it receives, ordered by peer."""

    parts: tuple[Part, ...]
    counts: list[int]
    """Elements by peer."""
    packed_displs: list[int]
    """Where each peer's elements begin in a packed buffer."""
    direct_displs: list[int] | None
    """Where they begin in the flat local array itself, if every peer's are one run of it: then nothing is packed."""

    @property
    def packed_elems(self) -> int:
        """Elements of the packed buffer."""
        return self.parts[-1].stop if self.parts else 0


@dataclass(frozen=True, slots=True)
class Kept:
    """One box that stays on its rank."""

    src_index: Index
    dst_index: Index
    term: int


@dataclass(frozen=True, slots=True)
class Program:
    """One rank's side of one exchange."""

    shape: tuple[int, ...] | None
    """Local shape of the result; None outside the destination mesh."""
    dtype: np.dtype[Any]
    terms: int
    op: ReduceOp | None
    divisor: int
    fill_op: ReduceOp | None
    moves: bool
    """Whether any rank moves a byte; if not, nobody enters the collective."""
    gives: Side
    takes: Side
    """Directly received elements land in an array [terms, *shape]."""
    keeps: tuple[Kept, ...]

    @property
    def is_a_view(self) -> bool:
        """True when the result is one box of what this rank already holds, and nobody moves a byte."""
        return not self.moves and self.op is None and self.fill_op is None and len(self.keeps) == 1


_PROGRAMS: dict[tuple[str, int, int], tuple[Program, ...]] = {}
_PROGRAMS_KEPT = 16384


def programs(plan: RedistributePlan, rank: int, size: int) -> tuple[Program, ...]:
    """Return a rank's programs for the steps of a plan, in a communicator of `size` ranks; they are kept."""
    key = (plan.digest(), rank, size)
    found = _PROGRAMS.get(key)
    if found is None:
        found = tuple(_program(part, rank, size) for step in plan.steps for part in step.exchanges)
        if len(_PROGRAMS) >= _PROGRAMS_KEPT:
            _PROGRAMS.clear()
        _PROGRAMS[key] = found
    return found


def _program(step: Exchange, rank: int, size: int) -> Program:
    src_box = step.src.box(rank) if rank in step.src.mesh else None
    dst_box = step.dst.box(rank) if rank in step.dst.mesh else None
    outgoing, incoming = step.outgoing(rank), step.incoming(rank)
    keeps = []
    if src_box is not None and dst_box is not None:
        keeps = [
            Kept(relative_slices(p.box, src_box), relative_slices(p.box, dst_box), p.term)
            for p in incoming
            if p.src_rank == rank
        ]
    gives = [p for p in outgoing if p.dst_rank != rank]
    # Packed parts arrive by source rank.
    takes = sorted((p for p in incoming if p.src_rank != rank), key=lambda p: p.src_rank)
    return Program(
        shape=None if dst_box is None else shape_of(dst_box),
        dtype=step.dst.numpy_dtype,
        terms=step.terms,
        op=step.op,
        divisor=step.divisor,
        fill_op=None if dst_box is None else step.fill_op(rank),
        moves=step.moves_bytes(),
        gives=_side([(p.dst_rank, p, 0) for p in gives], src_box, size),
        takes=_side([(p.src_rank, p, p.term) for p in takes], dst_box, size),
        keeps=tuple(keeps),
    )


def _side(pieces: Sequence[tuple[int, Piece, int]], local_box: Box | None, size: int) -> Side:
    """Lay out the pieces for a side: at most one a peer, since every rank holds one box."""
    counts, packed, direct = [0] * size, [0] * size, [0] * size
    if local_box is None:
        return Side((), counts, packed, direct)
    local_shape = shape_of(local_box)
    parts: list[Part] = []
    is_direct = True
    at = 0
    for peer, piece, term in pieces:
        index = relative_slices(piece.box, local_box)
        run = single_run(tuple((s.start, s.stop) for s in index), local_shape)
        is_direct = is_direct and run is not None
        counts[peer], packed[peer], direct[peer] = piece.elems, at, term * prod(local_shape) + (run or 0)
        parts.append(Part(at, shape_of(piece.box), index, term))
        at += piece.elems
    return Side(tuple(parts), counts, packed, direct if is_direct else None)
