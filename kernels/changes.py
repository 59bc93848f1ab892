"""Differences of two arrays: found, encoded (`change_encoding`), and applied to a third array.

```
ChangeBoxes.find, write      which boxes, and which search
  ChangeSearch: PlainSearch | CompiledSearch (kernels/cpu) | DeviceSearch (kernels/cuda)
```
"""

from __future__ import annotations

import numpy as np

from lowshard.box import slices_of
from lowshard.kernels.buffer import Array, is_gpu
from lowshard.kernels.change_boxes import BoxUnits, ChangeSearch, ScratchBuffer
from lowshard.kernels.change_encoding import Bytes, Changes, bytes_of, encode, values_of
from lowshard.kernels.engine import engine_for, host_engine


class ChangeBoxes(BoxUnits):
    """Boxes of an array whose changes are encoded together; arguments and errors as of `BoxUnits`."""

    def find(
        self, new: Array, old: Array, scratch: ScratchBuffer, may_stop: bool, may_step: bool = False
    ) -> Changes:
        """Return the changes from `old` to `new`.

        Args:
            new: an array that has the boxes.
            old: another one of the same shape and dtype, of any strides; elements of a block are contiguous in both.
            scratch: memory that is used.
            may_stop: do not encode if values take more than 7/8 of the bytes of the boxes.
            may_step: look for steps as well; not on a GPU.
        """
        if not self.units:
            return _NOTHING
        found = self._search(new).find(self, new, old, scratch, may_stop, may_step)
        if may_stop and found.encoded is not None and 8 * found.encoded.size > 7 * self.size_bytes:
            return found._replace(encoded=None, steps=None)
        return found

    def write(self, array: Array, changes: Changes) -> None:
        """Apply changes to an array that has the boxes.

        Raises:
            VerificationError: the encoding does not fit these boxes; a part of it is written.
        """
        if changes.encoded is not None and changes.units:
            self._search(array).write(self, array, changes)

    def copy(self, source: Array, target: Array) -> None:
        """Copy the boxes from one array to another of the same shape, dtype and device, each of any strides."""
        if self.units:
            engine_for(source, target).copy(source, target, self.table(source, target))

    def _search(self, array: Array) -> ChangeSearch:
        """Return the search for an array's device."""
        if is_gpu(array):
            from lowshard.kernels.cuda.cuda_changes import device_search

            return device_search(array.device.id)
        if host_engine().name == "plain":
            return PlainSearch()
        from lowshard.kernels.cpu.compiled_changes import CompiledSearch

        return CompiledSearch() if CompiledSearch.takes(self) else PlainSearch()


_NOTHING = Changes(0, 0, 0, np.empty(0, np.uint8), 0)


class PlainSearch:
    """Searches host memory."""

    def find(
        self, boxes: BoxUnits, new: Array, old: Array, scratch: ScratchBuffer, may_stop: bool, may_step: bool
    ) -> Changes:
        """Compare units."""
        units, before = _units_of(boxes, new), _units_of(boxes, old)
        differs = (units != before).reshape(boxes.units, boxes.block_elems, boxes.itemsize).any(axis=2)
        changed = int(differs.sum())
        found = np.flatnonzero(differs.any(axis=1))
        steps = None
        if may_step and boxes.has_steps:
            kind = np.dtype(f"i{boxes.itemsize}")
            grown = (units[found].view(kind) - before[found].view(kind)).reshape(-1).astype(np.int64)
            steps = bytes_of(grown << 1 ^ grown >> 63)
        return encode(units[found], found, changed, steps)

    def write(self, boxes: BoxUnits, array: Array, changes: Changes) -> None:
        """Write units, box by box."""
        places, by_steps = boxes.places(changes, boxes.unit_bytes), changes.steps_bytes > 0
        values = boxes.steps_of(changes) if by_steps else values_of(changes, boxes.unit_bytes)
        first = 0
        for box in boxes.boxes:
            view = array[(*slices_of(box), ...)]
            units = view.size // boxes.block_elems
            begin, end = np.searchsorted(places, (first, first + units))
            if begin < end:
                whole = np.ascontiguousarray(view).reshape(-1).view(np.uint8).reshape(units, boxes.unit_bytes)
                whole = whole.copy() if whole.base is not None else whole
                at, now = places[begin:end] - first, values[begin:end]
                if by_steps:
                    kind = np.dtype(f"u{boxes.itemsize}")
                    now = (np.ascontiguousarray(whole[at]).view(kind) + now.view(kind)).view(np.uint8)
                whole[at] = now
                view[...] = whole.reshape(-1).view(view.dtype).reshape(view.shape)
            first += units


def _units_of(boxes: BoxUnits, array: Array) -> Bytes:
    """Return the units of the boxes as bytes, uint8 [units, bytes of a unit]."""
    parts = [np.ascontiguousarray(array[(*slices_of(box), ...)]).reshape(-1) for box in boxes.boxes]
    return np.concatenate([part.view(np.uint8) for part in parts]).reshape(boxes.units, boxes.unit_bytes)
