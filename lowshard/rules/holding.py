"""Who holds what: two dims of a tensor as a grid of cells, each with the ranks that hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lowshard.argument import quoted
from lowshard.box import Interval
from lowshard.errors import RulesError
from lowshard.layout import Layout
from lowshard.rules.resolution import entry_axes

if TYPE_CHECKING:
    from rich.table import Table

COLOURS = (
    "#4c78a8", "#f2a541", "#59a36a", "#c56b86", "#7c6bb0", "#4fb0ae", "#d9c148", "#9c7459", "#8fb8de",
    "#b35c1e", "#2f6f4f", "#8a3b52",
)  # fmt: skip
"""Colours of cells; neighbours differ."""


@dataclass(frozen=True)
class Holding:
    """A tensor's blocks over two dims; the other dims stand at one index each."""

    title: str
    layout: Layout
    rows: int | None
    """The dim that runs down; None for a tensor of less than two dims."""
    columns: int | None
    at: tuple[tuple[int, int], ...]
    """(dim, index) of every other dim."""
    row_spans: tuple[Interval, ...]
    column_spans: tuple[Interval, ...]
    cells: tuple[tuple[tuple[int, ...], ...], ...]
    """[row][column]: the ranks that hold the cell, ascending."""

    def dim_text(self, dim: int | None) -> str:
        """Return what a dim is and which axes cut it, those of size 1 left out."""
        if dim is None:
            return "-"
        mesh = self.layout.mesh
        axes = [
            f"{a}={mesh.axis_size(a)}" for a in entry_axes(self.layout.spec[dim]) if mesh.axis_size(a) > 1
        ]
        cut = f"cut by {' x '.join(axes)}" if axes else "whole"
        return f"dim {dim} of {self.layout.shape[dim]}: {cut}"

    @property
    def mesh_text(self) -> str:
        """The mesh without axes of size 1."""
        mesh = self.layout.mesh
        sizes = [f"{a}={n}" for a, n in zip(mesh.axis_names, mesh.shape, strict=True) if n > 1]
        return " ".join(sizes) or "one device"

    def colour(self, row: int, column: int) -> str:
        """Return the colour of a cell."""
        return COLOURS[(5 * row + column) % len(COLOURS)]

    def header(self) -> list[str]:
        """Return the lines above the grid."""
        lines = [self.title, f"mesh {self.mesh_text}; {self.layout.dtype}{list(self.layout.shape)}"]
        if self.rows is not None:
            lines.append(f"down: {self.dim_text(self.rows)}")
        if self.columns is not None:
            lines.append(f"across: {self.dim_text(self.columns)}")
        lines.extend(f"at index {i}: {self.dim_text(d)}" for d, i in self.at)
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "title": self.title,
            "layout": self.layout.to_json() | {"mesh": None},
            "mesh": dict(zip(self.layout.mesh.axis_names, self.layout.mesh.shape, strict=True)),
            "rows_dim": self.rows,
            "columns_dim": self.columns,
            "at": {str(d): i for d, i in self.at},
            "row_spans": [list(s) for s in self.row_spans],
            "column_spans": [list(s) for s in self.column_spans],
            "cells": [[list(ranks) for ranks in row] for row in self.cells],
        }


