"""Elementwise reduction of several operands in a fixed order: the arithmetic of every communicator.

order="tree" is a balanced binary tree over the operands, split as intervals are (of n, the left half
takes ceil(n / 2)). The bits depend on the operands alone, not on where or in which pieces they are
folded; at powers of two a tree of trees is the same tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.errors import CommError
from lowshard.kernels.buffer import address, is_gpu
from lowshard.kernels.cuda.cuda_engine import MOST_FOLDED, CudaEngine
from lowshard.kernels.engine import engine_for

Array = Any

_UFUNCS = {"sum": np.add, "avg": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}

# Elements folded at a time on a CPU, so that operands and accumulator stay in the cache.
_BLOCK_ELEMS = 1 << 16


def fold(
    terms: Sequence[Array], out: Array, op: str, order: str = "tree", divisor: int | None = None
) -> None:
    """Write the reduction of `terms` into `out`.

    bf16, fp16 and fp8 are widened to float32, folded there, and rounded once. Integers that are divided give the
    floor of the exact quotient: they are summed in 64 bits, and those of 64 bits as quotients and remainders.

    Args:
        terms: operands in rank order, all of out's shape and dtype, of any strides. None may overlap out, except
            the whole of out itself.
        out: the result, of any strides.
        op: sum, avg, min, max, prod.
        order: "rank" folds from the left; anything else is the tree.
        divisor: what a sum is divided by; by default len(terms) for avg, else 1.
    """
    if divisor is None:
        divisor = len(terms) if op == "avg" else 1
    if is_gpu(out):
        _fold_on_gpu(terms, out, op, order, divisor)
        return
    with np.errstate(all="ignore"):  # one rank's error, or warning made one, would strand the others
        _fold_on_host(terms, out, op, order, divisor)


def _fold_on_host(terms: Sequence[Array], out: Array, op: str, order: str, divisor: int) -> None:
    ufunc = _UFUNCS[op]
    wide = dtypes.get(out.dtype).accumulator.numpy
    if divisor != 1 and out.dtype.kind in "iu":
        wide = np.dtype(np.int64 if out.dtype.kind == "i" else np.uint64)
    if out.flags.c_contiguous and all(t.flags.c_contiguous for t in terms):
        out, terms = out.reshape(-1), [t.reshape(-1) for t in terms]
    for block in _blocks(out.shape, _BLOCK_ELEMS if isinstance(out, np.ndarray) else max(out.size, 1)):
        part = [t[block] for t in terms]
        if len(terms) == 2 and divisor == 1 and wide == out.dtype:
            ufunc(part[0], part[1], out=out[block])
            continue
        if divisor != 1 and wide == out.dtype and out.dtype.kind in "iu":
            # The sum itself may not fit 64 bits where the mean does.
            by = wide.type(divisor)
            remainders = _fold_tree([t % by for t in part], ufunc, wide)
            out[block] = _fold_tree([t // by for t in part], ufunc, wide) + remainders // by
            continue
        value = _fold_left(part, ufunc, wide) if order == "rank" else _fold_tree(part, ufunc, wide)
        out[block] = _divide(value, divisor)


def _fold_on_gpu(terms: Sequence[Array], out: Array, op: str, order: str, divisor: int) -> None:
    """As `fold`, by one kernel that gives the same bits; what it cannot take as it lies is copied first."""
    row = dtypes.get(out.dtype)
    engine: CudaEngine = engine_for(out, *terms)  # type: ignore[assignment]  # of CuPy arrays
    if len(terms) > MOST_FOLDED:
        raise CommError(f"a fold on a GPU takes {MOST_FOLDED} operands, got {len(terms)}")
    flat = [term if _lies_well(term) else term.copy() for term in terms]
    target = out if _lies_well(out) else out.copy()
    name = row.short
    if row.kind == "bool":  # a sum is an or, a product an and
        name, op = "u8", {"sum": "max", "prod": "min"}.get(op, op)
    engine.fold(target, flat, name, op, order != "rank", divisor)
    if target is not out:
        out[...] = target


def _lies_well(array: Array) -> bool:
    return bool(array.flags.c_contiguous and address(array) % array.dtype.itemsize == 0)


def _blocks(shape: tuple[int, ...], elems: int) -> Iterator[tuple[Any, ...]]:
    """Yield indices that take an array apart along its first dims, into views of at most so many elements."""
    if math.prod(shape) <= elems or not shape:
        yield (...,)
        return
    rest = math.prod(shape[1:])
    if rest > elems:
        for i in range(shape[0]):
            yield from ((i, *block) for block in _blocks(shape[1:], elems))
        return
    step = max(1, elems // max(rest, 1))
    for start in range(0, shape[0], step):
        yield (slice(start, start + step), ...)


def _fold_tree(terms: Sequence[Array], ufunc: np.ufunc, wide: np.dtype[Any]) -> Array:
    if len(terms) == 1:
        return terms[0].astype(wide, copy=False)
    half = (len(terms) + 1) // 2
    left, right = _fold_tree(terms[:half], ufunc, wide), _fold_tree(terms[half:], ufunc, wide)
    # A half of two or more operands is a fresh array, so it may take the result.
    return ufunc(left, right, out=left) if half > 1 else ufunc(left, right)


def _fold_left(terms: Sequence[Array], ufunc: np.ufunc, wide: np.dtype[Any]) -> Array:
    value = terms[0].astype(wide)
    for term in terms[1:]:
        ufunc(value, term.astype(wide, copy=False), out=value)
    return value


def _divide(value: Array, divisor: int) -> Array:
    if divisor == 1:
        return value
    if value.dtype.kind in "iu":
        return value // value.dtype.type(divisor)
    return value / value.dtype.type(divisor)


def divide(buf: Array, divisor: int) -> None:
    """Divide a finished floating-point sum in place."""
    with np.errstate(all="ignore"):  # as in `fold`
        buf[...] = _divide(buf, divisor)


def identity(op: str, dtype: object) -> Any:
    """Return the value that changes nothing under op: 0, 1, or the extreme of the dtype."""
    row = dtypes.get(dtype)
    if op in ("sum", "avg"):
        return row.numpy.type(0)
    if op == "prod":
        return row.numpy.type(1)
    if row.kind == "bool":
        return np.bool_(op == "min")
    if row.kind in ("int", "uint"):
        info = np.iinfo(row.numpy)
        return row.numpy.type(info.max if op == "min" else info.min)
    value = np.inf if op == "min" else -np.inf
    if row.name == "float8_e4m3fn":  # it has no infinity; 448 is its largest value
        value = np.copysign(448.0, value)
    return row.numpy.type(value)
