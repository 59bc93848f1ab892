"""Rules of reductions, scans, softmax, norms and pooling. A reduced dim stays, with extent 1."""

from __future__ import annotations

from lowshard.errors import LayoutError
from lowshard.placement import Partial, Placement
from lowshard.solver.assignment import AxisAssignment, Result
from lowshard.solver.table.op_rule import (
    AVG,
    FLOAT,
    MAX,
    MIN,
    PROD,
    Call,
    Offer,
    P,
    R,
    Refused,
    Rows,
    S,
    dim_of,
    passing,
    row,
    rule,
)  # fmt: skip

CUMSUM = Refused(
    ("cumsum",),
    "Sa -> P along the scanned dim",
    "each rank's scan starts at 0, and the local shapes are shards",
)
UNEVEN_MEAN = Refused(
    ("mean",),
    "Sa -> P:avg with uneven shards",
    "the plain average of shard means weighs short shards too much",
)
INDEX_DTYPE = "int64"


def _dims(call: Call) -> tuple[int, ...]:
    """Return the reduced dims: the argument `axis` is a dim, several, or None for all."""
    axis = call.args.get("axis", -1)
    if axis is None:
        return tuple(range(call.ndim()))
    many = axis if isinstance(axis, (list, tuple)) else (axis,)
    dims = tuple(dim_of(a, call.ndim(), f"{call.op}: axis") for a in many)
    if len(set(dims)) < len(dims):
        raise LayoutError(f"{call.op}: axis names each dim once, got {axis}")
    return dims


def _others(call: Call, dims: tuple[int, ...]) -> Rows:
    return [row(S(d), out=S(d)) for d in range(call.ndim()) if d not in dims]


def _reduced(call: Call, dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if d in dims else n for d, n in enumerate(call.shape()))


@rule("sum", args=("axis",))
def sum_(call: Call) -> Offer:
    """A cut reduced dim leaves a sum to do. Args: axis."""
    dims = _dims(call)
    rows = _others(call, dims) + [row(S(d), out=P) for d in dims]
    rows += [row(p, out=p, kinds=passing(p)) for p in call.linear()]
    return Offer(rows, (call.same(*_reduced(call, dims)),))


@rule("mean", args=("axis",))
def mean(call: Call) -> Offer:
    """Even shards leave an average to do; uneven ones a sum of terms that are already divided. Args: axis."""
    dims = _dims(call)
    rows, refused = _others(call, dims), []
    layout = call.layouts[0]
    for d in dims:
        # Even whichever mesh axes cut the dim, or at least as it comes.
        held = tuple(layout.mesh.axis_names[a] for a in layout.sharding_axes[d])
        if layout.shape[d] % layout.mesh.size == 0:
            rows.append(row(S(d), out=AVG, kinds=FLOAT))
        elif call.extended:
            rows.append(row(S(d), out=P, how="scale", kinds=FLOAT))
        elif held and layout.shape[d] % layout.mesh.axis_size(held) == 0:
            rows.append(AxisAssignment((S(d),), AVG, only=held, kinds=FLOAT))
        else:
            refused.append(UNEVEN_MEAN)
    rows += [row(p, out=p, kinds=FLOAT) for p in call.linear()]
    return Offer(rows, (call.same(*_reduced(call, dims)),), tuple(dict.fromkeys(refused)))


_KEEPS: dict[str, Partial] = {"max": MAX, "min": MIN, "prod": PROD}


@rule("max", "min", "prod", args=("axis",))
def extreme(call: Call) -> Offer:
    """Extended: a cut reduced dim leaves a max, min or product to do. Args: axis."""
    dims = _dims(call)
    rows = _others(call, dims)
    keeps = _KEEPS[call.op]
    if call.extended:
        rows += [row(S(d), out=keeps) for d in dims]
        if call.held(keeps.op) and keeps is not PROD:
            rows.append(row(keeps, out=keeps))
        if keeps is PROD and call.held("prod"):
            rows.append(row(PROD, out=PROD))
    return Offer(rows, (call.same(*_reduced(call, dims)),))


@rule("argmax", "argmin", args=("axis",))
def arg_extreme(call: Call) -> Offer:
    """Extended, along a cut dim: every rank's best value and place are gathered, the first of equals wins."""
    dim = call.dim()
    rows = _others(call, (dim,))
    if call.extended:
        pairs = call.statistic_elems((dim,)) * (call.layouts[0].itemsize_bytes + 8)
        rows.append(row(S(dim), out=R, how="pairs", inner=(("all_gather", pairs),)))
    return Offer(rows, (Result(_reduced(call, (dim,)), INDEX_DTYPE),))


