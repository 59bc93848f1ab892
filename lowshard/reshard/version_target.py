"""Where a rank of a subscriber puts what comes of a tensor: into an array, or through a transform that stores it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lowshard import dtypes
from lowshard.box import Box, full_box, shape_of
from lowshard.errors import BufferMismatchError, PlanError
from lowshard.foreign_array import like, view_of
from lowshard.kernels.buffer import is_gpu
from lowshard.kernels.change_text import Changes
from lowshard.kernels.changes import ChangeBoxes
from lowshard.kernels.staging import assign
from lowshard.reshard.published_tensors import local_arrays
from lowshard.reshard.tensor_layout import TensorLayout
from lowshard.reshard.version_store import PIECE_BYTES, box_of, copy_bits, pieces_of
from lowshard.transfer.changed_blocks import store_changed_blocks
from lowshard.transfer.item import slices_of
from lowshard.transfer.transform_contract import ReshardTransform

Array = Any
RECEIVE_BYTES = 8 << 20
"""What is received at a time where it shall lie, before its checksum is taken."""
Receive = Callable[[memoryview], None]
"""Fills memory with what comes next."""


class Target(Protocol):
    """Where one tensor goes, in one of the two sets that versions take turns between. Any thread may call these."""

    def refuses(self, box: Box) -> str | None:
        """Return why a box cannot be taken, or None."""

    def block_elems(self, boxes: Sequence[Box]) -> int:
        """Return of how many elements a unit of its changes is made; 0 where boxes always come whole."""

    def put(self, box: Box, values: np.ndarray) -> None:
        """Put a box of values in its place."""

    def receive(self, box: Box, receive: Receive) -> None:
        """Put a box that comes row-major in its place."""

    def copy(self, served: Any, boxes: ChangeBoxes) -> None:
        """Put boxes of what is served, the tensor's place in the other set, in their place."""

    def write(self, boxes: ChangeBoxes, changes: Changes) -> None:
        """Write what differs.

        Raises:
            VerificationError: the text is none of these boxes.
        """


