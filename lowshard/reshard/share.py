"""Which replica serves which request: on the rank itself, on its node, else dealt out evenly by bytes.

Requests for a source cell that has n replicas lie on a line, each as long as its bytes, in the order of tensors,
destination cells and destination replicas. Replica k serves the requests that begin in the k-th of n equal parts
of the line. So the requests a replica serves end less than one request after its part does: what it sends is at
most the mean plus one request. Everything is arithmetic on the line; no request is looked at but one's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from lowshard.reshard.layout import TensorLayout, moved_elems, targets


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


@dataclass(frozen=True, slots=True)
class Kind:
    """All tensors that go from one layout to another: their entries, in table order."""

    src: TensorLayout
    dst: TensorLayout
    entries: tuple[int, ...]


@lru_cache(maxsize=65536)
def askers(
    src: TensorLayout, dst: TensorLayout, src_cell: int, dst_cell: int, node_size: int | None
) -> Askers:
    """Return how the replicas of a destination cell get at a source cell."""
    count = dst.seats.count(dst_cell)
    (low, high), (dst_low, dst_high) = src.seats.span, dst.seats.span
    if node_size is None and (high <= dst_low or dst_high <= low):
        return Askers(count, None, (), ())
    local, near, dealt = [], [], []
    nodes = set() if node_size is None else {r // node_size for r in src.seats.ranks(src_cell)}
    for replica, rank in enumerate(dst.seats.ranks(dst_cell)):
        seat = src.seats.seat(rank)
        if seat is not None and seat[0] == src_cell:
            local.append(replica)
        elif node_size is not None and rank // node_size in nodes:
            near.append(replica)
        else:
            dealt.append(replica)
    if len(dealt) == count:
        return Askers(count, None, (), ())
    return Askers(len(dealt), tuple(dealt), tuple(local), tuple(near))


def near_source(src: TensorLayout, src_cell: int, dst_rank: int, node_size: int, entry: int) -> int:
    """Return the replica's rank on the node of a destination rank that serves one tensor to it."""
    held = [r for r in src.seats.ranks(src_cell) if r // node_size == dst_rank // node_size]
    return held[(dst_rank + entry) % len(held)]


class Shares:
    """The lines of all source cells of a plan, as far as somebody asks.

    Args:
        kinds: every kind of tensor, in a fixed order.
        node_size: ranks a node, or None.
    """

    def __init__(self, kinds: Sequence[Kind], node_size: int | None) -> None:
        self._kinds, self._node_size = kinds, node_size
        self._by_seats: dict[object, list[int]] = {}
        for number, kind in enumerate(kinds):
            self._by_seats.setdefault(kind.src.seats, []).append(number)
        self._lines: dict[tuple[object, int], tuple[dict[int, int], int]] = {}
        self._demands: dict[
            tuple[TensorLayout, TensorLayout, int], tuple[tuple[int, int, int, int], ...]
        ] = {}

    def demand(self, number: int, cell: int) -> tuple[tuple[int, int, int, int], ...]:
        """Return, for each destination cell that asks: it, bytes of a request, how many, where they begin."""
        kind = self._kinds[number]
        key = (kind.src, kind.dst, cell)
        found = self._demands.get(key)
        if found is None:
            rows, at = [], 0
            for dst_cell in targets(kind.src.partition, kind.dst.partition, cell):
                size = moved_elems(kind.src.partition, kind.dst.partition, cell, dst_cell)
                size_bytes = size * kind.src.itemsize_bytes
                count = askers(kind.src, kind.dst, cell, dst_cell, self._node_size).dealt
                rows.append((dst_cell, size_bytes, count, at))
                at += size_bytes * count
            found = self._demands[key] = tuple(rows)
        return found

    def demand_bytes(self, number: int, cell: int) -> int:
        """Return the bytes that one tensor of a kind adds to the line of a source cell."""
        rows = self.demand(number, cell)
        return rows[-1][3] + rows[-1][1] * rows[-1][2] if rows else 0

    def line(self, number: int, cell: int) -> tuple[int, int]:
        """Return where a kind begins on the line of a source cell, and how long the line is, in bytes."""
        seats = self._kinds[number].src.seats
        key = (seats, cell)
        found = self._lines.get(key)
        if found is None:
            begins, at = {}, 0
            for other in self._by_seats[seats]:
                begins[other] = at
                at += self.demand_bytes(other, cell) * len(self._kinds[other].entries)
            found = self._lines[key] = (begins, at)
        return found[0][number], found[1]

    def source(self, number: int, cell: int, dst_cell: int, replica: int, index: int) -> int:
        """Return the source rank that serves one request.

        Args:
            number: of the kind.
            cell: source cell.
            dst_cell: destination cell.
            replica: of the destination cell.
            index: of the tensor among the kind's entries.
        """
        kind = self._kinds[number]
        seats = kind.src.seats
        count = seats.count(cell)
        if count == 1:
            return seats.rank(cell, 0)
        ask = askers(kind.src, kind.dst, cell, dst_cell, self._node_size)
        if replica in ask.local:
            return kind.dst.seats.rank(dst_cell, replica)
        if replica in ask.near:
            assert self._node_size is not None
            rank = kind.dst.seats.rank(dst_cell, replica)
            return near_source(kind.src, cell, rank, self._node_size, kind.entries[index])
        place = replica if ask.order is None else ask.order.index(replica)
        begin, length = self.line(number, cell)
        row = next(r for r in self.demand(number, cell) if r[0] == dst_cell)
        at = begin + index * self.demand_bytes(number, cell) + row[3] + place * row[1]
        return seats.rank(cell, at * count // length if length else 0)

    def served(self, number: int, cell: int, replica: int, rank: int) -> Iterator[tuple[int, int, int]]:
        """Yield the requests that a replica of a source cell serves to others: entry index, cell, replica.

        Args:
            number: of the kind.
            cell: source cell.
            replica: of the source cell.
            rank: its rank.
        """
        kind = self._kinds[number]
        count = kind.src.seats.count(cell)
        rows = self.demand(number, cell)
        each = self.demand_bytes(number, cell)
        if count == 1:
            low = high = 0
        else:
            begin, length = self.line(number, cell)
            low, high = -(-replica * length // count), -(-(replica + 1) * length // count)
        for index in range(len(kind.entries)):
            base = 0 if count == 1 else begin + index * each
            for dst_cell, size_bytes, dealt, at in rows:
                ask = askers(kind.src, kind.dst, cell, dst_cell, self._node_size)
                if count == 1:
                    yield from (
                        (index, dst_cell, r)
                        for r in range(kind.dst.seats.count(dst_cell))
                        if r not in ask.local
                    )
                    continue
                if dealt and size_bytes:
                    first = max(0, -(-(low - base - at) // size_bytes))
                    stop = min(dealt, -(-(high - base - at) // size_bytes))
                    for place in range(first, stop):
                        yield index, dst_cell, place if ask.order is None else ask.order[place]
                for near in ask.near:
                    assert self._node_size is not None
                    to = kind.dst.seats.rank(dst_cell, near)
                    entry = kind.entries[index]
                    if near_source(kind.src, cell, to, self._node_size, entry) == rank:
                        yield index, dst_cell, near

    def bound_bytes(self, number: int, cell: int) -> float:
        """Return what a replica of a source cell sends at most for all tensors of its line, in bytes."""
        count = self._kinds[number].src.seats.count(cell)
        _, length = self.line(number, cell)
        largest = max(
            (
                row[1]
                for n in self._by_seats[self._kinds[number].src.seats]
                for row in self.demand(n, cell)
                if row[2]
            ),
            default=0,
        )
        return length / count + (largest if count > 1 else 0)

    def kinds_of_line(self, number: int) -> list[int]:
        """Return the kinds whose source seats are those of a kind: they share its lines."""
        return self._by_seats[self._kinds[number].src.seats]
