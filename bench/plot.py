"""`--plot`: times over sizes or ranks where rows have any, else each row's ratio with its quartiles and its limit."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lowshard.bench.bench_report import Report, Row
from lowshard.errors import DependencyError, LowshardError

_SUFFIXES = (".png", ".svg", ".pdf")
_COLOURS = ("#4c78a8", "#f2a541", "#59a36a", "#c56b86", "#7c6bb0", "#4fb0ae", "#d9c148", "#9c7459")
_INCHES_A_LINE = 0.22


def require_plot(path: Path) -> None:
    """Check that a picture can be drawn there, before the measurement that it is to show."""
    if path.suffix not in _SUFFIXES:
        raise LowshardError(f"--plot takes a file that ends in {', '.join(_SUFFIXES)}, got {path.name!r}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise DependencyError("--plot needs matplotlib: pip install 'lowshard[plot]'") from error


def draw(report: Report, path: Path) -> None:
    """Draw a report."""
    require_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = lines_of(report.rows)
    bars = [row for row in report.rows if row.beside]
    height = max(4.6, _INCHES_A_LINE * (len(lines) or len(bars)))
    picture = Figure(figsize=(12.0, height), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(picture)
    picture.suptitle(f"lowshard bench {report.bench}")
    if lines:
        _draw_lines(picture, lines, "ranks" if report.bench == "plan" else "size")
    else:
        _draw_bars(picture, bars or list(report.rows))
    out = io.BytesIO()
    picture.savefig(out, format=path.suffix[1:])
    path.write_bytes(out.getvalue())


def lines_of(rows: Sequence[Row]) -> dict[str, list[tuple[int, float, float]]]:
    """Return the lines: by series (x, seconds, bus bandwidth in GB/s); of a rival one more. None without series."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    for row in rows:
        series, at = row.facts.get("series"), row.facts.get("at")
        if series is None or not at or row.facts.get("cycle"):
            continue
        busbw = row.facts.get("busbw_gb_per_s") or 0.0
        found.setdefault(series, []).append((at, row.median_s, busbw))
        rival = row.beside.get("mpi")
        if rival is not None:
            seconds = rival.timing.median_s
            found.setdefault(f"{series}, mpi4py", []).append((at, seconds, busbw * row.median_s / seconds))
    return found


def size_text(size_bytes: float) -> str:
    """Return a size as people read it: 64 KiB."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 1 << power:
            return f"{size_bytes / (1 << power):g} {unit}"
    return f"{size_bytes:g} B"


def time_text(seconds: float) -> str:
    """Return a time as people read it: 250 us."""
    for least, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= least * 0.9999:
            return f"{seconds / least:g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _draw_lines(picture: Any, lines: Mapping[str, list[tuple[int, float, float]]], what: str) -> None:
    has_busbw = any(busbw for line in lines.values() for _, _, busbw in line)
    panels = picture.subplots(1, 1 + has_busbw, squeeze=False)[0]
    for number, (name, line) in enumerate(lines.items()):
        line = sorted(line)
        at = [x for x, _, _ in line]
        style: dict[str, Any] = {"color": _COLOURS[number % len(_COLOURS)], "marker": "o", "markersize": 3}
        panels[0].plot(at, [seconds for _, seconds, _ in line], label=name, **style)
        if has_busbw:
            panels[1].plot(at, [busbw for _, _, busbw in line], label=name, **style)
    for axes, label in zip(panels, ("time of a call", "bus bandwidth, GB/s"), strict=False):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda x, _: size_text(x) if what == "size" else f"{x:g}")
        axes.set_xlabel(what)
        axes.set_ylabel(label)
        axes.tick_params(axis="x", labelrotation=30)
        axes.grid(visible=True, which="both", alpha=0.25)
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axes.yaxis.set_minor_formatter(lambda y, _: "")
    panels[0].yaxis.set_major_formatter(lambda y, _: time_text(y))
    picture.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)


def _draw_bars(picture: Any, rows: Sequence[Row]) -> None:
    """Draw the first ratio of each row, its quartiles and its limit; times where nothing stands beside."""
    axes = picture.subplots()
    places = list(range(len(rows)))[::-1]
    name = next((next(iter(row.beside)) for row in rows if row.beside), None)
    for place, row in zip(places, rows, strict=True):
        if name is None or name not in row.beside:
            axes.barh(place, row.median_s, color=_COLOURS[0], height=0.6)
            continue
        spread = row.ratio(name)
        reach = [[spread.median - spread.low], [spread.high - spread.median]]
        axes.barh(place, spread.median, xerr=reach, color=_COLOURS[0], height=0.6, ecolor="#444444")
        for limit in row.limits:
            if limit.figure == f"x {name}":
                axes.plot([limit.bound] * 2, [place - 0.4, place + 0.4], color=_COLOURS[3], linewidth=2)
    axes.set_yticks(places, [row.name for row in rows], fontsize=8)
    if name is None:
        axes.set_xlabel("time")
        axes.xaxis.set_major_formatter(lambda x, _: time_text(x) if x else "0")
    else:
        axes.axvline(1.0, color="#444444", linewidth=0.8, linestyle="--")
        axes.set_xlabel(f"time as a multiple of {name}'s, with quartiles and limits")
    axes.grid(visible=True, axis="x", alpha=0.25)
