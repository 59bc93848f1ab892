"""The rules behind the strategies: pure slice arithmetic on shapes, one class a rule.

Those that know of attention heads are in `lowshard.weights.head`. Source: `max/graph/weight.py` of modular/modular.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

from lowshard.argument import as_shape, brief, whole
from lowshard.box import Box, Interval, full_box, slices_of, split_interval
from lowshard.errors import MarkerError, ShardIndexError, ShardingError
from lowshard.foreign_array import like, view_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """Base of the rules: a function of (weight, index, num_devices) that also says which boxes it takes."""

    name: ClassVar[str] = "rule"
    sharded_axis: ClassVar[int | None] = None
    """Of a rule for one axis; a rule for any axis has a field `at`."""
    other_axis: ClassVar[str] = "use replicate for it"
    """What to write where a weight lacks the axis."""

    unit: int = field(default=1, kw_only=True)
    """Elements (of a rule for heads: see there) that stay together: those of a block that shares a scale."""

    def __post_init__(self) -> None:
        for one in fields(self):
            if one.type == "int":
                least = None if one.name == "at" else 0  # an axis may count from the end
                name = "axis" if one.name == "at" else one.name  # as callers know it
                rule = f"{type(self).__name__}: {name} is an integer{'' if least is None else ' from 0'}"
                object.__setattr__(self, one.name, whole(getattr(self, one.name), rule, ShardingError, least))

    @property
    def axis(self) -> int | None:
        """The axis that is sharded, None where there is none."""
        return getattr(self, "at", self.sharded_axis)

    def pieces(self, shape: Shape, index: int, num_devices: int) -> list[Box]:
        """Return the boxes of device `index`, in the order in which they are joined: one for each of its intervals."""
        axis = self.axis
        assert axis is not None, "a rule that cuts no axis has pieces of its own"
        if not -len(shape) <= axis < len(shape):
            raise ShardIndexError(
                f"{self} cuts axis {axis}, a weight of shape {shape} has {len(shape)}: {self.other_axis}"
            )
        axis %= len(shape)
        whole = full_box(shape)
        return [
            (*whole[:axis], part, *whole[axis + 1 :])
            for part in self.intervals(shape[axis], index, num_devices)
        ]

    def intervals(self, extent: int, index: int, num_devices: int) -> list[Interval]:
        """Return what device `index` takes of the cut axis."""
        found, at, parts = [], 0, self.parts(extent)
        each = extent // max(sum(parts), 1)
        for part in parts:
            start, stop = split_units(part, num_devices, index, self.unit)
            found.append(((at + start) * each, (at + stop) * each))
            at += part
        return found

    def parts(self, extent: int) -> tuple[int, ...]:
        """Return the extents of the cut axis that are each cut on their own; where they are pairs, their number."""
        return (extent,)

    def __call__(self, weight: Any, index: int, num_devices: int) -> Any:
        """Return the device's part of a weight: a view where it is one box, else the boxes joined."""
        if not (hasattr(weight, "shape") and hasattr(weight, "__getitem__")):
            raise ShardingError(f"a strategy cuts an array or a Weight, got {brief(weight)}")
        count = whole(num_devices, f"{self}: num_devices is 1 or more", ShardingError, 1)
        index = whole(index, f"{self}: index is 0 to {count - 1}", ShardIndexError, 0, count - 1)
        shape = as_shape(weight.shape, "the shape of a weight is a sequence of extents >= 0", ShardingError)
        boxes = self.pieces(shape, index, count)
        return join(weight, boxes, self.axis or 0)

    def __str__(self) -> str:
        return self.name


