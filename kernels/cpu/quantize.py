"""MXFP8 quantisation of rows: whole pieces as in `pieces`, others some blocks at a time in three steps.

1. The maximum of each block goes to scratch memory (with its elements as bf16 lanes, if they are of another dtype).
2. All maxima together give the scale bytes, the origins of the elements' fields, and a mask of rare blocks.
3. Each block is shifted, rounded and narrowed to codes; its elements come from the first cache now.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from lowshard.compiled.deferred import intrinsic, njit, types
from lowshard.compiled.emitted import copy_bytes
from lowshard.kernels.cpu.copy import LAG_BYTES, STAGE_BYTES, flush_stage, send_lines
from lowshard.kernels.cpu.drive import Ahead, named, prefetch_line, rows_of
from lowshard.kernels.cpu.encode import (
    LOWEST_FAST_SCALE,
    block_bytes,
    encode,
    halves_minimum,
    highest_scale,
    make_origins,
    prefetch_block,
    scales_of,
)
from lowshard.kernels.cpu.memory_steps import align_spills, copy_line, load, offset, store
from lowshard.kernels.cpu.pieces import PIECE_BLOCKS, rows_in_pieces
from lowshard.kernels.cpu.rare import encode_rare
from lowshard.kernels.cpu.scalar import DTYPE_CODES
from lowshard.kernels.cpu.sources import SOURCES
from lowshard.kernels.cpu.vector import Lanes, lowest_bit
from lowshard.kernels.reference import BLOCK_ELEMS, element_format

GROUP_BLOCKS = 32
"""Blocks of a group: one 16-bit lane each in the second step, and 2 KiB of bf16 between the first and the third."""

# Rows that are not whole pieces are cut into pieces and a rest from so many pieces on.
_MANY_PIECES = 8

# Scratch memory of a group: origins of blocks (first the complements of maxima), scale bytes, elements as bf16.
_SCRATCH_BYTES = 128 + 2 * BLOCK_ELEMS * GROUP_BLOCKS
_LAYOUT = (GROUP_BLOCKS, 0, 2 * GROUP_BLOCKS, 128, _SCRATCH_BYTES)


@intrinsic(prefer_literal=True)
def find_maximum(typingctx: Any, src: Any, minimum: Any, lanes: Any, source: Any, keep: Any) -> Any:
    """Write the complement of a block's largest magnitude, and with the literal `keep` its bf16 lanes."""
    dtype, keeps = source.literal_value, bool(keep.literal_value)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        at, smallest, to = args[:3]
        _find_maximum(builder, at, smallest, to if keeps else None, dtype)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 3, source, keep), codegen


@intrinsic(prefer_literal=True)
def fetch_blocks(
    typingctx: Any, src: Any, minima: Any, lanes: Any, near: Any, mid: Any, far: Any, source: Any, blocks: Any
) -> Any:
    """Do as `find_maximum` with `keep` for some blocks, and ask for what lies three distances on."""
    dtype, count = source.literal_value, blocks.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        at, smallest, to = args[:3]
        ahead = [builder.add(at, distance) for distance in reversed(args[3:6])]
        for block in range(count):
            begin = block * block_bytes(dtype)
            for address in ahead:
                prefetch_block(builder, address, block, dtype)
            places = (offset(builder, at, begin), offset(builder, smallest, 2 * block))
            _find_maximum(builder, *places, offset(builder, to, 2 * BLOCK_ELEMS * block), dtype)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 6, source, blocks), codegen


def _find_maximum(
    builder: ir.IRBuilder, address: ir.Value, smallest: ir.Value, lanes: ir.Value | None, dtype: str
) -> None:
    store(builder, smallest, halves_minimum(builder, address, lanes, dtype).smallest(), False)


