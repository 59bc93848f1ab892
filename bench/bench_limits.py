"""The figures that are promised. `--check` judges them; a table shows them beside what was measured.

Rows are named as the tables name them. No figure is promised for a GPU until one has been recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from lowshard.bench.bench_report import Limit, Row

# ---- kernels: host, one thread, at least 100 MB moved a round; times a memcpy of the same traffic

KERNELS: dict[str, float] = {
    **{f"quantize bf16 -> e4m3 {mode}": 1.0 for mode in ("rceil", "floor", "even", "ceil")},
    **{f"quantize fp32 -> {elem} rceil": 1.1 for elem in ("e4m3", "e5m2")},
    **{f"dequantize {elem} -> bf16": 1.0 for elem in ("e4m3", "e5m2")},
    "pack boxes of 4 KB": 1.1, "pack boxes of 512 B": 1.3, "pack_quantize slice of 1 KB rows": 1.2,
}  # fmt: skip
NARROW_KERNELS: dict[str, float] = {
    **{f"quantize bf16 -> e4m3 {mode}": 1.6 for mode in ("rceil", "floor", "even", "ceil")},
    **{f"quantize fp32 -> {elem} rceil": 1.5 for elem in ("e4m3", "e5m2")},
    **{f"dequantize {elem} -> bf16": 1.2 for elem in ("e4m3", "e5m2")},
    "pack boxes of 512 B": 1.4, "pack_quantize slice of 1 KB rows": 2.2,
}  # fmt: skip
"""In place of these, where vectors have less than 512 bits: computing takes longer than memory there."""
KERNEL_BYTES = 100_000_000
"""Bytes a round from which on these limits are promised."""
FUSED, NARROW_FUSED = 1.8, 1.4
"""How many times faster pack_quantize is than packing and quantising in turn, at least."""
AGAIN = 2
"""How often `--check` measures once more, with new buffers, what misses its limit: pages lie otherwise each time, and
a machine that others share has slow moments. The best counts."""


def kernel_limit(name: str, kind: str) -> float | None:
    """Return the promised ratio of a row on a kind of device, or None."""
    if kind != "cpu":
        return None
    return NARROW_KERNELS.get(name, KERNELS.get(name)) if is_narrow() else KERNELS.get(name)


def fused_limit(kind: str) -> float | None:
    """Return the promised speed-up of the fused kernel on a kind of device, or None."""
    return None if kind != "cpu" else NARROW_FUSED if is_narrow() else FUSED


@cache
def is_narrow() -> bool:
    """Say whether the host's compiled kernels have vectors of less than 512 bits."""
    from lowshard.kernels.cpu.cpu_engine import vector_bits
    from lowshard.kernels.engine import host_engine

    return host_engine().name == "numba" and vector_bits() < 512


# ---- refits and redistributions on one host

REFIT, NARROW_MXFP8_REFIT = 1.6, 2.5
"""x memcpy of a row of `bench refit` on `REFIT_RANKS` ranks, and of one that quantises with narrow vectors."""
REFIT_RANKS = 4
GATHERED = 2.0
"""How many times as long gathering and broadcasting takes as a dense refit, at least."""


def refit_limit(quantised: bool) -> float:
    """Return the promised multiple of a memcpy of a refit."""
    return NARROW_MXFP8_REFIT if quantised and is_narrow() else REFIT


GATHER = {False: 1.3, True: 1.8}
"""Times the floor, by whether the array has 256 MB or more; there a plain copy writes past the caches by itself."""
REDISTRIBUTE = {
    "S0->S1": 1.4,
    "P->R": 1.5,
    **dict.fromkeys(("P->S0", "S0,R->R,S0", "S0,S1->S1,S0", "P,S0->R,S1"), 1.4),
}
PRIVATE_EXTRA = 1.2
"""What one more pass may add where the source lies in ordinary memory."""


def redistribute_limit(transition: str, size_bytes: int, private: bool = False) -> float | None:
    """Return the multiple of the floor that is promised from 64 MB on, or None."""
    found = REDISTRIBUTE.get(transition)
    if transition in ("S0->R", "S1->R", "S0,S0->R,R"):
        found = GATHER[size_bytes >= 256 << 20]
    if found is None or size_bytes < 64 << 20:
        return None
    return found + (PRIVATE_EXTRA if private else 0.0)


# ---- publish, fsdp, plan

