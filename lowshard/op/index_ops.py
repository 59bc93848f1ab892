"""Kernels of lookups, scatters, top-k, sorts, and of attention and experts."""

from __future__ import annotations

import math

import numpy as np

from lowshard import dtypes
from lowshard.op.elementwise_ops import sigmoid
from lowshard.op.op_part import Array, Held, Part, Run, along, converted, exchange, in_accumulator, kernel


def _places(part: Part, indices: Array, extent: int) -> Array:
    """Return indices of a dim, counted from 0, as int64."""
    if part.xp is np and indices.size and not -extent <= int(indices.min()) <= int(indices.max()) < extent:
        raise IndexError(
            f"indices of {extent} elements are from {-extent} to {extent - 1}, got {int(indices.min())} to "
            f"{int(indices.max())}"
        )
    found = indices.astype(np.int64)
    return part.xp.where(found < 0, found + extent, found)


@kernel("gather", "embedding")
def gather(part: Part, table: Array, indices: Array) -> Array:
    """As NumPy's take; where the looked-up dim is cut, zeros stand for what other ranks hold."""
    xp = part.xp
    dim = 0 if part.op == "embedding" else part.dim("axis", 0)
    indices = _places(part, indices, part.shape()[dim])
    if not part.axes("mask", 0, dim):
        return xp.take(table, indices, axis=dim)
    start, stop = part.box()[dim]
    here = (indices >= start) & (indices < stop)
    if start == stop:
        return xp.zeros(part.out_shape(), table.dtype)
    found = xp.take(table, xp.where(here, indices - start, 0), axis=dim)
    shape = (1,) * dim + here.shape + (1,) * (table.ndim - dim - 1)
    return xp.where(here.reshape(shape), found, xp.zeros((), table.dtype))


@kernel("gather_nd")
def gather_nd(part: Part, x: Array, indices: Array) -> Array:
    """x at index tuples, batch by batch."""
    xp, batch = part.xp, int(part.args.get("batch_dims", 0))
    lead = xp.ix_(*(xp.arange(n) for n in x.shape[:batch])) if batch else ()
    middle = indices.ndim - 1 - batch
    lead = tuple(a.reshape(a.shape + (1,) * middle) for a in lead)
    columns = (_places(part, indices[..., i], x.shape[batch + i]) for i in range(indices.shape[-1]))
    return x[(*lead, *columns)]


_SCATTER = {
    "scatter_add": "add",
    "scatter_max": "maximum",
    "scatter_min": "minimum",
    "scatter_mul": "multiply",
}


@kernel("scatter", "scatter_add", "scatter_max", "scatter_min", "scatter_mul")
def scatter(part: Part, x: Array, updates: Array, indices: Array) -> Array:
    """Element [.., indices[.., i, ..], ..] takes updates[.., i, ..]."""
    xp, dim = part.xp, part.dim()
    wide = dtypes.get(x.dtype).accumulator
    made, updates = x.astype(wide.numpy), converted(xp, updates, wide)
    places = [
        xp.arange(n).reshape([-1 if d == e else 1 for e in range(x.ndim)])
        for d, n in enumerate(indices.shape)
    ]
    places[dim] = _places(part, indices, x.shape[dim])
    if part.op == "scatter":
        made[tuple(places)] = updates
    else:
        getattr(xp, _SCATTER[part.op]).at(made, tuple(places), updates)
    return made


def _comparable(x: Array) -> Array:
    """Return an array in a dtype that NumPy sorts with NaN last: ml_dtypes' types leave the rest unsorted then."""
    return x.astype(np.float32) if dtypes.get(x.dtype).kind == "scale" else in_accumulator(x)


def _descending(part: Part, x: Array, dim: int) -> Array:
    """Return the stable order from large to small along a dim: of equals the first index comes first, NaN largest."""
    xp, x = part.xp, _comparable(x)
    if part.op == "bottom_k":
        return xp.argsort(x, axis=dim, kind="stable")
    back = xp.argsort(xp.flip(x, dim), axis=dim, kind="stable")
    return xp.flip(x.shape[dim] - 1 - back, dim)


