"""Boxes read straight out of the private memory of another process of the node: process_vm_readv(2).

The kernel copies from process to process at about the speed of a copy. A call has a price, though, and so have every
page it looks up and every place it fills: short runs that lie apart there would pay it again and again, and are left to
their owner. Short runs that lie side by side there and apart here are read as one into a scratch that stays in a cache
near the core, and go to their places from there; long ones are read as one into as many places.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lowshard.comm.node import atomic
from lowshard.comm.node.atomic import poke, read_process, read_process_into
from lowshard.compiled import INT, Signature, digest_of, load_compiled
from lowshard.compiled.deferred import njit
from lowshard.kernels import runs
from lowshard.kernels.cpu.copy import stream_copy
from lowshard.kernels.cpu.drive import source_digest
from lowshard.kernels.cpu.memory_steps import fence
from lowshard.kernels.runs import DST_OFFSET, FIRST_DIM, RUN, SRC_OFFSET
from lowshard.reshard.buckets import Span, run_table

LONG_BYTES = 8 << 10
"""Runs from here on are read by themselves."""
_SHORT_BYTES = 512
"""Runs from here on are worth being read where they lie side by side there."""
_SCRATCH_BYTES = 256 << 10
_MOST_ROWS = 1024
"""Places that a call fills at most (IOV_MAX)."""


class Crossing:
    """Boxes of another process's memory and where each goes, read in one call.

    Args:
        pid: the process.
        sources: boxes by their addresses there.
        targets: boxes of this process; one of the same extents for each of `sources`.
    """

    def __init__(self, pid: int, sources: Sequence[Span], targets: Sequence[Span]) -> None:
        self._pid, self._table = pid, run_table(sources, targets)
        self._vectors = np.zeros(2 * (1 + _MOST_ROWS), np.int64)

    def run(self) -> bool:
        """Read; return False if the memory could not be read, in whole or in part."""
        scratch = np.empty(_SCRATCH_BYTES + 64, np.uint8)
        at = -(-scratch.ctypes.data // 64) * 64
        return not read_across()(self._pid, self._table.columns, self._vectors.ctypes.data, at)


def is_worth_it(source: Span, target: Span) -> bool:
    """Return False for many short runs that lie apart there: packed by their owner they arrive sooner."""
    run = source.itemsize
    for n, there, here in zip(
        reversed(source.extents), reversed(source.strides), reversed(target.strides), strict=True
    ):
        if n == 0:
            return True
        if n == 1:
            continue
        if there != run or here != run:
            return run >= (_SHORT_BYTES if there == run else LONG_BYTES)
        run *= n
    return True


def can_read(pid: int, stretches: Sequence[tuple[int, int]]) -> list[bool]:
    """Return, for stretches of another process's memory, whether the first and the last byte of each can be read.

    Args:
        pid: the process.
        stretches: address and bytes of each.
    """
    ends = np.zeros(2 * len(stretches), np.uint8)
    sources = [Span(at + i, (), (), 1) for at, size in stretches for i in (0, size - 1)]
    targets = [Span(ends.ctypes.data + i, (), (), 1) for i in range(len(ends))]
    if Crossing(pid, sources, targets).run():
        return [True] * len(stretches)
    if len(stretches) == 1:
        return [False]
    return [can_read(pid, [one])[0] for one in stretches]


@cache
def read_across() -> Any:
    """Return the compiled function."""
    name = f"read_across_{digest_of([Path(__file__), Path(atomic.__file__), Path(runs.__file__)])}_{source_digest()}"
    return load_compiled(name, lambda: reshard_read_across, Signature((INT, "int64[2]", INT, INT)))


@njit(nogil=True)
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


@njit(nogil=True)
def _read_rows(pid: int, into: int, step: int, source: int, run: int, rows: int, vectors: int) -> bool:
    """Read runs that lie side by side, each to a place `step` bytes after the last one's."""
    poke(vectors, source)
    poke(vectors + 8, rows * run)
    for i in range(rows):
        poke(vectors + 16 * (1 + i), into + i * step)
        poke(vectors + 16 * (1 + i) + 8, run)
    moved = read_process_into(pid, vectors + 16, vectors, rows)
    if moved < 0:
        return False
    for i in range(moved // run, rows):  # noqa: SIM110  Numba compiles no generator in all(); none, but for a short read
        if not _read(pid, into + i * step, source + i * run, run, vectors):
            return False
    return True


@njit(nogil=True)
def _read_apart(
    pid: int, into: int, step: int, source: int, run: int, rows: int, vectors: int, scratch: int
) -> bool:
    """Read runs that lie side by side into the scratch, and put each to its place from there, past the caches."""
    if not _read(pid, scratch, source, rows * run, vectors):
        return False
    for i in range(rows):
        stream_copy(into + i * step, scratch + i * run, run, (0, 0, 0))
    return True


def reshard_read_across(pid: int, columns: Any, vectors: int, scratch: int) -> int:
    """Copy every run of a table out of another process's memory; 0, or 1 where a read fails.

    Args:
        pid: the process.
        columns: of a `RunTable` of bytes; sources and targets by address.
        vectors: address of an iovec for the source and _MOST_ROWS for the targets.
        scratch: address of _SCRATCH_BYTES, on a cache line.
    """
    outer = (columns.shape[0] - FIRST_DIM) // 3
    for box in range(columns.shape[1]):
        run, count, src_step, dst_step, planes = columns[RUN, box], 1, 0, 0, 1
        if outer:
            count = columns[FIRST_DIM, box]
            src_step, dst_step = columns[FIRST_DIM + 1, box], columns[FIRST_DIM + 2, box]
        together = _MOST_ROWS if src_step == run else 1
        short = src_step == run and run < LONG_BYTES and dst_step != run
        if short:
            together = _SCRATCH_BYTES // run
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
                rows = min(together, count - first)
                into, begin = target + first * dst_step, source + first * src_step
                if short:
                    done = _read_apart(pid, into, dst_step, begin, run, rows, vectors, scratch)
                else:
                    done = _read_rows(pid, into, dst_step, begin, run, rows, vectors)
                if not done:
                    return 1
                first += rows
    fence()
    return 0
