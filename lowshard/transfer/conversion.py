"""Applies a transform to the pieces of buckets, for the mover."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.box import Box, shape_of, slices_of
from lowshard.errors import MismatchError
from lowshard.foreign_array import view_of
from lowshard.kernels import cast
from lowshard.kernels.staging import assign
from lowshard.transfer.buckets import Piece
from lowshard.transfer.item import Format, Item, bytes_of
from lowshard.transfer.transform_contract import ReshardTransform

Array = Any
Key = tuple[int, Box, bool]


class Conversion:
    """One rank's transform, with the arrays that are partly sent or received."""

    def __init__(self, transform: ReshardTransform, xp: Any) -> None:
        self.transform, self._xp = transform, xp
        self._uses: dict[Key, int] = {}
        self._kept: dict[Key, list[Array]] = {}
        self._pending: dict[Key, int] = {}
        self._rooms: dict[int, list[Array]] = {}
        self._half: dict[int, tuple[list[Array], list[Array], int]] = {}

    def expect(self, item: Item) -> None:
        """Count the uses of an item: replicas of a destination share one preparation."""
        key = _reuse_key(item)
        self._uses[key] = self._uses.get(key, 0) + 1

    def begin(self, keeps_prepared: bool) -> None:
        """Begin a run; prepared arrays are kept only if they are of this run's content."""
        if not keeps_prepared:
            self._kept.clear()
            self._pending.clear()
            self._rooms.clear()
        self._half.clear()

    # ---- what travels

    def sent_forms(self, item: Item) -> list[Format]:
        """Return the formats of the arrays sent for an item."""
        known = self.transform.send_format(item.src_name, item.src_box, item.dtype)
        if known is None:
            known = [(dtypes.get(a.dtype).name, tuple(a.shape)) for a in self._prepared(item)]
        return known

    def got_forms(self, item: Item) -> list[Format]:
        """Return the formats of the arrays received for an item."""
        known = self.transform.recv_format(item.dst_name, item.dst_box, item.dtype)
        if known is None:
            rooms = self._rooms[item.number] = self._made_room(item)
            known = [(dtypes.get(a.dtype).name, tuple(a.shape)) for a in rooms]
        return known

    # ---- giving

    def put(self, pieces: Sequence[Piece], slot: Array) -> None:
        """Write the pieces of one item into a bucket."""
        item: Item = pieces[0].item
        box = self._box_of(pieces, item.sent)
        if box is not None and (self._serves_one(item) or item.is_cast):
            out, part = _views(pieces, item.sent, box, slot), slices_of(_moved(box, item.src_box))
            if item.is_plain:
                assign(out[0], item.source[part])
            else:
                self.transform.send_rows(item.src_name, part, item.source, out)
            return
        for piece in pieces:
            arrays = self._prepared(item)
            raw = arrays[max(piece.component, 0)].reshape(-1).view(np.uint8)
            begin, end = _byte_range(piece)
            slot[piece.offset_bytes : piece.offset_bytes + piece.size_bytes] = raw[begin:end]
            if end == raw.size and piece.component in (-1, len(arrays) - 1):
                self._given(item)

    def _prepared(self, item: Item) -> list[Array]:
        """Return the arrays sent for an item; made once for all receivers of the same."""
        key = _reuse_key(item)
        found = self._kept.get(key)
        if found is None:
            if item.is_plain or not item.makes:
                made = [item.source[slices_of(item.src_box)]]
            else:
                made = self.transform.prepare_send(item.src_name, slices_of(item.src_box), item.source)
            made = [view_of(a, item.src_name) for a in made]
            found = self._kept[key] = [a if a.flags.c_contiguous else a.copy() for a in made]
            self._pending[key] = self._uses.get(key, 1)
        return found

    def _given(self, item: Item) -> None:
        key = _reuse_key(item)
        self._pending[key] = self._pending.get(key, 1) - 1
        if self._pending[key] <= 0:
            self._kept.pop(key, None)
            self._pending.pop(key, None)

    def _serves_one(self, item: Item) -> bool:
        """Return whether only one item uses what the transform prepares."""
        return self._uses.get(_reuse_key(item), 1) == 1

    # ---- taking

    def get(self, pieces: Sequence[Piece], slot: Array) -> None:
        """Give received pieces of one item to the transform."""
        item: Item = pieces[0].item
        box = self._box_of(pieces, item.got)
        if box is not None:
            came = _views(pieces, item.got, box, slot)
            self.transform.recv_rows(item.dst_name, slices_of(_moved(box, item.dst_box)), came)
            return
        for piece in pieces:
            self._gather(item, piece, slot)

    def _gather(self, item: Item, piece: Piece, slot: Array) -> None:
        """Copy a piece into the transform's buffer; finish the item with its last piece."""
        held = self._half.get(item.number)
        if held is None:
            wanted = self._take_room(item)
            arrays = [
                w if w.nbytes == bytes_of(f) else self._xp.empty(f[1], dtypes.get(f[0]).numpy)
                for w, f in zip(wanted, item.got, strict=True)
            ]
            left = sum(a.nbytes for a in arrays)
        else:
            wanted, arrays, left = held
        raw = arrays[max(piece.component, 0)].reshape(-1).view(np.uint8)
        begin, end = _byte_range(piece)
        raw[begin:end] = slot[piece.offset_bytes : piece.offset_bytes + piece.size_bytes]
        self._half[item.number] = wanted, arrays, left - piece.size_bytes
        if left == piece.size_bytes:
            del self._half[item.number]
            self._finalize(item, wanted, arrays)

    def _take_room(self, item: Item) -> list[Array]:
        found = self._rooms.pop(item.number, None)
        return self._made_room(item) if found is None else found

    def _made_room(self, item: Item) -> list[Array]:
        made = self.transform.prepare_recv(item.dst_name, slices_of(item.dst_box))
        return [view_of(a, item.dst_name) for a in made]

    def _finalize(self, item: Item, wanted: list[Array], came: list[Array]) -> None:
        """Give the received arrays to the transform, cast if it wants another dtype."""
        if len(wanted) != len(came):
            raise MismatchError(
                f"{item.dst_name}: prepare_recv makes room for {len(wanted)} arrays, {len(came)} are sent for "
                f"{item.dst_box}"
            )
        for want, have in zip(wanted, came, strict=True):
            if want is have:
                continue
            if want.dtype != have.dtype:
                cast(have.reshape(want.shape), want.dtype, want)
            else:
                want[...] = have.reshape(want.shape)
        self.transform.finalize_recv(item.dst_name, slices_of(item.dst_box), wanted)

    # ---- within this rank

    def copy(self, item: Item) -> None:
        """Copy an item within this rank."""
        values = item.source[(*slices_of(item.src_box), ...)]
        if self.transform.in_place and item.stores and (self._serves_one(item) or not item.makes):
            self.transform.recv_rows(item.dst_name, slices_of(item.dst_box), [values])
            return
        if item.is_cast:
            target = item.target[(*slices_of(item.dst_box), ...)]
            self.transform.send_rows(item.src_name, slices_of(item.src_box), item.source, [target])
            return
        came = [values]
        if item.makes:
            came = self._prepared(item)
            self._given(item)
        if item.stores:
            plain = len(came) == 1 and came[0].flags.c_contiguous
            self._finalize(item, self._take_room(item), came if plain or len(came) > 1 else [came[0].copy()])
            return
        item.target[slices_of(item.dst_box)] = came[0].reshape(shape_of(item.dst_box))

    def _box_of(self, pieces: Sequence[Piece], forms: Sequence[Format]) -> Box | None:
        """Return the part of an item's box that pieces have all arrays of, or None."""
        if not self.transform.in_place:
            return None
        first = pieces[0]
        if first.component < 0:
            return first.box
        extents = shape_of(first.item.src_box)
        rows = set()
        for piece, (_, shape), form in zip(pieces, forms, forms, strict=False):
            if shape[:1] != extents[:1]:
                return None
            begin, end = piece.box[0]
            per = bytes_of(form) // shape[0]
            rows.add((begin / per, end / per))
        if len(pieces) != len(forms) or len(rows) != 1:
            return None
        ((begin_row, end_row),) = rows
        if begin_row % 1 or end_row % 1:
            return None
        return ((int(begin_row), int(end_row)), *((0, n) for n in extents[1:]))


