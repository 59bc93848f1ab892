"""The rules behind the strategies: pure slice arithmetic on shapes, one class a rule.

Sources: `max/graph/weight.py` of modular/modular for the ten of MAX; the grouped rule follows from
grouped-query attention (Ainslie et al. 2023): query head h reads key-value head h // (heads / kv_heads).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from lowshard.box import Box, Interval, full_box, split_interval
from lowshard.errors import MarkerError, ShardIndexError, ShardingError

Shape = tuple[int, ...]
FewKV = Literal["replicate", "empty", "refuse"]
Section = Literal["qkv", "q", "kv"]


class Rule:
    """Base of the rules: a function of (weight, index, num_devices) that also says which boxes it takes."""

    name = "rule"

    @property
    def axis(self) -> int | None:
        """The axis that is cut, None where there is none."""
        return None

    def pieces(self, shape: Shape, index: int, num_devices: int) -> list[Box]:
        """Return the boxes of device `index`, in the order in which they are joined."""
        raise NotImplementedError

    def __call__(self, weight: Any, index: int, num_devices: int) -> Any:
        """Return the device's part of a weight: a view where it is one box, else the boxes joined."""
        boxes = self.pieces(tuple(weight.shape), index, num_devices)
        return join(weight, boxes, self.axis or 0)

    def __str__(self) -> str:
        return self.name


def join(array: Any, boxes: Sequence[Box], axis: int) -> Any:
    """Return boxes of a NumPy or CuPy array, joined along an axis; a view where there is one box."""
    parts = [array[tuple(slice(*interval) for interval in box)] for box in boxes]
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts, axis=axis)
    import cupy  # a weight on a GPU

    return cupy.concatenate(parts, axis=axis)


@dataclass(frozen=True)
class _OneAxis(Rule):
    """Rules that take intervals of one axis, and every other axis whole."""

    def pieces(self, shape: Shape, index: int, num_devices: int) -> list[Box]:
        axis = self.axis
        assert axis is not None
        if not -len(shape) <= axis < len(shape):
            raise ShardIndexError(
                f"{self} cuts axis {axis}, a weight of shape {shape} has {len(shape)}: use replicate for it"
            )
        axis %= len(shape)
        whole = full_box(shape)
        return [
            (*whole[:axis], part, *whole[axis + 1 :])
            for part in self.intervals(shape[axis], index, num_devices)
        ]

    def intervals(self, extent: int, index: int, num_devices: int) -> list[Interval]:
        """Return what device `index` takes of the cut axis."""
        return [split_interval((0, extent), num_devices, index)]


@dataclass(frozen=True)
class Rowwise(_OneAxis):
    """Axis 0, cut evenly."""

    name = "rowwise"

    @property
    def axis(self) -> int:
        """Axis 0."""
        return 0


@dataclass(frozen=True)
class Columnwise(_OneAxis):
    """Axis 1, cut evenly."""

    name = "columnwise"

    @property
    def axis(self) -> int:
        """Axis 1."""
        return 1


@dataclass(frozen=True)
class Axiswise(_OneAxis):
    """Any axis, cut evenly."""

    at: int

    @property
    def axis(self) -> int:
        """The given axis."""
        return self.at

    def __str__(self) -> str:
        return f"axiswise({self.at})"


