"""Fits the cost model to measured times: lines in pieces, knees found by search, all on logarithms of times.

Within a piece t = steps(n) * alpha + factor(n) * S * beta, both coefficients 0 or more; relative errors count, so
that a microsecond matters as much at 1 KB as a millisecond at 64 MB. For one collective the bytes moved and the
bytes summed grow together, so its data alone cannot tell beta from gamma: beta is that of the move with the same
traffic, at the same size, and gamma is what a reduction takes beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from lowshard.cost import ClusterProfile, Curve, Level, Piece, factor, steps, sums
from lowshard.errors import ProfileError

MOST_PIECES = 3
LEAST_POINTS = 3
"""Sizes that a piece has at least, where there is more than one piece."""

_NOISE = 0.01  # a fit within 1% is as good as perfect: no piece is added for less
_TURNS = 30
_TWINS = {"all_reduce": "all_gather", "reduce_scatter": "all_gather", "reduce": "broadcast"}
"""The move whose traffic a reduction has."""


@dataclass(frozen=True)
class Point:
    """One measured time.

    Attributes:
        op: the collective.
        transport: what carried it.
        level: "node" or "network".
        ranks: number of ranks.
        size_bytes: bytes of the larger of a rank's two buffers.
        seconds: time of a call.
    """

    op: str
    transport: str
    level: Level
    ranks: int
    size_bytes: int
    seconds: float


def fit_profile(points: Sequence[Point], machine: tuple[tuple[str, str], ...] = ()) -> ClusterProfile:
    """Return the profile that fits measured points: a curve for each collective, transport, level, rank count.

    Raises:
        ProfileError: there are too few points, or invalid times.
    """
    groups: dict[tuple[str, str, Level, int], list[Point]] = {}
    for point in points:
        groups.setdefault((point.op, point.transport, point.level, point.ranks), []).append(point)
    return ClusterProfile(split_sums([fit_curve(group) for group in groups.values()]), machine)


def fit_curve(points: Sequence[Point]) -> Curve:
    """Return the curve of points that differ in size alone; what a reduction sums is still part of beta.

    Raises:
        ProfileError: one size alone (of anything but a barrier), over one rank, or times that are not above 0.
    """
    points = sorted(points, key=lambda point: point.size_bytes)
    first = points[0]
    op, ranks = first.op, first.ranks
    sizes = np.array([point.size_bytes for point in points], float)
    times = np.array([point.seconds for point in points])
    if ranks < 2 or not np.all(times > 0):
        raise ProfileError(f"a fit needs 2 ranks or more and times above 0; {op} has {ranks} ranks, {times}")
    table = np.stack([np.full(sizes.size, steps(op, ranks)), factor(op, ranks) * sizes], axis=1)
    if not table[:, 1].any():  # a barrier moves nothing
        table = table[:, :1]
    elif np.unique(sizes).size < 2:
        raise ProfileError(f"a fit needs two sizes or more; {op} has only {first.size_bytes} bytes")
    logs = np.log(times)
    edges = _knees(table, logs) if table.shape[1] == 2 else (0, len(points))
    pieces = []
    for start, stop in pairwise(edges):
        found = fit_line(table[start:stop], logs[start:stop])
        error = float(np.max(np.abs(_residuals(table[start:stop], logs[start:stop], found))))
        beta = float(found[1]) if found.size > 1 else 0.0
        last = stop == len(points)
        knee = None if last else round(math.sqrt(sizes[stop - 1] * sizes[stop]))
        pieces.append(Piece(float(found[0]), beta, 0.0, knee, max(error, _NOISE)))
    return Curve(
        op, first.transport, first.level, ranks, int(sizes[0]), int(sizes[-1]), tuple(pieces)
    )  # fmt: skip


def split_sums(curves: Sequence[Curve]) -> tuple[Curve, ...]:
    """Return the curves with beta and gamma told apart where the move of the same traffic was measured too.

    Times that the curves give stay as they are.
    """
    return tuple(_split(curve, curves) for curve in curves)


def _split(curve: Curve, curves: Sequence[Curve]) -> Curve:
    twin = next(
        (c for c in curves if (c.op, c.transport, c.level, c.ranks)
         == (_TWINS.get(curve.op), curve.transport, curve.level, curve.ranks)), None,
    )  # fmt: skip
    if twin is None:
        return curve
    edges = [curve.least_bytes, *(p.below_bytes or curve.most_bytes for p in curve.pieces)]
    pieces = []
    for piece, low, high in zip(curve.pieces, edges[:-1], edges[1:], strict=True):
        moved = min(piece.beta_s_per_byte, twin.piece(math.sqrt(max(low, 1) * high)).beta_s_per_byte)
        rest = (piece.beta_s_per_byte - moved) * factor(curve.op, curve.ranks)
        gamma = rest / sums(curve.op, curve.ranks)
        pieces.append(replace(piece, beta_s_per_byte=moved, gamma_s_per_byte=gamma))
    return replace(curve, pieces=tuple(pieces))


def fit_line(table: np.ndarray, logs: np.ndarray) -> np.ndarray:
    """Return the coefficients, 0 or more, that bring log(table @ coefficients) closest to `logs`.

    Gauss and Newton's method: each turn is a least squares problem with bounds, and is halved until it helps.

    Args:
        table: [points, coefficients], 0 or more, no column of zeros.
        logs: natural logarithms of times [points].
    """
    weights = np.exp(-logs)[:, None]
    found = bounded_least_squares(table * weights, np.ones(logs.size))
    least = _loss(table, logs, found)
    for _ in range(_TURNS):
        predicted = table @ found
        target = 1.0 + logs - np.log(predicted)
        wanted = bounded_least_squares(table / predicted[:, None], target)
        part = 1.0
        while part > 1e-6:
            step = found + part * (wanted - found)
            loss = _loss(table, logs, step)
            if loss < least:
                break
            part /= 2
        else:
            break
        gain, least, found = least - loss, loss, step
        if gain < 1e-12:
            break
    return found


def bounded_least_squares(table: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return x >= 0 that minimises |table @ x - target|: of all subsets of columns the best whose x is feasible.

    Meant for a handful of columns.
    """
    columns = table.shape[1]
    best, least = np.zeros(columns), math.inf
    for subset in range(1, 1 << columns):
        chosen = [c for c in range(columns) if subset >> c & 1]
        part, *_ = np.linalg.lstsq(table[:, chosen], target, rcond=None)
        if np.any(part < 0):
            continue
        x = np.zeros(columns)
        x[chosen] = part
        loss = float(np.sum((table @ x - target) ** 2))
        if loss < least:
            best, least = x, loss
    return best