def together(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Group the pieces of one item that may belong together."""
    found: list[list[Piece]] = []
    for piece in pieces:
        last = found[-1][-1] if found else None
        if (
            last is None
            or piece.item is not last.item
            or piece.component != last.component + 1
            or not piece.component
        ):
            found.append([])
        found[-1].append(piece)
    return found


def _byte_range(piece: Piece) -> tuple[int, int]:
    """Return the byte range of a piece in a prepared, contiguous array."""
    if piece.component >= 0:
        return piece.box[0]
    at, stride = 0, dtypes.get(piece.item.dtype).itemsize_bytes
    for n, (start, _) in zip(reversed(shape_of(piece.item.src_box)), reversed(piece.box), strict=True):
        at += start * stride
        stride *= n
    return at, at + piece.size_bytes


def _views(pieces: Sequence[Piece], forms: Sequence[Format], box: Box, slot: Array) -> list[Array]:
    """Return pieces in a bucket as arrays."""
    found = []
    for piece, (dtype, shape) in zip(pieces, forms, strict=True):
        extents = shape_of(box) if piece.component < 0 else (box[0][1] - box[0][0], *shape[1:])
        raw = slot[piece.offset_bytes : piece.offset_bytes + piece.size_bytes]
        found.append(raw.view(dtypes.get(dtype).numpy).reshape(extents))
    return found


def _moved(box: Box, into: Box) -> Box:
    """Return a box relative to `into` as an absolute one."""
    return tuple((at + start, at + stop) for (start, stop), (at, _) in zip(box, into, strict=True))


def _reuse_key(item: Item) -> Key:
    """Return a key that is equal for items that can share a preparation."""
    return item.array, item.src_box, bool(item.dst_box) and any(end % 32 for end in item.dst_box[-1])
