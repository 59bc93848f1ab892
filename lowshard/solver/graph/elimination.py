"""Exact minimum of a sum of tables over discrete variables, by eliminating one variable after the other.

Dynamic programming over any graph (Bertelè, Brioschi: Nonserial Dynamic Programming, 1972): on chains and trees no
table is larger than a variable with its parent; on others tables grow with the width of the graph, which is checked
before each is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import prod
from typing import Any, NamedTuple

import numpy as np

Table = np.ndarray[Any, np.dtype[np.float64]]
CELLS_MOST = 1 << 26
BIG = 1e30
"""Stands for infinite in tables: sums of it stay ordered, and no infinity is subtracted from another."""


class Factor(NamedTuple):
    """A table over some variables, one dim each, in this order."""

    variables: tuple[int, ...]
    table: Table


class TooWideError(Exception):
    """A table would be larger than allowed."""


class Bucket(NamedTuple):
    """A variable that is eliminated: the sum of the tables that touch it, its own dim last."""

    variable: int
    others: tuple[int, ...]
    whole: Table
    least: Table
    """The minimum of `whole` over the variable."""


def eliminate(
    sizes: Sequence[int], factors: Sequence[Factor], cells_most: int = CELLS_MOST
) -> tuple[float, list[int]]:
    """Return the least sum of the tables, and the values of the variables that reach it."""
    factors = _free(sizes, factors)
    low = sum(float(f.table) for f in factors if not f.variables)
    order = []
    for bucket in _buckets(sizes, factors, cells_most):
        order.append((bucket.variable, bucket.others, bucket.whole.argmin(axis=-1).astype(np.int32)))
        if not bucket.others:
            low += float(bucket.least)
    values = [0] * len(sizes)
    for v, others, best in reversed(order):
        values[v] = int(best[tuple(values[u] for u in others)])
    return low, values


def marginals(sizes: Sequence[int], factors: Sequence[Factor], cells_most: int = CELLS_MOST) -> list[Table]:
    """Return for each variable and each of its values the least sum of the tables when it has that value."""
    factors = _free(sizes, factors)
    buckets, cells = [], 0
    for bucket in _buckets(sizes, factors, cells_most):
        buckets.append(bucket)
        cells += bucket.whole.size
        if cells > cells_most:
            raise TooWideError(f"tables of {cells:,} cells together")
    place = {bucket.variable: i for i, bucket in enumerate(buckets)}
    low = sum(float(f.table) for f in factors if not f.variables)
    low += sum(float(bucket.least) for bucket in buckets if not bucket.others)
    sums: list[Table] = [bucket.whole for bucket in buckets]
    found: list[Table] = [np.zeros(0)] * len(sizes)
    for i in range(len(buckets) - 1, -1, -1):
        v, others, whole, least = buckets[i]
        if others:  # what the rest adds to it: the sum where its minimum went, without that minimum
            user = min(place[u] for u in others)
            dims = (*buckets[user].others, buckets[user].variable)
            around = sums[user].min(axis=tuple(d for d, u in enumerate(dims) if u not in others))
            kept = [u for u in dims if u in others]
            sums[i] = whole + (around.transpose([kept.index(u) for u in others]) - least)[..., None]
        else:
            sums[i] = whole + (low - float(least))
        found[v] = sums[i].min(axis=tuple(range(len(others))))
    return found


def _free(sizes: Sequence[int], factors: Sequence[Factor]) -> list[Factor]:
    """Return the tables without the dims of variables that have one value: NumPy's arrays have 64 dims at most."""
    found = []
    for variables, table in factors:
        free = tuple(v for v in variables if sizes[v] > 1)
        found.append(Factor(free, table.reshape([sizes[v] for v in free])))
    return found


def _buckets(sizes: Sequence[int], factors: Sequence[Factor], cells_most: int) -> Iterator[Bucket]:
    """Eliminate one variable after the other, that of the smallest table first."""
    tables: dict[int, Factor] = dict(enumerate(factors))
    touching: list[set[int]] = [set() for _ in sizes]
    for i, factor in tables.items():
        for v in factor.variables:
            touching[v].add(i)
    near: list[set[int]] = [
        {u for i in touching[v] for u in tables[i].variables} | {v} for v in range(len(sizes))
    ]

    def weight(v: int) -> int:
        return prod(sizes[u] for u in near[v])

    heap = [(weight(v), v) for v in range(len(sizes))]
    heapify(heap)
    done = [False] * len(sizes)
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
        least = whole.min(axis=-1)
        yield Bucket(v, others, whole, least)
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
        for u in others:
            heappush(heap, (weight(u), u))


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


__all__ = ["BIG", "CELLS_MOST", "Factor", "TooWideError", "eliminate", "marginals"]
