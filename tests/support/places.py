"""Arrays laid out in a larger piece of memory: permuted, stepped, reversed, padded, at odd addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Place:
    """Where an array lies in a flat arena of bytes; the bytes around it must not change.

    Attributes:
        shape: shape of the array.
        dtype: its dtype, any byte order.
        order: its dims from the outermost to the innermost in memory.
        steps: per dim, grid points from one index to the next; negative: the dim runs backwards.
        pads: per dim, grid points before the first and after the last.
        byte_offset: bytes before the grid, so odd ones make the array misaligned.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: tuple[int, ...]
    steps: tuple[int, ...]
    pads: tuple[int, ...]
    byte_offset: int

    @property
    def _grid(self) -> list[int]:
        return [n * abs(s) + 2 * p for n, s, p in zip(self.shape, self.steps, self.pads, strict=True)]

    def arena(self, seed: int = 0) -> Bytes:
        """Return bytes that are all arbitrary, for the array and what lies around it."""
        size_bytes = int(np.prod(self._grid, dtype=np.int64)) * self.dtype.itemsize
        return np.random.default_rng(seed).integers(0, 256, self.byte_offset + size_bytes + 5, dtype=np.uint8)

    def view(self, arena: Bytes) -> npt.NDArray[Any]:
        """Return the array in an arena."""
        memory = arena[self.byte_offset : len(arena) - 5].view(self.dtype)
        grid = memory.reshape([self._grid[dim] for dim in self.order]).transpose(np.argsort(self.order))
        index = []
        for n, step, pad in zip(self.shape, self.steps, self.pads, strict=True):
            index.append(slice(pad, pad + n * abs(step), abs(step)))
        flips = tuple(slice(None, None, -1 if step < 0 else 1) for step in self.steps)
        view: npt.NDArray[Any] = grid[(*index, ...)][(*flips, ...)]
        assert view.shape == self.shape
        return view

    def holding(self, values: npt.NDArray[Any], seed: int = 0) -> npt.NDArray[Any]:
        """Return the array with these values, in an arena of its own."""
        view = self.view(self.arena(seed))
        view[...] = values
        return view

    def expect(self, before: Bytes, after: Bytes, values: npt.NDArray[Any]) -> None:
        """Assert that an arena changed to these values, bit for bit, and nowhere else."""
        wanted = before.copy()
        self.view(wanted)[...] = values
        np.testing.assert_array_equal(after, wanted, err_msg=str(self))


def packed_place(shape: Sequence[int], dtype: Any) -> Place:
    """Return the place of a C-contiguous array of its own."""
    dims = len(shape)
    return Place(tuple(shape), np.dtype(dtype), tuple(range(dims)), (1,) * dims, (0,) * dims, 0)


@st.composite
def places(draw: st.DrawFn, shape: Sequence[int], dtype: Any) -> Place:
    """Any place; one in two keeps the last dim contiguous, as fast paths want it."""
    dims = len(shape)
    order = list(draw(st.permutations(range(dims))))
    # Gaps in three dims at most: in all of them they would multiply to gigabytes.
    loose = set(order[:3]) if draw(st.booleans()) else set(order[-3:])
    steps, pads = [1] * dims, [0] * dims
    for dim in range(dims):
        steps[dim] = draw(st.sampled_from([1, 1, 2, 3, -1, -2] if dim in loose else [1, 1, -1]))
        pads[dim] = draw(st.sampled_from([0, 0, 1, 2, 5])) if dim in loose else 0
    if dims and draw(st.booleans()):
        order.remove(dims - 1)
        order.append(dims - 1)
        steps[-1] = 1
        pads[-1] = draw(st.sampled_from([pads[-1], 16, 32]))  # rows stay aligned, as fast paths want them
    offset = draw(st.sampled_from([0, 0, 1, 2, 3, 4, 8, 15, 16]))
    return Place(tuple(shape), np.dtype(dtype), tuple(order), tuple(steps), tuple(pads), offset)
