"""Many boxes of one array, packed one after the other into a 1-D buffer and back.

This is what a message between two ranks is made of. The boxes are fixed once, in a `BoxTable`; the
same table then serves every step.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lowshard.argument import as_shape, items
from lowshard.box import Box, Interval, shape_of, slices_of, volume
from lowshard.errors import BufferMismatchError, KernelError
from lowshard.foreign_array import like
from lowshard.kernels.buffer import Array, allocate, require_apart, require_array, require_out
from lowshard.kernels.engine import engine_for
from lowshard.kernels.kernel_stream import Stream, takes_stream
from lowshard.kernels.mxfp8_tensor import SHAPE
from lowshard.kernels.runs import RunTable, lower


@dataclass(frozen=True)
class BoxTable:
    """Boxes of an array and where each lies in the packed buffer. Compares by shape and boxes.

    Attributes:
        shape: shape of the array that has the boxes.
        boxes: one tuple of (start, stop) a box, one interval a dim; a 0-d array has the box `()`.
        elems: elements of each box.
        offsets_elems: first element of each box in the packed buffer.
        total_elems: elements of the packed buffer.

    Raises:
        KernelError: a box has another number of dims than the shape, leaves it, or is not a tuple of intervals.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    elems: tuple[int, ...] = field(init=False, repr=False, compare=False)
    offsets_elems: tuple[int, ...] = field(init=False, repr=False, compare=False)
    total_elems: int = field(init=False, repr=False, compare=False)
    _runs: dict[Any, RunTable] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        listed = items(self.boxes, "one box is [box]: a BoxTable takes a list of boxes", KernelError)
        shape = as_shape(self.shape, SHAPE, KernelError)
        boxes = tuple(_checked_box(box, shape, index) for index, box in enumerate(listed))
        elems = tuple(volume(box) for box in boxes)
        # A frozen dataclass is filled this way; lists that came in become tuples, so it can be hashed.
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "boxes", boxes)
        object.__setattr__(self, "elems", elems)
        object.__setattr__(self, "offsets_elems", tuple(accumulate(elems, initial=0))[:-1])
        object.__setattr__(self, "total_elems", sum(elems))
        object.__setattr__(self, "_runs", {})

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

    def runs(
        self,
        strides: tuple[int, ...],
        itemsize: int,
        packed_stride: int,
        packed_itemsize: int,
        unpacking: bool,
    ) -> RunTable:
        """Return the runs of all boxes between an array and its packed buffer; built once for each such array.

        Args:
            strides: strides of the array in bytes.
            itemsize: bytes of one of its elements.
            packed_stride: bytes from one element of the packed buffer to the next.
            packed_itemsize: bytes of one of its elements.
            unpacking: True if the packed buffer is the side that is read.
        """
        key = (strides, itemsize, packed_stride, packed_itemsize, unpacking)
        found = self._runs.get(key)
        if found is None:
            found = self._runs[key] = self._lowered(*key)
        return found

    def _lowered(
        self,
        strides: tuple[int, ...],
        itemsize: int,
        packed_stride: int,
        packed_itemsize: int,
        unpacking: bool,
    ) -> RunTable:
        edges = self._edges
        extents = edges[:, :, 1] - edges[:, :, 0]
        array_strides = np.broadcast_to(np.array(strides, np.int64), extents.shape)
        array_offsets = (edges[:, :, 0] * array_strides).sum(axis=1)
        packed_offsets = np.array(self.offsets_elems, np.int64) * packed_stride
        # Row-major inside each box: a dim's stride is the product of the extents after it.
        after = np.ones_like(extents)
        if extents.shape[1]:
            after[:, :-1] = np.cumprod(extents[:, :0:-1], axis=1)[:, ::-1]
        packed_strides = after * packed_stride
        if unpacking:
            return lower(
                extents,
                packed_offsets,
                array_offsets,
                packed_strides,
                array_strides,
                packed_itemsize,
                itemsize,
            )
        return lower(
            extents, array_offsets, packed_offsets, array_strides, packed_strides, itemsize, packed_itemsize
        )

    @cached_property
    def last_dim_divisor(self) -> int:
        """Largest number that divides every box's extent in the last dim; 0 if there is no box or no dim."""
        return math.gcd(*(box[-1][1] - box[-1][0] for box in self.boxes)) if self.shape else 0

    @cached_property
    def _edges(self) -> npt.NDArray[np.int64]:
        """Start and stop of every interval, [boxes, dims, 2]."""
        return np.array(self.boxes, np.int64).reshape(len(self.boxes), len(self.shape), 2)

    def object_moves(self) -> Iterator[tuple[tuple[Any, ...], slice, tuple[int, ...]]]:
        """Yield index into the array, slice of the packed buffer, and shape of every box that is not empty."""
        for box, offset, count in zip(self.boxes, self.offsets_elems, self.elems, strict=True):
            if count:
                # The Ellipsis keeps a 0-d result an array, where NumPy would give a scalar.
                index = (*slices_of(box), ...)
                yield index, slice(offset, offset + count), shape_of(box)


