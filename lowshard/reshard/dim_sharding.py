"""How one dim of an array is sharded over parts: what a part holds, and which parts hold an interval.

The table of segments is made once, sorted by start: the holders of an interval are found by binary search.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from lowshard.argument import choice, whole, wholes
from lowshard.bounded import keeps_hash
from lowshard.box import Split, split_interval
from lowshard.errors import LayoutError
from lowshard.placement import SPLITS
from lowshard.reading import reader

MOST_UNITS = 1 << 20
"""Most units (parts * chunks * blocks) of a dim: the table has one row for each."""


class Segment(NamedTuple):
    """An interval of the dim that lies contiguously on one part."""

    start: int
    """First index in the whole dim."""
    stop: int
    part: int
    local: int
    """Its first index in the part's local array."""


class Overlap(NamedTuple):
    """An interval that a source part and a destination part have in common, contiguous in both."""

    src_part: int
    src_start: int
    """Its first index in the source part's local array."""
    dst_part: int
    dst_start: int
    length: int


@keeps_hash
@dataclass(frozen=True)
class DimSharding:
    """One dim sharded over `parts` parts.

    The dim is a row of blocks (`blocks`, widths; by default one), each a row of `chunks` equal chunks, and each chunk
    is sharded over all parts separately, by the split rule, balanced or ceil. (Megatron's partition_stride is `chunks`:
    the gate and up halves of a gated MLP are two. Its partition_sizes are the blocks.) With `points` the parts are the
    intervals between given boundaries instead.

    Args:
        length: extent of the dim.
        parts: number of parts.
        chunks: equal chunks of each block, each sharded separately.
        blocks: widths of blocks that are packed on the dim; they add up to the length.
        points: `parts + 1` ascending boundaries from 0 to length.
        split: the rule for units that are not equal.

    Raises:
        LayoutError: numbers that do not fit each other.
    """

    length: int
    parts: int = 1
    chunks: int = 1
    blocks: tuple[int, ...] | None = None
    points: tuple[int, ...] | None = None
    split: Split = "balanced"

    def __post_init__(self) -> None:
        for name in ("blocks", "points"):
            given = getattr(self, name)
            if given is not None:
                rule = f"the {name} of a sharding are integers >= 0"
                object.__setattr__(self, name, wholes(given, rule, LayoutError, 0))
        rule = "a sharding has a length >= 0 and parts and chunks >= 1"
        for name, least in (("length", 0), ("parts", 1), ("chunks", 1)):
            object.__setattr__(self, name, whole(getattr(self, name), f"{rule}: {name}", LayoutError, least))
        units = self.parts * self.chunks * max(1, len(self.blocks or ()))
        if units > MOST_UNITS:
            raise LayoutError(
                f"a sharding has at most {MOST_UNITS} units (parts * chunks * blocks), got {units}"
            )
        choice(self.split, SPLITS, "split is 'balanced' or 'ceil'", LayoutError)
        if self.blocks is not None and (min(self.blocks, default=-1) < 0 or sum(self.blocks) != self.length):
            raise LayoutError(
                f"the blocks of a dim add up to its length {self.length}, got {self.blocks} with sum {sum(self.blocks)}"
            )
        uneven = [n for n in self.blocks or (self.length,) if n % self.chunks]
        if uneven:
            raise LayoutError(
                f"the chunks of a block are equal, as gate and up are: {uneven[0]} does not divide by {self.chunks}; "
                "name chunks of other widths as blocks"
            )
        points = self.points
        if points is not None and (
            self.blocks is not None
            or self.chunks != 1
            or len(points) != self.parts + 1
            or (points[0], points[-1]) != (0, self.length)
            or list(points) != sorted(points)
        ):
            raise LayoutError(
                f"the points of a sharding are {self.parts + 1} ascending numbers from 0 to {self.length} and come "
                f"without chunks and blocks, got {points}"
            )

    @classmethod
    def whole(cls, length: int) -> DimSharding:
        """Return the sharding that leaves the dim whole."""
        return cls(length)

    @classmethod
    def sizes(cls, widths: Sequence[int]) -> DimSharding:
        """Return the sharding into parts of these sizes, in order."""
        points = tuple(accumulate(wholes(widths, "widths are integers >= 0", LayoutError, 0), initial=0))
        return cls(points[-1], len(widths), points=points)

    @cached_property
    def table(self) -> tuple[Segment, ...]:
        """All non-empty segments, ascending; they cover each index of the dim once."""
        held = [0] * self.parts
        found: list[Segment] = []

        def add(start: int, stop: int, part: int) -> None:
            if stop > start:
                last = found[-1] if found else None
                if last is not None and last.part == part:  # nothing lies between, here or there
                    found[-1] = Segment(last.start, stop, part, last.local)
                else:
                    found.append(Segment(start, stop, part, held[part]))
                held[part] += stop - start

        if self.points is not None:
            for part in range(self.parts):
                add(self.points[part], self.points[part + 1], part)
        else:
            begin = 0
            for width in (self.length,) if self.blocks is None else self.blocks:
                chunk = width // self.chunks
                for _ in range(self.chunks):
                    for part in range(self.parts):
                        add(*split_interval((begin, begin + chunk), self.parts, part, self.split), part)
                    begin += chunk
        return tuple(found)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(s.start for s in self.table)

    @cached_property
    def _by_part(self) -> tuple[tuple[Segment, ...], ...]:
        found: list[list[Segment]] = [[] for _ in range(self.parts)]
        for segment in self.table:
            found[segment.part].append(segment)
        return tuple(map(tuple, found))

    def segments(self, part: int) -> tuple[Segment, ...]:
        """Return the segments of a part, ascending, which is their order in its local array."""
        if type(part) is int and 0 <= part < self.parts:
            return self._by_part[part]
        return self._by_part[whole(part, "a part is one of the sharding", LayoutError, 0, self.parts - 1)]

    def extent(self, part: int) -> int:
        """Return how many indices a part holds."""
        mine = self.segments(part)
        return mine[-1].local + mine[-1].stop - mine[-1].start if mine else 0

    def holders(self, start: int, stop: int) -> tuple[Segment, ...]:
        """Return the segments that overlap an interval, clipped to it, ascending."""
        table = self.table
        if type(start) is not int or type(stop) is not int:
            start, stop = wholes((start, stop), "an interval has an integer start and stop", LayoutError)
        found = []
        i = max(0, bisect_right(self._starts, start) - 1)
        while i < len(table) and table[i].start < stop:
            s = table[i]
            low, high = max(s.start, start), min(s.stop, stop)
            if low < high:
                found.append(Segment(low, high, s.part, s.local + low - s.start))
            i += 1
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads back; defaults are left out."""
        data: dict[str, Any] = {"length": self.length}
        if self.parts != 1:
            data["parts"] = self.parts
        if self.chunks != 1:
            data["chunks"] = self.chunks
        if self.blocks is not None:
            data["blocks"] = list(self.blocks)
        if self.points is not None:
            data["points"] = list(self.points)
        if self.split != "balanced":
            data["split"] = self.split
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DimSharding:
        """Return the sharding that `to_json` wrote; invalid data raises LayoutError with its place."""
        return _read(data)

    def __str__(self) -> str:
        if self.parts == 1:
            return str(self.length)
        if self.points is not None:
            return f"{self.length}/points{list(self.points)}"
        notes = f"x{self.chunks}" if self.chunks != 1 else ""
        notes += f" blocks{list(self.blocks)}" if self.blocks is not None else ""
        return f"{self.length}/{self.parts}{notes}"


_read = reader("sharding of a dim", LayoutError)(DimSharding)


def overlaps_into(src: DimSharding, dst: DimSharding, dst_part: int) -> tuple[Overlap, ...]:
    """Return what a destination part receives from each source part, ordered by its position there."""
    found: list[Overlap] = []
    for segment in dst.segments(dst_part):
        for held in src.holders(segment.start, segment.stop):
            here, length = segment.local + held.start - segment.start, held.stop - held.start
            last = found[-1] if found else None
            if (
                last is not None
                and last.src_part == held.part
                and last.src_start + last.length == held.local
                and last.dst_start + last.length == here
            ):
                found[-1] = last._replace(length=last.length + length)
            else:
                found.append(Overlap(held.part, held.local, dst_part, here, length))
    return tuple(found)


def parts_met(src: DimSharding, src_part: int, dst: DimSharding) -> tuple[int, ...]:
    """Return the destination parts that overlap a source part, ascending."""
    found = {h.part for s in src.segments(src_part) for h in dst.holders(s.start, s.stop)}
    return tuple(sorted(found))
