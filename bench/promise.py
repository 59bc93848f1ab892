"""The figures of collectives that are promised, and which of a run's figures they judge. `--check-limits` reads them.

For two ranks of one host on MPI: times over those of a memcpy for 16 to 64 MB, and times beside mpi4py's own, for sums
by whether the two cores share a cache, which a host may change from one second to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowshard.bench.figure import CollectiveReport, Figure, Row
from lowshard.bench.sweep_setting import Settings

RANKS = 2
FROM_BYTES, TO_BYTES = 16_000_000, 64 << 20
"""Sizes that the multiples of a memcpy hold for."""

X_MEMCPY: dict[tuple[str, str], float] = {
    ("all_reduce", "window"): 2.0,
    ("reduce_scatter", "window"): 0.9,
    ("all_gather", "shared"): 0.6,
}
"""Largest time as a multiple of a memcpy, out of place, by collective and form."""

X_MPI, OVER_MPI_S = 1.05, 1.5e-6
"""Largest time as a multiple of mpi4py's own call, from `X_MPI_FROM_BYTES` on, and seconds beside it."""
X_MPI_APART, APART_BYTES = 1.7, (256 << 10, 8 << 20)
"""For an all_reduce of such sizes where the two cores share no cache: results are written for cores that do."""
X_MPI_FROM_BYTES = 64 << 10

EXTRA_S = {"off": 3e-6, "hash": 4e-6}
"""Below that size: seconds over mpi4py's own call, by LOWSHARD_CHECK; "hash" may take one small all-reduce more."""


@dataclass(frozen=True)
class Verdict:
    """A promised figure."""

    name: str
    measured: float
    limit: float
    unit: str
    ok: bool | None

    def __str__(self) -> str:
        """Say what was promised and what came."""
        said = {True: "ok", False: "MISSED", None: "not judged, the machine was busy"}[self.ok]
        return f"{self.name}: {self.measured:.2f} {self.unit}, limit {self.limit:.2f}: {said}"


def why_no_limits(settings: Settings, ranks: int, check: str) -> str | None:
    """Return why none of a run's figures can have a limit, or None when some can."""
    if ranks != RANKS or settings.transport not in ("auto", "mpi"):
        return f"limits are promised for {RANKS} ranks on --transport mpi"
    memcpy = _form(settings) is not None and _in_range(settings)
    small = check in EXTRA_S or max(settings.sizes) >= X_MPI_FROM_BYTES
    if memcpy or (settings.compare_mpi and small):
        return None
    forms = ", ".join(f"{op} --{form}" for op, form in X_MEMCPY)
    sizes = f"{FROM_BYTES // 10**6} to {TO_BYTES >> 20} MB"
    return f"these figures have limits: {forms}, of {sizes}; all with --compare-mpi"


def verdicts(report: CollectiveReport, check: str) -> tuple[Verdict, ...]:
    """Return every promised figure of a run."""
    if report.ranks != RANKS or report.transport != "mpi":
        return ()
    return tuple(v for row in report.rows for v in _judge(report, row, check))


def _judge(report: CollectiveReport, row: Row, check: str) -> Iterator[Verdict]:
    form = _form(report.settings)
    what = " ".join(filter(None, (row.op, row.dtype, row.redop, f"{row.size_bytes} B")))
    held = FROM_BYTES <= row.size_bytes <= TO_BYTES
    if form is not None and held and row.out is not None and row.out.x_memcpy is not None:
        limit = X_MEMCPY[form]
        yield _verdict(f"{what} --{form[1]}", row.out, row.out.x_memcpy, limit, "x memcpy")
    for placement, figure in row.figures:
        if figure.mpi is None or figure.x_mpi is None:
            continue
        name = f"{what} {placement}"
        if row.size_bytes >= X_MPI_FROM_BYTES:
            low, high = APART_BYTES
            may = row.op == "all_reduce" and row.apart is not False and low <= row.size_bytes <= high
            limit = (X_MPI_APART if may else X_MPI) + OVER_MPI_S / figure.mpi.median_s
            yield _verdict(
                name + (", cores apart" if may else ""), figure, figure.x_mpi, round(limit, 2), "x mpi"
            )
        elif check in EXTRA_S:
            limit_s = figure.mpi.median_s + EXTRA_S[check]
            limit_s += (report.small_all_reduce_s or 0.0) if check == "hash" else 0.0
            yield _verdict(name, figure, figure.timing.median_s * 1e6, limit_s * 1e6, "us")


def _verdict(name: str, figure: Figure, measured: float, limit: float, unit: str) -> Verdict:
    ok: bool | None = round(measured, 2) <= limit
    rivals = [] if figure.mpi is None else [figure.mpi]
    if not ok and any(timing.is_bound for timing in (figure.timing, *rivals)):
        ok = None
    return Verdict(name, measured, limit, unit, ok)


def _form(settings: Settings) -> tuple[str, str] | None:
    """Return the row of `X_MEMCPY` that a run belongs to."""
    if settings.order != "fast" or settings.average != 3 or settings.dtypes != ("float32",):
        return None
    for form, on in (("window", settings.window and not settings.shared), ("shared", settings.shared)):
        if on and (settings.op, form) in X_MEMCPY and settings.redops in ((), ("sum",)):
            return settings.op, form
    return None


def _in_range(settings: Settings) -> bool:
    return any(FROM_BYTES <= size <= TO_BYTES for size in settings.sizes)
