"""Kernels of products."""

from __future__ import annotations

from itertools import product
from typing import Any

from lowshard import dtypes
from lowshard.op.op_part import Array, Part, in_accumulator, kernel
from lowshard.solver.table.product_rules import conv_geometry


@kernel("matmul", "qmatmul")
def matmul(part: Part, a: Array, b: Array) -> Array:
    """In the accumulator's type, rounded once."""
    return part.xp.matmul(in_accumulator(a), in_accumulator(b))


@kernel("outer")
def outer(part: Part, a: Array, b: Array) -> Array:
    """a [M], b [N]."""
    return part.xp.outer(a, b)


@kernel("einsum")
def einsum(part: Part, *arrays: Array) -> Array:
    """By the argument `subscripts`."""
    text = str(part.args["subscripts"]).replace(" ", "")
    return part.xp.einsum(text, *map(in_accumulator, arrays), optimize=len(arrays) > 2)


@kernel("conv2d", "conv3d", "conv2d_transpose", "conv3d_transpose")
def conv(part: Part, x: Array, w: Array, bias: Array | None = None) -> Array:
    """A sum over taps. Channels last inside; a rank's filter tells how many channels it makes."""
    xp = part.xp
    first = str(part.args.get("layout", "NHWC")).upper().startswith("NC")
    transposed = part.op.endswith("_transpose")
    space = x.ndim - 2
    strides, pads = conv_geometry(part.args, space)
    if first:
        x = xp.moveaxis(x, 1, -1)
    out_shape = part.out_shape()
    extents = out_shape[2:] if first else out_shape[1:-1]
    cout = w.shape[-2] if transposed else w.shape[-1]
    taps = w.shape[:space]
    if transposed:
        made = _transposed(xp, x, w, strides, [pads[i][0] for i in range(space)], extents, cout, taps)
    else:
        padded = xp.pad(in_accumulator(x), [(0, 0), *pads, (0, 0)])
        made = xp.zeros((x.shape[0], *extents, cout), dtypes.get(x.dtype).accumulator.numpy)
        groups = int(part.args.get("groups", 1))
        for tap in product(*map(range, taps)):
            window = tuple(
                slice(t, t + (n - 1) * s + 1, s) for t, n, s in zip(tap, extents, strides, strict=True)
            )
            seen = padded[(slice(None), *window, slice(None))]
            if groups == 1:
                made += seen @ in_accumulator(w[tap])
                continue
            cin, many = seen.shape[-1] // groups, cout // groups
            for g in range(groups):
                made[..., g * many : (g + 1) * many] += (
                    seen[..., g * cin : (g + 1) * cin] @ in_accumulator(w[tap])[:, g * many : (g + 1) * many]
                )
    if bias is not None:
        made = made + bias
    return xp.moveaxis(made, -1, 1) if first else made


def _transposed(
    xp: Any, x: Array, w: Array, strides: Any, low: Any, extents: Any, cout: int, taps: Any
) -> Array:
    room = [
        max((n - 1) * s + t, lo + e)
        for n, s, t, lo, e in zip(x.shape[1:-1], strides, taps, low, extents, strict=True)
    ]
    full = xp.zeros((x.shape[0], *room, cout), dtypes.get(x.dtype).accumulator.numpy)
    for tap in product(*map(range, taps)):
        window = tuple(
            slice(t, t + (n - 1) * s + 1, s) for t, n, s in zip(tap, x.shape[1:-1], strides, strict=True)
        )
        full[(slice(None), *window, slice(None))] += in_accumulator(x) @ in_accumulator(w[tap]).T
    kept = tuple(slice(lo, lo + e) for lo, e in zip(low, extents, strict=True))
    return full[(slice(None), *kept, slice(None))]


@kernel("grouped_matmul")
def grouped_matmul(part: Part, x: Array, w: Array, starts: Array, *_: Array) -> Array:
    """Rows starts[e] to starts[e + 1] of x times the transposed weight of expert e."""
    made = part.xp.zeros((x.shape[0], w.shape[1]), dtypes.get(x.dtype).accumulator.numpy)
    for expert in range(w.shape[0]):
        rows = slice(int(starts[expert]), int(starts[expert + 1]))
        made[rows] = in_accumulator(x[rows]) @ in_accumulator(w[expert]).T
    return made
