"""What a rank remembers of what it gave last, to find what differs in the next version: a copy, or digests."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from lowshard.box import Box, slices_of
from lowshard.kernels.block_digests import LINE_BYTES, BlockDigests, new_key
from lowshard.kernels.buffer import address
from lowshard.kernels.change_search import Room
from lowshard.kernels.change_text import Changes
from lowshard.kernels.changes import ChangeBoxes

Array = Any
Key = tuple[int, tuple[Box, ...], int]
"""A tensor, boxes of it, and the elements of a unit."""


def key_of(entry: int, boxes: ChangeBoxes) -> Key:
    """Return what is equal for boxes that are looked through once."""
    return entry, boxes.boxes, boxes.block_elems


class LastGiven(Protocol):
    """What was given last.

    A version goes `find` for all boxes, `give_whole` for those that go whole, and `commit` once it has been switched
    to. Where it has not been, tensors whose memory had moved on already go whole next time.
    """

    gives_copies: bool
    """Whether what goes whole goes out of memory of this, and not out of the sources."""

    def units_of(self, itemsize: int, array: Array, boxes: list[Box]) -> int:
        """Return of how many elements a unit of texts is made that are taken into an array; 0: they go whole."""

    def add(self, entry: int, source: Array, boxes: ChangeBoxes) -> None:
        """Have memory for boxes of a tensor.

        Raises:
            MemoryError: there is none.
        """

    def find(self, entry: int, source: Array, boxes: ChangeBoxes, follows: bool, by_steps: bool) -> Changes:
        """Return what differs from what was given last; a text of None where all of it is to go.

        Once a version for the same boxes: what is remembered may have moved on then.
        """

    def give_whole(self, entry: int, source: Array, boxes: ChangeBoxes) -> None:
        """Remember that boxes go whole."""

    def whole_source(self, entry: int, source: Array | None) -> Array | None:
        """Return the array that boxes go whole out of; None on the taker's side, as `source` is."""

    def commit(self, entry: int, boxes: ChangeBoxes, raw: Changes) -> None:
        """Move on: the version is switched to."""

    def end(self) -> None:
        """All has moved on."""

    def close(self) -> None:
        """Let go of memory."""


class Copies:
    """A copy of each tensor. What goes whole is copied, and goes out of the copy: so that is what the takers have.

    Args:
        xp: the array module of the sources.
        always: send texts also where they take more than all.
    """

    gives_copies = True

    def __init__(self, xp: Any, always: bool) -> None:
        self._xp, self._always = xp, always
        self._room = Room()
        self._held: dict[int, Array] = {}
        self._ahead: set[int] = set()
        """Tensors whose copy is of a version that has not been switched to."""

    def units_of(self, itemsize: int, array: Array, boxes: list[Box]) -> int:
        """Return 1: elements are compared."""
        return 1

    def add(self, entry: int, source: Array, boxes: ChangeBoxes) -> None:
        """Make room for a copy of the tensor."""
        if entry not in self._held:
            self._held[entry] = _empty_like(self._xp, source)

    def find(self, entry: int, source: Array, boxes: ChangeBoxes, follows: bool, by_steps: bool) -> Changes:
        """Compare source and copy."""
        if not follows or entry in self._ahead:
            return Changes(0, 0, 0, None, boxes.elems)
        return boxes.find(source, self._held[entry], self._room, not self._always, by_steps)

    def give_whole(self, entry: int, source: Array, boxes: ChangeBoxes) -> None:
        """Copy the boxes."""
        self._ahead.add(entry)
        base = self._held[entry]
        for box in boxes.boxes:
            where = (*slices_of(box), ...)
            base[where] = source[where]

    def whole_source(self, entry: int, source: Array | None) -> Array | None:
        """Return the copy."""
        return None if source is None else self._held[entry]

    def commit(self, entry: int, boxes: ChangeBoxes, raw: Changes) -> None:
        """Write what differs into the copy."""
        if raw.text is not None:
            boxes.write(self._held[entry], raw)

    def end(self) -> None:
        """All copies are of the version that is switched to."""
        self._ahead.clear()
        self._room = Room()

    def close(self) -> None:
        """Let go of the copies."""
        self._held = {}


class Digests:
    """Eight bytes for each cache line, or each block of a transform; what differs is told by these.

    Args:
        xp: the array module of the sources.
        always: send texts also where they take more than all.
    """

    gives_copies = False

    def __init__(self, xp: Any, always: bool) -> None:
        self._xp, self._always = xp, always
        self._room = Room()
        self._held: dict[Key, BlockDigests] = {}
        self._known: set[Key] = set()
        """Boxes whose digests are those of the version that was switched to last."""

    def units_of(self, itemsize: int, array: Array, boxes: list[Box]) -> int:
        """Return the elements of a cache line, where all boxes are made of such."""
        elems = LINE_BYTES // itemsize
        fits = boxes[0] and array.strides[-1] == itemsize
        return elems if fits and not any((stop - start) % elems for *_, (start, stop) in boxes) else 0

    def add(self, entry: int, source: Array, boxes: ChangeBoxes) -> None:
        """Make room for the digests, and a key."""
        key = key_of(entry, boxes)
        if key not in self._held:
            values = self._xp.empty(boxes.units, np.uint64)
            self._held[key] = BlockDigests(new_key(boxes.unit_bytes), values)

    def find(self, entry: int, source: Array, boxes: ChangeBoxes, follows: bool, by_steps: bool) -> Changes:
        """Make digests, and compare them with those of the version before, which they take the place of."""
        key = key_of(entry, boxes)
        is_first = not follows or key not in self._known
        self._known.discard(key)
        found = boxes.find_by_digests(source, self._held[key], self._room, not self._always, is_first)
        return found._replace(changed_elems=boxes.elems) if found.text is None else found

    def give_whole(self, entry: int, source: Array, boxes: ChangeBoxes) -> None:
        """Nothing is to be done: the digests are made."""

    def whole_source(self, entry: int, source: Array | None) -> Array | None:
        """Return the source itself."""
        return source

    def commit(self, entry: int, boxes: ChangeBoxes, raw: Changes) -> None:
        """Trust the digests from now on."""
        self._known.add(key_of(entry, boxes))

    def end(self) -> None:
        """Let go of the room of the search."""
        self._room = Room()

    def close(self) -> None:
        """Let go of the digests."""
        self._held = {}


def _empty_like(xp: Any, source: Array) -> Array:
    """Return an array of the same form; it begins where the source does in a cache line, so that lines are compared."""
    if xp is not np:
        return xp.empty(source.shape, source.dtype)
    room = np.empty(source.nbytes + LINE_BYTES, np.uint8)
    begin = (address(source) - address(room)) % LINE_BYTES
    return room[begin : begin + source.nbytes].view(source.dtype).reshape(source.shape)
