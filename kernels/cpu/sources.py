"""Blocks of bf16, fp16 or fp32 as 16-bit lanes in bf16 form, with all that rounding to an 8-bit code needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from lowshard.kernels.cpu.memory_steps import load
from lowshard.kernels.cpu.vector import Lanes, only_if
from lowshard.kernels.reference import BLOCK_ELEMS

SIGN, MAGNITUDE, ONE_FIELD = 0x8000, 0x7FFF, 0x0080
"""Parts of a bf16: sign bit, all others, one step of the exponent field."""

_INFINITY = 0x7F80
_FP16_REBIAS = (127 - 15) << 7

_EVEN, _ODD = range(0, 2 * BLOCK_ELEMS, 2), range(1, 2 * BLOCK_ELEMS, 2)


def _load_bf16(builder: ir.IRBuilder, address: ir.Value) -> Lanes:
    return load(builder, address, 16, BLOCK_ELEMS)


def _load_fp32(builder: ir.IRBuilder, address: ir.Value) -> Lanes:
    halves = load(builder, address, 16, 2 * BLOCK_ELEMS)
    return _sticky(halves.picked(_ODD), halves.picked(_EVEN))


def _load_fp16(builder: ir.IRBuilder, address: ir.Value) -> Lanes:
    raw = load(builder, address, 16, BLOCK_ELEMS)
    magnitude = raw & MAGNITUDE
    # Three mantissa bits go, the exponent moves from bias 15 to bias 127. Inf and NaN end up above all others.
    rebiased = _sticky(magnitude >> 3, magnitude & 7) + _FP16_REBIAS
    below = magnitude.compare("<", 1 << 10)
    with only_if(builder, below.any(), [rebiased]) as fixed:
        # Zero, or a subnormal m, which is m * 2^-24: put it below a one at 2^-14 and take that off, both exactly.
        # The sign that zero less zero can get goes with the mask.
        wide = ((magnitude.widen(32) << 13) + (113 << 23)).add_as_float(2.0**-14, subtract=True) & 0x7FFFFFFF
        exact = _sticky((wide >> 16).narrow(16), wide.narrow(16))
        fixed.append(below.where(exact, rebiased))
    return fixed[0] | (raw & SIGN)


def _sticky(high: Lanes, rest: Lanes) -> Lanes:
    """Return truncated bits, with the last one set if a truncated bit was.

    Rounding needs to know of the bits below the first dropped one only whether they are zero, so a bf16 made this way
    gives the same code and the same scale as the fp32 it comes from.
    """
    return rest.compare("!=", 0).where(high | 1, high)


@dataclass(frozen=True, slots=True)
class Source:
    """A source dtype: bytes of an element, and how a block of it becomes bf16 lanes."""

    itemsize: int
    infinity: int
    """Lanes from this magnitude on stand for Inf or NaN."""
    load: Callable[[ir.IRBuilder, ir.Value], Lanes]


SOURCES = {
    "bfloat16": Source(2, _INFINITY, _load_bf16),
    "float16": Source(2, (31 << 7) + _FP16_REBIAS, _load_fp16),
    "float32": Source(4, _INFINITY, _load_fp32),
}
