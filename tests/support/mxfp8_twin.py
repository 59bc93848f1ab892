"""A slow twin of the MXFP8 kernels: every code tried for every element, every exponent for every scale.

It follows the definitions of the formats, in float64, where each of its steps is exact; it has nothing in common with
the integer rules of the kernels.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from support import mode

from lowshard.kernels import MXFP8Tensor, quantize_mxfp8

ELEMS = ("e4m3", "e5m2")
MODES = ("rceil", "floor", "even", "ceil")
COMBOS = [(elem, scale_mode) for elem in ELEMS for scale_mode in MODES]


def some_combos(name: str) -> list[tuple[Any, Any]]:
    """Return each mode with one of the two element types, drawn for `name`; in a full run with both."""
    if mode.full():
        return COMBOS
    return [
        (elem, scale_mode) for scale_mode in MODES for elem in mode.sample(ELEMS, 1, f"{name} {scale_mode}")
    ]


DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
BITS: dict[str, Any] = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}

MANTISSA_BITS = {"e4m3": 3, "e5m2": 2}
BIAS = {"e4m3": 7, "e5m2": 15}
EMAX = {"e4m3": 8, "e5m2": 15}
MAXIMUM = {"e4m3": 448.0, "e5m2": 57344.0}

Float64 = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]


@cache
def code_values(elem: str) -> Float64:
    """Value of each of the 256 codes, straight from the definition of the format."""
    m, bias = MANTISSA_BITS[elem], BIAS[elem]
    values = []
    for code in range(256):
        sign, field, mantissa = code >> 7, (code & 0x7F) >> m, code & (2**m - 1)
        if elem == "e4m3" and code & 0x7F == 0x7F:
            value = float("nan")
        elif elem == "e5m2" and field == 31:
            value = float("nan") if mantissa else float("inf")
        elif field == 0:
            value = mantissa * 2.0 ** (1 - bias - m)
        else:
            value = (1 + mantissa / 2**m) * 2.0 ** (field - bias)
        values.append(-value if sign else value)
    return np.array(values)


def slow_codes(y: Float64, elem: str) -> Bytes:
    """Try every finite positive code on every magnitude; the nearest wins, of two the even one."""
    magnitudes, inverse = np.unique(np.abs(y), return_inverse=True)
    positive = code_values(elem)[:0x80]
    codes = np.flatnonzero(np.isfinite(positive))
    chosen = np.empty(len(magnitudes), np.uint8)
    for start in range(0, len(magnitudes), 4096):
        part = magnitudes[start : start + 4096]
        distance = np.abs(part[:, None] - positive[codes][None, :])
        nearest = distance == distance.min(axis=1, keepdims=True)
        assert (nearest.sum(axis=1) <= 2).all()
        even_wins = np.where(nearest, 2 - (codes % 2), 0)  # 2 for even, 1 for odd, 0 for farther codes
        chosen[start : start + 4096] = codes[even_wins.argmax(axis=1)]
    return chosen[inverse].reshape(y.shape) | (np.signbit(y).astype(np.uint8) << 7)


def slow_scales(amax: Float64, elem: str, mode: str) -> Bytes:
    """Try every exponent from -127 to 127 and take the one that the definition of the mode names."""
    unique, inverse = np.unique(amax, return_inverse=True)
    power = np.ldexp(1.0, np.arange(-127, 128))
    if mode == "even":  # round half up to the width of the element's mantissa first
        fraction, exponent = np.frexp(unique)
        steps = 2.0 ** (MANTISSA_BITS[elem] + 1)
        unique = np.ldexp(np.floor(fraction * steps + 0.5) / steps, exponent)
    if mode in ("floor", "even"):  # the largest power of two whose 2^emax-fold is not above
        count = (power[None, :] * 2.0 ** EMAX[elem] <= unique[:, None]).sum(axis=1)
        byte = np.maximum(count - 1, 0)
    else:  # the smallest power of two under which the maximum stays within a limit
        limit = MAXIMUM[elem] if mode == "rceil" else 2.0 ** EMAX[elem]
        byte = (power[None, :] * limit < unique[:, None]).sum(axis=1)
    return byte[inverse].astype(np.uint8)


def slow_quantize(v: Float64, elem: str, mode: str, min_scale_byte: int = 0) -> tuple[Bytes, Bytes]:
    """Quantise float64 blocks [blocks, 32] to codes [blocks, 32] and scale bytes [blocks]."""
    finite = np.isfinite(v).all(axis=1)
    safe = np.where(finite[:, None], v, 0.0)
    scale = np.maximum(slow_scales(np.abs(safe).max(axis=1), elem, mode), np.uint8(min_scale_byte))
    codes = slow_codes(safe / np.ldexp(1.0, scale.astype(int) - 127)[:, None], elem)
    scale[~finite] = 0xFF
    codes[~finite] = 0x7F
    return codes, scale


def exact(x: npt.NDArray[Any]) -> Float64:
    """float64 values of an array, without a warning for signalling NaN."""
    with np.errstate(invalid="ignore"):
        values: Float64 = x.astype(np.float32).astype(np.float64)
    return values


def assert_like_twin(x: npt.NDArray[Any], elem: str, mode: str, min_scale_byte: int = 0) -> None:
    """Assert that the public call gives the codes and scales of the twin."""
    q = quantize_mxfp8(x, elem, mode, min_scale_byte=min_scale_byte)  # type: ignore[arg-type]
    codes, scale = slow_quantize(exact(x).reshape(-1, 32), elem, mode, min_scale_byte)
    assert_holds(q, codes, scale)
    assert (q.shape, q.elem) == (x.shape, elem)


def assert_holds(q: MXFP8Tensor, codes: Bytes, scale: Bytes) -> None:
    """Assert codes and scale bytes, given as blocks."""
    np.testing.assert_array_equal(q.scale.reshape(-1), scale)
    np.testing.assert_array_equal(q.data.reshape(-1, 32), codes)


def random_fp32_blocks(seed: int, blocks: int = 600) -> npt.NDArray[np.float32]:
    """fp32 blocks over the whole exponent range, subnormals, zeros and non-finite values among them."""
    rng = np.random.default_rng(seed)
    shape = (blocks, 32)
    top = rng.integers(0, 255, (blocks, 1), dtype=np.int32)
    field = np.clip(top - rng.integers(0, 30, shape, dtype=np.int32), 0, 254)
    bits = (field.astype(np.uint32) << 23) | rng.integers(0, 1 << 23, shape, dtype=np.uint32)
    bits |= rng.integers(0, 2, shape, dtype=np.uint32) << 31
    kind = rng.integers(0, 1000, shape, dtype=np.int16)
    bits[kind < 50] &= 1 << 31  # zeros of both signs
    odd = np.flatnonzero(kind == 999)
    bits.reshape(-1)[odd] = rng.choice([0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00000], len(odd))
    return bits.view(np.float32)


def moderate_blocks(seed: int, blocks: int, dtype: str) -> npt.NDArray[Any]:
    """Blocks [blocks, 32] within the range of each dtype, a few NaN among them."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        return random_fp32_blocks(seed, blocks).clip(-6e4, 6e4).astype(DTYPES[dtype])
