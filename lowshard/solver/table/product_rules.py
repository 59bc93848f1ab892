"""Rules of products: matmul, outer, einsum, convolutions, grouped matmul."""

from __future__ import annotations

from lowshard.bounded import bounded_cache
from lowshard.errors import LayoutError
from lowshard.placement import Partial, Placement
from lowshard.solver.table.op_rule import Call, Offer, P, R, Refused, Rows, S, product_row, row, rule

GROUPED_CHANNELS = Refused(
    ("conv2d", "conv3d"),
    "(R, S_Cout) -> S_Cout with groups > 1",
    "a rank's output channels belong to some of the groups, but it would read the input channels of all",
)


def _bilinear(call: Call) -> Rows:
    rows = []
    for p in call.linear():
        rows += [product_row(p, R, out=p), product_row(R, p, out=p)]
    return rows


@rule("matmul", operands=2)
def matmul(call: Call) -> Offer:
    """lhs [..., M, K] times rhs [..., K, N]; vectors as NumPy's matmul takes them."""
    a, b = call.shape(0), call.shape(1)
    if not a or not b or a[-1] != b[-2 if len(b) > 1 else 0]:
        raise LayoutError(f"matmul: [..., M, K] @ [..., K, N] share K, got {list(a)} @ {list(b)}")
    rows: Rows = []
    if len(a) == 1 and len(b) == 1:
        return Offer([row(S(0), S(0), out=P), *_bilinear(call)], (call.same(),))
    if len(a) == 1:
        rows += [row(R, S(d), out=S(d)) for d in range(len(b) - 2)]
        rows += [row(R, S(len(b) - 1), out=S(len(b) - 2)), row(S(0), S(len(b) - 2), out=P)]
        return Offer(rows + _bilinear(call), (call.same(*b[:-2], b[-1]),))
    if len(b) == 1:
        rows += [row(S(d), R, out=S(d)) for d in range(len(a) - 1)]
        return Offer([*rows, row(S(len(a) - 1), S(0), out=P), *_bilinear(call)], (call.same(*a[:-1]),))
    ndim = max(len(a), len(b))
    batch, kinds = [], []
    for d in range(ndim - 2):
        da, db = d - ndim + len(a), d - ndim + len(b)
        ea, eb = (a[da] if da >= 0 else 1), (b[db] if db >= 0 else 1)
        if ea != eb and 1 not in (ea, eb):
            raise LayoutError(
                f"matmul: batch dims broadcast where extents are equal or 1, got {list(a)} @ {list(b)}"
            )
        batch.append(eb if ea == 1 else ea)
        kinds.append((ea > 1, eb > 1))
    rows = _matmul_rows(len(a), len(b), tuple(kinds), tuple(call.linear()))
    return Offer(rows, (call.same(*batch, a[-2], b[-1]),))


@bounded_cache(1 << 20)
def _matmul_rows(na: int, nb: int, kinds: tuple[tuple[bool, bool], ...], sums: tuple[Partial, ...]) -> Rows:
    """Return the rows of a product of arrays; `kinds` says for each batch dim which operand has it."""
    rows: Rows = []
    ndim = max(na, nb)
    for d, (left, right) in enumerate(kinds):
        needs = (S(d - ndim + na) if left else R, S(d - ndim + nb) if right else R)
        if left or right:
            rows.append(row(*needs, out=S(d)))
    rows += [
        row(S(na - 2), R, out=S(ndim - 2)),
        row(R, S(nb - 1), out=S(ndim - 1)),
        row(S(na - 1), S(nb - 2), out=P),
    ]
    for p in sums:
        rows += [product_row(p, R, out=p), product_row(R, p, out=p)]
    return rows


@rule("qmatmul", operands=(2, None))
def qmatmul(call: Call) -> Offer:
    """Quantised weights: all-replicated only. lhs [M, K], rhs [K, N]."""
    return Offer([], (call.same(*call.shape(0)[:-1], call.shape(1)[-1]),))


@rule("outer", operands=2)
def outer(call: Call) -> Offer:
    """Vectors [M] and [N] to [M, N]."""
    if call.ndim(0) != 1 or call.ndim(1) != 1:
        raise LayoutError(f"outer takes two vectors, got {list(call.shape(0))} and {list(call.shape(1))}")
    rows = [row(S(0), R, out=S(0)), row(R, S(0), out=S(1)), *_bilinear(call)]
    return Offer(rows, (call.same(call.shape(0)[0], call.shape(1)[0]),))


def parse_einsum(call: Call) -> tuple[list[str], str]:
    """Return the labels of each operand and of the result of an einsum."""
    text = str(call.need("subscripts")).replace(" ", "")
    inputs, arrow, output = text.partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != len(call.layouts) or "." in text:
        raise LayoutError(f"einsum takes subscripts such as 'bik,kj->bij', one term an operand; got {text!r}")
    extent: dict[str, int] = {}
    for term, layout in zip(terms, call.layouts, strict=True):
        if len(term) != layout.ndim or len(set(term)) != len(term):
            raise LayoutError(
                f"einsum: {term!r} names each dim of {list(layout.shape)} once, with different letters"
            )
        for label, n in zip(term, layout.shape, strict=True):
            if extent.setdefault(label, n) != n:
                raise LayoutError(f"einsum {text!r}: {label!r} is {extent[label]} and {n}")
    if set(output) - set(extent) or len(set(output)) != len(output):
        raise LayoutError(
            f"einsum {text!r}: the result names labels of the operands, each once; got {output!r}"
        )
    return terms, output


