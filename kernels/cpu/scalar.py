"""Single floats as integers: exact widening to fp32 bits and rounding from them, for the ends of vector loops."""

from __future__ import annotations

from typing import Any

from lowshard.compiled.deferred import njit, types
from lowshard.kernels.cpu.memory_steps import load_u16, load_u32, store_value

# dtype codes of `fp32_bits` and `store_rounded`, known when a kernel is compiled
BFLOAT16, FLOAT16, FLOAT32 = 0, 1, 2
DTYPE_CODES = {"bfloat16": BFLOAT16, "float16": FLOAT16, "float32": FLOAT32}


@njit(nogil=True)
def fp32_bits(address: int, dtype: int) -> Any:
    """Return the fp32 bits, as int64, of a float at any address; exact, NaN payloads kept."""
    if dtype == FLOAT32:
        return types.int64(load_u32(address))
    bits = types.int64(load_u16(address))
    if dtype == BFLOAT16:
        return bits << 16
    sign, magnitude = (bits & 0x8000) << 16, bits & 0x7FFF
    if magnitude >= 0x7C00:
        return sign | ((magnitude << 13) + (224 << 23))
    if magnitude >= 0x0400:
        return sign | ((magnitude << 13) + (112 << 23))
    if magnitude == 0:
        return sign
    field = 113
    while magnitude < 0x0400:
        magnitude <<= 1
        field -= 1
    return sign | ((field << 23) + ((magnitude & 0x03FF) << 13))


@njit(nogil=True)
def store_rounded(address: int, bits: int, dtype: int) -> None:
    """Write fp32 bits as another dtype: nearest, ties to even, overflow to Inf, the quiet NaN of its sign."""
    magnitude, sign = bits & 0x7FFFFFFF, bits & 0x80000000
    if dtype == FLOAT32:
        store_value(address, types.uint32(0x7FC00000 | sign if magnitude > 0x7F800000 else bits))
        return
    if magnitude > 0x7F800000:
        made = 0x7FC0 if dtype == BFLOAT16 else 0x7E00
    elif dtype == BFLOAT16:
        made = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
    elif magnitude >= 143 << 23:
        made = 0x7C00
    elif magnitude >= 113 << 23:
        low = magnitude - (112 << 23)
        made = (low + 0xFFF + ((low >> 13) & 1)) >> 13
    else:
        # Below 2^-14 fp16 counts in units of 2^-24; a field under 102 is under half a unit.
        field = magnitude >> 23
        made = 0
        if field >= 102:
            significand, shift = (magnitude & 0x7FFFFF) | 0x800000, 126 - field
            made = (significand + (1 << (shift - 1)) - 1 + ((significand >> shift) & 1)) >> shift
    store_value(address, types.uint16(made | (sign >> 16)))
