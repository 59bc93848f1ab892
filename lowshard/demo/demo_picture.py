"""The demo's report as one picture: speed, who holds what before and after, accuracy."""

from __future__ import annotations

import io
import math
import os
import textwrap
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from lowshard.box import Box, contains, volume
from lowshard.demo.demo_report import Accuracy, DemoReport, MatrixView, PhaseRow, speed_text
from lowshard.errors import DependencyError
from lowshard.flag_value import write_whole

_INK, _GREY, _PALE, _RED = "#22303c", "#66727e", "#e6eaee", "#c8453b"
_RANK_COLOURS = ("#4c78a8", "#f2a541", "#59a36a", "#c56b86", "#7c6bb0", "#4fb0ae", "#d9c148", "#9c7459")
_MOST_STRIPES = 4
_INCHES = (6.8, 9.6)
"""Upright and narrow: 9.5 points can be read where the picture is shown 400 pixels wide."""
_LINE_CHARACTERS = 96

# Left, bottom, width, height in parts of the figure.
_SPEED = (0.305, 0.625, 0.665, 0.18)
_MATRICES = (0.06, 0.285, 0.915, 0.245)
_ACCURACY = (0.21, 0.09, 0.38, 0.1)


def require_matplotlib() -> None:
    """Check that a picture can be drawn, before the work that it is to show.

    Raises:
        DependencyError: matplotlib is missing.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise DependencyError(
            "the demo's picture needs matplotlib: pip install 'lowshard[plot]', or run with --no-picture"
        ) from error


def draw(report: DemoReport, path_png: str | os.PathLike[str]) -> None:
    """Draw the report into a PNG of 1360 x 1920 pixels; the file appears whole or not at all.

    Raises:
        DependencyError: matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, dpi=200, facecolor="white")
    FigureCanvasAgg(figure)
    _draw_title(figure, report)
    _heading(figure, 0.84, "Speed", "GB/s a rank; in brackets the time as a multiple of a memcpy's")
    _draw_speed(_axes(figure, _SPEED), report)
    if report.matrices:
        _heading(figure, 0.58, "Who holds what", "training layout, and the serving layout it moves to")
        _draw_matrices(figure, report.matrices[:2], report.world_size)
    what = "distance from the unsharded fp32 model in one process (log scale); red: beyond the bound"
    _heading(figure, 0.235, "Accuracy", what)
    _draw_accuracy(_axes(figure, _ACCURACY), report)
    facts = textwrap.shorten(
        "; ".join(f"{name} {value}" for name, value in report.environment), 190, placeholder=" ..."
    )
    figure.text(0.025, 0.01, textwrap.fill(facts, _LINE_CHARACTERS), fontsize=8.5, color=_GREY)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_whole(Path(path_png), buffer.getvalue())


def _draw_title(figure: Any, report: DemoReport) -> None:
    figure.text(0.025, 0.958, "lowshard demo", fontsize=18, weight="bold", color=_INK)
    size = (
        f"{report.checkpoint_bytes / 1e6:.1f} MB on {report.world_size} rank{'s' * (report.world_size != 1)}"
    )
    lines = (f"{report.checkpoint}, {size}", f"training: {report.before}", f"serving: {report.after}")
    shown = "\n".join(_shortened(line, _LINE_CHARACTERS) for line in lines)
    figure.text(0.025, 0.946, shown, fontsize=9.5, color=_GREY, va="top", linespacing=1.35)
    verdict, colour = ("every check holds", "#3f8f55") if report.ok else ("a check FAILED", _RED)
    figure.text(
        0.965, 0.961, verdict, fontsize=12, weight="bold", color="white", ha="right",
        bbox={"boxstyle": "round,pad=0.45", "facecolor": colour, "edgecolor": "none"},
    )  # fmt: skip


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _heading(figure: Any, y: float, title: str, subtitle: str) -> None:
    figure.text(0.025, y, title, fontsize=13, weight="bold", color=_INK)
    figure.text(0.025, y - 0.02, subtitle, fontsize=9.5, color=_GREY)


def _axes(figure: Any, place: tuple[float, float, float, float]) -> Any:
    axes = figure.add_axes(place)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, labelsize=9.5, colors=_GREY)
    return axes


