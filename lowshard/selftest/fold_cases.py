"""The step `fold`: every order, op and dtype of a reduction over several sources, against plain NumPy.

`plain_fold` is written apart from the library: reductions of the selftest and of the tests are compared with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from lowshard import dtypes
from lowshard.comm.reduction import fold
from lowshard.selftest.arrays import array_module, hard, ordinary, put, settle
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.steps import Setting

OPS = ("sum", "avg", "min", "max", "prod")
ORDERS = ("tree", "rank", "fast")
DTYPES = tuple(row.name for row in dtypes.all_dtypes() if row.kind in ("float", "int", "uint"))
_COMBINE = {"sum": np.add, "avg": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}
_SOURCES = (1, 2, 3, 4, 5, 7, 8)
_ELEMS = 1003


def plain_fold(
    terms: Sequence[np.ndarray] | np.ndarray, op: str, order: str, divisor: int | None = None
) -> np.ndarray:
    """Return the reduction of equal arrays; "tree" halves the terms, the left half the larger one.

    divisor: what a sum is divided by once it is finished; by default len(terms) for avg, else 1.
    """
    row = dtypes.get(terms[0].dtype)
    divisor = (len(terms) if op == "avg" else 1) if divisor is None else divisor
    if divisor != 1 and row.kind in ("int", "uint"):
        total = sum(term.astype(object) for term in terms)
        return np.asarray(total // divisor).astype(row.numpy)
    wide = np.dtype(np.float32) if row.kind == "float" and row.bits < 32 else row.numpy
    with np.errstate(all="ignore"):
        values = [term.astype(wide) for term in terms]
        value = reduce(_COMBINE[op], values) if order == "rank" else _tree(values, _COMBINE[op])
        if divisor != 1:
            value = value / wide.type(divisor)
        return np.asarray(value).astype(row.numpy)


def _tree(values: Sequence[np.ndarray], combine: np.ufunc) -> np.ndarray:
    if len(values) == 1:
        return values[0]
    half = -(-len(values) // 2)
    both: np.ndarray = combine(_tree(values[:half], combine), _tree(values[half:], combine))
    return both


@dataclass(frozen=True)
class FoldCase:
    """One reduction of arrays; which NaN comes out of several is not said."""

    what: str
    terms: tuple[np.ndarray, ...]
    op: str
    order: str

    def expected(self) -> np.ndarray:
        """Return what comes out; "fast" is the tree where lowshard itself folds."""
        return plain_fold(self.terms, self.op, self.order)


def fold_cases(dtype: str, sources: Sequence[int] = _SOURCES, elems: int = _ELEMS) -> Iterator[FoldCase]:
    """Yield every op and order over several numbers of sources, of ordinary values and of hard ones."""
    for count in sources:
        for make in (ordinary, hard):
            terms = tuple(make((elems,), dtype, "fold", count, i) for i in range(count))
            for op in OPS:
                for order in ORDERS:
                    what = f"fold order={order} op={op} {dtype}, {count} sources, {make.__name__} values"
                    yield FoldCase(what, terms, op, order)


def run(setting: Setting, tally: Tally) -> None:
    """Fold and compare."""
    xp = array_module(setting.device)
    skipped = []
    for dtype in DTYPES:
        if setting.device == "cuda" and dtypes.get(dtype).is_float8:
            skipped.append(dtype)  # a CuPy array has no such dtype
            continue
        for case in fold_cases(dtype):
            out = put(xp, np.zeros_like(case.terms[0]))
            with np.errstate(all="ignore"):
                fold([put(xp, term) for term in case.terms], out, case.op, case.order)
            tally.same(case.what, out, case.expected(), any_nan=True)
        print(f"{dtype}: {tally.checks} folds compared", flush=True)
    settle(xp)
    tally.summary = f"{tally.checks} folds have the bits of plain NumPy"
    if skipped:
        tally.summary += f"; left out on a GPU: {', '.join(skipped)}"
