"""`digest`: a hash of a tensor's content that does not depend on its layout; replicas are compared on the way.

Each rank sums the bits of its elements, weighted by their positions in the whole array (`kernels.unit_weights`). Sums
of disjoint parts add up, so one small all-reduce gives those of the whole; their hash, with shape and dtype, is the
digest. To compare replicas, each rank multiplies its sums by a factor of its own, and one holder of each part
multiplies by the sum of its holders' factors: the totals are equal if all replicas are. Ranks that differ are looked
for only if they are not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from lowshard.argument import brief, in_words, instance, mapping
from lowshard.bounded import bounded_cache
from lowshard.box import Box, box_text, intersect, moved, slices_of, subtract, volume
from lowshard.comm import Communicator, collective_step
from lowshard.comm.agreement import control_of, share_text
from lowshard.content_hash import tensor_digest, text_digest
from lowshard.errors import BufferMismatchError, LayoutError, MeshError, VerificationError
from lowshard.kernels.bit_sums import content_sum
from lowshard.kernels.unit_weights import SUMS, factors
from lowshard.layout import Layout
from lowshard.reshard.partition import GridPartition, Partition
from lowshard.reshard.published_tensors import array_of
from lowshard.reshard.tensor_layout import TensorLayout, as_tensor_layout
from lowshard.tiling import Tiling

Array = Any
Given = Layout | Tiling | TensorLayout
_MOST_NAMED = 4


def digest(
    tensors: Mapping[str, tuple[Given, Array | None]], comm: Communicator | None = None
) -> dict[str, str]:
    """Return one value for what each tensor holds: the same for every layout of the same bits, shape and dtype.

    Collective: all ranks of the communicator call this, with the same names and layouts. Each rank reads its arrays
    once; some 24 bytes a tensor travel. Two jobs compare a model by comparing what they get. It finds
    accidents, not forgeries: at most about one wrong content in 2^32 has the digest of the right one. One with a single
    changed element of up to 4 bytes never has, nor one with two elements of up to 2 bytes that changed places within a
    block of 2,048. For larger elements such pairs can be made: the 8-byte integers 0 and 365950007978753648.

    Args:
        tensors: by name, the layout (a Layout, a Tiling or a TensorLayout) and this rank's local array; None on a rank
            that holds no part.
        comm: the communicator; None for one rank.

    Returns:
        By name, 32 hexadecimal digits.

    Every rank raises the same error.

    Raises:
        VerificationError: replicas differ; it names the tensor, the part and the ranks.
        LayoutError: a partial layout, or elements that no rank holds.
        BufferMismatchError: a local array is not the one its layout says.
        MeshError: a layout names ranks that the communicator does not have.
        MismatchError: ranks ask for different tensors.
        CommError: comm is not a communicator.
    """
    control = None if comm is None else control_of(comm)
    rank, size = (0, 1) if control is None else (control.rank, control.size)
    known: dict[Given, _Plan] = {}
    with collective_step(comm, "digest") as step:
        held = {
            name: _checked(name, given, rank, size, known)
            for name, given in mapping(tensors, _RULE, LayoutError).items()
        }
        asked = [[name, str(one.plan.layout), one.plan.fingerprint] for name, one in held.items()]
        step.digest = text_digest(json.dumps(asked))
        step.said = lambda: in_words({name: one.plan.layout for name, one in held.items()})
    rows = np.zeros((len(held), 3, SUMS), np.uint32)
    own = [one.sums(rank, row) for one, row in zip(held.values(), rows, strict=True)]
    totals = rows
    if control is not None and rows.size:
        totals = np.zeros_like(rows)
        control.all_reduce(rows.reshape(-1), totals.reshape(-1))
    apart = np.flatnonzero((totals[:, 1] != totals[:, 2]).any(axis=1))
    if len(apart):
        names = list(held)
        first = {names[i]: (held[names[i]], own[i]) for i in apart[:_MOST_NAMED]}
        _name_ranks(control, first, len(apart))
    return {
        name: tensor_digest(one.plan.layout.dtype, one.plan.layout.shape, total)
        for (name, one), total in zip(held.items(), totals[:, 0], strict=True)
    }


_RULE = "digest takes a mapping of names to (layout, local array)"


_Key = tuple[int, int]
"""A piece: its cell and tile number; where cells overlap, -1 and its number among all pieces."""


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor that the same ranks hold: its box in the whole array and in each of their cells."""

    box: Box
    places: tuple[tuple[int, Box], ...]


@dataclass(frozen=True)
class _Plan:
    """A layout, and the pieces that one rank holds of each tensor with this layout."""

    layout: TensorLayout
    shape: tuple[int, ...] | None
    cell: int
    pieces: Mapping[_Key, _Piece]

    @classmethod
    def of(cls, layout: TensorLayout, rank: int) -> _Plan:
        position = layout.rank_map.position(rank)
        if position is None:
            return cls(layout, None, -1, {})
        return cls(layout, layout.local_shape(rank), position[0], _pieces_of(layout.partition, position[0]))

    @cached_property
    def fingerprint(self) -> str:
        """A short text of the whole layout."""
        text = json.dumps(self.layout.to_json(), default=list)
        return text_digest(text).hex()

    def holders(self, piece: _Piece) -> tuple[int, ...]:
        """Return the ranks that hold a piece."""
        found = [self.layout.rank_map.rank_array(cell) for cell, _ in piece.places]
        return tuple(np.concatenate(found).tolist())


