"""Weighted sums of an array's bits in one pass, at the speed of reading (`kernels.unit_weights` has the formula)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from lowshard.compiled import INT, Signature, load_compiled
from lowshard.compiled.deferred import cgutils, intrinsic, types
from lowshard.kernels import unit_weights
from lowshard.kernels.buffer import address
from lowshard.kernels.cpu.drive import COLUMNS, outer_dims, source_digest
from lowshard.kernels.cpu.memory_steps import (
    CACHE_LINE_BYTES,
    load,
    offset,
    prefetch_at,
    store,
    store_value,
)
from lowshard.kernels.cpu.vector import Lanes
from lowshard.kernels.runs import DST_OFFSET, RUN, SRC_OFFSET
from lowshard.kernels.unit_weights import BLOCK_UNITS, SUMS

LANES = 16
_PIECES = 32
"""16-bit pieces of a cache line."""
STREAMS = 4
"""Positions of a long run that are read concurrently: more prefetching, and one line of weights serves all."""
MOST_APART = 256
"""Most blocks from one of these positions to the next."""
_AHEAD_BYTES = {(1, 1): 8 << 10, (2, 1): 0, (1, STREAMS): 1 << 10, (2, STREAMS): 0}
"""By the bytes of a unit and by streams, how far ahead lines are asked for: what takes few steps needs it not."""
_PAD = 64
"""Weights on either side of a block's, for partly masked lines."""
_SUM_BYTES = 4 * LANES
SCRATCH_ELEMS = SUMS * LANES + STREAMS * SUMS
"""Scratch of a call, uint32: for each sum LANES part sums, which begin at zero; then for each stream a factor for each
sum."""
_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _row_bytes(unit_bytes: int) -> int:
    """Return the bytes of a row of weights: one for each sum, or two where units are bytes."""
    return 2 * (_PAD + BLOCK_UNITS * unit_bytes // 2 + _PAD)


@cache
def padded_weights(unit_bytes: int, lead: int) -> tuple[npt.NDArray[np.int16], int]:
    """Return rows of a block's weights, and the address of the first; for bytes, even and odd units have a row each.

    The weight of unit `lead` is on a cache line, so that lines of a source and of its weights begin together: a load
    across two lines takes twice as long.
    """
    step, row_bytes = 3 - unit_bytes, _row_bytes(unit_bytes)
    room = np.zeros(step * SUMS * row_bytes + CACHE_LINE_BYTES, np.uint8)
    begin = -(address(room) + 2 * (_PAD + lead // step)) % CACHE_LINE_BYTES
    rows = room[begin : room.size - CACHE_LINE_BYTES + begin].view(np.int16).reshape(SUMS, step, -1)
    for parity in range(step):
        rows[:, parity, _PAD : row_bytes // 2 - _PAD] = unit_weights.table()[:, parity::step]
    return rows, address(rows) + 2 * _PAD


@cache
def edge_masks() -> npt.NDArray[np.uint8]:
    """Return a line of zeros, one of ones and one of zeros: a line that begins between them masks an end."""
    return np.repeat(np.array([0, 255, 0], np.uint8), CACHE_LINE_BYTES)


@intrinsic(prefer_literal=True)
def _digest_lines(
    typingctx: Any, src: Any, apart: Any, weights: Any, odd_weights: Any, lines: Any, factors: Any, sums: Any,
    first_mask: Any, only_mask: Any, last_mask: Any, unit_bytes: Any, streams: Any,
) -> Any:  # fmt: skip
    """Add cache lines of as many blocks as there are streams to the part sums; each block is `apart` bytes from the one
    before.

    All but `apart`, `lines` and the last two, which are literals, are addresses; `odd_weights` are of each second byte.
    Of a block's first line counts what two masks leave, of the last one what one does. A sum waits for the one before
    it: so streams have part sums of their own, two lines in turn where there is one stream, and bytes of either kind.
    """
    width, count = unit_bytes.literal_value, streams.literal_value
    kinds, turns, ahead_bytes = 3 - width, 2 if count == 1 else 1, _AHEAD_BYTES[width, count]
    sum_bytes = _row_bytes(width) * kinds

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        src, apart, table, odd_table, lines, multipliers, totals, first, only, last, *_ = args
        begins = [builder.add(src, builder.mul(apart, _I64(i))) for i in range(count)]
        zeros = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
        parts = [
            [[cgutils.alloca_once(builder, zeros.type) for _ in range(turns * kinds)] for _ in begins]
            for _ in range(SUMS)
        ]
        for place in (place for of_sum in parts for of_stream in of_sum for place in of_stream):
            builder.store(zeros, place)

        def add_line(number: ir.Value, turn: int, *masks: ir.Value) -> None:
            start = builder.mul(number, _I64(CACHE_LINE_BYTES))
            rows = [builder.add(row, start) for row in (table, odd_table)[:kinds]]
            held = [[load(builder, row, 16, _PIECES, sum_bytes * i) for row in rows] for i in range(SUMS)]
            for stream, begin in enumerate(begins):
                at = builder.add(begin, start)
                if ahead_bytes:
                    prefetch_at(builder, offset(builder, at, ahead_bytes))
                line = load(builder, at, 16, _PIECES)
                for mask in masks:
                    line = line & load(builder, mask, 16, _PIECES)
                for kind, values in enumerate([line] if width > 1 else [line & 0xFF, line >> 8]):
                    for index in range(SUMS):
                        place = parts[index][stream][kinds * turn + kind]
                        added = _paired_products(builder, values, held[index][kind])
                        builder.store(builder.add(builder.load(place), added), place)

        final = builder.sub(lines, _I64(1))
        between = builder.sub(final, _I64(1))
        add_line(_I64(0), 0, first, only)
        with cgutils.for_range(builder, builder.sdiv(between, _I64(turns))) as loop:
            number = builder.mul(loop.index, _I64(turns))
            for turn in range(turns):
                add_line(builder.add(number, _I64(1 + turn)), turn)
        if turns == 2:
            is_odd = builder.icmp_signed("==", builder.and_(between, _I64(1)), _I64(1))
            with builder.if_then(builder.and_(is_odd, builder.icmp_signed(">", between, _I64(0)))):
                add_line(between, 0)
        add_line(final, turns - 1, last)
        for index, of_sum in enumerate(parts):
            total = load(builder, totals, 32, LANES, _SUM_BYTES * index).value
            for stream, places in enumerate(of_sum):
                summed = reduce(builder.add, [builder.load(place) for place in places])
                factor = load(builder, multipliers, 32, 0, 4 * (SUMS * stream + index)).splat(LANES)
                total = builder.add(total, builder.mul(summed, factor.value))
            store(builder, totals, Lanes(builder, total), False, _SUM_BYTES * index)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 10, unit_bytes, streams), codegen


def _paired_products(builder: ir.IRBuilder, values: Lanes, weights: Lanes) -> ir.Value:
    """Return the products of neighbours, added, in 32 bits: processors do both in one instruction."""
    products = Lanes(builder, builder.mul(_signed(builder, values), _signed(builder, weights)))
    even, odd = (products.picked(range(i, _PIECES, 2)).value for i in (0, 1))
    return builder.add(even, odd)


def _signed(builder: ir.IRBuilder, lanes: Lanes) -> ir.Value:
    """Widen pieces to 32 bits, with sign."""
    return builder.sext(lanes.value, ir.VectorType(_I32, lanes.count))


@cache
def bit_digest_kernel(unit_bytes: int) -> Callable[..., None]:
    """Return `kernel(columns, src, first_elem, units, weights, masks, scratch)` for units of one or two bytes.

    `columns` are a run table's whose target side counts elements of the whole array from `first_elem` on; `src`,
    `weights` (`padded_weights`), `masks` (`edge_masks`) and `scratch` (SCRATCH_ELEMS) are addresses; an element has
    `units` units. Each run begins at a multiple of a unit's bytes.
    """
    blocks, sums, line = BLOCK_UNITS, SUMS, CACHE_LINE_BYTES
    sum_bytes, row_bytes = _SUM_BYTES, _row_bytes(unit_bytes)
    step, first_factor, second_factor = (
        unit_weights.STEP,
        unit_weights.FIRST_FACTOR,
        unit_weights.SECOND_FACTOR,
    )
    shifts = (unit_weights.FIRST_SHIFT, unit_weights.SECOND_SHIFT, unit_weights.LAST_SHIFT)

    def bit_digest(
        columns: Any, src: int, first_elem: int, units: int, weights: int, masks: int, scratch: int
    ) -> None:
        factors, known_block = scratch + sums * sum_bytes, -1
        for box in range(columns.shape[1]):
            n1, n2, n3, n4, s1, s2, s3, s4, d1, d2, d3, d4 = outer_dims(columns, box)
            for row in range(n1 * n2 * n3 * n4):
                i1, rest = row % n1, row // n1
                i2, rest = rest % n2, rest // n2
                i3, i4 = rest % n3, rest // n3
                at = src + columns[SRC_OFFSET, box] + i1 * s1 + i2 * s2 + i3 * s3 + i4 * s4
                place = units * (
                    first_elem + columns[DST_OFFSET, box] + i1 * d1 + i2 * d2 + i3 * d3 + i4 * d4
                )
                left = units * columns[RUN, box]
                while left > 0:
                    block, first = place // blocks, place % blocks
                    apart = min(left // (STREAMS * blocks), MOST_APART) if first == 0 else 0
                    turns, streams, now = (
                        (apart, STREAMS, blocks) if apart else (1, 1, min(left, blocks - first))
                    )
                    size = now * unit_bytes
                    for turn in range(turns):
                        for stream in range(streams):
                            number = block + turn + stream * apart
                            if stream or number != known_block:
                                z = types.uint64(number + 1) * types.uint64(step)
                                z = (z ^ (z >> types.uint64(shifts[0]))) * types.uint64(first_factor)
                                z = (z ^ (z >> types.uint64(shifts[1]))) * types.uint64(second_factor)
                                z = z ^ (z >> types.uint64(shifts[2]))
                                factor = factors + 4 * sums * stream
                                store_value(factor, types.uint32(z | types.uint64(1)))
                                store_value(
                                    factor + 4, types.uint32((z >> types.uint64(32)) | types.uint64(1))
                                )
                        known_block = block + turn  # of the first stream
                        begin = at + turn * size
                        before = begin % line
                        lines = (before + size + line - 1) // line
                        first_mask, only_mask = masks + line - before, masks + line
                        last_mask = masks + line + (-(begin + size) % line)
                        if lines == 1:
                            only_mask, last_mask = last_mask, masks
                        even = odd = weights + 2 * (first - before // unit_bytes)
                        if unit_bytes == 1:
                            unit = first - before
                            even, odd = weights + unit // 2 * 2, weights + row_bytes + unit // 2 * 2
                            if unit % 2:
                                even, odd = odd, even + 2
                        begin -= before
                        if apart:
                            _digest_lines(
                                begin, apart * size, even, odd, lines, factors, scratch, first_mask, only_mask,
                                last_mask, unit_bytes, STREAMS,
                            )  # fmt: skip
                        else:
                            _digest_lines(
                                begin, 0, even, odd, lines, factors, scratch, first_mask, only_mask, last_mask,
                                unit_bytes, 1,
                            )  # fmt: skip
                    at += turns * streams * size
                    place += turns * streams * now
                    left -= turns * streams * now

    signature = Signature((COLUMNS, INT, INT, INT, INT, INT, INT), "void")
    return load_compiled(f"bit_digest_{unit_bytes}_{source_digest()}", lambda: bit_digest, signature)
