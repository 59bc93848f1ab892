"""Data whose right result every rank knows: a table of values a rank, repeated, and what reductions make of it.

Values repeat after a prime number of elements, which divides no block size: an element that lands in a wrong place
is a wrong element. Exact data are small integers (in floats too), such that every partial result is an integer that
the type holds: whatever order a reduction takes, each element must come out to the bit. Random data are floats of
all magnitudes; a reduction of them may differ from the exact result by what rounding in any order can do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.errors import LowshardError

Array = Any  # a NumPy or CuPy array

PERIOD = 10_007
_TILES = 64  # a block holds so many periods: 640 thousand elements
_MOST_VALUE = 96

# Integers that a type holds without a gap go up to two to this power.
_BITS = {
    "float64": 53, "float32": 24, "float16": 11, "bfloat16": 8, "int8": 7, "uint8": 8, "int16": 15, "uint16": 16,
    "int32": 31, "uint32": 32, "int64": 63, "uint64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Segment:
    """A stretch of a result: `count` elements from `start` on are those of `table` from `first` on."""

    start: int
    count: int
    table: int | None
    first: int = 0


class Pattern:
    """The buffers of all ranks for one check."""

    def __init__(self, dtype: str, ranks: int, redop: str | None, seed: int = 0, exact: bool = True) -> None:
        self.dtype = dtypes.get(dtype).numpy
        self.ranks, self.redop, self.exact = ranks, redop, exact or not is_float(dtype)
        self._name = dtypes.get(dtype).name
        rng = np.random.default_rng([seed, ranks, int(self.exact)])
        wide = self._integers(rng) if self.exact else self._floats(rng)
        self.values = wide.astype(self.dtype)  # [ranks, PERIOD]

    def _integers(self, rng: np.random.Generator) -> np.ndarray[Any, Any]:
        limit = 2 ** _BITS[self._name] - 1
        if self.redop == "prod":
            # Of each group of ranks one may hold a 2, so the product keeps within the type.
            groups = min(self.ranks, int(math.log2(limit)))
            twos = rng.integers(0, 2, (groups, PERIOD))
            holder = rng.integers(0, -(-self.ranks // groups), (groups, PERIOD))
            values = np.ones((self.ranks, PERIOD), np.int64)
            for group in range(groups):
                members = range(group, self.ranks, groups)
                for place, rank in enumerate(members):
                    values[rank] += twos[group] * (holder[group] % len(members) == place)
            return values
        most = min(_MOST_VALUE, limit if self.redop in (None, "min", "max") else limit // self.ranks)
        if most < 1:
            raise LowshardError(
                f"results are checked with whole numbers, and {self._name} holds no {self.redop} of them over "
                f"{self.ranks} ranks; take a wider -d"
            )
        return rng.integers(0, most + 1, (self.ranks, PERIOD))

    def _floats(self, rng: np.random.Generator) -> np.ndarray[Any, Any]:
        values = rng.standard_normal((self.ranks, PERIOD))
        if self.redop == "prod":  # near 1, so that many factors neither vanish nor overflow
            return np.exp2(np.clip(values, -2, 2) / self.ranks)
        return values * np.exp2(rng.integers(-6, 7, (self.ranks, PERIOD)))

    @cached_property
    def reduced(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
        """The reduction over ranks [PERIOD], and how far a result may be from it (None: not at all)."""
        name = self.redop
        if name in ("min", "max"):
            return (self.values.min(axis=0) if name == "min" else self.values.max(axis=0)), None
        kind = dtypes.get(self._name).kind
        wide = self.values.astype({"int": np.int64, "uint": np.uint64}.get(kind, np.float64))
        total = wide.prod(axis=0) if name == "prod" else wide.sum(axis=0)
        if name == "avg":
            total = total // wide.dtype.type(self.ranks) if kind in ("int", "uint") else total / self.ranks
        if self.exact:
            return total.astype(self.dtype), None
        # Any order of n - 1 sums, one rounding each, of partial results no larger than the sum of magnitudes; one
        # more for the division, one for the result.
        rounding = 1.01 * 2.0 ** -_BITS[self._name]
        if self._name == "float64":  # what it is compared with was itself rounded as often
            rounding *= 2
        size = np.abs(total) if name == "prod" else np.abs(wide).sum(axis=0)
        if name == "avg":
            size = size / self.ranks
        return total, (self.ranks + 1) * rounding * size + _SMALLEST[self._name]

    # ---- buffers

    def fill(self, buf: Array, rank: int) -> None:
        """Write a rank's values into a flat buffer."""
        for part, block in _blocks(buf, self.values[rank], 0):
            part[...] = block if isinstance(part, np.ndarray) else _like(part, block)

    def wrong(self, buf: Array, segments: Sequence[Segment]) -> int:
        """Return how many elements of a flat result are not what they must be."""
        count = 0
        for segment in segments:
            part = buf[segment.start : segment.start + segment.count]
            if segment.table is None:
                want, bound = self.reduced
            else:
                want, bound = self.values[segment.table], None
            bounds = None if bound is None else _blocks(part, bound, segment.first)
            for piece, expected in _blocks(part, want, segment.first):
                got = piece if isinstance(piece, np.ndarray) else piece.get()
                if bounds is None:
                    count += int(np.count_nonzero(got != expected))
                else:
                    _, near = next(bounds)
                    # Written so that a NaN is wrong too.
                    count += got.size - int(
                        np.count_nonzero(np.abs(got.astype(np.float64) - expected) <= near)
                    )
        return count


def spoil(buf: Array) -> None:
    """Fill a flat buffer with what no result holds: -1, the largest unsigned number, NaN."""
    buf.view(np.uint8).fill(0xFF)


def is_float(dtype: str) -> bool:
    """Return whether an element type is a float."""
    return dtypes.get(dtype).kind == "float"


# Half of the smallest number apart from 0: what a result that underflows may lose.
_SMALLEST = {"float64": 0.0, "float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}


def _blocks(
    buf: Array, table: np.ndarray[Any, Any], first: int
) -> Iterator[tuple[Array, np.ndarray[Any, Any]]]:
    """Yield stretches of a buffer, each with the table's values for it, the first of them being `first`."""
    tile = np.tile(np.roll(table, -(first % PERIOD)), min(_TILES, -(-buf.size // PERIOD)))
    for start in range(0, buf.size, max(tile.size, 1)):
        part = buf[start : start + tile.size]
        yield part, tile[: part.size]


def _like(part: Array, block: np.ndarray[Any, Any]) -> Array:
    import cupy

    with part.device:
        return cupy.asarray(block)