def find_holding(
    layout: Layout,
    title: str = "",
    dims: tuple[int, int] | None = None,
    at: Mapping[int, int] | None = None,
    rank: int | None = None,
) -> Holding:
    """Return who holds which cell of two dims of a tensor.

    Args:
        layout: the tensor's layout.
        title: what to call it.
        dims: (down, across); None takes the two that are cut into most parts, the last of equals.
        at: index of each other dim; 0 where it is not given.
        rank: show the slice that this rank holds: the other dims stand where its part starts.

    Raises:
        RulesError: dims the tensor lacks, one dim twice, an index beyond its dim.
        MeshError: a rank the mesh lacks.
    """
    ndim = layout.ndim
    rows, columns = _two_dims(layout, dims)
    place = dict.fromkeys((d for d in range(ndim) if d not in (rows, columns)), 0)
    if rank is not None:
        box = layout.box(rank)
        place = {d: min(box[d][0], max(layout.shape[d] - 1, 0)) for d in place}
    for dim, index in (at or {}).items():
        if dim not in place or not 0 <= index < max(layout.shape[dim], 1):
            raise RulesError(
                f"index {index} of dim {dim} is none of the dims that stand still: shape {list(layout.shape)}"
            )
        place[dim] = index
    held: dict[tuple[Interval, Interval], list[int]] = {}
    for holder in sorted(layout.mesh.ranks):
        box = layout.box(holder)
        if all(box[d][0] <= i < box[d][1] for d, i in place.items() if layout.shape[d]):
            key = ((0, 1) if rows is None else box[rows], (0, 1) if columns is None else box[columns])
            held.setdefault(key, []).append(holder)
    row_spans = tuple(sorted({r for r, _ in held}))
    column_spans = tuple(sorted({c for _, c in held}))
    cells = tuple(tuple(tuple(held.get((r, c), ())) for c in column_spans) for r in row_spans)
    return Holding(title, layout, rows, columns, tuple(place.items()), row_spans, column_spans, cells)


def _two_dims(layout: Layout, dims: tuple[int, int] | None) -> tuple[int | None, int | None]:
    """Return the dims that run down and across; None where the tensor has too few."""
    ndim = layout.ndim
    if dims is not None:
        if len({d % ndim for d in dims if -ndim <= d < ndim}) != 2:
            raise RulesError(f"two different dims of {ndim} are shown, got {quoted(dims)}")
        return dims[0] % ndim, dims[1] % ndim
    parts = [layout.mesh.axis_size(entry_axes(e)) for e in layout.spec]
    chosen = sorted(sorted(range(ndim), key=lambda d: (parts[d], layout.shape[d] > 1, d))[-2:])
    if ndim < 2:
        return None, (0 if ndim else None)
    return chosen[0], chosen[1]


def ranks_text(ranks: Sequence[int], most: int = 6) -> str:
    """Return ranks as `0-3,8`, or with steps as `0-12:4`; long lists are cut with their number."""
    if not ranks:
        return "-"
    steps = {b - a for a, b in pairwise(ranks)}
    if len(ranks) > 2 and len(steps) == 1:
        step = steps.pop()
        return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    if len(texts) > most:
        return f"{','.join(texts[:most])},... ({len(ranks)})"
    return ",".join(texts)


def holding_table(holding: Holding, most: int = 32) -> Table:
    """Return the grid as a rich table: a cell a block, coloured, with the ranks that hold it.

    most: rows, and columns, beyond which the middle is left out.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows, columns = _shown(len(holding.row_spans), most), _shown(len(holding.column_spans), most)
    table = Table(box=box.SIMPLE, padding=(0, 0), pad_edge=False, show_edge=False)
    table.add_column("", no_wrap=True)
    for column in columns:
        label = (
            "..."
            if column is None
            else _span(holding.column_spans[column])
            if holding.columns is not None
            else ""
        )
        table.add_column(label, justify="center", no_wrap=True)
    for row in rows:
        label = "..." if row is None else _span(holding.row_spans[row]) if holding.rows is not None else ""
        line: list[Text] = [Text(f"{label} ")]
        for column in columns:
            if row is None or column is None:
                line.append(Text("..."))
                continue
            ranks = holding.cells[row][column]
            style = f"black on {holding.colour(row, column)}" if ranks else "dim"
            line.append(Text(f" {ranks_text(ranks)} ", style=style))
        table.add_row(*line)
    return table


def _shown(count: int, most: int) -> list[int | None]:
    """Return the indices that are shown; None stands for those left out."""
    if count <= most:
        return list(range(count))
    half = most // 2
    return [*range(half), None, *range(count - half, count)]


def _span(span: Interval) -> str:
    return f"{span[0]}:{span[1]}"
