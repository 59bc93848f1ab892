"""Chooses the replica that serves each request: on the rank itself, on its node, else balanced by bytes.

The requests for a source cell with n replicas form a queue by destination rank, then by tensor, each as long as its
bytes. Replica k serves those that begin in the k-th of n equal ranges of the queue, so it sends at most the mean plus
one request. A rank's requests are adjacent, so it has few peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowshard.bounded import kept_in_self
from lowshard.reshard.partition import CellOverlaps
from lowshard.reshard.tensor_layout import TensorLayout


class Requesters(NamedTuple):
    """How the replicas of a destination cell get one source cell."""

    queued: int
    """How many of them are in the queue."""
    order: tuple[int, ...] | None
    """Which replicas these are, or None: all, in order."""
    local: tuple[int, ...]
    """Replicas whose own rank holds the source cell."""
    near: tuple[int, ...]
    """Replicas with a replica of the source cell on their node."""


@dataclass(frozen=True)
class Kind:
    """All tensors with the same source and destination layout: their entries, in table order."""

    src: TensorLayout
    dst: TensorLayout
    entries: tuple[int, ...]
    overlaps: CellOverlaps = field(repr=False, compare=False)
    """The overlaps of the cells of the two layouts."""

    @kept_in_self
    def requesters(self, src_cell: int, dst_cell: int, node_size: int | None) -> Requesters:
        """Return how the replicas of a destination cell get a source cell."""
        src, dst = self.src.rank_map, self.dst.rank_map
        count = dst.count(dst_cell)
        (low, high), (dst_low, dst_high) = src.span, dst.span
        if node_size is None and (high <= dst_low or dst_high <= low):
            return Requesters(count, None, (), ())
        local, near, queued = [], [], []
        nodes = set() if node_size is None else {r // node_size for r in src.ranks(src_cell)}
        for replica, rank in enumerate(dst.ranks(dst_cell)):
            position = src.position(rank)
            if position is not None and position[0] == src_cell:
                local.append(replica)
            elif node_size is not None and rank // node_size in nodes:
                near.append(replica)
            else:
                queued.append(replica)
        if len(queued) == count:
            return Requesters(count, None, (), ())
        return Requesters(len(queued), tuple(queued), tuple(local), tuple(near))

    def queued_ranks(self, src_cell: int, dst_cell: int, node_size: int | None) -> npt.NDArray[np.int64]:
        """Return the ranks of a destination cell that are in the queue of a source cell, int64."""
        ranks = self.dst.rank_map.rank_array(dst_cell)
        order = self.requesters(src_cell, dst_cell, node_size).order
        return ranks if order is None else ranks[list(order)]

    def moved_bytes(self, src_cell: int, dst_cell: int) -> int:
        """Return the bytes of one tensor that a destination cell receives from a source cell."""
        return self.overlaps.moved_elems(src_cell, dst_cell) * self.dst.itemsize_bytes


def near_source(src: TensorLayout, src_cell: int, dst_rank: int, node_size: int, entry: int) -> int:
    """Return the rank on the destination's node that serves one tensor to it."""
    held = [r for r in src.rank_map.ranks(src_cell) if r // node_size == dst_rank // node_size]
    return held[(dst_rank + entry) % len(held)]


class _RequestQueue:
    """The requests for one source cell: the ranks, and where each rank's requests begin, in bytes."""

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
        """Length of the queue in bytes."""
        return int(self.begins[-1])

    def begin(self, rank: int) -> int:
        return int(self.begins[np.searchsorted(self.ranks, rank)])

    def within(self, low: int, high: int) -> list[int]:
        """Return the ranks with requests that may begin within a range of the queue."""
        first = max(0, int(np.searchsorted(self.begins, low, side="right")) - 1)
        stop = int(np.searchsorted(self.begins[:-1], high, side="left"))
        return self.ranks[first:stop].tolist()  # type: ignore[no-any-return]


class Shares:
    """The request queues of all source cells of a plan, made on demand."""

    def __init__(self, kinds: Sequence[Kind], node_size: int | None) -> None:
        self._kinds, self._node_size = kinds, node_size
        self._by_rank_map: dict[object, list[int]] = {}
        for number, kind in enumerate(kinds):
            self._by_rank_map.setdefault(kind.src.rank_map, []).append(number)
        self._queues: dict[tuple[object, int], _RequestQueue] = {}
        self._offsets: dict[tuple[object, int, int], dict[int, tuple[int, int]]] = {}

    def source(self, number: int, cell: int, dst_cell: int, replica: int, index: int) -> int:
        """Return the source rank that serves one request."""
        kind = self._kinds[number]
        rank_map = kind.src.rank_map
        count = rank_map.count(cell)
        if count == 1:
            return rank_map.rank(cell, 0)
        rank = kind.dst.rank_map.rank(dst_cell, replica)
        requesters_of = kind.requesters(cell, dst_cell, self._node_size)
        if replica in requesters_of.local:
            return rank
        if replica in requesters_of.near:
            assert self._node_size is not None
            return near_source(kind.src, cell, rank, self._node_size, kind.entries[index])
        queue = self._queue(rank_map, cell)
        begin, size = self._offsets_of(rank_map, cell, rank)[number]
        at = begin + index * size
        return rank_map.rank(cell, at * count // queue.length if queue.length else 0)

    def served(self, number: int, cell: int, replica: int, rank: int) -> Iterator[tuple[int, int, int]]:
        """Yield the requests of other ranks that a replica serves: entry index, cell, replica."""
        kind = self._kinds[number]
        count = kind.src.rank_map.count(cell)
        if count == 1:
            for dst_cell in kind.overlaps.targets(cell):
                requesters_of = kind.requesters(cell, dst_cell, self._node_size)
                others = [r for r in range(kind.dst.rank_map.count(dst_cell)) if r not in requesters_of.local]
                yield from ((i, dst_cell, r) for i in range(len(kind.entries)) for r in others)
            return
        queue = self._queue(kind.src.rank_map, cell)
        low, high = (-(-k * queue.length // count) for k in (replica, replica + 1))
        for dst_rank in queue.within(low, high):
            found = self._offsets_of(kind.src.rank_map, cell, dst_rank).get(number)
            if found is None:
                continue
            begin, size = found
            dst_position = kind.dst.rank_map.position(dst_rank)
            assert dst_position is not None
            if not size:
                continue
            first = max(0, -(-(low - begin) // size))
            for index in range(first, min(len(kind.entries), -(-(high - begin) // size))):
                yield index, *dst_position
        if self._node_size is not None:
            yield from self._near(kind, cell, rank, self._node_size)

    def bound_bytes(self, number: int, cell: int) -> float:
        """Return the most bytes that a replica of a source cell sends for all tensors of its queue."""
        rank_map = self._kinds[number].src.rank_map
        count, queue = rank_map.count(cell), self._queue(rank_map, cell)
        return queue.length / count + (queue.largest_bytes if count > 1 else 0)

    def _near(self, kind: Kind, cell: int, rank: int, node_size: int) -> Iterator[tuple[int, int, int]]:
        for dst_cell in kind.overlaps.targets(cell):
            for near in kind.requesters(cell, dst_cell, node_size).near:
                to = kind.dst.rank_map.rank(dst_cell, near)
                for index, entry in enumerate(kind.entries):
                    if near_source(kind.src, cell, to, node_size, entry) == rank:
                        yield index, dst_cell, near

    def _queue(self, rank_map: object, cell: int) -> _RequestQueue:
        found = self._queues.get((rank_map, cell))
        if found is None:
            rows = []
            for number in self._by_rank_map[rank_map]:
                kind = self._kinds[number]
                for dst_cell in kind.overlaps.targets(cell):
                    ranks = kind.queued_ranks(cell, dst_cell, self._node_size)
                    rows.append((ranks, kind.moved_bytes(cell, dst_cell), len(kind.entries)))
            found = self._queues[rank_map, cell] = _RequestQueue(rows)
        return found

    def _offsets_of(self, rank_map: object, cell: int, rank: int) -> dict[int, tuple[int, int]]:
        """Return where a rank's requests of each kind begin in a queue, and the length of one."""
        key = (rank_map, cell, rank)
        found = self._offsets.get(key)
        if found is None:
            at, found = self._queue(rank_map, cell).begin(rank), {}
            for number in self._by_rank_map[rank_map]:
                kind = self._kinds[number]
                position = kind.dst.rank_map.position(rank)
                if position is None:
                    continue
                size = kind.moved_bytes(cell, position[0])
                requesters_of = kind.requesters(cell, position[0], self._node_size)
                if size and position[1] not in requesters_of.local and position[1] not in requesters_of.near:
                    found[number] = at, size
                    at += size * len(kind.entries)
            if len(self._offsets) > 65536:
                self._offsets.clear()
            self._offsets[key] = found
        return found
