"""What each rank holds of one tensor: a partition of the array into cells, and the ranks that hold each cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from lowshard import dtypes
from lowshard.argument import as_shape, brief, instance, items, mapping, whole, wholes
from lowshard.bounded import keeps_hash
from lowshard.box import Box, Interval, full_box, intersect, moved, shape_of, split_interval
from lowshard.errors import LayoutError
from lowshard.layout import Layout
from lowshard.reading import reader
from lowshard.reshard.dim_sharding import DimSharding
from lowshard.reshard.partition import GridPartition, Partition, TilePartition
from lowshard.reshard.rank_grid import Grid, Roster
from lowshard.tiling import Tile, Tiling

_DIM_RULE = "a dim is sharded by a DimSharding, by the name of an axis, or by several names, outer first"


@keeps_hash
@dataclass(frozen=True)
class TensorLayout:
    """Where each element of a tensor lies, for the ranks of one side of a reshard.

    Args:
        dtype: any name of the dtype table.
        partition: how the array is split into cells.
        rank_map: which ranks hold each cell.

    Raises:
        LayoutError: a rank_map of another number of cells.
        DTypeError: unknown dtype.
    """

    dtype: str
    partition: Partition
    rank_map: Grid | Roster

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtypes.get(self.dtype).name)
        if not isinstance(self.partition, (GridPartition, TilePartition)) or not isinstance(
            self.rank_map, (Grid, Roster)
        ):
            raise LayoutError(
                "a tensor layout has a GridPartition or TilePartition, and a Grid or Roster as rank_map, got "
                f"{brief(self.partition)} and {brief(self.rank_map)}"
            )
        cells, rank_map = self.partition.cells, self.rank_map
        if isinstance(rank_map, Grid) and isinstance(self.partition, GridPartition):
            per_dim = [prod(n for n, _ in axes) for axes in rank_map.dims]
            wanted = [c.parts for c in self.partition.shardings]
            if per_dim != wanted:
                raise LayoutError(
                    f"a grid of ranks has as many positions a dim as its sharding has parts {wanted}, got {per_dim}"
                )
        if rank_map.cells != cells:
            raise LayoutError(f"a rank_map of {rank_map.cells} cells for a partition into {cells}")

    # ---- makers

    @classmethod
    def sharded(
        cls,
        shape: Sequence[int],
        dtype: object,
        axes: Mapping[str, tuple[int, int]],
        dims: Mapping[int, DimSharding | str | tuple[str, ...]] | None = None,
        *,
        by: Mapping[int, str | tuple[str, ...]] | None = None,
        offset: int = 0,
    ) -> TensorLayout:
        """Return the layout of an array over named axes of ranks.

        Args:
            shape: shape of the whole array.
            dtype: any name of the dtype table.
            axes: for each axis its size and the stride of its ranks; axes that shard no dim replicate.
            dims: for each sharded dim its DimSharding, or just the axis (or axes, outer first) that shard it evenly.
            by: the axes that shard a dim, where `dims` gives a `DimSharding`.
            offset: the rank at place 0 of every axis.

        Raises:
            LayoutError: an axis that is not named or used twice, or a sharding that does not fit.
            MeshError: strides that give one rank to two places.
        """
        shape = as_shape(shape, "the shape of a tensor is its extents, each 0 or more", LayoutError)
        rule = "axes is a mapping of an axis's name to its size and stride, both integers >= 1"
        given_axes = mapping(axes, rule, LayoutError)
        pairs = {name: wholes(axis, rule, LayoutError, 0) for name, axis in given_axes.items()}
        if any(len(pair) != 2 for pair in pairs.values()):
            raise LayoutError(f"{rule}, got {brief(axes)}")
        axes = {name: (pair[0], pair[1]) for name, pair in pairs.items()}
        dims = _by_dim(
            dims, len(shape), "dims is a mapping of a dim to its DimSharding, or to the axes that shard it"
        )
        by = _by_dim(by, len(shape), "by is a mapping of a dim to the axes that shard it")
        unsharded = next((dim for dim in by if not isinstance(dims.get(dim), DimSharding)), None)
        if unsharded is not None:
            raise LayoutError(
                f"by names the axes of a dim for which dims has a DimSharding, and for dim {unsharded} it has none; "
                f"an even one is dims={{{unsharded}: {brief(by[unsharded])}}}"
            )
        shardings: list[DimSharding] = []
        places: list[tuple[tuple[int, int], ...]] = []
        used: set[str] = set()
        for dim, length in enumerate(shape):
            given = dims.get(dim)
            named = by.get(dim, ()) if isinstance(given, DimSharding) else () if given is None else given
            names = (named,) if isinstance(named, str) else items(named, _DIM_RULE, LayoutError)
            for name in names:
                instance(name, str, _DIM_RULE, LayoutError)
            wrong = [n for n in names if n not in axes or n in used]
            if wrong:
                raise LayoutError(
                    f"dim {dim} is sharded over axes of {sorted(axes)}, each used once, got {list(names)}"
                )
            used.update(names)
            parts = prod(axes[n][0] for n in names)
            sharding = given if isinstance(given, DimSharding) else DimSharding(length, parts)
            if sharding.length != length or sharding.parts != parts:
                raise LayoutError(
                    f"dim {dim} of {tuple(shape)} over {list(names)} has a sharding of length {length} into {parts} "
                    f"parts, got {sharding}"
                    + (
                        ""
                        if names or sharding.parts == 1
                        else f"; name the axes that shard it: by={{{dim}: ...}}"
                    )
                )
            shardings.append(sharding)
            places.append(tuple(axes[n] for n in names))
        copies = tuple(axis for name, axis in axes.items() if name not in used and axis[0] > 1)
        return cls(
            dtypes.get(dtype).name, GridPartition(tuple(shardings)), Grid(tuple(places), copies, offset)
        )

    @classmethod
    def from_layout(cls, layout: Layout) -> TensorLayout:
        """Return the same layout as a TensorLayout.

        Raises:
            LayoutError: a partial layout: its ranks hold terms, not elements.
        """
        instance(layout, Layout, "from_layout takes a Layout", LayoutError)
        if any(layout.partials):
            raise LayoutError(f"the layout {layout} is partial: its ranks hold terms. Reduce it first")
        mesh = layout.mesh
        shardings = []
        for dim, sharding_axes in enumerate(layout.sharding_axes):
            sizes = [mesh.shape[a] for a in sharding_axes]
            shardings.append(_nested(layout.shape[dim], sizes, [layout.splits[a] for a in sharding_axes]))
        cutting = {a for axes in layout.sharding_axes for a in axes}
        rank_map: Grid | Roster
        ranks = mesh.ranks
        first = ranks[0]
        if all(r == first + i for i, r in enumerate(ranks)):
            strides = [prod(mesh.shape[i + 1 :]) for i in range(mesh.ndim)]
            rank_map = Grid(
                tuple(tuple((mesh.shape[a], strides[a]) for a in axes) for axes in layout.sharding_axes),
                tuple((mesh.shape[a], strides[a]) for a in range(mesh.ndim) if a not in cutting),
                first,
            )
        else:
            partition = GridPartition(tuple(shardings))
            held: dict[int, list[int]] = {}
            for rank in ranks:
                coord = mesh.coord(rank)
                parts = []
                for axes in layout.sharding_axes:
                    part = 0
                    for a in axes:
                        part = part * mesh.shape[a] + coord[a]
                    parts.append(part)
                held.setdefault(partition.cell(parts), []).append(rank)
            rank_map = Roster(tuple(tuple(held[c]) for c in range(partition.cells)))
        return cls(layout.dtype, GridPartition(tuple(shardings)), rank_map)

    @classmethod
    def from_tiling(cls, tiling: Tiling) -> TensorLayout:
        """Return the same tiling as a TensorLayout: ranks with the same tiles share a cell."""
        instance(tiling, Tiling, "from_tiling takes a Tiling", LayoutError)
        cells: dict[tuple[tuple[Tile, ...], tuple[int, ...]], list[int]] = {}
        for rank in tiling.ranks:
            cells.setdefault((tiling.tiles(rank), tiling.local_shape(rank)), []).append(rank)
        if not cells:
            raise LayoutError("a tiling that no rank takes part in holds nothing to move")
        partition = TilePartition(tiling.shape, tuple(t for t, _ in cells), tuple(s for _, s in cells))
        return cls(tiling.dtype, partition, Roster(tuple(map(tuple, cells.values()))))

    def with_rows(self, rows: Mapping[int, Interval]) -> TensorLayout:
        """Return the layout in which ranks hold these rows alone of their arrays; those past the end are padding."""
        if not rows:
            return self
        cells: dict[Any, list[int]] = {}
        for cell in range(self.partition.cells):
            tiles, shape = self.partition.tiles(cell), self.partition.local_shape(cell)
            for rank in self.rank_map.ranks(cell):
                start, stop = rows.get(rank, (0, shape[0]))
                box, own = ((start, stop), *full_box(shape[1:])), full_box((stop - start, *shape[1:]))
                common = [(tile, both) for tile in tiles if (both := intersect(tile.local, box)) is not None]
                kept = tuple(Tile(moved(x, t.local, t.box), moved(x, box, own)) for t, x in common)
                cells.setdefault((kept, shape_of(own)), []).append(rank)
        partition = TilePartition(self.shape, tuple(t for t, _ in cells), tuple(s for _, s in cells))
        return replace(self, partition=partition, rank_map=Roster(tuple(map(tuple, cells.values()))))

    def shifted(self, ranks: int) -> TensorLayout:
        """Return the layout with every rank's number larger by `ranks`."""
        rank_map = self.rank_map
        if isinstance(rank_map, Grid):
            return replace(self, rank_map=replace(rank_map, offset=rank_map.offset + ranks))
        moved = tuple(tuple(rank + ranks for rank in cell) for cell in rank_map.holders)
        return replace(self, rank_map=Roster(moved))

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
        return self.rank_map.position(rank) is not None

    def local_shape(self, rank: int) -> tuple[int, ...] | None:
        """Return the shape of a rank's local array, or None where it holds no part."""
        position = self.rank_map.position(rank)
        return None if position is None else self.partition.local_shape(position[0])

    def tiles(self, rank: int) -> tuple[Tile, ...]:
        """Return the boxes that a rank holds, globally and in its local array."""
        position = self.rank_map.position(rank)
        return () if position is None else self.partition.tiles(position[0])

    # ---- JSON

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads back."""
        return {"dtype": self.dtype, **self.partition.to_json(), "rank_map": self.rank_map.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorLayout:
        """Return the layout that `to_json` wrote; what is wrong raises LayoutError with its place."""
        return _read(data)

    def __str__(self) -> str:
        body = (
            ",".join(map(str, self.partition.shardings))
            if isinstance(self.partition, GridPartition)
            else f"{','.join(map(str, self.shape))} in {self.partition.cells} tiled cells"
        )
        low, high = self.rank_map.span
        copies = self.rank_map.replicas
        return (
            f"{self.dtype}[{body}] on ranks {low}..{high - 1}, {copies} {'copy' if copies == 1 else 'copies'}"
        )


def as_tensor_layout(given: object) -> TensorLayout:
    """Return a TensorLayout, Layout or Tiling as a TensorLayout."""
    if isinstance(given, TensorLayout):
        return given
    if isinstance(given, Layout):
        return TensorLayout.from_layout(given)
    if isinstance(given, Tiling):
        return TensorLayout.from_tiling(given)
    raise LayoutError(
        f"a side of a reshard is given as TensorLayout, Layout or Tiling, got {type(given).__name__}"
    )


def _by_dim(given: Mapping[int, Any] | None, ndim: int, rule: str) -> dict[int, Any]:
    if given is None:
        return {}
    rule = f"{rule}, dims 0 to {ndim - 1}"
    found = mapping(given, rule, LayoutError)
    return {whole(dim, rule, LayoutError, 0, ndim - 1): value for dim, value in found.items()}


def _nested(length: int, sizes: Sequence[int], splits: Sequence[Any]) -> DimSharding:
    """Return the sharding by several axes, each sharding the parts of the one before by its own rule."""
    if not sizes:
        return DimSharding.whole(length)
    if len(sizes) == 1:
        return DimSharding(length, sizes[0], split=splits[0])
    points = []
    for place in product(*(range(n) for n in sizes)):
        interval = (0, length)
        for n, index, split in zip(sizes, place, splits, strict=True):
            interval = split_interval(interval, n, index, split)
        points.append(interval[0])
    return DimSharding(length, prod(sizes), points=(*points, length))


@reader("tensor layout", LayoutError)
def _read(
    dtype: str,
    rank_map: Grid | Roster,
    shardings: tuple[DimSharding, ...] | None = None,
    shape: tuple[int, ...] = (),
    tiles: tuple[tuple[tuple[Box, Box], ...], ...] = (),
    local_shapes: tuple[tuple[int, ...], ...] = (),
) -> TensorLayout:
    if shardings is not None:
        if shape or tiles or local_shapes:
            raise LayoutError("a tensor layout has shardings, or shape, tiles and local_shapes, not both")
        return TensorLayout(dtype, GridPartition(shardings), rank_map)
    cells = tuple(tuple(Tile(*pair) for pair in cell) for cell in tiles)
    made = TilePartition(shape, cells, local_shapes)
    filled = tuple(shape_of(made.filled(cell)) for cell in range(min(len(cells), len(local_shapes))))
    listed = Tiling(shape, dtype, cells, filled)  # checks that the tiles fill the cells, but for padding rows
    return TensorLayout(dtype, TilePartition(listed.shape, listed.rank_tiles, local_shapes), rank_map)