def _draw_speed(axes: Any, report: DemoReport) -> None:
    rows: list[tuple[PhaseRow, float]] = [(r, r.gb_per_s) for r in report.rows if r.gb_per_s is not None]
    if not rows:
        axes.set_axis_off()
        axes.text(0.0, 0.9, "no phase moved bytes", fontsize=10, color=_GREY)
        return
    memcpy = report.memcpy_gb_per_s
    top = max([speed for _, speed in rows] + ([] if memcpy is None else [memcpy])) or 1.0
    thickness = min(0.62, 0.11 * len(rows))
    for y, (row, speed) in enumerate(rows):
        axes.barh(y, speed, height=thickness, color=_RANK_COLOURS[0] if row.ok else _RED, zorder=2)
        ratio = "" if row.memcpy_ratio is None else f"  ({row.memcpy_ratio:.1f}x)"
        # White behind the number, so that it can be read where it crosses the memcpy line.
        axes.text(
            speed + top * 0.02, y, f"{speed_text(speed)}{ratio}", va="center", fontsize=9.5, color=_INK, zorder=4,
            bbox={"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none"},
        )  # fmt: skip
    if memcpy is not None:
        axes.axvline(memcpy, color=_INK, linewidth=1.3, linestyle=(0, (4, 3)), zorder=3)
        right = memcpy > 0.6 * top
        axes.text(
            memcpy + (-0.015 if right else 0.015) * top, -0.72, f"memcpy {memcpy:.2f}", fontsize=9.5, color=_INK,
            ha="right" if right else "left", va="center",
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), ["\n".join(textwrap.wrap(row.phase, 27)) for row, _ in rows])
    axes.tick_params(axis="y", labelcolor=_INK, pad=6)
    axes.set_ylim(len(rows) - 0.45, -1.0)
    axes.set_xlim(0, top * 1.28)
    axes.grid(axis="x", color=_PALE, zorder=0)
    axes.set_axisbelow(True)


def _draw_matrices(figure: Any, views: Sequence[MatrixView], world_size: int) -> None:
    left, bottom, width, height = _MATRICES
    gap_x, gap_y = 0.08, 0.06
    cell_w, cell_h = (width - gap_x) / 2, (height - gap_y) / 2
    for i, view in enumerate(views):
        y = bottom + height - cell_h - i * (cell_h + gap_y)
        for j, (boxes, when) in enumerate(((view.before, "training"), (view.after, "serving"))):
            axes = _axes(figure, (left + j * (cell_w + gap_x), y, cell_w, cell_h))
            _draw_matrix(axes, view, boxes, world_size)
            if j == 0:
                axes.set_ylabel(f"{view.shape[0]} out", fontsize=9, color=_GREY, labelpad=3)
            axes.set_xlabel(f"{view.shape[1]} in  ({when})", fontsize=9, color=_GREY, labelpad=3)
        name = view.name if len(view.name) <= 48 else f"...{view.name[-45:]}"
        figure.text(left, y + cell_h + 0.006, name, fontsize=9.5, color=_INK, family="monospace")
        if view.head_dim is not None:
            heads = f"{view.num_heads} heads (thin lines)"
            figure.text(left + width, y + cell_h + 0.006, heads, fontsize=9, color=_GREY, ha="right")
        figure.text(
            left + cell_w + gap_x / 2, y + cell_h / 2, "→", fontsize=20, color=_GREY, ha="center", va="center"
        )


def _draw_matrix(axes: Any, view: MatrixView, boxes: Sequence[Box], world_size: int) -> None:
    n_rows, n_cols = view.shape
    axes.set_xlim(0, n_cols)
    axes.set_ylim(n_rows, 0)
    axes.set_xticks([])
    axes.set_yticks([])
    cuts = [sorted({edge for box in boxes for edge in box[dim]} | {0, view.shape[dim]}) for dim in (0, 1)]
    for cell in product(*map(pairwise, cuts)):
        owners = [rank for rank, box in enumerate(boxes) if volume(box) and contains(box, cell)]
        _draw_cell(axes, cell, view.shape, owners, world_size)
    if view.head_dim is not None and view.num_heads > 1:
        line = axes.axhline if view.head_dim == 0 else axes.axvline
        for head in range(1, view.num_heads):
            line(view.shape[view.head_dim] * head / view.num_heads, color="white", linewidth=0.6, alpha=0.55)


