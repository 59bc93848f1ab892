"""Each rank's moves, computed from the layouts of its own tensors alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from lowshard.box import volume
from lowshard.errors import PlanError
from lowshard.reshard.partition import CellOverlaps, Partition
from lowshard.reshard.rank_grid import Roster
from lowshard.reshard.replica_shares import Kind, Shares
from lowshard.reshard.reshard_move import Entry, Move, RankPlan
from lowshard.reshard.tensor_layout import TensorLayout

_ENTRY_BITS, _TILE_BITS = 24, 20
ENTRIES = 1 << _ENTRY_BITS
"""Most tensors of a plan."""


class Schedule:
    """Which rank sends which boxes to which, computed on demand."""

    def __init__(self, entries: Sequence[Entry], node_size: int | None, multicast: bool) -> None:
        self.entries, self.node_size, self.multicast = entries, node_size, multicast

    def rank_plan(self, rank: int) -> RankPlan:
        """Return what one rank does."""
        sends: dict[int, list[Move]] = {}
        receives: dict[int, list[Move]] = {}
        copies: list[Move] = []
        for number, kind in enumerate(self.kinds):
            src_seat, dst_position = kind.src.rank_map.position(rank), kind.dst.rank_map.position(rank)
            if dst_position is not None:
                self._receive(rank, number, *dst_position, receives, copies)
            if src_seat is not None:
                self._send(rank, number, *src_seat, sends)
            if dst_position is not None and self._forwards(kind):
                self._forward(rank, number, *dst_position, sends)
        return RankPlan(rank, _ordered(sends), _ordered(receives), tuple(copies))

    def check_sources(self, kind: Kind, cell: int, rank: int) -> None:
        """Raise PlanError unless the sources hold every element of a destination cell."""
        lacking = kind.overlaps.missing(cell)
        if lacking:
            name = self.entries[kind.entries[0]].name
            raise PlanError(
                f"{name}: the sources hold {lacking} elements fewer than rank {rank} needs of "
                f"{kind.dst.partition.local_shape(cell)}; every element needs a source"
            )

    def _receive(
        self,
        rank: int,
        number: int,
        cell: int,
        replica: int,
        receives: dict[int, list[Move]],
        copies: list[Move],
    ) -> None:
        kind, shares = self.kinds[number], self.shares
        self.check_sources(kind, cell, rank)
        if replica and self._forwards(kind):
            parent = kind.dst.rank_map.rank(cell, replica - (1 << (replica.bit_length() - 1)))
            whole = kind.dst.partition.filled(cell)
            if volume(whole):
                for entry in kind.entries:
                    move = Move(_id(rank, entry, 0), entry, parent, rank, whole, whole)
                    receives.setdefault(parent, []).append(move)
            return
        for src_cell in kind.overlaps.sources(cell):
            pairs = kind.overlaps.moves(src_cell, cell)
            first = kind.overlaps.first_tile(src_cell, cell)
            for index, entry in enumerate(kind.entries):
                peer = shares.source(number, src_cell, cell, replica, index)
                to = copies if peer == rank else receives.setdefault(peer, [])
                for i, (src_box, dst_box) in enumerate(pairs):
                    to.append(Move(_id(rank, entry, first + i), entry, peer, rank, src_box, dst_box))

    def _send(self, rank: int, number: int, cell: int, replica: int, sends: dict[int, list[Move]]) -> None:
        kind = self.kinds[number]
        for index, dst_cell, dst_replica in self.shares.served(number, cell, replica, rank):
            peer = kind.dst.rank_map.rank(dst_cell, dst_replica)
            entry = kind.entries[index]
            first = kind.overlaps.first_tile(cell, dst_cell)
            to = sends.setdefault(peer, [])
            for i, (src_box, dst_box) in enumerate(kind.overlaps.moves(cell, dst_cell)):
                to.append(Move(_id(peer, entry, first + i), entry, rank, peer, src_box, dst_box))

    def _forward(self, rank: int, number: int, cell: int, replica: int, sends: dict[int, list[Move]]) -> None:
        kind = self.kinds[number]
        whole = kind.dst.partition.filled(cell)
        if not volume(whole):
            return
        step = 1 << replica.bit_length()
        while replica + step < kind.dst.rank_map.count(cell):
            peer = kind.dst.rank_map.rank(cell, replica + step)
            for entry in kind.entries:
                sends.setdefault(peer, []).append(Move(_id(peer, entry, 0), entry, rank, peer, whole, whole))
            step *= 2

    def _forwards(self, kind: Kind) -> bool:
        (low, high), (dst_low, dst_high) = kind.src.rank_map.span, kind.dst.rank_map.span
        return self.multicast and kind.dst.rank_map.replicas > 1 and (high <= dst_low or dst_high <= low)

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The tensors grouped by (source layout, destination layout): a group is planned once."""
        found: dict[tuple[TensorLayout, TensorLayout], list[int]] = {}
        for number, entry in enumerate(self.entries):
            found.setdefault((entry.src, entry.dst), []).append(number)
        overlaps_of: dict[tuple[Partition, Partition], CellOverlaps] = {}
        kinds = []
        for (src, dst), numbers in found.items():
            key = (src.partition, dst.partition)
            kinds.append(Kind(src, dst, tuple(numbers), overlaps_of.setdefault(key, CellOverlaps(*key))))
        return tuple(kinds)

    @cached_property
    def shares(self) -> Shares:
        """Which source replica serves which request."""
        kinds = self.kinds
        if self.multicast:  # only the first replica of a destination asks
            kinds = tuple(_first_replicas(k) if self._forwards(k) else k for k in kinds)
        return Shares(kinds, self.node_size)

    def egress_bound_bytes(self, rank: int) -> float:
        """Return the most bytes a rank sends: per request queue, the mean and one request (see `replica_shares`)."""
        seen: set[tuple[object, int]] = set()
        total = 0.0
        for number, kind in enumerate(self.kinds):
            position = kind.src.rank_map.position(rank)
            if position is not None and (kind.src.rank_map, position[0]) not in seen:
                seen.add((kind.src.rank_map, position[0]))
                total += self.shares.bound_bytes(number, position[0])
        return total


def _id(dst_rank: int, entry: int, tile: int) -> int:
    return (dst_rank << (_ENTRY_BITS + _TILE_BITS)) | (entry << _TILE_BITS) | tile


def _ordered(found: Mapping[int, list[Move]]) -> dict[int, tuple[Move, ...]]:
    return {peer: tuple(sorted(found[peer], key=lambda m: (m.entry, m.dst_box))) for peer in sorted(found)}


def _first_replicas(kind: Kind) -> Kind:
    firsts = tuple((kind.dst.rank_map.rank(cell, 0),) for cell in range(kind.dst.rank_map.cells))
    return replace(kind, dst=replace(kind.dst, rank_map=Roster(firsts)))
