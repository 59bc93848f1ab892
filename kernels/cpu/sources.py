"""Blocks of bf16, fp16 or fp32 as 16-bit lanes in the form of bf16, all that rounding to an 8-bit code asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from lowshard.kernels.cpu.vector import Lanes, load, only_if
from lowshard.kernels.reference import BLOCK_ELEMS

SIGN, MAGNITUDE, INFINITY, ONE_FIELD = 0x8000, 0x7FFF, 0x7F80, 0x0080
"""Parts of a bf16: sign bit, all others, the bits of Inf, one step of the exponent field."""

_EVEN, _ODD = range(0, 2 * BLOCK_ELEMS, 2), range(1, 2 * BLOCK_ELEMS, 2)


def _load_bf16(builder: ir.IRBuilder, address: ir.Value) -> Lanes:
    return load(builder, address, 16, BLOCK_ELEMS)


def _load_fp32(builder: ir.IRBuilder, address: ir.Value) -> Lanes:
    halves = load(builder, address, 16, 2 * BLOCK_ELEMS)
    return _sticky(halves.picked(_ODD), halves.picked(_EVEN))


def _load_fp16(builder: ir.IRBuilder, address: ir.Value) -> Lanes:
    raw = load(builder, address, 16, BLOCK_ELEMS)
    sign, magnitude = raw & SIGN, raw & MAGNITUDE
    # Three mantissa bits go, the exponent moves from bias 15 to bias 127.
    rebiased = _sticky(magnitude >> 3, magnitude & 7) + (112 << 7)
    rebiased = magnitude.compare(">=", 0x7C00).where(rebiased + (112 << 7), rebiased)
    rebiased = magnitude.compare("==", 0).where(0, rebiased)
    subnormal = (magnitude - 1).compare("<", 0x03FF, signed=False)
    with only_if(builder, subnormal.any(), [rebiased]) as fixed:
        # A subnormal m is m * 2^-24: put it below a one at 2^-14 and take that off again, both exactly.
        wide = ((magnitude.widen(32) << 13) + (113 << 23)).add_as_float(2.0**-14, subtract=True)
        exact = _sticky((wide >> 16).narrow(16), wide.narrow(16))
        fixed.append(subnormal.where(exact, rebiased))
    return fixed[0] | sign


def _sticky(high: Lanes, rest: Lanes) -> Lanes:
    """Return bits cut short, with the last one set if anything that was cut off is.

    All that rounding asks of the bits below the first dropped one is whether they are zero, so a bf16 made this
    way gives the same code and the same scale as the fp32 it comes from.
    """
    return rest.compare("!=", 0).where(high | 1, high)


@dataclass(frozen=True, slots=True)
class Source:
    """A source dtype: bytes of an element, and how a block of it becomes bf16 lanes."""

    itemsize: int
    load: Callable[[ir.IRBuilder, ir.Value], Lanes]


SOURCES = {
    "bfloat16": Source(2, _load_bf16),
    "float16": Source(2, _load_fp16),
    "float32": Source(4, _load_fp32),
}
