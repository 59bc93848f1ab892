"""What differs between two arrays, as a short text of it: found, and written into a third array.

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

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowshard.box import Box, shape_of
from lowshard.errors import KernelError, VerificationError
from lowshard.kernels.block_digests import Words, plain_digests
from lowshard.kernels.buffer import Array, address, is_gpu
from lowshard.kernels.engine import host_engine
from lowshard.kernels.runs import RunTable, lower

if TYPE_CHECKING:
    from lowshard.kernels.cuda.cuda_changes import DeviceSearch

CACHE_LINE_BYTES = 64
ELEMENT_BYTES = (1, 2, 4, 8)
DIGEST_LINES = (1, 2)
"""Cache lines of the blocks whose digests are made by compiled code."""
_RUN_COPY_BYTES = 128
"""Bytes that are copied in about the time of writing a run somewhere in memory."""
STEP_BYTES = {2: 3, 4: 5}
"""Bytes of elements that are told by steps as well, and the most that a step takes."""

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
    text: Array | None
    changed_elems: int
    steps_bytes: int = 0
    steps: Array | None = None

    @property
    def write_bytes(self) -> int:
        """How many bytes are copied in about the time of writing this."""
        return _RUN_COPY_BYTES * min(self.units, self.gaps_bytes)

    def shorter(self, unit_bytes: int) -> Changes:
        """Return the same with a text of steps, where there are any and they are shorter than the values."""
        if self.text is None or self.steps is None or not 0 < self.steps.size < self.units * unit_bytes:
            return self._replace(steps=None)
        rest = self.text[self.units * unit_bytes :]
        text = _module_of(self.text).concatenate([self.steps, rest])
        return self._replace(text=text, steps_bytes=self.steps.size, steps=None)

    def text_bytes(self, unit_bytes: int) -> int:
        """Return the bytes of the text, for units of so many bytes."""
        return self.values_bytes(unit_bytes) + self.gaps_bytes + self.lengths_bytes

    def values_bytes(self, unit_bytes: int) -> int:
        """Return the bytes of the values or steps, for units of so many bytes."""
        return self.steps_bytes or self.units * unit_bytes


class ChangeBoxes:
    """Boxes of an array whose changes are told together.

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

    @property
    def has_steps(self) -> bool:
        """Whether its texts may be of steps."""
        return self.block_elems == 1 and self.itemsize in STEP_BYTES

    def takes(self, array: Array) -> bool:
        """Say whether blocks of an array lie in one piece."""
        return self.block_elems == 1 or array.strides[-1] == self.itemsize

    def find(self, new: Array, old: Array, room: Room, may_stop: bool, may_step: bool = False) -> Changes:
        """Return what is in `new` other than in `old`.

        Args:
            new: an array that has the boxes.
            old: another one of the same shape and dtype, of any strides.
            room: memory that is used.
            may_stop: no text is made where one of values takes more than 7/8 of what the boxes have.
            may_step: look for steps as well; not on a GPU.
        """
        if not self.units:
            return Changes(0, 0, 0, np.empty(0, np.uint8), 0)
        device = self._device(new)
        if device is not None:
            found = self._find_on(device, new, old, may_stop)
        elif self._is_compiled():
            found = self._find(new, old, room, may_stop, may_step)
        else:
            found = self._find_plain(new, old, may_step)
        if may_stop and found.text is not None and 8 * found.text.size > 7 * self.size_bytes:
            return found._replace(text=None, steps=None)
        return found

    def find_by_digests(
        self, new: Array, digests: Array, key: Words, room: Room, may_stop: bool, is_first: bool = False
    ) -> Changes:
        """Return the blocks of `new` that differ from those of which digests were made, whose digests are made anew.

        Elements that differ are counted as all of these blocks (`kernels.block_digests` says what may go unnoticed).

        Args:
            new: an array that has the boxes; its blocks lie in one piece.
            digests: uint64 [units]; overwritten.
            key: of the digests.
            room: memory that is used.
            may_stop: as for `find`.
            is_first: nothing was there before: no text is made.
        """
        if not self.units:
            return Changes(0, 0, 0, np.empty(0, np.uint8), 0)
        device = self._device(new)
        if device is not None:
            found = self._digest_on(device, new, digests, key, is_first)
        elif self._is_compiled() and self.unit_bytes // CACHE_LINE_BYTES in DIGEST_LINES:
            found = self._digest(new, digests, key, room, may_stop, is_first)
        else:
            found = self._digest_plain(new, digests, key, is_first)
        if may_stop and found.text is not None and 8 * found.text.size > 7 * self.size_bytes:
            return found._replace(text=None)
        return found

    def write(self, array: Array, changes: Changes) -> None:
        """Write what differs into an array that has the boxes.

        Raises:
            VerificationError: the text is none of these boxes; a part of it is written.
        """
        if changes.text is None or not changes.units:
            return
        device = self._device(array)
        if device is not None or not self._is_compiled():
            places = self.places(changes, self.unit_bytes)
            by_steps = changes.steps_bytes > 0
            values = self._steps_of(changes) if by_steps else values_of(changes, self.unit_bytes)
            if device is None:
                self._write_plain(array, places, values, by_steps)
            else:
                self._write_on(device, array, places, values, by_steps)
            return
        from lowshard.kernels.cpu.cpu_changes import WIDTHS, WRITE_SCRATCH_BYTES, write_kernel

        self._check(changes, self.unit_bytes)
        kernel = write_kernel(self.unit_bytes if self.unit_bytes in WIDTHS else 0, changes.steps_bytes > 0)
        begin = address(changes.text)
        gaps = begin + changes.values_bytes(self.unit_bytes)
        lengths = gaps + changes.gaps_bytes
        end = lengths + changes.lengths_bytes
        table = self._table(array, array)
        scratch = np.empty(WRITE_SCRATCH_BYTES, np.uint8)
        if kernel(
            table.columns, address(array), gaps, lengths, lengths, end, begin, changes.units, self.unit_bytes,
            address(scratch),
        ):  # fmt: skip
            raise VerificationError(self._wrong("its runs lead out of the boxes, or end early"))

    def copy(self, source: Array, target: Array) -> None:
        """Copy the boxes from one host array to another of the same shape and dtype, each of any strides."""
        if self.units:
            host_engine().copy(source, target, self._table(source, target))

    def places(self, changes: Changes, unit_bytes: int) -> Numbers:
        """Return the units that differ, ascending, int64.

        Args:
            changes: of these boxes.
            unit_bytes: bytes of a unit in the text; another number than here where the values were converted.

        Raises:
            VerificationError: the text is none of these boxes.
        """
        self._check(changes, unit_bytes)
        text = changes.text
        raw = text if isinstance(text, np.ndarray) else text.get()  # type: ignore[union-attr]
        at = changes.values_bytes(unit_bytes)
        firsts = _numbers(raw[at : at + changes.gaps_bytes])
        more = _numbers(raw[at + changes.gaps_bytes :])
        is_long = (firsts & 1).astype(bool)
        lengths = np.ones(len(firsts), np.int64)
        if firsts.min(initial=0) < 0 or more.min(initial=0) < 0 or int(is_long.sum()) != len(more):
            raise VerificationError(self._wrong("its numbers are broken off"))
        lengths[is_long] += more + 1
        ends = np.cumsum((firsts >> 1) + lengths)
        begins = ends - lengths
        is_past = ends.max(initial=0) > self.units or ends.min(initial=0) < 0  # less than 0: a sum past 2^63
        if is_past or lengths.min(initial=1) < 1 or int(lengths.sum()) != changes.units:
            raise VerificationError(self._wrong("its runs lead out of the boxes, or end early"))
        return np.arange(changes.units) + np.repeat(begins - np.cumsum(lengths) + lengths, lengths)

    def _check(self, changes: Changes, unit_bytes: int) -> None:
        text_bytes = changes.text_bytes(unit_bytes)
        if changes.steps_bytes and not (
            changes.steps_bytes > 0 and unit_bytes == self.itemsize and self.has_steps
        ):
            raise VerificationError(self._wrong("it is of steps, which are of elements of 2 or 4 bytes"))
        if changes.text is None or changes.text.size != text_bytes or not 0 <= changes.units <= self.units:
            raise VerificationError(self._wrong(f"it is {text_bytes} bytes for {changes.units} units"))

    def _wrong(self, fault: str) -> str:
        return f"a text of changes fits {self.units} units of {self.unit_bytes} bytes, but {fault}"

    # ---- compiled

    def _is_compiled(self) -> bool:
        """Say whether there are kernels: for elements of a register's sizes, and for blocks of cache lines."""
        by_line = self.block_elems == 1 or self.unit_bytes % CACHE_LINE_BYTES == 0
        return by_line and self.itemsize in ELEMENT_BYTES and host_engine().name != "plain"

    def _find(self, new: Array, old: Array, room: Room, may_stop: bool, may_step: bool) -> Changes:
        from lowshard.kernels.cpu import cpu_changes as cpu

        kernel = cpu.find_kernel(self.itemsize, self.block_elems > 1)
        may_step = may_step and self.has_steps
        gaps, lengths, values, steps = room.streams(
            self.units, self.unit_bytes, STEP_BYTES[self.itemsize] if may_step else 0
        )
        state = np.zeros(cpu.STATE_ELEMS, np.int64)
        state[cpu.TOTAL], state[cpu.MAY_STOP], state[cpu.MAY_STEP] = self.units, may_stop, may_step
        table = self._table(new, old)
        kernel(
            table.columns, address(new), address(old), self.unit_bytes, address(gaps), address(lengths),
            address(values), address(steps), state, address(room.scratch(cpu.FIND_SCRATCH_BYTES)),
        )  # fmt: skip
        changed = int(state[cpu.CHANGED])
        if state[cpu.STOPPED]:
            # Dense at its begin, and not later?
            if 9 * state[cpu.HIT] * self.unit_bytes < 8 * self.size_bytes:
                return self._find(new, old, room, False, may_step)
            return Changes(int(state[cpu.HIT]), 0, 0, None, changed)
        sizes = [int(state[i]) for i in (cpu.VALUES, cpu.GAPS, cpu.LENGTHS, cpu.STEPS)]
        text = np.concatenate([values[: sizes[0]], gaps[: sizes[1]], lengths[: sizes[2]]])
        found = steps[: sizes[3]].copy() if may_step else None
        return Changes(sizes[0] // self.unit_bytes, sizes[1], sizes[2], text, changed, 0, found)

    def _digest(
        self, new: Array, digests: Array, key: Words, room: Room, may_stop: bool, is_first: bool
    ) -> Changes:
        from lowshard.kernels.cpu import cpu_block_digests as cpu
        from lowshard.kernels.cpu.cpu_changes import (
            GAPS,
            HIT,
            LENGTHS,
            MAY_STOP,
            STATE_ELEMS,
            STOPPED,
            TOTAL,
            VALUES,
        )

        gaps, lengths, values, _ = room.streams(0 if is_first else self.units, self.unit_bytes, 0)
        state = np.zeros(STATE_ELEMS, np.int64)
        state[TOTAL], state[MAY_STOP], state[STOPPED] = self.units, may_stop, is_first
        cpu.digest_kernel(self.unit_bytes // CACHE_LINE_BYTES)(
            self._table(new, new).columns, address(new), address(key), address(digests), address(gaps),
            address(lengths), address(values), state, address(room.scratch(cpu.FIND_SCRATCH_BYTES)),
        )  # fmt: skip
        hit = int(state[HIT])
        if state[STOPPED]:
            return Changes(hit, 0, 0, None, hit * self.block_elems)
        sizes = [int(state[i]) for i in (VALUES, GAPS, LENGTHS)]
        text = np.concatenate([values[: sizes[0]], gaps[: sizes[1]], lengths[: sizes[2]]])
        return Changes(hit, sizes[1], sizes[2], text, hit * self.block_elems)

    def _table(self, first: Array, second: Array) -> RunTable:
        """Return the runs of the boxes in two arrays, in units; kept."""
        key = tuple(first.strides), tuple(second.strides)
        found = self._tables.get(key)
        if found is None:
            boxes = np.array(self.boxes, np.int64).reshape(len(self.boxes), len(self.boxes[0]), 2)
            extents = boxes[..., 1] - boxes[..., 0]
            sides = [np.broadcast_to(np.array(s, np.int64), extents.shape).copy() for s in key]
            offsets = [(boxes[..., 0] * side).sum(axis=1) for side in sides]
            if self.block_elems > 1:
                extents[:, -1] //= self.block_elems
                for side in sides:
                    side[:, -1] = self.unit_bytes
            found = lower(
                extents, offsets[0], offsets[1], sides[0], sides[1], self.unit_bytes, self.unit_bytes
            )
            self._tables[key] = found
        return found

    # ---- on a GPU

    def _device(self, array: Array) -> DeviceSearch | None:
        """Return what searches on the array's GPU; None for one in host memory."""
        if not is_gpu(array):
            return None
        import cupy

        from lowshard.kernels.cuda.cuda_changes import DeviceSearch
        from lowshard.kernels.cuda.cuda_engine import device_engine

        return DeviceSearch(device_engine(array.device.id), cupy)

    def _find_on(self, device: DeviceSearch, new: Array, old: Array, may_stop: bool) -> Changes:
        """Compare elements; of blocks those that have one which differs."""
        by_elem = self if self.block_elems == 1 else ChangeBoxes(self.boxes, self.itemsize)
        most = 7 * self.elems // 8 if may_stop and by_elem is self else self.elems
        changed, places = device.differing(new, old, by_elem._table(new, old), most)
        if places is None:
            return Changes(changed, 0, 0, None, changed)
        if by_elem is not self:
            places = device.xp.unique(places // self.block_elems)
        return _text(device.gathered(new, places, self._table(new, new)), places, changed)

    def _digest_on(
        self, device: DeviceSearch, new: Array, digests: Array, key: Words, is_first: bool
    ) -> Changes:
        places = device.digested(new, digests, key, self._table(new, new))
        changed = len(places) * self.block_elems
        if is_first:
            return Changes(len(places), 0, 0, None, changed)
        return _text(device.gathered(new, places, self._table(new, new)), places, changed)

    def _write_on(
        self, device: DeviceSearch, array: Array, places: Numbers, values: Array, by_steps: bool
    ) -> None:
        table = self._table(array, array)
        there = device.xp.asarray(places)
        if by_steps:
            kind = np.dtype(f"u{self.itemsize}")
            values = (device.gathered(array, there, table).view(kind) + values.view(kind)).view(np.uint8)
        device.scattered(array, there, values, table)

    # ---- plain

    def _units(self, array: Array) -> Bytes:
        """Return the units of the boxes as bytes, uint8 [units, bytes of a unit]."""
        parts = [np.ascontiguousarray(array[(*_slices(box), ...)]).reshape(-1) for box in self.boxes]
        return np.concatenate([part.view(np.uint8) for part in parts]).reshape(self.units, self.unit_bytes)

    def _find_plain(self, new: Array, old: Array, may_step: bool) -> Changes:
        units, before = self._units(new), self._units(old)
        differs = (units != before).reshape(self.units, self.block_elems, self.itemsize).any(axis=2)
        changed = int(differs.sum())
        found = np.flatnonzero(differs.any(axis=1))
        steps = None
        if may_step and self.has_steps:
            kind = np.dtype(f"i{self.itemsize}")
            grown = (units[found].view(kind) - before[found].view(kind)).reshape(-1).astype(np.int64)
            steps = _bytes_of(grown << 1 ^ grown >> 63)
        return _text(units[found], found, changed, steps)

    def _digest_plain(self, new: Array, digests: Array, key: Words, is_first: bool) -> Changes:
        units = self._units(new)
        made = plain_digests(units, key)
        found = np.flatnonzero(made != digests)
        digests[...] = made
        changed = len(found) * self.block_elems
        if is_first:
            return Changes(len(found), 0, 0, None, changed)
        return _text(units[found], found, changed)

    def _steps_of(self, changes: Changes) -> Array:
        """Return what the elements that differ have grown by, as bytes, uint8 [elements, bytes of one].

        Raises:
            VerificationError: there are not so many.
        """
        assert changes.text is not None
        text = changes.text[: changes.steps_bytes]
        numbers = _numbers(text if isinstance(text, np.ndarray) else text.get())
        if len(numbers) != changes.units or numbers.min() < 0:
            raise VerificationError(self._wrong("its numbers are broken off"))
        grown = (numbers >> 1 ^ -(numbers & 1)).astype(f"i{self.itemsize}")
        return _module_of(text).asarray(grown.view(np.uint8).reshape(changes.units, self.itemsize))

    def _write_plain(self, array: Array, places: Numbers, values: Array, by_steps: bool) -> None:
        first = 0
        for box in self.boxes:
            view = array[(*_slices(box), ...)]
            units = view.size // self.block_elems
            begin, end = np.searchsorted(places, (first, first + units))
            if begin < end:
                whole = np.ascontiguousarray(view).reshape(-1).view(np.uint8).reshape(units, self.unit_bytes)
                whole = whole.copy() if whole.base is not None else whole
                at, now = places[begin:end] - first, values[begin:end]
                if by_steps:
                    kind = np.dtype(f"u{self.itemsize}")
                    now = (np.ascontiguousarray(whole[at]).view(kind) + now.view(kind)).view(np.uint8)
                whole[at] = now
                view[...] = whole.reshape(-1).view(view.dtype).reshape(view.shape)
            first += units


class Room:
    """Memory that searches use one after the other; pages of it are taken as they are written."""

    def __init__(self) -> None:
        self._held: Bytes = np.empty(0, np.uint8)
        self._scratch: Bytes = np.empty(0, np.uint8)

    def scratch(self, size_bytes: int) -> Bytes:
        """Return so many bytes, on a cache line."""
        if self._scratch.size < size_bytes + 64:
            self._scratch = np.empty(size_bytes + 64, np.uint8)
        return self._scratch[-address(self._scratch) % 64 :]

    def streams(self, units: int, unit_bytes: int, step_bytes: int) -> tuple[Bytes, Bytes, Bytes, Bytes]:
        """Return room for the gaps, lengths, values and steps of so many units."""
        sizes = [units + 64, units // 2 + 64, units * unit_bytes + 64, units * step_bytes + 64]
        if self._held.size < sum(sizes):
            self._held = np.empty(0, np.uint8)
            self._held = np.empty(sum(sizes), np.uint8)
        gaps, lengths, values, steps = np.split(self._held[: sum(sizes)], np.cumsum(sizes[:3]))
        return gaps, lengths, values, steps


def values_of(changes: Changes, unit_bytes: int) -> Array:
    """Return the bits of the units that differ, uint8 [units, bytes of a unit]."""
    assert changes.text is not None
    assert not changes.steps_bytes
    return changes.text[: changes.units * unit_bytes].reshape(changes.units, unit_bytes)


def _text(values: Array, places: Array, changed_elems: int, steps: Array | None = None) -> Changes:
    """Return the text of units that differ, from their bits and their places, both where the array is."""
    on_host: Numbers = places if isinstance(places, np.ndarray) else places.get()
    gaps, lengths = run_streams(on_host)
    xp = _module_of(values)
    text = xp.concatenate([values.reshape(-1), xp.asarray(gaps), xp.asarray(lengths)])
    return Changes(len(places), gaps.size, lengths.size, text, changed_elems, 0, steps)


def run_streams(places: Numbers) -> tuple[Bytes, Bytes]:
    """Return the streams of gaps and lengths for units that differ, ascending."""
    if not len(places):
        return np.empty(0, np.uint8), np.empty(0, np.uint8)
    edges = np.flatnonzero(np.diff(places) != 1) + 1
    begins, ends = np.append(0, edges), np.append(edges, len(places))
    lengths = ends - begins
    starts = places[begins]
    before = np.append(0, (starts + lengths)[:-1])
    return _bytes_of(2 * (starts - before) + (lengths > 1)), _bytes_of(lengths[lengths > 1] - 2)


def _bytes_of(numbers: Numbers) -> Bytes:
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


def _numbers(raw: Bytes) -> Numbers:
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


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _module_of(array: Array) -> Any:
    if is_gpu(array):
        import cupy

        return cupy
    return np
