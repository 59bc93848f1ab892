"""MXFP8 quantisation of whole pieces of 16 blocks in straight code, four blocks at a time.

A step's codes are made after the next step's maxima, which come out of a tree of minima over vectors: what waits for
memory and what computes are in the machine's sight at once. Between them only the origins of blocks are kept. All that
is rare is noted, and done when the piece is: LLVM would make room for it in the code that is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from lowshard.compiled.deferred import intrinsic, njit, types
from lowshard.compiled.emitted import copy_bytes
from lowshard.kernels.cpu.codes import has_tables
from lowshard.kernels.cpu.copy import RING_BYTES, flush_ring
from lowshard.kernels.cpu.drive import Ahead, named
from lowshard.kernels.cpu.encode import (
    block_bytes,
    codes_of,
    encode,
    encode_normals,
    halves_minimum,
    make_origins,
    minimum_of_halves,
    prefetch_block,
    scales_of,
)
from lowshard.kernels.cpu.memory_steps import align_spills, copy_line, load, offset, store, stream_lines
from lowshard.kernels.cpu.rare import encode_rare
from lowshard.kernels.cpu.scalar import DTYPE_CODES
from lowshard.kernels.cpu.sources import SOURCES
from lowshard.kernels.cpu.vector import Lanes, lowest_bit
from lowshard.kernels.reference import BLOCK_ELEMS, element_format

PIECE_BLOCKS = 16
"""Blocks of a piece: each of its instructions handles one block of every piece, see `copy`."""

_STEP = 4
"""Blocks of a step."""

_LOCALITY = {"bfloat16": 2, "float16": 2, "float32": 3}
"""The cache that a source is asked for into: see `prefetch_at`. fp32 moves the most bytes a block. Asked for into the
second cache, it took 1.0 or 1.4 times a copy, by where source and target begin; into the first, 0.9 anywhere."""

_WORDS = 8
"""16-bit words of 128 bits, within which vector instructions interleave."""

# Scratch memory of a piece: a mask of pairs to mend, where each block's fields begin, bf16 lanes of other sources; and,
# for codes that begin amid a line, the last 64 of the piece before, or a ring of pieces.
_TO_MEND_AT, _ORIGINS_AT, _LANES_AT, _LAST_CODES_AT, _RING_AT = 0, 32, 64, 2048, 2048

CACHED, STREAMED, SHIFTED = 0, 1, 2
"""Ways to write codes: as usual; past the caches, to a multiple of 64; past the caches, line by line, to any address.

The last is for machines with tables. It writes each line that ends in the piece, of which the first begins with codes
of the piece before, and leaves the codes after the last one to the next piece.
"""


@intrinsic(prefer_literal=True)
def encode_piece(
    typingctx: Any, src: Any, data: Any, scales: Any, scratch: Any, far: Any, mid: Any, near: Any,
    increment: Any, lowest: Any, zero_byte: Any, source: Any, elem: Any, way: Any,
) -> Any:  # fmt: skip
    """Quantise a piece but for rare blocks, of which it returns a mask, and pairs with elements to mend."""
    dtype, past_caches, shifts = (
        source.literal_value,
        way.literal_value == STREAMED,
        way.literal_value == SHIFTED,
    )
    fmt = element_format(elem.literal_value)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        at, to, bytes_at, notes = args[:4]
        ahead = [builder.add(at, distance) for distance in args[4:7]]
        increment, lowest, zero_byte = (Lanes(builder, value).narrow(16) for value in args[7:10])
        if not has_tables():
            store(builder, notes, Lanes(builder, ir.Constant(ir.IntType(32), 0)), False, _TO_MEND_AT)

        def look(first: int) -> tuple[Lanes, list[Lanes]]:
            """Return the origins of a step's blocks and, where there are registers for them, their lanes."""
            minima: list[Lanes] = []
            raw: list[Lanes] = []
            for block in range(first, first + _STEP):
                for address in ahead:
                    prefetch_block(builder, address, block, dtype, _LOCALITY[dtype])
                place = offset(builder, at, block * block_bytes(dtype))
                if has_tables():
                    raw.append(SOURCES[dtype].load(builder, place))
                    minima.append(minimum_of_halves(raw[-1]))
                else:
                    minima.append(halves_minimum(builder, place, _kept(builder, notes, block, dtype), dtype))
            origins = make_origins(_least(minima), increment, fmt).pinned()
            if not raw:
                store(builder, notes, origins.picked(range(_STEP)), False, _ORIGINS_AT + 2 * first)
            return origins, raw

        lanes, (origins, raw) = _kept(builder, notes, 0, dtype) or at, look(0)
        parts = [origins]
        if shifts:
            before = load(builder, notes, 8, 2 * BLOCK_ELEMS, _LAST_CODES_AT)
            of_line = Lanes(builder, builder.and_(builder.neg(to), ir.Constant(to.type, 63)))
            line = builder.add(to, builder.sub(of_line.value, ir.Constant(to.type, 64)))
        for first in range(0, PIECE_BLOCKS, _STEP):
            following = look(first + _STEP) if first + _STEP < PIECE_BLOCKS else (origins, raw)
            for i in range(0, _STEP, 2):
                pair = range(first + i, first + i + 2)
                at_byte = BLOCK_ELEMS * pair.start
                if raw:
                    codes = codes_of(raw[i : i + 2], origins, i, fmt)
                    if shifts:
                        store(builder, line, before.bytes_from(of_line.narrow(8), codes), True, at_byte)
                        before = codes
                    else:
                        store(builder, to, codes, past_caches, at_byte)
                    continue
                two = [load(builder, lanes, 16, BLOCK_ELEMS, 2 * BLOCK_ELEMS * block) for block in pair]
                with encode_normals(two, origins, i, to, at_byte, fmt, past_caches):
                    note = load(builder, notes, 32, 0, _TO_MEND_AT) | (1 << pair.start)
                    store(builder, notes, note, False, _TO_MEND_AT)
            origins, raw = following
            parts.append(origins)
        if shifts:
            store(builder, notes, before, False, _LAST_CODES_AT)
        # Not loaded from where they were stored: that would wait for all stores of codes.
        halves = [
            one.picked([*range(_STEP), *range(_WORDS, _WORDS + _STEP)], other)
            for one, other in (parts[:2], parts[2:4])
        ]
        made, rare = scales_of(
            halves[0].picked(range(PIECE_BLOCKS), halves[1]), lowest, zero_byte, dtype, fmt
        )
        store(builder, bytes_at, made, False)
        return builder.zext(builder.bitcast(rare.value, ir.IntType(PIECE_BLOCKS)), ir.IntType(32))

    return types.uint32(*(types.int64,) * 7, *(types.int32,) * 3, source, elem, way), codegen


