"""Exact minimum of a sum of tables over discrete variables, by eliminating one variable after the other.

Dynamic programming over any graph (Bertelè, Brioschi: Nonserial Dynamic Programming, 1972): on chains and trees no
table is larger than a variable with its parent; on others tables grow with the width of the graph, which is checked
before each is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import prod
from typing import Any, NamedTuple

import numpy as np

Table = np.ndarray[Any, np.dtype[np.float64]]
CELLS_MOST = 1 << 26


class Factor(NamedTuple):
    """A table over some variables, one dim each, in this order."""

    variables: tuple[int, ...]
    table: Table


class TooWideError(Exception):
    """A table would be larger than allowed."""


def eliminate(
    sizes: Sequence[int], factors: Sequence[Factor], cells_most: int = CELLS_MOST
) -> tuple[float, list[int]]:
    """Return the least sum of the tables, and the values of the variables that reach it.

    Of equal sums always the same one is returned.

    Args:
        sizes: how many values each variable has.
        factors: the tables.
        cells_most: the largest table that may be made.

    Raises:
        TooWideError: every order that is tried needs a larger table.
    """
    count = len(sizes)
    tables: dict[int, Factor] = dict(enumerate(factors))
    touching: list[set[int]] = [set() for _ in sizes]
    for i, factor in tables.items():
        for v in factor.variables:
            touching[v].add(i)
    near: list[set[int]] = [{u for i in touching[v] for u in tables[i].variables} | {v} for v in range(count)]

    def weight(v: int) -> int:
        return prod(sizes[u] for u in near[v])

    heap = [(weight(v), v) for v in range(count)]
    heapify(heap)
    done = [False] * count
    order: list[tuple[int, tuple[int, ...], Any]] = []
    base = sum(float(f.table) for f in tables.values() if not f.variables)
    serial = len(tables)
    while heap:
        cells, v = heappop(heap)
        if done[v]:
            continue
        now = weight(v)
        if now != cells:
            heappush(heap, (now, v))
            continue
        if cells > cells_most:
            raise TooWideError(f"a table of {cells:,} cells")
        done[v] = True
        others = tuple(sorted(near[v] - {v}))
        whole = _sum([tables[i] for i in sorted(touching[v])], (*others, v), sizes)
        best = whole.argmin(axis=-1)
        least = np.take_along_axis(whole, best[..., None], axis=-1)[..., 0]
        order.append((v, others, best.astype(np.int32)))
        for i in list(touching[v]):
            for u in tables[i].variables:
                touching[u].discard(i)
            del tables[i]
        if others:
            tables[serial] = Factor(others, least)
            for u in others:
                touching[u].add(serial)
                near[u] = {w for i in touching[u] for w in tables[i].variables} | {u}
            serial += 1
        else:
            base += float(least)
        for u in others:
            heappush(heap, (weight(u), u))
    values = [0] * count
    for v, others, best in reversed(order):
        values[v] = int(best[tuple(values[u] for u in others)])
    return base, values


def _sum(factors: Sequence[Factor], variables: tuple[int, ...], sizes: Sequence[int]) -> Table:
    place = {v: i for i, v in enumerate(variables)}
    whole = np.zeros([sizes[v] for v in variables])
    for factor in factors:
        dims = sorted(range(len(factor.variables)), key=lambda d: place[factor.variables[d]])
        shape = [1] * len(variables)
        for v in factor.variables:
            shape[place[v]] = sizes[v]
        whole += factor.table.transpose(dims).reshape(shape)
    return whole


__all__ = ["CELLS_MOST", "Factor", "TooWideError", "eliminate"]
