"""Codes of one or two blocks from their bf16 lanes: the arithmetic of `lowshard.kernels.reference` in vectors.

There are two implementations. On machines with byte tables of 128 entries (AVX-512 VBMI) an element is split into
bytes, and a table rounds its mantissa. Elsewhere elements are subtracted and rounded as 16-bit words. Both first treat
values below the smallest normal code as zero, and `with_subnormals` corrects them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from llvmlite import ir

from lowshard.kernels.cpu.sources import MAGNITUDE, ONE_FIELD
from lowshard.kernels.cpu.vector import Lanes, only_if
from lowshard.kernels.reference import BLOCK_ELEMS, ElementFormat

_MANTISSA_BITS = 7  # of bf16


@cache
def has_tables() -> bool:
    """Whether code for this machine can look bytes up in tables of 128 in one instruction."""
    from lowshard.compiled.compiler import target

    return "+avx512vbmi" in target()[2].split(",")


@dataclass(frozen=True)
class Words:
    """Blocks whose elements are computed as 16-bit words."""

    raw: Sequence[Lanes]
    tops: Sequence[Lanes]
    fmt: ElementFormat

    def rounded(self) -> tuple[Lanes, ir.Value]:
        """Return magnitudes of codes, and whether there are elements below the smallest normal one, or zeros."""
        shift = 8 - (_MANTISSA_BITS - self.fmt.mantissa_bits)
        parts = [top.minus_or_zero(inverse(bits)) << shift for top, bits in self._both]
        kept, rest = _bytes_of(parts, 1), _bytes_of(parts, 0)
        # To nearest, ties to even: up above one half, and at one half if the last bit is set.
        up = (rest | (kept & 1)).compare(">", 0x80, signed=False)
        low = kept.compare("<", 1 << self.fmt.mantissa_bits, signed=False).any()
        return up.where(kept + 1, kept), low

    def any_subnormal(self) -> ir.Value:
        """Return an i1: whether an element is below the smallest normal code, and not below half of the smallest."""
        below = [_is_below(target, self.fmt) for target in self._targets()]
        return (below[0] | below[-1]).any()

    def with_subnormals(self, magnitudes: Lanes) -> Lanes:
        """Return the magnitudes with elements below the smallest normal code corrected, if there are any."""
        drop, targets = _MANTISSA_BITS - self.fmt.mantissa_bits, self._targets()
        below = [_is_below(target, self.fmt) for target in targets]
        with only_if(magnitudes.builder, (below[0] | below[-1]).any(), [magnitudes]) as fixed:
            rounded = []
            for target in targets:
                significand = (target & (ONE_FIELD - 1)) | ONE_FIELD
                shift = target.constant(drop + 1) - target.arithmetic_shift(_MANTISSA_BITS)
                half = target.constant(1) << (shift - 1)
                rounded.append((significand + half - 1 + ((significand >> shift) & 1)) >> shift)
            chosen = _bytes_of([mask.where(0xFF, mask.widen(16)) for mask in below], 0)
            fixed.append(chosen.compare("!=", 0).where(_bytes_of(rounded, 0), magnitudes))
        return fixed[0]

    def _targets(self) -> list[Lanes]:
        """Return x / 2^(s - 127) as bf16; the exponent field is below one for values below the smallest normal code."""
        return [top - inverse(bits) for top, bits in self._both]

    @property
    def _both(self) -> list[tuple[Lanes, Lanes]]:
        return list(zip(self.tops, self.raw, strict=True))


@dataclass(frozen=True)
class Bytes:
    """Two blocks whose elements, and their origins, are split into bytes."""

    raw: Sequence[Lanes]
    origins: Lanes
    fmt: ElementFormat

    def rounded(self) -> tuple[Lanes, ir.Value]:
        """Return magnitudes of codes, and whether there are elements below the smallest normal one, or zeros."""
        bits = self.fmt.mantissa_bits
        fields = self._fields.minus_or_zero(self.origins)
        normal = fields.compare("!=", 0)
        mantissas = normal.where(self._low.in_table(_rounded_mantissas(bits)), fields.constant(0))
        # Fields are less than 32 but for rare blocks, whose codes are written again: no bit gets into another byte.
        return (fields.as_lanes(16) << bits).as_lanes(8) + mantissas, normal.not_all()

    def with_subnormals(self, magnitudes: Lanes) -> Lanes:
        """Return the magnitudes with elements below the smallest normal code corrected, if there are any."""
        bits, fields = self.fmt.mantissa_bits, self._fields
        least = self.origins.minus_or_zero(bits)
        below = fields.compare("<=", self.origins, signed=False) & fields.compare(">=", least, signed=False)
        with only_if(magnitudes.builder, below.any(), [magnitudes]) as fixed:
            made = magnitudes
            for distance in range(bits + 1):
                here = (fields + distance).compare("==", self.origins)
                made = here.where(self._low.in_table(_rounded_below(bits, distance)), made)
            fixed.append(made)
        return fixed[0]

    @cached_property
    def _low(self) -> Lanes:
        """Mantissas, with the last exponent bit above them."""
        return _bytes_of(self.raw, 0)

    @cached_property
    def _fields(self) -> Lanes:
        """Exponent fields."""
        high = _bytes_of(self.raw, 1)
        return self._low.compare("<", 0).where(high + high + 1, high + high)


Blocks = Words | Bytes


def blocks_of(raw: Sequence[Lanes], origins: Lanes, first: int, fmt: ElementFormat) -> Blocks:
    """Return one or two blocks to encode: their bf16 lanes, and the start of their 16-bit origins."""
    if has_tables() and len(raw) == 2:
        places = [2 * first] * BLOCK_ELEMS + [2 * first + 2] * BLOCK_ELEMS
        return Bytes(raw, origins.as_lanes(8).picked(places), fmt)
    tops = _top(origins)
    return Words(raw, [tops.picked([first + i] * BLOCK_ELEMS) for i in range(len(raw))], fmt)


def signed(magnitudes: Lanes, raw: Sequence[Lanes], fmt: ElementFormat) -> Lanes:
    """Return codes: magnitudes up to the largest one, with the signs of the elements."""
    return magnitudes.minimum(fmt.max_code, signed=False) | (_bytes_of(raw, 1) & 0x80)


def inverse(bits: Lanes) -> Lanes:
    """Return the complement of magnitudes: the largest becomes the smallest."""
    return (bits & MAGNITUDE) ^ MAGNITUDE


def _top(origins: Lanes) -> Lanes:
    """Return what an element's complement is subtracted from to get its target."""
    return origins.constant(MAGNITUDE) - (origins << _MANTISSA_BITS)


