"""The demo's report as one picture: speed, who holds what before and after, accuracy."""

from __future__ import annotations

import io
import math
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowshard.box import Box, contains, grid, shape_of, volume
from lowshard.demo.report import DemoReport, MatrixView, write_whole
from lowshard.errors import DependencyError

_INK, _GREY, _PALE, _RED = "#22303c", "#6b7885", "#e4e8ec", "#c8453b"
_RANK_COLOURS = ("#4c78a8", "#f2a541", "#59a36a", "#c56b86", "#7c6bb0", "#4fb0ae", "#d9c148", "#9c7459")
_BAR = "#4c78a8"
_MOST_STRIPES = 4


def draw(report: DemoReport, path_png: str | os.PathLike[str]) -> None:
    """Draw the report into a PNG of 1950 x 1200 pixels; the file appears whole or not at all.

    Raises:
        DependencyError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DependencyError("the demo's picture needs matplotlib: pip install 'lowshard[plot]'") from error
    figure = Figure(figsize=(13.0, 8.0), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    _title(figure, report)
    rows = figure.add_gridspec(2, 1, height_ratios=(3.1, 1.0), left=0.02, right=0.975, top=0.85, bottom=0.075,
                               hspace=0.42)  # fmt: skip
    _draw_speed(figure.add_axes((0.165, 0.42, 0.27, 0.40)), report)
    _draw_matrices(figure, rows[0], report)
    _draw_accuracy(figure.add_axes((0.165, 0.09, 0.80, 0.17)), report)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_whole(Path(path_png), buffer.getvalue())
