"""`--plot`: time and bus bandwidth over size, both axes logarithmic."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowshard.bench.figure import CollectiveReport, Row
from lowshard.errors import DependencyError, LowshardError

_INCHES = (12.0, 4.6)
_INCHES_A_LINE = 0.2
_SUFFIXES = (".png", ".svg", ".pdf")
_COLOURS = ("#4c78a8", "#f2a541", "#59a36a", "#c56b86", "#7c6bb0", "#4fb0ae", "#d9c148", "#9c7459")

Line = tuple[str, list[int], list[float], list[float]]


def require_plot(path: Path) -> None:
    """Check that a picture can be drawn there, before the measurement it is to show."""
    if path.suffix not in _SUFFIXES:
        raise LowshardError(f"--plot takes a file that ends in {', '.join(_SUFFIXES)}, got {path.name!r}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise DependencyError("--plot needs matplotlib: pip install 'lowshard[plot]'") from error


def draw(report: CollectiveReport, path: Path) -> None:
    """Draw a report; the file appears whole or not at all."""
    require_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    from lowshard.command_line import write_whole

    drawn = list(lines(report))
    inches = (_INCHES[0], max(_INCHES[1], _INCHES_A_LINE * len(drawn)))  # room for the legend
    picture = Picture(figsize=inches, dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(picture)
    title = f"{report.settings.op}, {report.ranks} ranks, {report.transport}"
    picture.suptitle(title)
    left, right = picture.subplots(1, 2)
    for number, (name, sizes, times_us, busbw) in enumerate(drawn):
        style: dict[str, Any] = {"color": _COLOURS[number % len(_COLOURS)], "marker": "o", "markersize": 3}
        left.plot(sizes, times_us, label=name, **style)
        if any(busbw):
            right.plot(sizes, busbw, label=name, **style)
    for axes, label in ((left, "time, us"), (right, "bus bandwidth, GB/s")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("size, bytes")
        axes.set_ylabel(label)
        axes.grid(visible=True, which="both", alpha=0.25)
    picture.legend(*left.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    out = io.BytesIO()
    picture.savefig(out, format=path.suffix[1:])
    write_whole(path, out.getvalue())


def lines(report: CollectiveReport) -> Iterator[Line]:
    """Yield a line for each type, reduction and placement, and one for MPI's own call: sizes, us, GB/s."""
    rows = [row for row in report.rows if row.size_bytes and row.cycle == 0]
    kinds = dict.fromkeys((row.dtype, row.redop) for row in rows)
    for dtype, redop in kinds:
        mine = [row for row in rows if (row.dtype, row.redop) == (dtype, redop)]
        what = " ".join(filter(None, (dtype, redop)))
        for placement in ("out-of-place", "in-place"):
            there = [(row, figure) for row in mine for name, figure in row.figures if name == placement]
            if there:
                yield (
                    f"{what}, {placement}",
                    [row.size_bytes for row, _ in there],
                    [figure.timing.median_s * 1e6 for _, figure in there],
                    [row.busbw(figure) for row, figure in there],
                )
        rivals = [(row, row.main.mpi.median_s) for row in mine if row.main.mpi is not None]
        if rivals:
            yield (
                f"{what}, mpi4py's own",
                [row.size_bytes for row, _ in rivals],
                [seconds * 1e6 for _, seconds in rivals],
                [_busbw(row, seconds) for row, seconds in rivals],
            )


def _busbw(row: Row, seconds: float) -> float:
    return row.busbw(row.main) * row.main.timing.median_s / seconds
