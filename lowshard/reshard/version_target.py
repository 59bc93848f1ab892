"""Destinations of a subscriber's tensors: an array, or a transform that stores it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lowshard import dtypes
from lowshard.box import Box, full_box, shape_of, slices_of
from lowshard.errors import PlanError
from lowshard.foreign_array import like, view_of
from lowshard.kernels import cast
from lowshard.kernels.buffer import allocate, is_gpu, require_results_apart, twins_of
from lowshard.kernels.change_encoding import Changes
from lowshard.kernels.changes import ChangeBoxes
from lowshard.kernels.staging import assign
from lowshard.reshard.parameter_record import may_be_tied
from lowshard.reshard.published_tensors import local_arrays
from lowshard.reshard.tensor_layout import TensorLayout
from lowshard.reshard.version_changes import store_changed_blocks
from lowshard.reshard.version_store import PIECE_BYTES, box_of, copy_bits, pieces_of
from lowshard.transfer.device_copies import DeviceCopies, filled_from
from lowshard.transfer.transform_contract import ReshardTransform, memory_of

Array = Any
RECEIVE_BYTES = 8 << 20
"""Bytes received in place before their checksum is taken."""
Receive = Callable[[memoryview], None]
"""Fills memory with the next bytes."""


class ArrayTarget:
    """An array in one of the sets that versions are written to. Any thread may call these."""

    def __init__(self, array: Array, copies: DeviceCopies) -> None:
        """Take an array; `copies` copies to its GPU."""
        self.array, self._copies = array, copies
        self.comes_as: np.dtype[Any] | None = None
        """The dtype in which it is published, where it is cast."""

    def refuses(self, box: Box) -> str | None:
        """Return why a box cannot be received, or None: any box can."""
        return None

    def block_elems(self, boxes: Sequence[Box]) -> int:
        """Return the elements of a delta's unit: one; or 0, where boxes always come whole."""
        return 1 if self.comes_as is None else 0

    def put(self, box: Box, values: np.ndarray) -> None:
        """Write a box of values."""
        self._put(box_of(self.array, box), values)

    def _put(self, target: Array, values: np.ndarray) -> None:
        if is_gpu(target):
            made = values if self.comes_as is None else cast(values, target.dtype)
            self._copies.store(target, filled_from(made))
        elif self.comes_as is not None:
            cast(values, target.dtype, target)
        else:
            copy_bits(values, target)

    def receive(self, box: Box, receive: Receive) -> None:
        """Receive a row-major box: in place, or through a buffer where it is not contiguous."""
        target = box_of(self.array, box)
        if self.comes_as is not None:
            for piece in pieces_of(target, PIECE_BYTES):
                came = np.empty(piece.shape, self.comes_as)
                receive(came.reshape(-1).view(np.uint8).data)
                self._put(piece, came)
            return
        if is_gpu(target):
            self._copies.store(target, lambda room: receive(room.data))
            return
        for piece in pieces_of(target, RECEIVE_BYTES if target.flags.c_contiguous else PIECE_BYTES):
            data = piece if piece.flags.c_contiguous else np.empty(piece.shape, piece.dtype)
            receive(data.reshape(-1).view(np.uint8).data)
            if data is not piece:
                copy_bits(data, piece)

    def copy(self, served: Any, boxes: ChangeBoxes) -> None:
        """Copy boxes from the tensor in the served set."""
        with self._copies.current(self.array):
            boxes.copy(served.array, self.array)

    def write(self, boxes: ChangeBoxes, changes: Changes) -> None:
        """Apply changes."""
        there = _beside(self.array, changes, self._copies)
        with self._copies.current(self.array):
            boxes.write(self.array, there)


@dataclass(frozen=True)
class _Storing:
    """A transform that stores tensors, and the copies to its GPU."""

    transform: ReshardTransform
    copies: DeviceCopies
    lock: threading.Lock = field(default_factory=threading.Lock)


