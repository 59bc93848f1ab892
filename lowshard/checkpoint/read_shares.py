"""Shares: who, among the ranks that hold an element, reads or writes it. Each element falls to one rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lowshard.box import Box, intersect, shape_of, split_interval, subtract, volume
from lowshard.tiling import Tiling

SPLIT_BYTES = 1 << 20
"""From this size on a box that several ranks hold is split between them; smaller ones go to one of them."""


@dataclass(frozen=True, slots=True)
class Share:
    """A box of a tensor that one rank handles, and the ranks that hold it (the rank among them)."""

    name: str
    rank: int
    box: Box
    holders: tuple[int, ...]


def shares(
    tilings: Mapping[str, Tiling], ranks: Collection[int] | None = None, split_bytes: int = SPLIT_BYTES
) -> list[Share]:
    """Return shares that cover every element that the ranks hold, once; what is held by many is spread."""
    load_bytes: dict[int, int] = {}
    small: list[tuple[str, Box, tuple[int, ...], int]] = []
    found: list[Share] = []

    def give(name: str, rank: int, box: Box, holders: tuple[int, ...], itemsize: int) -> None:
        found.append(Share(name, rank, box, holders))
        load_bytes[rank] = load_bytes.get(rank, 0) + volume(box) * itemsize

    held: dict[Tiling, list[tuple[Box, tuple[int, ...]]]] = {}  # layers are alike
    for name, tiling in tilings.items():
        itemsize = tiling.itemsize_bytes
        if tiling not in held:
            held[tiling] = disjoint(tiling, ranks)
        for box, holders in held[tiling]:
            if len(holders) == 1:
                give(name, holders[0], box, holders, itemsize)
            elif volume(box) * itemsize < split_bytes:
                small.append((name, box, holders, itemsize))
            else:
                for place, piece in enumerate(_cut(box, len(holders))):
                    if volume(piece):
                        give(name, holders[place], piece, holders, itemsize)
    for name, box, holders, itemsize in small:  # last, to the rank that has least to do
        give(name, min(holders, key=lambda r: (load_bytes.get(r, 0), r)), box, holders, itemsize)
    return found


def disjoint(tiling: Tiling, ranks: Collection[int] | None = None) -> list[tuple[Box, tuple[int, ...]]]:
    """Return boxes that do not overlap, each with all ranks that hold it; they cover what the ranks hold."""
    pieces: list[tuple[Box, tuple[int, ...]]] = []
    for box, all_holders in tiling.holders().items():
        holders = tuple(r for r in all_holders if ranks is None or r in ranks)
        if not holders:
            continue
        fresh, kept = [box], []
        for old, others in pieces:
            common = [b for part in fresh for b in _common(part, old)]
            if not common:
                kept.append((old, others))
                continue
            both = tuple(sorted({*others, *holders}))
            kept += [(b, both) for b in common]
            for b in common:
                fresh = [rest for part in fresh for rest in subtract(part, b)]
            left = [old]
            for b in common:
                left = [rest for part in left for rest in subtract(part, b)]
            kept += [(b, others) for b in left]
        pieces = kept + [(b, holders) for b in fresh]
    return pieces


def with_whole_rows(found: Sequence[Share], stored: Callable[[str], Sequence[Box]]) -> list[Share]:
    """Return shares in which columns of the same stored rows are joined, so that a file is read in long runs."""
    kept: list[Share] = []
    groups: dict[tuple[str, int, int, Box], list[Share]] = {}
    for share in found:
        boxes = stored(share.name)
        pieces = [
            (i, common) for i, box in enumerate(boxes) if (common := intersect(box, share.box)) is not None
        ]
        dims = [_column_dim(piece, boxes[i]) for i, piece in pieces]
        if not any(dims):
            kept.append(share)
            continue
        for (i, piece), dim in zip(pieces, dims, strict=True):
            part = Share(share.name, share.rank, piece, share.holders)
            if dim:
                groups.setdefault((share.name, i, dim, (*piece[:dim], *piece[dim + 1 :])), []).append(part)
            else:
                kept.append(part)
    for (name, _, dim, _), members in groups.items():
        members.sort(key=lambda s: s.box[dim])
        columns = [s.box[dim] for s in members]
        if len(members) < 2 or any(a[1] != b[0] for a, b in pairwise(columns)):
            kept += members
            continue
        readers = sorted({s.rank for s in members})
        holders = tuple(sorted({h for s in members for h in s.holders}))
        box = (*members[0].box[:dim], (columns[0][0], columns[-1][1]), *members[0].box[dim + 1 :])
        for reader, piece in zip(readers, _cut(box, len(readers)), strict=True):
            if volume(piece):
                kept.append(Share(name, reader, piece, holders))
    return kept


def _column_dim(box: Box, stored: Box) -> int:
    """Return the dim of a stored box along which a box lies in many runs of the file; 0 if it is one run."""
    dim = next((d for d in range(len(box) - 1, -1, -1) if box[d] != stored[d]), 0)
    return dim if any(stop - start > 1 for start, stop in box[:dim]) else 0


def _common(a: Box, b: Box) -> list[Box]:
    found = []
    for (a0, a1), (b0, b1) in zip(a, b, strict=True):
        start, stop = max(a0, b0), min(a1, b1)
        if start >= stop:
            return []
        found.append((start, stop))
    return [tuple(found)]


def _cut(box: Box, parts: int) -> list[Box]:
    """Return a box in parts, along its outermost dim that is long enough (else its longest)."""
    extents = shape_of(box)
    if not extents:
        return [box]
    dim = next(
        (d for d, n in enumerate(extents) if n >= parts), max(range(len(extents)), key=lambda d: extents[d])
    )
    return [(*box[:dim], split_interval(box[dim], parts, place), *box[dim + 1 :]) for place in range(parts)]