@intrinsic(prefer_literal=True)
def find_scales(
    typingctx: Any,
    minima: Any,
    bytes_: Any,
    round_up: Any,
    lowest: Any,
    zero_byte: Any,
    source: Any,
    elem: Any,
) -> Any:
    """Write scale bytes, and origins over the complements of maxima of a group; return a mask of rare blocks."""
    fmt = element_format(elem.literal_value)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        increment, lowest, zero_byte = (Lanes(builder, value).narrow(16) for value in args[2:5])
        origins = make_origins(load(builder, args[0], 16, GROUP_BLOCKS), increment, fmt)
        made, rare = scales_of(origins, lowest, zero_byte, source.literal_value, fmt)
        store(builder, args[0], origins, False)
        store(builder, args[1], made, False)
        return builder.bitcast(rare.value, ir.IntType(GROUP_BLOCKS))

    return types.uint32(types.int64, types.int64, *(types.int32,) * 3, source, elem), codegen


@intrinsic(prefer_literal=True)
def encode_blocks(
    typingctx: Any, lanes: Any, data: Any, origins: Any, elem: Any, blocks: Any, streaming: Any
) -> Any:
    """Write the codes of one or two blocks from their bf16 lanes and their origins."""
    fmt, count = element_format(elem.literal_value), blocks.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        at, to, origins_at = args[:3]
        encode(builder, at, to, origins_at, range(count), fmt, bool(streaming.literal_value))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 3, elem, blocks, streaming), codegen


@rows_of("quantize")
def _quantize_rows(source: str, elem: str) -> Any:
    lowest_fast, highest = LOWEST_FAST_SCALE, highest_scale(source, element_format(elem))
    itemsize = SOURCES[source].itemsize
    in_place, fetched = _rows_in_place(source, elem), _rows_fetched(source, elem)
    in_pieces, piece_elems, many = rows_in_pieces(source, elem), 32 * PIECE_BLOCKS, _MANY_PIECES

    def quantize_rows(
        kind: Any, src: Any, dst: Any, scales: Any, run: Any, rows: Any, src_step: Any, dst_step: Any,
        ahead: Any, scratch: Any, first: Any, second: Any, streaming: Any,
    ) -> None:  # fmt: skip
        increment = types.int32(first >> 16)
        lowest = types.int32(min(max(second, lowest_fast), highest))
        if not ahead[0]:
            in_place(
                src, dst, scales, run, rows, src_step, dst_step, scratch, first, second, increment, lowest,
                streaming,
            )  # fmt: skip
            return
        pieces = run // piece_elems
        rest = run - pieces * piece_elems
        # Codes go past the caches by whole lines: each row's, or those of rows that follow each other.
        straight = not streaming or (dst | (dst_step if rows > 1 else 0)) & 63 == 0
        if pieces and rest == 0 and (straight or rows == 1 or dst_step == run):
            in_pieces(
                src, dst, scales, pieces, rows, src_step, dst_step, ahead, scratch, first, second, increment,
                lowest, streaming,
            )  # fmt: skip
        elif pieces and (rows == 1 or pieces >= many):
            one = types.int64(1)  # a literal would be compiled for
            for row in range(rows):
                at, to, beside = src + row * src_step, dst + row * dst_step, scales + ((row * dst_step) >> 5)
                in_pieces(
                    at, to, beside, pieces, one, src_step, dst_step, ahead, scratch, first, second, increment,
                    lowest, streaming,
                )  # fmt: skip
                done = run - rest
                fetched(
                    at + done * itemsize, to + done, beside + (done >> 5), rest, one, src_step, dst_step, ahead,
                    scratch, first, second, increment, lowest, streaming,
                )  # fmt: skip
        else:
            fetched(
                src, dst, scales, run, rows, src_step, dst_step, ahead, scratch, first, second, increment,
                lowest, streaming,
            )  # fmt: skip

    return quantize_rows


