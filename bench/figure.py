"""What a sweep over a collective found: frozen records, the figures that follow from them, JSON both ways."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from lowshard.bench.batch import CLEAN_SHARE, Timing
from lowshard.bench.sweep_setting import Settings
from lowshard.cost import factor

FORMAT = "lowshard-bench-collective-1"


@dataclass(frozen=True)
class Figure:
    """One placement of one size."""

    timing: Timing
    wrong: int | None
    x_memcpy: float | None = None
    x_mpi: float | None = None
    mpi: Timing | None = None


@dataclass(frozen=True)
class Row:
    """One size."""

    op: str
    ranks: int
    size_bytes: int
    count: int
    dtype: str
    redop: str | None
    root: int | None
    out: Figure | None
    inside: Figure | None
    cycle: int = 0
    apart: bool | None = None
    """Whether the cores of two ranks shared no cache meanwhile; None: now and then, or not looked at."""

    @property
    def figures(self) -> tuple[tuple[str, Figure], ...]:
        """The placements that were measured, by name."""
        both = (("out-of-place", self.out), ("in-place", self.inside))
        return tuple((name, figure) for name, figure in both if figure is not None)

    @property
    def main(self) -> Figure:
        """The figure that stands for the row: out of place where there is one."""
        return self.figures[0][1]

    def algbw(self, figure: Figure) -> float:
        """Return the size over the time, in 10^9 bytes a second."""
        return self.size_bytes / figure.timing.median_s / 1e9

    def busbw(self, figure: Figure) -> float:
        """Return what each link carried, in 10^9 bytes a second; nccl-tests' factors."""
        return self.algbw(figure) * factor(self.op, self.ranks)


@dataclass(frozen=True)
class CollectiveReport:
    """A whole run."""

    facts: tuple[tuple[str, str], ...]
    settings: Settings
    ranks: int
    transport: str
    rows: tuple[Row, ...]
    small_all_reduce_s: float | None = None

    @property
    def wrong(self) -> int:
        """Elements that were wrong, over everything."""
        return sum(figure.wrong or 0 for row in self.rows for _, figure in row.figures)

    @property
    def average_busbw(self) -> float:
        """Bus bandwidth in 10^9 bytes a second, averaged over sizes and placements as nccl-tests does it."""
        found = [row.busbw(figure) for row in self.rows for _, figure in row.figures]
        return float(np.mean(found)) if found else 0.0

    @property
    def bounds(self) -> int:
        """How many figures are upper bounds, for want of a clean round."""
        return sum(figure.timing.is_bound for row in self.rows for _, figure in row.figures)

    @property
    def share(self) -> float | None:
        """The median part of the CPU time that the ranks got; None where that was not watched."""
        found = [s for row in self.rows for _, figure in row.figures for s in figure.timing.shares]
        return float(np.median(found)) if found else None

    @property
    def is_busy(self) -> bool:
        """Whether others took much of the machine meanwhile."""
        return self.bounds > 0 or (self.share is not None and self.share < CLEAN_SHARE)

    def to_json(self) -> dict[str, Any]:
        """Return plain data: the figures, and the times of every round they come from."""
        return {
            "format": FORMAT,
            "bench": self.settings.op,
            "ok": not self.wrong,
            "machine": dict(self.facts),
            "settings": self.settings.to_json(),
            "ranks": self.ranks,
            "transport": self.transport,
            "wrong": self.wrong,
            "average_busbw_gb_per_s": self.average_busbw,
            "cpu_share": self.share,
            "small_all_reduce_s": self.small_all_reduce_s,
            "rows": [_row_json(row) for row in self.rows],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CollectiveReport:
        """Return the report that `to_json` wrote; what follows from the times is worked out again."""
        rows = (
            _own(Row, {**row, "out": _figure(row["out"]), "inside": _figure(row["inside"])})
            for row in data["rows"]
        )
        return cls(
            tuple(data["machine"].items()),
            Settings.from_json(data["settings"]),
            data["ranks"],
            data["transport"],
            tuple(rows),
            data["small_all_reduce_s"],
        )

    def dump(self) -> str:
        """Return the report as JSON text that ends with a newline."""
        return json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"


CSV_HEAD = (
    "op", "size_bytes", "count", "dtype", "redop", "root", "ranks", "placement", "time_us", "algbw_gb_per_s",
    "busbw_gb_per_s", "wrong", "x_memcpy", "x_mpi", "mpi_us", "min_us", "max_us", "p99_us", "cv", "rounds",
    "clean_rounds", "upper_bound", "cycle",
)  # fmt: skip


def csv_rows(report: CollectiveReport) -> Iterator[tuple[Any, ...]]:
    """Yield a line for each size and placement, in the columns of `CSV_HEAD`; None where there is no figure."""
    for row in report.rows:
        for name, figure in row.figures:
            timing = figure.timing
            times = (timing.least_s, timing.most_s, timing.p99_s)
            mpi_us = None if figure.mpi is None else figure.mpi.median_s * 1e6
            yield (
                row.op, row.size_bytes, row.count, row.dtype, row.redop, row.root, row.ranks, name,
                timing.median_s * 1e6, row.algbw(figure), row.busbw(figure), figure.wrong, figure.x_memcpy,
                figure.x_mpi, mpi_us, *(t * 1e6 for t in times), timing.cv, len(timing.seconds),
                sum(timing.clean), int(timing.is_bound), row.cycle,
            )  # fmt: skip


def dump_csv(report: CollectiveReport) -> str:
    """Return the report as CSV text with a head line."""
    import csv
    import io

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_HEAD)
    writer.writerows(csv_rows(report))
    return out.getvalue()


def _row_json(row: Row) -> dict[str, Any]:
    found = asdict(row)
    for name, figure in (("out", row.out), ("inside", row.inside)):
        if figure is not None:
            timing = figure.timing
            found[name] |= {
                "time_s": timing.median_s, "algbw_gb_per_s": row.algbw(figure),
                "busbw_gb_per_s": row.busbw(figure), "min_s": timing.least_s, "max_s": timing.most_s,
                "p99_s": timing.p99_s, "cv": timing.cv, "upper_bound": timing.is_bound,
            }  # fmt: skip
    return found


def _own(kind: type[Any], data: Mapping[str, Any]) -> Any:
    """Return a record of its own fields among some data."""
    return kind(**{one.name: data[one.name] for one in fields(kind)})


def _figure(data: Mapping[str, Any] | None) -> Figure | None:
    if data is None:
        return None
    made: Figure = _own(Figure, {**data, "timing": _timing(data["timing"]), "mpi": _timing(data["mpi"])})
    return made


def _timing(data: Mapping[str, Any] | None) -> Timing | None:
    return None if data is None else Timing(tuple(data["seconds"]), tuple(data["shares"]), data["calls"])
