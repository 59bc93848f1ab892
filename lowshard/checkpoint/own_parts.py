"""The boxes that a rank writes of a sharded state: views of its arrays, or a copy for a save in the background."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from lowshard.argument import instance
from lowshard.box import Box, contains, full_box, relative_slices
from lowshard.checkpoint.header import FilePath
from lowshard.checkpoint.read_shares import Share, shares
from lowshard.comm import Communicator, collective_step
from lowshard.comm.work import Work
from lowshard.errors import CheckpointError
from lowshard.foreign_array import view_in_call
from lowshard.layout import Layout
from lowshard.tiling import Tiling

State = Mapping[str, tuple[Layout | Tiling, Any]]  # arrays of any library, or None
Parts = Sequence[tuple[Share, np.ndarray]]
"""Boxes that a rank writes, with their content."""
_LINE_BYTES = 64


def write_parts(
    comm: Communicator, path: FilePath, what: str, tilings: Mapping[str, Tiling], state: State, *, wait: bool,
    is_copy: bool, write: Callable[[Communicator, Parts], None],
) -> Work | None:  # fmt: skip
    """Write what falls to this rank, at once, or in the background out of a copy; then return the work."""
    parts = own_parts(tilings, state, comm.rank)
    if wait:
        write(comm, parts)
        return None
    beside = comm.control.beside
    if not is_copy:
        with collective_step(comm, what, path=path):
            ends = list(accumulate((_padded_bytes(a) for _, a in parts), initial=0))
            if beside.memory is None or beside.memory.size < ends[-1]:
                beside.memory = None  # before there is more
                beside.memory = np.empty(ends[-1], np.uint8)
            parts = [
                (share, _put(array, beside.memory[at:]))
                for (share, array), at in zip(parts, ends, strict=False)
            ]
    return beside.start(lambda: write(beside.comm, parts), f"{what} of rank {comm.rank} to {path}")


def check_turn(step: collective_step, comm: Communicator, wait: object) -> None:
    """Wait for a save that is under way, whose error the step raises; check `wait` of the next one."""
    step.error = comm.control.settle_beside()
    instance(wait, bool, "wait is True or False", CheckpointError)


def own_parts(tilings: Mapping[str, Tiling], state: State, rank: int) -> Parts:
    """Return the boxes that fall to a rank, as views of its arrays."""
    found = []
    for share in shares(tilings):
        if share.rank == rank:
            array = view_in_call(state[share.name][1], share.name)
            assert array is not None  # checked before
            found.append((share, box_of(array, tilings[share.name], rank, share.box)))
    return found


def box_of(array: np.ndarray, tiling: Tiling, rank: int, box: Box) -> np.ndarray:
    """Return a view of the part of a rank's local array that holds a box, which lies in one of its tiles."""
    if not array.ndim:
        return array
    tile = next(t for t in tiling.tiles(rank) if contains(t.box, box))
    local: np.ndarray = array[relative_slices(tile.local, full_box(array.shape))]
    return local[relative_slices(box, tile.box)]


def _padded_bytes(array: np.ndarray) -> int:
    return -(-array.nbytes // _LINE_BYTES) * _LINE_BYTES


def _put(array: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """Copy an array to the start of a buffer; return the copy."""
    copy: np.ndarray = memory[: array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
