"""Differences of arrays on a GPU, found and applied there; positions are encoded on the host.

An array is read once, an element that differs is written once, and the temporary memory is an eighth of the array.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from lowshard.kernels.buffer import Array
from lowshard.kernels.change_boxes import BoxUnits, ScratchBuffer
from lowshard.kernels.change_encoding import Changes, encode, values_of
from lowshard.kernels.cuda.cuda_engine import CudaEngine, device_engine
from lowshard.kernels.runs import RunTable

_BITS = (
    np.unpackbits(np.arange(1 << 16, dtype=np.uint16).view(np.uint8))
    .reshape(-1, 16)
    .sum(axis=1, dtype=np.uint8)
)
"""Number of set bits of each uint16."""


class DeviceSearch:
    """Searches on one GPU.

    Args:
        engine: of the GPU.
        xp: CuPy.
    """

    def __init__(self, engine: CudaEngine, xp: Any) -> None:
        self._engine, self._xp = engine, xp
        self._bits = xp.asarray(_BITS)
        xp.cuda.get_current_stream().synchronize()  # it is read on any stream

    def find(
        self, boxes: BoxUnits, new: Array, old: Array, scratch: ScratchBuffer, may_stop: bool, may_step: bool
    ) -> Changes:
        """Compare elements; a block differs if any of its elements does. There are no steps."""
        by_block = boxes.block_elems > 1
        most = 7 * boxes.elems // 8 if may_stop and not by_block else boxes.elems
        changed, places = self._differing(
            new, old, (boxes.by_elem if by_block else boxes).table(new, old), most
        )
        if places is None:
            return Changes(changed, 0, 0, None, changed)
        if by_block:
            places = self._xp.unique(places // boxes.block_elems)
        return encode(self._gathered(new, places, boxes.table(new, new)), places, changed)

    def write(self, boxes: BoxUnits, array: Array, changes: Changes) -> None:
        """Write the changed units; their positions are decoded on the host."""
        table = boxes.table(array, array)
        places = self._xp.asarray(boxes.places(changes, boxes.unit_bytes))
        if changes.steps_bytes:
            kind = np.dtype(f"u{boxes.itemsize}")
            now = self._gathered(array, places, table).view(kind) + boxes.steps_of(changes).view(kind)
            values = now.view(np.uint8)
        else:
            values = values_of(changes, boxes.unit_bytes)
        self._engine.scatter(array, values, places, table)

    def _differing(self, new: Array, old: Array, runs: RunTable, most: int) -> tuple[int, Array | None]:
        """Return how many elements of two arrays differ, and which, int64, ascending; None for more than `most`.

        Args:
            new: an array.
            old: another one.
            runs: of both, in elements; they are counted through.
            most: elements.
        """
        xp, itemsize = self._xp, runs.src_itemsize
        unit_bytes = self._engine.word_bytes(runs, new, old, of_runs=True)
        lanes = unit_bytes // itemsize
        masks = xp.empty(runs.total_elems // lanes, xp.uint16)
        self._engine.differ(new, old, masks, runs, unit_bytes)
        count = int(self._bits[masks].sum())
        if count > most:
            return count, None
        hit = xp.flatnonzero(masks)
        at = xp.flatnonzero(masks[hit][:, None] >> xp.arange(lanes, dtype=xp.uint16) & xp.uint16(1))
        return count, hit[at // lanes] * lanes + at % lanes

    def _gathered(self, array: Array, places: Array, runs: RunTable) -> Array:
        """Return elements, or blocks, by number, uint8 [places, bytes of one]."""
        packed = self._xp.empty((len(places), runs.src_itemsize), self._xp.uint8)
        self._engine.gather(array, packed, places, runs)
        return packed


@cache
def device_search(device_id: int) -> DeviceSearch:
    """Return the search of a GPU."""
    import cupy

    return DeviceSearch(device_engine(device_id), cupy)
