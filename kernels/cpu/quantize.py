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
from lowshard.kernels.cpu.drive import named, prefetch_line, rows_of
from lowshard.kernels.cpu.rare import encode_rare
from lowshard.kernels.cpu.scalar import DTYPE_CODES
from lowshard.kernels.cpu.sources import MAGNITUDE, ONE_FIELD, SOURCES
from lowshard.kernels.cpu.vector import (
    Lanes,
    copy_bytes,
    load,
    only_if,
    prefetch,
    store,
)
from lowshard.kernels.reference import BLOCK_ELEMS, ElementFormat, element_format

GROUP_BLOCKS = 32
"""Blocks of a group: one 16-bit lane each in the second step, and 2 KiB of bf16 between the first and the third."""

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
        else:
            bits = SOURCES[dtype].load(builder, at)
            store(builder, to, bits, False)
            least = _inverse(bits)
        store(builder, smallest, least.smallest(), False)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 3, source, keep), codegen


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
        raw = [load(builder, at, 16, BLOCK_ELEMS, i * 2 * BLOCK_ELEMS) for i in range(count)]
        splats = [load(builder, tops_at, 16, 0, 2 * i).splat(BLOCK_ELEMS) for i in range(count)]
        store(builder, to, _codes(raw, splats, fmt), bool(streaming.literal_value))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 3, elem, blocks, streaming), codegen


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

    @njit(nogil=True)
    @named(source, elem)
    def rows_fetched(
        src: int, dst: int, scales: int, run: int, rows: int, src_step: int, dst_step: int,
        ahead: tuple[int, int, int, int], scratch: int, round_up: int, min_scale_byte: int, increment: int,
        lowest: int, streaming: bool,
    ) -> None:  # fmt: skip
        zero_byte = types.int32(min_scale_byte)
        blocks, row_bytes = run // 32, run * itemsize
        row, done, count, side, rare = 0, 0, 0, 0, types.uint32(0)
        to, byte, first_block = dst, scales, 0
        pair_at, pair_left = src, row_bytes
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
                for i in range(next_count, next_count + take):
                    for line in range(0, block_bytes, 64):
                        prefetch(x + ahead[2] + line)
                        prefetch(x + ahead[3] + line)
                    find_maximum(x, tops + 2 * i, kept + 64 * i, source, 1)
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
                while i + 2 <= count:
                    for line in range(0, 2 * block_bytes, 64):
                        prefetch(pair_at + ahead[0] + line)
                        prefetch(pair_at + ahead[1] + line)
                    pair_at += 2 * block_bytes
                    pair_left -= 2 * block_bytes
                    if pair_left <= 0:
                        pair_at += src_step - row_bytes
                        pair_left += row_bytes
                    if whole_lines:
                        encode_blocks(lanes + 64 * i, to + 32 * i, own_tops + 2 * i, elem, 2, 1)
                    else:
                        encode_blocks(lanes + 64 * i, to + 32 * i, own_tops + 2 * i, elem, 2, 0)
                    i += 2
                if i < count:
                    encode_blocks(lanes + 64 * i, to + 32 * i, own_tops + 2 * i, elem, 1, 0)
                if rare:
                    for i in range(count):
                        if (rare >> types.uint32(i)) & types.uint32(1):
                            block = first_block + i
                            encode_rare(
                                src + (block // blocks) * src_step + (block % blocks) * block_bytes,
                                to + i * 32, byte + i, round_up, min_scale_byte, itemsize, dtype, mantissa_bits,
                                bias, emax, max_code,
                            )  # fmt: skip
            if next_count == group:
                rare = find_scales(tops, next_byte, increment, lowest, zero_byte, source, elem)
            elif next_count:
                rare = find_scales(tops, made, increment, lowest, zero_byte, source, elem)
                copy_bytes(next_byte, made, next_count)
            to, byte, first_block, side, count = next_to, next_byte, next_first, next_side, next_count

    return rows_fetched
