"""Weighted sums of an array's bits in one pass, at the speed of reading (`kernels.unit_weights` has the formula)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir

from lowshard.compiled import INT, Signature, load_compiled
from lowshard.compiled.deferred import cgutils, intrinsic, types
from lowshard.kernels import unit_weights
from lowshard.kernels.cpu.drive import COLUMNS, outer_dims, source_digest
from lowshard.kernels.cpu.memory_steps import (
    load,
    load_u8,
    load_u16,
    load_u32,
    offset,
    prefetch_at,
    store,
    store_value,
)
from lowshard.kernels.cpu.vector import Lanes
from lowshard.kernels.runs import DST_OFFSET, RUN, SRC_OFFSET
from lowshard.kernels.unit_weights import BLOCK_UNITS, SUMS

STEP_UNITS = 32
"""Units of one step: a cache line of 16-bit units."""
LANES = 16
_AHEAD_BYTES = 4 << 10
_ROW_BYTES = 2 * BLOCK_UNITS
_SUM_BYTES = 4 * LANES
SCRATCH_ELEMS = SUMS * LANES + SUMS
"""Scratch of a call, uint32: for each sum LANES part sums, which begin at zero; then a factor for each sum."""
_I32, _I64 = ir.IntType(32), ir.IntType(64)


@intrinsic(prefer_literal=True)
def _weigh_steps(
    typingctx: Any, src: Any, weights: Any, steps: Any, factors: Any, sums: Any, unit_bytes: Any
) -> Any:
    """Add `steps` whole steps within one block to the part sums. All but the last two of the arguments are addresses.

    unit_bytes is a literal.
    """
    width = unit_bytes.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        first, table, count, multipliers, totals, _ = args
        zeros = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
        parts = [cgutils.alloca_once(builder, zeros.type) for _ in range(SUMS)]
        for part in parts:
            builder.store(zeros, part)
        with cgutils.for_range(builder, count) as loop:
            unit = builder.mul(loop.index, _I64(STEP_UNITS))
            at = builder.add(first, builder.mul(unit, _I64(width)))
            prefetch_at(builder, offset(builder, at, _AHEAD_BYTES))
            values = _signed(builder, load(builder, at, 8 * width, STEP_UNITS))
            row = builder.add(table, builder.mul(unit, _I64(2)))
            for index, part in enumerate(parts):
                weighed = builder.mul(
                    values, _signed(builder, load(builder, row, 16, STEP_UNITS, _ROW_BYTES * index))
                )
                even, odd = (
                    Lanes(builder, weighed).picked(range(start, STEP_UNITS, 2)).value for start in (0, 1)
                )
                builder.store(builder.add(builder.load(part), builder.add(even, odd)), part)
        for index, part in enumerate(parts):
            factor = load(builder, multipliers, 32, 0, 4 * index).splat(LANES)
            total = load(builder, totals, 32, LANES, _SUM_BYTES * index)
            added = builder.add(total.value, builder.mul(builder.load(part), factor.value))
            store(builder, totals, Lanes(builder, added), False, _SUM_BYTES * index)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5, unit_bytes), codegen


def _signed(builder: ir.IRBuilder, lanes: Lanes) -> ir.Value:
    """Widen units to 32 bits, 16-bit ones with sign: processors multiply and add such pairs in one instruction."""
    wide = ir.VectorType(_I32, lanes.count)
    return (builder.sext if lanes.bits == 16 else builder.zext)(lanes.value, wide)


@cache
def weigh_kernel(unit_bytes: int) -> Callable[..., None]:
    """Return `kernel(columns, src, units, weights, scratch)` for units of one or two bytes.

    `columns` are a run table's whose target side counts elements of the whole array; `src`, `weights`
    (`unit_weights.table`) and `scratch` (SCRATCH_ELEMS) are addresses; `units` is how many an element has.
    """
    blocks, step_units, sums = BLOCK_UNITS, STEP_UNITS, SUMS
    row_bytes, sum_bytes = _ROW_BYTES, _SUM_BYTES
    step, first_factor, second_factor = (
        unit_weights.STEP,
        unit_weights.FIRST_FACTOR,
        unit_weights.SECOND_FACTOR,
    )
    shifts = (unit_weights.FIRST_SHIFT, unit_weights.SECOND_SHIFT, unit_weights.LAST_SHIFT)

    def weigh(columns: Any, src: int, units: int, weights: int, scratch: int) -> None:
        factors, known_block = scratch + sums * sum_bytes, -1
        for box in range(columns.shape[1]):
            n1, n2, n3, n4, s1, s2, s3, s4, d1, d2, d3, d4 = outer_dims(columns, box)
            for row in range(n1 * n2 * n3 * n4):
                i1, rest = row % n1, row // n1
                i2, rest = rest % n2, rest // n2
                i3, i4 = rest % n3, rest // n3
                at = src + columns[SRC_OFFSET, box] + i1 * s1 + i2 * s2 + i3 * s3 + i4 * s4
                place = units * (columns[DST_OFFSET, box] + i1 * d1 + i2 * d2 + i3 * d3 + i4 * d4)
                left = units * columns[RUN, box]
                while left > 0:
                    block, first = place // blocks, place % blocks
                    if block != known_block:
                        known_block = block
                        z = types.uint64(block + 1) * types.uint64(step)
                        z = (z ^ (z >> types.uint64(shifts[0]))) * types.uint64(first_factor)
                        z = (z ^ (z >> types.uint64(shifts[1]))) * types.uint64(second_factor)
                        z = z ^ (z >> types.uint64(shifts[2]))
                        store_value(factors, types.uint32(z | types.uint64(1)))
                        store_value(factors + 4, types.uint32((z >> types.uint64(32)) | types.uint64(1)))
                    now = min(left, blocks - first)
                    whole = now - now % step_units
                    _weigh_steps(at, weights + 2 * first, whole // step_units, factors, scratch, unit_bytes)
                    for unit in range(whole, now):
                        if unit_bytes == 1:
                            value = types.int64(load_u8(at + unit))
                        else:
                            value = types.int64(types.int16(load_u16(at + 2 * unit)))
                        for k in range(sums):
                            weight = types.int16(load_u16(weights + k * row_bytes + 2 * (first + unit)))
                            factor = types.int64(load_u32(factors + 4 * k))
                            total = types.int64(load_u32(scratch + k * sum_bytes)) + value * weight * factor
                            store_value(scratch + k * sum_bytes, types.uint32(total))
                    at += now * unit_bytes
                    place += now
                    left -= now

    signature = Signature((COLUMNS, INT, INT, INT, INT), "void")
    return load_compiled(f"weigh_{unit_bytes}_{source_digest()}", lambda: weigh, signature)
