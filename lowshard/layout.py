"""Layout: one array's global shape and dtype, and how a mesh holds it.

A layout answers for every rank, without communication: which box of the global array it holds, its shape and its
bytes. It is defined by the spec (for each array dim the mesh axes that shard it, outer first), the split rule of each
such axis, and the op of each partial axis.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.argument import as_shape, brief, instance, items
from lowshard.box import Box, Split, shape_of, split_interval
from lowshard.content_hash import text_digest
from lowshard.errors import DTypeError, LayoutError
from lowshard.mesh import DeviceMesh
from lowshard.placement import (
    MOST_DIGITS,
    Partial,
    Placement,
    ReduceOp,
    Replicated,
    Sharded,
    check_split,
    parse_placement,
)
from lowshard.reading import reader

SpecEntry = None | str | tuple[str, ...]
Spec = tuple[SpecEntry, ...]

_TEXT = re.compile(r"(?P<dtype>[A-Za-z0-9_]+)\[(?P<shape>[0-9, ]*)\](?P<axes>(?:\s+\S+)*)\s*\Z")
_SHAPE = "a global shape is a sequence of extents >= 0 such as (1024, 4096)"
_MESH = "a layout lies on a DeviceMesh, such as DeviceMesh((2, 4), ('dp', 'tp'))"
_SCALE_PARTIAL = "a scale, or an opaque dtype, has no sum and no zero: make the layout of the values instead"


@dataclass(frozen=True, init=False)
class Layout:
    """Where each element of a global array lives on a mesh.

    Args:
        mesh: the device mesh.
        shape: global shape, one extent a dim; `()` is a 0-d array.
        dtype: any name of the dtype table.
        placements: one placement per mesh axis, in mesh order. Several axes on one dim nest in mesh
            order; `from_spec` can nest them in any order.

    Raises:
        LayoutError: wrong number of placements, a dim out of range, negative extents, or partial
            ops that do not commute (only sum and avg mix).
        DTypeError: unknown dtype, or an e8m0 Partial.
    """

    mesh: DeviceMesh
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    """For each dim: None, one axis name, or names (outer first)."""
    splits: tuple[Split, ...]
    """The split rule of each mesh axis ("balanced" for one that shards nothing)."""
    partials: tuple[ReduceOp | None, ...]
    """The op of each mesh axis that is partial, else None."""
    sharding_axes: tuple[tuple[int, ...], ...] = field(repr=False, compare=False)
    """For each dim the positions of the mesh axes that shard it, outer first."""
    _digest: str = field(repr=False, compare=False)

    def __init__(
        self, mesh: DeviceMesh, shape: Sequence[int], dtype: object, placements: Sequence[Placement]
    ) -> None:
        extents = as_shape(shape, _SHAPE, LayoutError)
        instance(mesh, DeviceMesh, _MESH, LayoutError)
        placements = items(placements, "a layout has one placement per mesh axis", LayoutError)
        if len(placements) != mesh.ndim:
            raise LayoutError(
                f"a layout has one placement per mesh axis: mesh {mesh} has {mesh.ndim}, got "
                f"{len(placements)}: ({', '.join(map(str, placements))})"
            )
        names: list[list[str]] = [[] for _ in extents]
        splits: list[Split] = []
        for axis, placement in zip(mesh.axis_names, placements, strict=True):
            if not isinstance(placement, Replicated | Sharded | Partial):
                raise LayoutError(
                    f"mesh axis {axis!r} got {brief(placement)}; write Replicated(), Sharded(dim) or Partial(op)"
                )
            splits.append(placement.split if isinstance(placement, Sharded) else "balanced")
            if isinstance(placement, Sharded):
                names[_dim(placement.dim, extents, axis)].append(axis)
        partials = tuple(p.op if isinstance(p, Partial) else None for p in placements)
        self._fill(mesh, extents, dtype, names, tuple(splits), partials)

    @classmethod
    def from_spec(
        cls,
        mesh: DeviceMesh,
        shape: Sequence[int],
        dtype: object,
        spec: Sequence[SpecEntry | Sequence[str]],
        split: Split = "balanced",
        *,
        partial: Mapping[str, ReduceOp] | None = None,
    ) -> Layout:
        """Return the layout in which each dim is sharded by the named mesh axes, outer first.

        Args:
            mesh: the device mesh.
            shape: global shape.
            dtype: any name of the dtype table.
            spec: per dim None, a mesh axis name, or names. It may be shorter than the shape: the
                dims left out are not sharded.
            split: the split rule of every sharded dim.
            partial: op by mesh axis, for axes that hold terms.

        Raises:
            LayoutError: an axis the mesh lacks, an axis used twice, more entries than dims.
        """
        extents = as_shape(shape, _SHAPE, LayoutError)
        instance(mesh, DeviceMesh, _MESH, LayoutError)
        rule = f"a spec has one entry a dim (None, a name or names): shape {extents} has {len(extents)} dims"
        entries = items(spec, rule, LayoutError)
        if len(entries) > len(extents):
            raise LayoutError(f"{rule}, got {brief(entries)}")
        names: list[list[str]] = [[] for _ in extents]
        used: dict[str, str] = {}
        for dim, entry in enumerate(entries):
            given = () if entry is None else (entry,) if isinstance(entry, str) else entry
            for axis in items(given, rule, LayoutError):
                _claim(mesh, axis, f"dim {dim}", used)
                names[dim].append(axis)
        placement: list[ReduceOp | None] = [None] * mesh.ndim
        if partial is not None and not isinstance(partial, Mapping):
            raise LayoutError(f"partial maps mesh axes to ops, got {brief(partial)}")
        for axis, op in (partial or {}).items():
            _claim(mesh, axis, "partial", used)
            placement[mesh.axis_index(axis)] = Partial(op).op
        check_split(split)
        splits: list[Split] = ["balanced"] * mesh.ndim
        for axis in used:
            if placement[mesh.axis_index(axis)] is None:
                splits[mesh.axis_index(axis)] = split
        return cls._make(mesh, extents, dtype, names, tuple(splits), tuple(placement))

    @classmethod
    def _make(
        cls,
        mesh: DeviceMesh,
        shape: tuple[int, ...],
        dtype: object,
        names: Sequence[Sequence[str]],
        splits: tuple[Split, ...],
        partials: tuple[ReduceOp | None, ...],
    ) -> Layout:
        self = cls.__new__(cls)
        self._fill(mesh, shape, dtype, names, splits, partials)
        return self

    def _fill(
        self,
        mesh: DeviceMesh,
        shape: tuple[int, ...],
        dtype: object,
        names: Sequence[Sequence[str]],
        splits: tuple[Split, ...],
        partials: tuple[ReduceOp | None, ...],
    ) -> None:
        row = dtypes.get(dtype)
        ops = {op for op in partials if op is not None}
        if len(ops) > 1 and ops != {"sum", "avg"}:
            raise LayoutError(
                f"the partial axes of one layout share one op (sum and avg may mix), got {sorted(ops)}: "
                "reduce one axis before the other becomes partial"
            )
        if ops and row.kind in ("scale", "opaque"):
            raise DTypeError(f"Partial of dtype {row.name}: {_SCALE_PARTIAL}")
        put = object.__setattr__
        put(self, "mesh", mesh)
        put(self, "shape", shape)
        put(self, "dtype", row.name)
        put(self, "spec", tuple(None if not n else n[0] if len(n) == 1 else tuple(n) for n in names))
        put(self, "splits", splits)
        put(self, "partials", partials)
        put(self, "sharding_axes", tuple(tuple(mesh.axis_index(a) for a in n) for n in names))
        put(self, "_digest", "")

    # ---- what a rank holds

    def box(self, rank: int) -> Box:
        """Return the box of the global array that a rank holds: `((start, stop), ...)`, one a dim.

        An empty shard has an interval with start == stop.

        Raises:
            MeshError: the rank is not in the mesh.
        """
        return self._box_at(self.mesh.coord(rank))

    def box_at(self, coord: Sequence[int]) -> Box:
        """Return the box at a mesh coordinate (positions along the axes, in mesh order).

        Raises:
            MeshError: wrong number of positions, or one out of range.
        """
        return self._box_at(self.mesh.coord(self.mesh.rank(coord)))

    def _box_at(self, coord: Sequence[int]) -> Box:
        box = []
        for extent, sharding_axes in zip(self.shape, self.sharding_axes, strict=True):
            interval = (0, extent)
            for axis in sharding_axes:
                interval = split_interval(interval, self.mesh.shape[axis], coord[axis], self.splits[axis])
            box.append(interval)
        return tuple(box)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's local array.

        Raises:
            MeshError: the rank is not in the mesh.
        """
        return shape_of(self.box(rank))

    def local_elems(self, rank: int) -> int:
        """Return the number of elements a rank holds.

        Raises:
            MeshError: the rank is not in the mesh.
        """
        return prod(self.local_shape(rank))

    def local_bytes(self, rank: int) -> int:
        """Return the bytes a rank holds.

        Raises:
            MeshError: the rank is not in the mesh.
        """
        return self.local_elems(rank) * self.itemsize_bytes

    # ---- the layout as a whole

    @property
    def ndim(self) -> int:
        """Number of array dims."""
        return len(self.shape)

    @property
    def size_elems(self) -> int:
        """Elements of the global array."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the global array."""
        return self.size_elems * self.itemsize_bytes

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element."""
        return dtypes.get(self.dtype).itemsize_bytes

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The NumPy dtype (ml_dtypes' for bf16, fp8, e8m0)."""
        return dtypes.get(self.dtype).numpy

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis: a view that loses the nesting order of axes on one dim."""
        found: list[Placement] = [Replicated() if op is None else Partial(op) for op in self.partials]
        for dim, sharding_axes in enumerate(self.sharding_axes):
            for axis in sharding_axes:
                found[axis] = Sharded(dim, self.splits[axis])
        return tuple(found)

    @property
    def is_replicated(self) -> bool:
        """True when every rank holds the whole array."""
        return not any(self.sharding_axes) and not any(self.partials)

    def with_placements(self, placements: Sequence[Placement]) -> Layout:
        """Return the same array with other placements on the same mesh."""
        return Layout(self.mesh, self.shape, self.dtype, placements)

    def with_shape(self, shape: Sequence[int]) -> Layout:
        """Return another array of as many dims, with the same dtype, mesh and sharding.

        Cheaper than a layout from a spec: nothing but the shape is checked.

        Raises:
            LayoutError: no shape, or one of another number of dims.
        """
        extents = as_shape(shape, _SHAPE, LayoutError)
        if len(extents) != self.ndim:
            raise LayoutError(f"{self} has {self.ndim} dims, so its shape does: got {extents}")
        made = copy.copy(self)
        object.__setattr__(made, "shape", extents)
        object.__setattr__(made, "_digest", "")
        return made

    def with_spec(self, spec: Sequence[SpecEntry | Sequence[str]], split: Split = "balanced") -> Layout:
        """Return the same array sharded by another spec on the same mesh."""
        return Layout.from_spec(self.mesh, self.shape, self.dtype, spec, split)

    # ---- text, JSON, digest

    def __str__(self) -> str:
        """One line that `parse` reads back, such as `float32[1024,4096] dp=R tp=S0`.

        Axes that shard one dim are written outer first; else axes come in mesh order.
        """
        order = list(range(self.mesh.ndim))
        for sharding_axes in self.sharding_axes:
            for slot, axis in zip(sorted(sharding_axes), sharding_axes, strict=True):
                order[slot] = axis
        placements = self.placements
        axes = " ".join(f"{self.mesh.axis_names[i]}={placements[i]}" for i in order)
        return f"{self.dtype}[{','.join(map(str, self.shape))}] {axes}"

    @classmethod
    def parse(cls, mesh: DeviceMesh, text: str) -> Layout:
        """Return the layout that `str()` wrote. Axes not named are replicated.

        Raises:
            LayoutError: the text is not of the form `dtype[shape] axis=placement ...`, or names an
                axis that the mesh lacks.
        """
        instance(mesh, DeviceMesh, _MESH, LayoutError)
        match = _TEXT.match(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise LayoutError(f"a layout reads like 'bf16[1024,4096] dp=R tp=S0', got {brief(text)}")
        parts = [p.strip() for p in match["shape"].split(",")] if match["shape"].strip() else []
        if not all(p.isdecimal() and len(p) <= MOST_DIGITS for p in parts):
            raise LayoutError(f"the shape in {brief(text)} is not a list of extents such as [1024,4096]")
        shape = as_shape(tuple(map(int, parts)), _SHAPE, LayoutError)
        names: list[list[str]] = [[] for _ in shape]
        splits: list[Split] = ["balanced"] * mesh.ndim
        partials: list[ReduceOp | None] = [None] * mesh.ndim
        used: dict[str, str] = {}
        for token in match["axes"].split():
            axis, _, placed = token.partition("=")
            _claim(mesh, axis, placed, used)
            index, placement = mesh.axis_index(axis), parse_placement(placed)
            if isinstance(placement, Sharded):
                names[_dim(placement.dim, shape, axis)].append(axis)
                splits[index] = placement.split
            elif isinstance(placement, Partial):
                partials[index] = placement.op
        return cls._make(mesh, shape, match["dtype"], names, tuple(splits), tuple(partials))

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads back."""
        return {
            "mesh": self.mesh.to_json(),
            "shape": list(self.shape),
            "dtype": self.dtype,
            "spec": [list(e) if isinstance(e, tuple) else e for e in self.spec],
            "splits": list(self.splits),
            "partials": list(self.partials),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Layout:
        """Return the layout that `to_json` wrote; invalid data raises LayoutError with its place."""
        return _read(data)

    def digest(self) -> str:
        """Return 32 hex digits that are equal for equal layouts only."""
        if not self._digest:
            text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
            object.__setattr__(self, "_digest", text_digest(text).hex())
        return self._digest


@reader("layout", LayoutError)
def _read(
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    dtype: str,
    spec: tuple[str | tuple[str, ...] | None, ...],
    splits: tuple[Split, ...],
    partials: tuple[ReduceOp | None, ...],
) -> Layout:
    if len(splits) != mesh.ndim or len(partials) != mesh.ndim:
        raise LayoutError(
            f"a layout has one entry of splits and of partials a mesh axis: {mesh.ndim}, got {len(splits)} and "
            f"{len(partials)}"
        )
    partial = {axis: op for axis, op in zip(mesh.axis_names, partials, strict=True) if op}
    made = Layout.from_spec(mesh, shape, dtype, spec, partial=partial)
    cut = {a for axes in made.sharding_axes for a in axes}
    if any(split != "balanced" and a not in cut for a, split in enumerate(splits)):
        raise LayoutError(f"the split of a mesh axis that shards nothing is 'balanced', got {splits}")
    names = [[mesh.axis_names[i] for i in axes] for axes in made.sharding_axes]
    return Layout._make(mesh, made.shape, made.dtype, names, splits, made.partials)


def _dim(dim: int, shape: tuple[int, ...], axis: str) -> int:
    if not -len(shape) <= dim < len(shape):
        what = "a 0-d array has no dim to shard" if not shape else f"dims are 0 to {len(shape) - 1}"
        raise LayoutError(f"mesh axis {axis!r} is placed on dim {dim} of an array of shape {shape}: {what}")
    return dim % len(shape)


def _claim(mesh: DeviceMesh, axis: str, place: str, used: dict[str, str]) -> None:
    mesh.axis_index(axis)
    if axis in used:
        raise LayoutError(
            f"mesh axis {axis!r} is used twice, for {used[axis]} and {place}; an axis has one placement"
        )
    used[axis] = place
