"""Who holds what as a picture: PNG or SVG, by the file's ending."""

from __future__ import annotations

import io
import os
from pathlib import Path

from lowshard.errors import DependencyError, RulesError
from lowshard.flag_value import write_whole
from lowshard.rules.holding import Holding, ranks_text

_INK, _GREY = "#22303c", "#66727e"
_MOST_LABELS = 400
_FORMATS = {".png": "png", ".svg": "svg"}


def draw_holding(holding: Holding, path: str | os.PathLike[str]) -> None:
    """Draw the grid to scale, a rectangle a block with its ranks; the file appears whole or not at all.

    Raises:
        RulesError: the path ends in neither .png nor .svg.
        DependencyError: matplotlib is missing.
    """
    target = Path(path)
    form = _FORMATS.get(target.suffix.lower())
    if form is None:
        raise RulesError(f"a picture is a .png or an .svg file, got {str(path)!r}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise DependencyError("a picture needs matplotlib: pip install 'lowshard[plot]'") from error
    header = holding.header()
    height = 6.0 + 0.22 * len(header)
    figure = Figure(figsize=(10.0, height), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    top = 1.0 - (0.35 + 0.22 * len(header)) / height
    axes = figure.add_axes((0.11, 0.07, 0.86, top - 0.13))
    _lines(figure, header, height)
    cells = len(holding.row_spans) * len(holding.column_spans)
    for i, (r0, r1) in enumerate(holding.row_spans):
        for j, (c0, c1) in enumerate(holding.column_spans):
            ranks = holding.cells[i][j]
            colour = holding.colour(i, j) if ranks else "#f2f2f2"
            axes.add_patch(
                Rectangle((c0, r0), c1 - c0, r1 - r0, facecolor=colour, edgecolor="white", linewidth=0.8)
            )
            if ranks and cells <= _MOST_LABELS:
                size = max(4.5, min(11.0, 90.0 / max(len(holding.row_spans), len(holding.column_spans))))
                axes.text(
                    (c0 + c1) / 2, (r0 + r1) / 2, ranks_text(ranks, 3), ha="center", va="center",
                    fontsize=size, color=_ink_on(colour), clip_on=True,
                )  # fmt: skip
    axes.set_xlim(holding.column_spans[0][0], holding.column_spans[-1][1] or 1)
    axes.set_ylim(holding.row_spans[-1][1] or 1, holding.row_spans[0][0])
    axes.xaxis.tick_top()
    axes.set_xticks(_ticks([s[0] for s in holding.column_spans] + [holding.column_spans[-1][1]]))
    axes.set_yticks(_ticks([s[0] for s in holding.row_spans] + [holding.row_spans[-1][1]]))
    if holding.rows is None:
        axes.set_yticks([])
    if holding.columns is None:
        axes.set_xticks([])
    axes.tick_params(labelsize=8, colors=_GREY, length=2)
    figure.text(0.11, 0.025, "numbers in the blocks: the ranks that hold it", fontsize=8.5, color=_GREY)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form)
    write_whole(target, buffer.getvalue())


def _ink_on(colour: str) -> str:
    """Return white or ink, whichever reads better: luma as ITU-R BT.601 weighs it."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 150 else _INK


def _lines(figure: object, header: list[str], height: float) -> None:
    for place, line in enumerate(header):
        text = line if len(line) <= 110 else f"{line[:107]}..."
        figure.text(  # type: ignore[attr-defined]
            0.03, 1.0 - (0.32 + 0.22 * place) / height, text, fontsize=12 if place == 0 else 9.5,
            weight="bold" if place == 0 else "normal", color=_INK if place == 0 else _GREY,
        )  # fmt: skip


def _ticks(edges: list[int], most: int = 12) -> list[int]:
    step = max(1, -(-(len(edges) - 1) // most))
    kept = edges[::step]
    return kept if kept[-1] == edges[-1] else [*kept, edges[-1]]
