"""The encoding of the differences of two arrays.

An encoding consists of units: elements, or blocks of several elements of the last dim. The units of all boxes are
counted one after the other, each box row-major. Two streams of numbers give the runs of units that differ, a third
their bits:

- gaps: for each run, twice the units since the end of the run before it; plus one if the run is longer than a unit;
- lengths: for each run longer than a unit, its units less two;
- values: the bits of all units; or, for elements of two or four bytes, steps if these are shorter: for each element the
  zigzag code of the difference of its bits, read as integers. A small update of a weight changes its bits by little:
  a byte.

Values can be applied to any base and repeatedly; steps only to the base they were made from, once.

Numbers are varints: seven bits a byte, low ones first; the high bit says that more follow. Bits are compared, not
numbers: NaNs differ by their payload, and -0.0 from 0.0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowshard.kernels.buffer import Array, is_gpu

STEP_BYTES = {2: 3, 4: 5}
"""Bytes of elements that may be encoded as steps, and the most that a step takes."""
_RUN_COPY_BYTES = 128
"""Writing a run takes about as long as copying so many bytes."""

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]


class Changes(NamedTuple):
    """Encoded differences.

    Attributes:
        units: number of units that differ.
        gaps_bytes: of the first stream.
        lengths_bytes: of the second.
        encoded: uint8, the values or steps, then gaps, then lengths; None if it is too long to be worth it.
        changed_elems: elements that differ.
        steps_bytes: of the steps in the encoding; 0 if it has values.
        steps: beside an encoding of values, steps that could replace them.
    """

    units: int
    gaps_bytes: int
    lengths_bytes: int
    encoded: Array | None
    changed_elems: int
    steps_bytes: int = 0
    steps: Array | None = None

    @property
    def cost_in_copied_bytes(self) -> int:
        """Bytes that are copied in about the time that applying this takes."""
        return _RUN_COPY_BYTES * min(self.units, self.gaps_bytes)

    def shorter(self, unit_bytes: int) -> Changes:
        """Return the same encoded by steps, if there are any and they are shorter than the values."""
        if self.encoded is None or self.steps is None or not 0 < self.steps.size < self.units * unit_bytes:
            return self._replace(steps=None)
        rest = self.encoded[self.units * unit_bytes :]
        encoded = module_of(self.encoded).concatenate([self.steps, rest])
        return self._replace(encoded=encoded, steps_bytes=self.steps.size, steps=None)

    def encoded_bytes(self, unit_bytes: int) -> int:
        """Return the bytes of the encoding, for units of so many bytes."""
        return self.values_bytes(unit_bytes) + self.gaps_bytes + self.lengths_bytes

    def values_bytes(self, unit_bytes: int) -> int:
        """Return the bytes of the values or steps, for units of so many bytes."""
        return self.steps_bytes or self.units * unit_bytes


def values_of(changes: Changes, unit_bytes: int) -> Array:
    """Return the bits of the units that differ, uint8 [units, bytes of a unit]."""
    assert changes.encoded is not None
    assert not changes.steps_bytes
    return changes.encoded[: changes.units * unit_bytes].reshape(changes.units, unit_bytes)


def encode(values: Array, places: Array, changed_elems: int, steps: Array | None = None) -> Changes:
    """Return the encoding of units that differ, from their bits and their positions, both on the array's device."""
    gaps, lengths = run_streams(on_host(places))
    xp = module_of(values)
    encoded = xp.concatenate([values.reshape(-1), xp.asarray(gaps), xp.asarray(lengths)])
    return Changes(len(places), gaps.size, lengths.size, encoded, changed_elems, 0, steps)


def run_streams(places: Numbers) -> tuple[Bytes, Bytes]:
    """Return the streams of gaps and lengths for ascending positions."""
    if not len(places):
        return np.empty(0, np.uint8), np.empty(0, np.uint8)
    edges = np.flatnonzero(np.diff(places) != 1) + 1
    begins, ends = np.append(0, edges), np.append(edges, len(places))
    lengths = ends - begins
    starts = places[begins]
    before = np.append(0, (starts + lengths)[:-1])
    return bytes_of(2 * (starts - before) + (lengths > 1)), bytes_of(lengths[lengths > 1] - 2)


def bytes_of(numbers: Numbers) -> Bytes:
    """Return numbers as varints."""
    sizes = np.ones(len(numbers), np.int64)
    for step in range(1, 9):
        sizes += numbers >> (7 * step) > 0
    out = np.empty(int(sizes.sum()), np.uint8)
    at = np.cumsum(sizes) - sizes
    for step in range(int(sizes.max(initial=0))):
        there = sizes > step
        more = np.where(sizes[there] > step + 1, 128, 0)
        out[at[there] + step] = (numbers[there] >> (7 * step) & 127) | more
    return out


def numbers_of(raw: Bytes) -> Numbers:
    """Return the numbers of a stream; -1 for a truncated or overlong one."""
    if not raw.size:
        return np.empty(0, np.int64)
    ends = np.flatnonzero(raw < 128)
    if not len(ends) or ends[-1] != raw.size - 1:
        return np.array([-1], np.int64)
    begins = np.append(0, ends[:-1] + 1)
    within = np.arange(raw.size) - np.repeat(begins, ends - begins + 1)
    if int(within.max()) > 8:
        return np.array([-1], np.int64)
    summed: Numbers = np.add.reduceat((raw & 127).astype(np.int64) << (7 * within), begins)
    return summed


def on_host(array: Array) -> npt.NDArray[Any]:
    """Return an array, or a copy of it in host memory."""
    return array if isinstance(array, np.ndarray) else array.get()


def module_of(array: Array) -> Any:
    """Return the array's library, NumPy or CuPy."""
    if is_gpu(array):
        import cupy

        return cupy
    return np
