"""Kernels of ops that change shapes. Along cut dims that are sliced, joined, parted or reshaped, runs change hands."""

from __future__ import annotations

from math import prod

import numpy as np

from lowshard import dtypes
from lowshard.box import Interval
from lowshard.op.op_part import Array, Held, Part, Run, along, converted, exchange, in_accumulator, kernel
from lowshard.solver.table.op_rule import Call, groups, major
from lowshard.solver.table.shape_rules import pad_pairs, permutation, piece_sizes, slice_ranges  # fmt: skip


def _call(part: Part) -> Call:
    return Call(part.op, part.action.sources, part.args, True)


@kernel("permute", "transpose")
def permute(part: Part, x: Array) -> Array:
    """In row-major order, as all results are."""
    return part.xp.transpose(x, permutation(_call(part)))


@kernel("unsqueeze", "squeeze", "interleaved_complex")
def relabel(part: Part, x: Array) -> Array:
    """The same elements in the local shape of the result."""
    return x.reshape(part.out_shape())


@kernel("reshape", "flatten")
def reshape(part: Part, x: Array) -> Array:
    """Runs of merged dims whose splits differ change hands, then the elements are relabelled."""
    source, target = part.shape(), part.action.results[0].shape
    shape = list(x.shape)
    for (i0, i1), (j0, j1) in groups(source, target):
        i, j = major(source, i0, i1), major(target, j0, j1)
        axes = () if i is None else part.axes("halo", 0, i)
        if i is None or j is None or not axes:
            continue
        group = part.group(axes)
        per_i, per_j = prod(source[i + 1 : i1]), prod(target[j + 1 : j1])
        have = _scaled(group.intervals(part.action.inputs[0], i), per_i)
        wanted = _scaled(group.intervals(part.action.outputs[0], j), per_j)
        outer, inner = prod(shape[:i0]), prod(shape[i1:])
        low, high = have[group.place]
        run = Run(0, 0, 0, prod(source[i0:i1]))
        x = exchange(part, group, [Held(x.reshape(outer, high - low, inner), have)], [run], wanted)
        shape[i0:i1] = [x.shape[1], *[1] * (i1 - i0 - 1)]
    return x.reshape(part.out_shape())


def _scaled(spans: list[Interval], by: int) -> list[Interval]:
    return [(start * by, stop * by) for start, stop in spans]


@kernel("broadcast_to")
def broadcast_to(part: Part, x: Array) -> Array:
    """Of full size."""
    return part.xp.broadcast_to(x, part.out_shape())


