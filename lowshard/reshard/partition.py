"""How an array is dealt to cells, and what two cells of two partitions have in common.

Partitions compare by value, so a plan works out the boxes that two cells have in common once for all tensors that are
cut alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from lowshard.bounded import keeps_hash, kept_in_self
from lowshard.box import Box, intersect, moved, subtract, volume
from lowshard.reshard.cut import Cut, Overlap, overlaps_into, parts_met
from lowshard.tiling import Tile

Pair = tuple[Box, Box]
"""A box of the source's local array and the box of the destination's that gets it; one shape."""


@keeps_hash
@dataclass(frozen=True)
class Cuts:
    """A partition by a cut in each dim: cells are row-major over the parts of all dims."""

    cuts: tuple[Cut, ...]
    cells: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cuts", tuple(self.cuts))
        object.__setattr__(self, "cells", prod(c.parts for c in self.cuts))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        return tuple(c.length for c in self.cuts)

    def parts(self, cell: int) -> tuple[int, ...]:
        """Return the part of each dim that a cell is."""
        found = []
        for cut in reversed(self.cuts):
            cell, part = divmod(cell, cut.parts)
            found.append(part)
        return tuple(reversed(found))

    def cell(self, parts: Sequence[int]) -> int:
        """Return the cell of these parts."""
        at = 0
        for cut, part in zip(self.cuts, parts, strict=True):
            at = at * cut.parts + part
        return at

    def local_shape(self, cell: int) -> tuple[int, ...]:
        """Return the shape of a cell's own array."""
        return tuple(c.extent(p) for c, p in zip(self.cuts, self.parts(cell), strict=True))

    def tiles(self, cell: int) -> tuple[Tile, ...]:
        """Return the boxes of the whole array that a cell is made of, and where they lie in its own."""
        spans = [c.segments(p) for c, p in zip(self.cuts, self.parts(cell), strict=True)]
        return tuple(
            Tile(
                tuple((s.start, s.stop) for s in row),
                tuple((s.local, s.local + s.stop - s.start) for s in row),
            )
            for row in product(*spans)
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"cuts": [c.to_json() for c in self.cuts]}


@keeps_hash
@dataclass(frozen=True)
class Tiles:
    """A partition by a list: the tiles of each cell. Cells may overlap where they are not the same."""

    shape: tuple[int, ...]
    cell_tiles: tuple[tuple[Tile, ...], ...]
    local_shapes: tuple[tuple[int, ...], ...]

    @property
    def cells(self) -> int:
        """Number of cells."""
        return len(self.cell_tiles)

    def local_shape(self, cell: int) -> tuple[int, ...]:
        """Return the shape of a cell's own array."""
        return self.local_shapes[cell]

    def tiles(self, cell: int) -> tuple[Tile, ...]:
        """Return the boxes of the whole array that a cell is made of, and where they lie in its own."""
        return self.cell_tiles[cell]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "shape": self.shape,
            "tiles": [[[t.box, t.local] for t in tiles] for tiles in self.cell_tiles],
            "local_shapes": self.local_shapes,
        }


Partition = Cuts | Tiles


# ---- what two cells have in common


class Pairing:
    """What the cells of a source and a destination partition have in common."""

    def __init__(self, src: Partition, dst: Partition) -> None:
        self.src, self.dst = src, dst

    @kept_in_self
    def sources(self, dst_cell: int) -> tuple[int, ...]:
        """Return the source cells that a destination cell takes something from, ascending."""
        if isinstance(self.src, Cuts) and isinstance(self.dst, Cuts):
            met = [
                sorted({o.src_part for o in self._overlaps_into(dim, part)})
                for dim, part in enumerate(self.dst.parts(dst_cell))
            ]
            return tuple(self.src.cell(row) for row in product(*met))
        return tuple(sorted(self._covered(dst_cell)))

    @kept_in_self
    def targets(self, src_cell: int) -> tuple[int, ...]:
        """Return the destination cells that take something from a source cell, ascending."""
        if isinstance(self.src, Cuts) and isinstance(self.dst, Cuts):
            met = [self._parts_met(dim, part) for dim, part in enumerate(self.src.parts(src_cell))]
            return tuple(self.dst.cell(row) for row in product(*met))
        return tuple(e for e in range(self.dst.cells) if src_cell in self._covered(e))

    @kept_in_self
    def moves(self, src_cell: int, dst_cell: int) -> tuple[Pair, ...]:
        """Return what a destination cell takes from one source cell, ordered by where it goes."""
        if isinstance(self.src, Cuts) and isinstance(self.dst, Cuts):
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
        """Return how many elements a destination cell takes from a source cell."""
        return sum(volume(box) for box, _ in self.moves(src_cell, dst_cell))

    @kept_in_self
    def missing(self, dst_cell: int) -> int:
        """Return how many elements of a destination cell no source cell has: 0 where the sources cover it."""
        got = sum(self.moved_elems(c, dst_cell) for c in self.sources(dst_cell))
        # boxes of one cell are disjoint by construction, so equal sums prove that each element is written once
        return prod(self.dst.local_shape(dst_cell)) - got

    def first_tile(self, src_cell: int, dst_cell: int) -> int:
        """Return how many boxes a destination cell gets from source cells before this one."""
        total = 0
        for cell in self.sources(dst_cell):
            if cell == src_cell:
                return total
            total += len(self.moves(cell, dst_cell))
        return total

    def _cuts(self, dim: int) -> tuple[Cut, Cut]:
        assert isinstance(self.src, Cuts)
        assert isinstance(self.dst, Cuts)
        return self.src.cuts[dim], self.dst.cuts[dim]

    @kept_in_self
    def _overlaps_into(self, dim: int, dst_part: int) -> tuple[Overlap, ...]:
        return overlaps_into(*self._cuts(dim), dst_part)

    @kept_in_self
    def _parts_met(self, dim: int, src_part: int) -> tuple[int, ...]:
        src, dst = self._cuts(dim)
        return parts_met(src, src_part, dst)

    @kept_in_self
    def _common(self, dim: int, src_part: int, dst_part: int) -> tuple[Overlap, ...]:
        return tuple(o for o in self._overlaps_into(dim, dst_part) if o.src_part == src_part)

    @kept_in_self
    def _covered(self, dst_cell: int) -> dict[int, tuple[Pair, ...]]:
        return _cover(self.src, self.dst, dst_cell)


def _cover(src: Partition, dst: Partition, dst_cell: int) -> dict[int, tuple[Pair, ...]]:
    """Deal a destination cell to source cells where either side is a list of tiles: each element to the first."""
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
