"""Many boxes of one array, packed one after the other into a 1-D buffer and back.

This is what a message between two ranks is made of. The boxes are fixed once, in a `BoxTable`; the
same table then serves every step.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lowshard.box import Box, Interval, shape_of, volume
from lowshard.errors import BufferMismatchError, KernelError
from lowshard.kernels.reference import require_apart, require_numpy, require_out


@dataclass(frozen=True)
class BoxTable:
    """Boxes of an array and where each lies in the packed buffer. Compares by shape and boxes.

    Attributes:
        shape: shape of the array that the boxes cut.
        boxes: one tuple of (start, stop) a box, one interval a dim; a 0-d array has the box `()`.
        elems: elements of each box.
        offsets_elems: first element of each box in the packed buffer.

    Raises:
        KernelError: a box has another number of dims than the shape, leaves it, or is no tuple of intervals.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    elems: tuple[int, ...] = field(init=False, repr=False, compare=False)
    offsets_elems: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.boxes, Iterable):
            raise KernelError(f"a BoxTable takes a list of boxes, got {self.boxes!r}; one box is [box]")
        shape = _checked_shape(self.shape)
        boxes = tuple(_checked_box(box, shape, index) for index, box in enumerate(self.boxes))
        elems = tuple(volume(box) for box in boxes)
        # A frozen dataclass is filled this way; lists that came in become tuples, so it can be hashed.
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "boxes", boxes)
        object.__setattr__(self, "elems", elems)
        object.__setattr__(self, "offsets_elems", tuple(accumulate(elems, initial=0))[:-1])

    @property
    def total_elems(self) -> int:
        """Elements of the packed buffer."""
        return sum(self.elems)

    @cached_property
    def overlap(self) -> tuple[int, int] | None:
        """The indices of two boxes that share an element, or None when all boxes are disjoint."""
        full = [index for index, count in enumerate(self.elems) if count]
        if len(full) < 2:
            return None
        if not self.shape:
            return full[0], full[1]
        edges = np.array([self.boxes[index] for index in full], np.int64)
        found = _first_overlap(edges[:, :, 0], edges[:, :, 1])
        return None if found is None else (full[found[0]], full[found[1]])

    @cached_property
    def _moves(self) -> tuple[tuple[tuple[Any, ...], slice, tuple[int, ...]], ...]:
        """Index into the array, slice of the packed buffer, and shape of every box that is not empty."""
        return tuple(
            # The Ellipsis keeps a 0-d result an array, where NumPy would give a scalar.
            ((*(slice(*span) for span in box), ...), slice(offset, offset + count), shape_of(box))
            for box, offset, count in zip(self.boxes, self.offsets_elems, self.elems, strict=True)
            if count
        )


def pack(
    src: npt.NDArray[Any], table: BoxTable | Sequence[Box], out: npt.NDArray[Any] | None = None
) -> npt.NDArray[Any]:
    """Copy boxes of an array, each row-major, one after the other into a 1-D buffer.

    Boxes may overlap: their common elements are then in the buffer more than once.

    Args:
        src: array of any dtype and strides, with the table's shape.
        table: a `BoxTable`, or the boxes themselves (checked on every call then).
        out: buffer of src's dtype [total_elems]; it must not share memory with src.

    Returns:
        `out` if given, else a new array [total_elems].

    Raises:
        KernelError: src or out is no NumPy array, or a box does not fit.
        BufferMismatchError: src has another shape than the table, or out is not the buffer described above.
    """
    source = require_numpy(src, "src")
    boxes = _as_table(table, source, "src")
    if out is None:
        out = np.empty(boxes.total_elems, source.dtype)
        packed = out
    else:
        packed = require_out(out, "out", (boxes.total_elems,), source.dtype)
        _require_same_dtype(packed, source, "out", "src")
        require_apart(packed, "out", source, "src")
    for index, span, shape in boxes._moves:
        packed[span].reshape(shape, copy=False)[...] = source[index]
    return out


