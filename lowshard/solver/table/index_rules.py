"""Rules of lookups, scatters, top-k, sorts, and of attention and experts."""

from __future__ import annotations

from lowshard.errors import LayoutError
from lowshard.solver.assignment import Result
from lowshard.solver.table.op_rule import (
    FLOAT,
    Call,
    Offer,
    P,
    R,
    Refused,
    S,
    cutting_sizes,
    exchange,
    index_bytes,
    most_received,
    passing,
    product_row,
    row,
    rule,
    shares,
)

INDEX_DTYPE = "int64"
CROSS = Refused(
    ("gather",),
    "(Sk, Sq) -> S(a+q) on one mesh axis",
    "the result keeps the cut of the indices and drops the table's",
)


@rule("gather", operands=2, indices=(1,), args=("axis",))
@rule("embedding", operands=2, indices=(1,))
def gather(call: Call) -> Offer:
    """Rows of a table by index, as NumPy's take: table, indices. Args: axis (embedding: 0)."""
    # Extended, along a cut looked-up dim: every rank looks up what it holds, and the sum is left to do.
    at = 0 if call.op == "embedding" else call.dim("axis", 0)
    table, ids = call.shape(0), call.shape(1)
    rows = [row(S(k), R, out=S(k if k < at else k + len(ids) - 1)) for k in range(len(table)) if k != at]
    rows += [row(R, S(q), out=S(at + q)) for q in range(len(ids))]
    rows += [row(p, R, out=p) for p in (*call.linear(), *call.ordered())]
    if call.extended:
        rows.append(row(S(at), R, out=P, how="mask"))
    return Offer(rows, (call.same(*table[:at], *ids, *table[at + 1 :]),), (CROSS,))


@rule("gather_nd", operands=2, indices=(1,), args=("batch_dims",))
def gather_nd(call: Call) -> Offer:
    """x[b..., i...]: operands x, indices [b..., ..., n]. Batch dims cut alike; linear in x. Args: batch_dims."""
    x, ids = call.shape(0), call.shape(1)
    batch = int(call.args.get("batch_dims", 0))
    if not ids or batch + ids[-1] > len(x):
        raise LayoutError(f"gather_nd: the last dim of the indices {list(ids)} numbers dims of x {list(x)}")
    if batch < 0 or len(ids) <= batch or x[:batch] != ids[:batch]:
        raise LayoutError(
            f"gather_nd: x and indices begin with the same {batch} batch dims, got {list(x)} and {list(ids)}"
        )
    rows = [row(S(b), S(b), out=S(b)) for b in range(batch)]
    rows += [row(p, R, out=p) for p in call.linear()]
    return Offer(rows, (call.same(*ids[:-1], *x[batch + ids[-1] :]),))


@rule(
    "scatter", "scatter_add", "scatter_max", "scatter_min", "scatter_mul", operands=3, indices=(2,), args=("axis",)
)  # fmt: skip
def scatter(call: Call) -> Offer:
    """Writes updates at indices along a dim: operands x, updates, indices. Other dims cut alike. Args: axis."""
    at = call.dim()
    x, u, ids = (call.shape(i) for i in range(3))
    fits = len(x) == len(u) and all(d == at or n <= x[d] for d, n in enumerate(u))
    if u != ids or not fits:
        raise LayoutError(
            f"{call.op}: updates and indices have one shape, at most x's beside dim {at}, got x {list(x)}, updates "
            f"{list(u)}, indices {list(ids)}"
        )
    rows = [
        row(S(d), S(d), S(d), out=S(d))
        for d in range(call.ndim())
        # Shorter updates touch the leading elements alone: their shards are others than x's.
        if d != at and x[d] == u[d]
    ]
    if call.extended and call.op == "scatter_add":
        rows += [row(p, p, R, out=p, kinds=passing(p)) for p in call.linear()]
    return Offer(rows, (call.same(*x),))


@rule("top_k", "bottom_k", "top_k_values", args=("k", "axis"))
def top_k(call: Call) -> Offer:
    """The k largest along a dim: values and indices (top_k_values: values). Args: k, axis."""
    at, k = call.dim(), int(call.args.get("k", 1))
    shape = call.shape()
    if not 0 < k <= shape[at]:
        raise LayoutError(f"{call.op}: k is 1 to the extent {shape[at]} of dim {at}, got {k}")
    out = tuple(k if d == at else n for d, n in enumerate(shape))
    rows = [row(S(d), out=S(d)) for d in range(len(shape)) if d != at]
    if call.extended:
        own = k * call.statistic_elems((at,)) * (call.layouts[0].itemsize_bytes + 8)
        rows.append(row(S(at), out=R, how="pairs", inner=(("all_gather", own),)))
    results = (call.same(*out), Result(out, INDEX_DTYPE))
    return Offer(rows, results[:1] if call.op == "top_k_values" else results)


