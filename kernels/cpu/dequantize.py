"""MXFP8 dequantisation of a block in vector code: codes become bf16 lanes exactly, then the target dtype."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from lowshard.compiled.deferred import intrinsic, types
from lowshard.kernels.cpu.copy import RING_BYTES, flush_ring
from lowshard.kernels.cpu.drive import prefetch_line, rows_of
from lowshard.kernels.cpu.memory_steps import (
    CACHE_LINE_BYTES,
    align_spills,
    copy_bytes,
    copy_line,
    load,
    load_u8,
    load_u16,
    load_u32,
    store,
    store_value,
    stream_lines,
)
from lowshard.kernels.cpu.vector import Lanes, fp16_subnormals, only_if
from lowshard.kernels.reference import BLOCK_ELEMS, ElementFormat, element_format

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


def fast_scales(fmt: ElementFormat) -> tuple[int, int]:
    """Return the lowest and the highest scale byte under which every finite code is a normal bf16."""
    smallest = 1 - fmt.bias - fmt.mantissa_bits
    return 1 - smallest, 254 - fmt.emax


def _decode(builder: ir.IRBuilder, args: Any, dtype: str, fmt: ElementFormat, streaming: bool) -> None:
    data, byte, dst = args
    codes = load(builder, data, 8, BLOCK_ELEMS).widen(16)
    magnitude, sign = codes & 0x7F, (codes & 0x80) << 8
    rise = 7 - fmt.mantissa_bits
    # Exponent fields: the element's with its bias taken off, plus the scale's.
    lift = (Lanes(builder, byte).narrow(16) - fmt.bias) << 7
    bits = (magnitude << rise) + lift
    first_normal = 1 << fmt.mantissa_bits
    zero = magnitude.compare("==", 0)
    bits = zero.where(0, bits)
    special = (magnitude - 1).compare("<", first_normal - 1, signed=False) | magnitude.compare(
        ">", fmt.max_code
    )
    with only_if(builder, special.any(), [bits, sign]) as fixed:
        made, quiet_sign = bits, sign
        # Subnormal codes from 2^k to 2^(k+1) - 1 have their highest bit at k.
        for k in range(fmt.mantissa_bits):
            field = (1 - fmt.bias - fmt.mantissa_bits + k + fmt.bias) << 7
            value = (magnitude << (7 - k)) + lift + (field - (1 << 7))
            made = (magnitude.compare(">=", 1 << k) & magnitude.compare("<", 1 << (k + 1))).where(value, made)
        if fmt.inf_code is not None:
            made = magnitude.compare("==", fmt.inf_code).where(0x7F80, made)
        nan = magnitude.compare(">", fmt.max_code if fmt.inf_code is None else fmt.inf_code)
        fixed.append(nan.where(0x7FC0, made))
        fixed.append(nan.where(0, quiet_sign))
    made, sign = fixed
    if dtype == "float32":
        store(builder, dst, (made | sign).widen(32) << 16, streaming)
    else:
        store(builder, dst, (made if dtype == "bfloat16" else _fp16_bits(made)) | sign, streaming)


def _fp16_bits(bf16: Lanes) -> Lanes:
    """Return fp16 magnitudes of bf16 ones of at most 4 significant bits: normal, zero, Inf or the quiet NaN."""
    normal = (bf16 - (112 << 7)) << 3
    large = bf16.compare(">=", 143 << 7).where(0x7C00, normal)
    made = bf16.compare("==", 0).where(0, bf16.compare("==", 0x7FC0).where(0x7E00, large))
    small = (bf16 - 1).compare("<", (113 << 7) - 1, signed=False)
    with only_if(bf16.builder, small.any(), [made]) as fixed:
        fixed.append(small.where(fp16_subnormals(bf16.widen(32) << 16).narrow(16), made))
    return fixed[0]


@intrinsic(prefer_literal=True)
def decode_block(
    typingctx: Any, data: Any, byte: Any, dst: Any, dtype: Any, elem: Any, streaming: Any
) -> Any:
    """Dequantise one block under a scale byte of `fast_scales`; the last three arguments are literals."""
    name, fmt, past_caches = (
        dtype.literal_value,
        element_format(elem.literal_value),
        bool(streaming.literal_value),
    )

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        _decode(builder, args[:3], name, fmt, past_caches)
        return context.get_dummy_value()

    numbers = (types.int64, types.int32, types.int64)
    return types.void(*numbers, dtype, elem, streaming), codegen


@rows_of("dequantize")
def _dequantize_rows(dtype: str, elem: str) -> Any:
    lowest, highest = fast_scales(element_format(elem))
    itemsize = ITEMSIZES[dtype]
    block_bytes, ring_bytes = BLOCK_ELEMS * itemsize, RING_BYTES
    group, block_lines = ring_bytes // block_bytes, block_bytes // CACHE_LINE_BYTES

    def dequantize_rows(
        kind: Any, src: Any, dst: Any, scales: Any, run: Any, rows: Any, src_step: Any, dst_step: Any,
        ahead: Any, scratch: Any, first: Any, second: Any, streaming: Any,
    ) -> None:  # fmt: skip
        align_spills()
        blocks = run // 32
        for row in range(rows):
            data, values, bytes_ = (
                src + row * src_step,
                dst + row * dst_step,
                scales + ((row * src_step) >> 5),
            )
            # Whole lines are streamed as they are made; others are put together in the first cache before.
            whole_lines, staged = streaming and values & 63 == 0, streaming and values & 63 != 0
            head = -values & 63
            line = values + head
            if ahead[0]:
                prefetch_line(data + run - 1, ahead)
            for start in range(0, blocks, group):
                end, made = min(start + group, blocks), values + start * block_bytes
                sends = staged and start > 0
                if staged:
                    made = scratch
                for block in range(start, end):
                    to = made + (block - start) * block_bytes
                    if sends:
                        if to == scratch + ring_bytes - block_bytes:
                            copy_line(scratch + ring_bytes, scratch)
                        stream_lines(line, to + head, block_lines)
                        line += block_bytes
                    byte = types.int32(load_u8(bytes_ + block))
                    at = data + block * 32
                    if ahead[0] and block & 1 == 0:
                        prefetch_line(at, ahead)
                    if byte >= lowest and byte <= highest:
                        if whole_lines:
                            decode_block(at, byte, to, dtype, elem, 1)
                        else:
                            decode_block(at, byte, to, dtype, elem, 0)
                        continue
                    # Rare scales: every pair of scale and code has its place in a table.
                    place = types.int64(byte) << 8
                    for i in range(32):
                        index = place + types.int64(load_u8(at + i))
                        if itemsize == 2:
                            store_value(to + 2 * i, load_u16(first + 2 * index))
                        else:
                            store_value(to + 4 * i, load_u32(first + 4 * index))
                if staged and start == 0:
                    copy_bytes(values, scratch, head)
            if staged:
                flush_ring(values, line, values + blocks * block_bytes, scratch)

    return dequantize_rows
