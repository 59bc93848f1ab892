"""The rules that shard between attention heads, and the sections of an axis that some of them stack.

Sources: `max/graph/weight.py` of modular/modular for those of MAX; the grouped rule follows from grouped-query
attention (Ainslie et al. 2023): query head h reads key-value head h // (heads / kv_heads).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, Literal, get_args

from lowshard.argument import one_of, whole
from lowshard.box import Interval, split_interval
from lowshard.errors import ShardIndexError, ShardingError
from lowshard.weights.shard_rules import Rule, split_units

FewKV = Literal["replicate", "empty", "refuse"]
Section = Literal["qkv", "q", "kv"]


@dataclass(frozen=True)
class HeadAwareColumnwise(Rule):
    """Axis 1, sharded between heads; 4- and 6-bit packed widths are recognised by their extent."""

    num_heads: int
    head_dim: int

    sharded_axis = 1

    def intervals(self, extent: int, index: int, num_devices: int) -> list[Interval]:
        """Return the columns of the device's heads."""
        whole = self.num_heads * self.head_dim
        start, stop = split_units(whole, num_devices, index, lcm(self.unit, self.head_dim) or 1)
        if extent * 2 == whole:
            return [(start // 2, stop // 2)]
        if extent * 4 == whole * 3:
            return [(start * 3 // 4, stop * 3 // 4)]
        return [(start, stop)]

    def __str__(self) -> str:
        return f"head_aware_columnwise(num_heads={self.num_heads}, head_dim={self.head_dim})"


@dataclass(frozen=True)
class StackedQKV(Rule):
    """Three equal sections of axis 0, each sharded between the same heads."""

    num_heads: int
    head_dim: int

    sharded_axis = 0

    def parts(self, extent: int) -> tuple[int, ...]:
        """Return the three sections."""
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
        return (section,) * 3

    def intervals(self, extent: int, index: int, num_devices: int) -> list[Interval]:
        """Return the device's heads of each section."""
        section = self.parts(extent)[0]
        start, stop = split_units(section, num_devices, index, lcm(self.unit, self.head_dim) or 1)
        return [(k * section + start, k * section + stop) for k in range(3)]

    def __str__(self) -> str:
        return f"stacked_qkv(num_heads={self.num_heads}, head_dim={self.head_dim})"


@dataclass(frozen=True)
class Segment:
    """A section of an axis: `size` elements, sharded evenly, or between heads where num_heads is given."""

    size: int
    num_heads: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "size", whole(self.size, "a segment has a size of 0 or more", ShardingError, 0)
        )
        if self.num_heads is None:
            return
        object.__setattr__(self, "num_heads", whole(self.num_heads, "num_heads is an integer", ShardingError))
        if self.num_heads < 1 or self.size % self.num_heads:
            raise ShardingError(
                f"a segment with heads holds each whole: {self.size} does not divide by {self.num_heads} heads"
            )

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

    def interval(self, index: int, num_devices: int, unit: int = 1) -> Interval:
        """Return the device's part, in whole units, counted from the section's start."""
        num_devices, index = _device(num_devices, index)
        head_dim = self.size // self.num_heads if self.num_heads else 1
        return split_units(self.size, num_devices, index, lcm(unit, head_dim) or 1)


@dataclass(frozen=True)
class Segmented(Rule):
    """Several sections of an axis, each cut on its own; the axis may hold two 4-bit values an element."""

    at: int
    segments: tuple[Segment, ...]

    def parts(self, extent: int) -> tuple[int, ...]:
        """Return the sections' extents, as they are stored."""
        total = sum(s.size for s in self.segments)
        if extent not in (total, total // 2 if total % 2 == 0 else total):
            raise ShardingError(
                f"{self}: the segments cover the axis: they have {total} elements, the axis has {extent} "
                "(half of them would be 4-bit packed)"
            )
        return tuple(s.size * extent // max(total, 1) for s in self.segments)

    def intervals(self, extent: int, index: int, num_devices: int) -> list[Interval]:
        """Return the device's part of each section."""
        self.parts(extent)  # which checks
        pack = 1 if extent == sum(s.size for s in self.segments) else 2
        found, at = [], 0
        for segment in self.segments:
            start, stop = segment.interval(index, num_devices, self.unit * pack)
            found.append(((at + start) // pack, (at + stop) // pack))
            at += segment.size
        return found or [(0, 0)]

    def __str__(self) -> str:
        return f"segmented(axis={self.at}, {len(self.segments)} segments)"


@dataclass(frozen=True)
class GroupedQKV(Rule):
    """Query heads with their key-value head, never apart; a unit is of key-value heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    few_kv: FewKV
    section: Section
    at: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.num_heads, self.num_kv_heads, self.head_dim) < 1 or self.num_heads % self.num_kv_heads:
            raise ShardingError(
                f"grouped_qkv: every key-value head serves as many query heads: num_heads is a multiple of "
                f"num_kv_heads, got {self.num_heads} and {self.num_kv_heads} (head_dim {self.head_dim})"
            )
        for name, value, known in (("few_kv", self.few_kv, get_args(FewKV)),
                                   ("section", self.section, get_args(Section))):  # fmt: skip
            one_of(value, known, f"grouped_qkv: {name}", ShardingError)

    def check_devices(self, num_devices: int) -> None:
        """Raise ShardingError where key-value heads are too few and that is to be refused."""
        if self.few_kv == "refuse" and self.num_kv_heads < num_devices:
            raise ShardingError(
                f"grouped_qkv: {self.num_kv_heads} key-value heads do not reach {num_devices} devices: use at most "
                f"{self.num_kv_heads}, or few_kv='replicate' (copies of a head) or 'empty' (devices without heads)"
            )

    def heads(self, index: int, num_devices: int) -> tuple[Interval, Interval]:
        """Return the query heads and the key-value heads of a device."""
        num_devices, index = _device(num_devices, index)
        self.check_devices(num_devices)
        kv, per_group = self.num_kv_heads, self.num_heads // self.num_kv_heads
        if kv >= num_devices or self.few_kv == "empty":
            first, last = split_units(kv, num_devices, index, self.unit)
            return (first * per_group, last * per_group), (first, last)
        for group in range(kv):  # devices are split over groups, and a group's queries over its devices
            start, stop = split_interval((0, num_devices), kv, group)
            if start <= index < stop:
                break
        base = group * per_group
        queries = split_interval((base, base + per_group), stop - start, index - start)
        has_queries = queries[0] < queries[1]
        return queries, (group, group + 1) if has_queries else (group, group)

    def parts(self, extent: int) -> tuple[int, ...]:
        """Return the extents of queries, keys and values."""
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        mine = {"q": heads[:1], "kv": heads[1:2], "qkv": heads}[self.section]
        return tuple(count * self.head_dim for count in mine)

    def intervals(self, extent: int, index: int, num_devices: int) -> list[Interval]:
        """Return the device's queries, keys and values of the section."""
        expected = sum(self.parts(extent))
        if extent != expected:
            raise ShardingError(
                f"{self}: the axis holds {expected // self.head_dim} heads of {self.head_dim}, {expected} in all, got "
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


def _device(num_devices: int, index: int) -> tuple[int, int]:
    """Return a number of devices and one of them as integers, or raise ShardingError or ShardIndexError."""
    count = whole(num_devices, "num_devices is 1 or more", ShardingError, 1)
    return count, whole(index, f"an index is 0 to {count - 1}", ShardIndexError, 0, count - 1)
