"""What differs between two arrays, as a short text of it.

A text is of units: elements, or blocks of several elements of the last dim that go whole. The units of all boxes are
counted one behind the other, each box row-major. Runs of units that differ are told by two streams of numbers, and
their bits by a third:

- gaps: for each run, twice the units since the end of the run before it; plus one where the run is longer than a unit;
- lengths: for each run longer than a unit, its units less two;
- values: the bits of all units, one behind the other; or, of elements of two or four bytes, steps where these are
  shorter: for each element twice what its bits, read as an integer, have grown by, or less one than twice what they
  have shrunk by. A small update of a weight moves its bits by little: a byte.

Values do not ask what was there before. Steps do, and are taken once.

Numbers are written seven bits a byte, low ones first; the high bit says that more follow. Bits are compared, not
numbers: NaNs differ by their payload, and -0.0 from 0.0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowshard.kernels.buffer import Array, is_gpu

STEP_BYTES = {2: 3, 4: 5}
"""Bytes of elements that are told by steps as well, and the most that a step takes."""
_RUN_COPY_BYTES = 128
"""Bytes that are copied in about the time of writing a run somewhere in memory."""

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]


class Changes(NamedTuple):
    """What differs.

    Attributes:
        units: that differ.
        gaps_bytes: of the first stream.
        lengths_bytes: of the second.
        text: uint8, the values or steps, then gaps, then lengths; None where it is too long to be worth it.
        changed_elems: elements that differ.
        steps_bytes: of the steps in the text; 0 where there are values.
        steps: beside a text of values, steps that could stand in their place.
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
        """How many bytes are copied in about the time of writing this."""
        return _RUN_COPY_BYTES * min(self.units, self.gaps_bytes)

    def shorter(self, unit_bytes: int) -> Changes:
        """Return the same with a text of steps, where there are any and they are shorter than the values."""
        if self.encoded is None or self.steps is None or not 0 < self.steps.size < self.units * unit_bytes:
            return self._replace(steps=None)
        rest = self.encoded[self.units * unit_bytes :]
        encoded = module_of(self.encoded).concatenate([self.steps, rest])
        return self._replace(encoded=encoded, steps_bytes=self.steps.size, steps=None)

    def encoded_bytes(self, unit_bytes: int) -> int:
        """Return the bytes of the text, for units of so many bytes."""
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
    """Return the text of units that differ, from their bits and their places, both where the array is."""
    gaps, lengths = run_streams(on_host(places))
    xp = module_of(values)
    encoded = xp.concatenate([values.reshape(-1), xp.asarray(gaps), xp.asarray(lengths)])
    return Changes(len(places), gaps.size, lengths.size, encoded, changed_elems, 0, steps)


def run_streams(places: Numbers) -> tuple[Bytes, Bytes]:
    """Return the streams of gaps and lengths for units that differ, ascending."""
    if not len(places):
        return np.empty(0, np.uint8), np.empty(0, np.uint8)
    edges = np.flatnonzero(np.diff(places) != 1) + 1
    begins, ends = np.append(0, edges), np.append(edges, len(places))
    lengths = ends - begins
    starts = places[begins]
    before = np.append(0, (starts + lengths)[:-1])
    return bytes_of(2 * (starts - before) + (lengths > 1)), bytes_of(lengths[lengths > 1] - 2)


def bytes_of(numbers: Numbers) -> Bytes:
    """Return a stream of numbers."""
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
    """Return the numbers of a stream; -1 stands for one that is broken off or too long."""
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
    """Return NumPy or CuPy, whose the array is."""
    if is_gpu(array):
        import cupy

        return cupy
    return np
