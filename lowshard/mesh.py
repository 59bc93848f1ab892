"""DeviceMesh: named axes over ranks. A value without processes or devices."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import numpy as np

from lowshard.argument import brief, items, whole, wholes
from lowshard.errors import MeshError
from lowshard.nearest import nearest
from lowshard.reading import reader

MOST_RANKS = (1 << 31) - 1
"""Most ranks in a mesh, and the highest rank number: MPI counts them in a C int."""
_MOST_BYTES = 1 << 63
_AXES = "mesh axes are given as a name or as names"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*\Z")


@dataclass(frozen=True, init=False)
class DeviceMesh:
    """A grid of ranks with named axes; ranks run row-major (the last axis varies fastest).

    Args:
        shape: ranks along each axis, all >= 1.
        axis_names: one distinct name an axis.
        memory_budget_bytes_per_device: bytes a solver may plan for on each device, or a mapping of
            rank to bytes, or None for no limit. The mapping may name ranks outside the mesh, which decide nothing.
        ranks: the communicator rank at each row-major mesh position; None means 0, 1, 2, ...
            Two meshes with other ranks describe, say, a training and a serving half of one world.

    Raises:
        MeshError: no axis, sizes below 1, names missing or repeated, ranks repeated or too few.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    memory_budget_bytes_per_device: int | float | tuple[tuple[int, float], ...] | None
    ranks: tuple[int, ...] | range
    _strides: tuple[int, ...] = field(repr=False, compare=False)
    _index: Mapping[int, int] | None = field(repr=False, compare=False)

    def __init__(
        self,
        shape: Sequence[int],
        axis_names: Sequence[str],
        memory_budget_bytes_per_device: float | Mapping[int, float] | None = None,
        *,
        ranks: Sequence[int] | None = None,
    ) -> None:
        rule = "a mesh has at least one axis and every size is an integer >= 1"
        shape = wholes(shape, rule, MeshError, 1, MOST_RANKS)
        size = prod(shape)
        if not shape or size > MOST_RANKS:
            raise MeshError(f"{rule}, with at most {MOST_RANKS} ranks in all; got {brief(shape)}")
        rule = "a mesh has one name an axis, such as ('dp', 'tp')"
        names = (axis_names,) if isinstance(axis_names, str) else items(axis_names, rule, MeshError)
        if len(names) != len(shape):
            raise MeshError(f"{rule}: {len(shape)} sizes {shape}, {len(names)} names {brief(names)}")
        for name in names:
            if not isinstance(name, str) or not _NAME.match(name):
                raise MeshError(f"a mesh axis name is an identifier such as 'dp', got {brief(name)}")
        if len(set(names)) != len(names):
            raise MeshError(f"mesh axis names must differ, got {names}")
        order: tuple[int, ...] | range = range(size)
        if ranks is not None and not (isinstance(ranks, range) and ranks == order):
            rule = f"a mesh of shape {shape} takes {size} distinct ranks >= 0"
            order = wholes(ranks, rule, MeshError, 0, MOST_RANKS)
            if len(order) != size or len(set(order)) != size:
                raise MeshError(f"{rule}, got {brief(order)}")
            if order == tuple(range(size)):
                order = range(size)
        budget = _budget(memory_budget_bytes_per_device)
        put = object.__setattr__
        put(self, "shape", shape)
        put(self, "axis_names", names)
        put(self, "memory_budget_bytes_per_device", budget)
        put(self, "ranks", order)
        put(self, "_strides", tuple(prod(shape[i + 1 :]) for i in range(len(shape))))
        put(self, "_index", None if isinstance(order, range) else {r: i for i, r in enumerate(order)})

    @property
    def size(self) -> int:
        """Number of ranks in the mesh."""
        return prod(self.shape)

    @property
    def world_size(self) -> int:
        """Ranks of the smallest communicator that holds the mesh: its highest rank and one."""
        return (self.ranks[-1] if isinstance(self.ranks, range) else max(self.ranks)) + 1

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def axis_index(self, name: str) -> int:
        """Return the position of an axis.

        Raises:
            MeshError: the mesh has no such axis; the text has the names there are.
        """
        try:
            return self.axis_names.index(name)
        except ValueError:
            raise MeshError(
                f"mesh {self} has no axis {brief(name)}; its axes are {', '.join(self.axis_names)}"
                f"{nearest(name, self.axis_names, 1)}"
            ) from None

    def axis_size(self, name: str | Sequence[str]) -> int:
        """Return the number of ranks along one axis, or the product over several.

        Raises:
            MeshError: the mesh has no such axis.
        """
        if isinstance(name, str):
            return self.shape[self.axis_index(name)]
        return prod(self.shape[self.axis_index(n)] for n in items(name, _AXES, MeshError, any_order=True))

    def __contains__(self, rank: object) -> bool:
        try:
            number = rank if type(rank) is int else whole(rank, "a rank is an integer", MeshError)
        except MeshError:
            return False
        return number in (self.ranks if self._index is None else self._index)

    def coord(self, rank: int) -> tuple[int, ...]:
        """Return a rank's position along each axis.

        Raises:
            MeshError: the rank is not in the mesh.
        """
        number = whole(rank, "a rank is an integer", MeshError)
        index = number if self._index is None else self._index.get(number, -1)
        if not 0 <= index < self.size:
            raise MeshError(f"rank {rank} is not in mesh {self}, which holds {_brief(self.ranks)}")
        return tuple(index // s % n for s, n in zip(self._strides, self.shape, strict=True))

    def rank(self, coord: Sequence[int]) -> int:
        """Return the rank at a position, row-major.

        Raises:
            MeshError: wrong number of positions, or one out of range.
        """
        coord = wholes(coord, "a coordinate is one integer an axis", MeshError)
        if len(coord) != self.ndim or not all(0 <= c < n for c, n in zip(coord, self.shape, strict=False)):
            raise MeshError(f"coordinate {coord} is not in mesh {self} of shape {self.shape}")
        return self.ranks[sum(c * s for c, s in zip(coord, self._strides, strict=True))]

    def groups(self, name: str | Sequence[str]) -> list[tuple[int, ...]]:
        """Return the ranks that differ only along the named axis (or axes): one tuple a group.

        Within a group, ranks follow the axes as named, the last fastest; groups follow the rest of
        the mesh, row-major.

        Raises:
            MeshError: the mesh has no such axis, or one is named twice.
        """
        names = (name,) if isinstance(name, str) else items(name, _AXES, MeshError)
        inner = [self.axis_index(n) for n in names]
        if len(set(inner)) != len(inner):
            raise MeshError(f"groups takes each axis once, got {names}")
        outer = [i for i in range(self.ndim) if i not in inner]
        found = []
        for fixed in product(*(range(self.shape[i]) for i in outer)):
            coord = [0] * self.ndim
            for i, c in zip(outer, fixed, strict=True):
                coord[i] = c
            members = []
            for moving in product(*(range(self.shape[i]) for i in inner)):
                for i, c in zip(inner, moving, strict=True):
                    coord[i] = c
                members.append(self.rank(coord))
            found.append(tuple(members))
        return found

    def memory_budget_for(self, rank: int) -> float | None:
        """Return the budget in bytes of one rank, or None when it has none."""
        budget = self.memory_budget_bytes_per_device
        rank = whole(rank, "a rank is an integer", MeshError)
        return dict(budget).get(rank) if isinstance(budget, tuple) else budget

    @property
    def smallest_budget_bytes(self) -> int | float | None:
        """The least budget in bytes of any rank, or None."""
        budget = self.memory_budget_bytes_per_device
        if isinstance(budget, tuple):
            return min((size for rank, size in budget if rank in self), default=None)
        return budget

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads back."""
        data: dict[str, Any] = {"shape": list(self.shape), "axis_names": list(self.axis_names)}
        if not isinstance(self.ranks, range):
            data["ranks"] = list(self.ranks)
        budget = self.memory_budget_bytes_per_device
        if budget is not None:
            data["memory_budget_bytes_per_device"] = (
                {str(r): b for r, b in budget} if isinstance(budget, tuple) else budget
            )
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DeviceMesh:
        """Return the mesh that `to_json` wrote; what is wrong raises MeshError with its place."""
        return _read(data)

    def __str__(self) -> str:
        return " ".join(f"{n}={s}" for n, s in zip(self.axis_names, self.shape, strict=True))

    def __hash__(self) -> int:
        return hash((self.shape, self.axis_names, self.memory_budget_bytes_per_device, self.ranks))


@reader("mesh", MeshError)
def _read(
    shape: tuple[int, ...],
    axis_names: tuple[str, ...],
    ranks: tuple[int, ...] | None = None,
    memory_budget_bytes_per_device: float | Mapping[int, float] | None = None,
) -> DeviceMesh:
    return DeviceMesh(shape, axis_names, memory_budget_bytes_per_device, ranks=ranks)


def _budget(given: object) -> int | float | tuple[tuple[int, float], ...] | None:
    """Return a normalised budget: one number, None, or (rank, bytes) by rank."""
    if isinstance(given, Mapping):
        rule = "a memory budget by device has ranks >= 0 for keys"
        rows = [(whole(rank, rule, MeshError, 0), _bytes(size)) for rank, size in given.items()]
        return tuple(sorted(rows))
    return None if given is None else _bytes(given)


def _bytes(given: Any) -> int | float:
    """Return a number of bytes, as an integer if whole: equal meshes have equal JSON."""
    number = given.item() if isinstance(given, np.number) else given
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < _MOST_BYTES:
        raise MeshError(f"a memory budget is a number of bytes from 0, below 2^63, got {brief(given)}")
    return int(number) if number == int(number) else number


def _brief(ranks: Sequence[int]) -> str:
    if isinstance(ranks, range):
        return f"ranks 0 to {len(ranks) - 1}"
    return f"ranks {list(ranks)}" if len(ranks) <= 8 else f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"
