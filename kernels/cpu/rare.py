"""Blocks that the vector code skips: Inf and NaN, and scales so low that subnormals matter."""

from __future__ import annotations

from lowshard.compiled.deferred import njit, types
from lowshard.kernels.cpu.memory_steps import store_value
from lowshard.kernels.cpu.scalar import fp32_bits
from lowshard.kernels.reference import CODE_NAN, SCALE_NAN


@njit(nogil=True)
def encode_rare(
    src: int, data: int, scale: int, round_up: int, min_scale_byte: int, itemsize: int, dtype: int,
    mantissa_bits: int, bias: int, emax: int, max_code: int,
) -> None:  # fmt: skip
    """Quantise one block of any kind by scalar integer arithmetic on fp32 bits."""
    largest = 0
    for i in range(32):
        largest = max(largest, fp32_bits(src + i * itemsize, dtype) & 0x7FFFFFFF)
    if largest >= 0x7F800000:
        store_value(scale, types.uint8(SCALE_NAN))
        for i in range(32):
            store_value(data + i, types.uint8(CODE_NAN))
        return
    byte = max(((largest + round_up) >> 23) - emax, min_scale_byte)
    store_value(scale, types.uint8(byte))
    drop = 23 - mantissa_bits
    for i in range(32):
        bits = fp32_bits(src + i * itemsize, dtype)
        magnitude, sign = bits & 0x7FFFFFFF, (bits >> 24) & 0x80
        field, significand = magnitude >> 23, magnitude & 0x7FFFFF
        # The value is significand * 2^(field - 150); a subnormal is brought to 24 bits too, and zero has no field.
        if field:
            significand |= 0x800000
        elif significand:
            field = 1
            while significand < 0x800000:
                significand <<= 1
                field -= 1
        else:
            field = -1000
        field += bias - byte
        shift = min(drop + max(1 - field, 0), 40)
        rounded = (significand + (1 << (shift - 1)) - 1 + ((significand >> shift) & 1)) >> shift
        code = min(rounded + (max(field - 1, 0) << mantissa_bits), max_code)
        store_value(data + i, types.uint8(code | sign))