@kernel("top_k", "bottom_k", "top_k_values")
def top_k(part: Part, x: Array) -> tuple[Array, ...]:
    """The best k of a rank; along a cut dim the best k of everyone's."""
    xp, dim, k = part.xp, part.dim(), int(part.args.get("k", 1))

    def best(values: Array, places: Array) -> tuple[Array, Array]:
        order = xp.take(_descending(part, values, dim), xp.arange(min(k, values.shape[dim])), axis=dim)
        return xp.take_along_axis(values, order, dim), xp.take_along_axis(places, order, dim)

    axes = part.axes("pairs", 0, dim)
    start = part.box()[dim][0]
    shape = [1] * x.ndim
    shape[dim] = -1
    places = xp.broadcast_to(xp.arange(start, start + x.shape[dim], dtype=np.int64).reshape(shape), x.shape)
    values, places = best(x, places)
    if axes:
        group = part.group(axes)
        spans = group.intervals(part.action.inputs[0], dim)
        room = [(0, k - values.shape[dim]) if d == dim else (0, 0) for d in range(x.ndim)]
        gathered = group.gather(xp.pad(values, room)), group.gather(xp.pad(places, room))
        # Of equals the earliest index wins: shards in the order they lie in, without what only fills.
        order = sorted(range(len(spans)), key=lambda i: spans[i])
        cut = {i: xp.arange(min(k, spans[i][1] - spans[i][0])) for i in order}
        joined = [
            xp.concatenate([xp.take(g[i], cut[i], axis=dim) for i in order], axis=dim) for g in gathered
        ]
        values, places = best(*joined)
    return (values,) if part.op == "top_k_values" else (values, places)


@kernel("argsort", "sort")
def sort(part: Part, x: Array) -> Array:
    """Stable, ascending, NaN last."""
    return getattr(part.xp, part.op)(_comparable(x), axis=part.dim(), kind="stable")


@kernel("attention")
def attention(part: Part, q: Array, k: Array, v: Array) -> Array:
    """softmax(q kT scale) v, query head h with KV head h // (H / G); causal counts from the last key back."""
    xp = part.xp
    share = part.shape(0)[1] // part.shape(1)[1]
    first, last = part.box(0)[1]
    axes = part.axes("halo", 0, 1)
    low = part.box(1)[1][0]
    if axes:
        group = part.group(axes)
        spans = group.intervals(part.action.inputs[0], 1)
        wanted = [(a // share, -(-b // share) if b > a else a // share) for a, b in spans]
        run = Run(0, 0, 0, part.shape(1)[1])
        moved = []
        for operand, x in ((1, k), (2, v)):
            if wanted == group.intervals(part.action.inputs[operand], 1):  # the splits fall together
                moved.append(x)
                continue
            held = [Held(along(x, 1), group.intervals(part.action.inputs[operand], 1))]
            got = exchange(part, group, held, [run], wanted)
            moved.append(got.reshape(x.shape[0], got.shape[1], *x.shape[2:]))
        k, v = moved
        low = wanted[group.place][0]
    heads = xp.arange(first, last) // share - low
    wide = dtypes.get(q.dtype).accumulator.numpy
    keys, values = k[:, heads].astype(wide), v[:, heads].astype(wide)
    given = part.args.get("scale")
    scale = float(1 / math.sqrt(max(part.shape(0)[3], 1)) if given is None else given)
    scores = q.astype(wide) @ xp.swapaxes(keys, -1, -2) * wide.type(scale)
    if part.args.get("causal"):
        rows = xp.arange(*part.box(0)[2])[:, None] + (part.shape(1)[2] - part.shape(0)[2])
        scores = xp.where(xp.arange(keys.shape[2])[None] <= rows, scores, -np.inf)
    scores = xp.exp(scores - scores.max(axis=-1, keepdims=True, initial=-np.inf))
    scores = scores / scores.sum(axis=-1, keepdims=True)
    return scores @ values


@kernel("moe_finalize")
def moe_finalize(part: Part, y: Array, places: Array, weights: Array) -> Array:
    """Result row t is the sum over j of weights[t, j] y[places[t, j]]."""
    chosen = in_accumulator(y)[_places(part, places, y.shape[0])]
    return (chosen * weights[..., None]).sum(axis=1)


@kernel("fused_silu")
def fused_silu(part: Part, x: Array, *_: Array) -> Array:
    """silu of the first half of the last dim times the second."""
    half = x.shape[-1] // 2
    gate, up = in_accumulator(x[..., :half]), x[..., half:]
    return gate * sigmoid(part.xp, gate) * up
