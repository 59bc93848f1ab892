"""Reductions of blocks: two operands elementwise, 16-bit floats by way of float32, all in a schedule of pairs.

A schedule is a list of steps over places: places 0 to n - 1 are the operands of n ranks, those above are
temporaries, and each step combines two places into one. So tree and rank order differ in their tables alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numba import carray, njit, types

from lowshard.comm.node.atomic import elements_at
from lowshard.comm.node.vector import LINE_BYTES, element_combiner, line_combiner

BLOCK_BYTES = 64 << 10
"""Bytes of a block in its accumulator's dtype: operands and temporaries stay in the core's second cache."""

NATIVE = ("float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
HALVES = ("float16", "bfloat16")
OPS = ("sum", "prod", "min", "max")

_BY_NAME = {name: getattr(types, name) for name in NATIVE}


def accumulator(dtype: str) -> str:
    """Return the dtype that a dtype is combined in."""
    return "float32" if dtype in HALVES else dtype


def schedule(ranks: int, order: str) -> np.ndarray:
    """Return the steps `[ranks - 1, 3]` (into, left, right) of a reduction; the last one's `into` is -1.

    Args:
        ranks: number of operands.
        order: "rank" combines from the left; anything else halves the ranks, the left half the larger.
    """
    steps: list[tuple[int, int, int]] = []

    def tree(first: int, count: int, depth: int) -> int:
        if count == 1:
            return first
        half = (count + 1) // 2
        left = tree(first, half, depth)
        right = tree(first + half, count - half, depth + 1)
        steps.append((ranks + depth, left, right))
        return ranks + depth

    if order == "rank":
        steps = [(ranks, ranks if i > 1 else 0, i) for i in range(1, ranks)]
    else:
        tree(0, ranks, 0)
    table = np.array(steps, np.int64).reshape(-1, 3)
    table[-1:, 0] = -1
    return table


@cache
def combiner(dtype: str, op: str) -> Callable[..., None]:
    """Return what Numba compiles to combine n elements: `combine(into, left, right, n, streaming)`, addresses.

    With streaming the result is written past the caches; then `into` is a multiple of an element's bytes.
    """
    item = itemsizes([dtype])[dtype]
    per_line = LINE_BYTES // item
    one = element_combiner(dtype, op)
    line, stream = line_combiner(dtype, op, False), line_combiner(dtype, op, True)

    def combine(into: int, left: int, right: int, n: int, streaming: bool) -> None:
        start = 0
        if streaming and into % item == 0:
            start = min(n, (-into % LINE_BYTES) // item)
            for i in range(start):
                one(into + i * item, left + i * item, right + i * item)
            lines = (n - start) // per_line
            for i in range(start * item, start * item + lines * LINE_BYTES, LINE_BYTES):
                stream(into + i, left + i, right + i)
        else:
            lines = n // per_line
            for i in range(0, lines * LINE_BYTES, LINE_BYTES):
                line(into + i, left + i, right + i)
        for i in range((start + lines * per_line) * item, n * item, item):
            one(into + i, left + i, right + i)

    return _compiled(combine, f"{dtype}_{op}")


@cache
def divider(dtype: str) -> Callable[..., None]:
    """Return what Numba compiles to divide n floats in place: `divide(at, n, divisor)`; others are left alone."""
    kind = _BY_NAME[dtype]

    if not dtype.startswith("float"):
        return leave_alone  # type: ignore[no-any-return]

    def divide(at: int, n: int, divisor: int) -> None:
        by = kind(divisor)
        values = carray(elements_at(at, kind), n)
        for i in range(n):
            values[i] = values[i] / by

    return _compiled(divide, dtype)


def _compiled(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Compile a closure under a name that tells what it closes over.

    Code that comes from the cache on disk is linked by name: two closures of one name would become one.
    """
    function.__qualname__ = f"{function.__name__}_{what}"
    return njit(nogil=True)(function)  # type: ignore[no-any-return]


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _widen_bfloat16(into: int, source: int, n: int) -> None:
    a, c = carray(elements_at(source, types.uint16), n), carray(elements_at(into, types.uint32), n)
    for i in range(n):
        c[i] = types.uint32(a[i]) << types.uint32(16)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _narrow_bfloat16(into: int, source: int, n: int) -> None:
    a, c = carray(elements_at(source, types.uint32), n), carray(elements_at(into, types.uint16), n)
    for i in range(n):
        bits = a[i]
        magnitude, high = bits & types.uint32(0x7FFFFFFF), bits >> types.uint32(16)
        rounded = (bits + types.uint32(0x7FFF) + (high & types.uint32(1))) >> types.uint32(16)
        quiet = (high & types.uint32(0x8000)) | types.uint32(0x7FC0)
        c[i] = types.uint16(quiet if magnitude > types.uint32(0x7F800000) else rounded)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _widen_float16(into: int, source: int, n: int) -> None:
    a, c = carray(elements_at(source, types.uint16), n), carray(elements_at(into, types.uint32), n)
    f = carray(elements_at(into, types.float32), n)
    shift = types.float32(2.0**112)  # moves the exponent; a subnormal becomes a normal number on the way
    for i in range(n):
        bits = types.uint32(a[i])
        c[i] = (bits & types.uint32(0x7FFF)) << types.uint32(13)
    for i in range(n):
        f[i] = f[i] * shift
    for i in range(n):
        bits = types.uint32(a[i])
        special = c[i] | types.uint32(0x7F800000)
        value = special if (bits & types.uint32(0x7C00)) == types.uint32(0x7C00) else c[i]
        c[i] = value | ((bits & types.uint32(0x8000)) << types.uint32(16))


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _narrow_float16(into: int, source: int, n: int) -> None:
    a, c = carray(elements_at(source, types.uint32), n), carray(elements_at(into, types.uint16), n)
    one = types.uint32(1)
    for i in range(n):
        bits = a[i]
        magnitude = bits & types.uint32(0x7FFFFFFF)
        sign = (bits >> types.uint32(16)) & types.uint32(0x8000)
        low = magnitude - types.uint32(112 << 23)
        normal = (low + types.uint32(0xFFF) + ((low >> types.uint32(13)) & one)) >> types.uint32(13)
        # Below 2^-14 fp16 counts in units of 2^-24: a significand and the place where it is cut.
        field = magnitude >> types.uint32(23)
        field = field if field > types.uint32(101) else types.uint32(101)
        field = field if field < types.uint32(125) else types.uint32(125)
        cut = types.uint32(126) - field
        significand = (magnitude & types.uint32(0x7FFFFF)) | types.uint32(0x800000)
        half = one << (cut - one)
        tiny = (significand + half - one + ((significand >> cut) & one)) >> cut
        tiny = tiny if magnitude >= types.uint32(102 << 23) else types.uint32(0)
        made = normal if magnitude >= types.uint32(113 << 23) else tiny
        made = types.uint32(0x7C00) if magnitude >= types.uint32(143 << 23) else made
        made = types.uint32(0x7E00) if magnitude > types.uint32(0x7F800000) else made
        c[i] = types.uint16(made | sign)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def leave_alone(into: int, source: int, n: int) -> None:
    """Do nothing, in place of a conversion."""
    return


WIDEN: dict[str, Callable[..., None]] = {"bfloat16": _widen_bfloat16, "float16": _widen_float16}
"""By dtype: `widen(into, source, n)`, exact, from 16 bits to float32."""
NARROW: dict[str, Callable[..., None]] = {"bfloat16": _narrow_bfloat16, "float16": _narrow_float16}
"""By dtype: `narrow(into, source, n)`, to nearest, ties to even, from float32 to 16 bits."""


def itemsizes(dtypes: Sequence[str]) -> dict[str, int]:
    """Return the bytes of an element by dtype."""
    return {name: 2 if name in HALVES else np.dtype(name).itemsize for name in dtypes}
