"""Boxes read straight out of the private memory of another process of the node: process_vm_readv(2).

The kernel copies a long run from process to process at about the speed of a copy. A call has a price, though, and so
has every page it looks up: a run of a KB would pay it again and again. Short runs that lie side by side are read
in one stretch, into memory that stays in the cache, and are dealt out from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from lowshard.comm.node.atomic import copy_bytes, fence, poke, read_process
from lowshard.comm.node.move import copy_past
from lowshard.compiled import compile_cached
from lowshard.kernels.runs import DST_OFFSET, FIRST_DIM, RUN, SRC_OFFSET
from lowshard.reshard.wire import Span, run_table

SCRATCH_BYTES = 256 << 10
"""What is read in one stretch at most: it stays in a core's own cache."""
LONG_BYTES = 8 << 10
"""Runs from here on are read by themselves."""
_STREAM_BYTES = 1 << 10
"""Rows from here on are written past the caches, where they are many."""
_MANY_BYTES = 4 << 20


class Crossing:
    """Boxes of another process's memory and where each goes, read in one call.

    Args:
        pid: the process.
        sources: boxes by their addresses there.
        targets: boxes of this process; one of the same extents for each of `sources`.
        scratch: uint8, memory of this process that reads may go through.
    """

    def __init__(
        self, pid: int, sources: Sequence[Span], targets: Sequence[Span], scratch: np.ndarray
    ) -> None:
        self._pid, self._scratch = pid, scratch
        self._table = run_table(sources, targets)
        self._vectors = np.zeros(4, np.int64)
        self._streams = self._table.total_elems >= _MANY_BYTES

    def run(self) -> bool:
        """Read; return False if the memory could not be read, in whole or in part."""
        scratch = self._scratch
        return not read_across()(
            self._pid, self._table.columns, scratch.ctypes.data, scratch.size, self._vectors.ctypes.data,
            self._streams,
        )  # fmt: skip


def is_worth_it(source: Span, target: Span) -> bool:
    """Return False for many short runs that lie apart: packed by their owner they arrive sooner."""
    table = run_table([source], [target])
    if not table.boxes or not table.outer_dims or table.columns[FIRST_DIM, 0] == 1:
        return True
    run, step = int(table.columns[RUN, 0]), int(table.columns[FIRST_DIM + 1, 0])
    return run >= LONG_BYTES or step == run


def can_read(pid: int, address: int, size_bytes: int) -> bool:
    """Return whether the first and the last byte of a stretch of another process's memory can be read."""
    ends = np.zeros(2, np.uint8)
    sources = [Span(address + at, (), (), 1) for at in (0, size_bytes - 1)]
    targets = [Span(ends.ctypes.data + i, (), (), 1) for i in (0, 1)]
    return Crossing(pid, sources, targets, ends).run()


@cache
def read_across() -> Any:
    """Return the compiled function."""
    columns = types.Array(types.int64, 2, "C", readonly=True)
    args = (types.int64, columns, types.int64, types.int64, types.int64, types.boolean)
    return compile_cached(reshard_read_across, types.int64(*args))


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _read(pid: int, into: int, source: int, size_bytes: int, vectors: int) -> bool:
    done = 0
    while done < size_bytes:
        poke(vectors, into + done)
        poke(vectors + 8, size_bytes - done)
        poke(vectors + 16, source + done)
        poke(vectors + 24, size_bytes - done)
        moved = read_process(pid, vectors, vectors + 16)
        if moved <= 0:
            return False
        done += moved
    return True


def reshard_read_across(
    pid: int, columns: Any, scratch: int, scratch_bytes: int, vectors: int, streams: bool
) -> int:
    """Copy every run of a table out of another process's memory; 0, or 1 where a read fails.

    Args:
        pid: the process.
        columns: of a `RunTable` of bytes; sources and targets by address.
        scratch: address of memory that reads may go through.
        scratch_bytes: its size.
        vectors: address of two iovecs, 32 bytes.
        streams: write rows of a KB and more past the caches.
    """
    outer = (columns.shape[0] - FIRST_DIM) // 3
    for box in range(columns.shape[1]):
        run, count, src_step, dst_step = columns[RUN, box], 1, 0, 0
        if outer:
            count = columns[FIRST_DIM, box]
            src_step, dst_step = columns[FIRST_DIM + 1, box], columns[FIRST_DIM + 2, box]
        together = 1  # runs a read
        if count > 1 and run < LONG_BYTES and src_step == run and 2 * run <= scratch_bytes:
            together = scratch_bytes // run
        planes = 1
        for dim in range(1, outer):
            planes *= columns[FIRST_DIM + 3 * dim, box]
        for plane in range(planes):
            source, target, left = columns[SRC_OFFSET, box], columns[DST_OFFSET, box], plane
            for dim in range(1, outer):
                n = columns[FIRST_DIM + 3 * dim, box]
                source += left % n * columns[FIRST_DIM + 3 * dim + 1, box]
                target += left % n * columns[FIRST_DIM + 3 * dim + 2, box]
                left //= n
            first = 0
            while first < count:
                n = min(together, count - first)
                begin, into = source + first * src_step, target + first * dst_step
                if n == 1:
                    if not _read(pid, into, begin, run, vectors):
                        return 1
                else:
                    if not _read(pid, scratch, begin, n * run, vectors):
                        return 1
                    for i in range(n):
                        if streams and run >= _STREAM_BYTES:
                            copy_past(into + i * dst_step, scratch + i * run, run)
                        else:
                            copy_bytes(into + i * dst_step, scratch + i * run, run)
                first += n
    if streams:
        fence()  # what went past the caches is there before anybody is told
    return 0
