"""Which replica serves which request: on the rank itself, on its node, else dealt out evenly by bytes.

Requests for a source cell that has n replicas lie on a line, each as long as its bytes: destination rank after
destination rank, and within one tensor after tensor. Replica k serves the requests that begin in the k-th of n equal
parts of the line. So the requests a replica serves end less than one request after its part does: what it sends is at
most the mean plus one request. And as a rank's requests lie side by side it has few peers: the replicas that its own
stretch of the line falls to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowshard.bounded import kept_in_self
from lowshard.reshard.partition import Pairing
from lowshard.reshard.tensor_layout import TensorLayout


class Askers(NamedTuple):
    """How the replicas of a destination cell get at one source cell."""

    dealt: int
    """How many of them are served from the line."""
    order: tuple[int, ...] | None
    """Which replicas these are, or None: all, in order."""
    local: tuple[int, ...]
    """Replicas whose own rank holds the source cell."""
    near: tuple[int, ...]
    """Replicas with a copy of the source cell on their node."""


@dataclass(frozen=True)
class Kind:
    """All tensors that go from one layout to another: their entries, in table order."""

    src: TensorLayout
    dst: TensorLayout
    entries: tuple[int, ...]
    pairing: Pairing = field(repr=False, compare=False)
    """What the cells of the two layouts have in common."""

    @kept_in_self
    def askers(self, src_cell: int, dst_cell: int, node_size: int | None) -> Askers:
        """Return how the replicas of a destination cell get at a source cell."""
        src, dst = self.src.seats, self.dst.seats
        count = dst.count(dst_cell)
        (low, high), (dst_low, dst_high) = src.span, dst.span
        if node_size is None and (high <= dst_low or dst_high <= low):
            return Askers(count, None, (), ())
        local, near, dealt = [], [], []
        nodes = set() if node_size is None else {r // node_size for r in src.ranks(src_cell)}
        for replica, rank in enumerate(dst.ranks(dst_cell)):
            seat = src.seat(rank)
            if seat is not None and seat[0] == src_cell:
                local.append(replica)
            elif node_size is not None and rank // node_size in nodes:
                near.append(replica)
            else:
                dealt.append(replica)
        if len(dealt) == count:
            return Askers(count, None, (), ())
        return Askers(len(dealt), tuple(dealt), tuple(local), tuple(near))

    def dealt_ranks(self, src_cell: int, dst_cell: int, node_size: int | None) -> npt.NDArray[np.int64]:
        """Return the ranks of a destination cell that are served from the line of a source cell, int64."""
        ranks = self.dst.seats.rank_array(dst_cell)
        order = self.askers(src_cell, dst_cell, node_size).order
        return ranks if order is None else ranks[list(order)]

    def moved_bytes(self, src_cell: int, dst_cell: int) -> int:
        """Return what a destination cell takes from a source cell of one tensor, in bytes."""
        return self.pairing.moved_elems(src_cell, dst_cell) * self.src.itemsize_bytes


def near_source(src: TensorLayout, src_cell: int, dst_rank: int, node_size: int, entry: int) -> int:
    """Return the replica's rank on the node of a destination rank that serves one tensor to it."""
    held = [r for r in src.seats.ranks(src_cell) if r // node_size == dst_rank // node_size]
    return held[(dst_rank + entry) % len(held)]


class _Line:
    """The requests for one source cell: who asks, and where each one's requests begin, in bytes."""

    def __init__(self, rows: Sequence[tuple[npt.NDArray[np.int64], int, int]]) -> None:
        none = np.zeros(0, np.int64)
        every = np.concatenate([none, *(ranks for ranks, _, _ in rows)])
        sizes = np.concatenate([none, *(np.full(len(ranks), n * count) for ranks, n, count in rows)])
        self.ranks, place = np.unique(every, return_inverse=True)
        sums = np.zeros(len(self.ranks), np.int64)
        np.add.at(sums, place, sizes)
        self.begins = np.concatenate(([0], np.cumsum(sums))).astype(np.int64)
        self.largest_bytes = max((n for ranks, n, _ in rows if len(ranks)), default=0)

    @property
    def length(self) -> int:
        """Length of the line in bytes."""
        return int(self.begins[-1])

    def begin(self, rank: int) -> int:
        """Return where the requests of a rank begin."""
        return int(self.begins[np.searchsorted(self.ranks, rank)])

    def within(self, low: int, high: int) -> list[int]:
        """Return the ranks some of whose requests may begin within a part of the line."""
        first = max(0, int(np.searchsorted(self.begins, low, side="right")) - 1)
        stop = int(np.searchsorted(self.begins[:-1], high, side="left"))
        return self.ranks[first:stop].tolist()  # type: ignore[no-any-return]


class Shares:
    """The lines of all source cells of a plan, as far as somebody asks."""

    def __init__(self, kinds: Sequence[Kind], node_size: int | None) -> None:
        self._kinds, self._node_size = kinds, node_size
        self._by_seats: dict[object, list[int]] = {}
        for number, kind in enumerate(kinds):
            self._by_seats.setdefault(kind.src.seats, []).append(number)
        self._lines: dict[tuple[object, int], _Line] = {}
        self._offsets: dict[tuple[object, int, int], dict[int, tuple[int, int]]] = {}

    def source(self, number: int, cell: int, dst_cell: int, replica: int, index: int) -> int:
        """Return the source rank that serves one request."""
        kind = self._kinds[number]
        seats = kind.src.seats
        count = seats.count(cell)
        if count == 1:
            return seats.rank(cell, 0)
        rank = kind.dst.seats.rank(dst_cell, replica)
        ask = kind.askers(cell, dst_cell, self._node_size)
        if replica in ask.local:
            return rank
        if replica in ask.near:
            assert self._node_size is not None
            return near_source(kind.src, cell, rank, self._node_size, kind.entries[index])
        line = self._line(seats, cell)
        begin, size = self._offsets_of(seats, cell, rank)[number]
        at = begin + index * size
        return seats.rank(cell, at * count // line.length if line.length else 0)

    def served(self, number: int, cell: int, replica: int, rank: int) -> Iterator[tuple[int, int, int]]:
        """Yield the requests that a replica of a source cell serves to others: entry index, cell, replica."""
        kind = self._kinds[number]
        count = kind.src.seats.count(cell)
        if count == 1:
            for dst_cell in kind.pairing.targets(cell):
                ask = kind.askers(cell, dst_cell, self._node_size)
                others = [r for r in range(kind.dst.seats.count(dst_cell)) if r not in ask.local]
                yield from ((i, dst_cell, r) for i in range(len(kind.entries)) for r in others)
            return
        line = self._line(kind.src.seats, cell)
        low, high = (-(-k * line.length // count) for k in (replica, replica + 1))
        for asking in line.within(low, high):
            found = self._offsets_of(kind.src.seats, cell, asking).get(number)
            if found is None:
                continue
            begin, size = found
            dst_seat = kind.dst.seats.seat(asking)
            assert dst_seat is not None
            if not size:
                continue
            first = max(0, -(-(low - begin) // size))
            for index in range(first, min(len(kind.entries), -(-(high - begin) // size))):
                yield index, *dst_seat
        if self._node_size is not None:
            yield from self._near(kind, cell, rank, self._node_size)

    def bound_bytes(self, number: int, cell: int) -> float:
        """Return what a replica of a source cell sends at most for all tensors of its line, in bytes."""
        seats = self._kinds[number].src.seats
        count, line = seats.count(cell), self._line(seats, cell)
        return line.length / count + (line.largest_bytes if count > 1 else 0)

    def _near(self, kind: Kind, cell: int, rank: int, node_size: int) -> Iterator[tuple[int, int, int]]:
        for dst_cell in kind.pairing.targets(cell):
            for near in kind.askers(cell, dst_cell, node_size).near:
                to = kind.dst.seats.rank(dst_cell, near)
                for index, entry in enumerate(kind.entries):
                    if near_source(kind.src, cell, to, node_size, entry) == rank:
                        yield index, dst_cell, near

    def _line(self, seats: object, cell: int) -> _Line:
        found = self._lines.get((seats, cell))
        if found is None:
            rows = []
            for number in self._by_seats[seats]:
                kind = self._kinds[number]
                for dst_cell in kind.pairing.targets(cell):
                    ranks = kind.dealt_ranks(cell, dst_cell, self._node_size)
                    rows.append((ranks, kind.moved_bytes(cell, dst_cell), len(kind.entries)))
            found = self._lines[seats, cell] = _Line(rows)
        return found

    def _offsets_of(self, seats: object, cell: int, rank: int) -> dict[int, tuple[int, int]]:
        """Return where a rank's requests of each kind begin on a line, and how long one is."""
        key = (seats, cell, rank)
        found = self._offsets.get(key)
        if found is None:
            at, found = self._line(seats, cell).begin(rank), {}
            for number in self._by_seats[seats]:
                kind = self._kinds[number]
                seat = kind.dst.seats.seat(rank)
                if seat is None:
                    continue
                size = kind.moved_bytes(cell, seat[0])
                ask = kind.askers(cell, seat[0], self._node_size)
                if size and seat[1] not in ask.local and seat[1] not in ask.near:
                    found[number] = at, size
                    at += size * len(kind.entries)
            if len(self._offsets) > 65536:
                self._offsets.clear()
            self._offsets[key] = found
        return found
