"""Boxes of an array whose changes are encoded together, and the interface of the searches for changes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Protocol

import numpy as np

from lowshard.box import Box, shape_of
from lowshard.errors import KernelError, VerificationError
from lowshard.kernels.buffer import Array, address
from lowshard.kernels.change_encoding import (
    STEP_BYTES,
    Bytes,
    Changes,
    Numbers,
    module_of,
    numbers_of,
    on_host,
)
from lowshard.kernels.runs import RunTable, lower


class BoxUnits:
    """Boxes of an array, and their units: elements, or blocks of several.

    Args:
        boxes: of the array, in the order in which their units are counted.
        itemsize: bytes of an element.
        block_elems: elements of a unit, along the last dim; it divides the last extent of each box.

    Raises:
        KernelError: it does not.
    """

    def __init__(self, boxes: Sequence[Box], itemsize: int, block_elems: int = 1) -> None:
        self.boxes, self.itemsize, self.block_elems = tuple(boxes), itemsize, block_elems
        for box in self.boxes:
            if block_elems > 1 and (not box or (box[-1][1] - box[-1][0]) % block_elems):
                raise KernelError(f"the last extent of a box is a multiple of {block_elems}, got {box}")
        self.unit_bytes = itemsize * block_elems
        self.elems = sum(prod(shape_of(box)) for box in self.boxes)
        self.units = self.elems // block_elems
        self.size_bytes = self.elems * itemsize
        self._tables: dict[tuple[tuple[int, ...], tuple[int, ...]], RunTable] = {}

    @cached_property
    def by_elem(self) -> BoxUnits:
        """The same boxes with elements as units."""
        return BoxUnits(self.boxes, self.itemsize)

    @property
    def has_steps(self) -> bool:
        """Whether its encodings may have steps."""
        return self.block_elems == 1 and self.itemsize in STEP_BYTES

    def places(self, changes: Changes, unit_bytes: int) -> Numbers:
        """Return the units that differ, ascending, int64.

        Args:
            changes: of these boxes.
            unit_bytes: bytes of a unit in the encoding; another number than here if the values were converted.

        Raises:
            VerificationError: the encoding does not fit these boxes.
        """
        self.check(changes, unit_bytes)
        assert changes.encoded is not None
        raw = on_host(changes.encoded[changes.values_bytes(unit_bytes) :])
        firsts = numbers_of(raw[: changes.gaps_bytes])
        more = numbers_of(raw[changes.gaps_bytes :])
        is_long = (firsts & 1).astype(bool)
        lengths = np.ones(len(firsts), np.int64)
        if firsts.min(initial=0) < 0 or more.min(initial=0) < 0 or int(is_long.sum()) != len(more):
            raise VerificationError(self.wrong("its numbers are broken off"))
        lengths[is_long] += more + 1
        ends = np.cumsum((firsts >> 1) + lengths)
        begins = ends - lengths
        is_past = ends.max(initial=0) > self.units or ends.min(initial=0) < 0  # less than 0: a sum past 2^63
        if is_past or lengths.min(initial=1) < 1 or int(lengths.sum()) != changes.units:
            raise VerificationError(self.wrong("its runs lead out of the boxes, or end early"))
        return np.arange(changes.units) + np.repeat(begins - np.cumsum(lengths) + lengths, lengths)

    def check(self, changes: Changes, unit_bytes: int) -> None:
        """Raise VerificationError if the size of an encoding does not fit these boxes."""
        encoded_bytes = changes.encoded_bytes(unit_bytes)
        if changes.steps_bytes and not (
            changes.steps_bytes > 0 and unit_bytes == self.itemsize and self.has_steps
        ):
            raise VerificationError(self.wrong("it is of steps, which are of elements of 2 or 4 bytes"))
        if (
            changes.encoded is None
            or changes.encoded.size != encoded_bytes
            or not 0 <= changes.units <= self.units
        ):
            raise VerificationError(self.wrong(f"it is {encoded_bytes} bytes for {changes.units} units"))

    def wrong(self, fault: str) -> str:
        """Return the message for an encoding that does not fit these boxes."""
        return f"a text of changes fits {self.units} units of {self.unit_bytes} bytes, but {fault}"

    def steps_of(self, changes: Changes) -> Array:
        """Return the differences of changed elements as bytes, uint8 [elements, bytes of one].

        Raises:
            VerificationError: there are not so many.
        """
        assert changes.encoded is not None
        encoded = changes.encoded[: changes.steps_bytes]
        numbers = numbers_of(on_host(encoded))
        if len(numbers) != changes.units or numbers.min() < 0:
            raise VerificationError(self.wrong("its numbers are broken off"))
        grown = (numbers >> 1 ^ -(numbers & 1)).astype(f"i{self.itemsize}")
        return module_of(encoded).asarray(grown.view(np.uint8).reshape(changes.units, self.itemsize))

    def table(self, first: Array, second: Array) -> RunTable:
        """Return the runs of the boxes in two arrays, in units; cached.

        Raises:
            KernelError: units are blocks, and the elements of one are not contiguous.
        """
        key = tuple(first.strides), tuple(second.strides)
        found = self._tables.get(key)
        if found is None:
            boxes = np.array(self.boxes, np.int64).reshape(len(self.boxes), len(self.boxes[0]), 2)
            extents = boxes[..., 1] - boxes[..., 0]
            sides = [np.broadcast_to(np.array(s, np.int64), extents.shape).copy() for s in key]
            offsets = [(boxes[..., 0] * side).sum(axis=1) for side in sides]
            if self.block_elems > 1:
                if any(side[-1] != self.itemsize for side in key):
                    raise KernelError(
                        f"blocks of {self.block_elems} elements lie in one piece: the last stride is {self.itemsize}, "
                        f"got {key[0][-1]} and {key[1][-1]}; copy the array, numpy.ascontiguousarray(array)"
                    )
                extents[:, -1] //= self.block_elems
                for side in sides:
                    side[:, -1] = self.unit_bytes
            found = lower(
                extents, offsets[0], offsets[1], sides[0], sides[1], self.unit_bytes, self.unit_bytes
            )
            self._tables[key] = found
        return found


class ChangeSearch(Protocol):
    """Finds and applies changes; `ChangeBoxes` has checked the arguments."""

    def find(
        self, boxes: BoxUnits, new: Array, old: Array, scratch: ScratchBuffer, may_stop: bool, may_step: bool
    ) -> Changes:
        """Return the changes from `old` to `new`; not encoded if there are too many."""

    def write(self, boxes: BoxUnits, array: Array, changes: Changes) -> None:
        """Apply changes.

        Raises:
            VerificationError: the encoding does not fit these boxes; a part of it is written.
        """


class ScratchBuffer:
    """Scratch memory shared by successive searches."""

    def __init__(self) -> None:
        self._held: Bytes = np.empty(0, np.uint8)
        self._scratch: Bytes = np.empty(0, np.uint8)

    def aligned(self, size_bytes: int) -> Bytes:
        """Return so many bytes, aligned to a cache line."""
        if self._scratch.size < size_bytes + 64:
            self._scratch = np.empty(size_bytes + 64, np.uint8)
        return self._scratch[-address(self._scratch) % 64 :]

    def streams(self, units: int, unit_bytes: int, step_bytes: int) -> tuple[Bytes, Bytes, Bytes, Bytes]:
        """Return memory for the gaps, lengths, values and steps of so many units."""
        sizes = [units + 64, units // 2 + 64, units * unit_bytes + 64, units * step_bytes + 64]
        if self._held.size < sum(sizes):
            self._held = np.empty(0, np.uint8)
            self._held = np.empty(sum(sizes), np.uint8)
        gaps, lengths, values, steps = np.split(self._held[: sum(sizes)], np.cumsum(sizes[:3]))
        return gaps, lengths, values, steps