@takes_stream
def pack(
    src: Array, table: BoxTable | Sequence[Box], out: Array | None = None, *, stream: Stream = None
) -> Array:
    """Copy boxes of an array, each row-major, one after the other into a 1-D buffer.

    Boxes may overlap: their common elements are then in the buffer more than once.

    Args:
        src: array of any dtype and strides, with the table's shape.
        table: a `BoxTable`, or the boxes themselves (checked on every call then).
        out: buffer of src's dtype [total_elems]; it must not share memory with src.
        stream: as for `quantize_mxfp8`.

    Returns:
        `out` if given, else a new array [total_elems] of the library that src is of.

    Raises:
        KernelError: src or out is not an array, or a box does not fit.
        BufferMismatchError: src has another shape than the table, or out is not the buffer described above.
    """
    source = require_array(src, "src")
    boxes = as_table(table, source, "src")
    if out is None:
        packed = allocate((boxes.total_elems,), source.dtype, source)
    else:
        packed = require_out(out, "out", (boxes.total_elems,), source.dtype)
        _require_same_dtype(packed, source, "out", "src")
        require_apart(packed, "out", source, "src")
    itemsize = source.dtype.itemsize
    if source.dtype.hasobject:  # references are counted, which only NumPy can do
        for index, span, shape in boxes.object_moves():
            packed[span].reshape(shape, copy=False)[...] = source[index]
    elif itemsize and boxes.total_elems:
        runs = boxes.runs(source.strides, itemsize, packed.strides[0], itemsize, False)
        engine_for(source, packed).copy(source, packed, runs)
    return like(packed, src) if out is None else out


@takes_stream
def unpack(packed: Array, table: BoxTable | Sequence[Box], out: Array, *, stream: Stream = None) -> Array:
    """Copy a packed buffer back into the boxes of an array; elements outside the boxes stay as they are.

    Args:
        packed: what `pack` gave with this table, [total_elems].
        table: a `BoxTable`, or the boxes themselves (checked on every call then).
        out: array to write into, of any strides, with the table's shape and packed's dtype.
        stream: as for `quantize_mxfp8`.

    Returns:
        `out`.

    Raises:
        KernelError: packed or out is not an array, a box does not fit, or two boxes overlap.
        BufferMismatchError: out or packed has another shape or dtype, out is read-only, or they share memory.
    """
    target = require_array(out, "out")
    boxes = as_table(table, target, "out")
    source = require_array(packed, "packed")
    require_out(out, "out", boxes.shape, target.dtype)
    if source.shape != (boxes.total_elems,):
        raise BufferMismatchError(
            f"packed must be [{boxes.total_elems}], the elements of all boxes, got {list(source.shape)}"
        )
    _require_same_dtype(source, target, "packed", "out")
    require_apart(target, "out", source, "packed")
    require_disjoint(boxes, "unpack")
    if source.dtype.hasobject:
        for index, span, shape in boxes.object_moves():
            target[index] = source[span].reshape(shape)
        return out
    engine = engine_for(source, target)
    itemsize = source.dtype.itemsize
    if itemsize and boxes.total_elems:
        engine.copy(source, target, boxes.runs(target.strides, itemsize, source.strides[0], itemsize, True))
    return out


def require_disjoint(table: BoxTable, call: str) -> None:
    """Raise KernelError when two boxes share an element."""
    if table.overlap is not None:
        first, second = table.overlap
        raise KernelError(
            f"{call} writes every element at most once, but box {first} {table.boxes[first]} and "
            f"box {second} {table.boxes[second]} overlap, and neither has the say; make them disjoint"
        )


def as_table(table: BoxTable | Sequence[Box], array: Array, name: str) -> BoxTable:
    """Return a table that fits the array, built from bare boxes if need be, or raise."""
    if not isinstance(table, BoxTable):
        return BoxTable(array.shape, cast("tuple[Box, ...]", table))
    if array.shape != table.shape:
        raise BufferMismatchError(
            f"the table was built for shape {list(table.shape)}, got {name} {list(array.shape)}; "
            f"build one for it: BoxTable({name}.shape, boxes)"
        )
    return table


def _require_same_dtype(array: Array, other: Array, name: str, other_name: str) -> None:
    # Not only the name: a byte-swapped or structured dtype must not be converted on the way.
    if array.dtype != other.dtype:
        raise BufferMismatchError(
            f"{name} must have the dtype of {other_name}, {other.dtype!r}, got {array.dtype!r}; "
            "packing moves bits and converts nothing"
        )


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