def _is_below(target: Lanes, fmt: ElementFormat) -> Lanes:
    """Whether a target is below the smallest normal code, and not below half of the smallest of all."""
    return target.compare("<", ONE_FIELD) & target.compare(">=", -fmt.mantissa_bits * ONE_FIELD)


def _rounded_mantissas(bits_kept: int) -> list[int]:
    """Return bf16 mantissas rounded to those of codes, to nearest, ties to even; one is up in the next field."""
    drop = _MANTISSA_BITS - bits_kept
    half = 1 << (drop - 1)
    return [(bits + half - 1 + ((bits >> drop) & 1)) >> drop for bits in range(1 << _MANTISSA_BITS)]


def _rounded_below(bits_kept: int, distance: int) -> list[int]:
    """Return codes below the smallest normal one by bf16 mantissa, for exponents so far below the lowest normal one."""
    shift = _MANTISSA_BITS - bits_kept + 1 + distance
    wholes = range(ONE_FIELD, 2 * ONE_FIELD)
    return [(bits + (1 << (shift - 1)) - 1 + ((bits >> shift) & 1)) >> shift for bits in wholes]


def _bytes_of(lanes: Sequence[Lanes], which: int) -> Lanes:
    """Return byte 0 (low) or 1 (high) of the 16-bit lanes of one or two blocks, as bytes."""
    parts = [item.as_lanes(8) for item in lanes]
    indices = range(which, 2 * BLOCK_ELEMS * len(parts), 2)
    return parts[0].picked(indices, parts[-1])
