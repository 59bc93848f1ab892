"""Run tables: boxes as strided runs, the common input of all strided kernels on CPU and GPU.

A run is a range of elements that is contiguous on both sides, source and target. The runs of a box repeat along at
most four outer dims, each with a count and a byte stride a side. So packing, unpacking, quantising a slice and
quantising a whole array are the same loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from lowshard.bounded import bounded_cache

MAX_OUTER_DIMS = 4
"""Outer dims of a table; a box with more is split into several."""

SRC_OFFSET, DST_OFFSET, RUN, FIRST_DIM = 0, 1, 2, 3
"""Rows of `RunTable.columns`; from FIRST_DIM on three rows an outer dim: count, source and target stride."""


@dataclass(frozen=True, eq=False)
class RunTable:
    """Every run of a list of boxes, in boxes of up to four outer dims. Compares by identity.

    Attributes:
        columns: int64 [3 + 3 * outer_dims, boxes], read-only, C-contiguous: source offset in bytes, target offset
            in bytes, elements a run, then for each outer dim, innermost first, count, source stride in bytes
            and target stride in bytes. Columns a kernel does not need are never read.
        src_itemsize: bytes of an element on the side that is read.
        dst_itemsize: bytes of an element on the side that is written.
        derived: what an engine makes of the table once and uses again (a copy on a GPU, say), by its own key.
    """

    columns: npt.NDArray[np.int64]
    src_itemsize: int
    dst_itemsize: int
    derived: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def boxes(self) -> int:
        """Boxes of the table; empty ones are left out."""
        return len(self.columns[0])

    @property
    def outer_dims(self) -> int:
        """Outer dims of the box that has most; others have count 1 there."""
        return (len(self.columns) - FIRST_DIM) // 3

    @cached_property
    def elems(self) -> npt.NDArray[np.int64]:
        """Elements of each box, int64 [boxes]."""
        product: npt.NDArray[np.int64] = self.columns[RUN].copy()
        for row in range(FIRST_DIM, len(self.columns), 3):
            product *= self.columns[row]
        return product

    @cached_property
    def total_elems(self) -> int:
        """Elements of all boxes."""
        return int(self.elems.sum())

    @cached_property
    def run_limits_bytes(self) -> tuple[int, int]:
        """Bytes of the shortest and of the longest run on the source side; zeros if there is none."""
        run = self.columns[RUN] if self.boxes else np.zeros(1, np.int64)
        return int(run.min()) * self.src_itemsize, int(run.max()) * self.src_itemsize

    @cached_property
    def dst_is_gapless(self) -> bool:
        """Whether the runs, in their order, fill one contiguous range of the target."""
        return self._is_gapless(DST_OFFSET, 2, self.dst_itemsize)

    @cached_property
    def src_is_gapless(self) -> bool:
        """Whether the runs, in their order, fill one contiguous range of the source."""
        return self._is_gapless(SRC_OFFSET, 1, self.src_itemsize)

    @cached_property
    def run_divisor_elems(self) -> int:
        """Largest number of elements that divides every run; 0 if there is none."""
        return int(np.gcd.reduce(self.columns[RUN])) if self.boxes else 0

    @cached_property
    def src_divisor_bytes(self) -> int:
        """Largest power of two, up to 4096, that divides every run's first byte and length in the source."""
        return self._divisor_bytes(SRC_OFFSET, 1, self.src_itemsize)

    @cached_property
    def dst_divisor_bytes(self) -> int:
        """The same for the target."""
        return self._divisor_bytes(DST_OFFSET, 2, self.dst_itemsize)

    def _is_gapless(self, offset_row: int, stride_row: int, itemsize: int) -> bool:
        length = self.columns[RUN] * itemsize
        for row in range(FIRST_DIM, len(self.columns), 3):
            count, step = self.columns[row], self.columns[row + stride_row]
            if ((count > 1) & (step != length)).any():
                return False
            length = length * count
        offsets = self.columns[offset_row]
        return bool((offsets[1:] == offsets[:-1] + length[:-1]).all())

    def _divisor_bytes(self, offset_row: int, stride_row: int, itemsize: int) -> int:
        bits = int(np.bitwise_or.reduce(self.columns[offset_row])) if self.boxes else 0
        bits |= int(np.bitwise_or.reduce(self.columns[RUN] * itemsize)) if self.boxes else 0
        for row in range(FIRST_DIM, len(self.columns), 3):
            repeated = self.columns[row] > 1
            bits |= int(np.bitwise_or.reduce(self.columns[row + stride_row][repeated], initial=0))
        return min(4096, bits & -bits) if bits else 4096