@rule("einsum", operands=(1, None), args=("subscripts",))
def einsum(call: Call) -> Offer:
    """A row a label: kept labels are cut in the result, summed ones make a sum; linear in each operand."""
    terms, output = parse_einsum(call)
    labels = dict.fromkeys("".join(terms))
    rows: Rows = []
    for kept in (True, False):
        for label in labels:
            if (label in output) is kept:
                needs: list[Placement] = [S(t.index(label)) if label in t else R for t in terms]
                rows.append(row(*needs, out=S(output.index(label)) if kept else P))
    for p in call.linear():
        for k in range(len(terms)):
            rows.append(product_row(*(p if i == k else R for i in range(len(terms))), out=p))
    extent = {
        x: n
        for t, layout in zip(terms, call.layouts, strict=True)
        for x, n in zip(t, layout.shape, strict=True)
    }
    return Offer(rows, (call.same(*(extent[x] for x in output)),))


def conv_shapes(call: Call) -> tuple[bool, bool, int, tuple[int, ...]]:
    """Return whether channels come first, whether it is transposed, the groups, and the result's shape."""
    # x is [N, *space, C] ("NHWC") or [N, C, *space] ("NCHW"); the filter [*taps, Cin / groups, Cout], transposed
    # [*taps, Cout, Cin].
    x, w = call.shape(0), call.shape(1)
    first = str(call.args.get("layout", "NHWC")).upper().startswith("NC")
    transposed = call.op.endswith("_transpose")
    groups, space = int(call.args.get("groups", 1)), len(x) - 2
    if transposed and groups != 1:
        raise LayoutError(f"{call.op}: groups is 1, got {groups}; call it for the channels of each group")
    if len(w) != len(x) or space < 1:
        raise LayoutError(
            f"{call.op}: x and filter have the same number of dims, got {list(x)} and {list(w)}"
        )
    strides, pads = conv_geometry(call.args, space)
    places = range(2, len(x)) if first else range(1, len(x) - 1)
    extents = []
    for i, d in enumerate(places):
        low, high = pads[i]
        if transposed:
            extents.append((x[d] - 1) * strides[i] + w[i] - low - high)
        else:
            extents.append((x[d] + low + high - w[i]) // strides[i] + 1)
    channels, cout = x[1 if first else -1], w[-2 if transposed else -1]
    if channels != w[-1 if transposed else -2] * (1 if transposed else groups) or min(extents) < 1:
        raise LayoutError(f"{call.op}: filter {list(w)} with {groups} groups does not fit x {list(x)}")
    out = (x[0], cout, *extents) if first else (x[0], *extents, cout)
    return first, transposed, groups, out


def conv_geometry(args: object, space: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the stride and the padding (low, high) of each space dim."""
    given = dict(args)  # type: ignore[call-overload]  # a mapping or pairs
    stride, padding = given.get("stride", 1), given.get("padding", 0)
    strides = [stride] * space if isinstance(stride, int) else list(stride)
    if isinstance(padding, int):
        return strides, [(padding, padding)] * space
    return strides, [(p, p) if isinstance(p, int) else (p[0], p[1]) for p in padding]


@rule(
    "conv2d", "conv3d", "conv2d_transpose", "conv3d_transpose", operands=(2, 3),
    args=("layout", "stride", "padding", "groups"),
)  # fmt: skip
def conv(call: Call) -> Offer:
    """Batch or output channels cut; input channels cut make a sum. Operands: x, filter[, bias]."""
    first, transposed, groups, shape = conv_shapes(call)
    ndim = call.ndim()
    channel = 1 if first else ndim - 1
    w_in, w_out = (ndim - 1, ndim - 2) if transposed else (ndim - 2, ndim - 1)
    result = (call.same(*shape),)
    if len(call.layouts) == 3:
        rows = [row(S(0), R, R, out=S(0))]
        if groups == 1:
            rows.append(row(R, S(w_out), S(0), out=S(channel)))
            if call.extended:  # the bias enters once: it becomes a term of the sum
                rows.append(row(S(channel), S(w_in), P, out=P))
        return Offer(rows, result, (GROUPED_CHANNELS,) if groups > 1 else ())
    rows = [row(S(0), R, out=S(0))]
    if groups > 1:
        return Offer(rows + _bilinear(call), result, (GROUPED_CHANNELS,))
    rows += [row(R, S(w_out), out=S(channel)), row(S(channel), S(w_in), out=P)]
    return Offer(rows + _bilinear(call), result)


@rule("grouped_matmul", operands=(3, 5), indices=(2, 3, 4))
def grouped_matmul(call: Call) -> Offer:
    """Experts' products: x [T, K], weight [E, N, K], starts [E + 1] (rows of x by expert)[, ids, stats] to [T, N]."""
    x, weight, starts = (call.shape(i) for i in range(3))
    if (len(x), len(weight)) != (2, 3) or x[1] != weight[2] or starts != (weight[0] + 1,):
        raise LayoutError(
            f"grouped_matmul: x [T, K], weight [E, N, K], starts [E + 1], got {list(x)}, {list(weight)}, {list(starts)}"
        )
    rest = (R,) * (len(call.layouts) - 2)
    rows = [row(R, S(1), *rest, out=S(1)), row(S(1), S(2), *rest, out=P)]
    if call.extended:
        rows += [product_row(p, R, *rest, out=p) for p in call.linear()]
        rows += [product_row(R, p, *rest, out=p) for p in call.linear()]
    return Offer(rows, (call.same(x[0], weight[1]),))
