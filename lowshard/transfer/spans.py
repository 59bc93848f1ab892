"""Strided boxes in memory, and one call of compiled code that copies many: here, or out of another process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from lowshard.bounded import bounded_cache
from lowshard.box import Box, shape_of, strides_of
from lowshard.errors import CommError
from lowshard.kernels.buffer import STREAM_FROM_BYTES, address
from lowshard.kernels.engine import Engine, HostEngine, engine_for
from lowshard.kernels.runs import RunTable, lower
from lowshard.transfer.cross_constants import LONG_BYTES

Array = Any

_ROW_BYTES = 1 << 10
"""Runs of at least this size are copied one by one."""
_CALLS_KEPT = 8
"""Calls cached by a copy of boxes whose arrays change."""
_SHORT_BYTES = 512
"""Runs of at least this size, adjacent in the other process, are worth reading there."""


class Span(NamedTuple):
    """A strided box in memory, by its address."""

    at: int
    strides: tuple[int, ...]
    extents: tuple[int, ...]
    itemsize: int


def span_of(array: Array, box: Box) -> Span:
    """Return the span of a box of an array."""
    at = address(array) + sum(s * b[0] for s, b in zip(array.strides, box, strict=True))
    return Span(at, tuple(array.strides), shape_of(box), array.dtype.itemsize)


def box_span(index: tuple[slice, ...], shape: tuple[int, ...], itemsize: int) -> Span:
    """Return the span of slices of a row-major array at address 0."""
    strides = _row_major(shape, itemsize)
    at = sum(s.start * n for s, n in zip(index, strides, strict=True))
    return Span(at, strides, tuple(s.stop - s.start for s in index), itemsize)


def inner_span(span: Span, box: Box) -> Span:
    """Return the span of a box within a span."""
    at = span.at + sum(s * b[0] for s, b in zip(span.strides, box, strict=True))
    return Span(at, span.strides, shape_of(box), span.itemsize)


def packed_span(offset: int, extents: tuple[int, ...], itemsize: int) -> Span:
    """Return the span of a box packed row-major at an address."""
    return Span(offset, _row_major(extents, itemsize), extents, itemsize)


def is_worth_it(source: Span, target: Span, together_bytes: int = _SHORT_BYTES) -> bool:
    """Return whether to read a box of another process's private memory from here."""
    run = source.itemsize
    for n, there, here in zip(
        reversed(source.extents), reversed(source.strides), reversed(target.strides), strict=True
    ):
        if n == 0:
            return True
        if n == 1:
            continue
        if there != run or here != run:
            # many short runs arrive sooner packed by their owner
            return run >= (together_bytes if there == run else LONG_BYTES)
        run *= n
    return True


def can_read(pid: int, stretches: Sequence[tuple[int, int]]) -> list[bool]:
    """Return, for ranges of another process's memory, whether the first and the last byte of each can be read."""
    ends = np.zeros(2 * len(stretches), np.uint8)
    sources = [Span(at + i, (), (), 1) for at, size in stretches for i in (0, size - 1)]
    targets = [Span(address(ends) + i, (), (), 1) for i in range(len(ends))]
    if read_boxes(pid, run_table(sources, targets)):
        return [True] * len(stretches)
    if len(stretches) == 1:
        return [False]
    return [can_read(pid, [one])[0] for one in stretches]


def _start_of(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


class BoxCopy:
    """Copies boxes between two base addresses, all in one call of a kernel."""

    def __init__(
        self, sources: Sequence[Span], targets: Sequence[Span], src_base: int = 0, dst_base: int = 0,
        result_bytes: int | None = None, itemsize: int = 1,
    ) -> None:  # fmt: skip
        self.table = run_table(sources, targets, src_base, dst_base, itemsize)
        # result_bytes: of all that is written together, of which this may be a part
        of = self.table.total_elems * itemsize if result_bytes is None else result_bytes
        self._streams, self._is_empty = of >= STREAM_FROM_BYTES, not self.table.boxes
        self._engine: Engine | None = None  # that of the first arrays: all are of one kind
        self._by_rows = self.table.run_limits_bytes[0] >= _ROW_BYTES
        self._calls: dict[tuple[int, int, bool], Callable[[], None]] = {}

    def run(self, src: Array, dst: Array, past_caches: bool | None = None, fetching: bool = False) -> None:
        """Copy; `src` and `dst` are the arrays at the base addresses."""
        if self._is_empty:
            return
        if past_caches is None:
            past_caches = self._streams
        engine = self._engine
        if engine is None:
            engine = self._engine = engine_for(dst)
        if not (self._by_rows and isinstance(src, np.ndarray)):
            engine.copy(src, dst, self.table, past_caches)
            return
        # Most arrays stay where they are, and are used again and again.
        call = self._calls.get(key := (_start_of(src), _start_of(dst), past_caches))
        if call is None:
            if len(self._calls) >= _CALLS_KEPT:
                self._calls.clear()
            copier = cast("HostEngine", engine).rows_copier
            call = self._calls[key] = copier(src, dst, self.table, past_caches, fetching)
        call()

    def read_across(self, rank: int, pid: int, at: int, dst: Array) -> None:
        """Copy out of a peer process's private memory; `at` is the source's address there."""
        if not self._is_empty and not read_boxes(pid, self.table, at, _start_of(dst)):
            raise CommError(
                f"the memory of rank {rank} could not be read; set LOWSHARD_CROSS_MEMORY=off to go without if it lives "
                "and may not be read"
            )


def read_boxes(pid: int, table: RunTable, src_base: int = 0, dst_base: int = 0) -> bool:
    """Copy boxes out of another process's memory; return whether that could be read."""
    from lowshard.transfer.cross_memory import SCRATCH_BYTES, VECTORS_WORDS, compiled_read

    scratch, vectors = np.empty(SCRATCH_BYTES + 64, np.uint8), np.zeros(VECTORS_WORDS, np.int64)
    columns, at = table.columns, -(-_start_of(scratch) // 64) * 64
    return not compiled_read()(
        pid,
        _start_of(columns),
        *columns.shape,
        table.src_itemsize,
        src_base,
        dst_base,
        _start_of(vectors),
        at,
    )


def run_table(
    sources: Sequence[Span], targets: Sequence[Span], src_base: int = 0, dst_base: int = 0, itemsize: int = 1
) -> RunTable:
    """Return the runs of boxes, from `sources` to `targets`; offsets count from the bases."""
    by_byte = itemsize == 1
    dims = by_byte + max((len(s.extents) for s in sources), default=0)
    rows = len(sources)
    extents = np.ones((rows, dims), np.int64)
    strides = np.zeros((2, rows, dims), np.int64)
    offsets = np.zeros((2, rows), np.int64)
    last = dims - by_byte
    for i, pair in enumerate(zip(sources, targets, strict=True)):
        first = last - len(pair[0].extents)
        for side, span in enumerate(pair):
            strides[side, i, first:last] = span.strides
            offsets[side, i] = span.at
        extents[i, first:last] = pair[0].extents
        if by_byte:
            strides[:, i, last] = 1
            extents[i, last] = pair[0].itemsize
    return lower(
        extents, offsets[0] - src_base, offsets[1] - dst_base, strides[0], strides[1], itemsize, itemsize
    )


@bounded_cache(1 << 18)
def _row_major(extents: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(strides_of(extents, itemsize))