@rule("softmax", "logsoftmax", kinds=FLOAT, args=("axis",))
def softmax(call: Call) -> Offer:
    """Extended, along a cut dim: the maximum, then the sum of exponents, are all-reduced. Args: axis."""
    dim = call.dim()
    rows = _others(call, (dim,))
    if call.extended:
        own = call.statistic_bytes((dim,))
        inner = (("all_reduce", own), ("all_reduce", own))
        rows.append(row(S(dim), out=S(dim), how="statistics", inner=inner))  # type: ignore[arg-type]
    return Offer(rows, (call.same(*call.shape()),))


@rule("cumsum", args=("axis",))
def cumsum(call: Call) -> Offer:
    """Extended, along a cut dim: ranks gather their totals and add those before them; sums pass. Args: axis."""
    dim = call.dim()
    rows = _others(call, (dim,))
    if call.extended:
        inner = (("all_gather", call.statistic_bytes((dim,))),)
        rows.append(row(S(dim), out=S(dim), how="scan", inner=inner))  # type: ignore[arg-type]
        rows += [row(p, out=p, kinds=passing(p)) for p in call.linear()]
    return Offer(rows, (call.same(*call.shape()),), (CUMSUM,))


@rule("layer_norm", "rms_norm", operands=(2, 3), kinds=FLOAT, args=("eps",))
def norm(call: Call) -> Offer:
    """Normalises the trailing dims that the weight has. Operands: x, weight[, bias]. Args: eps."""
    # Extended, along a cut normalised dim: sums of squares (layer_norm: sums, then squares) are all-reduced.
    x, w = call.shape(0), call.shape(1)
    lead = len(x) - len(w)
    if lead < 0 or x[lead:] != w or any(layout.shape != w for layout in call.layouts[2:]):
        shapes = ", ".join(str(list(layout.shape)) for layout in call.layouts[1:])
        raise LayoutError(f"{call.op}: weight and bias have the trailing dims of x {list(x)}, got {shapes}")
    whole = (R,) * (len(call.layouts) - 1)
    rows = [row(S(d), *whole, out=S(d)) for d in range(lead)]
    if call.extended:
        own = call.statistic_bytes(range(lead, len(x)))
        inner = (("all_reduce", own),) * (1 if call.op == "rms_norm" else 2)
        for d in range(lead, len(x)):
            needs: tuple[Placement, ...] = (S(d - lead),) * len(whole)
            rows.append(row(S(d), *needs, out=S(d), how="statistics", inner=inner))  # type: ignore[arg-type]
    return Offer(rows, (call.same(*x),))


@rule("group_norm", operands=3, kinds=FLOAT, args=("groups", "eps"))
def group_norm(call: Call) -> Offer:
    """x [N, C, *space], weight [C], bias [C]. Published without a rule; extended: the batch may be cut."""
    shape, groups = call.shape(), call.args.get("groups", 1)
    channels = shape[1] if len(shape) > 1 else 0
    if any(layout.shape != (channels,) for layout in call.layouts[1:]) or groups < 1 or channels % groups:
        shapes = ", ".join(str(list(layout.shape)) for layout in call.layouts)
        raise LayoutError(
            "group_norm takes x [N, C, *space], weight [C], bias [C] and groups that divide C; got "
            f"{shapes} and {groups} groups"
        )
    rows = [row(S(0), R, R, out=S(0))] if call.extended else []
    return Offer(rows, (call.same(*call.shape()),))


@rule("max_pool", "avg_pool", args=("size", "stride", "padding"))
def pool(call: Call) -> Offer:
    """x [N, H, W, C]: batch or channels cut; averages keep sums. Args: size, stride, padding."""
    rows = [row(S(0), out=S(0)), row(S(3), out=S(3))]
    if call.op == "avg_pool":
        rows += [row(p, out=p, kinds=FLOAT) for p in call.linear()]
    else:
        rows += [row(p, out=p) for p in call.ordered() if p is MAX]
    n, h, w, c = call.shape()
    size, stride, low = pool_geometry(call.args)
    out = [(extent + 2 * low[i] - size[i]) // stride[i] + 1 for i, extent in enumerate((h, w))]
    return Offer(rows, (call.same(n, *out, c),))


def pool_geometry(args: object) -> tuple[list[int], list[int], list[int]]:
    """Return window, stride (the window's by default) and padding of height and width."""
    given = dict(args)  # type: ignore[call-overload]  # a mapping or pairs

    def pair(value: object) -> list[int]:
        return [value, value] if isinstance(value, int) else list(value)  # type: ignore[call-overload]

    size = pair(given.get("size", 2))
    return size, pair(given.get("stride", size)), pair(given.get("padding", 0))
