"""Differences of arrays by NumPy: the reference for the other searches."""

from __future__ import annotations

import numpy as np

from lowshard.box import slices_of
from lowshard.kernels.buffer import Array
from lowshard.kernels.change_boxes import BoxUnits, ScratchBuffer
from lowshard.kernels.change_encoding import Bytes, Changes, bytes_of, encode, values_of


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
