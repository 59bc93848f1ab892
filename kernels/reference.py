"""The plain NumPy kernels: MXFP8 by integer arithmetic, bits in and codes out.

Every other version of these kernels has to give the same bytes as this one. It looks at fp32 bit
patterns only (bf16 and fp16 widen to fp32 exactly), so the result depends neither on the rounding or
flush-to-zero mode of the process nor on how a library computes a logarithm.

Where the rules come from:

- Elements: OCP 8-bit Floating Point Specification (OFP8) v1.0. E4M3 has bias 7, no Inf, one NaN
  (S.1111.111) and maximum 448; E5M2 has bias 15, Inf and NaN as IEEE 754, and maximum 57344.
- Blocks: OCP Microscaling Formats (MX) v1.0, section 5: 32 elements share one E8M0 byte s of value
  2^(s - 127); 255 is NaN; there is no zero and no Inf.
- Conversion: the same, section 6.3: X is the largest power of two not above the block maximum, divided by
  the largest power of two of the element type; elements are x / X, rounded to nearest, ties to even,
  and clamped to the largest finite value. This is mode "floor".
- Mode "rceil": the smallest X for which no element is clamped, as cuBLAS and Transformer Engine do
  (arXiv 2506.08027 gives the reason: it trains as bf16 does, "floor" may diverge).
- Modes "even" and "ceil": torchao's other two. "even" rounds the block maximum to the element's own mantissa
  width (half up) before it takes the power of two; "ceil" rounds it up to a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from lowshard.block_format import MXFP8
from lowshard.errors import KernelError

Elem = Literal["e4m3", "e5m2"]
Mode = Literal["rceil", "floor", "even", "ceil"]
ELEMS: tuple[Elem, ...] = get_args(Elem)
MODES: tuple[Mode, ...] = get_args(Mode)

BLOCK_ELEMS = MXFP8["e4m3"].block[-1]
"""Elements that share one scale byte."""
SCALE_NAN = 0xFF
CODE_NAN = 0x7F
"""The NaN code written for either format: positive, all mantissa bits set."""

_FP32_MANTISSA_BITS = 23
_FP32_ONE_FIELD = 1 << _FP32_MANTISSA_BITS  # one step of the exponent field
_FP32_MAGNITUDE = 0x7FFFFFFF
_FP32_INF = 0x7F800000


@dataclass(frozen=True, slots=True)
class ElementFormat:
    """An 8-bit element type; the constants are those of OFP8 v1.0, table 1."""

    name: Elem
    mantissa_bits: int
    bias: int
    emax: int
    """Exponent of the largest finite value; both formats have 1.75 * 2^emax as their maximum."""
    max_code: int
    """Code of the largest finite value. Positive codes are ordered as their values are."""
    inf_code: int | None

    def values(self) -> npt.NDArray[np.float64]:
        """Return the value of each of the 256 codes, exactly."""
        code = np.arange(128)
        field = code >> self.mantissa_bits
        significand = (code & ((1 << self.mantissa_bits) - 1)).astype(np.float64)
        significand[field > 0] += 1 << self.mantissa_bits
        positive = np.ldexp(significand, np.maximum(field, 1) - self.bias - self.mantissa_bits)
        positive[self.max_code + 1 :] = np.nan
        if self.inf_code is not None:
            positive[self.inf_code] = np.inf
        return np.concatenate([positive, -positive])


E4M3 = ElementFormat("e4m3", mantissa_bits=3, bias=7, emax=8, max_code=0x7E, inf_code=None)
E5M2 = ElementFormat("e5m2", mantissa_bits=2, bias=15, emax=15, max_code=0x7B, inf_code=0x7C)
_FORMATS = {"e4m3": E4M3, "e5m2": E5M2}

# Below this scale byte an fp32 subnormal can give a code other than zero: it is under 2^-126, so under
# 2^(1 - s) once scaled, and E5M2, the finer of the two, rounds 2^-17 and less to zero.
_FIRST_BLIND_SCALE = 18


def element_format(elem: str) -> ElementFormat:
    """Return the constants of an element type, or raise KernelError."""
    found = _FORMATS.get(elem) if isinstance(elem, str) else None
    if found is None:
        raise KernelError(f'elem is "e4m3" or "e5m2", got {elem!r}')
    return found


def scale_round_up(fmt: ElementFormat, mode: str) -> int:
    """Return what to add to the fp32 bits of a block maximum so that the exponent field becomes the scale's.

    The sum carries into the field exactly when the mode rounds the power of two up: never (floor),
    above 1.75 (rceil), from 2 - 2^-(mantissa_bits + 1) on (even), above 1 (ceil).
    """
    rounds_up = {
        "floor": 0,
        "even": 1 << (_FP32_MANTISSA_BITS - 1 - fmt.mantissa_bits),
        "rceil": 0x1FFFFF,  # 2^23 minus the mantissa of 1.75, less one
        "ceil": 0x7FFFFF,
    }
    if not isinstance(mode, str) or mode not in rounds_up:
        raise KernelError(f"mode is one of {', '.join(MODES)}, got {mode!r}")
    return rounds_up[mode]


def scale_bytes(
    amax_bits: npt.NDArray[np.int32], fmt: ElementFormat, mode: str, min_scale_byte: int = 0
) -> npt.NDArray[np.int32]:
    """Return the E8M0 byte of each block from the fp32 bits of its maximum magnitude."""
    rounded = amax_bits.astype(np.int64) + scale_round_up(fmt, mode)
    exponent = (rounded >> _FP32_MANTISSA_BITS) - fmt.emax
    scale: npt.NDArray[np.int32] = np.maximum(exponent, min_scale_byte).astype(np.int32)
    scale[amax_bits >= _FP32_INF] = SCALE_NAN
    return scale


def quantize_bits(
    bits: npt.NDArray[np.uint32], fmt: ElementFormat, mode: str, min_scale_byte: int = 0
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Quantise blocks of fp32 bit patterns."""
    signed = bits.view(np.int32)
    magnitude = signed & np.int32(_FP32_MAGNITUDE)
    scale = scale_bytes(magnitude.max(axis=1), fmt, mode, min_scale_byte)
    low = np.flatnonzero(scale < _FIRST_BLIND_SCALE)
    if low.size:
        magnitude[low] = _widen_subnormals(magnitude[low])

    # x / 2^(s - 127) with the exponent field of the target: subtract in the field, no float division.
    # int32 holds it: the largest sum is small because no element is above its block's maximum, and the
    # lowest, (7 - 255) fields, is above -2^31.
    target = magnitude
    target += ((fmt.bias - scale) << _FP32_MANTISSA_BITS)[:, None]
    drop = _FP32_MANTISSA_BITS - fmt.mantissa_bits
    code = target >> drop
    code &= 1
    code += target
    code += (1 << (drop - 1)) - 1
    code >>= drop  # round to nearest, ties to even
    np.clip(code, 0, fmt.max_code, out=code)

    # Subnormal codes. Under half the smallest one the clip above has written the right zero already.
    below = target < _FP32_ONE_FIELD
    below &= target >= -fmt.mantissa_bits * _FP32_ONE_FIELD
    lanes = np.flatnonzero(below)
    if lanes.size:
        code.reshape(-1)[lanes] = _round_subnormal(target.reshape(-1)[lanes], fmt)

    sign = signed >> 24
    sign &= 0x80
    code |= sign
    codes = code.astype(np.uint8)
    codes[scale == SCALE_NAN] = CODE_NAN
    return codes, scale.astype(np.uint8)


