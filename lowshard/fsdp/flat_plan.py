"""The layout of a flat buffer: where its parameters lie, and which shard each rank holds. No communication."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lowshard.argument import MOST_ELEMS, as_shape, brief, instance, items, whole
from lowshard.box import Box
from lowshard.content_hash import text_digest
from lowshard.errors import BufferMismatchError, LayoutError
from lowshard.foreign_array import like, view_of
from lowshard.fsdp.param import Param
from lowshard.kernels.buffer import is_gpu
from lowshard.reading import reader

Array = Any  # a NumPy or CuPy array; CuPy ships no types

ALIGN_ELEMS = 32
"""Parameters and shards begin at multiples of so many elements: the MX block, and 64 bytes of bf16."""
_MOST_TRIES = 10_000


@dataclass(frozen=True)
class Entry:
    """One parameter in the flat buffer, at elements `offset` to `offset + elems`."""

    name: str
    shape: tuple[int, ...]
    offset: int
    elems: int


@dataclass(frozen=True)
class Piece:
    """The part of a parameter in a shard: its flat elements lo to hi, from element `shard_lo` of the shard on."""

    name: str
    param_lo: int
    param_hi: int
    shard_lo: int

    @property
    def shard_hi(self) -> int:
        """The element of the shard after the last."""
        return self.shard_lo + self.param_hi - self.param_lo


@dataclass(frozen=True)
class Copy:
    """Elements of a parameter that lie in one shard of one plan and in one shard of another."""

    name: str
    src_lo: int
    dst_lo: int
    elems: int


@dataclass(frozen=True)
class FlatPlan:
    """Parameters one after the other in a flat buffer, split into shards of equal length.

    The places of parameters do not depend on the number of shards, unless `keep` moves them. What is left over
    (between parameters, at the end) is padding: zero, and in no file.

    Attributes:
        entries: the parameters, in order.
        shards: how many there are.
        shard_elems: the length of each.
        align: elements that parameters and shards begin at multiples of.
    """

    entries: tuple[Entry, ...]
    shards: int
    shard_elems: int
    align: int

    def __post_init__(self) -> None:
        rule = "a plan has shards >= 1 of shard_elems >= 0 elements, and align >= 1"
        for name, least in (("shards", 1), ("shard_elems", 0), ("align", 1)):
            whole(getattr(self, name), f"{rule}: {name}", LayoutError, least, MOST_ELEMS)
        end = 0
        for entry in self.entries:
            shape = as_shape(entry.shape, f"{entry.name}: extents are 0 or more", LayoutError)
            if entry.elems != math.prod(shape) or entry.offset < end or entry.offset % self.align:
                raise LayoutError(
                    f"a parameter has the elements of its shape and lies behind the one before, at a multiple of "
                    f"{self.align}; got {entry} behind element {end}"
                )
            end = entry.offset + entry.elems
        if end > self.size or len({entry.name for entry in self.entries}) != len(self.entries):
            raise LayoutError(
                f"parameters have names of their own and lie within {self.size} elements, got {len(self.entries)} "
                f"that end at {end}"
            )

    @classmethod
    def plan(cls, params: Sequence[Param], shards: int, *, align: int = ALIGN_ELEMS) -> FlatPlan:
        """Return the plan of untied parameters.

        Args:
            params: in the order in which they are to lie.
            shards: number of ranks that share them.
            align: see `FlatPlan`.

        Raises:
            LayoutError: no shards, or no split is found that leaves all `keep` blocks whole.
        """
        shards = whole(shards, "a plan has 1 shard or more", LayoutError, 1, MOST_ELEMS)
        align = whole(align, "parameters are aligned to 1 element or more", LayoutError, 1, MOST_ELEMS)
        rule = "a plan is made of Param values"
        params = [instance(param, Param, rule, LayoutError) for param in items(params, rule, LayoutError)]
        packed = sum(_up(param.elems, align) for param in params)
        step = align
        for param in params:  # who spans several shards needs every cut at its blocks
            if param.keep_elems > 1 and param.elems > _up(-(-packed // shards), align):
                step = math.lcm(step, param.keep_elems)
        shard = max(step, _up(-(-packed // shards), step))
        for _ in range(_MOST_TRIES):
            entries = _place(params, shard, shards, align)
            if entries is not None:
                return cls(entries, shards, shard, align)
            shard += step
        kept = [param.name for param in params if param.keep_elems > 1]
        raise LayoutError(
            f"no split into {shards} shards leaves the keep blocks of {', '.join(kept)} whole; take smaller blocks, "
            "fewer shards, or put the parameters into units of their own"
        )

    @property
    def size(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.shards * self.shard_elems

    @property
    def elems(self) -> int:
        """Elements of all parameters."""
        return sum(entry.elems for entry in self.entries)

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return self.size - self.elems

    @cached_property
    def by_name(self) -> dict[str, Entry]:
        """The entries by name."""
        return {entry.name: entry for entry in self.entries}

    def range(self, rank: int) -> tuple[int, int]:
        """Return the elements of the buffer that a shard holds, as (first, stop)."""
        rank = whole(rank, f"a shard is 0 to {self.shards - 1}", LayoutError, 0, self.shards - 1)
        return rank * self.shard_elems, (rank + 1) * self.shard_elems

    def pieces(self, rank: int) -> list[Piece]:
        """Return the pieces of a shard, in order."""
        lo, hi = self.range(rank)
        found = []
        for entry in self.entries:
            first, stop = max(lo, entry.offset), min(hi, entry.offset + entry.elems)
            if first < stop:
                found.append(Piece(entry.name, first - entry.offset, stop - entry.offset, first - lo))
        return found

    def views(self, flat: Array) -> dict[str, Array]:
        """Return every parameter as a shaped view of a buffer of `size` elements.

        Raises:
            BufferMismatchError: no array of so many elements and one dim.
        """
        seen = view_of(flat, "a plan's buffer")
        if not (isinstance(seen, np.ndarray) or is_gpu(seen)) or seen.shape != (self.size,):
            raise BufferMismatchError(f"a plan's buffer is an array [{self.size}], got {brief(flat)}")
        return {
            entry.name: like(seen[entry.offset : entry.offset + entry.elems].reshape(entry.shape), flat)
            for entry in self.entries
        }

    def intersect(self, other: FlatPlan, rank: int, other_rank: int) -> list[Copy]:
        """Return what shard `other_rank` of another plan of the same parameters needs of this plan's shard `rank`."""
        instance(other, FlatPlan, "a plan is intersected with another FlatPlan", LayoutError)
        theirs = {piece.name: piece for piece in other.pieces(other_rank)}
        found = []
        for mine in self.pieces(rank):
            piece = theirs.get(mine.name)
            if piece is None:
                continue
            lo, hi = max(mine.param_lo, piece.param_lo), min(mine.param_hi, piece.param_hi)
            if lo < hi:
                src, dst = mine.shard_lo + lo - mine.param_lo, piece.shard_lo + lo - piece.param_lo
                found.append(Copy(mine.name, src, dst, hi - lo))
        return found

    @property
    def digest(self) -> str:
        """A hash of the plan, equal on all ranks."""
        return text_digest(self.to_json()).hex()

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> FlatPlan:
        """Return the plan that `to_json` wrote; invalid data raises LayoutError with its place."""
        return _read.text(text)