def _draw_cell(axes: Any, cell: Box, shape: tuple[int, int], owners: Sequence[int], world_size: int) -> None:
    from matplotlib.patches import Polygon, Rectangle

    (r0, r1), (c0, c1) = cell
    frame = Rectangle((c0, r0), c1 - c0, r1 - r0, facecolor=_PALE, linewidth=0.0, zorder=1)
    axes.add_patch(frame)
    if not owners:
        return
    # Copies show as diagonal stripes in the colours of their holders.
    striped = owners[:_MOST_STRIPES]
    period = shape[1] / 9.0
    slope = shape[1] / shape[0] * 0.55
    band = period / len(striped)
    x = -shape[1] * 0.55 - period
    stripe = 0
    while x < shape[1] + period:
        colour = _RANK_COLOURS[striped[stripe % len(striped)] % len(_RANK_COLOURS)]
        lean = slope * shape[0]
        patch = Polygon([(x, shape[0]), (x + band, shape[0]), (x + band + lean, 0), (x + lean, 0)],
                        facecolor=colour, edgecolor=colour, linewidth=0.4, zorder=1)  # fmt: skip
        axes.add_patch(patch)
        patch.set_clip_path(frame)
        x, stripe = x + band, stripe + 1
    axes.add_patch(
        Rectangle((c0, r0), c1 - c0, r1 - r0, fill=False, edgecolor="white", linewidth=2.0, zorder=3)
    )
    share_high, share_wide = (r1 - r0) / shape[0], (c1 - c0) / shape[1]
    if share_high < 0.09 or share_wide < 0.06:
        return  # no room for a label; the colour says it
    size, pad = (9, 0.25) if share_high > 0.18 else (7, 0.1)
    axes.text(
        (c0 + c1) / 2,
        (r0 + r1) / 2,
        _owner_label(owners, world_size, share_wide),
        weight="bold",
        fontsize=size,
        color=_INK,
        ha="center",
        va="center",
        zorder=5,
        bbox={"boxstyle": f"round,pad={pad}", "facecolor": "white", "edgecolor": "none", "alpha": 0.92},
    )


def _owner_label(owners: Sequence[int], world_size: int, share_wide: float) -> str:
    if len(owners) == world_size > 1:
        return "all" if share_wide < 0.3 else "all ranks"
    text = ", ".join(map(str, owners))
    if len(text) > 28 * share_wide:
        return f"{len(owners)} x" if len(owners) > 1 else text
    if share_wide < 0.45:
        return text
    return f"rank{'s' * (len(owners) > 1)} {text}"


def _draw_accuracy(axes: Any, report: DemoReport) -> None:
    note = textwrap.shorten(report.accuracy_note or "", _LINE_CHARACTERS, placeholder=" ...")
    if not report.accuracy:
        axes.set_axis_off()
        axes.text(
            0.0, 0.75, note or "no forward in this run", fontsize=10, color=_GREY, transform=axes.transAxes
        )
        return
    figures = report.accuracy
    smallest = min(_on_log(value) for f in figures for value in (f.error, f.error_bound))
    largest = max(_on_log(value) for f in figures for value in (f.error, f.error_bound))
    low, high = 10.0 ** (math.floor(smallest) - 0.15), 10.0 ** (math.ceil(largest) + 0.4)
    for y, figure in enumerate(figures):
        at, bound = (10.0 ** _on_log(value) for value in (figure.error, figure.error_bound))
        colour = "#3f8f55" if figure.ok else _RED
        axes.barh(y, high - bound, left=bound, height=0.56, color="#f6dedb", zorder=1)
        axes.plot([low, at], [y, y], color=colour, linewidth=2.2, solid_capstyle="butt", zorder=3)
        axes.plot([at], [y], marker="o", markersize=8, color=colour, zorder=4)
        axes.plot([bound, bound], [y - 0.3, y + 0.3], color=_RED, linewidth=2.2, zorder=3)
        axes.text(
            1.025,
            y,
            _figure_text(figure),
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=9,
            color=_INK,
        )
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(len(figures) - 0.4, -0.6)
    axes.set_yticks(range(len(figures)), [textwrap.shorten(f.label, 26, placeholder=" ...") for f in figures])
    axes.tick_params(axis="y", labelcolor=_INK, pad=6)
    axes.minorticks_off()
    axes.grid(axis="x", color=_PALE, zorder=0)
    axes.set_axisbelow(True)
    axes.figure.text(0.025, 0.042, note, fontsize=9, color=_GREY)


def _on_log(error: float) -> float:
    """Return log10 of an error; exact results (and NaN, which fails its check anyway) go to the ends."""
    if math.isnan(error):
        return 0.0
    return math.log10(min(max(error, 1e-9), 10.0))


def _figure_text(figure: Accuracy) -> str:
    if figure.kind == "max_difference":
        return f"max difference {figure.measured:.1e}, at most {figure.bound:.0e}"
    return f"lowest cosine {figure.measured:.5f}, at least {figure.bound:g}"