def _widen_subnormals(magnitude: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Give fp32 subnormals the form of normal numbers whose exponent field is zero or less."""
    # m * 2^-149: the integer m is exact in fp32, and its field then has to fall by 149. This also makes
    # zero, 2^-149 of nothing, far smaller than any code.
    widened: npt.NDArray[np.int32] = magnitude.astype(np.float32).view(np.int32)
    widened -= 149 * _FP32_ONE_FIELD
    return np.where(magnitude < _FP32_ONE_FIELD, widened, magnitude)


def _round_subnormal(target: npt.NDArray[np.int32], fmt: ElementFormat) -> npt.NDArray[np.int32]:
    """Round scaled magnitudes below the smallest normal code: a right shift, ties to even."""
    significand = (target & (_FP32_ONE_FIELD - 1)) | _FP32_ONE_FIELD
    shift = (_FP32_MANTISSA_BITS + 1 - fmt.mantissa_bits) - (target >> _FP32_MANTISSA_BITS)
    half = np.left_shift(np.int32(1), shift - 1)
    rounded: npt.NDArray[np.int32] = (significand + half - 1 + ((significand >> shift) & 1)) >> shift
    return rounded


@cache
def value_table(elem: Elem, dtype: str) -> npt.NDArray[Any]:
    """Return the bit pattern of code c under scale byte s at index s * 256 + c, for all 2^16 pairs.

    The product has at most four significant bits and lies between 2^-143 and 2^143, so float64 holds it
    exactly and so does fp32 unless it overflows; one rounding then gives the target. NaN is the positive quiet NaN.
    """
    value = element_format(elem).values()
    product = np.ldexp(value[None, :], np.arange(256)[:, None] - 127)
    product[np.isnan(product)] = np.nan  # the positive one, whatever the sign of the code
    product[SCALE_NAN] = np.nan
    table: npt.NDArray[Any] = round_fp32_bits(_fp32_bits_of_exact(product), dtype).reshape(-1)
    table.flags.writeable = False
    return table


def _fp32_bits_of_exact(values: npt.NDArray[np.float64]) -> npt.NDArray[np.uint32]:
    """Return the fp32 bits of float64 values that fp32 holds exactly or that overflow, by integer arithmetic."""
    bits = values.view(np.int64)
    field = ((bits >> 52) & 0x7FF) - 1023 + 127
    significand = ((bits >> 29) & 0x7FFFFF) | _FP32_ONE_FIELD
    # A subnormal is a shifted significand, one too far to show is zero, and so is zero itself.
    subnormal = significand >> np.clip(1 - field, 0, 31)
    magnitude = np.where(field > 0, significand + ((field - 1) << _FP32_MANTISSA_BITS), subnormal)
    magnitude = np.where(field > 254, _FP32_INF, magnitude)
    magnitude = np.where(np.isnan(values), 0x7FC00000, magnitude)
    found: npt.NDArray[np.uint32] = (magnitude | ((bits >> 32) & 0x80000000)).astype(np.uint32)
    return found


def widen_to_fp32_bits(bits: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.uint32]:
    """Return the fp32 bits of bf16, fp16 or fp32 patterns, in a new C-contiguous array; exact, NaN payloads kept."""
    wide = np.empty(bits.shape, np.uint32)
    wide[...] = bits
    if dtype == "bfloat16":
        wide <<= 16
    elif dtype == "float16":
        sign, magnitude = (wide & 0x8000) << 16, wide & 0x7FFF
        # Bias 15 becomes bias 127; Inf and NaN keep the highest field; a subnormal m is m * 2^-24 exactly.
        normal = (magnitude << 13) + (112 << _FP32_MANTISSA_BITS)
        normal[magnitude >= 0x7C00] += 112 << _FP32_MANTISSA_BITS
        subnormal = np.ldexp(magnitude.astype(np.float32), -24).view(np.uint32)
        wide = np.where(magnitude < 0x0400, subnormal, normal) | sign
    return wide


def round_fp32_bits(bits: npt.NDArray[np.uint32], dtype: str) -> npt.NDArray[Any]:
    """Return the patterns of fp32 bits in another float dtype: nearest, ties to even, overflow to Inf."""
    magnitude, sign = bits & _FP32_MAGNITUDE, bits & 0x80000000
    nan = magnitude > _FP32_INF
    if dtype == "float32":
        return np.where(nan, sign | 0x7FC00000, bits).astype(np.uint32)
    if dtype == "bfloat16":
        rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        quiet = 0x7FC0
    else:
        # The largest fp32 that fp16 can show is 65520 less one step; from 2^-14 down it is a multiple of 2^-24.
        normal = magnitude - np.uint32(112 << _FP32_MANTISSA_BITS)
        normal = (normal + 0xFFF + ((normal >> 13) & 1)) >> 13
        small = np.minimum(magnitude, 113 << _FP32_MANTISSA_BITS).view(np.float32)
        subnormal = np.rint(np.ldexp(small, 24)).astype(np.uint32)
        rounded = np.where(magnitude < 113 << _FP32_MANTISSA_BITS, subnormal, np.minimum(normal, 0x7C00))
        quiet = 0x7E00
    return np.where(nan, quiet, rounded).astype(np.uint16) | (sign >> 16).astype(np.uint16)
