"""MXFP8 quantisation, some blocks at a time in three steps, each without a long chain of dependent instructions.

1. The maximum of each block goes to scratch memory (and its elements as bf16 lanes, if they are of another dtype).
2. All maxima at once give the scale bytes, what to subtract from each block, and which blocks are rare.
3. Each block is shifted, rounded and narrowed to codes; its elements come from the first cache now.

The arithmetic is that of `lowshard.kernels.reference`, on 16-bit lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from lowshard.compiled.deferred import intrinsic, njit, types
from lowshard.kernels.cpu.copy import LAG_BYTES, STAGE_BYTES, flush_stage, send_lines
from lowshard.kernels.cpu.drive import Ahead, named, prefetch_line, rows_of
from lowshard.kernels.cpu.rare import encode_rare
from lowshard.kernels.cpu.scalar import DTYPE_CODES
from lowshard.kernels.cpu.sources import MAGNITUDE, ONE_FIELD, SOURCES
from lowshard.kernels.cpu.vector import (
    CACHE_LINE_BYTES,
    Lanes,
    copy_bytes,
    copy_line,
    load,
    offset,
    only_if,
    prefetch_at,
    store,
)
from lowshard.kernels.reference import BLOCK_ELEMS, ElementFormat, element_format

GROUP_BLOCKS = 32
"""Blocks of a group: one 16-bit lane each in the second step, and 2 KiB of bf16 between the first and the third."""

# Blocks that are encoded by code without a loop. Further lines of the source are asked for there: the first step, which
# waits for memory, gets shorter, and the third, which computes, has room for it.
_PIECE_BLOCKS = 16

# Below this scale byte a subnormal bf16 or fp32 can give a code other than zero (see reference.py), and the vector
# code takes every element for a normal number.
_LOWEST_FAST_SCALE = 18

# Any maximum with an ordinary scale, for blocks of zeros: they stay zero under all of them.
_SOME_MAXIMUM = 0x4000

# Scratch memory of a group: what each block is subtracted from, the scale bytes, the elements as bf16.
_TOPS, _BYTES, _LANES, _SCRATCH_BYTES = 0, 2 * GROUP_BLOCKS, 128, 128 + 2 * BLOCK_ELEMS * GROUP_BLOCKS


@intrinsic(prefer_literal=True)
def find_maximum(typingctx: Any, src: Any, minimum: Any, lanes: Any, source: Any, keep: Any) -> Any:
    """Write the complement of a block's largest magnitude, and with the literal `keep` its bf16 lanes.

    The complement, since machines have a minimum of eight 16-bit lanes in one instruction, but no maximum.
    """
    dtype, keeps = source.literal_value, bool(keep.literal_value)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        at, smallest, to = args[:3]
        if dtype == "bfloat16" and not keeps:
            half_elems = BLOCK_ELEMS // 2
            low, high = (load(builder, at, 16, half_elems, i * 2 * half_elems) for i in range(2))
            least = _inverse(low).minimum(_inverse(high), signed=False)
            store(builder, smallest, least.smallest(), False)
        else:
            _keep_block(builder, at, smallest, to, dtype)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 3, source, keep), codegen


@intrinsic(prefer_literal=True)
def fetch_blocks(
    typingctx: Any, src: Any, minima: Any, lanes: Any, near: Any, mid: Any, far: Any, source: Any,
    blocks: Any, requests: Any,
) -> Any:  # fmt: skip
    """Do as `find_maximum` with `keep` for some blocks, and ask for what lies two or three distances on.

    The last three arguments are literals; two requests leave out `far`.
    """
    dtype, count = source.literal_value, blocks.literal_value
    block_bytes = _block_bytes(dtype)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        at, smallest, to = args[:3]
        ahead = [builder.add(at, distance) for distance in reversed(args[3 : 3 + requests.literal_value])]
        for block in range(count):
            begin = block * block_bytes
            for address in ahead:
                _prefetch_block(builder, address, block, dtype)
            places = (offset(builder, at, begin), offset(builder, smallest, 2 * block))
            _keep_block(builder, *places, offset(builder, to, 2 * BLOCK_ELEMS * block), dtype)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 6, source, blocks, requests), codegen


def _block_bytes(dtype: str) -> int:
    return BLOCK_ELEMS * SOURCES[dtype].itemsize


def _prefetch_block(builder: ir.IRBuilder, address: ir.Value, block: int, dtype: str) -> None:
    """Ask for the lines of a block of the source: one, or two of fp32."""
    begin = block * _block_bytes(dtype)
    for line in range(begin, begin + _block_bytes(dtype), CACHE_LINE_BYTES):
        prefetch_at(builder, offset(builder, address, line))


def _keep_block(
    builder: ir.IRBuilder, address: ir.Value, smallest: ir.Value, lanes: ir.Value, dtype: str
) -> None:
    bits = SOURCES[dtype].load(builder, address)
    store(builder, lanes, bits, False)
    store(builder, smallest, _inverse(bits).smallest(), False)


@intrinsic(prefer_literal=True)
def find_scales(
    typingctx: Any, tops: Any, bytes_: Any, round_up: Any, lowest: Any, zero_byte: Any, source: Any, elem: Any
) -> Any:
    """Turn the complements of the maxima of a group into scale bytes and tops, and return a mask of rare blocks.

    A block's elements are subtracted from its top as complements: that gives the exponent field of the element,
    x / 2^(s - 127), in a bf16. Maxima under `lowest` are rare, zero apart.
    """
    fmt, infinity = element_format(elem.literal_value), SOURCES[source.literal_value].infinity

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        at, to = args[:2]
        increment, low, byte_of_zero = (Lanes(builder, value).narrow(16) for value in args[2:5])
        maxima = load(builder, at, 16, GROUP_BLOCKS) ^ MAGNITUDE
        zero = maxima.compare("==", 0)
        maxima = zero.where(_SOME_MAXIMUM, maxima)
        rare = maxima.compare("<", low, signed=False) | maxima.compare(">=", infinity, signed=False)
        field = (maxima + increment) >> 7
        made = zero.where(byte_of_zero, field - fmt.emax)
        store(builder, to, made.narrow(8), False)
        store(builder, at, field.constant(MAGNITUDE + ((fmt.emax + fmt.bias) << 7)) - (field << 7), False)
        return builder.bitcast(rare.value, ir.IntType(GROUP_BLOCKS))

    return types.uint32(types.int64, types.int64, *(types.int32,) * 3, source, elem), codegen


@intrinsic(prefer_literal=True)
def encode_blocks(
    typingctx: Any, lanes: Any, data: Any, tops: Any, elem: Any, blocks: Any, streaming: Any
) -> Any:
    """Write the codes of one or two blocks from their bf16 lanes and their tops.

    The last three arguments are literals; a streaming store needs two blocks and a `data` that is a multiple of 64.
    """
    fmt, count = element_format(elem.literal_value), blocks.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        at, to, tops_at = args[:3]
        _encode(builder, at, to, tops_at, range(count), fmt, bool(streaming.literal_value))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 3, elem, blocks, streaming), codegen


@intrinsic(prefer_literal=True)
def encode_piece(typingctx: Any, lanes: Any, data: Any, tops: Any, ahead: Any, source: Any, elem: Any) -> Any:
    """Do as `encode_blocks` with streaming stores for a piece, and ask for as many blocks of the source at `ahead`."""
    dtype, fmt = source.literal_value, element_format(elem.literal_value)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        at, to, tops_at, further = args[:4]
        for first in range(0, _PIECE_BLOCKS, 2):
            pair = range(first, first + 2)
            for block in pair:
                _prefetch_block(builder, further, block, dtype)
            _encode(builder, at, to, tops_at, pair, fmt, True)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4, source, elem), codegen


def _encode(
    builder: ir.IRBuilder, lanes: ir.Value, data: ir.Value, tops: ir.Value, blocks: range, fmt: ElementFormat,
    streaming: bool,
) -> None:  # fmt: skip
    """Write the codes of one or two blocks, of those at three addresses."""
    raw = [load(builder, lanes, 16, BLOCK_ELEMS, 2 * BLOCK_ELEMS * block) for block in blocks]
    splats = [load(builder, tops, 16, 0, 2 * block).splat(BLOCK_ELEMS) for block in blocks]
    store(builder, data, _codes(raw, splats, fmt), streaming, BLOCK_ELEMS * blocks.start)


def _inverse(bits: Lanes) -> Lanes:
    return (bits & MAGNITUDE) ^ MAGNITUDE


def _codes(raw: Sequence[Lanes], tops: Sequence[Lanes], fmt: ElementFormat) -> Lanes:
    """Return the codes of one or two blocks as bytes."""
    drop = 7 - fmt.mantissa_bits
    inverse = [_inverse(bits) for bits in raw]
    # In the upper byte what is kept, in the lower one what is rounded away.
    parts = [top.minus_or_zero(item) << (8 - drop) for top, item in zip(tops, inverse, strict=True)]
    kept, rest = _bytes_of(parts, 1), _bytes_of(parts, 0)
    # To nearest, ties to even: up above one half, and at one half if the last bit is set.
    up = (rest | (kept & 1)).compare(">", 0x80, signed=False)
    codes = up.where(kept + 1, kept)
    below = kept.compare("<", 1 << fmt.mantissa_bits, signed=False)
    with only_if(codes.builder, below.any(), [codes]) as fixed:
        targets = [top - item for top, item in zip(tops, inverse, strict=True)]
        fixed.append(_with_subnormals(codes, targets, fmt))
    return fixed[0].minimum(fmt.max_code, signed=False) | (_bytes_of(raw, 1) & 0x80)


def _with_subnormals(codes: Lanes, targets: Sequence[Lanes], fmt: ElementFormat) -> Lanes:
    """Return the codes of blocks with those below the smallest normal one put right.

    What is below half of the smallest code, zeros that is for the most part, is zero already.
    """
    drop = 7 - fmt.mantissa_bits
    below = [
        target.compare("<", ONE_FIELD) & target.compare(">=", -fmt.mantissa_bits * ONE_FIELD)
        for target in targets
    ]
    with only_if(codes.builder, (below[0] | below[-1]).any(), [codes]) as fixed:
        rounded = []
        for target in targets:
            significand = (target & (ONE_FIELD - 1)) | ONE_FIELD
            shift = target.constant(drop + 1) - target.arithmetic_shift(7)
            half = target.constant(1) << (shift - 1)
            rounded.append((significand + half - 1 + ((significand >> shift) & 1)) >> shift)
        chosen = _bytes_of([mask.where(0xFF, mask.widen(16)) for mask in below], 0)
        fixed.append(chosen.compare("!=", 0).where(_bytes_of(rounded, 0), codes))
    return fixed[0]


def _bytes_of(lanes: Sequence[Lanes], which: int) -> Lanes:
    """Return byte 0 (low) or 1 (high) of the 16-bit lanes of one or two blocks, as bytes."""
    parts = [item.as_lanes(8) for item in lanes]
    indices = range(which, 2 * BLOCK_ELEMS * len(parts), 2)
    return parts[0].picked(indices, parts[-1])


@rows_of("quantize")
def _quantize_rows(source: str, elem: str) -> Any:
    emax, lowest_fast = element_format(elem).emax, _LOWEST_FAST_SCALE
    in_place, fetched = _rows_in_place(source, elem), _rows_fetched(source, elem)

    def quantize_rows(
        kind: Any, src: Any, dst: Any, scales: Any, run: Any, rows: Any, src_step: Any, dst_step: Any,
        ahead: Any, scratch: Any, first: Any, second: Any, streaming: Any,
    ) -> None:  # fmt: skip
        increment = types.int32(first >> 16)
        lowest = types.int32(((max(second, lowest_fast) + emax) << 7) - increment)
        if ahead[0]:
            fetched(
                src, dst, scales, run, rows, src_step, dst_step, ahead, scratch, first, second, increment,
                lowest, streaming,
            )  # fmt: skip
        else:
            in_place(
                src, dst, scales, run, rows, src_step, dst_step, scratch, first, second, increment, lowest,
                streaming,
            )  # fmt: skip

    return quantize_rows


def _rows_in_place(source: str, elem: str) -> Any:
    """Return the loop over rows that the machine prefetches by itself; bf16 elements stay where they are."""
    fmt, itemsize, dtype = element_format(elem), SOURCES[source].itemsize, DTYPE_CODES[source]
    mantissa_bits, bias, emax, max_code = fmt.mantissa_bits, fmt.bias, fmt.emax, fmt.max_code
    block_bytes, stays, keep = BLOCK_ELEMS * itemsize, source == "bfloat16", int(source != "bfloat16")
    group, tops_at, bytes_at, lanes_at, scratch_bytes = GROUP_BLOCKS, _TOPS, _BYTES, _LANES, _SCRATCH_BYTES

    @njit(nogil=True)
    @named(source, elem)
    def rows_in_place(
        src: int, dst: int, scales: int, run: int, rows: int, src_step: int, dst_step: int, scratch: int,
        round_up: int, min_scale_byte: int, increment: int, lowest: int, streaming: bool,
    ) -> None:  # fmt: skip
        zero_byte = types.int32(min_scale_byte)
        blocks = run // 32
        # Two groups are under way: while one is encoded, the maxima of the next are on their way to memory.
        row, done, count, side, rare = 0, 0, 0, 0, types.uint32(0)
        at, to, byte = src, dst, scales
        while row < rows or count:
            next_at = src + row * src_step + done * block_bytes
            next_to = dst + row * dst_step + done * 32
            next_byte = scales + ((row * dst_step) >> 5) + done
            next_side = scratch_bytes - side
            tops, made = scratch + next_side + tops_at, scratch + next_side + bytes_at
            next_count = 0
            if row < rows:
                next_count = min(group, blocks - done)
                if streaming and next_to & 63 == 32:
                    next_count = 1  # the rest of the row begins with a whole line
                for i in range(next_count):
                    kept = scratch + next_side + lanes_at + 64 * i
                    find_maximum(next_at + i * block_bytes, tops + 2 * i, kept, source, keep)
                done += next_count
                if done == blocks:
                    row, done = row + 1, 0
            if count:
                lanes = at if stays else scratch + side + lanes_at
                own_tops = scratch + side + tops_at
                i = 0
                if streaming and to & 63 == 0:
                    while i + 2 <= count:
                        encode_blocks(lanes + 64 * i, to + 32 * i, own_tops + 2 * i, elem, 2, 1)
                        i += 2
                else:
                    while i + 2 <= count:
                        encode_blocks(lanes + 64 * i, to + 32 * i, own_tops + 2 * i, elem, 2, 0)
                        i += 2
                if i < count:
                    encode_blocks(lanes + 64 * i, to + 32 * i, own_tops + 2 * i, elem, 1, 0)
                if rare:
                    for i in range(count):
                        if (rare >> types.uint32(i)) & types.uint32(1):
                            encode_rare(
                                at + i * block_bytes, to + i * 32, byte + i, round_up, min_scale_byte,
                                itemsize, dtype, mantissa_bits, bias, emax, max_code,
                            )  # fmt: skip
            if next_count == group:
                rare = find_scales(tops, next_byte, increment, lowest, zero_byte, source, elem)
            elif next_count:
                rare = find_scales(tops, made, increment, lowest, zero_byte, source, elem)
                copy_bytes(next_byte, made, next_count)
            at, to, byte, side, count = next_at, next_to, next_byte, next_side, next_count

    return rows_in_place


def _rows_fetched(source: str, elem: str) -> Any:
    """Return the loop over short rows that are prefetched.

    Their elements leave the source's cache lines as soon as they can, and go on from scratch memory; a group goes
    over several rows if their codes follow each other.
    """
    fmt, itemsize, dtype = element_format(elem), SOURCES[source].itemsize, DTYPE_CODES[source]
    mantissa_bits, bias, emax, max_code = fmt.mantissa_bits, fmt.bias, fmt.emax, fmt.max_code
    block_bytes = BLOCK_ELEMS * itemsize
    group, tops_at, bytes_at, lanes_at, scratch_bytes = GROUP_BLOCKS, _TOPS, _BYTES, _LANES, _SCRATCH_BYTES
    piece, stage_at, stage_bytes, lag_bytes = _PIECE_BLOCKS, 2 * _SCRATCH_BYTES, STAGE_BYTES, LAG_BYTES

    @njit(nogil=True)
    @named(source, elem)
    def rows_fetched(
        src: int, dst: int, scales: int, run: int, rows: int, src_step: int, dst_step: int,
        ahead: Ahead, scratch: int, round_up: int, min_scale_byte: int, increment: int,
        lowest: int, streaming: bool,
    ) -> None:  # fmt: skip
        zero_byte = types.int32(min_scale_byte)
        blocks = run // 32
        row, done, count, side, rare = 0, 0, 0, 0, types.uint32(0)
        to, byte, first_block = dst, scales, 0
        far, mid, near = ahead
        # Where they can be, all groups are whole pieces, each of one row.
        pieces = streaming and blocks % piece == 0 and (dst | dst_step) & 63 == 0
        piece_at, piece_left = src, blocks
        # Codes that never begin with a line are put together in the first cache, and lines go out from there.
        staged = streaming and (dst | dst_step) & 31 != 0
        stage, line, used, sent, skip = scratch + stage_at, 0, 0, 0, 0
        while row < rows or count:
            next_to = dst + row * dst_step + done * 32
            next_byte = scales + ((row * dst_step) >> 5) + done
            next_first = row * blocks + done
            next_side = scratch_bytes - side
            tops, made = scratch + next_side + tops_at, scratch + next_side + bytes_at
            kept = scratch + next_side + lanes_at
            next_count = 0
            while row < rows and next_count < group:
                take = min(group - next_count, blocks - done)
                alone = streaming and next_count == 0 and next_to & 63 == 32
                if alone:
                    take = 1  # the rest begins with a whole line
                x = src + row * src_step + done * block_bytes
                minima, lanes, left = tops + 2 * next_count, kept + 64 * next_count, take
                # Each instruction is at one block of every row: see `stream_ahead`.
                while left >= 16:
                    if pieces:
                        fetch_blocks(x, minima, lanes, near, mid, far, source, 16, 2)
                    else:
                        fetch_blocks(x, minima, lanes, near, mid, far, source, 16, 3)
                    x, minima, lanes, left = x + 16 * block_bytes, minima + 32, lanes + 1024, left - 16
                if left & 8:
                    fetch_blocks(x, minima, lanes, near, mid, far, source, 8, 3)
                    x, minima, lanes = x + 8 * block_bytes, minima + 16, lanes + 512
                if left & 4:
                    fetch_blocks(x, minima, lanes, near, mid, far, source, 4, 3)
                    x, minima, lanes = x + 4 * block_bytes, minima + 8, lanes + 256
                if left & 2:
                    fetch_blocks(x, minima, lanes, near, mid, far, source, 2, 3)
                    x, minima, lanes = x + 2 * block_bytes, minima + 4, lanes + 128
                if left & 1:
                    fetch_blocks(x, minima, lanes, near, mid, far, source, 1, 3)
                    x += block_bytes
                next_count += take
                done += take
                if done == blocks:
                    prefetch_line(x - 1, ahead)
                    row, done = row + 1, 0
                if dst_step != run or alone:
                    break
            if count:
                lanes, own_tops = scratch + side + lanes_at, scratch + side + tops_at
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
                while pieces and i < count:
                    encode_piece(lanes + 64 * i, to + 32 * i, own_tops + 2 * i, piece_at + far, source, elem)
                    i += piece
                    piece_at, piece_left = piece_at + piece * block_bytes, piece_left - piece
                    if piece_left == 0:
                        piece_at, piece_left = piece_at + src_step - blocks * block_bytes, blocks
                while i + 2 <= count:
                    if whole_lines:
                        encode_blocks(lanes + 64 * i, to + 32 * i, own_tops + 2 * i, elem, 2, 1)
                    else:
                        encode_blocks(lanes + 64 * i, into + 32 * i, own_tops + 2 * i, elem, 2, 0)
                    i += 2
                if i < count:
                    encode_blocks(lanes + 64 * i, into + 32 * i, own_tops + 2 * i, elem, 1, 0)
                if rare:
                    for i in range(count):
                        if (rare >> types.uint32(i)) & types.uint32(1):
                            block = first_block + i
                            encode_rare(
                                src + (block // blocks) * src_step + (block % blocks) * block_bytes,
                                into + i * 32, byte + i, round_up, min_scale_byte, itemsize, dtype, mantissa_bits,
                                bias, emax, max_code,
                            )  # fmt: skip
                if staged:
                    sent = send_lines(line, stage, sent, used - lag_bytes, skip)
                    if used >= stage_bytes:
                        sent = send_lines(line, stage, sent, used, skip)
                        copy_line(stage, stage + sent)
                        line, used, sent, skip = line + sent, used - sent, 0, 0
            if next_count == group:
                rare = find_scales(tops, next_byte, increment, lowest, zero_byte, source, elem)
            elif next_count:
                rare = find_scales(tops, made, increment, lowest, zero_byte, source, elem)
                copy_bytes(next_byte, made, next_count)
            to, byte, first_block, side, count = next_to, next_byte, next_first, next_side, next_count
        if staged:
            flush_stage(line, stage, sent, used, skip)

    return rows_fetched
