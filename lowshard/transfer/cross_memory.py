"""Boxes read out of the private memory of another process of the node by a system call, process_vm_readv(2).

The kernel copies from process to process at about the speed of a copy. A call has a price, though, and so have every
page it looks up and every place it fills: short runs that lie apart there would pay it again and again, and are left to
their owner. Short runs that lie side by side there and apart here are read as one into a scratch that stays in a cache
near the core, and go to their places from there; long ones are read as one into as many places.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from lowshard.comm.node import atomic
from lowshard.comm.node.atomic import poke, read_process, read_process_into
from lowshard.compiled import INT, Signature, digest_of, load_native
from lowshard.compiled.deferred import njit
from lowshard.compiled.emitted import fence
from lowshard.kernels import runs
from lowshard.kernels.cpu.copy import stream_copy
from lowshard.kernels.cpu.drive import source_digest
from lowshard.kernels.runs import DST_OFFSET, FIRST_DIM, RUN, SRC_OFFSET
from lowshard.transfer import cross_constants
from lowshard.transfer.cross_constants import LONG_BYTES, MOST_PLACES

SCRATCH_BYTES = 256 << 10
VECTORS_WORDS = 2 * (1 + MOST_PLACES)
"""Of an iovec for the source and MOST_PLACES for the targets, in int64."""


@cache
def compiled_read() -> Any:
    """Return the compiled function, `read_across` with the address and the extents of its columns."""
    files = (__file__, atomic.__file__, runs.__file__, cross_constants.__file__)
    name = f"read_across_{digest_of([Path(str(file)) for file in files])}_{source_digest()}"
    signature = Signature((INT, "int64[2]", INT, INT, INT, INT, INT))
    return load_native(name, lambda: read_across, signature).call


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


def read_across(
    pid: int, columns: Any, item: int, src_base: int, dst_base: int, vectors: int, scratch: int
) -> int:
    """Copy every run of a table out of another process's memory; 0, or 1 where a read fails."""
    outer = (columns.shape[0] - FIRST_DIM) // 3
    for box in range(columns.shape[1]):
        run, count, src_step, dst_step, planes = item * columns[RUN, box], 1, 0, 0, 1
        if outer:
            count = columns[FIRST_DIM, box]
            src_step, dst_step = columns[FIRST_DIM + 1, box], columns[FIRST_DIM + 2, box]
        together = MOST_PLACES if src_step == run else 1
        short = src_step == run and run < LONG_BYTES and dst_step != run
        if short:
            together = SCRATCH_BYTES // run
        for dim in range(1, outer):
            planes *= columns[FIRST_DIM + 3 * dim, box]
        for plane in range(planes):
            source, target, left = (
                src_base + columns[SRC_OFFSET, box],
                dst_base + columns[DST_OFFSET, box],
                plane,
            )
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
