"""Rules of ops that change shapes: transposes, reshapes, concat, split, slices, pads."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from lowshard.argument import choice, whole
from lowshard.errors import LayoutError
from lowshard.solver.assignment import AxisAssignment, Result
from lowshard.solver.table.op_argument import MOST_ENTRIES
from lowshard.solver.table.op_rule import (
    FLOAT,
    Call,
    Inner,
    Offer,
    Refused,
    Rows,
    S,
    cutting_sizes,
    exchange,
    groups,
    index_bytes,
    major,
    most_received,
    passing,
    row,
    rule,
    shares,
)

CONCAT = Refused(("concat",), "(Sa, Sa) -> Sa along the joined dim", "joining shards permutes the elements")
SPLIT = Refused(
    ("split",), "Sa -> Sa along the split dim", "a rank's pieces are not its shares of the pieces"
)
MINOR = Refused(
    ("reshape",),
    "Sk -> Sj where k is not the major dim of what is merged",
    "a rank's elements are no run of the merged dim",
)
UNALIGNED = Refused(
    ("reshape",), "Sk -> Sj where the two splits fall on other elements", "shards are uneven on one side"
)


def _keep(call: Call) -> Rows:
    return [row(p, out=p) for p in (*call.linear(), *call.ordered())]


@rule("permute", args=("dims",))
@rule("transpose", args=("axis_1", "axis_2"))
def permute(call: Call) -> Offer:
    """The cut dim goes where it is put. Args: dims, or axis_1 and axis_2."""
    n = call.ndim()
    dims = permutation(call)
    rows = [row(S(d), out=S(dims.index(d))) for d in range(n)]
    return Offer(rows + _keep(call), (call.same(*(call.shape()[d] for d in dims)),))


def permutation(call: Call) -> list[int]:
    """Return for each dim of the result the operand's dim."""
    n = call.ndim()
    if call.op == "transpose":
        dims = list(range(n))
        a, b = call.dim("axis_1", -2), call.dim("axis_2", -1)
        dims[a], dims[b] = dims[b], dims[a]
        return dims
    dims = [int(d) % n if -n <= int(d) < n else -1 for d in call.need("dims")]
    if sorted(dims) != list(range(n)):
        raise LayoutError(f"permute: dims name each of the {n} dims once, got {call.args['dims']!r}")
    return dims


@rule("unsqueeze", args=("axis",))
def unsqueeze(call: Call) -> Offer:
    """A dim of extent 1 comes in. Args: axis."""
    n = call.ndim()
    at = call.dim("axis", -1, n + 1)
    rows = [row(S(d), out=S(d + (d >= at))) for d in range(n)]
    shape = (*call.shape()[:at], 1, *call.shape()[at:])
    return Offer(rows + _keep(call), (call.same(*shape),))


@rule("squeeze", args=("axis",))
def squeeze(call: Call) -> Offer:
    """A dim of extent 1 goes. Args: axis."""
    n = call.ndim()
    at = call.dim()
    if call.shape()[at] != 1:
        raise LayoutError(f"squeeze: dim {at} of {list(call.shape())} has extent {call.shape()[at]}, not 1")
    rows = [row(S(d), out=S(d - (d > at))) for d in range(n) if d != at]
    return Offer(rows + _keep(call), (call.same(*call.shape()[:at], *call.shape()[at + 1 :]),))


@rule("reshape", args=("shape",))
@rule("flatten", args=("start", "end"))
def reshape(call: Call) -> Offer:
    """A cut dim becomes the major dim of what it is merged into or broken into. Args: shape; flatten: start, end."""
    # Documented: only placements that the operand comes with, where both splits fall on the same elements; of flatten
    # only the dims beside the flattened ones. Extended: the major dims of every group of merged dims.
    source = call.shape()
    if call.op == "flatten":
        start, end = call.dim("start", 0), call.dim("end", -1)
        if start > end:
            raise LayoutError(f"flatten: start is at most end, got dims {start} and {end} of {list(source)}")
        target = (*source[:start], prod(source[start : end + 1]), *source[end + 1 :])
        if not call.extended:
            kept = [d for d in range(len(source)) if not start <= d <= end or start == end]
            beside = [row(S(d), out=S(d if d <= start else d - (end - start))) for d in kept]
            return Offer(beside + _keep(call), (call.same(*target),))
    else:
        target = filled_shape(call, source)
    rows: Rows = []
    refused: list[Refused] = []
    mesh = call.layouts[0].mesh
    for (i0, i1), (j0, j1) in groups(source, target):
        if source[i0:i1] == target[j0:j1]:
            for d in range(i0, i1):
                if call.extended or _held(call, d):
                    rows.append(row(S(d), out=S(d - i0 + j0)))
            continue
        i, j = major(source, i0, i1), major(target, j0, j1)
        if i is None or j is None:
            continue
        if call.extended:
            if _aligned(source[i], target[j], mesh.size):
                rows.append(row(S(i), out=S(j)))
            else:
                inner = _regrouped(call, (i0, i1), target[j], prod(target[j + 1 : j1]))
                rows.append(row(S(i), out=S(j), how="halo", inner=inner))
            continue
        for k in range(i0, i1):
            only = _held(call, k)
            if not only:
                continue
            if k != i:
                refused.append(MINOR)
            elif not _aligned(source[i], target[j], _cut(call, i)):
                refused.append(UNALIGNED)
            else:
                rows.append(AxisAssignment((S(k),), S(j), only=only))
    return Offer(rows + _keep(call), (call.same(*target),), tuple(dict.fromkeys(refused)))


