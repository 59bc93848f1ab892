"""Tiling: any number of boxes of an array on each rank; a layout has one box a rank.

A rank's local array is made of tiles. A tile says where its elements lie in the global array and in the local one: a
stacked query-key-value weight gives each rank three tiles, one behind the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from lowshard import dtypes
from lowshard.argument import as_shape, brief, instance, items, whole, wholes
from lowshard.block_format import BlockFormat
from lowshard.box import Box, covers, full_box, intersect, is_within, shape_of, volume
from lowshard.content_hash import text_digest
from lowshard.errors import LayoutError
from lowshard.layout import Layout
from lowshard.mesh import MOST_RANKS, DeviceMesh
from lowshard.reading import reader

__all__ = ["Tile", "Tiling"]


def __dir__() -> list[str]:
    return sorted(__all__)


_SHAPE = "a shape is a sequence of extents >= 0"
_LAYOUT = "a tiling is made of a Layout"
_BOX = "a tile has two boxes of integers, ((start, stop), ...)"


@dataclass(frozen=True, slots=True)
class Tile:
    """A box of the global array, and the equally shaped box of the local array that holds it."""

    box: Box
    """`((start, stop), ...)` in global coordinates."""
    local: Box
    """The same elements in the local array."""

    @property
    def elems(self) -> int:
        """Elements of the tile."""
        return volume(self.box)


@dataclass(frozen=True)
class Tiling:
    """Which boxes of a global array each rank holds, and where in its local array.

    Every element of a local array lies in exactly one tile. Ranks may hold the same boxes (replicas).
    A rank that takes no part (`rank not in tiling`) has no tiles and no local shape; one that takes
    part may hold nothing (a local shape with an extent of 0).

    Args:
        shape: global shape.
        dtype: any name of the dtype table.
        rank_tiles: for each rank its tiles; empty ones are left out.
        local_shapes: for each rank the shape of its local array, or None where it takes no part.

    Raises:
        LayoutError: a tile outside the array, or tiles that do not fill a local array exactly once.
        DTypeError: unknown dtype.
    """

    shape: tuple[int, ...]
    dtype: str
    rank_tiles: tuple[tuple[Tile, ...], ...]
    local_shapes: tuple[tuple[int, ...] | None, ...]
    _digest: list[str] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "shape", _extents(self.shape))
        put(self, "dtype", dtypes.get(self.dtype).name)
        rule = "a tiling has a sequence of tiles for each of its ranks"
        ranks = (items(tiles, rule, LayoutError) for tiles in items(self.rank_tiles, rule, LayoutError))
        put(self, "rank_tiles", tuple(tuple(t for t in map(_checked, tiles) if t.elems) for tiles in ranks))
        shapes = items(
            self.local_shapes, "a tiling has a local shape or None for each of its ranks", LayoutError
        )
        put(self, "local_shapes", tuple(None if s is None else _extents(s) for s in shapes))
        if len(self.rank_tiles) != len(self.local_shapes) or not self.rank_tiles:
            raise LayoutError(
                f"a tiling has tiles and a local shape for each of its ranks (1 or more), got "
                f"{len(self.rank_tiles)} lists of tiles and {len(self.local_shapes)} shapes"
            )
        for rank, (tiles, local_shape) in enumerate(zip(self.rank_tiles, self.local_shapes, strict=True)):
            self._check(rank, tiles, local_shape)

    # ---- makers

    @classmethod
    def from_layout(cls, layout: Layout, num_ranks: int | None = None) -> Tiling:
        """Return the tiling that a layout is: one tile a rank.

        Args:
            layout: without partial axes.
            num_ranks: ranks of the tiling; by default up to the highest of the layout's mesh.

        Raises:
            LayoutError: a partial layout (its ranks hold terms, not elements), or num_ranks too small.
        """
        if any(instance(layout, Layout, _LAYOUT, LayoutError).partials):
            raise LayoutError(f"the layout {layout} is partial: its ranks hold terms. Reduce it first")
        size = _ranks_over(layout.mesh, num_ranks)
        tiles: list[tuple[Tile, ...]] = [()] * size
        shapes: list[tuple[int, ...] | None] = [None] * size
        for rank in layout.mesh.ranks:
            box = layout.box(rank)
            shapes[rank] = shape_of(box)
            tiles[rank] = (Tile(box, full_box(shape_of(box))),)
        return cls(layout.shape, layout.dtype, tuple(tiles), tuple(shapes))

    @classmethod
    def from_pieces(
        cls, shape: Sequence[int], dtype: object, pieces: Sequence[Sequence[Box]], concat_axis: int = 0
    ) -> Tiling:
        """Return the tiling of ranks whose local array is its pieces, joined along one axis.

        Args:
            shape: global shape.
            dtype: any name of the dtype table.
            pieces: for each rank its boxes, which may be empty, in the order in which they are joined; [] for a rank
                that takes no part.
            concat_axis: the dim along which they are joined; negative counts from the end.

        Raises:
            LayoutError: no rank with a piece, a piece outside the array, or pieces of one rank that
                differ in another dim than the joined one.
        """
        shape = _extents(shape)
        ndim = len(shape)
        concat_axis = whole(concat_axis, "concat_axis is a dim (an integer)", LayoutError)
        if ndim and not -ndim <= concat_axis < ndim:
            raise LayoutError(f"concat_axis is a dim of shape {tuple(shape)}, got {concat_axis}")
        axis = concat_axis % ndim if ndim else 0
        tiles: list[tuple[Tile, ...]] = []
        shapes: list[tuple[int, ...] | None] = []
        rule = "pieces are, for each rank, a sequence of boxes of integers: ((start, stop), ...) of each dim"
        for rank, given in enumerate(items(pieces, rule, LayoutError)):
            boxes = [_box(box, rule) for box in items(given, rule, LayoutError)]
            wrong = next((box for box in boxes if len(box) != ndim), None)
            if wrong is not None:
                raise LayoutError(f"{rule}: shape {shape} has {ndim}, got {brief(wrong)} for rank {rank}")
            if not boxes:
                tiles.append(())
                shapes.append(None)
                continue
            at, mine = 0, []
            first = shape_of(boxes[0])
            for box in boxes:
                extent = shape_of(box)
                if extent[:axis] + extent[axis + 1 :] != first[:axis] + first[axis + 1 :]:
                    raise LayoutError(
                        f"rank {rank}: pieces are joined along dim {axis}, so they agree in every other; "
                        f"got shapes {first} and {extent}"
                    )
                local = tuple((at, at + n) if d == axis else (0, n) for d, n in enumerate(extent))
                mine.append(Tile(box, local))
                at += extent[axis] if ndim else 0
            tiles.append(tuple(mine))
            shapes.append((*first[:axis], at, *first[axis + 1 :]) if ndim else ())
        if shapes and not any(tiles):
            raise LayoutError(
                "a tiling whose every rank has no piece holds nothing; give one a box, perhaps an empty one"
            )
        return cls(tuple(shape), str(dtypes.get(dtype)), tuple(tiles), tuple(shapes))

    @classmethod
    def whole(cls, shape: Sequence[int], dtype: object, num_ranks: int = 1) -> Tiling:
        """Return the tiling in which each rank holds all of the array."""
        ranks = whole(num_ranks, "a tiling has 1 rank or more", LayoutError, 1)
        return cls.from_pieces(shape, dtype, [[full_box(_extents(shape))]] * ranks)

    def on_mesh(self, mesh: DeviceMesh, axis: str, num_ranks: int | None = None) -> Tiling:
        """Return the tiling of a mesh's ranks in which each holds what its place along `axis` holds here.

        Ranks that differ along other axes only hold the same.

        Raises:
            MeshError: the mesh has no such axis.
            LayoutError: the axis has another size than this tiling has ranks, or num_ranks is too small.
        """
        size = instance(mesh, DeviceMesh, "a tiling is put on a DeviceMesh", LayoutError).axis_size(axis)
        if size != self.num_ranks:
            raise LayoutError(
                f"mesh axis {axis!r} has {size} places, the tiling {self.num_ranks} ranks: make it for {size}"
            )
        total = _ranks_over(mesh, num_ranks)
        tiles: list[tuple[Tile, ...]] = [()] * total
        shapes: list[tuple[int, ...] | None] = [None] * total
        for rank in mesh.ranks:
            place = mesh.coord(rank)[mesh.axis_index(axis)]
            tiles[rank], shapes[rank] = self.rank_tiles[place], self.local_shapes[place]
        return Tiling(self.shape, self.dtype, tuple(tiles), tuple(shapes))

    def widened(self, num_ranks: int) -> Tiling:
        """Return the tiling with ranks that take no part behind its own, num_ranks in all.

        Raises:
            LayoutError: it has more ranks already.
        """
        more = _count(num_ranks) - self.num_ranks
        if more < 0:
            raise LayoutError(f"the tiling has {self.num_ranks} ranks, it cannot have {num_ranks}")
        if not more:
            return self
        return Tiling(
            self.shape, self.dtype, (*self.rank_tiles, *[()] * more), (*self.local_shapes, *[None] * more)
        )

    def stored(self, name: str, form: BlockFormat) -> dict[str, Tiling]:
        """Return the tilings of the arrays that store a tensor, by name: codes, then scales.

        Args:
            name: of the tensor.
            form: how its values are stored.

        Raises:
            ShardingError: a tile begins or ends within a block.
        """
        instance(form, BlockFormat, "form is a BlockFormat", LayoutError)
        instance(name, str, "name is text", LayoutError)
        parts: dict[str, list[tuple[Tile, ...]]] = {part: [] for part in form.stored(name, self.shape)}
        shapes: dict[str, list[tuple[int, ...] | None]] = {part: [] for part in parts}
        for tiles, local_shape in zip(self.rank_tiles, self.local_shapes, strict=True):
            there = [form.boxes(name, tile.box, self.shape) for tile in tiles]
            here = [form.boxes(name, tile.local, local_shape or ()) for tile in tiles]
            for part in parts:
                parts[part].append(tuple(Tile(a[part], b[part]) for a, b in zip(there, here, strict=True)))
                held = None if local_shape is None else form.stored(name, local_shape)[part].shape
                shapes[part].append(held)
        return {
            part: Tiling(shape, dtype, tuple(parts[part]), tuple(shapes[part]))
            for part, (dtype, shape) in form.stored(name, self.shape).items()
        }

    # ---- what a rank holds

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the tiling, those that take no part included."""
        return len(self.rank_tiles)

    def __contains__(self, rank: object) -> bool:
        """Return True for a rank that takes part."""
        try:
            number = rank if type(rank) is int else whole(rank, "a rank is an integer", LayoutError)
        except LayoutError:
            return False
        return 0 <= number < self.num_ranks and self.local_shapes[number] is not None

    @property
    def ranks(self) -> Iterator[int]:
        """The ranks that take part, ascending."""
        return (r for r, shape in enumerate(self.local_shapes) if shape is not None)

    def tiles(self, rank: int) -> tuple[Tile, ...]:
        """Return a rank's tiles, none empty, in the order they were given; () where it takes no part.

        Raises:
            LayoutError: the rank is not one of the tiling's.
        """
        return self.rank_tiles[self._rank(rank)]

    def places(self, rank: int, box: Box) -> Iterator[tuple[Box, Box]]:
        """Yield each part of a box that a rank holds: in global coordinates, and in those of its local array.

        Raises:
            LayoutError: the rank is not one of the tiling's, or the box has not its dims.
        """
        rule = f"a box has a pair of integers for each of the dims of {self.shape}: ((start, stop), ...)"
        box = _box(box, rule)
        if len(box) != len(self.shape):
            raise LayoutError(f"{rule}, got {brief(box)}")
        for tile in self.tiles(rank):
            common = intersect(tile.box, box)
            if common is not None:
                moves = zip(common, tile.box, tile.local, strict=True)
                yield common, tuple((a - lo + at, b - lo + at) for (a, b), (lo, _), (at, _) in moves)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's local array.

        Raises:
            LayoutError: the rank is not one of the tiling's, or takes no part.
        """
        shape = self.local_shapes[self._rank(rank)]
        if shape is None:
            raise LayoutError(f"rank {rank} takes no part in this tiling, so it has no local array")
        return shape

    def local_elems(self, rank: int) -> int:
        """Return the number of elements a rank holds; 0 where it takes no part."""
        shape = self.local_shapes[self._rank(rank)]
        return 0 if shape is None else prod(shape)

    def local_bytes(self, rank: int) -> int:
        """Return the bytes a rank holds; 0 where it takes no part."""
        return self.local_elems(rank) * self.itemsize_bytes

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element."""
        return dtypes.get(self.dtype).itemsize_bytes

    @property
    def size_elems(self) -> int:
        """Elements of the global array."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the global array."""
        return self.size_elems * self.itemsize_bytes

    # ---- the tiling as a whole

    @property
    def is_cover(self) -> bool:
        """True when every element of the global array is on some rank, so that it can be a source."""
        boxes = dict.fromkeys(t.box for tiles in self.rank_tiles for t in tiles)
        return covers(boxes, full_box(self.shape))

    def holders(self) -> dict[Box, tuple[int, ...]]:
        """Return the ranks that hold each distinct box, ascending; boxes in the order they are met."""
        found: dict[Box, list[int]] = {}
        for rank, tiles in enumerate(self.rank_tiles):
            for tile in tiles:
                ranks = found.setdefault(tile.box, [])
                if not ranks or ranks[-1] != rank:
                    ranks.append(rank)
        return {box: tuple(ranks) for box, ranks in found.items()}

    def __str__(self) -> str:
        """One line: `bfloat16[42,14] over 3 ranks, 9 tiles`."""
        count = sum(map(len, self.rank_tiles))
        return f"{self.dtype}[{','.join(map(str, self.shape))}] over {self.num_ranks} ranks, {count} tiles"

    # ---- JSON, digest

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads back."""
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "tiles": [[[_list(t.box), _list(t.local)] for t in tiles] for tiles in self.rank_tiles],
            "local_shapes": [None if s is None else list(s) for s in self.local_shapes],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Tiling:
        """Return the tiling that `to_json` wrote; invalid data raises LayoutError with its place."""
        return _read(data)

    def digest(self) -> str:
        """Return 32 hex digits that are equal for equal tilings only."""
        if not self._digest:
            text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
            self._digest.append(text_digest(text).hex())
        return self._digest[0]

    def _rank(self, rank: int) -> int:
        return whole(
            rank, f"the tiling has ranks 0 to {self.num_ranks - 1}", LayoutError, 0, self.num_ranks - 1
        )

    def _check(self, rank: int, tiles: Sequence[Tile], local_shape: tuple[int, ...] | None) -> None:
        if local_shape is None:
            if tiles:
                raise LayoutError(f"rank {rank} takes no part (its local shape is None) but has tiles")
            return
        if len(local_shape) != len(self.shape):
            raise LayoutError(f"rank {rank}: local shape {local_shape} has other dims than {self.shape}")
        for tile in tiles:
            if not is_within(tile.box, self.shape) or not is_within(tile.local, local_shape):
                raise LayoutError(
                    f"rank {rank}: a tile lies inside the array {self.shape} and the local array "
                    f"{local_shape}, got {tile}"
                )
            if shape_of(tile.box) != shape_of(tile.local):
                raise LayoutError(f"rank {rank}: both boxes of a tile have one shape, got {tile}")
        twice = any(intersect(a.local, b.local) for i, a in enumerate(tiles) for b in tiles[:i])
        if twice or sum(t.elems for t in tiles) != prod(local_shape):
            raise LayoutError(
                f"rank {rank}: every element of the local array {local_shape} lies in exactly one tile, "
                f"got {[t.local for t in tiles]}"
            )


def _list(box: Box) -> list[list[int]]:
    return [list(interval) for interval in box]


@reader("tiling", LayoutError)
def _read(
    shape: tuple[int, ...],
    dtype: str,
    tiles: tuple[tuple[tuple[Box, Box], ...], ...],
    local_shapes: tuple[tuple[int, ...] | None, ...],
) -> Tiling:
    return Tiling(shape, dtype, tuple(tuple(Tile(*pair) for pair in mine) for mine in tiles), local_shapes)


def _extents(shape: Sequence[int]) -> tuple[int, ...]:
    return as_shape(shape, _SHAPE, LayoutError)


def _checked(tile: object) -> Tile:
    """Return a tile whose boxes are pairs of Python integers, or raise LayoutError."""
    given = instance(tile, Tile, _BOX, LayoutError)
    box, local = _box(given.box, _BOX), _box(given.local, _BOX)
    return given if box is given.box and local is given.local else Tile(box, local)


def _box(box: object, rule: str) -> Box:
    """Return a box as pairs of Python integers, or raise LayoutError."""
    if type(box) is tuple and all(map(_is_plain, box)):
        return box
    pairs = [wholes(pair, rule, LayoutError) for pair in items(box, rule, LayoutError)]
    if any(len(pair) != 2 for pair in pairs):
        raise LayoutError(f"{rule}, got {brief(box)}")
    return tuple((start, stop) for start, stop in pairs)


def _is_plain(pair: object) -> bool:
    return type(pair) is tuple and len(pair) == 2 and type(pair[0]) is int and type(pair[1]) is int


def _ranks_over(mesh: DeviceMesh, num_ranks: object) -> int:
    """Return the number of ranks of a tiling over a mesh; by default up to the mesh's highest."""
    needed = mesh.world_size
    size = needed if num_ranks is None else _count(num_ranks)
    if size < needed:
        raise LayoutError(f"mesh {mesh} names rank {needed - 1}, the tiling has {size} ranks")
    return size


def _count(num_ranks: object) -> int:
    return whole(num_ranks, "num_ranks is a number of ranks", LayoutError, 0, MOST_RANKS)
