"""Rules of ops that work element by element."""

from __future__ import annotations

import math
from numbers import Integral, Real

import numpy as np

from lowshard import dtypes
from lowshard.errors import LayoutError
from lowshard.placement import Placement
from lowshard.solver.assignment import EVERY_KIND, Result
from lowshard.solver.table.op_rule import (
    AVG,
    FLOAT,
    MAX,
    MIN,
    NUMBER,
    Call,
    Offer,
    R,
    Refused,
    Rows,
    S,
    broadcast,
    passing,
    product_row,
    row,
    rule,
)

# Increasing everywhere, so that the max of the images is the image of the max. Not so log and sqrt, which are NaN below
# 0, nor exp, whose large images are NaN in float8_e4m3fn, which has no infinity.
INCREASING = ("relu", "sigmoid", "tanh", "erf", "floor", "round", "trunc")
REAL = (
    "exp", "log", "sqrt", "rsqrt", "sigmoid", "silu", "gelu", "tanh", "sin", "cos", "erf", "log1p", "atanh", "acos",
)  # fmt: skip
NONLINEAR = ("relu", "abs", "floor", "round", "trunc", *REAL)
TESTS = ("is_nan", "is_inf", "logical_not")
COMPARISONS = (
    "equal", "not_equal", "greater", "greater_equal", "less", "less_equal", "logical_and", "logical_or",
    "logical_xor",
)  # fmt: skip
ONE_SIDED = Refused(
    ("add", "sub", "mul", "div", "where"),
    "(Sd, R) -> Sd with both of full extent",
    "one operand's shard meets the other's whole: the local shapes do not match",
)


def _every_dim(call: Call) -> Rows:
    return [row(S(d), out=S(d)) for d in range(call.ndim())]


@rule("relu", "abs", "floor", "round", "trunc", *TESTS)
@rule(*REAL, kinds=FLOAT)
def nonlinear(call: Call) -> Offer:
    """Any cut stays; max and min partials pass through an increasing function."""
    rows = _every_dim(call)
    if call.op in INCREASING:
        rows += [row(p, out=p) for p in call.ordered()]
    dtype = "bool" if call.op in TESTS else call.dtype
    return Offer(rows, (Result(call.shape(), dtype),))


@rule("negate", kinds=NUMBER)
def negate(call: Call) -> Offer:
    """Linear; the max of the negatives is the negative of the min, of floats: the least integer has no negative."""
    rows = _every_dim(call) + [row(p, out=p, kinds=passing(p)) for p in call.linear()]
    rows += [row(p, out=MIN if p is MAX else MAX, kinds=FLOAT) for p in call.ordered()]
    return Offer(rows, (call.same(*call.shape()),))


@rule("mul_scalar", args=("value",))
def mul_scalar(call: Call) -> Offer:
    """Linear: any cut and any sum stays; of integers where the factor is one. Args: value."""
    value, rows = scalar(call), _every_dim(call)
    whole = isinstance(value, Integral)
    if math.isfinite(value) and abs(value) <= _largest(call.dtype):
        rows += [row(p, out=p, kinds=passing(p) if whole else FLOAT) for p in call.linear()]
    return Offer(rows, (call.same(*call.shape()),))


def _largest(dtype: str) -> float:
    """Return the largest factor that is finite where an op computes on a dtype."""
    wide = dtypes.get(dtype).accumulator
    return float(np.finfo(wide.numpy).max) if wide.kind == "float" else math.inf


@rule("add_scalar", "pow_scalar", args=("value",))
def shifted(call: Call) -> Offer:
    """Not linear: a sum would get the scalar once a rank. Args: value."""
    scalar(call)
    return Offer(_every_dim(call), (call.same(*call.shape()),))


def scalar(call: Call) -> int | float:
    """Return the argument `value`, 1 by default."""
    value, dtype = call.args.get("value", 1), dtypes.get(call.dtype)
    if not isinstance(value, Real):
        raise LayoutError(f"{call.op}: value is a real number, got {value!r}")
    if dtype.kind in ("int", "uint"):
        least = 0 if dtype.kind == "uint" else -(1 << dtype.bits - 1)
        most = least + (1 << dtype.bits) - 1
        if isinstance(value, Integral) and not least <= int(value) <= most:
            raise LayoutError(
                f"{call.op}: {dtype} holds values from {least} to {most}, got {value!r}; cast first"
            )
        if call.op == "pow_scalar" and not (isinstance(value, Integral) and int(value) >= 0):
            raise LayoutError(
                f"pow_scalar: the exponent of {dtype} is an integer from 0, got {value!r}; cast first"
            )
    return value  # type: ignore[return-value]  # a real number, of NumPy perhaps