def _rows_in_place(source: str, elem: str) -> Any:
    """Return the loop over rows that the machine prefetches by itself; bf16 elements stay where they are."""
    fmt, itemsize, dtype = element_format(elem), SOURCES[source].itemsize, DTYPE_CODES[source]
    mantissa_bits, bias, emax, max_code = fmt.mantissa_bits, fmt.bias, fmt.emax, fmt.max_code
    bytes_each, stays, keep = block_bytes(source), source == "bfloat16", int(source != "bfloat16")
    group, origins_at, bytes_at, lanes_at, scratch_bytes = _LAYOUT

    @njit(nogil=True)
    @named(source, elem)
    def rows_in_place(
        src: int, dst: int, scales: int, run: int, rows: int, src_step: int, dst_step: int, scratch: int,
        round_up: int, min_scale_byte: int, increment: int, lowest: int, streaming: bool,
    ) -> None:  # fmt: skip
        align_spills()
        zero_byte = types.int32(min_scale_byte)
        blocks = run // 32
        # Two groups are under way: while one is encoded, the maxima of the next are on their way to memory.
        row, done, count, side, rare = 0, 0, 0, 0, types.uint32(0)
        at, to, byte = src, dst, scales
        while row < rows or count:
            next_at = src + row * src_step + done * bytes_each
            next_to = dst + row * dst_step + done * 32
            next_byte = scales + ((row * dst_step) >> 5) + done
            next_side = scratch_bytes - side
            origins, made = scratch + next_side + origins_at, scratch + next_side + bytes_at
            next_count = 0
            if row < rows:
                next_count = min(group, blocks - done)
                if streaming and next_to & 63 == 32:
                    next_count = 1  # the rest of the row begins with a whole line
                for i in range(next_count):
                    kept = scratch + next_side + lanes_at + 64 * i
                    find_maximum(next_at + i * bytes_each, origins + 2 * i, kept, source, keep)
                done += next_count
                if done == blocks:
                    row, done = row + 1, 0
            if count:
                lanes = at if stays else scratch + side + lanes_at
                own_origins = scratch + side + origins_at
                i = 0
                if streaming and to & 63 == 0:
                    while i + 2 <= count:
                        encode_blocks(lanes + 64 * i, to + 32 * i, own_origins + 2 * i, elem, 2, 1)
                        i += 2
                else:
                    while i + 2 <= count:
                        encode_blocks(lanes + 64 * i, to + 32 * i, own_origins + 2 * i, elem, 2, 0)
                        i += 2
                if i < count:
                    encode_blocks(lanes + 64 * i, to + 32 * i, own_origins + 2 * i, elem, 1, 0)
                while rare:
                    i = lowest_bit(rare)
                    rare &= rare - types.uint32(1)
                    encode_rare(
                        at + i * bytes_each, to + i * 32, byte + i, round_up, min_scale_byte, itemsize, dtype,
                        mantissa_bits, bias, emax, max_code,
                    )  # fmt: skip
            if next_count == group:
                rare = find_scales(origins, next_byte, increment, lowest, zero_byte, source, elem)
            elif next_count:
                rare = find_scales(origins, made, increment, lowest, zero_byte, source, elem)
                rare &= types.uint32((1 << next_count) - 1)  # of others what is left in the scratch memory
                copy_bytes(next_byte, made, next_count)
            at, to, byte, side, count = next_at, next_to, next_byte, next_side, next_count

    return rows_in_place


