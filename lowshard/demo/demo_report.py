"""What the demo found out: a frozen record, its JSON form, and the table a person reads.

The picture of the same record is drawn in `lowshard.demo.demo_picture`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lowshard.box import Box
from lowshard.errors import CheckpointError
from lowshard.flag_value import write_whole

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FORMAT = "lowshard-demo-1"


@dataclass(frozen=True)
class PhaseRow:
    """One line of the table. None: the figure does not apply to this phase."""

    phase: str
    moved_bytes_per_rank: int | None
    """The most that any rank moved."""
    seconds: float
    gb_per_s: float | None
    """Bytes a rank over seconds, in 10^9 bytes a second."""
    memcpy_ratio: float | None
    """The time as a multiple of a memcpy of the same bytes, measured in the same run."""
    check: str
    """What was checked and how it came out."""
    ok: bool = True


@dataclass(frozen=True)
class Accuracy:
    """Embeddings of one kind of weights against the unsharded float32 model."""

    label: str
    kind: Literal["max_difference", "cosine"]
    """The largest absolute difference (to be at most the bound) or the lowest cosine (at least)."""
    measured: float
    bound: float

    @property
    def ok(self) -> bool:
        """True when the bound holds; a NaN does not hold it."""
        return self.measured <= self.bound if self.kind == "max_difference" else self.measured >= self.bound

    @property
    def error(self) -> float:
        """Return the distance from perfect: the difference itself, or 1 - cosine."""
        return self.measured if self.kind == "max_difference" else 1.0 - self.measured

    @property
    def error_bound(self) -> float:
        """Return the bound as a distance from perfect."""
        return self.bound if self.kind == "max_difference" else 1.0 - self.bound

    @property
    def told(self) -> tuple[str, str]:
        """What was measured, and what it must be, in words."""
        if self.kind == "max_difference":
            return f"max difference {self.measured:.1e}", f"at most {self.bound:.0e}"
        return f"lowest cosine {self.measured:.6f}", f"at least {self.bound:g}"


@dataclass(frozen=True)
class MatrixView:
    """Who holds what of one weight matrix, before and after the move; boxes in the file's coordinates."""

    name: str
    shape: tuple[int, int]
    before: tuple[Box, ...]
    """The box of each rank."""
    after: tuple[Box, ...]
    head_dim: int | None = None
    """The dim that consists of attention heads, if one does."""
    num_heads: int = 1


@dataclass(frozen=True)
class PlanView:
    """What was planned for the move to the serving layout, and what came of it."""

    planned_bytes: tuple[int, ...]
    """What each rank is to receive."""
    moved_bytes: tuple[int, ...]
    """What each rank received."""
    predicted_s: float
    """By the built-in cost profile, tensor after tensor."""
    measured_s: float
    example: str
    """The tensor whose plan is shown."""
    explanation: str
    """That plan in words."""


