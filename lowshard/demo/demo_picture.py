"""The demo's report as one picture: who holds what before and after, and accuracy."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from lowshard.box import Box, contains, volume
from lowshard.command_line import write_whole
from lowshard.demo.demo_report import accuracy_text
from lowshard.errors import DependencyError

_INK, _GREY, _PALE, _RED, _GREEN = "#22303c", "#66727e", "#e6eaee", "#c8453b", "#3f8f55"
_RANK_COLOURS = ("#4c78a8", "#f2a541", "#59a36a", "#c56b86", "#7c6bb0", "#4fb0ae", "#d9c148", "#9c7459")
_INCHES = (6.8, 6.4)
"""Narrow: 9.5 points can be read where the picture is shown 400 pixels wide."""
_BANDS = 12


def require_matplotlib() -> None:
    """Check that a picture can be drawn, before the work that it is to show."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise DependencyError(
            "the demo's picture needs matplotlib: pip install 'lowshard[plot]', or run with --no-picture"
        ) from error


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Draw the report into a PNG of 1360 x 1280 pixels; the file appears whole or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, dpi=200, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.025, 0.94, "lowshard demo", fontsize=18, weight="bold", color=_INK)
    ranks = report["world_size"]
    size = f"{report['checkpoint_bytes'] / 1e6:.1f} MB on {ranks} rank{'s' * (ranks != 1)}"
    lines = f"{report['checkpoint']}, {size}", f"training: {report['before']}", f"serving: {report['after']}"
    figure.text(0.025, 0.92, "\n".join(lines), fontsize=9.5, color=_GREY, va="top", linespacing=1.35)
    verdict, colour = ("every check holds", _GREEN) if report["ok"] else ("a check FAILED", _RED)
    figure.text(
        0.965, 0.945, verdict, fontsize=12, weight="bold", color="white", ha="right",
        bbox={"boxstyle": "round,pad=0.45", "facecolor": colour, "edgecolor": "none"},
    )  # fmt: skip
    if report["matrices"]:
        _heading(figure, 0.785, "Who holds what", "training layout, and the serving layout it moves to")
    for i, matrix in enumerate(report["matrices"]):
        y = 0.545 - i * 0.22
        for x, when in ((0.06, "before"), (0.55, "after")):
            axes = _axes(figure, (x, y, 0.42, 0.15))
            _draw_matrix(axes, matrix["shape"], matrix[when], ranks)
            label = "training" if when == "before" else "serving"
            axes.set_xlabel(label, fontsize=9, color=_GREY, labelpad=3)
        name = f"{matrix['name'][-60:]}, {' x '.join(map(str, matrix['shape']))}"
        figure.text(0.06, y + 0.16, name, fontsize=9.5, color=_INK, family="monospace")
    what = "distance from the unsharded fp32 model in one process (log scale); red: the bound"
    _heading(figure, 0.225, "Accuracy", what)
    _draw_accuracy(_axes(figure, (0.21, 0.07, 0.38, 0.11)), report)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_whole(path, buffer.getvalue())


def _heading(figure: Any, y: float, title: str, subtitle: str) -> None:
    figure.text(0.025, y, title, fontsize=13, weight="bold", color=_INK)
    figure.text(0.025, y - 0.028, subtitle, fontsize=9.5, color=_GREY)


def _axes(figure: Any, place: tuple[float, float, float, float]) -> Any:
    axes = figure.add_axes(place)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, labelsize=9.5, colors=_GREY)
    return axes


def _draw_matrix(axes: Any, shape: Sequence[int], given: Sequence[Any], ranks: int) -> None:
    from matplotlib.patches import Rectangle

    boxes: list[Box] = [tuple((start, stop) for start, stop in box) for box in given]
    axes.set(xlim=(0, shape[1]), ylim=(shape[0], 0), xticks=[], yticks=[])
    cuts = [sorted({edge for box in boxes for edge in box[dim]} | {0, shape[dim]}) for dim in (0, 1)]
    for cell in product(*map(pairwise, cuts)):
        (top, bottom), (left, right) = cell
        owners = [rank for rank, box in enumerate(boxes) if volume(box) and contains(box, cell)]
        wide = (right - left) / _BANDS  # copies show as bands in the colours of their holders
        for band in range(_BANDS):
            colour = _RANK_COLOURS[owners[band % len(owners)] % len(_RANK_COLOURS)] if owners else _PALE
            axes.add_patch(Rectangle((left + band * wide, top), wide, bottom - top, facecolor=colour))
        frame = Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor="white", linewidth=2)
        axes.add_patch(frame)
        if (bottom - top) / shape[0] < 0.09 or (right - left) / shape[1] < 0.06:
            continue  # no room for a label; the colour says it
        text = "all" if len(owners) == ranks > 1 else ", ".join(map(str, owners))
        axes.text(
            (left + right) / 2, (top + bottom) / 2, text if len(text) < 12 else f"{len(owners)} ranks", weight="bold",
            fontsize=8, color=_INK, ha="center", va="center",
            bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.92},
        )  # fmt: skip


def _draw_accuracy(axes: Any, report: Mapping[str, Any]) -> None:
    figures = report["accuracy"]
    if not figures:
        axes.set_axis_off()
    for y, figure in enumerate(figures):
        exact = figure["kind"] == "max_difference"
        ends = [math.nan if value is None else value for value in (figure["measured"], figure["bound"])]
        # An exact result goes to the left end; no number, which fails its check, to the right one.
        at, bound = (
            min(max(value if exact else 1 - value, 1e-9), 1.0) if value == value else 1.0 for value in ends
        )
        axes.plot([1e-9, at], [y, y], color=_GREEN if figure["ok"] else _RED, linewidth=2.2)
        axes.plot([at], [y], marker="o", markersize=8, color=_GREEN if figure["ok"] else _RED)
        axes.plot([bound, bound], [y - 0.3, y + 0.3], color=_RED, linewidth=2.2)
        axes.text(
            1.03, y, accuracy_text(figure), transform=axes.get_yaxis_transform(), va="center", fontsize=9, color=_INK
        )  # fmt: skip
    axes.set(xscale="log", xlim=(1e-9, 2.0), ylim=(len(figures) - 0.4, -0.6))
    axes.set_yticks(range(len(figures)), [figure["label"] for figure in figures])
    axes.set_xticks([1e-8, 1e-6, 1e-4, 1e-2, 1])
    axes.minorticks_off()
    axes.grid(axis="x", color=_PALE)
    axes.set_axisbelow(True)
    axes.figure.text(0.025, 0.012, report["accuracy_note"], fontsize=8.5, color=_GREY, wrap=True)
