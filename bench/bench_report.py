"""What a benchmark found: a frozen record, its JSON form with every round's times, and the table a person reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from lowshard.bench.turn_timing import Row, SpeedUp, Spread

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FORMAT = "lowshard-bench-1"

LEGEND = (
    "GB = 10^9 bytes, read and written by the work. x memcpy: time over that of a copy with the same traffic, run "
    "right after it in each round; the median over {rounds} rounds. First calls, which compile or load what was "
    "compiled, count nowhere else."
)


@dataclass(frozen=True)
class Section:
    """Rows of one size, measured together."""

    title: str
    sizes: tuple[tuple[str, int], ...]
    rows: tuple[Row, ...]
    speed_ups: tuple[SpeedUp, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def missed(self) -> tuple[str, ...]:
        """The names of all rows that have a part in a figure that does not keep its limit."""
        names = {row.name for row in self.rows if row.ok is False}
        names |= {name for pair in self.speed_ups if pair.ok is False for name in (pair.fast, pair.slow)}
        return tuple(row.name for row in self.rows if row.name in names)

    def better(self, again: Section) -> Section:
        """Return this with the better figure of each that was measured again, and a note that says which were."""
        rows, pairs = {row.name: row for row in again.rows}, {(p.fast, p.slow): p for p in again.speed_ups}
        best = tuple(min(row, rows.get(row.name, row), key=lambda r: r.ratio.median) for row in self.rows)
        best_pairs = tuple(
            max(
                pair,
                pairs.get((pair.fast, pair.slow), pair),
                key=lambda p: p.spread.median,
            )
            for pair in self.speed_ups
        )
        note = f"measured again with new buffers, the better one counts: {', '.join(rows)}"
        return replace(self, rows=best, speed_ups=best_pairs, notes=(*self.notes, note))


@dataclass(frozen=True)
class Miss:
    """A figure that does not keep its limit."""

    name: str
    measured: float
    limit: float

    def __str__(self) -> str:
        """Say which figure misses which limit."""
        word = "over" if self.measured > self.limit else "under"
        return f"{self.name}: {self.measured:.3f}, {word} the limit {self.limit:g}"


@dataclass(frozen=True)
class BenchReport:
    """Everything one benchmark run reports."""

    bench: str
    facts: tuple[tuple[str, str], ...]
    """What ran where: names and values."""
    rounds: int
    sections: tuple[Section, ...]

    @property
    def misses(self) -> tuple[Miss, ...]:
        """Every figure that does not keep its limit."""
        return tuple(self._misses())

    @property
    def limits(self) -> int:
        """How many figures have a limit."""
        return sum(
            sum(row.ok is not None for row in section.rows)
            + sum(pair.ok is not None for pair in section.speed_ups)
            for section in self.sections
        )

    def _misses(self) -> Iterator[Miss]:
        for section in self.sections:
            for row in section.rows:
                if row.ratio_limit is not None and not row.ok:
                    yield Miss(row.name, row.ratio.median, row.ratio_limit)
            for pair in section.speed_ups:
                if pair.least is not None and not pair.ok:
                    yield Miss(_pair_name(pair), pair.spread.median, pair.least)

    def to_json(self) -> dict[str, Any]:
        """Return plain data: the figures, and the times of every round they come from."""
        return {
            "format": FORMAT,
            "bench": self.bench,
            "ok": not self.misses,
            "machine": dict(self.facts),
            "rounds": self.rounds,
            "sections": [
                {
                    "title": section.title,
                    "sizes": dict(section.sizes),
                    "rows": [_row_json(row) for row in section.rows],
                    "speed_ups": [_speed_up_json(pair) for pair in section.speed_ups],
                    "notes": list(section.notes),
                }
                for section in self.sections
            ],
        }


def dump_json(report: BenchReport) -> str:
    """Return the report as JSON text that ends with a newline."""
    return json.dumps(report.to_json(), indent=2, allow_nan=False) + "\n"


def render_table(report: BenchReport, console: Console) -> None:
    """Print the report: what ran where, a table a size, speed-ups, notes, the limits that are missed."""
    from rich.text import Text

    console.print()
    console.print(Text(f"lowshard bench {report.bench}", "bold"))
    for name, value in report.facts:
        console.print(Text(f"{name:<10} {value}", "dim"))
    for section in report.sections:
        console.print()
        console.print(Text(section.title))
        table = _row_table(section.rows, every=True)
        # Measured as if there were no edge: measuring clips to the console.
        if console.measure(table, options=console.options.update(max_width=1000)).maximum <= console.width:
            console.print(table)
        else:  # a narrow terminal, or a pipe: what is left out goes below
            console.print(_row_table(section.rows, every=False))
            for line in _left_out(section.rows):
                console.print(Text(line, "dim"))
        for pair in section.speed_ups:
            console.print(_speed_up_text(pair))
        for line in (*_row_notes(section.rows), *section.notes):
            console.print(Text(line, "dim"))
    console.print(Text(LEGEND.format(rounds=report.rounds), "dim"))
    if report.limits:
        missed = len(report.misses)
        kept = Text(
            f"{missed} of {report.limits} limits missed" if missed else f"all {report.limits} limits kept"
        )
        kept.stylize("bold red" if missed else "green")
        console.print(kept)


def _row_table(rows: tuple[Row, ...], every: bool) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold")
    headings = ["ms", "GB/s", "x memcpy"]
    if every:
        headings = ["moved MB", *headings, "quartiles", "memcpy GB/s", "first call s"]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("limit", no_wrap=True)
    for row in rows:
        figures = [f"{row.median_s * 1e3:,.3f}", f"{row.gb_per_s:,.2f}", f"{row.ratio.median:.2f}"]
        if every:
            moved, copied = f"{row.moved_bytes / 1e6:,.1f}", f"{row.copy_gb_per_s:,.2f}"
            figures = [moved, *figures, _quartiles(row.ratio), copied, f"{row.first_call_s:.3f}"]
        table.add_row(Text(row.name), *figures, _verdict(row.ok, row.ratio_limit, "over"))
    return table


def _left_out(rows: tuple[Row, ...]) -> Iterator[str]:
    """Say in few lines what a narrow table has no room for."""
    if not rows:
        return
    moved, copies = [row.moved_bytes / 1e6 for row in rows], [row.copy_gb_per_s for row in rows]
    yield f"moved a round: {min(moved):,.1f} to {max(moved):,.1f} MB"
    yield f"memcpy: {min(copies):,.2f} to {max(copies):,.2f} GB/s"
    slowest = max(rows, key=lambda row: row.first_call_s)
    yield f"first calls: {sum(row.first_call_s for row in rows):.2f} s in all, most in {slowest.name}"
    widest = max(rows, key=lambda row: (row.ratio.high - row.ratio.low) / row.ratio.median)
    yield f"widest quartiles of x memcpy: {_quartiles(widest.ratio)} in {widest.name}"


def _row_notes(rows: tuple[Row, ...]) -> Iterator[str]:
    by_note: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            by_note.setdefault(row.note, []).append(row.name)
    for note, names in by_note.items():
        yield f"{note}: {', '.join(names)}"


def _speed_up_text(pair: SpeedUp) -> Any:
    from rich.text import Text

    text = Text(f"{_pair_name(pair)}: {pair.spread.median:.2f} ({_quartiles(pair.spread)})  ")
    return text.append_text(_verdict(pair.ok, pair.least, "under"))


def _pair_name(pair: SpeedUp) -> str:
    return f"speed-up of {pair.fast} over {pair.slow}"


def _quartiles(spread: Spread) -> str:
    return f"{spread.low:.2f} - {spread.high:.2f}"


def _verdict(ok: bool | None, limit: float | None, missed: str) -> Any:
    from rich.text import Text

    if ok is None:
        return Text("")
    return Text.assemble(f"{limit:.3g} ", ("ok", "green") if ok else (missed, "bold red"))


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "note": row.note,
        "moved_bytes": row.moved_bytes,
        "memcpy_bytes": row.copied_bytes,
        "first_call_s": row.first_call_s,
        "median_s": row.median_s,
        "gb_per_s": row.gb_per_s,
        "memcpy_gb_per_s": row.copy_gb_per_s,
        "ratio": asdict(row.ratio),
        "ratio_limit": row.ratio_limit,
        "ok": row.ok,
        "work_s": list(row.work_s),
        "memcpy_s": list(row.copy_s),
    }


def _speed_up_json(pair: SpeedUp) -> dict[str, Any]:
    return {
        "fast": pair.fast,
        "slow": pair.slow,
        "speed_up": asdict(pair.spread),
        "least": pair.least,
        "ok": pair.ok,
        "times": list(pair.times),
    }
