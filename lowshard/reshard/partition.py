"""How an array is dealt to cells, and what two cells of two partitions have in common.

Partitions compare by value, so the boxes that two cells have in common are worked out once for all tensors that are cut
alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

from lowshard.box import Box, intersect, subtract, volume
from lowshard.reshard.cut import Cut, common, overlaps_into, parts_met
from lowshard.tiling import Tile

Pair = tuple[Box, Box]
"""A box of the source's local array and the box of the destination's that gets it; one shape."""


@dataclass(frozen=True)
class Cuts:
    """A partition by a cut in each dim: cells are row-major over the parts of all dims."""

    cuts: tuple[Cut, ...]
    cells: int = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cuts", tuple(self.cuts))
        object.__setattr__(self, "cells", prod(c.parts for c in self.cuts))
        object.__setattr__(self, "_hash", hash(self.cuts))

    def __hash__(self) -> int:
        return self._hash

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


@dataclass(frozen=True)
class Tiles:
    """A partition by a list: the tiles of each cell. Cells may overlap where they are not the same."""

    shape: tuple[int, ...]
    cell_tiles: tuple[tuple[Tile, ...], ...]
    local_shapes: tuple[tuple[int, ...], ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.shape, self.cell_tiles, self.local_shapes)))

    def __hash__(self) -> int:
        return self._hash

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


@lru_cache(maxsize=65536)
def sources(src: Partition, dst: Partition, dst_cell: int) -> tuple[int, ...]:
    """Return the source cells that a destination cell takes something from, ascending."""
    if isinstance(src, Cuts) and isinstance(dst, Cuts):
        parts = dst.parts(dst_cell)
        met = [
            sorted({o.src_part for o in overlaps_into(s, d, p)})
            for s, d, p in zip(src.cuts, dst.cuts, parts, strict=True)
        ]
        return tuple(src.cell(row) for row in product(*met))
    return tuple(sorted(_cover(src, dst, dst_cell)))


@lru_cache(maxsize=65536)
def targets(src: Partition, dst: Partition, src_cell: int) -> tuple[int, ...]:
    """Return the destination cells that take something from a source cell, ascending."""
    if isinstance(src, Cuts) and isinstance(dst, Cuts):
        parts = src.parts(src_cell)
        met = [parts_met(s, p, d) for s, d, p in zip(src.cuts, dst.cuts, parts, strict=True)]
        return tuple(dst.cell(row) for row in product(*met))
    return tuple(e for e in range(dst.cells) if src_cell in _cover(src, dst, e))


@lru_cache(maxsize=65536)
def moves(src: Partition, dst: Partition, src_cell: int, dst_cell: int) -> tuple[Pair, ...]:
    """Return what a destination cell takes from one source cell, ordered by where it goes."""
    if isinstance(src, Cuts) and isinstance(dst, Cuts):
        rows = [
            common(s, sp, d, dp)
            for s, sp, d, dp in zip(src.cuts, src.parts(src_cell), dst.cuts, dst.parts(dst_cell), strict=True)
        ]
        return tuple(
            (
                tuple((o.src_start, o.src_start + o.length) for o in row),
                tuple((o.dst_start, o.dst_start + o.length) for o in row),
            )
            for row in product(*rows)
        )
    return _cover(src, dst, dst_cell).get(src_cell, ())


@lru_cache(maxsize=65536)
def moved_elems(src: Partition, dst: Partition, src_cell: int, dst_cell: int) -> int:
    """Return how many elements a destination cell takes from a source cell."""
    return sum(volume(box) for box, _ in moves(src, dst, src_cell, dst_cell))


@lru_cache(maxsize=65536)
def missing(src: Partition, dst: Partition, dst_cell: int) -> int:
    """Return how many elements of a destination cell no source cell has: 0 where the sources cover it.

    The boxes of one cell are disjoint by construction (segments partition a dim; covers are subtracted), so equal
    sums prove that every element is written exactly once.
    """
    got = sum(moved_elems(src, dst, c, dst_cell) for c in sources(src, dst, dst_cell))
    return prod(dst.local_shape(dst_cell)) - got


@lru_cache(maxsize=65536)
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
                    pair = (_moved(both, held.box, held.local), _moved(both, tile.box, tile.local))
                    found.setdefault(cell, []).append(pair)
                    rest.extend(subtract(box, both))
                left = rest
            if not left:
                break
    return {c: tuple(sorted(pairs, key=lambda pair: pair[1])) for c, pairs in found.items()}


def _moved(box: Box, origin: Box, target: Box) -> Box:
    return tuple(
        (t[0] + b[0] - o[0], t[0] + b[1] - o[0]) for b, o, t in zip(box, origin, target, strict=True)
    )
