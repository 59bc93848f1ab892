"""What differs between arrays on a GPU, found and written there; the host has the places, which it counts in runs.

An array is read once, an element that differs is written once, and beside two bytes for every sixteen, or one for each
block, nothing of the array's size is made.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lowshard.kernels.buffer import Array
from lowshard.kernels.cuda.cuda_engine import CudaEngine
from lowshard.kernels.runs import RunTable

_BITS = (
    np.unpackbits(np.arange(1 << 16, dtype=np.uint16).view(np.uint8))
    .reshape(-1, 16)
    .sum(axis=1, dtype=np.uint8)
)
"""How many bits of a uint16 are set."""


class DeviceSearch:
    """Searches on one GPU.

    Args:
        engine: of the GPU.
        xp: CuPy, or what stands in for it.
    """

    def __init__(self, engine: CudaEngine, xp: Any) -> None:
        self._engine, self.xp = engine, xp

    def differing(self, new: Array, old: Array, runs: RunTable, most: int) -> tuple[int, Array | None]:
        """Return how many elements of two arrays differ, and which, int64, ascending; None for more than `most`.

        Args:
            new: an array.
            old: another one.
            runs: of both, in elements; they are counted through.
            most: elements.
        """
        xp, itemsize = self.xp, runs.src_itemsize
        unit_bytes = self._engine.word_bytes(runs, new, old, of_runs=True)
        lanes = unit_bytes // itemsize
        masks = xp.empty(runs.total_elems // lanes, xp.uint16)
        self._engine.differ(new, old, masks, runs, unit_bytes)
        count = int(xp.asarray(_BITS)[masks].sum())
        if count > most:
            return count, None
        hit = xp.flatnonzero(masks)
        at = xp.flatnonzero(masks[hit][:, None] >> xp.arange(lanes, dtype=xp.uint16) & xp.uint16(1))
        return count, hit[at // lanes] * lanes + at % lanes

    def digested(self, new: Array, digests: Array, key: npt.NDArray[np.uint64], runs: RunTable) -> Array:
        """Return which blocks have other digests than those given, int64, ascending, and put theirs in the place.

        Args:
            new: an array.
            digests: uint64 [blocks].
            key: of the digests.
            runs: of the array, in blocks; they are counted through.
        """
        flags = self.xp.empty(digests.size, self.xp.uint8)
        self._engine.digest(new, self.xp.asarray(key), digests, flags, runs)
        return self.xp.flatnonzero(flags)

    def gathered(self, array: Array, places: Array, runs: RunTable) -> Array:
        """Return elements, or blocks, by number, uint8 [places, bytes of one]."""
        packed = self.xp.empty((len(places), runs.src_itemsize), self.xp.uint8)
        self._engine.gather(array, packed, places, runs)
        return packed

    def scattered(self, array: Array, places: Array, values: Array, runs: RunTable) -> None:
        """Write elements, or blocks, to where they belong: what `gathered` returned."""
        self._engine.scatter(array, values, places, runs)