def _regrouped(call: Call, span: tuple[int, int], extent: int, scale: int) -> Inner:
    """Return what is exchanged where dims of a span become one that is cut at `extent` places of `scale` elements."""
    source = call.shape()
    i = major(source, *span)
    assert i is not None, "a span that is reshaped holds more than one element"
    sizes = cutting_sizes(call, i)
    have, want = shares(source[i], sizes, prod(source[i + 1 : span[1]])), shares(extent, sizes, scale)
    missing = most_received([have], want, [(0, 0, 0, extent * scale)])
    return exchange(missing * index_bytes(call.layouts[0], range(*span)), sizes)


def filled_shape(call: Call, source: Sequence[int]) -> tuple[int, ...]:
    """Return the target shape with its -1 filled in."""
    asked = [int(n) for n in call.need("shape")]
    total = prod(source)
    if asked.count(-1) > 1:
        raise LayoutError(f"reshape: one extent may be -1, got {asked}")
    if -1 in asked:
        rest = prod(n for n in asked if n != -1)
        if rest == 0 or total % rest:
            raise LayoutError(f"reshape: {list(source)} cannot become {asked}")
        asked[asked.index(-1)] = total // rest
    if prod(asked) != total or min(asked, default=0) < 0:
        raise LayoutError(f"reshape: {list(source)} has {total} elements, {asked} has {prod(asked)}")
    return tuple(asked)


def _held(call: Call, dim: int) -> tuple[str, ...]:
    """Return the mesh axes that cut a dim as the operand comes."""
    layout = call.layouts[0]
    return tuple(layout.mesh.axis_names[a] for a in layout.sharding_axes[dim])


def _cut(call: Call, dim: int) -> int:
    layout = call.layouts[0]
    return prod(layout.mesh.shape[a] for a in layout.sharding_axes[dim])


def _aligned(n: int, m: int, parts: int) -> bool:
    """Whether splits of n and of m, over parts and over every divisor of it, fall on the same elements."""
    return n == m or (n % parts == 0 and m % parts == 0)


@rule("broadcast_to", args=("shape",))
def broadcast_to(call: Call) -> Offer:
    """A cut dim stays cut unless it is broadcast. Args: shape."""
    target = tuple(int(n) for n in call.need("shape"))
    source, shift = call.shape(), len(target) - call.ndim()
    if shift < 0 or any(n not in (1, m) for n, m in zip(source, target[shift:], strict=True)):
        raise LayoutError(
            f"broadcast_to: {list(source)} cannot become {list(target)}: extents are equal or 1"
        )
    rows = [row(S(d), out=S(d + shift)) for d, n in enumerate(source) if n != 1]
    return Offer(rows + _keep(call), (call.same(*target),))


@rule("concat", "stack", operands=(1, None), args=("axis",))
def concat(call: Call) -> Offer:
    """All alike. Extended: along the joined dim too, ranks exchange what the new split puts elsewhere. Args: axis."""
    shapes = [layout.shape for layout in call.layouts]
    n = call.ndim()
    joins = call.op == "concat"
    at = call.dim("axis", 0, n if joins else n + 1)
    base = shapes[0]
    for shape in shapes[1:]:
        if len(shape) != n or any(shape[d] != base[d] for d in range(n) if not (joins and d == at)):
            raise LayoutError(f"{call.op}: shapes agree but for dim {at}, got {[list(s) for s in shapes]}")
    count = len(shapes)
    if joins:
        target = (*base[:at], sum(s[at] for s in shapes), *base[at + 1 :])
        rows = [row(*(S(d),) * count, out=S(d)) for d in range(n) if d != at]
        if call.extended:
            rows.append(row(*(S(at),) * count, out=S(at), how="halo", inner=_joined(call, at, target[at])))
    else:
        target = (*base[:at], count, *base[at:])
        rows = [row(*(S(d),) * count, out=S(d + (d >= at))) for d in range(n)]
    rows += [row(*(p,) * count, out=p) for p in (*call.linear(), *call.ordered())]
    return Offer(rows, (call.same(*target),), (CONCAT,) if joins else ())


