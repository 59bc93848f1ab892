"""The plan of a reshard: two tables of layouts, and by arithmetic what each rank sends, receives and copies.

A plan is a value that is equal on all ranks; its digest stands for all of it. What one rank has to do is worked out
from the layouts of its own tensors alone, in time that does not grow with the number of ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any

from lowshard import dtypes
from lowshard.box import Box, intersect, shape_of, volume
from lowshard.cost import ClusterProfile, Estimate
from lowshard.errors import PlanError
from lowshard.reshard.layout import (
    TensorLayout,
    missing,
    moved_elems,
    moves,
    sources,
)
from lowshard.reshard.move import Entry, Move, RankPlan
from lowshard.reshard.seat import Roster
from lowshard.reshard.share import Kind, Shares

SCHEMA = "lowshard-reshard-plan-1"
COMPONENTS = 4
"""Numbers kept for each move, so that the parts it travels in have ids of their own: id * COMPONENTS + part."""
_ENTRY_BITS, _TILE_BITS = 24, 20
ENTRIES = 1 << _ENTRY_BITS
"""Tensors a plan has at most."""


@dataclass(frozen=True, eq=False)
class ReshardPlan:
    """How tensors go from one set of layouts to another; equal on every rank. `execute_reshard_plan` runs it.

    Made by `build_reshard_plan`. Compares by digest.

    Attributes:
        entries: the tensors, in table order.
        node_size: ranks a node (rank r is on node r // node_size), or None where nothing is known of nodes.
        multicast: whether one replica of a destination fetches and hands on to the others.
    """

    entries: tuple[Entry, ...]
    node_size: int | None = None
    multicast: bool = False
    _ranks: dict[int, RankPlan] = field(default_factory=dict, init=False, repr=False)

    # ---- what a rank does

    def for_rank(self, rank: int) -> RankPlan:
        """Return what one rank does. Pure: any process may ask for any rank; the result is kept.

        Raises:
            PlanError: the sources do not hold all of what the rank needs.
        """
        found = self._ranks.get(rank)
        if found is None:
            found = self._plan(rank)
            if len(self._ranks) >= 64:
                self._ranks.clear()
            self._ranks[rank] = found
        return found

    def sends(self, rank: int) -> tuple[Move, ...]:
        """Return what a rank gives others, by peer in the order of the wire."""
        return tuple(chain.from_iterable(self.for_rank(rank).sends.values()))

    def receives(self, rank: int) -> tuple[Move, ...]:
        """Return what a rank gets from others, by peer in the order of the wire."""
        return tuple(chain.from_iterable(self.for_rank(rank).receives.values()))

    def copies(self, rank: int) -> tuple[Move, ...]:
        """Return what stays on a rank."""
        return self.for_rank(rank).copies

    def _plan(self, rank: int) -> RankPlan:
        sends: dict[int, list[Move]] = {}
        receives: dict[int, list[Move]] = {}
        copies: list[Move] = []
        for number, kind in enumerate(self.kinds):
            src_seat, dst_seat = kind.src.seats.seat(rank), kind.dst.seats.seat(rank)
            if dst_seat is not None:
                self._receive(rank, number, *dst_seat, receives, copies)
            if src_seat is not None:
                self._send(rank, number, *src_seat, sends)
            if dst_seat is not None and self._hands_on(kind):
                self._hand_on(rank, number, *dst_seat, sends)
        return RankPlan(rank, _ordered(sends), _ordered(receives), tuple(copies))

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
        src, dst = kind.src.partition, kind.dst.partition
        lacking = missing(src, dst, cell)
        if lacking:
            name = self.entries[kind.entries[0]].name
            raise PlanError(
                f"{name}: the sources hold {lacking} elements fewer than rank {rank} needs of "
                f"{dst.local_shape(cell)}; every element needs a source"
            )
        if replica and self._hands_on(kind):
            parent = kind.dst.seats.rank(cell, replica - (1 << (replica.bit_length() - 1)))
            whole = tuple((0, n) for n in dst.local_shape(cell))
            if volume(whole):
                for entry in kind.entries:
                    move = Move(_id(rank, entry, 0), entry, parent, rank, whole, whole)
                    receives.setdefault(parent, []).append(move)
            return
        for src_cell in sources(src, dst, cell):
            pairs = moves(src, dst, src_cell, cell)
            first = _first_tile(src, dst, src_cell, cell)
            for index, entry in enumerate(kind.entries):
                peer = shares.source(number, src_cell, cell, replica, index)
                to = copies if peer == rank else receives.setdefault(peer, [])
                for i, (src_box, dst_box) in enumerate(pairs):
                    to.append(Move(_id(rank, entry, first + i), entry, peer, rank, src_box, dst_box))

    def _send(self, rank: int, number: int, cell: int, replica: int, sends: dict[int, list[Move]]) -> None:
        kind = self.kinds[number]
        src, dst = kind.src.partition, kind.dst.partition
        for index, dst_cell, dst_replica in self.shares.served(number, cell, replica, rank):
            peer = kind.dst.seats.rank(dst_cell, dst_replica)
            entry = kind.entries[index]
            first = _first_tile(src, dst, cell, dst_cell)
            to = sends.setdefault(peer, [])
            for i, (src_box, dst_box) in enumerate(moves(src, dst, cell, dst_cell)):
                to.append(Move(_id(peer, entry, first + i), entry, rank, peer, src_box, dst_box))

    def _hand_on(self, rank: int, number: int, cell: int, replica: int, sends: dict[int, list[Move]]) -> None:
        kind = self.kinds[number]
        whole = tuple((0, n) for n in kind.dst.partition.local_shape(cell))
        if not volume(whole):
            return
        step = 1 << replica.bit_length()
        while replica + step < kind.dst.seats.count(cell):
            peer = kind.dst.seats.rank(cell, replica + step)
            for entry in kind.entries:
                sends.setdefault(peer, []).append(Move(_id(peer, entry, 0), entry, rank, peer, whole, whole))
            step *= 2

    def _hands_on(self, kind: Kind) -> bool:
        (low, high), (dst_low, dst_high) = kind.src.seats.span, kind.dst.seats.span
        return self.multicast and kind.dst.seats.replicas > 1 and (high <= dst_low or dst_high <= low)

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The tensors by kind: those that go from one layout to one other are planned together."""
        found: dict[tuple[TensorLayout, TensorLayout], list[int]] = {}
        for number, entry in enumerate(self.entries):
            found.setdefault((entry.src, entry.dst), []).append(number)
        return tuple(Kind(src, dst, tuple(numbers)) for (src, dst), numbers in found.items())

    @cached_property
    def shares(self) -> Shares:
        """Which replica serves which request."""
        kinds = self.kinds
        if self.multicast:  # only the first replica of a destination asks
            kinds = tuple(
                Kind(k.src, _first_replicas(k.dst), k.entries) if self._hands_on(k) else k for k in kinds
            )
        return Shares(kinds, self.node_size)

    # ---- bytes

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that holds something on either side, ascending."""
        found: set[int] = set()
        for seats in {layout.seats for kind in self.kinds for layout in (kind.src, kind.dst)}:
            for cell in range(seats.cells):
                found.update(seats.ranks(cell))
        return tuple(sorted(found))

    @property
    def world_size(self) -> int:
        """The smallest communicator that holds every rank."""
        return max(layout.seats.span[1] for kind in self.kinds for layout in (kind.src, kind.dst))

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors, each once."""
        return sum(_size(k.dst) * len(k.entries) for k in self.kinds)

    def peer_bytes(self, rank: int) -> dict[int, int]:
        """Return the bytes that a rank sends to each other rank."""
        plan = self.for_rank(rank)
        return {peer: sum(self.move_bytes(m) for m in found) for peer, found in plan.sends.items()}

    def incoming_bytes(self, rank: int) -> dict[int, int]:
        """Return the bytes that a rank gets from each rank, itself included; quicker than the moves."""
        found: dict[int, int] = {}
        for number, kind in enumerate(self.kinds):
            seat = kind.dst.seats.seat(rank)
            if seat is None:
                continue
            cell, replica = seat
            src, dst = kind.src.partition, kind.dst.partition
            if replica and self._hands_on(kind):
                parent = kind.dst.seats.rank(cell, replica - (1 << (replica.bit_length() - 1)))
                whole = prod(dst.local_shape(cell)) * kind.src.itemsize_bytes * len(kind.entries)
                found[parent] = found.get(parent, 0) + whole
                continue
            for src_cell in sources(src, dst, cell):
                size = moved_elems(src, dst, src_cell, cell) * kind.src.itemsize_bytes
                for index in range(len(kind.entries)):
                    peer = self.shares.source(number, src_cell, cell, replica, index)
                    found[peer] = found.get(peer, 0) + size
        return found

    def predicted_s(self, profile: ClusterProfile) -> Estimate:
        """Return what the plan is predicted to take on a cluster, with its error bar; see `simulate`."""
        from lowshard.reshard.simulate import simulate

        made = simulate(self, profile)
        return Estimate(made.seconds, made.low, made.high, False, made.is_default)

    def sent_bytes(self, rank: int) -> int:
        """Return the bytes that a rank sends to others."""
        return sum(self.peer_bytes(rank).values())

    def received_bytes(self, rank: int) -> int:
        """Return the bytes that a rank receives from others."""
        return sum(self.move_bytes(m) for m in self.receives(rank))

    def copied_bytes(self, rank: int) -> int:
        """Return the bytes that a rank copies within itself."""
        return sum(self.move_bytes(m) for m in self.copies(rank))

    def move_bytes(self, move: Move) -> int:
        """Return the bytes of a move."""
        return move.elems * self.entries[move.entry].src.itemsize_bytes

    def egress_bound_bytes(self, rank: int) -> float:
        """Return what a rank sends at most: for each line it serves, the mean and one request (see `share`)."""
        seen: set[tuple[object, int]] = set()
        total = 0.0
        for number, kind in enumerate(self.kinds):
            seat = kind.src.seats.seat(rank)
            if seat is not None and (kind.src.seats, seat[0]) not in seen:
                seen.add((kind.src.seats, seat[0]))
                total += self.shares.bound_bytes(number, seat[0])
        return total

    def check_coverage(self, ranks: Iterable[int] | None = None) -> int:
        """Prove that every element of every destination array is written exactly once; return the elements.

        For each rank the boxes of a tensor are disjoint, lie in its array, and add up to it.

        Raises:
            PlanError: they do not; the text names rank and tensor.
        """
        total = 0
        for rank in self.ranks if ranks is None else ranks:
            boxes: dict[int, list[Box]] = {}
            for move in self.for_rank(rank).incoming:
                if shape_of(move.src_box) != shape_of(move.dst_box):
                    raise PlanError(f"{self.entries[move.entry].name}: {move} changes its shape on the way")
                boxes.setdefault(move.entry, []).append(move.dst_box)
            for number, entry in enumerate(self.entries):
                shape = entry.dst.local_shape(rank)
                if shape is None:
                    continue
                mine = boxes.get(number, [])
                whole = tuple((0, n) for n in shape)
                inside = all(
                    a <= p and q <= b for box in mine for (p, q), (a, b) in zip(box, whole, strict=True)
                )
                if not inside or sum(map(volume, mine)) != volume(whole) or _overlap(mine):
                    raise PlanError(
                        f"{entry.name}: rank {rank} writes {sum(map(volume, mine))} elements in {len(mine)} boxes of "
                        f"an array of shape {list(shape)}: not each element once"
                    )
                total += volume(whole)
        return total

    def multicast_groups(self, entry: int) -> list[tuple[int, ...]]:
        """Return the groups of destination ranks that get the same of a tensor, each in the order of replicas."""
        seats = self.entries[entry].dst.seats
        return [seats.ranks(cell) for cell in range(seats.cells) if seats.count(cell) > 1]

    # ---- text, JSON, digest

    def explain(self, rank: int | None = None) -> str:
        """Return the plan as text: what moves over all, or what one rank does."""
        if rank is not None:
            return self._explain_rank(rank)
        ranks = self.ranks
        size = f"{len(self.entries)} tensors of {len(self.kinds)} kinds, {self.size_bytes:,} bytes"
        lines = [f"{size}, {len(ranks)} ranks up to {ranks[-1]}"]
        lines += [
            f"  {len(kind.entries)} x {kind.src}  ->  {kind.dst}, such as {self.entries[kind.entries[0]].name}"
            for kind in self.kinds[:12]
        ]
        if len(self.kinds) > 12:
            lines.append(f"  ... {len(self.kinds) - 12} more kinds")
        shown = ranks[:16]
        for r in shown:
            lines.append(
                f"  rank {r}: sends {self.sent_bytes(r):,} to {len(self.for_rank(r).sends)} ranks (at most "
                f"{self.egress_bound_bytes(r):,.0f}), receives {self.received_bytes(r):,} from "
                f"{len(self.for_rank(r).receives)}, keeps {self.copied_bytes(r):,}"
            )
        if len(shown) < len(ranks):
            lines.append(f"  ... {len(ranks) - len(shown)} more ranks")
        return "\n".join(lines)

    def _explain_rank(self, rank: int) -> str:
        plan = self.for_rank(rank)
        lines = [f"rank {rank}"]
        for what, found in (("to", plan.sends), ("from", plan.receives), ("keeps", {rank: plan.copies})):
            for peer, mine in found.items():
                size = sum(map(self.move_bytes, mine))
                if mine:
                    lines.append(f"  {what} {peer}: {len(mine)} boxes, {size:,} bytes")
                for m in mine[:8]:
                    name = self.entries[m.entry].name
                    lines.append(f"    {name} {_box_text(m.src_box)} -> {_box_text(m.dst_box)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.explain()

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads back."""
        layouts: dict[TensorLayout, int] = {}
        rows = []
        for e in self.entries:
            row: dict[str, Any] = {"name": e.name}
            for key, layout in (("src", e.src), ("dst", e.dst)):
                row[key] = layouts.setdefault(layout, len(layouts))
            if e.src_name != e.name:
                row["src_name"] = e.src_name
            for key, names in (("src_names", e.src_names), ("dst_names", e.dst_names)):
                if names:
                    row[key] = {str(rank): name for rank, name in names.items()}
            rows.append(row)
        return {
            "schema": SCHEMA,
            "node_size": self.node_size,
            "multicast": self.multicast,
            "layouts": [layout.to_json() for layout in layouts],
            "entries": rows,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ReshardPlan:
        """Return the plan that `to_json` wrote.

        Raises:
            PlanError: another schema, or a field that is missing or does not fit.
        """
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            raise PlanError(f"a reshard plan has schema {SCHEMA!r}, got {data!r:.80}")
        try:
            layouts = [TensorLayout.from_json(row) for row in data["layouts"]]
            entries = tuple(
                Entry(
                    row["name"],
                    row.get("src_name", row["name"]),
                    layouts[row["src"]],
                    layouts[row["dst"]],
                    {int(r): n for r, n in row.get("src_names", {}).items()},
                    {int(r): n for r, n in row.get("dst_names", {}).items()},
                )
                for row in data["entries"]
            )
            return cls(entries, data["node_size"], data["multicast"])
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise PlanError(f"this JSON is no reshard plan ({type(error).__name__}: {error})") from error

    def digest(self) -> str:
        """Return 32 hex digits that two plans share exactly when they are equal."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        found = hashlib.blake2b(f"{SCHEMA} {self.node_size} {self.multicast}".encode(), digest_size=16)
        texts: dict[TensorLayout, bytes] = {}
        for e in self.entries:
            found.update(f"\n{e.name}\0{e.src_name}\0".encode())
            for layout in (e.src, e.dst):
                text = texts.get(layout)
                if text is None:
                    text = json.dumps(layout.to_json(), sort_keys=True).encode()
                    text = texts[layout] = hashlib.blake2b(text, digest_size=16).digest()
                found.update(text)
            for names in (e.src_names, e.dst_names):
                if names:
                    found.update(repr(sorted(names.items())).encode())
        return found.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReshardPlan) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())


