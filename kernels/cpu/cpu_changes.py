"""Differences of two arrays, found in one pass at the speed of reading both, and applied to a third."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir

from lowshard.compiled import INT, Signature, load_compiled
from lowshard.compiled.deferred import intrinsic, njit, types
from lowshard.compiled.emitted import copy_bytes
from lowshard.kernels.cpu.drive import COLUMNS, outer_dims, source_digest
from lowshard.kernels.cpu.memory_steps import (
    CACHE_LINE_BYTES,
    copy_line,
    load,
    load_u8,
    load_u16,
    load_u32,
    load_u64,
    prefetch,
    prefetch_to_write,
    store_value,
)
from lowshard.kernels.runs import DST_OFFSET, RUN, SRC_OFFSET

TOTAL, MAY_STOP, MAY_STEP, GAPS, LENGTHS, VALUES, STEPS, CHANGED, HIT, STOPPED = range(10)
"""What the state of a search has, int64: units in all, whether it may stop writing and whether it writes steps, which
the caller sets; then the bytes written to each of the four streams, elements that differ, units that have one, and
whether it has stopped."""
STATE_ELEMS = 10
WIDTHS = (1, 2, 4, 8)
"""Bytes of the elements that are compared."""
STEP_WIDTHS = (2, 4)
"""Bytes of the elements that may be encoded as steps."""

_ROW_BYTES, _AHEAD_BYTES = 64 << 10, 4 << 10
"""In rows up to this length lines are prefetched this far ahead: hardware prefetches only within long rows."""
_LINES = 32
"""Cache lines compared before the findings are written: no branch depends on their content."""
_TAIL = 2 * CACHE_LINE_BYTES
FIND_SCRATCH_BYTES = _TAIL + 2 * 8 * (_LINES + 1)
"""Two lines for the end of a row; then, of lines that differ, which elements do, and which line it is."""
_RUNS = 64
"""Runs that are decoded, and whose lines are prefetched, before they are written."""
WRITE_SCRATCH_BYTES = 2 * 8 * _RUNS
"""The address and bytes of each."""
_I1, _I64 = ir.IntType(1), ir.IntType(64)


@intrinsic(prefer_literal=True)
def _differing(typingctx: Any, first: Any, second: Any, width: Any) -> Any:
    """Return which elements of a cache line differ between two addresses, as bits; width is a literal."""
    bits = 8 * width.literal_value
    count = CACHE_LINE_BYTES // width.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        one, other = (load(builder, address, bits, count).value for address in args[:2])
        differs = builder.icmp_unsigned("!=", one, other)
        packed = builder.bitcast(differs, ir.IntType(count))
        return packed if count == 64 else builder.zext(packed, _I64)

    return types.uint64(types.int64, types.int64, width), codegen


@intrinsic
def _lowest(typingctx: Any, mask: Any) -> Any:
    """Return the number of the lowest bit that is set in a uint64, which is not zero."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.cttz(args[0], _I1(1))

    return types.int64(types.uint64), codegen