@rule("argsort", "sort", args=("axis",))
def sort(call: Call) -> Offer:
    """Along the last dim, stable. Published: all-replicated; extended: other dims stay cut. Args: axis."""
    at = call.dim()
    rows = [row(S(d), out=S(d)) for d in range(call.ndim()) if d != at] if call.extended else []
    return Offer(rows, (Result(call.shape(), INDEX_DTYPE if call.op == "argsort" else call.dtype),))


@rule("attention", operands=3, kinds=FLOAT, args=("causal", "scale"))
def attention(call: Call) -> Offer:
    """softmax(q kT scale) v: q [B, H, L, D], k [B, G, T, D], v [B, G, T, E], H a multiple of G. Args: causal, scale."""
    # Extended: batch; heads with their KV groups (fetched where the splits differ); heads with whole k and v; query
    # positions; channels of v.
    q, k, v = (call.shape(i) for i in range(3))
    if (len(q), len(k), len(v)) != (4, 4, 4) or q[0] != k[0] or k[:3] != v[:3] or q[3] != k[3]:
        raise LayoutError(
            f"attention: q [B, H, L, D], k [B, G, T, D], v [B, G, T, E], got {list(q)}, {list(k)}, {list(v)}"
        )
    heads, kv_heads = q[1], k[1]
    if not kv_heads or not heads or heads % kv_heads:
        raise LayoutError(
            f"attention: the {heads} query heads are a multiple of the {kv_heads} KV heads, and not 0"
        )
    result = (call.same(*q[:3], v[3]),)
    if not call.extended:
        return Offer([], result)
    cut, share = cutting_sizes(call, 1), heads // kv_heads
    want = [(a // share, -(-b // share) if b > a else a // share) for a, b in shares(heads, cut)]
    missing = most_received([shares(kv_heads, cut)], want, [(0, 0, 0, kv_heads)])
    head_bytes = index_bytes(call.layouts[1], (1,)) + index_bytes(call.layouts[2], (1,))
    moved = exchange(missing * head_bytes, cut)
    rows = [
        row(S(0), S(0), S(0), out=S(0)),
        # Never plainly local: along another mesh axis the query heads may be cut without the KV heads.
        row(S(1), S(1), S(1), out=S(1), how="halo", inner=moved),
        row(S(1), R, R, out=S(1)),
        row(S(2), R, R, out=S(2)),
        row(R, R, S(3), out=S(3)),
    ]
    rows += [row(R, R, p, out=p) for p in call.linear()]
    return Offer(rows, result)


@rule("moe_finalize", operands=3, kinds=FLOAT, indices=(1,))
def moe_finalize(call: Call) -> Offer:
    """Weighted sum of each token's expert outputs: y [T * k, D], places [T, k], weights [T, k] to [T, D]."""
    y, places, weights = (call.shape(i) for i in range(3))
    if (len(y), len(places)) != (2, 2) or y[0] != places[0] * places[1] or weights != places:
        raise LayoutError(
            f"moe_finalize: y [T * k, D], places [T, k], weights [T, k], got {list(y)}, {list(places)}, {list(weights)}"
        )
    rows = [row(S(1), R, R, out=S(1)), *(product_row(p, R, R, out=p) for p in call.linear())]
    return Offer(rows, (call.same(places[0], y[1]),))


@rule("fused_silu", operands=(1, 2), kinds=FLOAT, indices=(1,))
def fused_silu(call: Call) -> Offer:
    """silu(gate) * up of [T, 2 D] with the halves side by side: rows stay cut[, starts whole]."""
    rest = (R,) * (len(call.layouts) - 1)
    *lead, width = call.shape()
    if width % 2:
        raise LayoutError(f"fused_silu: the last dim holds gate and up side by side, got {width}")
    rows = [row(S(d), *rest, out=S(d)) for d in range(len(lead))]
    return Offer(rows, (call.same(*lead, width // 2),))


@rule("sigmoid_router", "moe_create_indices", "nms", "roi_align", operands=(1, None), args=None)
def experts(call: Call) -> Offer:
    """All-replicated only."""
    return Offer([], (call.same(*call.shape()),))
