"""Gathers short runs into one contiguous buffer and scatters them back, with little work for each run.

Gathering: runs of whole cache lines are written non-temporally at once. Others would end within a line, which the
machine has to read before it can write it: they are collected in the first cache, and written out by lines. Scattering:
such partial lines are prefetched.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from lowshard.compiled import INT, Signature, load_compiled
from lowshard.compiled.deferred import njit
from lowshard.compiled.emitted import copy_bytes, fence
from lowshard.kernels.cpu.copy import LAG_BYTES, STAGE_BYTES, copy_ahead, send_lines, stream_ahead
from lowshard.kernels.cpu.drive import (
    COLUMNS,
    OWN_ROWS_BYTES,
    SMALL_GAP_BYTES,
    boxes_ahead,
    prefetch_line,
    rows_ahead,
    source_digest,
)
from lowshard.kernels.cpu.memory_steps import copy_line, prefetch_to_write, stream_lines
from lowshard.kernels.runs import DST_OFFSET, RUN, SRC_OFFSET

SHORT_RUN_BYTES = 8 << 10
"""Longer runs are streamed one by one."""

_ASK_BYTES = 32 << 10
"""Distance at which partial lines of the target are prefetched when scattering."""

THROUGH_CACHES, STAGED, WHOLE_LINES = 0, 1, 2
"""Ways to write: normal stores; collected, then non-temporal; non-temporal at once."""


@njit(nogil=True)
def _gather_lines(columns: Any, src: int, to: int, itemsize: int) -> None:
    """Gather runs of whole lines, one a box, by non-temporal stores."""
    last = columns.shape[1] - 1
    sent_bytes = columns[DST_OFFSET, last] - columns[DST_OFFSET, 0] + columns[RUN, last] * itemsize
    run_bytes = sent_bytes // (last + 1)
    far, mid, near = rows_ahead(1, run_bytes)
    for box in range(last + 1):
        at, size = src + columns[SRC_OFFSET, box], columns[RUN, box] * itemsize
        ahead = boxes_ahead(columns, SRC_OFFSET, box, far, mid, near)
        if at & 63:
            prefetch_line(at + size - 1, ahead)  # it has one line more
        to = stream_ahead(to, at, size, ahead)[1]
    fence()


@cache
def gather_kernel() -> Callable[..., None]:
    """Return `kernel(columns, src, dst, scratch, itemsize, way)` for gapless targets and one outer dim at most.

    Every run has at most SHORT_RUN_BYTES. The way is one of THROUGH_CACHES, STAGED and WHOLE_LINES, the last for
    targets and runs that all begin and end with a cache line.
    """
    stage_bytes, lag_bytes, own_rows_bytes, small_gap = (
        STAGE_BYTES,
        LAG_BYTES,
        OWN_ROWS_BYTES,
        SMALL_GAP_BYTES,
    )

    def gather(columns: Any, src: int, dst: int, stage: int, itemsize: int, way: int) -> None:
        boxes, has_rows = columns.shape[1], columns.shape[0] > 3
        to = dst + columns[DST_OFFSET, 0]
        if way == WHOLE_LINES and not has_rows:
            _gather_lines(columns, src, to, itemsize)
            return
        # The stage begins where a line of the target does. What that line holds before ours stays as it is.
        skip = to & 63
        line, used, sent = to - skip, skip, 0
        last_bytes = 0
        far, mid, near = 1, 1, 1
        for box in range(boxes):
            offset, size = columns[SRC_OFFSET, box], columns[RUN, box] * itemsize
            at, rows, step = src + offset, 1, 0
            if has_rows:
                rows, step = columns[3, box], columns[4, box]
            box_bytes = size * rows
            if box_bytes != last_bytes:  # a division takes as long as copying a line
                last_bytes = box_bytes
                far, mid, near = rows_ahead(1, box_bytes)
            ahead = (0, 0, 0)
            if box_bytes <= own_rows_bytes:
                ahead = boxes_ahead(columns, SRC_OFFSET, box, far, mid, near)
            elif abs(step) >= size + small_gap:
                ahead = rows_ahead(step, size)
            for _ in range(rows):
                end = at + size
                if at & 63:
                    prefetch_line(end - 1, ahead)  # a run that begins amid a line has one line more
                if way == WHOLE_LINES:
                    at, to = stream_ahead(to, at, size, ahead)
                else:
                    into = stage + used if way == STAGED else to
                    at, into = copy_ahead(into, at, size, ahead)
                    if at < end:
                        prefetch_line(at, ahead)
                        copy_bytes(into, at, end - at)
                    to += size
                if way == STAGED:
                    used += size
                    sent = send_lines(line, stage, sent, used - lag_bytes, skip)
                    if used >= stage_bytes:
                        sent = send_lines(line, stage, sent, used, skip)
                        copy_line(stage, stage + sent)
                        line, used, sent, skip = line + sent, used - sent, 0, 0
                at = end - size + step
        if way == STAGED:
            sent = send_lines(line, stage, sent, used, skip)
            copy_bytes(line + sent, stage + sent, used - sent)
        if way != THROUGH_CACHES:
            fence()

    return load_compiled(
        f"gather_{source_digest()}", lambda: gather, Signature((COLUMNS, *(INT,) * 5), "void")
    )


@cache
def scatter_kernel() -> Callable[..., None]:
    """Return `kernel(columns, src, dst, itemsize)` for gapless sources and one outer dim at most."""
    far_bytes = _ASK_BYTES

    def scatter(columns: Any, src: int, dst: int, itemsize: int) -> None:
        boxes, has_rows = columns.shape[1], columns.shape[0] > 3
        at = src + columns[SRC_OFFSET, 0]
        last_bytes, far_boxes = 0, 0
        for box in range(boxes):
            offset, size = columns[DST_OFFSET, box], columns[RUN, box] * itemsize
            to, rows, step = dst + offset, 1, 0
            if has_rows:
                rows, step = columns[3, box], columns[5, box]
            box_bytes = size * rows
            if box_bytes != last_bytes:
                last_bytes = box_bytes
                far_boxes = max(1, far_bytes // box_bytes) if box_bytes <= far_bytes else 0
            if far_boxes:
                far = columns[DST_OFFSET, min(box + far_boxes, boxes - 1)] - offset
            else:
                far = (far_bytes // size) * step
            for _ in range(rows):
                end, following = to + size, to + step
                if to & 63:
                    prefetch_to_write(to + far)
                    head = -to & 63
                    copy_bytes(to, at, head)
                    at, to = at + head, to + head
                while to + 64 <= end:
                    stream_lines(to, at, 1)
                    at, to = at + 64, to + 64
                if to < end:
                    prefetch_to_write(to + far)
                    copy_bytes(to, at, end - to)
                    at += end - to
                to = following
        fence()

    return load_compiled(
        f"scatter_{source_digest()}", lambda: scatter, Signature((COLUMNS, *(INT,) * 3), "void")
    )