def _alike(part: Part, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return arrays in the dtype of the first."""
    return tuple(converted(part.xp, x, dtypes.get(arrays[0].dtype)) for x in arrays)


@kernel("concat")
def concat(part: Part, *arrays: Array) -> Array:
    """Along a cut dim every rank fetches what the new split gives it."""
    dim = part.dim("axis", 0)
    axes, arrays = part.axes("halo", 0, dim), _alike(part, arrays)
    if not axes:
        return part.xp.concatenate(arrays, axis=dim)
    group = part.group(axes)
    runs, at = [], 0
    for k in range(len(arrays)):
        runs.append(Run(k, 0, at, part.shape(k)[dim]))
        at += part.shape(k)[dim]
    held = [Held(along(x, dim), group.intervals(part.action.inputs[k], dim)) for k, x in enumerate(arrays)]
    made = exchange(part, group, held, runs, group.intervals(part.action.outputs[0], dim))
    return made.reshape(part.out_shape())


@kernel("stack")
def stack(part: Part, *arrays: Array) -> Array:
    """Along a new dim."""
    return part.xp.stack(_alike(part, arrays), axis=int(part.args.get("axis", 0)) % (arrays[0].ndim + 1))


@kernel("split", "chunk")
def split(part: Part, x: Array) -> tuple[Array, ...]:
    """Along a cut dim every rank fetches its share of each piece."""
    dim = part.dim("axis", 0)
    axes = part.axes("halo", 0, dim)
    sizes = piece_sizes(_call(part), part.shape()[dim])
    stops = np.cumsum(sizes).tolist()
    if not axes:
        return tuple(part.xp.split(x, stops[:-1], axis=dim))
    group = part.group(axes)
    held = [Held(along(x, dim), group.intervals(part.action.inputs[0], dim))]
    made = []
    for k, (size, stop) in enumerate(zip(sizes, stops, strict=True)):
        wanted = group.intervals(part.action.outputs[k], dim)
        piece = exchange(part, group, held, [Run(0, stop - size, 0, size)], wanted)
        made.append(piece.reshape(part.out_shape(k)))
    return tuple(made)


@kernel("slice")
def slice_(part: Part, x: Array) -> Array:
    """Cut, sliced dims first, one after the other; then the whole ones."""
    ranges = slice_ranges(_call(part))
    index: list[slice] = []
    for d, (start, stop, step) in enumerate(ranges):
        axes = part.axes("halo", 0, d)
        if axes:
            group = part.group(axes)
            held = [Held(along(x, d), group.intervals(part.action.inputs[0], d))]
            wanted = group.intervals(part.action.outputs[0], d)
            moved = exchange(part, group, held, [Run(0, start, 0, stop - start)], wanted)
            x = moved.reshape(*x.shape[:d], moved.shape[1], *x.shape[d + 1 :])
        whole = axes or (start, stop, step) == (0, part.shape()[d], 1)
        index.append(slice(None) if whole else slice(start, stop, step))
    return x[tuple(index)]


@kernel("pad")
def pad(part: Part, x: Array) -> Array:
    """As NumPy's pad: mode constant (value), edge, reflect or symmetric."""
    mode = str(part.args.get("mode", "constant"))
    fill = {"constant_values": part.args.get("value", 0)} if mode == "constant" else {}
    return part.xp.pad(x, pad_pairs(_call(part)), mode, **fill)


@kernel("repeat_interleave")
def repeat_interleave(part: Part, x: Array) -> Array:
    """As NumPy's repeat."""
    axis = part.args.get("axis")
    return part.xp.repeat(x, int(part.args.get("repeats", 2)), axis=axis)


@kernel("tile")
def tile(part: Part, x: Array) -> Array:
    """As NumPy's."""
    return part.xp.tile(x, tuple(part.args.get("repeats", (1,) * x.ndim)))


@kernel("band_part")
def band_part(part: Part, x: Array) -> Array:
    """Zero below `lower` and above `upper` diagonals of the last two dims; -1 keeps all."""
    xp = part.xp
    row, column = xp.arange(x.shape[-2])[:, None], xp.arange(x.shape[-1])[None]
    lower, upper = int(part.args.get("lower", -1)), int(part.args.get("upper", -1))
    keep = ((lower < 0) | (row - column <= lower)) & ((upper < 0) | (column - row <= upper))
    return xp.where(keep, x, xp.zeros((), x.dtype))


@kernel("resize")
def resize(part: Part, x: Array) -> Array:
    """Nearest neighbour: result index i reads i * old // new."""
    h, w = part.out_shape()[1:3]
    rows = part.xp.arange(h) * x.shape[1] // h
    columns = part.xp.arange(w) * x.shape[2] // w
    return x[:, rows][:, :, columns]


@kernel("irfft")
def irfft(part: Part, x: Array) -> Array:
    """Of a real spectrum along the last dim."""
    return part.xp.fft.irfft(in_accumulator(x), part.out_shape()[-1], axis=-1)


@kernel("fold")
def fold(part: Part, x: Array) -> Array:
    """Sums sliding blocks [N, C * kh * kw, L] into an image [N, C, H, W]. Args: shape, kernel, stride."""
    n, c, h, w = part.out_shape()
    kh, kw = part.args["kernel"]
    stride = int(part.args.get("stride", 1))
    rows, columns = (h - kh) // stride + 1, (w - kw) // stride + 1
    blocks = in_accumulator(x).reshape(n, c, kh, kw, rows, columns)
    made = part.xp.zeros((n, c, h, w), blocks.dtype)
    for i in range(kh):
        for j in range(kw):
            made[:, :, i : i + rows * stride : stride, j : j + columns * stride : stride] += blocks[
                :, :, i, j
            ]
    return made
