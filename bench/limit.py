"""The figures that are promised: on the host, one thread, at least 100 MB moved a round. `--check` reads them.

Rows are named as the tables name them. No figure is promised for a GPU until one has been recorded.
"""

from __future__ import annotations

from functools import cache

from lowshard.bench.bench_device import Kind

RATIO_LIMITS: dict[str, float] = {
    "quantize bf16 -> e4m3 rceil": 1.0,
    "quantize bf16 -> e4m3 floor": 1.0,
    "quantize bf16 -> e4m3 even": 1.0,
    "quantize bf16 -> e4m3 ceil": 1.0,
    "quantize fp32 -> e4m3 rceil": 1.1,
    "quantize fp32 -> e5m2 rceil": 1.1,
    "dequantize e4m3 -> bf16": 1.0,
    "dequantize e5m2 -> bf16": 1.0,
    "pack boxes of 4 KB": 1.1,
    "pack boxes of 512 B": 1.3,
    "pack_quantize slice of 1 KB rows": 1.2,
}
"""Largest time as a multiple of a memcpy of the same traffic, by row."""

NARROW_RATIO_LIMITS: dict[str, float] = {
    **{f"quantize bf16 -> e4m3 {mode}": 1.6 for mode in ("rceil", "floor", "even", "ceil")},
    "quantize fp32 -> e4m3 rceil": 1.5,
    "quantize fp32 -> e5m2 rceil": 1.5,
    "dequantize e4m3 -> bf16": 1.2,
    "dequantize e5m2 -> bf16": 1.2,
    "pack boxes of 512 B": 1.4,
    "pack_quantize slice of 1 KB rows": 2.2,
}
"""In place of these, where vectors have less than 512 bits: computing takes longer than memory there."""

SPEED_UP_LIMITS: dict[tuple[str, str], float] = {
    ("pack_quantize slice of 1 KB rows", "pack then quantize slice of 1 KB rows"): 1.8,
}
"""Smallest speed-up of the first row over the second."""
NARROW_SPEED_UP = 1.4

REFIT_LIMIT, NARROW_MXFP8_REFIT_LIMIT = 1.6, 2.5
"""x memcpy of a row of `bench refit`, and of one that quantises with narrow vectors."""

AGAIN = 2
"""How often `--check` measures once more, with new buffers, what misses its limit: pages lie otherwise each time, and a
machine that others share has slow moments. The best counts."""


def ratio_limit(name: str, kind: Kind) -> float | None:
    """Return the promised ratio of a row on a kind of device, or None."""
    if kind != "cpu":
        return None
    return NARROW_RATIO_LIMITS.get(name, RATIO_LIMITS.get(name)) if is_narrow() else RATIO_LIMITS.get(name)


def speed_up_limit(fast: str, slow: str, kind: Kind) -> float | None:
    """Return the promised speed-up of a pair of rows on a kind of device, or None."""
    if kind != "cpu" or (fast, slow) not in SPEED_UP_LIMITS:
        return None
    return NARROW_SPEED_UP if is_narrow() else SPEED_UP_LIMITS[fast, slow]


def refit_limit(quantised: bool) -> float:
    """Return the promised multiple of a memcpy of a refit."""
    return NARROW_MXFP8_REFIT_LIMIT if quantised and is_narrow() else REFIT_LIMIT


@cache
def is_narrow() -> bool:
    """Say whether the host's compiled kernels have vectors of less than 512 bits."""
    from lowshard.kernels.cpu.cpu_engine import vector_bits
    from lowshard.kernels.engine import host_engine

    return host_engine().name == "numba" and vector_bits() < 512