def _rows_fetched(source: str, elem: str) -> Any:
    """Return the loop over short rows that are prefetched."""
    fmt, itemsize, dtype = element_format(elem), SOURCES[source].itemsize, DTYPE_CODES[source]
    mantissa_bits, bias, emax, max_code = fmt.mantissa_bits, fmt.bias, fmt.emax, fmt.max_code
    bytes_each = block_bytes(source)
    group, origins_at, bytes_at, lanes_at, scratch_bytes = _LAYOUT
    stage_at, stage_bytes, lag_bytes = 2 * _SCRATCH_BYTES, STAGE_BYTES, LAG_BYTES

    @njit(nogil=True)
    @named(source, elem)
    def rows_fetched(
        src: int, dst: int, scales: int, run: int, rows: int, src_step: int, dst_step: int,
        ahead: Ahead, scratch: int, round_up: int, min_scale_byte: int, increment: int,
        lowest: int, streaming: bool,
    ) -> None:  # fmt: skip
        align_spills()
        zero_byte = types.int32(min_scale_byte)
        blocks = run // 32
        row, done, count, side, rare = 0, 0, 0, 0, types.uint32(0)
        to, byte, first_block = dst, scales, 0
        far, mid, near = ahead
        # Codes that never begin with a line are put together in the first cache, and lines go out from there.
        staged = streaming and (dst | dst_step) & 31 != 0
        stage, line, used, sent, skip = scratch + stage_at, 0, 0, 0, 0
        while row < rows or count:
            next_to = dst + row * dst_step + done * 32
            next_byte = scales + ((row * dst_step) >> 5) + done
            next_first = row * blocks + done
            next_side = scratch_bytes - side
            origins, made = scratch + next_side + origins_at, scratch + next_side + bytes_at
            kept = scratch + next_side + lanes_at
            next_count = 0
            while row < rows and next_count < group:
                take = min(group - next_count, blocks - done)
                alone = streaming and next_count == 0 and next_to & 63 == 32
                if alone:
                    take = 1  # the rest begins with a whole line
                x = src + row * src_step + done * bytes_each
                minima, lanes, left = origins + 2 * next_count, kept + 64 * next_count, take
                # Each instruction is at one block of every row: see `stream_ahead`.
                while left >= 16:
                    fetch_blocks(x, minima, lanes, near, mid, far, source, 16)
                    x, minima, lanes, left = x + 16 * bytes_each, minima + 32, lanes + 1024, left - 16
                if left & 8:
                    fetch_blocks(x, minima, lanes, near, mid, far, source, 8)
                    x, minima, lanes = x + 8 * bytes_each, minima + 16, lanes + 512
                if left & 4:
                    fetch_blocks(x, minima, lanes, near, mid, far, source, 4)
                    x, minima, lanes = x + 4 * bytes_each, minima + 8, lanes + 256
                if left & 2:
                    fetch_blocks(x, minima, lanes, near, mid, far, source, 2)
                    x, minima, lanes = x + 2 * bytes_each, minima + 4, lanes + 128
                if left & 1:
                    fetch_blocks(x, minima, lanes, near, mid, far, source, 1)
                    x += bytes_each
                next_count += take
                done += take
                if done == blocks:
                    prefetch_line(x - 1, ahead)
                    row, done = row + 1, 0
                if dst_step != run or alone:
                    break
            if count:
                lanes, own_origins = scratch + side + lanes_at, scratch + side + origins_at
                i = 0
                whole_lines = streaming and to & 63 == 0
                into = to
                if staged:
                    if to != line + used:
                        flush_stage(line, stage, sent, used, skip)
                        used = sent = 0
                        skip = to & 63
                        line, used = to - skip, skip
                    into = stage + used
                    used += 32 * count
                while i + 2 <= count:
                    if whole_lines:
                        encode_blocks(lanes + 64 * i, to + 32 * i, own_origins + 2 * i, elem, 2, 1)
                    else:
                        encode_blocks(lanes + 64 * i, into + 32 * i, own_origins + 2 * i, elem, 2, 0)
                    i += 2
                if i < count:
                    encode_blocks(lanes + 64 * i, into + 32 * i, own_origins + 2 * i, elem, 1, 0)
                while rare:
                    i = lowest_bit(rare)
                    rare &= rare - types.uint32(1)
                    block = first_block + i
                    encode_rare(
                        src + (block // blocks) * src_step + (block % blocks) * bytes_each, into + i * 32,
                        byte + i, round_up, min_scale_byte, itemsize, dtype, mantissa_bits, bias, emax, max_code,
                    )  # fmt: skip
                if staged:
                    sent = send_lines(line, stage, sent, used - lag_bytes, skip)
                    if used >= stage_bytes:
                        sent = send_lines(line, stage, sent, used, skip)
                        copy_line(stage, stage + sent)
                        line, used, sent, skip = line + sent, used - sent, 0, 0
            if next_count == group:
                rare = find_scales(origins, next_byte, increment, lowest, zero_byte, source, elem)
            elif next_count:
                rare = find_scales(origins, made, increment, lowest, zero_byte, source, elem)
                rare &= types.uint32((1 << next_count) - 1)  # of others what is left in the scratch memory
                copy_bytes(next_byte, made, next_count)
            to, byte, first_block, side, count = next_to, next_byte, next_first, next_side, next_count
        if staged:
            flush_stage(line, stage, sent, used, skip)

    return rows_fetched
