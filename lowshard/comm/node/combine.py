"""Reductions of blocks: two operands elementwise, 16-bit floats by way of float32, all in a schedule of pairs.

A schedule is a list of steps over places: places 0 to n - 1 are the operands of n ranks, those above are
temporaries, and each step combines two places into one. So tree and rank order differ in their tables alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir

from lowshard.compiled import INT, Signature, digest_of, load_native
from lowshard.compiled.deferred import carray, intrinsic, types
from lowshard.compiled.emitted import elements_at
from lowshard.kernels.cpu import memory_steps

BLOCK_BYTES = 16 << 10
"""Bytes of a block in its accumulator's dtype: operands and temporaries stay in the core's first cache."""
LINE_BYTES = 64

NATIVE = ("float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
HALVES = ("float16", "bfloat16")
OPS = ("sum", "prod", "min", "max")


def accumulator(dtype: str) -> str:
    """Return the dtype that a dtype is combined in."""
    return "float32" if dtype in HALVES else dtype


def schedule(ranks: int, order: str) -> np.ndarray:
    """Return the steps `[ranks - 1, 3]` (into, left, right) of a reduction; the last one's `into` is -1."""
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


@dataclass(frozen=True)
class Recipe:
    """How a dtype and an op are folded: what compiled folds are given by address.

    Attributes:
        words: int64: bytes of an element, of one of its accumulator, and the addresses of four functions (0 for none).
            combine(into, left, right, n, past) combines n elements of the accumulator's dtype, past the caches or not,
            divide(at, n, divisor) divides n of them in place, widen(into, source, n) and narrow(into, source, n) go to
            that dtype and back.
        kept: keeps the functions alive.
    """

    words: np.ndarray
    kept: tuple[Any, ...]


COMBINE, DIVIDE, WIDEN, NARROW = range(2, 6)
"""Places of the functions in a recipe, after ITEM and WIDE_ITEM."""
ITEM, WIDE_ITEM = range(2)


@cache
def recipe_of(dtype: str, op: str) -> Recipe:
    """Return the recipe of a dtype and an op, compiled on first use and kept on disk."""
    wide = accumulator(dtype)
    functions: list[Any] = [_combiner(wide, op), None, None, None]
    if wide.startswith("float"):
        functions[1] = _divider(wide)
    if dtype in HALVES:
        functions[2:] = (_converter(name, dtype) for name in ("widen", "narrow"))
    addresses = [0 if made is None else made.address for made in functions]
    return Recipe(np.array([itemsize(dtype), itemsize(wide), *addresses], np.int64), tuple(functions))


# ---- cache lines as LLVM vectors: a loop that LLVM makes vectors of by itself falls back to elements in place


_FLOATS = {"float32": ir.FloatType(), "float64": ir.DoubleType()}


def pair(builder: ir.IRBuilder, dtype: str, op: str, a: ir.Value, b: ir.Value) -> ir.Value:
    """Combine two elements, or two vectors of them; minimum and maximum hand NaNs on, as NumPy's do."""
    floats = dtype in _FLOATS
    if op == "sum":
        return builder.fadd(a, b) if floats else builder.add(a, b)
    if op == "prod":
        return builder.fmul(a, b) if floats else builder.mul(a, b)
    sign = "<" if op == "min" else ">"
    if floats:
        # Where the comparison fails it is b, a NaN of b too; a NaN of a compares with nothing and is kept.
        first = builder.or_(builder.fcmp_ordered(sign, a, b), builder.fcmp_unordered("uno", a, a))
        return builder.select(first, a, b)
    compare = builder.icmp_unsigned if dtype.startswith("u") else builder.icmp_signed
    return builder.select(compare(sign, a, b), a, b)


@intrinsic(prefer_literal=True)
def combine_line(typingctx: Any, code: Any, into: Any, left: Any, right: Any) -> Any:
    """Combine 64 bytes; `code` is dtype and op, a literal such as "float32 sum"."""
    return _combine_step(code, LINE_BYTES)


@intrinsic(prefer_literal=True)
def combine_line_past(typingctx: Any, code: Any, into: Any, left: Any, right: Any) -> Any:
    """As `combine_line`, past the caches; `into` is a multiple of 64."""
    return _combine_step(code, LINE_BYTES, True)


@intrinsic(prefer_literal=True)
def combine_element(typingctx: Any, code: Any, into: Any, left: Any, right: Any) -> Any:
    """As `combine_line`, one element at any address."""
    return _combine_step(code, 0)


