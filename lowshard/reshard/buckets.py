"""How moves travel: cut into pieces, put into buckets of bounded size, and copied by one run table a bucket.

Both ends cut alike, from the moves alone. A piece begins at a multiple of 16 bytes of its bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np

from lowshard.bounded import bounded_cache
from lowshard.box import Box, shape_of
from lowshard.kernels.buffer import address
from lowshard.kernels.engine import Engine, HostEngine, engine_for
from lowshard.kernels.runs import RunTable, lower
from lowshard.reshard.reshard_plan import Move

Array = Any

ALIGN_BYTES = 16
_ROW_BYTES = 1 << 10
"""Runs from here on are best copied each by itself."""
STREAMED_BYTES = 4 << 20
"""What is written in one call goes past the caches from here on: it would not stay in them."""


class Piece(NamedTuple):
    """A part of a move that lies in one bucket."""

    move: Move
    component: int
    """Which array of a transformed move, or -1: the box itself, as it is."""
    box: Box
    """Within the move's box, or the range of bytes of the component."""
    offset_bytes: int
    """In the bucket."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """What travels as one message."""

    pieces: tuple[Piece, ...]
    size_bytes: int


class Part(NamedTuple):
    """What is cut into pieces: the box of a move, or some bytes of one of the arrays that travel for it."""

    move: Move
    component: int
    extents: tuple[int, ...]
    """Of the box, or the number of bytes."""
    itemsize: int
    begin_bytes: int = 0
    """Of a component: the first byte."""


def buckets_of(parts: Iterable[Sequence[Part]], limit_bytes: int) -> tuple[Bucket, ...]:
    """Return the buckets of one stream.

    Args:
        parts: in the order of the wire; several in one sequence stay together in one bucket, which they fit into.
        limit_bytes: size of a bucket; a piece is never larger, unless one element is.
    """
    found: list[Bucket] = []
    pieces: list[Piece] = []
    at = 0
    for together in parts:
        needed = sum(_aligned(prod(part.extents) * part.itemsize) for part in together)
        for move, component, extents, itemsize, begin in together:
            for box in split_box(extents, max(1, limit_bytes // itemsize)):
                size = prod(stop - start for start, stop in box) * itemsize
                if pieces and at + (size if len(together) == 1 else needed) > limit_bytes:
                    found.append(Bucket(tuple(pieces), pieces[-1].offset_bytes + pieces[-1].size_bytes))
                    pieces, at = [], 0
                if component >= 0:
                    box = ((begin + box[0][0], begin + box[0][1]),)
                pieces.append(Piece(move, component, box, at, size))
                at += _aligned(size)
                needed -= _aligned(size)
    if pieces:
        found.append(Bucket(tuple(pieces), pieces[-1].offset_bytes + pieces[-1].size_bytes))
    return tuple(found)


def bands_of(
    move: Move, shapes: Sequence[tuple[int, ...]], sizes: Sequence[int], limit_bytes: int
) -> list[list[Part]]:
    """Return the parts of arrays that travel together: bands of the same rows of each, where they have as many.

    Args:
        move: that they travel for.
        shapes: of the arrays.
        sizes: their bytes.
        limit_bytes: size of a bucket.
    """
    rows = {shape[0] if shape else 0 for shape in shapes}
    count = rows.pop()
    if len(shapes) > 1 and not rows and count and all(sizes):
        row_bytes = [size // count for size in sizes]
        most = (limit_bytes - ALIGN_BYTES * len(sizes)) // sum(row_bytes)
        if most > 0:
            most = -(-count // -(-count // most))  # as many rows each, and no small rest
            return [
                [Part(move, c, ((min(most, count - r)) * n,), 1, r * n) for c, n in enumerate(row_bytes)]
                for r in range(0, count, most)
            ]
    return [[Part(move, c, (size,), 1)] for c, size in enumerate(sizes)]


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


@bounded_cache(1 << 20)
def split_box(extents: tuple[int, ...], limit_elems: int) -> tuple[Box, ...]:
    """Return boxes that make up `[0, extent)` in each dim, in row-major order, none of more than so many elements."""
    if prod(extents) == 0:
        return ()
    if prod(extents) <= limit_elems:
        return (tuple((0, n) for n in extents),)
    dim, inner = 0, prod(extents)
    while inner // extents[dim] > limit_elems:  # a single index of this dim is too large still
        inner //= extents[dim]
        dim += 1
    step = max(1, limit_elems // max(1, inner // extents[dim]))
    found: list[Box] = []

    def outer(level: int, fixed: Box) -> Iterator[Box]:
        if level == dim:
            yield fixed
            return
        for i in range(extents[level]):
            yield from outer(level + 1, (*fixed, (i, i + 1)))

    rest = tuple((0, n) for n in extents[dim + 1 :])
    for fixed in outer(0, ()):
        found.extend((*fixed, (i, min(i + step, extents[dim])), *rest) for i in range(0, extents[dim], step))
    return tuple(found)


class Span(NamedTuple):
    """A strided box in memory, by its address."""

    at: int
    strides: tuple[int, ...]
    extents: tuple[int, ...]
    itemsize: int


def span_of(array: Array, box: Box) -> Span:
    """Return where a box of an array lies."""
    at = address(array) + sum(s * b[0] for s, b in zip(array.strides, box, strict=True))
    return Span(at, tuple(array.strides), shape_of(box), array.dtype.itemsize)


def inner_span(span: Span, box: Box) -> Span:
    """Return where a box within a strided box lies."""
    at = span.at + sum(s * b[0] for s, b in zip(span.strides, box, strict=True))
    return Span(at, span.strides, shape_of(box), span.itemsize)


def packed_span(offset: int, extents: tuple[int, ...], itemsize: int) -> Span:
    """Return a box that lies row-major, without gaps, from an address on."""
    return Span(offset, _row_major(extents, itemsize), extents, itemsize)


class Copier:
    """Copies between strided boxes given by address, all of them in one call of a kernel.

    Args:
        sources: boxes that are read.
        targets: boxes that are written; one of the same extents for each of `sources`.
        anchor: any array where the memory lies, the host or a GPU. Offsets count from its address.
        streams: write past the caches however little it is: it is a part of much.
    """

    def __init__(
        self, sources: Sequence[Span], targets: Sequence[Span], anchor: Array, streams: bool = False
    ) -> None:
        self._anchor, self._engine, self._streams = anchor, engine_for(anchor), streams
        self._runs = run_table(sources, targets, address(anchor), address(anchor))

    def run(self) -> None:
        """Copy."""
        if self._runs.boxes:
            streaming = self._streams or self._runs.total_elems >= STREAMED_BYTES
            _copier(self._engine, self._anchor, self._anchor, self._runs, streaming)()


class Packer:
    """As `Copier`, between boxes given by address and a bucket given at each call.

    Args:
        spans: boxes in arrays.
        offsets: where each lies in the bucket, row-major.
        anchor: as for `Copier`.
        streams: unpack past the caches: all buckets together do not stay in them, though one would.
    """

    def __init__(
        self, spans: Sequence[Span], offsets: Sequence[int], anchor: Array, streams: bool = False
    ) -> None:
        self._anchor, self._engine = anchor, engine_for(anchor)
        packed = [packed_span(o, s.extents, s.itemsize) for s, o in zip(spans, offsets, strict=True)]
        self._spans, self._packed, self._streams = spans, packed, streams
        self._to: RunTable | None = None
        self._from: RunTable | None = None
        self._packs: dict[tuple[int, bool], Callable[[], None]] = {}
        self._unpacks: dict[int, Callable[[], None]] = {}

    def pack(self, bucket: Array, past_caches: bool = False) -> None:
        """Copy out of the arrays into a bucket, one of a few that are used again and again."""
        if not self._spans:
            return
        call = self._packs.get(key := (address(bucket), past_caches))
        if call is None:
            if self._to is None:
                self._to = run_table(self._spans, self._packed, address(self._anchor), 0)
            streaming = past_caches or len(bucket) >= STREAMED_BYTES
            call = self._packs[key] = _copier(self._engine, self._anchor, bucket, self._to, streaming, True)
        call()

    def unpack(self, bucket: Array) -> None:
        """Copy out of a bucket into the arrays."""
        if not self._spans:
            return
        call = self._unpacks.get(at := address(bucket))
        if call is None:
            if self._from is None:
                self._from = run_table(self._packed, self._spans, 0, address(self._anchor))
            streaming = self._streams or len(bucket) >= STREAMED_BYTES
            call = self._unpacks[at] = _copier(self._engine, bucket, self._anchor, self._from, streaming)
        call()


def _copier(
    engine: Engine, src: Array, dst: Array, runs: RunTable, streaming: bool, fetching: bool = False
) -> Callable[[], None]:
    if isinstance(src, np.ndarray) and runs.run_limits_bytes[0] >= _ROW_BYTES:
        return cast("HostEngine", engine).rows_copier(src, dst, runs, streaming, fetching)
    return partial(engine.copy, src, dst, runs, streaming)


def run_table(
    sources: Sequence[Span], targets: Sequence[Span], src_base: int = 0, dst_base: int = 0
) -> RunTable:
    """Return the runs of bytes of boxes, from each of `sources` to that of `targets`; offsets count from the bases."""
    dims = 1 + max((len(s.extents) for s in sources), default=0)
    rows = len(sources)
    extents = np.ones((rows, dims), np.int64)
    strides = np.zeros((2, rows, dims), np.int64)
    offsets = np.zeros((2, rows), np.int64)
    for i, pair in enumerate(zip(sources, targets, strict=True)):
        for side, span in enumerate(pair):
            first = dims - 1 - len(span.extents)
            strides[side, i, first:-1] = span.strides
            strides[side, i, -1] = 1  # the bytes of an element
            offsets[side, i] = span.at
        span = pair[0]
        extents[i, dims - 1 - len(span.extents) : -1] = span.extents
        extents[i, -1] = span.itemsize
    return lower(extents, offsets[0] - src_base, offsets[1] - dst_base, strides[0], strides[1], 1, 1)


@bounded_cache(1 << 18)
def _row_major(extents: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides, step = [], itemsize
    for n in reversed(extents):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