@dataclass(frozen=True)
class DemoReport:
    """Everything one run of the demo reports. Compares by value; JSON both ways."""

    checkpoint: str
    checkpoint_bytes: int
    world_size: int
    before: str
    """The training layout in words."""
    after: str
    """The serving layout in words."""
    rows: tuple[PhaseRow, ...]
    memcpy_gb_per_s: float | None
    """What the memcpy of this run reached a rank."""
    accuracy: tuple[Accuracy, ...]
    accuracy_note: str | None = None
    """Which sentences and tokenizer, or why there was no forward."""
    matrices: tuple[MatrixView, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    """Names and values: versions, machine, MPI."""
    plan: PlanView | None = None

    @property
    def ok(self) -> bool:
        """True when every check came out right."""
        return all(row.ok for row in self.rows) and all(figure.ok for figure in self.accuracy)

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads back; it also holds the verdicts."""
        data: dict[str, Any] = {"format": FORMAT, "ok": self.ok, **asdict(self)}
        for figure, values in zip(self.accuracy, data["accuracy"], strict=True):
            values["ok"] = figure.ok
            # JSON has no NaN; null stands for one.
            values["measured"] = figure.measured if math.isfinite(figure.measured) else None
        data["environment"] = dict(self.environment)
        # One trip through text turns tuples into lists, so that the result compares equal to a file's.
        return dict(json.loads(json.dumps(data, allow_nan=False)))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DemoReport:
        """Return the report that `to_json` wrote.

        Raises:
            CheckpointError: the data is not such a report.
        """
        if data.get("format") != FORMAT:
            raise CheckpointError(f"a demo report has format {FORMAT!r}, got {data.get('format')!r}")
        values = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        if (plan := data.get("plan")) is not None:
            both = {name: tuple(plan[name]) for name in ("planned_bytes", "moved_bytes")}
            values["plan"] = PlanView(**{**plan, **both})
        values["rows"] = tuple(PhaseRow(**row) for row in data["rows"])
        values["accuracy"] = tuple(
            Accuracy(f["label"], f["kind"], math.nan if f["measured"] is None else f["measured"], f["bound"])
            for f in data["accuracy"]
        )
        values["matrices"] = tuple(
            MatrixView(
                view["name"], (view["shape"][0], view["shape"][1]), _boxes(view["before"]), _boxes(view["after"]),
                view["head_dim"], view["num_heads"],
            )
            for view in data["matrices"]
        )  # fmt: skip
        values["environment"] = tuple(data["environment"].items())
        return cls(**values)


def write_json(report: DemoReport, path: str | os.PathLike[str]) -> None:
    """Write the report as JSON; the file appears whole or not at all."""
    write_whole(Path(path), (json.dumps(report.to_json(), indent=2) + "\n").encode())


def render_table(report: DemoReport, console: Console) -> None:
    """Print the report: what ran where, a line a phase, accuracy, the verdict."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console.print()
    console.print(
        Text.assemble(
            ("lowshard demo", "bold"), f"  {report.checkpoint}, {megabytes(report.checkpoint_bytes)}, ",
            f"{report.world_size} rank{'s' * (report.world_size != 1)}",
        )
    )  # fmt: skip
    console.print(Text(f"training layout  {report.before}", "dim"))
    console.print(Text(f"serving layout   {report.after}", "dim"))
    for name, value in report.environment:
        console.print(Text(f"{name:<16} {value}", "dim"))
    console.print()

    table = _phase_table(report, checks=True)
    # Measured as if there were no edge: measuring clips to the console.
    if console.measure(table, options=console.options.update(max_width=1000)).maximum <= console.width:
        console.print(table)
    else:  # a narrow terminal, or a pipe: the checks go below, a line each
        console.print(_phase_table(report, checks=False))
        for row in report.rows:
            console.print(_mark(row.ok, f"{row.phase}: {row.check}"))
        console.print()
    if report.memcpy_gb_per_s is not None:
        console.print(
            Text(
                f"GB = 10^9 bytes. memcpy in this run: {report.memcpy_gb_per_s:.2f} GB/s a rank, all ranks at once.",
                "dim",
            )
        )
        console.print()

    if report.accuracy:
        figures = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        figures.add_column("against unsharded fp32", no_wrap=True)
        figures.add_column("measured", justify="right", no_wrap=True)
        figures.add_column("must be", justify="right", no_wrap=True)
        figures.add_column("check", no_wrap=True)
        for figure in report.accuracy:
            figures.add_row(Text(figure.label), *figure.told, _mark(figure.ok, ""))
        console.print(figures)
    if report.accuracy_note:
        console.print(Text(report.accuracy_note, "dim"))
        console.print()
    console.print(_mark(report.ok, "every check holds" if report.ok else "not every check holds: see above"))


def _phase_table(report: DemoReport, checks: bool) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("phase", no_wrap=True)
    for heading in ("moved a rank", "seconds", "GB/s", "x memcpy"):
        table.add_column(heading, justify="right", no_wrap=True)
    if checks:
        table.add_column("check", no_wrap=True)
    for row in report.rows:
        table.add_row(
            Text(row.phase),
            "" if row.moved_bytes_per_rank is None else megabytes(row.moved_bytes_per_rank),
            f"{row.seconds:.3f}",
            "" if row.gb_per_s is None else speed_text(row.gb_per_s),
            "" if row.memcpy_ratio is None else f"{row.memcpy_ratio:.1f}",
            *([_mark(row.ok, row.check)] if checks else []),
        )
    return table


def _mark(ok: bool, text: str) -> Any:
    from rich.text import Text

    return Text.assemble(("ok", "green") if ok else ("FAILED", "bold red"), f"  {text}" if text else "")


def speed_text(gb_per_s: float) -> str:
    """Return GB/s as people read them: two decimals, and below 0.1 two digits that count."""
    return f"{gb_per_s:.2f}" if gb_per_s >= 0.1 else f"{gb_per_s:.2g}"


def megabytes(n_bytes: int) -> str:
    """Return bytes as MB, in text."""
    return f"{n_bytes / 1e6:.1f} MB"


def _boxes(data: list[list[list[int]]]) -> tuple[Box, ...]:
    return tuple(tuple((start, stop) for start, stop in box) for box in data)