def _combine_step(code: Any, size_bytes: int, past: bool = False) -> Any:
    if not isinstance(code, types.StringLiteral):
        return None
    dtype, op = code.literal_value.split()
    element = _FLOATS.get(dtype) or ir.IntType(int(dtype.lstrip("uint")))
    kind = ir.VectorType(element, size_bytes // itemsize(dtype)) if size_bytes else element

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        into, *operands = (builder.inttoptr(at, kind.as_pointer()) for at in values[1:])
        a, b = (builder.load(at, align=1) for at in operands)
        made = builder.store(pair(builder, dtype, op, a, b), into, align=LINE_BYTES if past else 1)
        if past:
            made.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(code, *(types.int64,) * 3), codegen


@cache
def _combiner(dtype: str, op: str) -> Any:
    item = itemsize(dtype)
    per_line = LINE_BYTES // item
    code = f"{dtype} {op}"

    def combine(into: int, left: int, right: int, n: int, past: int) -> None:
        whole = n // per_line * LINE_BYTES
        if past != 0 and into & (LINE_BYTES - 1) == 0:
            for i in range(0, whole, LINE_BYTES):
                combine_line_past(code, into + i, left + i, right + i)
        else:
            for i in range(0, whole, LINE_BYTES):
                combine_line(code, into + i, left + i, right + i)
        for i in range(whole, n * item, item):
            combine_element(code, into + i, left + i, right + i)

    return _callback(combine, f"{dtype}_{op}", 5)


@cache
def _divider(dtype: str) -> Any:
    double = dtype == "float64"

    def divide(at: int, n: int, divisor: int) -> None:
        if double:
            wide = carray(elements_at(at, types.float64), n)
            for i in range(n):
                wide[i] = wide[i] / types.float64(divisor)
        else:
            narrow = carray(elements_at(at, types.float32), n)
            for i in range(n):
                narrow[i] = narrow[i] / types.float32(divisor)

    return _callback(divide, dtype, 3)


@cache
def _converter(name: str, dtype: str) -> Any:
    makers: dict[str, Callable[..., None]] = {
        "widen bfloat16": _widen_bfloat16, "narrow bfloat16": _narrow_bfloat16,
        "widen float16": _widen_float16, "narrow float16": _narrow_float16,
    }  # fmt: skip
    return _callback(makers[f"{name} {dtype}"], dtype, 3)


def _callback(function: Callable[..., None], what: str, args: int) -> Any:
    """Compile for calls by address, under a name that tells what a closure closes over.

    Code is kept and linked by name: two closures of one name would become one.
    """
    name = f"{function.__name__.lstrip('_')}_{what}_{source_digest()}"
    return load_native(name, lambda: function, Signature((INT,) * args, "void"))


@cache
def source_digest() -> str:
    """Return a digest of the source files that the compiled code of this package is made from."""
    names = ("atomic", "combine", "fold", "meeting", "moves")
    files = [Path(__file__).with_name(f"{name}.py") for name in names]
    return digest_of([*files, Path(str(memory_steps.__file__))])


def _widen_bfloat16(into: int, source: int, n: int) -> None:
    a, c = carray(elements_at(source, types.uint16), n), carray(elements_at(into, types.uint32), n)
    for i in range(n):
        c[i] = types.uint32(a[i]) << types.uint32(16)


def _narrow_bfloat16(into: int, source: int, n: int) -> None:
    a, c = carray(elements_at(source, types.uint32), n), carray(elements_at(into, types.uint16), n)
    for i in range(n):
        bits = a[i]
        magnitude, high = bits & types.uint32(0x7FFFFFFF), bits >> types.uint32(16)
        rounded = (bits + types.uint32(0x7FFF) + (high & types.uint32(1))) >> types.uint32(16)
        quiet = (high & types.uint32(0x8000)) | types.uint32(0x7FC0)
        c[i] = types.uint16(quiet if magnitude > types.uint32(0x7F800000) else rounded)


def _widen_float16(into: int, source: int, n: int) -> None:
    a, c = carray(elements_at(source, types.uint16), n), carray(elements_at(into, types.uint32), n)
    f = carray(elements_at(into, types.float32), n)
    one = types.float32(2.0**-14)
    step = types.uint32(112 << 23)
    # A subnormal m is m * 2^-24: put it below a one at 2^-14 and take that off again. Both are exact, and no number on
    # the way is subnormal in float32, so that a process may flush those.
    for i in range(n):
        c[i] = ((types.uint32(a[i]) & types.uint32(0x7FFF)) << types.uint32(13)) + types.uint32(113 << 23)
    for i in range(n):
        f[i] = f[i] - one
    for i in range(n):
        bits = types.uint32(a[i])
        shifted = (bits & types.uint32(0x7FFF)) << types.uint32(13)
        normal = shifted + step
        normal = normal + step if shifted >= types.uint32(31 << 23) else normal
        tiny = c[i] & types.uint32(0x7FFFFFFF)
        value = tiny if shifted < types.uint32(1 << 23) else normal
        c[i] = value | ((bits & types.uint32(0x8000)) << types.uint32(16))


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


def itemsize(dtype: str) -> int:
    """Return the bytes of an element."""
    return 2 if dtype in HALVES else np.dtype(dtype).itemsize
