"""The step `fold`: every order, op and dtype of a reduction over several sources, against plain NumPy."""

from __future__ import annotations

import numpy as np

from lowshard import dtypes
from lowshard.comm.reduction import fold
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.device_arrays import array_module, put, settle
from lowshard.selftest.plain_fold import OPS, plain_fold
from lowshard.selftest.random_arrays import hard, ordinary
from lowshard.selftest.step_setting import Setting

ORDERS = ("tree", "rank", "fast")
_SOURCES = (1, 2, 3, 4, 5, 7, 8)
_ELEMS = 1003
_DTYPES = (
    "float32", "float64", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip


def run(setting: Setting, tally: Tally) -> None:
    """Fold and compare; "fast" is the tree where lowshard itself folds."""
    xp = array_module(setting.device)
    skipped = []
    for dtype in _DTYPES:
        if setting.device == "cuda" and dtypes.get(dtype).is_float8:
            skipped.append(dtype)  # a CuPy array has no such dtype
            continue
        for count in _SOURCES:
            for make in (ordinary, hard):
                terms = [make((_ELEMS,), dtype, "fold", count, i) for i in range(count)]
                there = [put(xp, term) for term in terms]
                for op in OPS:
                    for order in ORDERS:
                        out = put(xp, np.zeros_like(terms[0]))
                        with np.errstate(all="ignore"):
                            fold(there, out, op, order)
                        what = f"fold order={order} op={op} {dtype}, {count} sources, {make.__name__} values"
                        tally.same(what, out, plain_fold(terms, op, order), any_nan=True)
        print(f"{dtype}: {tally.checks} folds compared", flush=True)
    settle(xp)
    tally.summary = f"{tally.checks} folds have the bits of plain NumPy"
    if skipped:
        tally.summary += f"; left out on a GPU: {', '.join(skipped)}"
