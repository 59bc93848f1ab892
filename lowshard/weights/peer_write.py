"""What a rank reads for others of its node, written straight into their arrays: process_vm_writev(2).

A batch of rows is read into a scratch some rows at a time, and what each holder takes of them goes to its array while
they are still in the core's own cache. Nobody waits for anybody on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lowshard.box import Box, shape_of, single_run, strides_of, volume
from lowshard.checkpoint.catalog import Catalog, StoredPart
from lowshard.comm.reach import Reach
from lowshard.errors import CommError
from lowshard.kernels.buffer import address
from lowshard.tiling import Tiling
from lowshard.transfer.cross_constants import AT, BLOCK, MOST_PLACES, PID, RANK

SCRATCH_BYTES = 512 << 10
"""What is read at a time; it is still in a cache near the core when it is written to others."""


class ArrayPlace(NamedTuple):
    """Where a rank's array lies: in which of its blocks of memory, and from which byte on."""

    name: str
    block: int
    at: int
    shape: tuple[int, ...]
    dtype: Any


class RowBatch(NamedTuple):
    """A box that one rank reads for others, split into rows along its first dim of any extent."""

    name: str
    box: Box
    dim: int
    row_bytes: int
    run: tuple[StoredPart, int] | None
    """The stored array and the file offset where the box is one run of it."""
    row_ranges: np.ndarray
    """What each holder takes of each row, int64 [ranges, 8]: the rank and its block; the first of the batch's rows that
    it holds and the one behind its last; where the range begins in a row, and where that of the first such row lies in
    the block, in bytes; bytes from row to row there, and bytes of the range."""


def row_batches_of(
    name: str, box: Box, tiling: Tiling, places: Mapping[int, ArrayPlace], catalog: Catalog
) -> Iterator[RowBatch]:
    """Yield the batches of a box, one row of each no larger than the scratch."""
    itemsize = tiling.itemsize_bytes
    dim = next((d for d, (start, stop) in enumerate(box) if stop - start > 1), 0)
    row_bytes = volume(box[dim + 1 :]) * itemsize if box else itemsize
    if row_bytes > SCRATCH_BYTES:
        for i in range(*box[dim]):
            yield from row_batches_of(
                name, (*box[:dim], (i, i + 1), *box[dim + 1 :]), tiling, places, catalog
            )
        return
    run = None
    for part in catalog.tensor(name).parts:
        stored = part.local(box)
        if all(a <= c and d <= b for (a, b), (c, d) in zip(part.box, box, strict=True)):
            first = single_run(stored, part.entry.shape)
            run = None if first is None else (part, part.entry.start + first * itemsize)
    row_ranges = [
        row_range
        for rank, place in places.items()
        for held, local in tiling.places(rank, box)
        for row_range in _row_ranges(rank, place, box, dim, held, local, itemsize)
    ]
    yield RowBatch(name, box, dim, row_bytes, run, np.array(row_ranges, np.int64).reshape(-1, 8))


def _row_ranges(
    rank: int, place: ArrayPlace, box: Box, dim: int, held: Box, local: Box, itemsize: int
) -> Iterator[tuple[int, ...]]:
    near_steps, far_steps = strides_of(shape_of(box), itemsize), strides_of(place.shape, itemsize)
    run, inner, extents = itemsize, len(box), shape_of(held)
    while inner > dim + 1 and (
        extents[inner - 1] == 1 or near_steps[inner - 1] == far_steps[inner - 1] == run
    ):
        inner -= 1
        run *= extents[inner]
    places = [(0, place.at)]
    for d, ((a, _), (lo, _), (at, _)) in enumerate(zip(held, box, local, strict=True)):
        n = extents[d] if dim < d < inner else 1
        begin = (a - lo) * near_steps[d] if d > dim else 0
        places = [
            (near + begin + i * near_steps[d], far + (at + i) * far_steps[d])
            for near, far in places
            for i in range(n)
        ]
    low, high = (held[dim][0] - box[dim][0], held[dim][1] - box[dim][0]) if box else (0, 1)
    for near, far in places:
        yield rank, place.block, low, high, near, far, far_steps[dim] if box else itemsize, run


class PeerMemory:
    """Blocks of memory of the ranks in reach, to be written to."""

    # Who is written to keeps its blocks until all ranks have met again, whatever goes wrong: else what is written could
    # end up in memory that serves another purpose by then.

    def __init__(self, reach: Reach, rank: int, blocks: Sequence[np.ndarray]) -> None:
        """Exchange addresses."""
        count = max(reach.publish([], len(blocks)).notes.values())
        theirs = reach.publish([*blocks, *(None for _ in range(count - len(blocks)))])
        self._blocks = np.zeros((max(reach.peers) + 1, count + 1), np.int64)
        for peer in reach.peers:
            self._blocks[peer, 0] = 0 if peer == rank else reach.pid(peer)
            self._blocks[peer, 1:] = [theirs.address(peer, i) for i in range(count)]
        self._vectors = np.zeros(4 * MOST_PLACES, np.int64)
        self._vectors_at = address(self._vectors)

    def with_addresses(self, row_ranges: np.ndarray) -> np.ndarray:
        """Return row ranges with process (0: this one) and address in place of rank and block."""
        ranks, blocks = row_ranges[:, RANK], row_ranges[:, BLOCK]
        made = row_ranges.copy()
        made[:, PID] = self._blocks[ranks, 0]
        made[:, AT] = self._blocks[ranks, 1 + blocks]
        return made

    def write(self, row_ranges: int, count: int, first: int, rows: int, row_bytes: int, scratch: int) -> None:
        """Write the ranges of some rows of a batch; a range whose rank had no memory for it is left out."""
        from lowshard.transfer.peer_write_kernel import write_across

        failed = write_across()(row_ranges, count, first, rows, row_bytes, scratch, self._vectors_at)
        if failed:
            raise CommError(
                f"the memory of process {failed} could not be written; set LOWSHARD_CROSS_MEMORY=off to go without "
                "if it lives and may not be written"
            )
