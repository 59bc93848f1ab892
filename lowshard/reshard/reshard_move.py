"""The records a reshard plan is made of: tensors, boxes that go from rank to rank, and one rank's share of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from lowshard.box import Box, volume
from lowshard.errors import PlanError
from lowshard.reshard.tensor_layout import TensorLayout


class Move(NamedTuple):
    """One box that one rank gives another, or itself."""

    id: int
    """The same on both sides. It tells destination rank, tensor and tile, and nothing else: it stays when ranks
    or tensors are added at the end."""
    entry: int
    """Which tensor of the plan."""
    src_rank: int
    dst_rank: int
    src_box: Box
    """In the source rank's local array."""
    dst_box: Box
    """In the destination rank's local array."""

    @property
    def elems(self) -> int:
        """Elements of the box."""
        return volume(self.src_box)


@dataclass(frozen=True)
class Entry:
    """One tensor of a plan: where it comes from and where it goes to."""

    name: str
    """Its name over all ranks, on the destination side."""
    src_name: str
    """Its name over all ranks, on the source side (another one for tied weights)."""
    src: TensorLayout
    dst: TensorLayout
    src_names: Mapping[int, str] = field(default_factory=dict)
    """What source ranks call it, where that is not `src_name`."""
    dst_names: Mapping[int, str] = field(default_factory=dict)
    """What destination ranks call it, where that is not `name`."""

    def __post_init__(self) -> None:
        if self.src.shape != self.dst.shape:
            raise PlanError(
                f"{self.name}: source and destination are one tensor, but the source has shape {list(self.src.shape)} "
                f"and the destination {list(self.dst.shape)} over all ranks (local shapes times the ranks they are "
                "dealt to); a tensor that is marked as cut but held whole, or the other way round, looks like this"
            )
        if self.src.dtype != self.dst.dtype:
            raise PlanError(
                f"{self.name}: the source has dtype {self.src.dtype}, the destination {self.dst.dtype}; declare one "
                "dtype on both sides and convert before or after, or let a transform convert"
            )

    def src_local_name(self, rank: int) -> str:
        """Return what a source rank calls it."""
        return self.src_names.get(rank, self.src_name)

    def dst_local_name(self, rank: int) -> str:
        """Return what a destination rank calls it."""
        return self.dst_names.get(rank, self.name)


@dataclass(frozen=True)
class RankPlan:
    """What one rank does: what it sends and receives, by peer in the order of the wire, and what it copies."""

    rank: int
    sends: Mapping[int, tuple[Move, ...]]
    receives: Mapping[int, tuple[Move, ...]]
    copies: tuple[Move, ...]

    @property
    def incoming(self) -> tuple[Move, ...]:
        """Everything that is written on this rank, by tensor and place."""
        return tuple(sorted(chain(self.copies, *self.receives.values()), key=lambda m: (m.entry, m.dst_box)))