def unpack(
    packed: npt.NDArray[Any], table: BoxTable | Sequence[Box], out: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Copy a packed buffer back into the boxes of an array; elements outside the boxes stay as they are.

    Args:
        packed: what `pack` gave with this table, [total_elems].
        table: a `BoxTable`, or the boxes themselves (checked on every call then).
        out: array to write into, of any strides, with the table's shape and packed's dtype.

    Returns:
        `out`.

    Raises:
        KernelError: packed or out is no NumPy array, a box does not fit, or two boxes overlap.
        BufferMismatchError: out or packed has another shape or dtype, out is read-only, or they share memory.
    """
    target = require_numpy(out, "out")
    boxes = _as_table(table, target, "out")
    source = require_numpy(packed, "packed")
    require_out(out, "out", boxes.shape, target.dtype)
    if source.shape != (boxes.total_elems,):
        raise BufferMismatchError(
            f"packed must be [{boxes.total_elems}], the elements of all boxes, got {list(source.shape)}"
        )
    _require_same_dtype(source, target, "packed", "out")
    require_apart(target, "out", source, "packed")
    if boxes.overlap is not None:
        first, second = boxes.overlap
        raise KernelError(
            f"unpack writes every element at most once, but box {first} {boxes.boxes[first]} and "
            f"box {second} {boxes.boxes[second]} overlap, and neither has the say; make them disjoint"
        )
    for index, span, shape in boxes._moves:
        target[index] = source[span].reshape(shape)
    return out


def _as_table(table: BoxTable | Sequence[Box], array: npt.NDArray[Any], name: str) -> BoxTable:
    if not isinstance(table, BoxTable):
        return BoxTable(array.shape, cast("tuple[Box, ...]", table))
    if array.shape != table.shape:
        raise BufferMismatchError(
            f"the table was built for shape {list(table.shape)}, got {name} {list(array.shape)}; "
            f"build one for it: BoxTable({name}.shape, boxes)"
        )
    return table


def _require_same_dtype(array: npt.NDArray[Any], other: npt.NDArray[Any], name: str, other_name: str) -> None:
    # Not only the name: a byte-swapped or structured dtype must not be converted on the way.
    if array.dtype != other.dtype:
        raise BufferMismatchError(
            f"{name} must have the dtype of {other_name}, {other.dtype!r}, got {array.dtype!r}; "
            "packing moves bits and converts nothing"
        )


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    try:
        extents = tuple(operator.index(extent) for extent in shape)
    except TypeError:
        extents = (-1,)
    if any(extent < 0 for extent in extents):
        raise KernelError(f"a shape is a tuple of integers of 0 or more, got {shape!r}; write array.shape")
    return extents


def _checked_box(box: Sequence[Interval], shape: tuple[int, ...], index: int) -> Box:
    try:
        spans = tuple((operator.index(start), operator.index(stop)) for start, stop in box)
    except (TypeError, ValueError) as error:
        raise KernelError(
            f"a box is a tuple of (start, stop) integers, one a dim, got {box!r} as box {index}"
        ) from error
    if len(spans) != len(shape):
        raise KernelError(
            f"box {index} must have one (start, stop) for each of the {len(shape)} dims of {list(shape)}, "
            f"got {len(spans)}: {spans}"
        )
    for dim, ((start, stop), extent) in enumerate(zip(spans, shape, strict=True)):
        if not 0 <= start <= stop <= extent:
            raise KernelError(
                f"box {index} must lie in its array: 0 <= start <= stop <= {extent} in dim {dim}, "
                f"got ({start}, {stop})"
            )
    return spans


def _first_overlap(starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> tuple[int, int] | None:
    """Return two of the non-empty boxes [boxes, dims] that share an element, or None."""
    # Sweep along one dim: after sorting by start, only the boxes that begin before this one ends can meet
    # it. The dim that leaves the fewest such pairs is cheap for grids, rows and columns alike.
    count, dims = starts.shape
    position = np.arange(count)
    candidates = []
    for dim in range(dims):
        order = np.argsort(starts[:, dim], kind="stable")
        last = np.searchsorted(starts[order, dim], stops[order, dim], side="left")
        candidates.append((int((last - position).sum()), order, last))
    _, order, last = min(candidates, key=lambda candidate: candidate[0])
    starts, stops = starts[order], stops[order]
    for i in np.flatnonzero(last > position + 1).tolist():
        rest = slice(i + 1, int(last[i]))
        meets = ((starts[rest] < stops[i]) & (starts[i] < stops[rest])).all(axis=1)
        hit = int(meets.argmax())
        if meets[hit]:
            first, second = sorted((int(order[i]), int(order[i + 1 + hit])))
            return first, second
    return None
