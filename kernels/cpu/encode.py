"""Steps of MXFP8 quantisation, combined by `quantize` and `pieces`: maxima, scale bytes, writing codes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llvmlite import ir

from lowshard.kernels.cpu.codes import Words, blocks_of, inverse, signed
from lowshard.kernels.cpu.memory_steps import CACHE_LINE_BYTES, load, offset, prefetch_at, store
from lowshard.kernels.cpu.sources import MAGNITUDE, SOURCES
from lowshard.kernels.cpu.vector import Lanes, only_if
from lowshard.kernels.reference import BLOCK_ELEMS, ElementFormat

LOWEST_FAST_SCALE = 18
"""Below this scale byte a subnormal bf16 or fp32 can give a code other than zero (see reference.py), and the vector
code takes every element for a normal number."""

# For blocks of zeros: a field above all others, as a NaN is rounded up to 0x100 at most.
_FIELD_OF_ZERO = 0x101


def block_bytes(dtype: str) -> int:
    """Return the bytes of a block of the source."""
    return BLOCK_ELEMS * SOURCES[dtype].itemsize


def prefetch_block(
    builder: ir.IRBuilder, address: ir.Value, block: int, dtype: str, locality: int = 2
) -> None:
    """Prefetch the lines of a block of the source, one, or two of fp32, as `prefetch_at` does."""
    begin = block * block_bytes(dtype)
    for line in range(begin, begin + block_bytes(dtype), CACHE_LINE_BYTES):
        prefetch_at(builder, offset(builder, address, line), locality)


def minimum_of_halves(bits: Lanes) -> Lanes:
    """Return half as many lanes as a block has whose minimum is the complement of its largest magnitude."""
    half = BLOCK_ELEMS // 2
    low, high = (inverse(bits).picked(range(i * half, (i + 1) * half)) for i in range(2))
    return low.minimum(high, signed=False)


def halves_minimum(builder: ir.IRBuilder, address: ir.Value, kept: ir.Value | None, dtype: str) -> Lanes:
    """Load a block and return the same; its bf16 lanes go to the address `kept`, unless they lie there already."""
    if kept is not None:
        bits = SOURCES[dtype].load(builder, address)
        store(builder, kept, bits, False)
        return minimum_of_halves(bits)
    half = BLOCK_ELEMS // 2
    low, high = (load(builder, address, 16, half, 2 * i * half) for i in range(2))
    return inverse(low).minimum(inverse(high), signed=False)


def make_origins(minima: Lanes, increment: Lanes, fmt: ElementFormat) -> Lanes:
    """Return the exponent field from which each block's are counted, from what `halves_minimum` found."""
    maxima = minima ^ MAGNITUDE
    fields = maxima.compare("==", 0).where(_FIELD_OF_ZERO, (maxima + increment) >> 7)
    return fields - (fmt.emax + fmt.bias)


def scales_of(
    origins: Lanes, lowest: Lanes, zero_byte: Lanes, dtype: str, fmt: ElementFormat
) -> tuple[Lanes, Lanes]:
    """Return scale bytes, and a mask of rare blocks: those with Inf, NaN or nearly so, and scales under `lowest`."""
    zero = origins.compare("==", _FIELD_OF_ZERO - fmt.emax - fmt.bias)
    made = origins + fmt.bias
    # Unsigned, so that what is under `lowest` is above all others.
    span = lowest.constant(highest_scale(dtype, fmt)) - lowest
    rare = zero.where(0, made - lowest).compare(">=", span, signed=False)
    return zero.where(zero_byte, made).narrow(8), rare


def highest_scale(dtype: str, fmt: ElementFormat) -> int:
    """Return the scale byte from which on blocks are rare; no more than that may be `lowest` in `scales_of`."""
    return (SOURCES[dtype].infinity >> 7) - fmt.emax


def encode(
    builder: ir.IRBuilder, lanes: ir.Value, data: ir.Value, origins: ir.Value, blocks: range, fmt: ElementFormat,
    streaming: bool,
) -> None:  # fmt: skip
    """Write the codes of one or two blocks, of those at three addresses."""
    raw = [load(builder, lanes, 16, BLOCK_ELEMS, 2 * BLOCK_ELEMS * block) for block in blocks]
    found = load(builder, origins, 16, len(blocks), 2 * blocks.start)
    store(builder, data, codes_of(raw, found, 0, fmt), streaming, BLOCK_ELEMS * blocks.start)


def codes_of(raw: Sequence[Lanes], origins: Lanes, first: int, fmt: ElementFormat) -> Lanes:
    """Return the codes of one or two blocks whose origins begin at the lane `first`."""
    made = blocks_of(raw, origins, first, fmt)
    magnitudes, low = made.rounded()
    builder = magnitudes.builder
    with only_if(builder, low, [magnitudes]) as fixed:
        fixed.append(made.with_subnormals(magnitudes))
    return signed(fixed[0], raw, fmt)


@contextmanager
def encode_normals(
    raw: Sequence[Lanes], origins: Lanes, first: int, data: ir.Value, offset_bytes: int, fmt: ElementFormat,
    streaming: bool,
) -> Iterator[None]:  # fmt: skip
    """Do the same for two blocks without tables, but write zeros for what is below the smallest normal code."""
    made = blocks_of(raw, origins, first, fmt)
    assert isinstance(made, Words)
    magnitudes, low = made.rounded()
    builder = magnitudes.builder
    store(builder, data, signed(magnitudes, raw, fmt), streaming, offset_bytes)
    with builder.if_then(low, likely=False), builder.if_then(made.any_subnormal(), likely=False):
        yield