@dataclass(frozen=True)
class GateUp(_OneAxis):
    """Each half of an axis, cut evenly."""

    at: int

    @property
    def axis(self) -> int:
        """The given axis."""
        return self.at

    def intervals(self, extent: int, index: int, num_devices: int) -> list[Interval]:
        """Return a range of each half."""
        if extent % 2:
            raise ShardingError(
                f"{self}: the axis stacks a gate and an up projection, so its extent is even, got {extent}"
            )
        start, stop = split_interval((0, extent // 2), num_devices, index)
        return [(start, stop), (extent // 2 + start, extent // 2 + stop)]

    def __str__(self) -> str:
        return f"gate_up(axis={self.at})"


@dataclass(frozen=True)
class HeadAwareColumnwise(_OneAxis):
    """Axis 1, cut between heads; 4- and 6-bit packed widths are recognised by their extent."""

    num_heads: int
    head_dim: int

    @property
    def axis(self) -> int:
        """Axis 1."""
        return 1

    def intervals(self, extent: int, index: int, num_devices: int) -> list[Interval]:
        """Return the columns of the device's heads."""
        first, last = split_interval((0, self.num_heads), num_devices, index)
        start, stop = first * self.head_dim, last * self.head_dim
        whole = self.num_heads * self.head_dim
        if extent * 2 == whole:
            return [(start // 2, stop // 2)]
        if extent * 4 == whole * 3:
            return [(start * 3 // 4, stop * 3 // 4)]
        return [(start, stop)]

    def __str__(self) -> str:
        return f"head_aware_columnwise(num_heads={self.num_heads}, head_dim={self.head_dim})"


@dataclass(frozen=True)
class StackedQKV(_OneAxis):
    """Three equal sections of axis 0, each cut between the same heads."""

    num_heads: int
    head_dim: int

    @property
    def axis(self) -> int:
        """Axis 0."""
        return 0

    def intervals(self, extent: int, index: int, num_devices: int) -> list[Interval]:
        """Return the device's heads of each section."""
        if extent % 3:
            raise ShardingError(
                f"{self}: axis 0 stacks query, key and value, so its extent divides by 3, got {extent}"
            )
        section = extent // 3
        if section != self.num_heads * self.head_dim:
            raise ShardingError(
                f"{self}: {self.num_heads} heads of {self.head_dim} are {self.num_heads * self.head_dim} rows a "
                f"section, axis 0 of extent {extent} has sections of {section}: pass the weight's own counts, or "
                "grouped_qkv where key-value heads are fewer"
            )
        first, last = split_interval((0, self.num_heads), num_devices, index)
        start, stop = first * self.head_dim, last * self.head_dim
        return [(k * section + start, k * section + stop) for k in range(3)]

    def __str__(self) -> str:
        return f"stacked_qkv(num_heads={self.num_heads}, head_dim={self.head_dim})"


@dataclass(frozen=True)
class Segment:
    """A section of an axis: `size` elements, cut evenly, or between heads where num_heads is given."""

    size: int
    num_heads: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 0:
            raise ShardingError(f"a segment has a size of 0 or more, got {self.size!r}")
        if self.num_heads is not None and (self.num_heads < 1 or self.size % self.num_heads):
            raise ShardingError(
                f"a segment with heads holds each whole: {self.size} does not divide by {self.num_heads} heads"
            )

    @classmethod
    def even(cls, size: int) -> Segment:
        """Return a section that may be cut anywhere."""
        return cls(size)

    @classmethod
    def head_aware(cls, num_heads: int, head_dim: int) -> Segment:
        """Return a section that is cut between heads."""
        return cls(num_heads * head_dim, num_heads)

    @classmethod
    def of(cls, value: Segment | Mapping[str, Any]) -> Segment:
        """Return a segment given as one or as a mapping with size and, perhaps, num_heads."""
        if isinstance(value, Segment):
            return value
        if not isinstance(value, Mapping) or set(value) - {"size", "num_heads"} or "size" not in value:
            raise ShardingError(
                f"a segment is Segment(size, num_heads=None) or such a mapping, got {value!r}"
            )
        return cls(value["size"], value.get("num_heads"))

    def interval(self, index: int, num_devices: int) -> Interval:
        """Return the device's part, counted from the section's start."""
        if self.num_heads is None:
            return split_interval((0, self.size), num_devices, index)
        first, last = split_interval((0, self.num_heads), num_devices, index)
        head_dim = self.size // self.num_heads
        return first * head_dim, last * head_dim


@dataclass(frozen=True)
class Segmented(_OneAxis):
    """Several sections of an axis, each cut on its own; the axis may hold two 4-bit values an element."""

    at: int
    segments: tuple[Segment, ...]

    @property
    def axis(self) -> int:
        """The given axis."""
        return self.at

    def intervals(self, extent: int, index: int, num_devices: int) -> list[Interval]:
        """Return the device's part of each section."""
        total = sum(s.size for s in self.segments)
        if extent not in (total, total // 2 if total % 2 == 0 else total):
            raise ShardingError(
                f"{self}: the segments cover the axis: they have {total} elements, the axis has {extent} "
                "(half of them would be 4-bit packed)"
            )
        pack = 1 if extent == total else 2
        found, at = [], 0
        for segment in self.segments:
            start, stop = segment.interval(index, num_devices)
            found.append(((at + start) // pack, (at + stop) // pack))
            at += segment.size
        return found

    def __str__(self) -> str:
        return f"segmented(axis={self.at}, {len(self.segments)} segments)"


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
class ExpertRange(_OneAxis):
    """Whole experts, stacked along axis 0: expert e of E goes to device e * num_devices // E."""

    @property
    def axis(self) -> int:
        """Axis 0."""
        return 0

    def intervals(self, extent: int, index: int, num_devices: int) -> list[Interval]:
        """Return the device's experts."""
        return [(-(-index * extent // num_devices), -(-(index + 1) * extent // num_devices))]

    def __str__(self) -> str:
        return "experts"


@dataclass(frozen=True)
class _Marker(Rule):
    def pieces(self, shape: Shape, index: int, num_devices: int) -> list[Box]:
        """Raise: a marker says nothing of one weight."""
        self.refuse()
        return []

    def __call__(self, weight: Any, index: int, num_devices: int) -> Any:
        """Raise: a marker says nothing of one weight."""
        self.refuse()

    def refuse(self) -> None:
        """Raise MarkerError."""
        raise MarkerError(
            f"{self.name} marks a module, it cuts no single weight: call shard_module(weights, {{'MODULE': "
            f"ShardingStrategy.{self.name}(n)}}), or give this weight a strategy such as rowwise"
        )


@dataclass(frozen=True)
class TensorParallel(_Marker):
    """Marks a module each of whose weights is cut as its name says."""

    name = "tensor_parallel"


@dataclass(frozen=True)
class ExpertParallel(_Marker):
    """Marks a module whose experts are distributed whole."""

    name = "expert_parallel"


@dataclass(frozen=True)
class GroupedQKV(_OneAxis):
    """Query heads with their key-value head, never apart."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    few_kv: FewKV
    section: Section
    at: int

    def __post_init__(self) -> None:
        if min(self.num_heads, self.num_kv_heads, self.head_dim) < 1 or self.num_heads % self.num_kv_heads:
            raise ShardingError(
                f"grouped_qkv: every key-value head serves as many query heads: num_heads is a multiple of "
                f"num_kv_heads, got {self.num_heads} and {self.num_kv_heads} (head_dim {self.head_dim})"
            )
        for name, value, known in (("few_kv", self.few_kv, get_args(FewKV)),
                                   ("section", self.section, get_args(Section))):  # fmt: skip
            if value not in known:
                raise ShardingError(f"grouped_qkv: {name} is one of {', '.join(known)}, got {value!r}")

    @property
    def axis(self) -> int:
        """The given axis."""
        return self.at

    def check_devices(self, num_devices: int) -> None:
        """Raise ShardingError where key-value heads are too few and that is to be refused."""
        if self.few_kv == "refuse" and self.num_kv_heads < num_devices:
            raise ShardingError(
                f"grouped_qkv: {self.num_kv_heads} key-value heads do not reach {num_devices} devices: use at most "
                f"{self.num_kv_heads}, or few_kv='replicate' (copies of a head) or 'empty' (devices without heads)"
            )

    def heads(self, index: int, num_devices: int) -> tuple[Interval, Interval]:
        """Return the query heads and the key-value heads of a device."""
        self.check_devices(num_devices)
        kv, per_group = self.num_kv_heads, self.num_heads // self.num_kv_heads
        if kv >= num_devices or self.few_kv == "empty":
            first, last = split_interval((0, kv), num_devices, index)
            return (first * per_group, last * per_group), (first, last)
        for group in range(kv):  # devices are cut over groups, and a group's queries over its devices
            start, stop = split_interval((0, num_devices), kv, group)
            if start <= index < stop:
                break
        base = group * per_group
        queries = split_interval((base, base + per_group), stop - start, index - start)
        has_queries = queries[0] < queries[1]
        return queries, (group, group + 1) if has_queries else (group, group)

    def intervals(self, extent: int, index: int, num_devices: int) -> list[Interval]:
        """Return the device's queries, keys and values of the section."""
        rows = {"q": self.num_heads, "kv": self.num_kv_heads, "qkv": self.num_heads + 2 * self.num_kv_heads}
        expected = rows[self.section] * self.head_dim
        if extent != expected:
            raise ShardingError(
                f"{self}: the axis holds {rows[self.section]} heads of {self.head_dim}, {expected} in all, got "
                f"{extent}"
            )
        queries, keys = self.heads(index, num_devices)
        starts: Sequence[tuple[int, Interval]] = {
            "q": [(0, queries)],
            "kv": [(0, keys)],
            "qkv": [(0, queries), (self.num_heads, keys), (self.num_heads + self.num_kv_heads, keys)],
        }[self.section]
        return [((at + a) * self.head_dim, (at + b) * self.head_dim) for at, (a, b) in starts]

    def __str__(self) -> str:
        return (
            f"grouped_qkv(num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"head_dim={self.head_dim}, few_kv={self.few_kv}, section={self.section}, axis={self.at})"
        )