class ArrayTarget:
    """An array.

    Attributes:
        array: written in place.
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def refuses(self, box: Box) -> str | None:
        """Return None: any box is taken."""
        return None

    def block_elems(self, boxes: Sequence[Box]) -> int:
        """Return 1: a unit is an element."""
        return 1

    def put(self, box: Box, values: np.ndarray) -> None:
        """Copy a box."""
        copy_bits(values, box_of(self.array, box))

    def receive(self, box: Box, receive: Receive) -> None:
        """Receive a box where it shall lie; by way of other memory where it lies in many runs."""
        target = box_of(self.array, box)
        for piece in pieces_of(target, RECEIVE_BYTES if target.flags.c_contiguous else PIECE_BYTES):
            data = piece if piece.flags.c_contiguous else np.empty(piece.shape, piece.dtype)
            receive(data.reshape(-1).view(np.uint8).data)
            if data is not piece:
                copy_bits(data, piece)

    def copy(self, served: ArrayTarget, boxes: ChangeBoxes) -> None:
        """Copy boxes of the other array."""
        boxes.copy(served.array, self.array)

    def write(self, boxes: ChangeBoxes, changes: Changes) -> None:
        """Write the elements that differ."""
        boxes.write(self.array, changes)


class StoredTarget:
    """What a transform stores a tensor in.

    Args:
        name: of the tensor.
        dtype: in which it comes.
        transform: that stores it.
        lock: held while the transform is called, which several streams bring something for.
    """

    def __init__(self, name: str, dtype: str, transform: ReshardTransform, lock: threading.Lock) -> None:
        self._name, self._dtype, self._transform, self._lock = name, dtype, transform, lock

    def refuses(self, box: Box) -> str | None:
        """Return why the transform takes no such box, or None."""
        return self._transform.check_refuses(self._name, box)

    def block_elems(self, boxes: Sequence[Box]) -> int:
        """Return the elements of a block that the transform stores by itself, if it is the same in all boxes."""
        found = {self._transform.change_block_elems(self._name, box) for box in boxes}
        return found.pop() if len(found) == 1 else 0

    def put(self, box: Box, values: np.ndarray) -> None:
        """Give a box to the transform."""
        with self._lock:
            if self._transform.in_place:
                self._transform.recv_rows(self._name, slices_of(box), [values])
                return
            (room,) = self._transform.prepare_recv(self._name, slices_of(box))
            assign(view_of(room, self._name), values)
            self._transform.finalize_recv(self._name, slices_of(box), [room])

    def receive(self, box: Box, receive: Receive) -> None:
        """Receive some rows at a time, or the box where the transform takes no rows."""
        dtype = dtypes.get(self._dtype)
        rows = len(range(*box[0])) if box else 1
        row_bytes = int(np.prod(shape_of(box)[1:])) * dtype.itemsize_bytes
        step = max(1, RECEIVE_BYTES // row_bytes) if self._transform.in_place and row_bytes else max(1, rows)
        for at in range(0, rows, step):
            part = box and ((box[0][0] + at, box[0][0] + min(at + step, rows)), *box[1:])
            data = np.empty(shape_of(part), dtype.numpy)
            receive(data.reshape(-1).view(np.uint8).data)
            self.put(part, data)

    def copy(self, served: StoredTarget, boxes: ChangeBoxes) -> None:
        """Have the transform take over what its twin holds."""
        with self._lock:
            for box in boxes.boxes:
                self._transform.take_over(self._name, slices_of(box), served._transform)

    def write(self, boxes: ChangeBoxes, changes: Changes) -> None:
        """Have the transform store the blocks that differ."""
        with self._lock:
            store_changed_blocks(self._transform, self._name, self._dtype, boxes, changes, boxes.unit_bytes)


@dataclass(frozen=True)
class TargetSet:
    """One of the two sets of a rank that versions take turns between.

    Attributes:
        targets: where each tensor goes.
        arrays: those that are arrays.
        weights: what readers of the set are given.
        transform: that stores the others, or None.
    """

    targets: Mapping[str, Target]
    arrays: Mapping[str, np.ndarray]
    weights: Mapping[str, Any]
    transform: ReshardTransform | None

    def begin(self) -> None:
        """Begin to write a version."""
        if self.transform is not None:
            self.transform.begin()

    def end(self) -> None:
        """Raise PlanError where something is missing, as a block of which only a part came."""
        if self.transform is not None:
            self.transform.end()


def two_sets(
    layouts: Mapping[str, TensorLayout], out: Mapping[str, Array], transform: object, rank: int
) -> tuple[TargetSet, TargetSet]:
    """Return a set over a rank's arrays and its transform, and one beside them.

    Args:
        layouts: of all tensors.
        out: the rank's arrays; none of those that the transform stores.
        transform: a ReshardTransform, or None.
        rank: this rank.

    Raises:
        PlanError: it is no transform, has no twin, refuses a tensor, or takes it in another form than it comes in.
        KernelError: it has no buffer for one.
        BufferMismatchError: an array is not as its layout says, or not in host memory, or a buffer is not.
    """
    if transform is not None and not isinstance(transform, ReshardTransform):
        raise PlanError(f"transform is a ReshardTransform or None, got {type(transform).__name__}")
    stored = {} if transform is None else _stored(layouts, transform, rank)
    plain = {name: layout for name, layout in layouts.items() if name not in stored}
    first = local_arrays(plain, out, rank, writes=True)
    second = {name: np.empty_like(array) for name, array in first.items()}
    shown = {name: like(array, out[name]) for name, array in second.items()}
    return (
        _set(first, {name: out[name] for name in first}, transform, stored),
        _set(second, shown, _twin_of(transform), stored),
    )


def _twin_of(transform: ReshardTransform | None) -> ReshardTransform | None:
    if transform is None:
        return None
    try:
        return transform.twin()
    except PlanError as error:  # what it advises is for a Refit
        raise PlanError(
            f"{type(transform).__name__} has no twin() with buffers of its own, which a Subscriber takes every second "
            "version into; write one"
        ) from error


def _stored(
    layouts: Mapping[str, TensorLayout], transform: ReshardTransform, rank: int
) -> Mapping[str, TensorLayout]:
    """Return what a transform stores of the tensors that a rank has a part of."""
    found = {}
    for name, layout in layouts.items():
        shape = layout.local_shape(rank)
        if shape is None or not transform.should_transform(name):
            continue
        refused = transform.check_refuses(name, full_box(shape))
        if refused is not None:
            raise PlanError(refused)
        rooms = [view_of(room, name) for room in transform.prepare_recv(name, slices_of(full_box(shape)))]
        if any(is_gpu(room) for room in rooms):
            raise BufferMismatchError(f"{name}: versions are written into host memory, also by a transform")
        if [room.shape for room in rooms] != [shape]:
            raise PlanError(
                f"{name}: {layout.dtype}{list(shape)} comes as it is published, but the transform makes room for "
                f"{[list(room.shape) for room in rooms]}: it takes buffers of that shape, and convert_on_send=False"
            )
        found[name] = layout
    return found


def _set(
    arrays: Mapping[str, np.ndarray],
    weights: Mapping[str, Any],
    transform: ReshardTransform | None,
    stored: Mapping[str, TensorLayout],
) -> TargetSet:
    targets: dict[str, Target] = {name: ArrayTarget(array) for name, array in arrays.items()}
    if transform is None:
        return TargetSet(targets, arrays, weights, None)
    lock, held = threading.Lock(), transform.refit_weights()
    targets.update({name: StoredTarget(name, x.dtype, transform, lock) for name, x in stored.items()})
    return TargetSet(
        targets, arrays, {**weights, **{name: held[name] for name in stored if name in held}}, transform
    )
