"""Partitions of an array into cells, and the overlaps of the cells of two partitions.

Partitions compare by value, so a plan computes the overlaps of two cells once for all tensors partitioned alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from lowshard.bounded import keeps_hash, kept_in_self
from lowshard.box import Box, full_box, intersect, moved, subtract, volume
from lowshard.reshard.dim_sharding import DimSharding, Overlap, overlaps_into, parts_met
from lowshard.tiling import Tile

Pair = tuple[Box, Box]
"""A box of the source's local array and the equally shaped box of the destination's that receives it."""


@keeps_hash
@dataclass(frozen=True)
class GridPartition:
    """A partition by a sharding of each dim: cells are row-major over the parts of all dims."""

    shardings: tuple[DimSharding, ...]
    cells: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shardings", tuple(self.shardings))
        object.__setattr__(self, "cells", prod(c.parts for c in self.shardings))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        return tuple(c.length for c in self.shardings)

    def parts(self, cell: int) -> tuple[int, ...]:
        """Return a cell's part in each dim."""
        found = []
        for sharding in reversed(self.shardings):
            cell, part = divmod(cell, sharding.parts)
            found.append(part)
        return tuple(reversed(found))

    def cell(self, parts: Sequence[int]) -> int:
        """Return the cell of these parts."""
        at = 0
        for sharding, part in zip(self.shardings, parts, strict=True):
            at = at * sharding.parts + part
        return at

    def local_shape(self, cell: int) -> tuple[int, ...]:
        """Return the shape of a cell's local array."""
        return tuple(c.extent(p) for c, p in zip(self.shardings, self.parts(cell), strict=True))

    def filled(self, cell: int) -> Box:
        """Return the box of a cell's local array that its tiles fill: all of it."""
        return full_box(self.local_shape(cell))

    def tiles(self, cell: int) -> tuple[Tile, ...]:
        """Return a cell's boxes, in the whole array and in its local array."""
        spans = [c.segments(p) for c, p in zip(self.shardings, self.parts(cell), strict=True)]
        return tuple(
            Tile(
                tuple((s.start, s.stop) for s in row),
                tuple((s.local, s.local + s.stop - s.start) for s in row),
            )
            for row in product(*spans)
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"shardings": [c.to_json() for c in self.shardings]}


@keeps_hash
@dataclass(frozen=True)
class TilePartition:
    """A partition by a list of each cell's tiles. Cells may overlap unless they are the same."""

    shape: tuple[int, ...]
    cell_tiles: tuple[tuple[Tile, ...], ...]
    local_shapes: tuple[tuple[int, ...], ...]

    @property
    def cells(self) -> int:
        """Number of cells."""
        return len(self.cell_tiles)

    def local_shape(self, cell: int) -> tuple[int, ...]:
        """Return the shape of a cell's local array."""
        return self.local_shapes[cell]

    def filled(self, cell: int) -> Box:
        """Return the box of a cell's local array that its tiles fill; rows behind it are padding."""
        shape = self.local_shapes[cell]
        stop = max((tile.local[0][1] for tile in self.cell_tiles[cell] if tile.local), default=0)
        return full_box((min(stop, shape[0]), *shape[1:]) if shape else ())

    def tiles(self, cell: int) -> tuple[Tile, ...]:
        """Return a cell's boxes, in the whole array and in its local array."""
        return self.cell_tiles[cell]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "shape": self.shape,
            "tiles": [[[t.box, t.local] for t in tiles] for tiles in self.cell_tiles],
            "local_shapes": self.local_shapes,
        }


Partition = GridPartition | TilePartition


# ---- what two cells have in common


