"""Reductions in plain NumPy, written apart from the library: what every fold and collective is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowshard import dtypes

OPS = ("sum", "avg", "min", "max", "prod")
_COMBINE = {"sum": np.add, "avg": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}


def plain_fold(terms: Sequence[np.ndarray], op: str, order: str) -> np.ndarray:
    """Return the reduction of equal arrays; "tree" halves the terms, the left half the larger one."""
    row = dtypes.get(terms[0].dtype)
    if op == "avg" and row.kind != "float":
        total = sum(term.astype(object) for term in terms)
        return np.asarray(total // len(terms)).astype(row.numpy)
    wide = np.dtype(np.float32) if row.kind == "float" and row.bits < 32 else row.numpy
    with np.errstate(all="ignore"):
        values = [term.astype(wide) for term in terms]
        value = _left(values, _COMBINE[op]) if order == "rank" else _tree(values, _COMBINE[op])
        if op == "avg":
            value = value / wide.type(len(terms))
        return np.asarray(value).astype(row.numpy)


def _left(values: Sequence[np.ndarray], combine: np.ufunc) -> np.ndarray:
    total = values[0]
    for value in values[1:]:
        total = combine(total, value)
    return total


def _tree(values: Sequence[np.ndarray], combine: np.ufunc) -> np.ndarray:
    if len(values) == 1:
        return values[0]
    half = -(-len(values) // 2)
    both: np.ndarray = combine(_tree(values[:half], combine), _tree(values[half:], combine))
    return both
