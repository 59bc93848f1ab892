"""The arithmetic of MXFP8 on 16-bit lanes, that of `lowshard.kernels.reference`: maxima, scale bytes, codes.

Everything here builds LLVM instructions for one of the ways in which `quantize` and `pieces` go through blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llvmlite import ir

from lowshard.kernels.cpu.sources import MAGNITUDE, ONE_FIELD, SOURCES
from lowshard.kernels.cpu.vector import CACHE_LINE_BYTES, Lanes, load, offset, only_if, prefetch_at, store
from lowshard.kernels.reference import BLOCK_ELEMS, ElementFormat

LOWEST_FAST_SCALE = 18
"""Below this scale byte a subnormal bf16 or fp32 can give a code other than zero (see reference.py), and the vector
code takes every element for a normal number."""

# For blocks of zeros: a field above all others, as a NaN is rounded up to 0x100 at most.
_FIELD_OF_ZERO = 0x101


def block_bytes(dtype: str) -> int:
    """Return the bytes of a block of the source."""
    return BLOCK_ELEMS * SOURCES[dtype].itemsize


def prefetch_block(builder: ir.IRBuilder, address: ir.Value, block: int, dtype: str) -> None:
    """Ask for the lines of a block of the source: one, or two of fp32."""
    begin = block * block_bytes(dtype)
    for line in range(begin, begin + block_bytes(dtype), CACHE_LINE_BYTES):
        prefetch_at(builder, offset(builder, address, line))


def halves_minimum(builder: ir.IRBuilder, address: ir.Value, kept: ir.Value | None, dtype: str) -> Lanes:
    """Return half as many lanes as a block has whose minimum is the complement of its largest magnitude.

    The complement, since machines have a minimum of eight 16-bit lanes in one instruction, but no maximum. The
    block's bf16 lanes go to the address `kept`; where that is None the source has to be bf16.
    """
    half = BLOCK_ELEMS // 2
    if kept is None:
        low, high = (load(builder, address, 16, half, 2 * i * half) for i in range(2))
    else:
        bits = SOURCES[dtype].load(builder, address)
        store(builder, kept, bits, False)
        low, high = (bits.picked(range(i * half, (i + 1) * half)) for i in range(2))
    return inverse(low).minimum(inverse(high), signed=False)


def make_tops(minima: Lanes, increment: Lanes, fmt: ElementFormat) -> Lanes:
    """Return what each block's elements are subtracted from as complements, from what `halves_minimum` found.

    That gives the exponent field of the element, x / 2^(s - 127), in a bf16.
    """
    maxima = minima ^ MAGNITUDE
    fields = maxima.compare("==", 0).where(_FIELD_OF_ZERO, (maxima + increment) >> 7)
    return fields.constant(_top_of_zero_field(fmt)) - (fields << 7)


def scales_of(
    tops: Lanes, lowest: Lanes, zero_byte: Lanes, dtype: str, fmt: ElementFormat
) -> tuple[Lanes, Lanes]:
    """Return scale bytes, and a mask of rare blocks: those with Inf, NaN or just less, and scales under `lowest`.

    Blocks of zeros are not among them.
    """
    fields = (tops.constant(_top_of_zero_field(fmt)) - tops) >> 7
    zero = fields.compare("==", _FIELD_OF_ZERO)
    made = fields - fmt.emax
    # Unsigned, so that what is under `lowest` is above all others.
    span = lowest.constant(highest_scale(dtype, fmt)) - lowest
    rare = zero.where(0, made - lowest).compare(">=", span, signed=False)
    return zero.where(zero_byte, made).narrow(8), rare


def highest_scale(dtype: str, fmt: ElementFormat) -> int:
    """Return the scale byte from which on blocks are rare; no more than that may be `lowest` in `scales_of`."""
    return (SOURCES[dtype].infinity >> 7) - fmt.emax


def _top_of_zero_field(fmt: ElementFormat) -> int:
    return MAGNITUDE + ((fmt.emax + fmt.bias) << 7)


def encode(
    builder: ir.IRBuilder, lanes: ir.Value, data: ir.Value, tops: ir.Value, blocks: range, fmt: ElementFormat,
    streaming: bool,
) -> None:  # fmt: skip
    """Write the codes of one or two blocks, of those at three addresses."""
    raw, splats = _operands(builder, lanes, tops, blocks)
    store(builder, data, codes(raw, splats, fmt), streaming, BLOCK_ELEMS * blocks.start)


@contextmanager
def encode_normals(
    raw: Sequence[Lanes], tops: Sequence[Lanes], data: ir.Value, offset_bytes: int, fmt: ElementFormat,
    streaming: bool,
) -> Iterator[None]:  # fmt: skip
    """Write the codes of one or two blocks, unless elements are below the smallest normal one, and no zeros.

    What is built in the context runs where they are.
    """
    kept, rest = _kept_and_rest(raw, tops, fmt)
    builder = kept.builder
    store(builder, data, _signed(_nearest(kept, rest), raw, fmt), streaming, offset_bytes)
    with builder.if_then(_has_low(kept, fmt), likely=False):
        masks = [_is_below(top - inverse(bits), fmt) for top, bits in zip(tops, raw, strict=True)]
        with builder.if_then((masks[0] | masks[-1]).any(), likely=False):
            yield


def codes(raw: Sequence[Lanes], tops: Sequence[Lanes], fmt: ElementFormat) -> Lanes:
    """Return the codes of one or two blocks as bytes."""
    kept, rest = _kept_and_rest(raw, tops, fmt)
    made = _nearest(kept, rest)
    with only_if(made.builder, _has_low(kept, fmt), [made]) as fixed:
        targets = [top - inverse(bits) for top, bits in zip(tops, raw, strict=True)]
        fixed.append(_with_subnormals(made, targets, fmt))
    return _signed(fixed[0], raw, fmt)


def inverse(bits: Lanes) -> Lanes:
    """Return the complement of magnitudes: the largest is the smallest."""
    return (bits & MAGNITUDE) ^ MAGNITUDE


def _operands(
    builder: ir.IRBuilder, lanes: ir.Value, tops: ir.Value, blocks: range
) -> tuple[list[Lanes], list[Lanes]]:
    """Return the elements of one or two blocks and, in all lanes, their tops."""
    raw = [load(builder, lanes, 16, BLOCK_ELEMS, 2 * BLOCK_ELEMS * block) for block in blocks]
    return raw, [load(builder, tops, 16, 0, 2 * block).splat(BLOCK_ELEMS) for block in blocks]


def _has_low(kept: Lanes, fmt: ElementFormat) -> ir.Value:
    """Whether there are elements below the smallest normal one, or zeros."""
    return kept.compare("<", 1 << fmt.mantissa_bits, signed=False).any()


def _kept_and_rest(raw: Sequence[Lanes], tops: Sequence[Lanes], fmt: ElementFormat) -> tuple[Lanes, Lanes]:
    """Return bytes: what a code keeps of the element over 2^(s - 127), zero below zero, and what is rounded away."""
    shift = 8 - (7 - fmt.mantissa_bits)
    parts = [top.minus_or_zero(inverse(bits)) << shift for top, bits in zip(tops, raw, strict=True)]
    return _bytes_of(parts, 1), _bytes_of(parts, 0)


def _nearest(kept: Lanes, rest: Lanes) -> Lanes:
    """Round to nearest, ties to even: up above one half, and at one half if the last bit is set."""
    up = (rest | (kept & 1)).compare(">", 0x80, signed=False)
    return up.where(kept + 1, kept)


def _signed(codes: Lanes, raw: Sequence[Lanes], fmt: ElementFormat) -> Lanes:
    return codes.minimum(fmt.max_code, signed=False) | (_bytes_of(raw, 1) & 0x80)


def _is_below(target: Lanes, fmt: ElementFormat) -> Lanes:
    """Whether an element less its top is below the smallest normal code, and not below half of the smallest of all."""
    return target.compare("<", ONE_FIELD) & target.compare(">=", -fmt.mantissa_bits * ONE_FIELD)


def _with_subnormals(codes: Lanes, targets: Sequence[Lanes], fmt: ElementFormat) -> Lanes:
    """Return the codes of blocks with those below the smallest normal one put right.

    What is below half of the smallest code, zeros that is for the most part, is zero already.
    """
    drop = 7 - fmt.mantissa_bits
    below = [_is_below(target, fmt) for target in targets]
    with only_if(codes.builder, (below[0] | below[-1]).any(), [codes]) as fixed:
        rounded = []
        for target in targets:
            significand = (target & (ONE_FIELD - 1)) | ONE_FIELD
            shift = target.constant(drop + 1) - target.arithmetic_shift(7)
            half = target.constant(1) << (shift - 1)
            rounded.append((significand + half - 1 + ((significand >> shift) & 1)) >> shift)
        chosen = _bytes_of([mask.where(0xFF, mask.widen(16)) for mask in below], 0)
        fixed.append(chosen.compare("!=", 0).where(_bytes_of(rounded, 0), codes))
    return fixed[0]


def _bytes_of(lanes: Sequence[Lanes], which: int) -> Lanes:
    """Return byte 0 (low) or 1 (high) of the 16-bit lanes of one or two blocks, as bytes."""
    parts = [item.as_lanes(8) for item in lanes]
    indices = range(which, 2 * BLOCK_ELEMS * len(parts), 2)
    return parts[0].picked(indices, parts[-1])
