"""Splits items into pieces and packs them into buckets of bounded size.

Both ends split alike, from the items alone. A piece begins at a multiple of 16 bytes of its bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from lowshard.bounded import bounded_cache
from lowshard.box import Box, full_box, row_major_parts, volume
from lowshard.kernels.cuda.cuda_engine import numbered_runs
from lowshard.kernels.runs import RunTable

Item = Any
"""An item of any kind; it is only passed through."""

ALIGN_BYTES = 16


class Piece(NamedTuple):
    """A part of an item in one bucket."""

    item: Item
    component: int
    """Number of the converted array, or -1 for the unconverted box."""
    box: Box
    """Within the item's box, or a byte range of the component."""
    offset_bytes: int
    """In the bucket."""
    size_bytes: int


@dataclass(frozen=True)
class Bucket:
    """The pieces of one message."""

    pieces: tuple[Piece, ...]
    size_bytes: int

    @cached_property
    def runs(self) -> RunTable:
        """The pieces' bytes, for a GPU's checksums."""
        return numbered_runs([p.offset_bytes for p in self.pieces], [p.size_bytes for p in self.pieces])


class Part(NamedTuple):
    """What is split into pieces: the box of an item, or some bytes of one of its converted arrays."""

    item: Item
    component: int
    extents: tuple[int, ...]
    """Of the box, or the number of bytes."""
    itemsize: int
    begin_bytes: int = 0
    """Of a component: the first byte."""


def buckets_of(parts: Iterable[Sequence[Part]], limit_bytes: int) -> tuple[Bucket, ...]:
    """Return the buckets of one stream."""
    found: list[Bucket] = []
    pieces: list[Piece] = []
    at = 0
    for together in parts:
        needed = sum(_aligned(prod(part.extents) * part.itemsize) for part in together)
        for item, component, extents, itemsize, begin in together:
            for box in split_box(extents, max(1, limit_bytes // itemsize)):
                size = volume(box) * itemsize
                if pieces and at + (size if len(together) == 1 else needed) > limit_bytes:
                    found.append(Bucket(tuple(pieces), pieces[-1].offset_bytes + pieces[-1].size_bytes))
                    pieces, at = [], 0
                if component >= 0:
                    box = ((begin + box[0][0], begin + box[0][1]),)
                pieces.append(Piece(item, component, box, at, size))
                at += _aligned(size)
                needed -= _aligned(size)
    if pieces:
        found.append(Bucket(tuple(pieces), pieces[-1].offset_bytes + pieces[-1].size_bytes))
    return tuple(found)


def bands_of(
    item: Item, shapes: Sequence[tuple[int, ...]], sizes: Sequence[int], limit_bytes: int
) -> list[list[Part]]:
    """Return the parts of arrays that are sent together: the same rows of each, if they have equally many."""
    rows = {shape[0] if shape else 0 for shape in shapes}
    count = rows.pop()
    if len(shapes) > 1 and not rows and count and all(sizes):
        row_bytes = [size // count for size in sizes]
        most = (limit_bytes - ALIGN_BYTES * len(sizes)) // sum(row_bytes)
        if most > 0:
            most = -(-count // -(-count // most))  # equal bands
            return [
                [Part(item, c, ((min(most, count - r)) * n,), 1, r * n) for c, n in enumerate(row_bytes)]
                for r in range(0, count, most)
            ]
    return [[Part(item, c, (size,), 1)] for c, size in enumerate(sizes)]


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


@bounded_cache(1 << 20)
def split_box(extents: tuple[int, ...], limit_elems: int) -> tuple[Box, ...]:
    """Return row-major boxes that make up `[0, extent)` in each dim, each of at most so many elements."""
    return tuple(row_major_parts(full_box(extents), limit_elems)) if prod(extents) else ()