def _id(dst_rank: int, entry: int, tile: int) -> int:
    return (dst_rank << (_ENTRY_BITS + _TILE_BITS)) | (entry << _TILE_BITS) | tile


def _first_tile(src: Any, dst: Any, src_cell: int, dst_cell: int) -> int:
    """Return how many boxes a destination cell gets from source cells before this one."""
    total = 0
    for cell in sources(src, dst, dst_cell):
        if cell == src_cell:
            return total
        total += len(moves(src, dst, cell, dst_cell))
    return total


def _ordered(found: Mapping[int, list[Move]]) -> dict[int, tuple[Move, ...]]:
    return {peer: tuple(sorted(found[peer], key=lambda m: (m.entry, m.dst_box))) for peer in sorted(found)}


def _first_replicas(layout: TensorLayout) -> TensorLayout:
    seats = layout.seats
    return TensorLayout(
        layout.dtype, layout.partition, Roster(tuple((seats.rank(c, 0),) for c in range(seats.cells)))
    )


def _size(layout: TensorLayout) -> int:
    total = dtypes.get(layout.dtype).itemsize_bytes
    for n in layout.shape:
        total *= n
    return total


def _overlap(boxes: Sequence[Box]) -> bool:
    """Return True when two boxes share an element: a sweep along the first dim."""
    found = sorted(box for box in boxes if volume(box))
    for i, box in enumerate(found):
        for other in found[i + 1 :]:
            if box and other[0][0] >= box[0][1]:
                break
            if intersect(box, other) is not None:
                return True
    return False


def _box_text(box: Box) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in box) + "]"


__all__ = ["ENTRIES", "Entry", "Move", "RankPlan", "ReshardPlan"]
