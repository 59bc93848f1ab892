"""Memory budgets on whole graphs: prices a byte at each step, moved until plans fit; the least that any plan needs.

Lagrangian relaxation (Held, Wolfe, Crowder: Math. Prog. 6, 1974): with prices on memory the choices are eliminated as
without a budget. Every such solution gives a bound that no plan within the budget beats; those that fit are plans.
"""

from __future__ import annotations

import time
from math import inf
from typing import NamedTuple

import numpy as np

from lowshard.solver.graph.graph_schedule import Assignment, Schedule, is_feasible, schedule
from lowshard.solver.graph.network import Network
from lowshard.solver.graph.space import Space

_ROUNDS = 60
_ROUNDING = 1e-11
"""What a sum over thousands of ops is off by, as a share: the difference of two large ones may be all rounding."""
_PEAK_ROUNDS = 24


class Fitted(NamedTuple):
    """The best plan that was found, and what no plan can be better than."""

    best: Schedule | None
    bound: float
    seen: tuple[Assignment, ...] = ()
    """What the search came by, whether it fits or not."""


def fit(space: Space, budget_bytes: float, start: Schedule, known: Schedule | None, end_s: float) -> Fitted:
    """Search plans that hold at most so many bytes at every step."""
    best, bound = known, start.price
    prices = np.zeros(space.steps + 1)
    over = np.array(start.memory_bytes, np.float64) - budget_bytes
    patience, theta = 0, 1.0
    seen = [start.assignment, *([] if known is None else [known.assignment])]
    for _ in range(_ROUNDS):
        if time.monotonic() > end_s:
            break
        target = best.price if best is not None else max(2 * bound, bound + 1e-12)
        norm = float((np.maximum(over, 0) ** 2 + (np.where(prices > 0, over, 0) ** 2)).sum())
        if norm == 0:
            break
        stride = theta * max(target - bound, 1e-3 * abs(target)) / norm
        prices = np.maximum(0.0, prices + stride * over)
        network = Network(space, prices.tolist(), split="under")
        value, assignment = network.solve()
        low = value - budget_bytes * float(prices.sum()) - _ROUNDING * abs(value)
        if low > bound * (1 + 1e-6):
            bound, patience = low, 0
        else:
            patience += 1
            if patience >= 3:
                theta, patience = theta / 2, 0
        found = schedule(space, assignment)
        seen.append(assignment)
        over = np.array(found.memory_bytes, np.float64) - budget_bytes
        if is_feasible(found, budget_bytes) and (best is None or found.price < best.price):
            best = found
        if best is not None and best.price <= bound * (1 + 1e-9):
            break
        if theta < 1e-3:
            break
    return Fitted(best, bound, tuple(seen))


def least_peak(space: Space, start: Schedule, enough_bytes: float, end_s: float) -> tuple[Schedule, float]:
    """Return a plan that holds as little as was found at its fullest step, and a bound on what any plan holds there."""
    best, bound = start, 0.0
    memory = np.array(start.memory_bytes, np.float64)
    weights = np.ones(space.steps + 1) / (space.steps + 1)
    for turn in range(_PEAK_ROUNDS):
        if best.peak_bytes <= enough_bytes or (turn and time.monotonic() > end_s):
            break
        weights = weights * np.exp((memory / memory.max() - 1) * (8 if turn == 0 else 4))
        weights /= weights.sum()
        scale = best.price if 0 < best.price < inf else 1.0
        network = Network(space, list(weights), use_price=1e-7 * memory.max() / scale, split="under")
        _, assignment = network.solve()
        found = schedule(space, assignment)
        memory = np.array(found.memory_bytes, np.float64)
        bound = max(bound, float(weights @ memory) * (1 - 1e-6) if not network.was_split else 0.0)
        if found.price != inf and found.peak_bytes < best.peak_bytes:
            best = found
        if best.peak_bytes <= bound * (1 + 1e-6):
            break
    return best, bound