@dataclass(frozen=True)
class _Held:
    """A tensor: its plan and this rank's array."""

    plan: _Plan
    array: Array | None

    def sums(self, rank: int, row: npt.NDArray[np.uint32]) -> dict[_Key, list[int]]:
        """Add this rank's sums to a row: of pieces it represents, of all it holds, of all holders together."""
        own = {}
        for key, piece in self.plan.pieces.items():
            local = dict(piece.places)[self.plan.cell]
            part = self.array[(*slices_of(local), ...)]  # type: ignore[index]  # checked
            found = content_sum(part, piece.box, self.plan.layout.shape)
            own[key] = found.tolist()
            row[1] += found * _factors((rank,))
            holders = self.plan.holders(piece)
            if rank == min(holders):
                row[0] += found
                row[2] += found * _factors(holders)
        return own


@bounded_cache(1 << 20)
def _factors(ranks: tuple[int, ...]) -> npt.NDArray[np.uint32]:
    """Return the sum of the ranks' factors."""
    numbers = factors(np.array(ranks) + (1 << 40))  # none of a block
    total: npt.NDArray[np.uint32] = numbers.sum(axis=0, dtype=np.uint32)
    return total


def _pieces_of(partition: Partition, cell: int) -> dict[_Key, _Piece]:
    """Return the pieces that a cell holds."""
    if isinstance(partition, GridPartition):  # cells have nothing in common, and cover all
        return {
            (cell, number): _Piece(tile.box, ((cell, tile.local),))
            for number, tile in enumerate(partition.tiles(cell))
        }
    return {
        (-1, number): piece
        for number, piece in enumerate(_disjoint(partition))
        if any(holder == cell for holder, _ in piece.places)
    }


def _disjoint(partition: Partition) -> list[_Piece]:
    """Return the boxes of a partition, split so that no two overlap."""
    pieces: list[_Piece] = []
    for cell in range(partition.cells):
        for tile in partition.tiles(cell):
            left, split = [tile.box], []
            for piece in pieces:
                both = intersect(piece.box, tile.box)
                if both is None:
                    split.append(piece)
                    continue
                split.extend(
                    _Piece(box, _within(piece.places, piece.box, box)) for box in subtract(piece.box, both)
                )
                here = (cell, moved(both, tile.box, tile.local))
                split.append(_Piece(both, (*_within(piece.places, piece.box, both), here)))
                left = [part for box in left for part in subtract(box, both)]
            split.extend(_Piece(box, ((cell, moved(box, tile.box, tile.local)),)) for box in left)
            pieces = split
    if sum(volume(piece.box) for piece in pieces) != prod(partition.shape):
        raise LayoutError("a digest is of a whole tensor: here some elements are on no rank")
    return pieces


def _within(places: Sequence[tuple[int, Box]], outer: Box, inner: Box) -> tuple[tuple[int, Box], ...]:
    return tuple((cell, moved(inner, outer, local)) for cell, local in places)


def _checked(name: object, given: object, rank: int, size: int, known: dict[Given, _Plan]) -> _Held:
    """Return a tensor whose layout and local array are valid; `known` caches plans by layout."""
    name = instance(name, str, "a tensor's name is text", LayoutError)
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise LayoutError(f"{_RULE}; {name} has {brief(given)}")
    asked, array = given
    plan = known.get(asked) if isinstance(asked, Given) else None
    if plan is None:
        layout = as_tensor_layout(asked)
        if layout.rank_map.span[1] > size:
            raise MeshError(
                f"{name}: {layout} names rank {layout.rank_map.span[1] - 1}, the communicator has {size} ranks"
            )
        plan = known[asked] = _Plan.of(layout, rank)
    layout = plan.layout
    if plan.shape is None:
        if array is not None:
            raise BufferMismatchError(f"{name}: rank {rank} holds no part of {layout}, so it passes None")
        return _Held(plan, None)
    return _Held(plan, array_of(layout, plan.shape, array, rank, name))


def _name_ranks(
    control: Communicator | None, apart: Mapping[str, tuple[_Held, dict[_Key, list[int]]]], count: int
) -> None:
    """Raise VerificationError with the ranks whose replicas differ. Collective."""
    mine = [[[*key, *sums] for key, sums in own.items()] for _, own in apart.values()]
    texts = [json.dumps(mine)] if control is None else share_text(control, json.dumps(mine))
    rows = [json.loads(text) for text in texts]
    lines = []
    for at, (name, (held, _)) in enumerate(apart.items()):
        found: dict[_Key, dict[tuple[int, ...], list[int]]] = {}
        for rank, row in enumerate(rows):
            for cell, number, *sums in row[at]:
                found.setdefault((cell, number), {}).setdefault(tuple(sums), []).append(rank)
        key, groups = next((key, groups) for key, groups in found.items() if len(groups) > 1)
        partition = held.plan.layout.partition
        box = (_pieces_of(partition, key[0])[key] if key[0] >= 0 else _disjoint(partition)[key[1]]).box
        ranks = " than ".join(", ".join(map(str, group)) for group in groups.values())
        lines.append(f"{name}{box_text(box)} differs on ranks {ranks}")
    more = f"; {count} tensors in all" if count > len(lines) else ""
    raise VerificationError(f"replicas of a tensor hold the same bits; {'; '.join(lines)}{more}")
