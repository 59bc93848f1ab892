"""The records of a reshard plan: tensors, moved boxes, and one rank's part of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from lowshard.box import Box, volume
from lowshard.errors import PlanError
from lowshard.reshard.tensor_layout import TensorLayout

_CAST = {"bfloat16", "float16", "float32"}
"""Dtypes that a transform casts to one another."""


class Move(NamedTuple):
    """One box that one rank sends to another, or copies locally."""

    id: int
    """Equal on both ranks; made of destination rank, tensor and tile, so appending ranks or tensors keeps it."""
    entry: int
    """The tensor's number in the plan."""
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
    """One tensor of a plan, with its source and destination layouts."""

    name: str
    """Its name over all ranks, on the destination side."""
    src_name: str
    """Its name over all ranks, on the source side (another one for tied weights)."""
    src: TensorLayout
    dst: TensorLayout
    src_names: Mapping[int, str] = field(default_factory=dict)
    """Its name on source ranks where that is not `src_name`."""
    dst_names: Mapping[int, str] = field(default_factory=dict)
    """Its name on destination ranks where that is not `name`."""

    def __post_init__(self) -> None:
        if self.src.shape != self.dst.shape:
            raise PlanError(
                f"{self.name}: source and destination are one tensor, but the source has shape {list(self.src.shape)} "
                f"and the destination {list(self.dst.shape)} over all ranks (local shapes times the ranks they are "
                "sharded over); a tensor marked as sharded but held whole, or the other way round, looks like this"
            )
        if self.src.dtype != self.dst.dtype and not {self.src.dtype, self.dst.dtype} <= _CAST:
            raise self.dtype_error("declare one dtype on both sides and convert before or after")

    def dtype_error(self, advice: str) -> PlanError:
        """Return the error for sides of two dtypes."""
        return PlanError(
            f"{self.name}: the source has dtype {self.src.dtype}, the destination {self.dst.dtype}; {advice}"
        )

    def src_local_name(self, rank: int) -> str:
        """Return the tensor's name on a source rank."""
        return self.src_names.get(rank, self.src_name)

    def dst_local_name(self, rank: int) -> str:
        """Return the tensor's name on a destination rank."""
        return self.dst_names.get(rank, self.name)


@dataclass(frozen=True)
class RankPlan:
    """One rank's sends and receives, by peer in the order they are sent, and its local copies."""

    rank: int
    sends: Mapping[int, tuple[Move, ...]]
    receives: Mapping[int, tuple[Move, ...]]
    copies: tuple[Move, ...]

    @property
    def incoming(self) -> tuple[Move, ...]:
        """All moves that write on this rank, by tensor and position."""
        return tuple(sorted(chain(self.copies, *self.receives.values()), key=lambda m: (m.entry, m.dst_box)))
