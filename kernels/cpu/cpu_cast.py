"""Casts between float dtypes and sums in fp32, 32 elements at a time, single ones at the ends."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from lowshard.compiled.deferred import intrinsic, types
from lowshard.kernels.cpu.drive import prefetch_run, rows_of
from lowshard.kernels.cpu.memory_steps import load, store
from lowshard.kernels.cpu.scalar import DTYPE_CODES, fp32_bits, store_rounded
from lowshard.kernels.cpu.vector import Lanes, fp16_subnormals

STEP_ELEMS = 32
_ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
_INFINITY = 0x7F800000


def _load_fp32(builder: ir.IRBuilder, address: ir.Value, dtype: str) -> Lanes:
    """Load 32 elements as fp32 bits; exact, NaN payloads kept."""
    if dtype == "float32":
        return load(builder, address, 32, STEP_ELEMS)
    wide = load(builder, address, 16, STEP_ELEMS).widen(32)
    if dtype == "bfloat16":
        return wide << 16
    sign, shifted = (wide & 0x8000) << 16, (wide & 0x7FFF) << 13
    # A subnormal m is m * 2^-24: put it below a one at 2^-14 and take that off again, both exactly.
    subnormal = (shifted + (113 << 23)).add_as_float(2.0**-14, subtract=True)
    normal = shifted + (112 << 23)
    normal = shifted.compare(">=", 31 << 23).where(normal + (112 << 23), normal)
    # Zero less zero is minus zero in a process that rounds down.
    return shifted.compare("<", 1 << 23).where(subnormal & 0x7FFFFFFF, normal) | sign


def _store_rounded(
    builder: ir.IRBuilder, address: ir.Value, bits: Lanes, dtype: str, streaming: bool
) -> None:
    """Store 32 fp32 lanes as another dtype: nearest, ties to even, the quiet NaN of its sign."""
    magnitude, sign = bits & 0x7FFFFFFF, bits & 0x80000000
    nan = magnitude.compare(">", _INFINITY)
    if dtype == "float32":
        store(builder, address, nan.where(sign | 0x7FC00000, bits), streaming)
        return
    if dtype == "bfloat16":
        rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        made = nan.where(0x7FC0, rounded)
    else:
        low = magnitude - (112 << 23)
        normal = (low + 0xFFF + ((low >> 13) & 1)) >> 13
        subnormal = fp16_subnormals(magnitude)
        finite = magnitude.compare("<", 113 << 23).where(subnormal, normal)
        made = nan.where(0x7E00, magnitude.compare(">=", 143 << 23).where(0x7C00, finite))
    store(builder, address, (made | (sign >> 16)).narrow(16), streaming)


@intrinsic(prefer_literal=True)
def cast_step(typingctx: Any, src: Any, dst: Any, source: Any, target: Any, streaming: Any) -> Any:
    """Convert 32 elements; the last three arguments are literals."""
    names, past_caches = (source.literal_value, target.literal_value), bool(streaming.literal_value)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        at, to = args[:2]
        _store_rounded(builder, to, _load_fp32(builder, at, names[0]), names[1], past_caches)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, source, target, streaming), codegen


@rows_of("cast")
def _cast_rows(source: str, target: str) -> Any:
    src_code, dst_code = DTYPE_CODES[source], DTYPE_CODES[target]
    src_item, dst_item = _ITEMSIZES[source], _ITEMSIZES[target]

    def cast_rows(
        kind: Any, src: Any, dst: Any, scales: Any, run: Any, rows: Any, src_step: Any, dst_step: Any,
        ahead: Any, scratch: Any, first: Any, second: Any, streaming: Any,
    ) -> None:  # fmt: skip
        for row in range(rows):
            at, to = src + row * src_step, dst + row * dst_step
            done = 0
            if ahead[0]:
                prefetch_run(at, run * src_item, ahead)
            if streaming:
                # Up to the first whole line; an odd address never gets there.
                while done < run and done < 32 and (to + done * dst_item) & 63:
                    store_rounded(to + done * dst_item, fp32_bits(at + done * src_item, src_code), dst_code)
                    done += 1
                if (to + done * dst_item) & 63 == 0:
                    while done + 32 <= run:
                        cast_step(at + done * src_item, to + done * dst_item, source, target, 1)
                        done += 32
            while done + 32 <= run:
                cast_step(at + done * src_item, to + done * dst_item, source, target, 0)
                done += 32
            while done < run:
                store_rounded(to + done * dst_item, fp32_bits(at + done * src_item, src_code), dst_code)
                done += 1

    return cast_rows


@intrinsic(prefer_literal=True)
def add_step(typingctx: Any, total: Any, src: Any, source: Any, start: Any) -> Any:
    """Add 32 elements to an aligned fp32 tile, or write them there if `start`; the last two arguments are literals."""
    dtype, starts = source.literal_value, bool(start.literal_value)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        to, at = args[:2]
        bits = _load_fp32(builder, at, dtype)
        if not starts:
            bits = load(builder, to, 32, STEP_ELEMS).plus_as_float(bits)
        store(builder, to, bits, False)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, source, start), codegen


@intrinsic(prefer_literal=True)
def round_step(typingctx: Any, total: Any, dst: Any, target: Any) -> Any:
    """Round 32 elements of an fp32 tile into an array; the last argument is a literal."""
    dtype = target.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        bits = load(builder, args[0], 32, STEP_ELEMS)
        _store_rounded(builder, args[1], bits, dtype, False)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, target), codegen
