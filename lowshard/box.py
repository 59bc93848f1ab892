"""Interval and box arithmetic over global array coordinates.

A box is a tuple of half-open intervals `(start, stop)`, one a dim; the box of a 0-d array is `()`,
which holds one element. Everything is plain integers: no arrays, no ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Literal

Interval = tuple[int, int]
Box = tuple[Interval, ...]
Split = Literal["balanced", "ceil"]


def split_interval(interval: Interval, parts: int, index: int, split: Split = "balanced") -> Interval:
    """Return part `index` of `parts` of an interval.

    balanced: with n elements, `base, rem = divmod(n, parts)` and the first `rem` parts hold base + 1.
    ceil: every part but the last non-empty one holds ceil(n / parts), as torch.chunk splits.
    Empty parts are legal; they lie inside the interval (start == stop).
    """
    start, stop = interval
    length = stop - start
    if split == "ceil":
        step = -(-length // parts)
        return start + min(index * step, length), start + min((index + 1) * step, length)
    base, rem = divmod(length, parts)
    first = start + index * base + min(index, rem)
    return first, first + base + (1 if index < rem else 0)


def full_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole array of this shape."""
    return tuple((0, n) for n in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the extent of a box in each dim."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Return the number of elements in a box; 1 for the box of a 0-d array."""
    return prod(stop - start for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the elements in both boxes, or None when there are none."""
    out = []
    for (a0, a1), (b0, b1) in zip(a, b, strict=True):
        start, stop = max(a0, b0), min(a1, b1)
        if start >= stop:
            return None
        out.append((start, stop))
    return tuple(out)


def contains(outer: Box, inner: Box) -> bool:
    """Return whether every element of `inner` is in `outer`."""
    return volume(inner) == 0 or all(
        a0 <= b0 and b1 <= a1 for (a0, a1), (b0, b1) in zip(outer, inner, strict=True)
    )


def is_within(box: Box, shape: Sequence[int]) -> bool:
    """Return whether a box, possibly empty, is within an array of this shape."""
    return len(box) == len(shape) and all(0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True))


def subtract(box: Box, hole: Box) -> list[Box]:
    """Return disjoint boxes that cover `box` without `hole`, at most two a dim."""
    common = intersect(box, hole)
    if common is None:
        return [box] if volume(box) else []
    rest: list[Box] = []
    for dim, ((start, stop), (low, high)) in enumerate(zip(box, common, strict=True)):
        head, tail = common[:dim], box[dim + 1 :]
        if start < low:
            rest.append((*head, (start, low), *tail))
        if high < stop:
            rest.append((*head, (high, stop), *tail))
    return rest


def covers(boxes: Iterable[Box], target: Box) -> bool:
    """Return whether the union of `boxes` holds every element of `target`."""
    left = [target] if volume(target) else []
    for box in boxes:
        left = [piece for part in left for piece in subtract(part, box)]
        if not left:
            return True
    return not left


def any_overlap(boxes: Iterable[Box]) -> bool:
    """Return whether two boxes overlap: a sweep along the first dim."""
    found = sorted(box for box in boxes if volume(box))
    for i, box in enumerate(found):
        for other in found[i + 1 :]:
            if box and other[0][0] >= box[0][1]:
                break
            if intersect(box, other) is not None:
                return True
    return False


def row_major_parts(box: Box, most_elems: int, whole_dims: int = 0) -> Iterator[Box]:
    """Yield a box in parts, in row-major order, each of at most so many elements."""

    def split(box: Box, dim: int) -> Iterator[Box]:
        if volume(box) <= most_elems or dim >= len(box) - whole_dims:
            yield box
            return
        start, stop = box[dim]
        inner = volume(box) // (stop - start)
        step = max(1, most_elems // inner)
        for at in range(start, stop, step):
            part = (*box[:dim], (at, min(at + step, stop)), *box[dim + 1 :])
            if volume(part) <= most_elems:
                yield part
            else:
                yield from split(part, dim + 1)

    return split(box, 0)


def box_text(box: Box) -> str:
    """Return a box as text, such as `[0:4, 2:8]`."""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


def slices_of(box: Box) -> tuple[slice, ...]:
    """Return a box as slices."""
    return tuple(slice(start, stop) for start, stop in box)


def moved(box: Box, origin: Box, target: Box) -> Box:
    """Return a box within `origin` in the coordinates of `target`."""
    moves = zip(box, origin, target, strict=True)
    return tuple((a - lo + at, b - lo + at) for (a, b), (lo, _), (at, _) in moves)


def relative_slices(box: Box, origin: Box) -> tuple[slice, ...]:
    """Return the slices of `box` in a local array whose own box is `origin`."""
    return tuple(slice(b0 - o0, b1 - o0) for (b0, b1), (o0, _) in zip(box, origin, strict=True))


def single_run(box: Box, shape: Sequence[int]) -> int | None:
    """Return the first flat index of a box that is contiguous in a row-major array, or None."""
    if volume(box) == 0:
        return 0
    dim, inner, start = len(shape), 1, 0
    while dim and shape_of(box)[dim - 1] == shape[dim - 1]:
        dim -= 1
        inner *= shape[dim]
    # From here outwards: one dim may be partial, the dims before it must be a single index.
    if any(stop - first != 1 for first, stop in box[: max(dim - 1, 0)]):
        return None
    for d in range(dim - 1, -1, -1):
        start += box[d][0] * inner
        inner *= shape[d]
    return start


def strides_of(shape: Sequence[int], last: int = 1) -> list[int]:
    """Return the row-major strides of a shape; `last` is that of the last dim, 1 or bytes."""
    strides = [last] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return strides


def contiguous_runs(box: Box, shape: Sequence[int]) -> tuple[int, list[int]]:
    """Return a box's contiguous runs in a row-major array: their length, and each one's first flat index."""
    if volume(box) == 0:
        return 0, []
    run = 1
    dim = len(shape)
    while dim > 0:
        dim -= 1
        start, stop = box[dim]
        run *= stop - start
        if stop - start != shape[dim]:
            break
    strides = strides_of(shape)
    base = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    starts = [base]
    for d in range(dim):  # outer dims first keeps the runs in file order
        extent = box[d][1] - box[d][0]
        starts = [s + i * strides[d] for s in starts for i in range(extent)]
    return run, starts