class CellOverlaps:
    """The overlaps of the cells of a source and a destination partition."""

    def __init__(self, src: Partition, dst: Partition) -> None:
        self.src, self.dst = src, dst

    @kept_in_self
    def sources(self, dst_cell: int) -> tuple[int, ...]:
        """Return the source cells that overlap a destination cell, ascending."""
        if isinstance(self.src, GridPartition) and isinstance(self.dst, GridPartition):
            met = [
                sorted({o.src_part for o in self._overlaps_into(dim, part)})
                for dim, part in enumerate(self.dst.parts(dst_cell))
            ]
            return tuple(self.src.cell(row) for row in product(*met))
        return tuple(sorted(self._covered(dst_cell)))

    @kept_in_self
    def targets(self, src_cell: int) -> tuple[int, ...]:
        """Return the destination cells that overlap a source cell, ascending."""
        if isinstance(self.src, GridPartition) and isinstance(self.dst, GridPartition):
            met = [self._parts_met(dim, part) for dim, part in enumerate(self.src.parts(src_cell))]
            return tuple(self.dst.cell(row) for row in product(*met))
        return tuple(e for e in range(self.dst.cells) if src_cell in self._covered(e))

    @kept_in_self
    def moves(self, src_cell: int, dst_cell: int) -> tuple[Pair, ...]:
        """Return what a destination cell receives from one source cell, ordered by destination."""
        if isinstance(self.src, GridPartition) and isinstance(self.dst, GridPartition):
            parts = zip(self.src.parts(src_cell), self.dst.parts(dst_cell), strict=True)
            rows = [self._common(dim, *both) for dim, both in enumerate(parts)]
            return tuple(
                (
                    tuple((o.src_start, o.src_start + o.length) for o in row),
                    tuple((o.dst_start, o.dst_start + o.length) for o in row),
                )
                for row in product(*rows)
            )
        return self._covered(dst_cell).get(src_cell, ())

    @kept_in_self
    def moved_elems(self, src_cell: int, dst_cell: int) -> int:
        """Return how many elements a destination cell receives from a source cell."""
        return sum(volume(box) for box, _ in self.moves(src_cell, dst_cell))

    @kept_in_self
    def missing(self, dst_cell: int) -> int:
        """Return how many elements of a destination cell are in no source cell."""
        got = sum(self.moved_elems(c, dst_cell) for c in self.sources(dst_cell))
        # boxes of one cell are disjoint by construction, so equal sums prove that each element is written once
        return volume(self.dst.filled(dst_cell)) - got

    def first_tile(self, src_cell: int, dst_cell: int) -> int:
        """Return how many boxes a destination cell receives from the source cells before this one."""
        total = 0
        for cell in self.sources(dst_cell):
            if cell == src_cell:
                return total
            total += len(self.moves(cell, dst_cell))
        return total

    def _shardings(self, dim: int) -> tuple[DimSharding, DimSharding]:
        assert isinstance(self.src, GridPartition)
        assert isinstance(self.dst, GridPartition)
        return self.src.shardings[dim], self.dst.shardings[dim]

    @kept_in_self
    def _overlaps_into(self, dim: int, dst_part: int) -> tuple[Overlap, ...]:
        return overlaps_into(*self._shardings(dim), dst_part)

    @kept_in_self
    def _parts_met(self, dim: int, src_part: int) -> tuple[int, ...]:
        src, dst = self._shardings(dim)
        return parts_met(src, src_part, dst)

    @kept_in_self
    def _common(self, dim: int, src_part: int, dst_part: int) -> tuple[Overlap, ...]:
        return tuple(o for o in self._overlaps_into(dim, dst_part) if o.src_part == src_part)

    @kept_in_self
    def _covered(self, dst_cell: int) -> dict[int, tuple[Pair, ...]]:
        return _cover(self.src, self.dst, dst_cell)


def _cover(src: Partition, dst: Partition, dst_cell: int) -> dict[int, tuple[Pair, ...]]:
    """Split a destination cell over source cells where either side is a list of tiles: each element from the first."""
    found: dict[int, list[Pair]] = {}
    for tile in dst.tiles(dst_cell):
        left = [tile.box]
        for cell in range(src.cells):
            for held in src.tiles(cell):
                rest: list[Box] = []
                for box in left:
                    both = intersect(box, held.box)
                    if both is None:
                        rest.append(box)
                        continue
                    pair = (moved(both, held.box, held.local), moved(both, tile.box, tile.local))
                    found.setdefault(cell, []).append(pair)
                    rest.extend(subtract(box, both))
                left = rest
            if not left:
                break
    return {c: tuple(sorted(pairs, key=lambda pair: pair[1])) for c, pairs in found.items()}