@intrinsic
def _count(typingctx: Any, mask: Any) -> Any:
    """Return how many bits of a uint64 are set."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), codegen


@njit(nogil=True)
def _put_number(at: int, number: int) -> int:
    if number < 1 << 14:  # one byte or two, whichever: without a branch between them
        is_long = number >= 128
        store_value(at, types.uint16(((number & 127) | (is_long << 7)) | ((number >> 7) << 8)))
        return at + 1 + is_long
    while number >= 128:
        store_value(at, types.uint8(number & 127 | 128))
        number >>= 7
        at += 1
    store_value(at, types.uint8(number))
    return at + 1


@njit(nogil=True)
def put_run(gaps: int, lengths: int, begin: int, end: int, before: int) -> tuple[int, int]:
    """Write a non-empty run of units after one that ended at `before`; return the new ends of the two streams."""
    if end > begin:
        gaps = _put_number(gaps, 2 * (begin - before) + (end - begin > 1))
        if end - begin > 1:
            lengths = _put_number(lengths, end - begin - 2)
    return gaps, lengths


@njit(nogil=True)
def _take_number(at: int, end: int) -> tuple[int, int]:
    """Return a number and where the next one begins; -1 for a truncated or overlong number."""
    number, shift = 0, 0
    while at < end and shift < 63:
        byte = types.int64(load_u8(at))
        at += 1
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number, at
    return -1, at


@njit(nogil=True)
def _put_step(at: int, new: int, old: int, width: int) -> int:
    """Write the step from one element to another, both addresses; return where the next step goes."""
    if width == 2:
        step = types.int64(types.int16(load_u16(new) - load_u16(old)))
    else:
        step = types.int64(types.int32(load_u32(new) - load_u32(old)))
    end: int = _put_number(at, (step << 1) ^ (step >> 63))
    return end


@njit(nogil=True)
def _take_step(target: int, number: int, width: int) -> None:
    """Apply a step to an element."""
    step = (number >> 1) ^ -(number & 1)
    if width == 2:
        store_value(target, types.uint16(types.int64(load_u16(target)) + step))
    else:
        store_value(target, types.uint32(types.int64(load_u32(target)) + step))


@cache
def find_kernel(width: int, in_blocks: bool) -> Callable[..., None]:
    """Return `kernel(columns, new, old, unit_bytes, gaps, lengths, values, steps, state, scratch)`.

    `columns` are a run table's in units; all but it and `state` are addresses or numbers. `width` is the bytes of an
    element; a unit is one, or `in_blocks` several, whole cache lines that go whole where one of the elements differs.
    """
    lanes = CACHE_LINE_BYTES // width
    line, most, tail = CACHE_LINE_BYTES, _LINES, _TAIL
    row_bytes, ahead_bytes = _ROW_BYTES, _AHEAD_BYTES
    full = (1 << lanes) - 1
    in_steps = not in_blocks and width in STEP_WIDTHS

    def find(
        columns: Any, new: int, old: int, unit_bytes: int, gaps: int, lengths: int, values: int, steps: int,
        state: Any, scratch: int,
    ) -> None:  # fmt: skip
        masks, numbers = scratch + tail, scratch + tail + 8 * (most + 1)
        gaps_at, lengths_at, values_at, steps_at = gaps, lengths, values, steps
        begin, end, before = 0, 0, 0  # the run that is open, and where the one before it ended
        position, changed, hit = 0, 0, 0
        total, may_stop, stopped = state[TOTAL], state[MAY_STOP] != 0, False
        stepping = in_steps and state[MAY_STEP] != 0
        for box in range(columns.shape[1]):
            n1, n2, n3, n4, s1, s2, s3, s4, d1, d2, d3, d4 = outer_dims(columns, box)
            size = columns[RUN, box] * unit_bytes
            asks, rows_on = n1 > 1 and size <= row_bytes, 1 + ahead_bytes // max(1, size)
            for row in range(n1 * n2 * n3 * n4):
                i1, rest = row % n1, row // n1
                i2, rest = rest % n2, rest // n2
                i3, i4 = rest % n3, rest // n3
                a = new + columns[SRC_OFFSET, box] + i1 * s1 + i2 * s2 + i3 * s3 + i4 * s4
                b = old + columns[DST_OFFSET, box] + i1 * d1 + i2 * d2 + i3 * d3 + i4 * d4
                row_end = a + size
                while a < row_end:
                    lines, found = min(most, (row_end - a) // line), 0
                    rest, ahead = row_end - a - lines * line, -a % line
                    if not in_blocks and ahead > 0 and size > row_bytes and ahead % width == 0:
                        lines, rest = 0, ahead  # from there on a load lies within one line
                    for number in range(lines):
                        x, y = a + number * line, b + number * line
                        if asks:
                            prefetch(x + s1 * rows_on)
                            prefetch(y + d1 * rows_on)
                        mask = _differing(x, y, width)
                        store_value(masks + 8 * found, mask)
                        store_value(numbers + 8 * found, types.uint64(number))
                        found += mask != types.uint64(0)
                    seen = lines * line
                    if rest < line and rest > 0:
                        copy_bytes(scratch, a + seen, rest)
                        copy_bytes(scratch + line, b + seen, rest)
                        mask = _differing(scratch, scratch + line, width)
                        mask &= (types.uint64(1) << types.uint64(rest // width)) - types.uint64(1)
                        store_value(masks + 8 * found, mask)
                        store_value(numbers + 8 * found, types.uint64(lines))
                        found += mask != types.uint64(0)
                        seen += rest
                    if in_blocks or stopped:
                        for k in range(found):
                            changed += _count(load_u64(masks + 8 * k))
                    if in_blocks:
                        last = -1
                        for k in range(found):
                            unit = types.int64(load_u64(numbers + 8 * k)) * line // unit_bytes
                            place = position + unit
                            if place == last:
                                continue
                            last = place
                            hit += 1
                            if stopped:
                                continue
                            if place != end:
                                gaps_at, lengths_at = put_run(gaps_at, lengths_at, begin, end, before)
                                before = end
                                begin = end = place
                            end += 1
                            copy_bytes(values_at, a + unit * unit_bytes, unit_bytes)
                            values_at += unit_bytes
                    elif not stopped:
                        for k in range(found):
                            mask = load_u64(masks + 8 * k)
                            source = a + types.int64(load_u64(numbers + 8 * k)) * line
                            base = b + (source - a)
                            place = position + (source - a) // width
                            if mask == types.uint64(full) and place == end:
                                copy_line(values_at, source)
                                if stepping:
                                    for lane in range(lanes):
                                        steps_at = _put_step(
                                            steps_at, values_at + width * lane, base + width * lane, width
                                        )
                                values_at += line
                                end += lanes
                                mask = types.uint64(0)
                            while mask != types.uint64(0):
                                lane = _lowest(mask)
                                mask &= mask - types.uint64(1)
                                if place + lane != end:
                                    gaps_at, lengths_at = put_run(gaps_at, lengths_at, begin, end, before)
                                    before = end
                                    begin = end = place + lane
                                end += 1
                                if width == 1:
                                    store_value(values_at, load_u8(source + lane))
                                elif width == 2:
                                    store_value(values_at, load_u16(source + 2 * lane))
                                elif width == 4:
                                    store_value(values_at, load_u32(source + 4 * lane))
                                else:
                                    store_value(values_at, load_u64(source + width * lane))
                                if stepping:
                                    steps_at = _put_step(steps_at, values_at, base + width * lane, width)
                                values_at += width
                    a, b = a + seen, b + seen
                    position += seen // unit_bytes
                    if may_stop and not stopped:
                        written = values_at - values + gaps_at - gaps + lengths_at - lengths
                        if 8 * position >= total and 8 * written > 7 * position * unit_bytes:
                            stopped = True
                            if not in_blocks:
                                changed = (values_at - values) // width
        gaps_at, lengths_at = put_run(gaps_at, lengths_at, begin, end, before)
        if not in_blocks:
            if not stopped:
                changed = (values_at - values) // width
            hit = changed
        state[GAPS], state[LENGTHS], state[VALUES] = gaps_at - gaps, lengths_at - lengths, values_at - values
        state[STEPS] = steps_at - steps
        state[CHANGED], state[HIT], state[STOPPED] = changed, hit, 1 if stopped else 0

    name = f"find_changes_{width}_{'blocks' if in_blocks else 'elems'}_{source_digest()}"
    return load_compiled(name, lambda: find, Signature((COLUMNS, *(INT,) * 7, "int64[1]", INT), "void"))


@cache
def write_kernel(width: int, by_steps: bool) -> Callable[..., int]:
    """Return `kernel(columns, to, gaps, gaps_end, lengths, lengths_end, values, units, unit_bytes, scratch)`.

    It returns 0, or 1 where the streams are not such ones of so many units, or lead out of the boxes: what was right
    before that may be written. `width` is the bytes of a unit, or 0 for any other. `by_steps` takes steps from what
    the units hold, which end where the gaps begin, in the place of values.
    """
    most = _RUNS

    def write(
        columns: Any, to: int, gaps: int, gaps_end: int, lengths: int, lengths_end: int, values: int, units: int,
        unit_bytes: int, scratch: int,
    ) -> int:  # fmt: skip
        box, first, last, run = (
            -1,
            0,
            0,
            1,
        )  # the box, its first unit and one past its last, units of its rows
        row_first, row_last, row_at = 0, 0, 0
        n1, n2, n3, d1, d2, d3, d4 = 1, 1, 1, 0, 0, 0, 0
        place, left, held = 0, 0, 0
        values_end = gaps
        while True:
            if left == 0 and gaps < gaps_end:
                number, gaps = _take_number(gaps, gaps_end)
                if number < 0:
                    return 1
                place += number >> 1
                left = 1
                if number & 1:
                    more, lengths = _take_number(lengths, lengths_end)
                    if more < 0:
                        return 1
                    if more > units:  # so much that a sum with it might be less than nothing
                        return 1
                    left = more + 2
                if left > units:
                    return 1
                units -= left
            if left > 0:
                if place >= row_last:
                    while place >= last:
                        box += 1
                        if box >= columns.shape[1]:
                            return 1
                        first, run = last, columns[RUN, box]
                        n1, n2, n3, n4, _, _, _, _, d1, d2, d3, d4 = outer_dims(columns, box)
                        last = first + run * n1 * n2 * n3 * n4
                    row = (place - first) // run
                    row_first = first + row * run
                    row_last = row_first + run
                    i1, rest = row % n1, row // n1
                    i2, rest = rest % n2, rest // n2
                    i3, i4 = rest % n3, rest // n3
                    row_at = to + columns[DST_OFFSET, box] + i1 * d1 + i2 * d2 + i3 * d3 + i4 * d4
                target = row_at + (place - row_first) * unit_bytes
                now = min(left, row_last - place)
                prefetch_to_write(target)
                store_value(scratch + 16 * held, types.uint64(target))
                store_value(scratch + 16 * held + 8, types.uint64(now * unit_bytes))
                held += 1
                place += now
                left -= now
            is_last = left == 0 and gaps >= gaps_end
            if held == most or is_last:
                for k in range(held):
                    target = types.int64(load_u64(scratch + 16 * k))
                    size = types.int64(load_u64(scratch + 16 * k + 8))
                    if by_steps:
                        for at in range(target, target + size, width):
                            number, values = _take_number(values, values_end)
                            if number < 0:
                                return 1
                            _take_step(at, number, width)
                        continue
                    if width == 1 and size == 1:
                        store_value(target, load_u8(values))
                    elif width == 2 and size == 2:
                        store_value(target, load_u16(values))
                    elif width == 4 and size == 4:
                        store_value(target, load_u32(values))
                    elif width == 8 and size == 8:
                        store_value(target, load_u64(values))
                    else:
                        copy_bytes(target, values, size)
                    values += size
                held = 0
            if is_last:
                is_whole = units == 0 and lengths == lengths_end and (not by_steps or values == values_end)
                return 0 if is_whole else 1

    signature = Signature((COLUMNS, *(INT,) * 9), "int64")
    return load_compiled(
        f"write_changes_{width}{'_steps' * by_steps}_{source_digest()}", lambda: write, signature
    )
