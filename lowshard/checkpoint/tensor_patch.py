"""What one version of a tensor changes of another: which elements, or bytes of them, and their bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from lowshard.box import Box, full_box, relative_slices, shape_of, single_run, volume

Bits = npt.NDArray[Any]


def bits_of(array: np.ndarray, unit_bytes: int) -> Bits:
    """Return an array's bits, flat, as unsigned integers of so many bytes; a view where it is contiguous."""
    return array.reshape(-1).view(np.uint8).view(f"u{unit_bytes}")


@dataclass(frozen=True)
class Patch:
    """What is changed of a tensor, in units: its elements, or single bytes (then the last dim counts them)."""

    shape: tuple[int, ...]
    """Of the tensor, in units."""
    bits: Bits
    """Of the units that are changed."""
    positions: npt.NDArray[np.int64] | None
    """Where those lie, row-major, ascending; None where they are all there are."""
    is_xor: bool
    """Whether the bits are flipped, and not written."""

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""
        return self.bits.nbytes + (0 if self.positions is None else self.positions.nbytes)

    def apply(self, values: np.ndarray, box: Box) -> None:
        """Change a contiguous array in place that holds a box of the tensor."""
        flat = bits_of(values, self.bits.itemsize)
        if len(box) < len(self.shape):
            box = (*box, (0, self.shape[-1]))
        if self.positions is None:
            where: Any = slice(None)
            found = self.bits.reshape(self.shape)[relative_slices(box, full_box(self.shape))].reshape(-1)
        else:
            taken, where = self._within(self.positions, box)
            found = self.bits[taken]
        if self.is_xor:
            flat[where] ^= found
        else:
            flat[where] = found

    def _within(self, positions: npt.NDArray[np.int64], box: Box) -> tuple[Any, npt.NDArray[np.int64]]:
        """Return which positions lie in a box, and where they do, counted in the box."""
        if not volume(box):
            return slice(0, 0), np.zeros(0, np.int64)
        first = int(np.ravel_multi_index([a for a, _ in box], self.shape)) if box else 0
        last = int(np.ravel_multi_index([b - 1 for _, b in box], self.shape)) if box else 0
        low, high = np.searchsorted(positions, [first, last + 1]).tolist()
        near = positions[low:high]
        if single_run(box, self.shape) is not None:
            return slice(low, high), near - first
        places = np.unravel_index(near, self.shape)
        inside = np.ones(len(near), bool)
        for place, (a, b) in zip(places, box, strict=True):
            inside &= (place >= a) & (place < b)
        local = [place[inside] - a for place, (a, _) in zip(places, box, strict=True)]
        return low + np.flatnonzero(inside), np.ravel_multi_index(local, shape_of(box))


def flipped_bits(pieces: Iterable[bytes], shape: Sequence[int], itemsize: int) -> Patch:
    """Return the patch of the bits that two versions of a tensor differ in, which come row-major, piece by piece.

    Args:
        pieces: of any number of bytes each; all of the tensor.
        shape: of the tensor.
        itemsize: bytes of an element.
    """
    raw, at = np.empty(prod(shape) * itemsize, np.uint8), 0
    for piece in pieces:
        raw[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    bits = raw.view(f"u{itemsize}")
    if np.count_nonzero(bits) * (8 + itemsize) > bits.nbytes:  # places would take more than all there is
        return Patch(tuple(shape), bits, None, is_xor=True)
    positions = np.flatnonzero(bits)
    return Patch(tuple(shape), bits[positions], positions, is_xor=True)