OF_BARE = 0.9
"""Rate of a whole version as a share of that of a bare socket."""
OF_WHOLE = 0.5
"""Time of a version of which 1 % has changed, as a share of that of a whole one."""
OF_TORCH = 0.5
"""Wall and processor time of a step of sharded training, as shares of torch's."""
PLAN_S = {
    "dense, 512 (TP4) to 512 (TP2)": 0.030,
    "dense, 5120 (TP8 PP8 DP80) to 5120 (TP8 DP640)": 0.100,
    "DeepSeek-V3 shape, 2048 (PP16 EP64) to 320": 2.0,
}
"""Seconds of CPU time in which one rank plans."""

# ---- collectives: two ranks of one host on MPI

RANKS = 2
FROM_BYTES, TO_BYTES = 16_000_000, 64 << 20
"""Sizes that the multiples of a memcpy hold for."""
X_MEMCPY = {("all_reduce", "window"): 2.0, ("reduce_scatter", "window"): 0.9}
"""Largest time as a multiple of a memcpy, out of place, by collective and form."""
X_MPI, OVER_MPI_S, X_MPI_FROM_BYTES = 1.05, 1.5e-6, 64 << 10
"""Largest time as a multiple of mpi4py's own call, and seconds beside it, from so many bytes on."""
X_MPI_APART, APART_BYTES = 1.7, (256 << 10, 8 << 20)
"""For an all_reduce of such sizes where the two cores share no cache: results are written for cores that do."""
EXTRA_S = {"off": 3e-6, "hash": 4e-6}
"""Below: seconds over mpi4py's own call, by LOWSHARD_CHECK; "hash" may take one small all-reduce more."""


@dataclass(frozen=True)
class CollectiveRun:
    """What decides whether figures of collectives have limits."""

    op: str
    ranks: int
    transport: str
    check: str
    form: str = ""
    """window, where nothing else is unusual."""
    small_all_reduce_s: float = 0.0

    def why_none(self, largest: int, in_range: bool, compare_mpi: bool) -> str | None:
        """Return why no figure of a run over such sizes can have a limit, or None when some can."""
        if self.ranks != RANKS or self.transport not in ("auto", "mpi"):
            return f"limits are promised for {RANKS} ranks on --transport mpi"
        if ((self.op, self.form) in X_MEMCPY and in_range) or (
            compare_mpi and (self.check in EXTRA_S or largest >= X_MPI_FROM_BYTES)
        ):
            return None
        forms = ", ".join(f"{op} --{form}" for op, form in X_MEMCPY)
        sizes = f"{FROM_BYTES // 10**6} to {TO_BYTES >> 20} MB"
        return f"these figures have limits: {forms}, of {sizes}; all with --compare-mpi"

    def judge(self, row: Row) -> Row:
        """Return a row with its limits."""
        if self.ranks != RANKS or self.transport != "mpi":
            return row
        limits = []
        size_bytes, placement = row.facts["size_bytes"], row.facts["placement"]
        bound = X_MEMCPY.get((self.op, self.form))
        if bound and FROM_BYTES <= size_bytes <= TO_BYTES and placement == "out-of-place":
            limits.append(_limit(row, "memcpy", row.x("memcpy") or 0.0, bound))
        if "mpi" in row.beside:
            mpi_s = row.beside["mpi"].timing.median_s
            if size_bytes >= X_MPI_FROM_BYTES:
                low, high = APART_BYTES
                apart = (
                    self.op == "all_reduce" and row.facts["apart"] is not False and low <= size_bytes <= high
                )
                bound = (X_MPI_APART if apart else X_MPI) + OVER_MPI_S / mpi_s
                limits.append(_limit(row, "mpi", row.x("mpi") or 0.0, bound))
            elif self.check in EXTRA_S:
                extra_s = EXTRA_S[self.check] + (self.small_all_reduce_s if self.check == "hash" else 0.0)
                limit = _limit(row, "mpi", row.median_s * 1e6, (mpi_s + extra_s) * 1e6)
                limits.append(replace(limit, figure="microseconds beside mpi4py's"))
        return replace(row, limits=tuple(limits))


def _limit(row: Row, name: str, measured: float, bound: float) -> Limit:
    busy = row.timing.is_bound or (name == "mpi" and row.beside[name].timing.is_bound)
    return Limit(f"x {name}", round(measured, 2), round(bound, 2), is_judged=not busy)
