"""Kernels of reductions, scans, softmax, norms and pooling, along cut dims too."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import numpy as np

from lowshard.comm.reduction import identity
from lowshard.op.op_part import Array, Part, in_accumulator, kernel
from lowshard.solver.table.reduction_rules import pool_geometry


def _dims(part: Part, x: Array) -> tuple[int, ...]:
    axis = part.args.get("axis", -1)
    if axis is None:
        return tuple(range(x.ndim))
    return tuple(a % x.ndim for a in (axis if isinstance(axis, tuple) else (axis,)))


@kernel("sum")
def sum_(part: Part, x: Array) -> Array:
    """In the accumulator's type."""
    return in_accumulator(x).sum(axis=_dims(part, x), keepdims=True)


@kernel("mean")
def mean(part: Part, x: Array) -> Array:
    """Over what the rank holds where the result is an average, over the whole extent where it is a sum."""
    dims = _dims(part, x)
    count = prod(part.shape()[d] if part.axes("scale", 0, d) else x.shape[d] for d in dims)
    return _average(x, dims, count, keepdims=True)


def _average(x: Array, dims: int | tuple[int, ...], count: int, keepdims: bool) -> Array:
    """Return the sum over dims by a count; of integers rounded down, exact though their sum may be beyond 64 bits."""
    if x.dtype.kind not in "iu":
        return in_accumulator(x).sum(axis=dims, keepdims=keepdims) / count
    wide = x.astype(x.dtype.kind + "8")
    rest = (wide % count).sum(axis=dims, keepdims=keepdims) // count
    return (wide // count).sum(axis=dims, keepdims=keepdims) + rest


@kernel("max", "min", "prod")
def extreme(part: Part, x: Array) -> Array:
    """An empty shard gives what changes nothing; products run in the accumulator's type."""
    wide = in_accumulator(x) if part.op == "prod" else x
    start = identity(part.op, wide.dtype)
    return getattr(part.xp, part.op)(wide, axis=_dims(part, x), keepdims=True, initial=start)


@kernel("argmax", "argmin")
def arg_extreme(part: Part, x: Array) -> Array:
    """The first of equals; NaN before all, as NumPy's."""
    xp, dim = part.xp, part.dim()
    best = getattr(xp, part.op)
    axes = part.axes("pairs", 0, dim)
    if not axes:
        return best(x, axis=dim, keepdims=True)
    start = part.box()[dim][0]
    shape = tuple(1 if d == dim else n for d, n in enumerate(x.shape))
    if x.shape[dim]:
        place = best(x, axis=dim, keepdims=True)
        value = xp.take_along_axis(x, place, dim)
        place = place.astype(np.int64) + start
    else:
        value, place = xp.zeros(shape, x.dtype), xp.zeros(shape, np.int64)
    group = part.group(axes)
    spans = group.intervals(part.action.inputs[0], dim)
    order = [i for i in sorted(range(len(spans)), key=lambda i: spans[i]) if spans[i][0] < spans[i][1]]
    values, places = group.gather(value), group.gather(place)
    stacked = xp.stack([values[i] for i in order])
    winner = best(stacked, axis=0)[None]
    return xp.take_along_axis(xp.stack([places[i] for i in order]), winner, 0)[0]


@kernel("softmax", "logsoftmax")
def softmax(part: Part, x: Array) -> Array:
    """Against the maximum over the whole dim."""
    xp, dim = part.xp, part.dim()
    axes = part.axes("statistics", 0, dim)
    wide = in_accumulator(x)
    top = part.reduce(xp.max(wide, axis=dim, keepdims=True, initial=-np.inf), "max", axes)
    shifted = wide - top
    total = part.reduce(xp.exp(shifted).sum(axis=dim, keepdims=True), "sum", axes)
    return xp.exp(shifted) / total if part.op == "softmax" else shifted - xp.log(total)


@kernel("cumsum")
def cumsum(part: Part, x: Array) -> Array:
    """The scan of a shard, and the totals of the shards before it."""
    dim = part.dim()
    made = in_accumulator(x).cumsum(axis=dim, dtype=in_accumulator(x).dtype)
    axes = part.axes("scan", 0, dim)
    if axes:
        group = part.group(axes)
        spans = group.intervals(part.action.inputs[0], dim)
        totals = group.gather(in_accumulator(x).sum(axis=dim, keepdims=True, dtype=made.dtype))
        for i in sorted(range(len(spans)), key=lambda i: spans[i]):
            if spans[i] < spans[group.place]:
                made = made + totals[i]
    return made


@kernel("layer_norm", "rms_norm")
def norm(part: Part, x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Means over the whole extent of the trailing dims; the variance about the mean, in a second pass."""
    lead = x.ndim - weight.ndim
    dims = tuple(range(lead, x.ndim))
    axes = tuple(sorted({a for d in dims for a in part.axes("statistics", 0, d)}))
    count = prod(part.shape()[lead:])
    eps = float(part.args.get("eps", 1e-5))
    wide = in_accumulator(x)
    if part.op == "layer_norm":
        wide = wide - part.reduce(wide.sum(axis=dims, keepdims=True), "sum", axes) / count
    square = part.reduce((wide * wide).sum(axis=dims, keepdims=True), "sum", axes) / count
    made = wide / part.xp.sqrt(square + eps) * weight
    return made if bias is None else made + bias


@kernel("group_norm")
def group_norm(part: Part, x: Array, weight: Array, bias: Array) -> Array:
    """Over the channels of a group and all places."""
    groups, eps = int(part.args.get("groups", 1)), float(part.args.get("eps", 1e-5))
    wide = in_accumulator(x).reshape(x.shape[0], groups, prod(x.shape[1:]) // groups)
    wide = wide - wide.mean(axis=-1, keepdims=True)
    wide = wide / part.xp.sqrt((wide * wide).mean(axis=-1, keepdims=True) + eps)
    shape = (1, -1) + (1,) * (x.ndim - 2)
    return wide.reshape(x.shape) * weight.reshape(shape) + bias.reshape(shape)


@kernel("max_pool", "avg_pool")
def pool(part: Part, x: Array) -> Array:
    """Windows over height and width; an average counts the padding, and is rounded down among integers."""
    xp = part.xp
    size, stride, low = pool_geometry(part.args)
    fill: Any = 0 if part.op == "avg_pool" else identity("max", x.dtype)
    padded = xp.pad(x, [(0, 0), (low[0],) * 2, (low[1],) * 2, (0, 0)], constant_values=fill)
    h, w = part.out_shape()[1:3]
    seen = [
        padded[:, i : i + (h - 1) * stride[0] + 1 : stride[0], j : j + (w - 1) * stride[1] + 1 : stride[1]]
        for i, j in product(range(size[0]), range(size[1]))
    ]
    if part.op == "max_pool":
        return xp.max(xp.stack(seen), axis=0)
    return _average(xp.stack(seen), 0, len(seen), keepdims=False)