@rule("cast", "dequantize", args=("dtype",))
def cast(call: Call) -> Offer:
    """A copy where the dtype stays: all sums do. Else only dequantize, of floats, keeps sums. Args: dtype."""
    # Terms whose fractions or high bits were dropped have another sum; that of rounded floats is near the rounded sum.
    dtype = dtypes.get(call.args.get("dtype", call.dtype))
    rows = _every_dim(call)
    if dtype.name == call.dtype or (call.op == "dequantize" and dtype.kind == "float"):
        kinds = EVERY_KIND if dtype.name == call.dtype else FLOAT
        rows += [row(p, out=p, kinds=kinds) for p in call.linear()]
    return Offer(rows, (Result(call.shape(), dtype.name),))


@rule("passthrough")
def passthrough(call: Call) -> Offer:
    """Whatever comes stays. All partials too, where one comes."""
    rows = _every_dim(call) + [row(p, out=p) for p in (*call.linear(), *call.ordered())]
    return Offer(rows, (call.same(*call.shape()),))


def along(call: Call, shape: tuple[int, ...]) -> Rows:
    """Return a row for each dim of the result: operands of full extent are cut, broadcast ones are whole."""
    rows = []
    for d, extent in enumerate(shape):
        needs: list[Placement] = []
        for layout in call.layouts:
            own = d - len(shape) + layout.ndim
            needs.append(S(own) if own >= 0 and layout.shape[own] == extent else R)
        rows.append(row(*needs, out=S(d)))
    return rows


@rule("mul", "div", "mod", "maximum", "minimum", "complex_mul", *COMPARISONS, "add", operands=2)
@rule("pow", operands=2, kinds=EVERY_KIND - {"int"})  # a negative exponent has no result among integers
@rule("sub", operands=2, kinds=NUMBER)
def binary(call: Call) -> Offer:
    """Cut alike along a dim of the result; add and sub keep sums, mul keeps one beside a whole, finite factor."""
    # Not so div, nor add beside a max: a divisor of 0, or the infinity that stands for no element, would make a NaN.
    shape = broadcast(call)
    rows = along(call, shape)
    if call.op in ("add", "sub"):
        rows += [row(p, p, out=p, kinds=passing(p)) for p in call.linear()]
        if call.held("avg"):  # terms that all get the same shift: the average is shifted alike
            rows.append(row(AVG, R, out=AVG, kinds=FLOAT))
    elif call.op == "mul" and call.extended:
        rows += [product_row(p, R, out=p) for p in call.linear()]
        rows += [product_row(R, p, out=p) for p in call.linear()]
    elif call.op in ("maximum", "minimum"):
        keeps = MAX if call.op == "maximum" else MIN
        rows += [row(p, p, out=p) for p in call.ordered() if p is keeps]
    dtype = "bool" if call.op in COMPARISONS else call.dtype
    return Offer(rows, (Result(shape, dtype),), (ONE_SIDED,))


@rule("where", operands=3, indices=(0,), index_kinds=EVERY_KIND)
def where(call: Call) -> Offer:
    """Cut alike along a dim of the result. Operands: condition, x, y."""
    shape = broadcast(call)
    rows = along(call, shape)
    if call.extended:
        rows += [row(R, p, p, out=p) for p in call.linear()]
    return Offer(rows, (Result(shape, call.layouts[1].dtype),), (ONE_SIDED,))


@rule("rebind", operands=(1, None))
def rebind(call: Call) -> Offer:
    """Nothing ever moves: one row for each way the operands come on a mesh axis."""
    placements = [layout.placements for layout in call.layouts]
    rows: Rows = []
    for axis in range(call.layouts[0].mesh.ndim):
        held = tuple(p[axis] for p in placements)
        made = row(*held, out=held)
        if made not in rows:
            rows.append(made)
    return Offer(rows, tuple(Result(x.shape, x.dtype) for x in call.layouts))


@rule("buffer_store", operands=2)
def buffer_store(call: Call) -> Offer:
    """Destination and source alike, of one shape; the result lies as the destination."""
    if call.shape(0) != call.shape(1):
        raise LayoutError(
            f"buffer_store: destination and source have one shape, got {list(call.shape(0))} and {list(call.shape(1))}"
        )
    rows = [row(S(d), S(d), out=S(d)) for d in range(call.ndim())]
    rows += [row(p, p, out=p) for p in call.linear()]
    return Offer(rows, (call.same(*call.shape()),))


@rule("cond", "while_loop", "masked_scatter", "nonzero", "scatter_nd", operands=(1, None), args=None)
def replicated_only(call: Call) -> Offer:
    """No row but the all-replicated one."""
    return Offer([], tuple(Result(x.shape, x.dtype) for x in call.layouts[:1]))
