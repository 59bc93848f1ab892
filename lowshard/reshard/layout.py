"""What each rank holds of one tensor, as a function: a partition of the array into cells, and a seat for each cell.

A partition says what a cell is (any number of boxes), seats say which ranks hold it. Partitions compare by value,
so the boxes that two cells have in common are worked out once for all tensors that are cut alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

from lowshard import dtypes
from lowshard.box import Box, full_box, intersect, shape_of, split_interval, subtract, volume
from lowshard.errors import LayoutError
from lowshard.layout import Layout
from lowshard.reshard.cut import Cut, common, overlaps_into, parts_met
from lowshard.reshard.seat import Grid, Roster, Seats, seats_from_json
from lowshard.tiling import Tile, Tiling

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


@dataclass(frozen=True)
class TensorLayout:
    """Where each element of a tensor lies, for the ranks of one side of a reshard.

    Args:
        dtype: any name of the dtype table.
        partition: how the array is dealt to cells.
        seats: which ranks hold each cell.

    Raises:
        LayoutError: seats for another number of cells.
        DTypeError: unknown dtype.
    """

    dtype: str
    partition: Partition
    seats: Grid | Roster
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtypes.get(self.dtype).name)
        cells, seats = self.partition.cells, self.seats
        if isinstance(seats, Grid) and isinstance(self.partition, Cuts):
            per_dim = [prod(n for n, _ in axes) for axes in seats.dims]
            wanted = [c.parts for c in self.partition.cuts]
            if per_dim != wanted:
                raise LayoutError(
                    f"a tensor's grid of ranks has as many places a dim as its cuts have parts {wanted}, got {per_dim}"
                )
        if seats.cells != cells:
            raise LayoutError(f"a partition into {cells} cells has seats for each, got {seats.cells}")
        object.__setattr__(self, "_hash", hash((self.dtype, self.partition, self.seats)))

    def __hash__(self) -> int:
        return self._hash

    # ---- makers

    @classmethod
    def sharded(
        cls,
        shape: Sequence[int],
        dtype: str,
        axes: Mapping[str, tuple[int, int]],
        dims: Mapping[int, Cut | str | tuple[str, ...]] | None = None,
        *,
        by: Mapping[int, str | tuple[str, ...]] | None = None,
        offset: int = 0,
    ) -> TensorLayout:
        """Return the layout of an array over named axes of ranks.

        Args:
            shape: shape of the whole array.
            dtype: any name of the dtype table.
            axes: for each axis its size and the stride of its ranks; axes that cut no dim hold copies.
            dims: for each dim that is cut its cut, or just the axis (or axes, outer first) that cut it evenly.
            by: the axes that cut a dim, where `dims` gives a `Cut`.
            offset: the rank at place 0 of every axis.

        Raises:
            LayoutError: an axis that is not named or used twice, or a cut that does not fit.
            MeshError: strides that give one rank to two places.
        """
        cuts: list[Cut] = []
        places: list[tuple[tuple[int, int], ...]] = []
        used: set[str] = set()
        for dim, length in enumerate(shape):
            given = (dims or {}).get(dim)
            names = (by or {}).get(dim, ()) if isinstance(given, Cut) else (given or ())
            names = (names,) if isinstance(names, str) else tuple(names)
            wrong = [n for n in names if n not in axes or n in used]
            if wrong:
                raise LayoutError(
                    f"dim {dim} is cut by axes of {sorted(axes)}, each used once, got {list(names)}"
                )
            used.update(names)
            parts = prod(axes[n][0] for n in names)
            cut = given if isinstance(given, Cut) else Cut(length, parts)
            if cut.length != length or cut.parts != parts:
                raise LayoutError(
                    f"dim {dim} of {tuple(shape)} cut by {list(names)} has a cut of length {length} into {parts} "
                    f"parts, got {cut}"
                )
            cuts.append(cut)
            places.append(tuple(axes[n] for n in names))
        copies = tuple(axis for name, axis in axes.items() if name not in used and axis[0] > 1)
        return cls(dtype, Cuts(tuple(cuts)), Grid(tuple(places), copies, offset))

    @classmethod
    def from_layout(cls, layout: Layout) -> TensorLayout:
        """Return the same layout as a function for resharding.

        Raises:
            LayoutError: a partial layout: its ranks hold terms, not elements.
        """
        if any(layout.partials):
            raise LayoutError(f"the layout {layout} is partial: its ranks hold terms. Reduce it first")
        mesh = layout.mesh
        cuts = []
        for dim, cutters in enumerate(layout.cutters):
            sizes = [mesh.shape[a] for a in cutters]
            cuts.append(_nested(layout.shape[dim], sizes, [layout.splits[a] for a in cutters]))
        cutting = {a for axes in layout.cutters for a in axes}
        seats: Grid | Roster
        ranks = mesh.ranks
        first = ranks[0]
        if all(r == first + i for i, r in enumerate(ranks)):
            strides = [prod(mesh.shape[i + 1 :]) for i in range(mesh.ndim)]
            seats = Grid(
                tuple(tuple((mesh.shape[a], strides[a]) for a in axes) for axes in layout.cutters),
                tuple((mesh.shape[a], strides[a]) for a in range(mesh.ndim) if a not in cutting),
                first,
            )
        else:
            partition = Cuts(tuple(cuts))
            held: dict[int, list[int]] = {}
            for rank in ranks:
                coord = mesh.coord(rank)
                parts = []
                for axes in layout.cutters:
                    part = 0
                    for a in axes:
                        part = part * mesh.shape[a] + coord[a]
                    parts.append(part)
                held.setdefault(partition.cell(parts), []).append(rank)
            seats = Roster(tuple(tuple(held[c]) for c in range(partition.cells)))
        return cls(layout.dtype, Cuts(tuple(cuts)), seats)

    @classmethod
    def from_tiling(cls, tiling: Tiling) -> TensorLayout:
        """Return the same tiling as a function for resharding: ranks with the same tiles share a cell."""
        cells: dict[tuple[tuple[Tile, ...], tuple[int, ...]], list[int]] = {}
        for rank in tiling.ranks:
            cells.setdefault((tiling.tiles(rank), tiling.local_shape(rank)), []).append(rank)
        if not cells:
            raise LayoutError("a tiling that no rank takes part in holds nothing to move")
        partition = Tiles(tiling.shape, tuple(t for t, _ in cells), tuple(s for _, s in cells))
        return cls(tiling.dtype, partition, Roster(tuple(map(tuple, cells.values()))))

    # ---- what a rank holds

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        return self.partition.shape

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element."""
        return dtypes.get(self.dtype).itemsize_bytes

    def __contains__(self, rank: int) -> bool:
        """Return True for a rank that holds a part."""
        return self.seats.seat(rank) is not None

    def local_shape(self, rank: int) -> tuple[int, ...] | None:
        """Return the shape of a rank's local array, or None where it holds no part."""
        seat = self.seats.seat(rank)
        return None if seat is None else self.partition.local_shape(seat[0])

    def tiles(self, rank: int) -> tuple[Tile, ...]:
        """Return the boxes that a rank holds, globally and in its local array."""
        seat = self.seats.seat(rank)
        return () if seat is None else self.partition.tiles(seat[0])

    # ---- JSON

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads back."""
        return {"dtype": self.dtype, **self.partition.to_json(), "seats": self.seats.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorLayout:
        """Return the layout that `to_json` wrote."""
        partition: Partition
        if "cuts" in data:
            partition = Cuts(tuple(Cut.from_json(c) for c in data["cuts"]))
        else:
            tiles = tuple(tuple(Tile(_box(b), _box(at)) for b, at in cell) for cell in data["tiles"])
            partition = Tiles(tuple(data["shape"]), tiles, tuple(map(tuple, data["local_shapes"])))
        return cls(data["dtype"], partition, seats_from_json(data["seats"]))

    def __str__(self) -> str:
        body = (
            ",".join(map(str, self.partition.cuts))
            if isinstance(self.partition, Cuts)
            else f"{','.join(map(str, self.shape))} in {self.partition.cells} tiled cells"
        )
        low, high = self.seats.span
        return f"{self.dtype}[{body}] on ranks {low}..{high - 1}, {self.seats.replicas} copies"


def as_tensor_layout(given: object) -> TensorLayout:
    """Return a TensorLayout, Layout or Tiling as a TensorLayout.

    Raises:
        LayoutError: it is none of these, or partial.
    """
    if isinstance(given, TensorLayout):
        return given
    if isinstance(given, Layout):
        return TensorLayout.from_layout(given)
    if isinstance(given, Tiling):
        return TensorLayout.from_tiling(given)
    raise LayoutError(
        f"a side of a reshard is given as TensorLayout, Layout or Tiling, got {type(given).__name__}"
    )


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


def _nested(length: int, sizes: Sequence[int], splits: Sequence[Any]) -> Cut:
    """Return the cut by several axes, each dealing the parts of the one before by its own rule."""
    if not sizes:
        return Cut.whole(length)
    if len(sizes) == 1:
        return Cut(length, sizes[0], split=splits[0])
    points = []
    for place in product(*(range(n) for n in sizes)):
        interval = (0, length)
        for n, index, split in zip(sizes, place, splits, strict=True):
            interval = split_interval(interval, n, index, split)
        points.append(interval[0])
    return Cut(length, prod(sizes), points=(*points, length))


def _box(data: Sequence[Sequence[int]]) -> Box:
    return tuple((int(a), int(b)) for a, b in data)


__all__ = [
    "Cuts",
    "Pair",
    "Partition",
    "Seats",
    "TensorLayout",
    "Tiles",
    "as_tensor_layout",
    "full_box",
    "missing",
    "moved_elems",
    "moves",
    "shape_of",
    "sources",
    "targets",
]