def _joined(call: Call, at: int, extent: int) -> Inner:
    sizes = cutting_sizes(call, at)
    runs, start = [], 0
    for k, layout in enumerate(call.layouts):
        runs.append((k, 0, start, layout.shape[at]))
        start += layout.shape[at]
    have = [shares(layout.shape[at], sizes) for layout in call.layouts]
    missing = most_received(have, shares(extent, sizes), runs)
    return exchange(missing * index_bytes(call.layouts[0], (at,)), sizes)


@rule("split", args=("sizes", "axis"))
@rule("chunk", args=("chunks", "axis"))
def split(call: Call) -> Offer:
    """Pieces along a dim. Extended: a cut dim too, ranks exchange. Args: sizes, axis; chunk: chunks, axis."""
    at = call.dim("axis", 0)
    extent = call.shape()[at]
    sizes = piece_sizes(call, extent)
    rows = [row(S(d), out=S(d)) for d in range(call.ndim()) if d != at]
    if call.extended and min(sizes, default=0) >= 1:
        cut, start, missing = cutting_sizes(call, at), 0, 0
        have = shares(extent, cut)
        for n in sizes:
            missing += most_received([have], shares(n, cut), [(0, start, 0, n)])
            start += n
        moved = exchange(missing * index_bytes(call.layouts[0], (at,)), cut)
        rows.append(row(S(at), out=S(at), how="halo", inner=moved))
    results = tuple(call.same(*call.shape()[:at], n, *call.shape()[at + 1 :]) for n in sizes)
    return Offer(rows + _keep(call), results, (SPLIT,) if call.op == "split" else ())


