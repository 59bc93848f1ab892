"""Drawings as SVG text: who holds what of a matrix, and curves over sizes. Colours are classes of the page's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise, product

from lowshard.box import Box, contains, volume

COLOURS = 8
_WIDE, _HIGH = 420, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 40
_MOST_STRIPES = 4
_STRIPE = 9.0


@dataclass(frozen=True)
class CurveLine:
    """One curve: points (x, y), both above 0, and the number of its colour."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: int
    is_guess: bool = False


def colour_of(number: int) -> str:
    """Return the class that fills with a rank's, or a curve's, colour."""
    return f"c{number % COLOURS}"


def draw_matrix(shape: tuple[int, int], boxes: Sequence[Box], name: str) -> str:
    """Return who holds which part of a matrix: a colour a rank, stripes for copies.

    Args:
        shape: (rows, columns).
        boxes: of each rank, in coordinates of the matrix.
        name: says in words what is drawn, for who does not see it.
    """
    wide, high = 400.0, min(400.0, max(110.0, 400.0 * shape[0] / max(1, shape[1])))
    across, down = wide / max(1, shape[1]), high / max(1, shape[0])
    cuts = [sorted({edge for box in boxes for edge in box[dim]} | {0, shape[dim]}) for dim in (0, 1)]
    pieces = [_open(wide, high, name)]
    for cell in product(*map(pairwise, cuts)):
        (r0, r1), (c0, c1) = cell
        owners = [rank for rank, box in enumerate(boxes) if volume(box) and contains(box, cell)]
        x, y, w, h = c0 * across, r0 * down, (c1 - c0) * across, (r1 - r0) * down
        pieces.append(_cell(x, y, w, h, owners))
        label = _owners_text(owners, len(boxes))
        if h >= 28 and w >= 11 * len(label) + 14:
            middle_x, middle_y = x + w / 2, y + h / 2
            half = 5.5 * len(label) + 7
            pieces.append(
                f'<rect class="plate" x="{middle_x - half:.1f}" y="{middle_y - 13:.1f}" width="{2 * half:g}" '
                f'height="26" rx="4"/><text class="owner" x="{middle_x:.1f}" y="{middle_y + 6:.1f}" '
                f'text-anchor="middle">{label}</text>'
            )
    return "".join([*pieces, "</svg>"])


def draw_curves(curves: Sequence[CurveLine], across: str, up: str) -> str:
    """Return curves with both axes logarithmic.

    Args:
        curves: the curves; a guess is dashed and has no dots.
        across: what the x axis counts: bytes.
        up: what the y axis measures.
    """
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    if not xs:
        return ""
    x0, x1 = math.log2(min(xs)), math.log2(max(xs))
    y0, y1 = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))
    x1, y1 = max(x1, x0 + 1), max(y1, y0 + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        part_x, part_y = (math.log2(x) - x0) / (x1 - x0), (math.log10(y) - y0) / (y1 - y0)
        return (
            _LEFT + part_x * (_WIDE - _LEFT - _RIGHT),
            _HIGH - _BOTTOM - part_y * (_HIGH - _TOP - _BOTTOM),
        )

    pieces = [_open(_WIDE, _HIGH, f"{up} over {across}")]
    for power in range(y0, y1 + 1):
        _, y = place(2.0**x0, 10.0**power)
        pieces.append(f'<path class="axis" d="M{_LEFT} {y:.1f}H{_WIDE - _RIGHT}"/>')
        pieces.append(
            f'<text class="soft" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
        )
    step = max(1, math.ceil((x1 - x0) / 5))
    for power in range(math.ceil(x0), math.floor(x1) + 1, step):
        x, _ = place(2.0**power, 10.0**y0)
        anchor = "end" if x > _WIDE - 30 else "middle"
        pieces.append(
            f'<text class="soft" x="{x:.1f}" y="{_HIGH - _BOTTOM + 16}" text-anchor="{anchor}">{_size(power)}</text>'
        )
    middle = (_LEFT + _WIDE - _RIGHT) / 2
    pieces.append(
        f'<text class="soft" x="{middle:.1f}" y="{_HIGH - 6}" text-anchor="middle">{escape(across)}</text>'
    )
    for curve in curves:
        at = [place(x, y) for x, y in curve.points]
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
        guess = " guess" if curve.is_guess else ""
        pieces.append(f'<path class="curve l{curve.colour % COLOURS}{guess}" d="M{line}"/>')
        if not curve.is_guess:
            pieces += [
                f'<circle class="{colour_of(curve.colour)}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in at
            ]
    return "".join([*pieces, "</svg>"])


def _open(wide: float, high: float, name: str) -> str:
    return f'<svg viewBox="0 0 {wide:g} {high:g}" role="img" aria-label="{escape(name)}">'


def _cell(x: float, y: float, w: float, h: float, owners: Sequence[int]) -> str:
    frame = f'x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"'
    if not owners:
        return ""
    if len(owners) == 1:
        return f'<rect class="edge {colour_of(owners[0])}" {frame}/>'
    # Copies: vertical stripes in the colours of those that hold them.
    shown = owners[:_MOST_STRIPES]
    stripes = []
    for i in range(max(len(shown), int(w / _STRIPE) // len(shown) * len(shown))):
        left = i * _STRIPE
        if left < w:
            wide = min(_STRIPE, w - left)
            stripes.append(
                f'<rect class="{colour_of(shown[i % len(shown)])}" x="{x + left:.1f}" y="{y:.1f}" width="{wide:.1f}" '
                f'height="{h:.1f}"/>'
            )
    covered = len(stripes) * _STRIPE
    if covered < w:
        stripes.append(
            f'<rect class="{colour_of(shown[len(stripes) % len(shown)])}" x="{x + covered:.1f}" y="{y:.1f}" '
            f'width="{w - covered:.1f}" height="{h:.1f}"/>'
        )
    return "".join(stripes) + f'<rect class="edge" fill="none" {frame}/>'


def _owners_text(owners: Sequence[int], ranks: int) -> str:
    if len(owners) == ranks > 1:
        return "all"
    return ", ".join(map(str, owners)) if len(owners) <= 4 else f"{len(owners)} ranks"


def _size(power: int) -> str:
    for unit, least in (("G", 30), ("M", 20), ("K", 10)):
        if power >= least:
            return f"{2 ** (power - least)}{unit}"
    return f"{2**power}"
