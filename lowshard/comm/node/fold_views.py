"""Folds of strided arrays: which rows they are made of, and compiled code over these.

The bits are those of `lowshard.comm.reduction.fold` in tree order.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.bounded import bounded_cache
from lowshard.comm.node.calls import load_calls
from lowshard.comm.node.combine import BLOCK_BYTES, HALVES, NATIVE, OPS, recipe_of, schedule
from lowshard.comm.node.fold import scratch_blocks
from lowshard.comm.node.meeting import CONTEXT_WORDS, PARTS, SCRATCH, SIZE
from lowshard.comm.node.node_group import address_of
from lowshard.kernels.buffer import STREAM_FROM_BYTES

Array = Any
Strides = tuple[int, ...]

FOLD_FROM_BYTES = 32 << 10
"""Smaller results NumPy folds as quickly."""


class Folder:
    """Folds of a number of operands on one thread: a context and scratch memory of their own."""

    def __init__(self, terms: int) -> None:
        self._words = np.zeros(CONTEXT_WORDS, np.int64)
        self._parts, self._sources = np.zeros(2 * terms, np.int64), np.zeros(2 * terms, np.int64)
        self._scratch = np.empty(scratch_blocks.py_func(terms) * BLOCK_BYTES + 64, np.uint8)
        self._steps = schedule(terms, "tree")
        self._terms = terms
        words = self._words
        words[SIZE], words[PARTS] = terms, address_of(self._parts)
        words[SCRATCH] = -(-address_of(self._scratch) // 64) * 64

    def fold(self, terms: Sequence[Array], out: Array, op: str, divisor: int) -> None:
        """Write the reduction of the operands into `out`."""
        for i, term in enumerate(terms):
            self._sources[i] = term.__array_interface__["data"][0]
        n, table = _rows(out.shape, out.itemsize, out.strides, tuple(term.strides for term in terms))
        recipe = recipe_of(dtypes.get(out.dtype).name, op)
        load_calls().fold_rows(
            address_of(self._words), out.__array_interface__["data"][0], address_of(self._sources),
            address_of(table), len(table), n, divisor, address_of(self._steps), address_of(recipe.words),
            out.nbytes >= STREAM_FROM_BYTES,
        )  # fmt: skip


def may_fold(out: Array, op: str, divisor: int) -> bool:
    """Say whether there is compiled code for a result's dtype, an op and a divisor, and enough to do for it."""
    name = dtypes.get(out.dtype).name
    floats = out.dtype.kind not in "iub"
    return (
        out.nbytes >= FOLD_FROM_BYTES
        and name in (*NATIVE, *HALVES)
        and op in OPS
        and (divisor == 1 or floats)
    )


_folders = threading.local()


def fold_views(terms: Sequence[Array], out: Array, op: str, divisor: int) -> None:
    """Fold two arrays or more of out's shape and dtype, of any strides, none of which overlaps out, in tree order."""
    known = _folders.__dict__.setdefault("by_terms", {})
    folder = known.get(len(terms))
    if folder is None:
        folder = known[len(terms)] = Folder(len(terms))
    folder.fold(terms, out, op, divisor)


@bounded_cache(1 << 20)
def _rows(shape: tuple[int, ...], item: int, strides: Strides, others: tuple[Strides, ...]) -> Any:
    """Return the elements of a row, and the levels of rows as `fold_rows` takes them, int64 [levels, 2 + operands]."""
    n = 1
    levels: list[list[int]] = []
    every = (strides, *others)
    for dim in range(len(shape) - 1, -1, -1):
        if shape[dim] == 1:
            continue
        steps = [one[dim] for one in every]
        if not levels and all(step == n * item for step in steps):
            n *= shape[dim]
        elif levels and all(
            step == levels[-1][0] * inner for step, inner in zip(steps, levels[-1][1:], strict=True)
        ):
            levels[-1][0] *= shape[dim]
        else:
            levels.append([shape[dim], *steps])
    return n, np.array(levels, np.int64).reshape(len(levels), 2 + len(others))