def piece_sizes(call: Call, extent: int) -> list[int]:
    """Return the extents of the pieces of a split or a chunk."""
    if call.op == "chunk":
        rule = f"chunk: chunks is an integer from 1 to {MOST_ENTRIES:,}"
        chunks = whole(call.need("chunks"), rule, LayoutError, 1, MOST_ENTRIES)
        step = -(-extent // chunks)
        sizes = [max(0, min(step, extent - i * step)) for i in range(chunks)]
    else:
        sizes = [int(n) for n in call.need("sizes")]
    if not sizes or sum(sizes) != extent or min(sizes) < 0:
        raise LayoutError(f"{call.op}: sizes are >= 0 and sum to the extent {extent}, got {sizes}")
    return sizes


def slice_ranges(call: Call) -> list[tuple[int, int, int]]:
    """Return start, stop and step (>= 1) for each dim. Args: slices, one (start, stop[, step]) or None a dim."""
    asked = list(call.need("slices"))
    shape = call.shape()
    if len(asked) > len(shape):
        raise LayoutError(f"slice: one entry a dim of {list(shape)}, got {asked}")
    found = []
    for d, extent in enumerate(shape):
        entry = asked[d] if d < len(asked) else None
        start, stop, step = slice(*(entry or (None,))).indices(extent)
        if step < 1:
            raise LayoutError(f"slice: a step is >= 1, got {entry!r} for dim {d}")
        found.append((start, max(start, stop), step))
    return found


@rule("slice", args=("slices", "sliced_axes"))
def slice_(call: Call) -> Offer:
    """Dims that are not sliced stay cut. Extended: a cut, sliced dim (step 1) too, ranks exchange."""
    ranges = slice_ranges(call)
    shape = call.shape()
    target = tuple(-(-(stop - start) // step) for start, stop, step in ranges)
    named = call.args.get("sliced_axes")
    sliced = {d for d, r in enumerate(ranges) if r != (0, shape[d], 1)}
    sliced |= {int(d) % call.ndim() for d in named or ()}
    rows = [row(S(d), out=S(d)) for d in range(call.ndim()) if d not in sliced]
    if call.extended:
        rows += [
            row(S(d), out=S(d), how="halo", inner=_sliced(call, d, ranges[d][0], target[d]))
            for d in sorted(sliced)
            if ranges[d][2] == 1
        ]
    return Offer(rows + _keep(call), (call.same(*target),))


def _sliced(call: Call, dim: int, start: int, extent: int) -> Inner:
    sizes = cutting_sizes(call, dim)
    have, want = shares(call.shape()[dim], sizes), shares(extent, sizes)
    missing = most_received([have], want, [(0, start, 0, extent)])
    return exchange(missing * index_bytes(call.layouts[0], (dim,)), sizes)


def pad_pairs(call: Call) -> list[tuple[int, int]]:
    """Return (before, after) for each dim. Args: pads."""
    pads = [tuple(int(n) for n in pair) for pair in call.need("pads")]
    if len(pads) != call.ndim() or any(len(p) != 2 or min(p) < 0 for p in pads):
        raise LayoutError(f"pad: pads has (before, after) >= 0 for each of {call.ndim()} dims, got {pads}")
    return [(p[0], p[1]) for p in pads]


_PAD_MODES = ("constant", "edge", "reflect", "symmetric")


@rule("pad", args=("pads", "value", "mode", "padded_axes"))
def pad(call: Call) -> Offer:
    """Dims that are not padded stay cut; sums stay where the pad is zero or mirrors."""
    pads, mode = pad_pairs(call), call.args.get("mode", "constant")
    choice(mode, _PAD_MODES, "pad: mode is 'constant', 'edge', 'reflect' or 'symmetric'", LayoutError)
    padded = {d for d, p in enumerate(pads) if p != (0, 0)}
    padded |= {int(d) % call.ndim() for d in call.args.get("padded_axes") or ()}
    rows = [row(S(d), out=S(d)) for d in range(call.ndim()) if d not in padded]
    if mode != "constant" or call.args.get("value", 0) == 0:
        rows += [row(p, out=p) for p in call.linear()]
    target = tuple(n + a + b for n, (a, b) in zip(call.shape(), pads, strict=True))
    return Offer(rows, (call.same(*target),))


@rule("repeat_interleave", args=("repeats", "axis"))
def repeat_interleave(call: Call) -> Offer:
    """Other dims stay cut; without an axis (flattened): all-replicated. Args: repeats, axis."""
    repeats = int(call.args.get("repeats", 2))
    if call.args.get("axis") is None:
        return Offer([], (call.same(prod(call.shape()) * repeats),))
    at = call.dim()
    rows = [row(S(d), out=S(d)) for d in range(call.ndim()) if d != at]
    target = tuple(n * repeats if d == at else n for d, n in enumerate(call.shape()))
    return Offer(rows + _keep(call), (call.same(*target),))


REPEATED = Refused(
    ("tile",), "Sd -> Sd along a repeated dim", "each rank would repeat its shard, not the whole dim"
)


@rule("tile", args=("repeats",))
def tile(call: Call) -> Offer:
    """Dims that are not repeated stay cut. Args: repeats, one a dim."""
    repeats = [int(n) for n in call.args.get("repeats", [1] * call.ndim())]
    if len(repeats) != call.ndim():
        raise LayoutError(f"tile: repeats has one number a dim of {list(call.shape())}, got {repeats}")
    rows = [row(S(d), out=S(d)) for d, n in enumerate(repeats) if n == 1]
    target = tuple(n * r for n, r in zip(call.shape(), repeats, strict=True))
    refused = (REPEATED,) if any(n != 1 for n in repeats) else ()
    return Offer(rows + _keep(call), (call.same(*target),), refused)


@rule("band_part", args=("lower", "upper"))
def band_part(call: Call) -> Offer:
    """Keeps a band of the last two dims; leading dims stay cut, sums stay. Args: lower, upper (-1: all)."""
    rows = [row(S(d), out=S(d)) for d in range(call.ndim() - 2)]
    return Offer(rows + [row(p, out=p) for p in call.linear()], (call.same(*call.shape()),))


@rule("resize", args=("size",))
def resize(call: Call) -> Offer:
    """Nearest neighbour over dims 1 and 2 of [N, H, W, C]; the others stay cut, sums stay. Args: size."""
    n, _, _, c = call.shape()
    h, w = (int(x) for x in call.need("size"))
    rows = [row(S(0), out=S(0)), row(S(3), out=S(3))] + [row(p, out=p) for p in call.linear()]
    return Offer(rows, (call.same(n, h, w, c),))


@rule("interleaved_complex")
@rule("fold", args=("shape", "kernel", "stride"))
@rule("irfft", kinds=FLOAT, args=("n",))
def last_dims(call: Call) -> Offer:
    """Works on the last dim (fold: the last two); the others stay cut, sums stay. Args: as the op's."""
    touched = 2 if call.op == "fold" else 1
    rows = [row(S(d), out=S(d)) for d in range(call.ndim() - touched)]
    rows += [row(p, out=p, kinds=passing(p)) for p in call.linear()]
    shape = call.shape()
    if call.op == "irfft":
        out = (*shape[:-1], int(call.args.get("n", 2 * (shape[-1] - 1))))
    elif call.op == "fold":
        out = tuple(int(n) for n in call.need("shape"))
    else:
        out = shape
    return Offer(rows, (Result(out, call.dtype),))
