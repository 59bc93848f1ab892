"""A slow twin of float conversions: bit patterns to exact float64 values and back with one explicit rounding.

Nothing here converts with NumPy's own casts: fields are taken apart and put together as integers.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
BITS: dict[str, Any] = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
# Mantissa bits and lowest exponent of a normal number.
FORMS = {"bfloat16": (7, -126), "float16": (10, -14), "float32": (23, -126)}

Float64 = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def infinity(dtype: str) -> int:
    """Return the pattern of positive infinity; NaNs lie above it."""
    return {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}[dtype]


def quiet_nan(dtype: str) -> int:
    """Return the pattern of the positive quiet NaN."""
    return {"bfloat16": 0x7FC0, "float16": 0x7E00, "float32": 0x7FC00000}[dtype]


def sign_bit(dtype: str) -> int:
    """Return the pattern of minus zero."""
    return 1 << 31 if dtype == "float32" else 1 << 15


def decode(bits: npt.NDArray[Any], dtype: str) -> Float64:
    """Return the exact values of patterns; a NaN keeps its sign."""
    mantissa_bits, emin = FORMS[dtype]
    pattern = bits.astype(np.int64)
    negative = (pattern & sign_bit(dtype)) != 0
    magnitude = pattern & (sign_bit(dtype) - 1)
    field, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
    significand = np.where(field > 0, mantissa + (1 << mantissa_bits), mantissa).astype(np.float64)
    value = np.ldexp(significand, (np.maximum(field, 1) - 1 + emin - mantissa_bits).astype(np.int32))
    value = np.where(magnitude == infinity(dtype), np.inf, value)
    value = np.where(magnitude > infinity(dtype), np.nan, value)
    return np.copysign(value, np.where(negative, -1.0, 1.0))


def encode(value: Float64, dtype: str) -> Ints:
    """Return the patterns nearest to values, ties to the even one, overflow to Inf, NaN quiet and of its sign."""
    mantissa_bits, emin = FORMS[dtype]
    magnitude = np.abs(value)
    finite = np.isfinite(magnitude)
    known = np.where(finite, magnitude, 0.0)
    exponent = np.where(known > 0, np.maximum(np.frexp(known)[1] - 1, emin), emin)
    steps = np.ldexp(known, mantissa_bits - exponent)  # exact: a power of two apart
    whole = np.floor(steps)
    rest = steps - whole
    whole = whole + ((rest > 0.5) | ((rest == 0.5) & (whole % 2 == 1)))
    # The bit of a normal significand that is not stored carries into the exponent field.
    pattern = ((exponent - emin).astype(np.int64) << mantissa_bits) + whole.astype(np.int64)
    pattern = np.where(finite, np.minimum(pattern, infinity(dtype)), infinity(dtype))
    pattern = np.where(np.isnan(magnitude), quiet_nan(dtype), pattern)
    return np.where(np.signbit(value), pattern | sign_bit(dtype), pattern)


def patterns(bits: npt.NDArray[Any] | list[int], dtype: str) -> npt.NDArray[Any]:
    """Return an array of a dtype from its patterns."""
    return np.asarray(bits).astype(BITS[dtype]).view(DTYPES[dtype])


def bits_of(array: npt.NDArray[Any]) -> Ints:
    """Return the patterns of a native array as int64."""
    return array.view(np.uint32 if array.dtype.itemsize == 4 else np.uint16).astype(np.int64)


def swapped(dtype: str) -> np.dtype[Any]:
    """Return the dtype of the other byte order, for the types that have one."""
    native = np.dtype(DTYPES[dtype])
    return native if dtype == "bfloat16" else native.newbyteorder()
