"""Pages of a cache turned into runs: packed row-major for a message, and back, or weighed for a digest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lowshard.box import Interval, strides_of
from lowshard.kernels.engine import engine_for, host_engine
from lowshard.kernels.runs import RunTable, lower

Array = Any
_BOX = "lkthd"
"""Dims of a part of a page, as it travels."""


def fragments(tables: Sequence[tuple[Sequence[int], int]], page_tokens: int) -> npt.NDArray[np.int64]:
    """Return what of which page is filled, int64 [pages, 3]: page id, tokens in it, and tokens before it in all tables.

    Args:
        tables: pages and tokens of each sequence.
        page_tokens: tokens of a page.
    """
    rows = []
    before = 0
    for pages, tokens in tables:
        made = np.empty((len(pages), 3), np.int64)
        made[:, 0] = pages
        starts = np.arange(len(pages), dtype=np.int64) * page_tokens
        made[:, 1] = np.minimum(page_tokens, tokens - starts)
        made[:, 2] = before + starts
        rows.append(made)
        before += tokens
    return np.concatenate(rows) if rows else np.zeros((0, 3), np.int64)


class PagedArray:
    """An array of pages, by the letters of its dims (`PagedLayout.dims`)."""

    def __init__(self, array: Array, dims: str) -> None:
        self.array, self._dims, self._itemsize = array, dims, int(array.dtype.itemsize)
        self._strides: Mapping[str, int] = dict(zip(dims, array.strides, strict=True))
        self._extents: Mapping[str, int] = dict(zip(dims, array.shape, strict=True))

    def pack(self, found: npt.NDArray[np.int64], heads: Interval, out: Array) -> None:
        """Copy pages' tokens of some of the array's heads into a flat array, [l, k, token, head, d] row-major."""
        if out.nbytes:
            table = self._runs(found, heads, out.nbytes, packs=True)
            engine_for(self.array).copy(self.array, out, table)

    def unpack(self, found: npt.NDArray[np.int64], heads: Interval, packed: Array) -> None:
        """Copy what `pack` made into pages."""
        if packed.nbytes:
            table = self._runs(found, heads, packed.nbytes, packs=False)
            engine_for(self.array).copy(packed, self.array, table)

    def weigh(
        self, found: npt.NDArray[np.int64], tokens: int, first_head: int, all_heads: int, place: int
    ) -> npt.NDArray[np.uint32]:
        """Return the weighted sums of a sequence's bits (`kernels.unit_weights`), of all heads of the array.

        Args:
            found: its fragments.
            tokens: of the sequence.
            first_head: of the array, among those of the model.
            all_heads: of the model.
            place: of the sequence's first element in what is weighed as a whole.
        """
        if not isinstance(self.array, np.ndarray):
            fetched = PagedArray(self.array.get(), self._dims)
            return fetched.weigh(found, tokens, first_head, all_heads, place)
        extents, offsets, strides = self._boxes(found, (0, self._extents["h"]))
        steps = np.array(strides_of(self._shape(tokens, all_heads)), np.int64)
        places = place + found[:, 2] * steps[2] + first_head * steps[3]
        table = lower(
            extents, offsets, places, strides, np.broadcast_to(steps, strides.shape), self._itemsize, 1
        )
        return host_engine().weigh(self.array, table)

    def _shape(self, tokens: int, heads: int) -> tuple[int, ...]:
        own = {letter: self._extents.get(letter, 1) for letter in _BOX}
        return tuple((own | {"t": tokens, "h": heads})[letter] for letter in _BOX)

    def _boxes(
        self, found: npt.NDArray[np.int64], heads: Interval
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the parts of pages in the array: extents, offsets and strides, by the dims that travel."""
        extents = np.empty((len(found), len(_BOX)), np.int64)
        extents[:] = self._shape(0, heads[1] - heads[0])
        extents[:, _BOX.index("t")] = found[:, 1]
        strides = np.empty_like(extents)
        strides[:] = [self._strides.get(letter, 0) for letter in _BOX]
        return extents, found[:, 0] * self._strides["p"] + heads[0] * self._strides["h"], strides

    def _runs(self, found: npt.NDArray[np.int64], heads: Interval, size_bytes: int, packs: bool) -> RunTable:
        extents, offsets, strides = self._boxes(found, heads)
        tokens = int(found[:, 1].sum())
        steps = np.array(strides_of(self._shape(tokens, heads[1] - heads[0]), self._itemsize), np.int64)
        assert size_bytes == tokens * int(np.prod(self._shape(1, heads[1] - heads[0]))) * self._itemsize
        packed = found[:, 2] * steps[2], np.broadcast_to(steps, strides.shape)
        if packs:
            return lower(extents, offsets, packed[0], strides, packed[1], self._itemsize, self._itemsize)
        return lower(extents, packed[0], offsets, packed[1], strides, self._itemsize, self._itemsize)
