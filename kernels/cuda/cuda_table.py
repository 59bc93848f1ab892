"""Run tables as the CUDA kernels read them: one block of memory with records, first units and a map.

Units (an MX block, eight elements, sixteen bytes) of all boxes are numbered through. A kernel finds the box of a
unit through the map, and its place in the box by exact division with magic numbers. See runs.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowshard.kernels.runs import DST_OFFSET, FIRST_DIM, RUN, SRC_OFFSET, RunTable

MAX_BOX_UNITS = 1 << 30
"""Most units of a box; a larger one is halved. Its divisions have 31 bits."""

_FEW_BOXES = 4  # in a stretch of the map; more take more steps of a search
_LEAST_SHIFT, _MOST_SHIFT = 3, 16
_SMALL_MAP = 1 << 16  # entries that need no excuse


@dataclass(frozen=True, eq=False)
class UnitTable:
    """A run table split into units."""

    words: npt.NDArray[np.int64]
    boxes: int
    dims: int
    map_shift: int
    units: int


def unit_table(runs: RunTable, unit_items: int, bytes_as_items: bool = False) -> UnitTable:
    """Return a run table with its runs split into units of `unit_items`; the last unit of a run may hold fewer."""
    item_bytes = (1, 1) if bytes_as_items else (runs.src_itemsize, runs.dst_itemsize)
    columns = runs.columns
    if bytes_as_items:
        columns = columns.copy()
        columns[RUN] *= runs.src_itemsize
    columns = _split(columns, unit_items, item_bytes)
    boxes, dims = columns.shape[1], (columns.shape[0] - FIRST_DIM) // 3
    run_units = -(-columns[RUN] // unit_items)
    units = run_units.copy()
    for row in range(FIRST_DIM, len(columns), 3):
        units *= columns[row]
    starts = np.zeros(boxes + 1, np.int64)
    np.cumsum(units, out=starts[1:])

    # A record: offsets; run and its magic, shift and tail; then a dim's count, magic, shift and strides.
    record = np.zeros((boxes, 4 + 4 * dims), np.int64)
    record[:, 0], record[:, 1] = columns[SRC_OFFSET], columns[DST_OFFSET]
    small = record.view(np.uint32).reshape(boxes, -1)
    _set_divisor(small[:, 4:], run_units)
    small[:, 7] = columns[RUN] - (run_units - 1) * unit_items
    for dim in range(dims):
        count, src_stride, dst_stride = columns[FIRST_DIM + 3 * dim : FIRST_DIM + 3 * dim + 3]
        _set_divisor(small[:, 8 + 8 * dim :], count)
        record[:, 6 + 4 * dim], record[:, 7 + 4 * dim] = src_stride, dst_stride

    shift, entries = _map(starts)
    words = np.zeros(record.size + len(starts) + (len(entries) + 1) // 2, np.int64)
    words[: record.size] = record.reshape(-1)
    words[record.size : record.size + len(starts)] = starts
    words[record.size + len(starts) :].view(np.uint32)[: len(entries)] = entries
    return UnitTable(words, boxes, dims, shift, int(starts[-1]))


def start_divisor_bytes(runs: RunTable, side: int) -> int:
    """Return the largest power of two, up to 4096, that divides every run's first byte, whatever its length."""
    bits = int(np.bitwise_or.reduce(runs.columns[SRC_OFFSET + side], initial=0))
    for row in range(FIRST_DIM, len(runs.columns), 3):
        repeated = runs.columns[row] > 1
        bits |= int(np.bitwise_or.reduce(runs.columns[row + 1 + side][repeated], initial=0))
    return min(4096, bits & -bits) if bits else 4096


def _set_divisor(target: npt.NDArray[np.uint32], divisor: npt.NDArray[np.int64]) -> None:
    """Write each divisor, below 2^31, with its magic number and shift: see `divide` in runs.cuh."""
    # frexp's exponent of d - 1 is ceil(log2(d)) for d > 1, and 0 for d = 1.
    shift = np.frexp((divisor - 1).astype(np.float64))[1].astype(np.int64)
    # 2^(31 + shift) passes 2^62 for no divisor, so int64 holds it.
    target[:, 0] = divisor
    target[:, 1] = -(-(np.int64(1) << (31 + shift)) // divisor)
    target[:, 2] = shift


def _map(starts: npt.NDArray[np.int64]) -> tuple[int, npt.NDArray[np.int64]]:
    """Return the shift of the map, and the box of every 2^shift-th unit with the last box behind it."""
    boxes, units = len(starts) - 1, int(starts[-1])
    if boxes == 1:
        return 0, np.zeros(0, np.int64)
    least = _LEAST_SHIFT
    while units >> least > max(_SMALL_MAP, 8 * boxes):
        least += 1
    shift = max(least, _MOST_SHIFT)
    while shift > least and int(np.unique(starts[:-1] >> shift, return_counts=True)[1].max()) > _FEW_BOXES:
        shift -= 1
    marks = np.arange(0, units, 1 << shift, dtype=np.int64)
    return shift, np.append(np.searchsorted(starts, marks, side="right") - 1, boxes - 1)


def _split(
    columns: npt.NDArray[np.int64], unit_items: int, item_bytes: tuple[int, int]
) -> npt.NDArray[np.int64]:
    """Halve boxes along their outermost dim, then along the run, until their units fit in 31 bits."""
    while True:
        units = (-(-columns[RUN] // unit_items)).astype(np.float64)
        for row in range(FIRST_DIM, len(columns), 3):
            units *= columns[row]
        large = np.flatnonzero(units > MAX_BOX_UNITS)
        if not large.size:
            return columns
        # Each half lies beside the other, so boxes keep their order.
        columns = np.insert(columns, large + 1, columns[:, large], axis=1)
        for index in large + np.arange(large.size):
            first, second = columns[:, index], columns[:, index + 1]
            rows = [row for row in range(FIRST_DIM, len(columns), 3) if first[row] > 1]
            if rows:
                row, steps = rows[-1], first[rows[-1] + 1 : rows[-1] + 3].copy()
                half = first[row] // 2
            else:
                row, steps = RUN, np.array(item_bytes, np.int64)
                half = -(-first[RUN] // unit_items) // 2 * unit_items
            second[row] -= half
            second[SRC_OFFSET] += half * steps[0]
            second[DST_OFFSET] += half * steps[1]
            first[row] = half