@intrinsic(prefer_literal=True)
def to_mend(typingctx: Any, scratch: Any) -> Any:
    """Return the pairs of an encoded piece that `mend_pair` must correct, as a mask of their first blocks."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        if has_tables():
            return ir.Constant(ir.IntType(32), 0)
        return load(builder, args[0], 32, 0, _TO_MEND_AT).value

    return types.uint32(types.int64), codegen


@intrinsic(prefer_literal=True)
def mend_pair(
    typingctx: Any, src: Any, data: Any, scratch: Any, first: Any, source: Any, elem: Any, streaming: Any
) -> Any:
    """Write the codes of two blocks of a piece again, with elements below the smallest normal code."""
    dtype, past_caches = source.literal_value, bool(streaming.literal_value)
    fmt = element_format(elem.literal_value)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        at, to, notes, first = args[:4]
        lanes, sizes_bytes = _kept(builder, notes, 0, dtype) or at, (2 * BLOCK_ELEMS, BLOCK_ELEMS, 2)
        begins = (lanes, to, offset(builder, notes, _ORIGINS_AT))
        lanes, to, origins = (
            builder.add(begin, builder.mul(first, ir.Constant(first.type, size_bytes)))
            for begin, size_bytes in zip(begins, sizes_bytes, strict=True)
        )
        encode(builder, lanes, to, origins, range(2), fmt, past_caches)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4, source, elem, streaming), codegen


def _kept(builder: ir.IRBuilder, scratch: ir.Value, block: int, dtype: str) -> ir.Value | None:
    """Return where the bf16 lanes of a block are kept, None where the source has them."""
    return None if dtype == "bfloat16" else offset(builder, scratch, _LANES_AT + 2 * BLOCK_ELEMS * block)


def _least(minima: Sequence[Lanes]) -> Lanes:
    """Return the minima of four vectors of 16 lanes, twice."""
    lanes = list(minima)
    for words in (1, 2):
        lanes = [_joined(*two, words) for two in zip(lanes[::2], lanes[1::2], strict=True)]
    whole = lanes[0]
    half = whole.picked(range(_WORDS)).minimum(whole.picked(range(_WORDS, 2 * _WORDS)), signed=False)
    turned = [*range(_STEP, 2 * _STEP), *range(_STEP)]
    return half.minimum(half.picked(turned), signed=False)


def _joined(one: Lanes, other: Lanes, words: int) -> Lanes:
    """Return the minima of two vectors in one: units of `words` lanes in turn, within each 128 bits."""
    halves = []
    for begin in (0, _WORDS // 2):
        units = range(begin, begin + _WORDS // 2, words)
        indices = [
            side + half + unit + word
            for half in (0, _WORDS)
            for unit in units
            for side in (0, 2 * _WORDS)
            for word in range(words)
        ]
        halves.append(one.picked(indices, other))
    return halves[0].minimum(halves[1], signed=False)


def rows_in_pieces(source: str, elem: str) -> Any:
    """Return the loop over rows of whole pieces that are prefetched."""
    fmt, itemsize, dtype = element_format(elem), SOURCES[source].itemsize, DTYPE_CODES[source]
    mantissa_bits, bias, emax, max_code = fmt.mantissa_bits, fmt.bias, fmt.emax, fmt.max_code
    bytes_each, count, ring_at, ring_bytes = block_bytes(source), PIECE_BLOCKS, _RING_AT, RING_BYTES
    last_at, tables = _LAST_CODES_AT, has_tables()
    shifted = SHIFTED if tables else CACHED  # what machines without tables never run they cannot compile

    @njit(nogil=True)
    @named(source, elem)
    def rows_in_pieces(
        src: int, dst: int, scales: int, pieces: int, rows: int, src_step: int, dst_step: int,
        ahead: Ahead, scratch: int, round_up: int, min_scale_byte: int, increment: int,
        lowest: int, streaming: bool,
    ) -> None:  # fmt: skip
        align_spills()
        zero_byte = types.int32(min_scale_byte)
        far, mid, near = ahead
        src_gap, dst_gap = src_step - pieces * count * bytes_each, dst_step - pieces * count * 32
        at, to, byte, left, rest = src, dst, scales, pieces, rows * pieces
        # Codes that begin amid a line go past the caches by whole lines too, which hold codes of two pieces.
        apart = streaming and (dst | (dst_gap if rows > 1 else 0)) & 63 != 0
        before, end = -dst & 63, dst + rows * pieces * count * 32
        ring, line, into = scratch + ring_at, dst + before, dst
        first, stop = apart, rest - 1 if apart else 0
        while rest:
            rare = pairs = types.uint32(0)
            # No calls in this loop: they would have it fetch its constants anew for each piece.
            while True:
                into = to
                if streaming and not apart:
                    rare = encode_piece(
                        at, to, byte, scratch, far, mid, near, increment, lowest, zero_byte, source, elem, 1
                    )
                elif tables and apart and not first:
                    rare = encode_piece(
                        at, to, byte, scratch, far, mid, near, increment, lowest, zero_byte, source, elem, shifted
                    )  # fmt: skip
                else:
                    if apart and not tables:
                        into = ring + ((to - dst) & (ring_bytes - 1))
                        if to - dst >= ring_bytes:
                            if into == ring + ring_bytes - 512:
                                copy_line(ring + ring_bytes, ring)
                            stream_lines(line, into + before, 8)
                            line += 512
                    rare = encode_piece(
                        at, into, byte, scratch, far, mid, near, increment, lowest, zero_byte, source, elem, 0
                    )
                pairs = to_mend(scratch)
                at, to, byte = at + count * bytes_each, to + count * 32, byte + count
                left -= 1
                if left == 0:
                    at, to, byte, left = at + src_gap, to + dst_gap, byte + (dst_gap >> 5), pieces
                rest -= 1
                if rare | pairs or rest == stop:
                    break
            x, own = at - count * bytes_each, byte - count
            if left == pieces:
                x, own = x - src_gap, own - (dst_gap >> 5)
            while pairs:
                i = lowest_bit(pairs)
                pairs &= pairs - types.uint32(1)
                if streaming and not apart:
                    mend_pair(x, into, scratch, i, source, elem, 1)
                else:
                    mend_pair(x, into, scratch, i, source, elem, 0)
            while rare:
                i = lowest_bit(rare)
                rare &= rare - types.uint32(1)
                encode_rare(
                    x + i * bytes_each, into + i * 32, own + i, round_up, min_scale_byte, itemsize, dtype,
                    mantissa_bits, bias, emax, max_code,
                )  # fmt: skip
                if apart and tables and i >= count - 2:
                    copy_bytes(scratch + last_at + (i + 2 - count) * 32, into + i * 32, 32)
            if first:
                if tables:
                    copy_line(scratch + last_at, into + count * 32 - 64)
                else:
                    copy_bytes(dst, ring, before)
                first, stop = False, 0
        if apart:
            if tables:
                copy_bytes(end - (64 - before), scratch + last_at + before, 64 - before)
            else:
                flush_ring(dst, line, end, ring)

    return rows_in_pieces
