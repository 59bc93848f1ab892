"""The figures that are promised: on the host, one thread, at least 100 MB moved a round. `--check` reads them.

Rows are named as the tables name them. No figure is promised for a GPU until one has been recorded.
"""

from __future__ import annotations

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

SPEED_UP_LIMITS: dict[tuple[str, str], float] = {
    ("pack_quantize slice of 1 KB rows", "pack then quantize slice of 1 KB rows"): 1.8,
}
"""Smallest speed-up of the first row over the second."""


AGAIN = 2
"""How often `--check` measures once more, with new buffers, what misses its limit: pages lie otherwise each time, and a
machine that others share has slow moments. The best counts."""


def ratio_limit(name: str, kind: Kind) -> float | None:
    """Return the promised ratio of a row on a kind of device, or None."""
    return RATIO_LIMITS.get(name) if kind == "cpu" else None


def speed_up_limit(fast: str, slow: str, kind: Kind) -> float | None:
    """Return the promised speed-up of a pair of rows on a kind of device, or None."""
    return SPEED_UP_LIMITS.get((fast, slow)) if kind == "cpu" else None
