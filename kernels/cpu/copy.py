"""Copies runs of bytes: single elements, rows by memcpy, and long rows by non-temporal stores."""

from __future__ import annotations

from typing import Any

from lowshard.compiled.deferred import njit
from lowshard.compiled.emitted import copy_bytes
from lowshard.kernels.cpu.drive import Ahead, named, prefetch_line, prefetch_run, rows_of
from lowshard.kernels.cpu.memory_steps import (
    copy_line,
    load_u8,
    load_u16,
    load_u32,
    load_u64,
    move_lines,
    store_value,
    stream_lines,
)

STAGE_BYTES = 12 << 10
"""Bytes collected in scratch memory before lines are written non-temporally; one more run fits behind."""

LAG_BYTES = 4 << 10
"""Lines are written out this long after they were filled, so that the loads need not wait."""

RING_BYTES = 4 << 10
"""A stage of equal parts, each of whole lines, that are written in turn. What lies in a part is sent when it is next to
be written. The target's lines begin `head` bytes after those of the ring: loads lie over two lines, which costs little,
and stores do not. The line after the ring is for what lies over its end."""


_LONG_BYTES = 2 << 10
"""Shorter runs are copied by code without a loop, in which each instruction handles one line of every run.

Machines that prefetch by instruction would take a loop for one long stream, and read on where a run ends.
"""


def _mover(streaming: int) -> Any:
    @njit(nogil=True)
    @named("streaming" if streaming else "cached")
    def move_ahead(dst: int, src: int, size_bytes: int, ahead: Ahead) -> tuple[int, int]:
        far, mid, near = ahead
        left = size_bytes
        if left >= long_bytes:
            while left >= 256:
                move_lines(dst, src, far, mid, near, 4, streaming)
                src, dst, left = src + 256, dst + 256, left - 256
        if left & 1024:
            move_lines(dst, src, far, mid, near, 16, streaming)
            src, dst = src + 1024, dst + 1024
        if left & 512:
            move_lines(dst, src, far, mid, near, 8, streaming)
            src, dst = src + 512, dst + 512
        if left & 256:
            move_lines(dst, src, far, mid, near, 4, streaming)
            src, dst = src + 256, dst + 256
        if left & 128:
            move_lines(dst, src, far, mid, near, 2, streaming)
            src, dst = src + 128, dst + 128
        if left & 64:
            move_lines(dst, src, far, mid, near, 1, streaming)
            src, dst = src + 64, dst + 64
        return src, dst

    long_bytes = _LONG_BYTES
    return move_ahead


stream_ahead, copy_ahead = _mover(1), _mover(0)
"""`(dst, src, size_bytes, ahead)`: copy the whole lines of a run past the caches, or into them, asking for others as
`run_rows` says; return where both sides ended."""


@njit(nogil=True)
def stream_copy(dst: int, src: int, size_bytes: int, ahead: Ahead) -> None:
    """Copy bytes with non-temporal stores; partial lines at the ends are stored normally. Prefetches as in `drive`."""
    end = dst + size_bytes
    head = min(-dst & 63, size_bytes)
    if head:
        copy_bytes(dst, src, head)
        src, dst = src + head, dst + head
    if ahead[0]:
        if src & 63 or dst + 64 > end:
            prefetch_line(src + (end - dst) - 1, ahead)
        src, dst = stream_ahead(dst, src, (end - dst) & -64, ahead)
    else:
        while dst + 256 <= end:
            stream_lines(dst, src, 4)
            src, dst = src + 256, dst + 256
        while dst + 64 <= end:
            stream_lines(dst, src, 1)
            src, dst = src + 64, dst + 64
    if dst < end:
        copy_bytes(dst, src, end - dst)


@njit(nogil=True)
def send_lines(line: int, stage: int, begin: int, end: int, skip_bytes: int) -> int:
    """Write out the whole lines of the stage between two offsets; the first line has `skip_bytes` of others."""
    if begin == 0 and skip_bytes and begin + 64 <= end:
        copy_bytes(line + skip_bytes, stage + skip_bytes, 64 - skip_bytes)
        begin = 64
    while begin + 64 <= end:
        stream_lines(line + begin, stage + begin, 1)
        begin += 64
    return begin


@njit(nogil=True)
def flush_stage(line: int, stage: int, begin: int, end: int, skip_bytes: int) -> None:
    """Write out the rest of the stage."""
    begin = send_lines(line, stage, begin, end, skip_bytes)
    begin = max(begin, skip_bytes)
    copy_bytes(line + begin, stage + begin, end - begin)


@njit(nogil=True)
def flush_ring(dst: int, line: int, end: int, ring: int) -> None:
    """Write out the rest of a ring whose first part was for `dst`, from the target's line `line` to `end`."""
    copy_line(ring + RING_BYTES, ring)
    at = (line - dst) & (RING_BYTES - 1)
    while line + 64 <= end:
        stream_lines(line, ring + at, 1)
        line, at = line + 64, (at + 64) & (RING_BYTES - 1)
    copy_bytes(line, ring + at, end - line)


@rows_of("copy")
def _copy_rows() -> Any:
    def copy_rows(
        kind: Any, src: Any, dst: Any, scales: Any, run: Any, rows: Any, src_step: Any, dst_step: Any,
        ahead: Any, scratch: Any, first: Any, second: Any, streaming: Any,
    ) -> None:  # fmt: skip
        size = run * first
        if size == 1:
            for row in range(rows):
                store_value(dst + row * dst_step, load_u8(src + row * src_step))
        elif size == 2:
            for row in range(rows):
                store_value(dst + row * dst_step, load_u16(src + row * src_step))
        elif size == 4:
            for row in range(rows):
                store_value(dst + row * dst_step, load_u32(src + row * src_step))
        elif size == 8:
            for row in range(rows):
                store_value(dst + row * dst_step, load_u64(src + row * src_step))
        elif streaming and size >= second:
            for row in range(rows):
                at, to = src + row * src_step, dst + row * dst_step
                stream_copy(to, at, size, ahead)
        else:
            for row in range(rows):
                at = src + row * src_step
                if ahead[0]:
                    prefetch_run(at, size, ahead)
                copy_bytes(dst + row * dst_step, at, size)

    return copy_rows


@rows_of("fetch")
def _fetch_rows() -> Any:
    def fetch_rows(
        kind: Any, src: Any, dst: Any, scales: Any, run: Any, rows: Any, src_step: Any, dst_step: Any,
        ahead: Any, scratch: Any, first: Any, second: Any, streaming: Any,
    ) -> None:  # fmt: skip
        for row in range(rows):
            at, to = src + row * src_step, dst + row * dst_step
            end = at + run
            if at & 63 or run & 63:
                prefetch_line(end - 1, ahead)  # a run that begins amid a line has one line more
            at, to = copy_ahead(to, at, run, ahead)
            if at < end:
                copy_bytes(to, at, end - at)

    return fetch_rows