_read = reader("flat plan", LayoutError)(FlatPlan)


def flat_boxes(shape: Sequence[int], lo: int, hi: int) -> Iterator[tuple[Box, int, int]]:
    """Split flat elements lo to hi of a row-major array into boxes, in order: (box, first element, stop element)."""
    if lo >= hi:
        return
    if not shape:
        yield (), 0, 1
        return
    inner = math.prod(shape[1:])
    first, last = lo // inner, (hi - 1) // inner
    if first == last and hi - lo < inner:
        for box, start, stop in flat_boxes(shape[1:], lo - first * inner, hi - first * inner):
            yield ((first, first + 1), *box), start + first * inner, stop + first * inner
        return
    at = lo
    if lo % inner:
        at = (first + 1) * inner
        yield from flat_boxes(shape, lo, at)
    whole = hi // inner * inner
    if at < whole:
        yield ((at // inner, whole // inner), *((0, extent) for extent in shape[1:])), at, whole
    if whole < hi:
        yield from flat_boxes(shape, max(at, whole), hi)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _place(params: Sequence[Param], shard: int, shards: int, align: int) -> tuple[Entry, ...] | None:
    """Return the entries for shards of this length, or None if they do not fit."""
    entries, cursor = [], 0
    for param in params:
        offset = _first_fit(cursor, param.elems, param.keep_elems, shard, align)
        if offset is None or offset + param.elems > shard * shards:
            return None
        entries.append(Entry(param.name, param.shape, offset, param.elems))
        cursor = _up(offset + param.elems, align)
    return tuple(entries)


def _first_fit(cursor: int, elems: int, keep: int, shard: int, align: int) -> int | None:
    """Return the first aligned offset from the cursor on where no shard boundary splits a block of `keep` elements."""
    if keep == 1 or not elems:
        return cursor
    offset = cursor
    while True:
        end = (offset // shard + 1) * shard
        if offset + elems <= end:
            return offset
        if (offset + elems <= end + shard or shard % keep == 0) and (end - offset) % keep == 0:
            return offset
        offset += align
        if offset > end:
            # A whole shard was tried; from its start on nothing new comes.
            return None
