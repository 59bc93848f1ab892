"""The table of a benchmark: lines of fixed width, each as soon as its row is measured where the widths are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from lowshard.bench.bench_report import Facts, Limit, Report, Row

EMPTY = "-"


@dataclass(frozen=True)
class Column:
    """One column: its head, the unit below it, what it shows of a row, and its width (0: what its cells need)."""

    head: str
    cell: Callable[[Row], str]
    unit: str = ""
    width: int = 0
    left: bool = False

    def put(self, text: str) -> str:
        """Return a text in the width of the column."""
        return f"{text:<{self.width}}" if self.left else f"{text:>{self.width}}"


NAME = Column("", lambda row: row.name, left=True)
MS = Column("time", lambda row: f"{row.median_s * 1e3:,.3f}", "(ms)")
GB_PER_S = Column("speed", lambda row: f"{row.gb_per_s:,.2f}", "(GB/s)")
MOVED = Column("moved", lambda row: f"{row.moved_bytes / 1e6:,.1f}", "(MB)")


def x_column(name: str) -> Column:
    """Return the column of a ratio; a tilde marks one without enough clean rounds."""

    def cell(row: Row) -> str:
        found = row.x(name)
        if found is None:
            return EMPTY
        bound = row.timing.is_bound or row.beside[name].timing.is_bound
        return f"{'~' if bound else ''}{found:.2f}"

    return Column(f"x {name}", cell)


def quartiles_column(name: str) -> Column:
    """Return the column of a ratio's quartiles."""
    return Column("quartiles", lambda row: str(row.ratio(name)) if name in row.beside else EMPTY)


def fact_column(head: str, key: str, form: str = "", unit: str = "", scale: float = 1.0) -> Column:
    """Return the column of one of a row's facts, scaled and formatted."""

    def cell(row: Row) -> str:
        found = row.facts.get(key)
        if found is None:
            return EMPTY
        return format(found if scale == 1.0 else found * scale, form)

    return Column(head, cell, unit)


def standard(name: str) -> tuple[Column, ...]:
    """Return what most tables begin with: a row's bytes, time and speed, and its ratio to what took turns with it."""
    return NAME, MOVED, MS, GB_PER_S, x_column(name), quartiles_column(name)


LIMITS = Column("limit", lambda row: ", ".join(map(_limit, row.limits)), left=True)


def head_lines(bench: str, machine: Facts, *more: str) -> Iterator[str]:
    """Yield what runs where."""
    yield f"# lowshard bench {bench}{''.join(f': {text}' for text in more)}"
    for name, value in machine:
        yield f"# {name:<10} {value}"


def column_lines(columns: Sequence[Column], above: str = "") -> Iterator[str]:
    """Yield the heads of columns, and their units, with a hash in front."""
    yield "#"
    if above:
        yield f"#{above[1:]}".rstrip()
    for words in ([c.head for c in columns], [f"{c.unit}" for c in columns]):
        if any(words):
            yield f"#{line_of(columns, words)[1:]}".rstrip()


def line_of(columns: Sequence[Column], cells: Sequence[str]) -> str:
    """Return one line of cells."""
    return "".join(column.put(cell) for column, cell in zip(columns, cells, strict=True)).rstrip()


def table_lines(columns: Sequence[Column], rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table of rows that are all there, as wide as they need, each group under its title."""
    if any(row.limits for row in rows):
        columns = (*columns, LIMITS)
    cells = [[column.cell(row) for column in columns] for row in rows]
    fitted = []
    for index, column in enumerate(columns):
        widest = max(len(column.head), len(column.unit), *(len(line[index]) for line in cells))
        # The hash takes a place of the first head; two spaces stand between columns.
        fitted.append(replace(column, width=widest + 2))
    if fitted[-1].left:  # the last one begins two places later in place of ending there
        last = fitted[-1]
        cell = last.cell
        fitted[-1] = replace(last, head=f"  {last.head}", cell=lambda row: f"  {cell(row)}")
        cells = [[*line[:-1], f"  {line[-1]}"] for line in cells]
    yield from column_lines(fitted)
    group = ""
    for row, line in zip(rows, cells, strict=True):
        if row.group != group:
            group = row.group
            yield f"# {group}"
        yield line_of(fitted, line)


def closing_lines(report: Report) -> Iterator[str]:
    """Yield notes, wrong values, and what became of the limits."""
    for note in report.notes:
        yield f"# {note}"
    if any("wrong" in row.facts for row in report.rows):
        yield f"# Out of bounds values : {report.wrong} {'FAILED' if report.wrong else 'OK'}"
    limits = report.every_limit
    if limits:
        missed = list(report.missed())
        kept = f"{len(missed)} of {len(limits)} missed" if missed else f"all {len(limits)} kept"
        yield f"# limits: {kept}"


def report_lines(report: Report, columns: Sequence[Column], *more: str) -> list[str]:
    """Return everything that is printed of a report whose rows are all there."""
    head = head_lines(report.bench, report.machine, *more)
    return [*head, *table_lines(columns, report.rows), *closing_lines(report)]


def _limit(limit: Limit) -> str:
    sign = ">= " if limit.at_least else ""
    return f"{sign}{limit.bound:.3g} {limit.verdict.partition(',')[0]}"
