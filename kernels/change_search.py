"""What finds and writes changes: plain NumPy, compiled code, or CUDA. All of them give the same texts."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from lowshard.kernels.buffer import Array, address
from lowshard.kernels.change_boxes import BoxUnits
from lowshard.kernels.change_encoding import Bytes, Changes


class ChangeSearch(Protocol):
    """One of them. What `ChangeBoxes` has checked is so: there are units, and texts are of the boxes' size."""

    def find(
        self, boxes: BoxUnits, new: Array, old: Array, scratch: ScratchBuffer, may_stop: bool, may_step: bool
    ) -> Changes:
        """Return what is in `new` other than in `old`; a text of None where it has found that too much is."""

    def write(self, boxes: BoxUnits, array: Array, changes: Changes) -> None:
        """Write what differs.

        Raises:
            VerificationError: the text is none of these boxes; a part of it is written.
        """


class ScratchBuffer:
    """Memory that searches use one after the other; pages of it are taken as they are written."""

    def __init__(self) -> None:
        self._held: Bytes = np.empty(0, np.uint8)
        self._scratch: Bytes = np.empty(0, np.uint8)

    def aligned(self, size_bytes: int) -> Bytes:
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
