"""MXFP8 dequantisation of a block in vector code: codes become bf16 lanes exactly, then the target dtype."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from lowshard.compiled.deferred import intrinsic, njit, types
from lowshard.compiled.emitted import copy_bytes
from lowshard.kernels.cpu.drive import named, prefetch_line, rows_of
from lowshard.kernels.cpu.memory_steps import (
    align_spills,
    load,
    load_u8,
    load_u16,
    load_u32,
    store,
    store_value,
)
from lowshard.kernels.cpu.vector import Lanes, fp16_subnormals, only_if
from lowshard.kernels.reference import BLOCK_ELEMS, ElementFormat, element_format

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


def fast_scales(fmt: ElementFormat) -> tuple[int, int]:
    """Return the lowest and the highest scale byte under which every finite code is a normal bf16."""
    smallest = 1 - fmt.bias - fmt.mantissa_bits
    return 1 - smallest, 254 - fmt.emax


def _decode(
    builder: ir.IRBuilder, data: ir.Value, scale: Lanes, dst: ir.Value, dtype: str, fmt: ElementFormat, streaming: bool
) -> None:  # fmt: skip
    """Write the values of 32 codes; their scales are one 16-bit integer or as many lanes."""
    codes = load(builder, data, 8, BLOCK_ELEMS).widen(16)
    magnitude, sign = codes & 0x7F, (codes & 0x80) << 8
    rise = 7 - fmt.mantissa_bits
    # Exponent fields: the element's with its bias taken off, plus the scale's.
    lift = (scale - fmt.bias) << 7
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
        data, byte, dst = args[:3]
        _decode(builder, data, Lanes(builder, byte).narrow(16), dst, name, fmt, past_caches)
        return context.get_dummy_value()

    numbers = (types.int64, types.int32, types.int64)
    return types.void(*numbers, dtype, elem, streaming), codegen


@intrinsic(prefer_literal=True)
def decode_across(
    typingctx: Any, data: Any, byte: Any, next_byte: Any, count: Any, dst: Any, dtype: Any, elem: Any
) -> Any:
    """Dequantise 32 codes past the caches: `count` of one block, the others of the next; `dst` is a multiple of 64."""
    name, fmt = dtype.literal_value, element_format(elem.literal_value)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        data, dst = args[0], args[4]
        byte, following, split = (Lanes(builder, value).narrow(16).splat(BLOCK_ELEMS) for value in args[1:4])
        places = Lanes(builder, ir.Constant(split.value.type, list(range(BLOCK_ELEMS))))
        _decode(builder, data, places.compare("<", split).where(byte, following), dst, name, fmt, True)
        return context.get_dummy_value()

    numbers = (types.int64, *(types.int32,) * 3, types.int64)
    return types.void(*numbers, dtype, elem), codegen


@rows_of("dequantize")
def _dequantize_rows(dtype: str, elem: str) -> Any:
    lowest, highest = fast_scales(element_format(elem))
    itemsize = ITEMSIZES[dtype]
    block_bytes = BLOCK_ELEMS * itemsize

    @njit(nogil=True)
    @named(dtype, elem)
    def look_up(at: int, to: int, byte: int, count: int, table: int) -> None:
        """Write some values under a rare scale: every pair of scale and code has its place in a table."""
        place = types.int64(byte) << 8
        for i in range(count):
            index = place + types.int64(load_u8(at + i))
            if itemsize == 2:
                store_value(to + 2 * i, load_u16(table + 2 * index))
            else:
                store_value(to + 4 * i, load_u32(table + 4 * index))

    @njit(nogil=True)
    @named(dtype, elem)
    def row_across(
        data: int, values: int, bytes_: int, blocks: int, ahead: Any, scratch: int, table: int
    ) -> None:
        """Dequantise a row that begins amid a line, line by line past the caches."""
        align_spills()
        before = (-values & 63) // itemsize  # elements of each block that belong to lines that began before
        for block in (0, blocks - 1):
            byte, at = types.int32(load_u8(bytes_ + block)), data + block * 32
            if byte >= lowest and byte <= highest:
                decode_block(at, byte, scratch, dtype, elem, 0)
            else:
                look_up(at, scratch, byte, 32, table)
            if block == 0:
                copy_bytes(values, scratch, before * itemsize)
            if block == blocks - 1:
                last = values + block * block_bytes + before * itemsize
                copy_bytes(last, scratch + before * itemsize, block_bytes - before * itemsize)
        block, byte, following = 0, types.int32(load_u8(bytes_)), types.int32(0)
        at, to = data + before, values + before * itemsize
        while block < blocks - 1:
            # No calls in this loop: they would have it fetch its constants anew for each block.
            while block < blocks - 1:
                following = types.int32(load_u8(bytes_ + block + 1))
                if min(byte, following) < lowest or max(byte, following) > highest:
                    break
                if ahead[0] and block & 1 == 0:
                    prefetch_line(at, ahead)
                decode_across(at, byte, following, types.int32(32 - before), to, dtype, elem)
                block, byte, at, to = block + 1, following, at + 32, to + block_bytes
            if block < blocks - 1:
                look_up(at, to, byte, 32 - before, table)
                look_up(at + 32 - before, to + block_bytes - before * itemsize, following, before, table)
                block, byte, at, to = block + 1, following, at + 32, to + block_bytes

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
            if ahead[0]:
                prefetch_line(data + run - 1, ahead)
            # Elements that do not lie at multiples of their size never begin with a line.
            if streaming and values & 63 and values % itemsize == 0:
                row_across(data, values, bytes_, blocks, ahead, scratch, first)
                continue
            whole_lines = streaming and values & 63 == 0
            block, byte, at, to = 0, types.int32(0), data, values
            while block < blocks:
                while block < blocks:
                    byte = types.int32(load_u8(bytes_ + block))
                    if byte < lowest or byte > highest:
                        break
                    if ahead[0] and block & 1 == 0:
                        prefetch_line(at, ahead)
                    if whole_lines:
                        decode_block(at, byte, to, dtype, elem, 1)
                    else:
                        decode_block(at, byte, to, dtype, elem, 0)
                    block, at, to = block + 1, at + 32, to + block_bytes
                if block < blocks:
                    look_up(at, to, byte, 32, first)
                    block, at, to = block + 1, at + 32, to + block_bytes

    return dequantize_rows
