"""Rules of ops that work element by element."""

from __future__ import annotations

from lowshard.placement import Placement
from lowshard.solver.action import Result
from lowshard.solver.table.rule import MAX, MIN, Call, Offer, P, R, Refused, Rows, S, broadcast, row, rule

# Increasing everywhere, so that the max of the images is the image of the max; log and sqrt are not: NaN below 0.
INCREASING = ("relu", "exp", "sigmoid", "tanh", "erf", "floor", "round", "trunc")
NONLINEAR = (
    *INCREASING,
    "abs",
    "log",
    "sqrt",
    "rsqrt",
    "silu",
    "gelu",
    "sin",
    "cos",
    "log1p",
    "atanh",
    "acos",
)
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


@rule(*NONLINEAR, *TESTS)
def nonlinear(call: Call) -> Offer:
    """Any cut stays; max and min partials pass through an increasing function."""
    rows = _every_dim(call)
    if call.op in INCREASING:
        rows += [row(p, out=p) for p in call.ordered()]
    dtype = "bool" if call.op in TESTS else call.dtype
    return Offer(rows, (Result(call.shape(), dtype),))


@rule("negate")
def negate(call: Call) -> Offer:
    """Linear; the max of the negatives is the negative of the min."""
    rows = _every_dim(call) + [row(p, out=p) for p in call.linear()]
    rows += [row(p, out=MIN if p is MAX else MAX) for p in call.ordered()]
    return Offer(rows, (call.same(*call.shape()),))


@rule("mul_scalar", "dequantize")
def linear(call: Call) -> Offer:
    """Linear: any cut and any sum stays. Args of mul_scalar: value."""
    rows = _every_dim(call) + [row(p, out=p) for p in call.linear()]
    return Offer(rows, (Result(call.shape(), str(call.args.get("dtype", call.dtype))),))


@rule("add_scalar", "pow_scalar")
def shifted(call: Call) -> Offer:
    """Not linear: a sum would get the scalar once a rank. Args: value."""
    return Offer(_every_dim(call), (call.same(*call.shape()),))


@rule("cast")
def cast(call: Call) -> Offer:
    """Linear only where the dtype stays: a sum of rounded terms is not the rounded sum. Args: dtype."""
    dtype = str(call.args.get("dtype", call.dtype))
    rows = _every_dim(call)
    if dtype == call.dtype:
        rows += [row(p, out=p) for p in call.linear()]
    return Offer(rows, (Result(call.shape(), dtype),))


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


@rule("mul", "div", "pow", "mod", "maximum", "minimum", "complex_mul", *COMPARISONS, "add", "sub", operands=2)
def binary(call: Call) -> Offer:
    """Cut alike along a dim of the result; add and sub keep sums, mul keeps one beside a whole factor."""
    shape = broadcast(call)
    rows = along(call, shape)
    if call.op in ("add", "sub"):
        rows += [row(p, p, out=p) for p in call.linear()]
        # An average of terms that all get the same shift, a max of terms that do: shifted alike.
        if call.held("avg"):
            rows += [row(p, R, out=p) for p in call.linear() if p is not P]
        if call.op == "add":
            rows += [found for p in call.ordered() for found in (row(p, R, out=p), row(R, p, out=p))]
    elif call.op in ("mul", "div") and call.extended:
        rows += [row(p, R, out=p) for p in call.linear()]
        rows += [row(R, p, out=p) for p in call.linear() if call.op == "mul"]
    elif call.op in ("maximum", "minimum"):
        keeps = MAX if call.op == "maximum" else MIN
        rows += [row(p, p, out=p) for p in call.ordered() if p is keeps]
    dtype = "bool" if call.op in COMPARISONS else call.dtype
    return Offer(rows, (Result(shape, dtype),), (ONE_SIDED,))


@rule("where", operands=3)
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
    """Destination and source alike; the result lies as the destination."""
    rows = [row(S(d), S(d), out=S(d)) for d in range(call.ndim())]
    rows += [row(p, p, out=p) for p in call.linear()]
    return Offer(rows, (call.same(*call.shape()),))


@rule("cond", "while_loop", "masked_scatter", "nonzero", "scatter_nd", operands=(1, None))
def replicated_only(call: Call) -> Offer:
    """No row but the all-replicated one."""
    return Offer([], tuple(Result(x.shape, x.dtype) for x in call.layouts[:1]))