def lower(
    extents: npt.NDArray[np.int64],
    src_offsets: npt.NDArray[np.int64],
    dst_offsets: npt.NDArray[np.int64],
    src_strides: npt.NDArray[np.int64],
    dst_strides: npt.NDArray[np.int64],
    src_itemsize: int,
    dst_itemsize: int,
) -> RunTable:
    """Return the runs of boxes: dims that are contiguous on both sides are merged into one."""
    full = np.flatnonzero((extents > 0).all(axis=1))
    extents, src_strides, dst_strides = extents[full], src_strides[full], dst_strides[full]
    boxes, dims = extents.shape
    # Level 0 is the run; a dim either continues the level below it or opens the next one.
    count = np.ones((boxes, dims + 1), np.int64)
    src = np.zeros((boxes, dims + 1), np.int64)
    dst = np.zeros((boxes, dims + 1), np.int64)
    src[:, 0], dst[:, 0] = src_itemsize, dst_itemsize
    top = np.zeros(boxes, np.int64)
    every = np.arange(boxes)
    for dim in range(dims - 1, -1, -1):
        extent, src_step, dst_step = extents[:, dim], src_strides[:, dim], dst_strides[:, dim]
        top_count = count[every, top]
        continues = (src_step == top_count * src[every, top]) & (dst_step == top_count * dst[every, top])
        joined = np.flatnonzero((extent > 1) & continues)
        count[joined, top[joined]] *= extent[joined]
        opened = np.flatnonzero((extent > 1) & ~continues)
        top[opened] += 1
        count[opened, top[opened]] = extent[opened]
        src[opened, top[opened]], dst[opened, top[opened]] = src_step[opened], dst_step[opened]
    levels = int(top.max(initial=0))
    rows = [src_offsets[full], dst_offsets[full], count[:, 0]]
    for level in range(1, levels + 1):
        rows += [count[:, level], src[:, level], dst[:, level]]
    columns = np.array(rows, np.int64).reshape(FIRST_DIM + 3 * levels, boxes)
    while len(columns) > FIRST_DIM + 3 * MAX_OUTER_DIMS:
        columns = _unrolled(columns)
    columns.flags.writeable = False
    return RunTable(columns, src_itemsize, dst_itemsize)


@bounded_cache(1 << 20)
def whole_array_runs(
    shape: tuple[int, ...],
    src_strides: tuple[int, ...],
    dst_strides: tuple[int, ...],
    src_itemsize: int,
    dst_itemsize: int,
    dst_offset: int = 0,
) -> RunTable:
    """Return the runs of one box that is a whole array, strides in bytes."""
    return lower(
        np.array([shape], np.int64).reshape(1, -1),
        np.zeros(1, np.int64),
        np.array([dst_offset], np.int64),
        np.array([src_strides], np.int64).reshape(1, -1),
        np.array([dst_strides], np.int64).reshape(1, -1),
        src_itemsize,
        dst_itemsize,
    )


def _unrolled(columns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Turn the outermost dim of every box into separate boxes."""
    count, src_step, dst_step = columns[-3:]
    box = np.repeat(np.arange(columns.shape[1]), count)
    index = np.arange(len(box)) - np.repeat(np.cumsum(count) - count, count)
    rest: npt.NDArray[np.int64] = columns[:-3, box].copy()
    rest[SRC_OFFSET] += index * src_step[box]
    rest[DST_OFFSET] += index * dst_step[box]
    return rest
