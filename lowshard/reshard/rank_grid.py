"""Which ranks hold each cell of a partition: by strides where ranks are regular, else by a list."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from lowshard.argument import brief, items, whole, wholes
from lowshard.bounded import keeps_hash
from lowshard.errors import MeshError
from lowshard.mesh import MOST_RANKS

MOST_HOLDERS = 1 << 20
"""Most ranks that hold parts of one tensor: some queries list them all."""

Axis = tuple[int, int]
"""Its size, and the stride of ranks along it."""


@keeps_hash
@dataclass(frozen=True)
class Grid:
    """Ranks as a sum of strides: `offset + sum(index * stride)` over all axes.

    Cells are row-major over dims, and within a dim over its axes, outer first; replicas over the replica axes.

    Args:
        dims: for each dim of the array the axes that shard it, outer first.
        copies: the axes along which the array is replicated.
        offset: the rank at index 0 of every axis.

    Raises:
        MeshError: strides that give one rank to two positions, or sizes below 1.
    """

    dims: tuple[tuple[Axis, ...], ...]
    copies: tuple[Axis, ...] = ()
    offset: int = 0
    cells: int = field(init=False, repr=False, compare=False)
    replicas: int = field(init=False, repr=False, compare=False)
    _radix: tuple[tuple[int, int, int, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        rule = "a grid of ranks has (size, stride) for each axis of each dim, and of its copies"
        put(self, "dims", tuple(_axes(axes, rule) for axes in items(self.dims, rule, MeshError)))
        put(self, "copies", _axes(self.copies, rule))
        put(self, "offset", whole(self.offset, "ranks begin at an offset >= 0", MeshError, 0))
        cutting = [axis for axes in self.dims for axis in axes]
        put(self, "cells", prod(n for n, _ in cutting))
        put(self, "replicas", prod(n for n, _ in self.copies))
        radix = []
        for axes, is_copy in ((cutting, 0), (list(self.copies), 1)):
            weight = 1
            for n, stride in reversed(axes):
                if n < 1 or (n > 1 and stride < 1):
                    raise MeshError(f"an axis of ranks has a size and a stride >= 1, got {(n, stride)}")
                if n > 1:
                    radix.append((stride, n, weight, is_copy))
                weight *= n
        radix.sort(reverse=True)
        reach = 0
        for stride, n, _, _ in reversed(radix):
            if stride <= reach:
                raise MeshError(
                    f"the axes {self.dims} with copies {self.copies} give one rank to two places: a stride is larger "
                    "than all that the axes inside it reach"
                )
            reach += (n - 1) * stride
        if self.cells * self.replicas > MOST_HOLDERS or self.offset + reach > MOST_RANKS:
            raise MeshError(
                f"a grid has at most {MOST_HOLDERS} ranks, none above {MOST_RANKS}: got {self.cells} cells with "
                f"{self.replicas} replicas each, up to rank {self.offset + reach}"
            )
        put(self, "_radix", tuple(radix))

    @property
    def span(self) -> tuple[int, int]:
        """The lowest rank, and one more than the highest."""
        return self.offset, self.offset + 1 + sum((n - 1) * stride for stride, n, _, _ in self._radix)

    def position(self, rank: int) -> tuple[int, int] | None:
        """Return (cell, replica) of a rank, or None if it holds nothing."""
        left = _rank(rank) - self.offset
        if left < 0:
            return None
        cell = replica = 0
        for stride, n, weight, is_copy in self._radix:
            place = left // stride
            if place >= n:
                return None
            left -= place * stride
            if is_copy:
                replica += place * weight
            else:
                cell += place * weight
        return None if left else (cell, replica)

    def count(self, cell: int) -> int:
        """Return how many ranks hold a cell."""
        _within(cell, self.cells, "cells")
        return self.replicas

    def rank(self, cell: int, replica: int) -> int:
        """Return the rank of a replica of a cell."""
        at = self.offset
        cell, replica = _within(cell, self.cells, "cells"), _within(replica, self.replicas, "replicas")
        for stride, n, weight, is_copy in self._radix:
            at += ((replica if is_copy else cell) // weight % n) * stride
        return at

    def ranks(self, cell: int) -> tuple[int, ...]:
        """Return the ranks of a cell, in the order of replicas."""
        return tuple(self.rank_array(cell).tolist())

    def rank_array(self, cell: int) -> npt.NDArray[np.int64]:
        """Return the ranks of a cell, in the order of replicas, int64."""
        return self._steps + self.rank(cell, 0)

    @cached_property
    def _steps(self) -> npt.NDArray[np.int64]:
        """The offset of each replica's rank from the first's."""
        steps = np.zeros(1, np.int64)
        for n, stride in self.copies:
            steps = (steps[:, None] + np.arange(n) * stride).reshape(-1)
        steps.flags.writeable = False
        return steps

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"dims": self.dims, "copies": self.copies, "offset": self.offset}


@keeps_hash
@dataclass(frozen=True)
class Roster:
    """Ranks by a list: for each cell its holders, in the order of replicas.

    Raises:
        MeshError: a rank with two cells, or a cell nobody holds.
    """

    holders: tuple[tuple[int, ...], ...]
    cells: int = field(init=False, repr=False, compare=False)
    replicas: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        rule = "every cell has one or more ranks >= 0, and every rank one cell"
        cells = items(self.holders, rule, MeshError)
        put(self, "holders", tuple(wholes(ranks, rule, MeshError, 0, MOST_RANKS) for ranks in cells))
        put(self, "cells", len(self.holders))
        put(self, "replicas", max((len(ranks) for ranks in self.holders), default=0))
        every = [rank for ranks in self.holders for rank in ranks]
        if not every or len(set(every)) != len(every) or not all(self.holders):
            raise MeshError(f"{rule}, got {brief(self.holders)}")

    @property
    def span(self) -> tuple[int, int]:
        """The lowest rank, and one more than the highest."""
        every = [rank for ranks in self.holders for rank in ranks]
        return min(every), max(every) + 1

    def position(self, rank: int) -> tuple[int, int] | None:
        """Return (cell, replica) of a rank, or None if it holds nothing."""
        return self._positions.get(_rank(rank))

    @cached_property
    def _positions(self) -> dict[int, tuple[int, int]]:
        return {
            rank: (cell, replica)
            for cell, ranks in enumerate(self.holders)
            for replica, rank in enumerate(ranks)
        }

    def count(self, cell: int) -> int:
        """Return how many ranks hold a cell."""
        return len(self.ranks(cell))

    def rank(self, cell: int, replica: int) -> int:
        """Return the rank of a replica of a cell."""
        ranks = self.ranks(cell)
        return ranks[_within(replica, len(ranks), "replicas")]

    def ranks(self, cell: int) -> tuple[int, ...]:
        """Return the ranks of a cell, in the order of replicas."""
        return self.holders[_within(cell, self.cells, "cells")]

    def rank_array(self, cell: int) -> npt.NDArray[np.int64]:
        """Return the ranks of a cell, in the order of replicas, int64."""
        return np.array(self.ranks(cell), np.int64)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"holders": self.holders}


def _rank(rank: int) -> int:
    # Asked many times a plan: what is an integer is not asked further.
    return rank if type(rank) is int else whole(rank, "a rank is an integer", MeshError)


def _within(number: int, count: int, what: str) -> int:
    if type(number) is int and 0 <= number < count:
        return number
    return whole(number, f"{what} are 0 to {count - 1}", MeshError, 0, count - 1)


def _axes(given: object, rule: str) -> tuple[Axis, ...]:
    axes = tuple(wholes(axis, rule, MeshError, 0) for axis in items(given, rule, MeshError))
    if any(len(axis) != 2 for axis in axes):
        raise MeshError(f"{rule}, got {brief(given)}")
    return axes  # type: ignore[return-value]  # each has two
