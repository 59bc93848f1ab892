"""Passes changed blocks of a tensor to the transform that stores it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lowshard.box import Box, shape_of, volume
from lowshard.kernels.change_boxes import BoxUnits
from lowshard.kernels.change_encoding import Changes, values_of
from lowshard.transfer.transform_contract import ReshardTransform


def store_changed_blocks(
    transform: ReshardTransform, name: str, dtype: str, boxes: BoxUnits, changes: Changes, unit_bytes: int
) -> None:
    """Have a transform store the blocks that differ."""
    places = boxes.places(changes, unit_bytes)
    came = values_of(changes, unit_bytes)
    first = 0
    for box in boxes.boxes:
        units = volume(box) // boxes.block_elems
        begin, end = np.searchsorted(places, (first, first + units))
        if begin < end:
            index = _index(box, boxes.block_elems, places[begin:end] - first)
            transform.store_blocks(name, dtype, index, came[begin:end])
        first += units


def _index(box: Box, block_elems: int, places: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], ...]:
    """Return the positions of blocks in the rank's array, a row of indices for each dim; the last counts blocks."""
    extents = shape_of(box)
    index = np.unravel_index(places, (*extents[:-1], extents[-1] // block_elems))
    begins = [start for start, _ in box]
    begins[-1] //= block_elems
    return tuple(i + begin for i, begin in zip(index, begins, strict=True))