def split_units(extent: int, num_devices: int, index: int, unit: int) -> Interval:
    """Return the device's part of an axis that is cut between units; the last unit may be smaller."""
    start, stop = split_interval((0, -(-extent // unit)), num_devices, index)
    return min(start * unit, extent), min(stop * unit, extent)


def merged(boxes: Sequence[Box], axis: int) -> list[Box]:
    """Return a device's boxes with those as one that follow each other along the axis that is cut."""
    found: list[Box] = []
    for box in boxes:
        at = axis % max(len(box), 1)
        if box and found and found[-1] == (*box[:at], (found[-1][at][0], box[at][0]), *box[at + 1 :]):
            box = (*box[:at], (found.pop()[at][0], box[at][1]), *box[at + 1 :])
        found.append(box)
    return found


def join(array: Any, boxes: Sequence[Box], axis: int) -> Any:
    """Return boxes of an array of any library, joined along an axis; a view where there is one box."""
    seen = view_of(array, "a weight")
    parts = [seen[slices_of(box)] for box in boxes]
    if len(parts) == 1:
        return like(parts[0], array)
    if isinstance(seen, np.ndarray):
        return like(np.concatenate(parts, axis=axis), array)
    import cupy  # a weight on a GPU

    return like(cupy.concatenate(parts, axis=axis), array)


@dataclass(frozen=True)
class Rowwise(Rule):
    """Axis 0, sharded evenly."""

    name = "rowwise"

    sharded_axis = 0


@dataclass(frozen=True)
class Columnwise(Rule):
    """Axis 1, sharded evenly."""

    name = "columnwise"

    sharded_axis = 1


@dataclass(frozen=True)
class Axiswise(Rule):
    """Any axis, sharded evenly."""

    at: int

    def __str__(self) -> str:
        return f"axiswise({self.at})"


@dataclass(frozen=True)
class GateUp(Rule):
    """Each half of an axis, sharded evenly; or pairs of it, where gate and up alternate."""

    at: int
    interleaved: bool = False

    other_axis = "name the axis that holds both: {gate_up: {axis: 0}}, in a program gate_up(n, axis=0)"

    def parts(self, extent: int) -> tuple[int, ...]:
        """Return the halves, or the number of pairs."""
        if extent % 2:
            raise ShardingError(
                f"{self}: the axis stacks a gate and an up projection, so its extent is even, got {extent}"
            )
        return (extent // 2,) if self.interleaved else (extent // 2,) * 2

    def __str__(self) -> str:
        return f"gate_up(axis={self.at}{', interleaved' if self.interleaved else ''})"


@dataclass(frozen=True)
class Replicate(Rule):
    """The whole weight, everywhere."""

    name = "replicate"

    def pieces(self, shape: Shape, index: int, num_devices: int) -> list[Box]:
        """Return the box of everything."""
        return [full_box(shape)]


@dataclass(frozen=True)
class Owned(Rule):
    """The whole weight on one device and nothing on the others: an expert, or a bias that is added once."""

    owner: int

    def pieces(self, shape: Shape, index: int, num_devices: int) -> list[Box]:
        """Return the box of everything on the owner, an empty one elsewhere."""
        if not shape:
            raise ShardIndexError(f"{self}: a 0-d array has no empty part: use replicate for it")
        return [full_box(shape) if index == self.owner else ((0, 0), *full_box(shape[1:]))]

    def __str__(self) -> str:
        return f"owned by device {self.owner}"


@dataclass(frozen=True)
class ExpertRange(Rule):
    """Whole experts, stacked along axis 0: expert e of E goes to device e * num_devices // E."""

    sharded_axis = 0

    def intervals(self, extent: int, index: int, num_devices: int) -> list[Interval]:
        """Return the device's experts."""
        return [(-(-index * extent // num_devices), -(-(index + 1) * extent // num_devices))]

    def __str__(self) -> str:
        return "experts"


def _mark(rule: Rule, shape: Shape, index: int, num_devices: int) -> list[Box]:
    """Raise MarkerError."""
    raise MarkerError(
        f"{rule.name} marks a module, it cuts no single weight: call shard_module(weights, {{'MODULE': "
        f"ShardingStrategy.{rule.name}(n)}}), or give this weight a strategy such as rowwise"
    )


@dataclass(frozen=True)
class TensorParallel(Rule):
    """Marks a module each of whose weights is sharded as its name says."""

    name = "tensor_parallel"
    pieces = _mark


@dataclass(frozen=True)
class ExpertParallel(Rule):
    """Marks a module whose experts are distributed whole."""

    name = "expert_parallel"
    pieces = _mark