class StoredTarget:
    """A tensor that a transform stores, as `ArrayTarget`."""

    def __init__(self, name: str, dtype: str, beside: Array, storing: _Storing) -> None:
        self._name, self._dtype, self._beside, self._storing = name, dtype, beside, storing
        self._transform, self._copies = storing.transform, storing.copies

    def refuses(self, box: Box) -> str | None:
        """Return why the transform does not take a box, or None."""
        return self._transform.check_refuses(self._name, box)

    def block_elems(self, boxes: Sequence[Box]) -> int:
        """Return the elements of a block that the transform stores by itself, if equal in all boxes, else 0."""
        found = {self._transform.change_block_elems(self._name, box) for box in boxes}
        return found.pop() if len(found) == 1 else 0

    def put(self, box: Box, values: np.ndarray) -> None:
        """Give a box to the transform, on a GPU some rows at a time."""
        if not is_gpu(self._beside):
            self._give(box, values)
            return
        for at, part in self._parts(box):
            rows = values[at : at + shape_of(part)[0]] if part else values
            self._give(part, self._copies.upload(rows, self._beside))

    def receive(self, box: Box, receive: Receive) -> None:
        """Receive some rows at a time, or the whole box where the transform takes no rows."""
        for _, part in self._parts(box):
            data = np.empty(shape_of(part), dtypes.get(self._dtype).numpy)
            receive(data.reshape(-1).view(np.uint8).data)
            self.put(part, data)

    def copy(self, served: Any, boxes: ChangeBoxes) -> None:
        """Copy boxes from the twin transform that is served."""
        with self._calls():
            for box in boxes.boxes:
                self._transform.take_over(self._name, slices_of(box), served._transform)

    def write(self, boxes: ChangeBoxes, changes: Changes) -> None:
        """Have the transform store the blocks that differ."""
        there = _beside(self._beside, changes, self._copies)
        with self._calls():
            store_changed_blocks(self._transform, self._name, self._dtype, boxes, there, boxes.unit_bytes)

    def _give(self, box: Box, values: Array) -> None:
        with self._calls():
            if self._transform.in_place:
                self._transform.recv_rows(self._name, slices_of(box), [values])
                return
            (room,) = self._transform.prepare_recv(self._name, slices_of(box))
            assign(view_of(room, self._name), values)
            self._transform.finalize_recv(self._name, slices_of(box), [room])

    @contextmanager
    def _calls(self) -> Iterator[None]:
        """Serialise calls of the transform, on the stream of the copies."""
        with self._storing.lock, self._copies.current(self._beside):
            yield

    def _parts(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield some rows of a box at a time, with their first row; all of it where the transform takes no rows."""
        rows = len(range(*box[0])) if box else 1
        row_bytes = int(np.prod(shape_of(box)[1:])) * dtypes.get(self._dtype).itemsize_bytes
        step = max(1, RECEIVE_BYTES // row_bytes) if self._transform.in_place and row_bytes else max(1, rows)
        for at in range(0, rows, step):
            yield at, box and ((box[0][0] + at, box[0][0] + min(at + step, rows)), *box[1:])


Target = ArrayTarget | StoredTarget
"""Where one tensor goes."""


def _beside(array: Array, changes: Changes, copies: DeviceCopies) -> Changes:
    """Return changes whose encoding is on the array's device."""
    if changes.encoded is None or not is_gpu(array):
        return changes
    return changes._replace(encoded=copies.upload(changes.encoded, array))


@dataclass(frozen=True)
class TargetSet:
    """One of the sets of a rank that versions alternate between, or the only one."""

    targets: Mapping[str, Target]
    weights: Mapping[str, Any]
    copies: DeviceCopies
    transform: ReshardTransform | None

    @property
    def memory(self) -> list[tuple[str, Array]]:
        """All arrays that are written, with the names of tensors."""
        arrays = [(n, one.array) for n, one in self.targets.items() if isinstance(one, ArrayTarget)]
        return arrays + [(n, array) for n, array in memory_of(self.transform) if n in self.targets]

    def expect(self, name: str, published: str, dtype: str) -> None:
        """Have a tensor that is published in another dtype than this rank holds it in cast as it comes."""
        target = self.targets.get(name)
        if isinstance(target, ArrayTarget):
            target.comes_as = None if published == dtype else dtypes.get(published).numpy

    def begin(self) -> None:
        """Begin to write a version."""
        if self.transform is not None:
            self.transform.begin()

    def end(self) -> None:
        """Wait for all copies; raise PlanError if a transform's block is incomplete."""
        self.copies.wait()
        if self.transform is not None:
            self.transform.end()


def target_sets(
    layouts: Mapping[str, TensorLayout],
    out: Mapping[str, Array],
    transform: object,
    rank: int,
    timeout_s: float,
    in_place: bool,
) -> tuple[TargetSet, ...]:
    """Return a set over a rank's arrays and its transform, and, unless all is written in place, one more like it."""
    if transform is not None and not isinstance(transform, ReshardTransform):
        raise PlanError(f"transform is a ReshardTransform or None, got {type(transform).__name__}")
    stored = {} if transform is None else _stored(layouts, transform, rank)
    both = sorted(stored.keys() & out.keys()) if isinstance(out, Mapping) else []
    if both:
        raise PlanError(
            f"what the transform stores has no array in out, got one of {', '.join(both)}; leave it out"
        )
    plain = {name: layout for name, layout in layouts.items() if name not in stored}
    first = local_arrays(plain, out, rank, writes=True)
    copies = DeviceCopies([*first.values(), *(one.beside for one in stored.values())], timeout_s)
    made = _set(first, {name: out[name] for name in first}, copies, transform, stored)
    require_results_apart(
        made.memory,
        rank,
        lambda a, b, _: may_be_tied(a, b) and layouts[a].tiles(rank) == layouts[b].tiles(rank),
    )
    if in_place:
        return (made,)
    second = twins_of(first, lambda a: allocate(a.shape, a.dtype, a) if is_gpu(a) else np.empty_like(a))
    shown = {name: like(array, out[name]) for name, array in second.items()}
    return made, _set(second, shown, copies, _twin_of(transform), stored)


def _twin_of(transform: ReshardTransform | None) -> ReshardTransform | None:
    if transform is None:
        return None
    try:
        return transform.twin()
    except PlanError as error:  # what it advises is for a Refit
        raise PlanError(
            f"{type(transform).__name__} has no twin() with buffers of its own, which a Subscriber takes every second "
            "version into; write one, or subscribe with buffering='in_place'"
        ) from error


class _Stored(NamedTuple):
    """A tensor that a transform stores: its layout, and an empty array on the transform's device."""

    layout: TensorLayout
    beside: Array


def _stored(
    layouts: Mapping[str, TensorLayout], transform: ReshardTransform, rank: int
) -> Mapping[str, _Stored]:
    """Return the tensors of a rank that the transform stores."""
    found = {}
    for name, layout in layouts.items():
        shape = layout.local_shape(rank)
        if shape is None or not transform.should_transform(name):
            continue
        refused = transform.check_refuses(name, full_box(shape))
        if refused is not None:
            raise PlanError(refused)
        rooms = [view_of(room, name) for room in transform.prepare_recv(name, slices_of(full_box(shape)))]
        if [room.shape for room in rooms] != [shape]:
            raise PlanError(
                f"{name}: {layout.dtype}{list(shape)} comes as it is published, but the transform makes room for "
                f"{[list(room.shape) for room in rooms]}: it takes buffers of that shape, and convert_on_send=False"
            )
        found[name] = _Stored(layout, allocate((0,), np.dtype(np.uint8), rooms[0]))
    return found


def _set(
    arrays: Mapping[str, Array],
    weights: Mapping[str, Any],
    copies: DeviceCopies,
    transform: ReshardTransform | None,
    stored: Mapping[str, _Stored],
) -> TargetSet:
    targets: dict[str, Target] = {name: ArrayTarget(array, copies) for name, array in arrays.items()}
    if transform is None:
        return TargetSet(targets, weights, copies, None)
    storing, held = _Storing(transform, copies), transform.refit_weights()
    for name, (layout, beside) in stored.items():
        targets[name] = StoredTarget(name, layout.dtype, beside, storing)
    shown = {**weights, **{name: held[name] for name in stored if name in held}}
    return TargetSet(targets, shown, copies, transform)