def _knees(table: np.ndarray, logs: np.ndarray) -> tuple[int, ...]:
    """Return where pieces begin and end: the best of all cuts, with as many pieces as pay for themselves."""
    points = logs.size
    cache: dict[tuple[int, int], float] = {}

    def loss(start: int, stop: int) -> float:
        if (start, stop) not in cache:
            part, log = table[start:stop], logs[start:stop]
            cache[start, stop] = _loss(part, log, fit_line(part, log))
        return cache[start, stop]

    best: tuple[int, ...] = (0, points)
    least = math.inf
    for pieces in range(1, MOST_PIECES + 1):
        for edges in _cuts(points, pieces):
            if any(np.ptp(table[a:b, 1]) == 0 for a, b in pairwise(edges)):
                continue  # one size over and over says nothing about a slope
            error = sum(loss(a, b) for a, b in pairwise(edges)) / points
            # Bayes' criterion: two coefficients and a knee a piece.
            price = points * math.log(error + _NOISE**2) + 3 * pieces * math.log(points)
            if price < least - 1e-9:
                best, least = edges, price
    return best


def _cuts(points: int, pieces: int) -> list[tuple[int, ...]]:
    """Return every way to cut points into so many pieces of `LEAST_POINTS` or more."""
    if pieces == 1:
        return [(0, points)]
    found = []
    for stop in range(LEAST_POINTS, points - LEAST_POINTS * (pieces - 1) + 1):
        found += [(0, *(stop + edge for edge in rest)) for rest in _cuts(points - stop, pieces - 1)]
    return found


def _loss(table: np.ndarray, logs: np.ndarray, found: np.ndarray) -> float:
    return float(np.sum(_residuals(table, logs, found) ** 2))


def _residuals(table: np.ndarray, logs: np.ndarray, found: np.ndarray) -> np.ndarray:
    residuals: np.ndarray = logs - np.log(np.maximum(table @ found, 1e-30))
    return residuals
