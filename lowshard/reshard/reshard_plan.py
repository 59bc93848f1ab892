"""The plan of a reshard: two tables of layouts, and from them what each rank sends, receives and copies.

A plan is equal on all ranks, and its digest stands for it. One rank's part is computed from the layouts of its own
tensors alone, in time that does not grow with the number of ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any, Literal

from lowshard.argument import instance, items, whole, wholes
from lowshard.box import Box, any_overlap, box_text, is_within, shape_of, volume
from lowshard.errors import PlanError
from lowshard.reading import reader
from lowshard.reshard.move_schedule import ENTRIES, Schedule
from lowshard.reshard.replica_shares import Kind
from lowshard.reshard.reshard_move import Entry, Move, RankPlan
from lowshard.reshard.tensor_layout import TensorLayout

SCHEMA: Literal["lowshard-reshard-plan-1"] = "lowshard-reshard-plan-1"


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

    def __post_init__(self) -> None:
        rule = "the entries of a plan are Entry values, as build_reshard_plan makes them"
        found = tuple(instance(e, Entry, rule, PlanError) for e in items(self.entries, rule, PlanError))
        object.__setattr__(self, "entries", found)
        if not self.entries:
            raise PlanError("a reshard moves one tensor or more, got none")
        if len(self.entries) > ENTRIES:
            raise PlanError(
                f"a plan has up to {ENTRIES} tensors, got {len(self.entries)}; make several plans"
            )
        if self.node_size is not None:
            whole(self.node_size, "node_size is a number of ranks >= 1", PlanError, 1)

    # ---- what a rank does

    def for_rank(self, rank: int) -> RankPlan:
        """Return one rank's part of the plan. Pure: any process may ask for any rank; the result is cached.

        Raises:
            PlanError: the sources do not hold all of what the rank needs.
        """
        rank = _rank(rank)
        found = self._ranks.get(rank)
        if found is None:
            found = self._schedule.rank_plan(rank)
            if len(self._ranks) >= 64:
                self._ranks.clear()
            self._ranks[rank] = found
        return found

    def sends(self, rank: int) -> tuple[Move, ...]:
        """Return a rank's sends, by peer in the order they are sent."""
        return tuple(chain.from_iterable(self.for_rank(rank).sends.values()))

    def receives(self, rank: int) -> tuple[Move, ...]:
        """Return a rank's receives, by peer in the order they are sent."""
        return tuple(chain.from_iterable(self.for_rank(rank).receives.values()))

    def copies(self, rank: int) -> tuple[Move, ...]:
        """Return a rank's local copies."""
        return self.for_rank(rank).copies

    @cached_property
    def _schedule(self) -> Schedule:
        return Schedule(self.entries, self.node_size, self.multicast)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The tensors grouped by (source layout, destination layout): a group is planned once."""
        return self._schedule.kinds

    # ---- bytes

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that holds something on either side, ascending."""
        found: set[int] = set()
        for rank_map in {layout.rank_map for kind in self.kinds for layout in (kind.src, kind.dst)}:
            for cell in range(rank_map.cells):
                found.update(rank_map.ranks(cell))
        return tuple(sorted(found))

    @property
    def world_size(self) -> int:
        """The smallest communicator that holds every rank."""
        return max(layout.rank_map.span[1] for kind in self.kinds for layout in (kind.src, kind.dst))

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors, each once."""
        return sum(k.dst.itemsize_bytes * prod(k.dst.shape) * len(k.entries) for k in self.kinds)

    def peer_bytes(self, rank: int) -> dict[int, int]:
        """Return the bytes that a rank sends to each other rank."""
        plan = self.for_rank(rank)
        return {peer: sum(self.move_bytes(m) for m in found) for peer, found in plan.sends.items()}

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
        """Return the bytes of a move, in the dtype of its destination."""
        instance(move, Move, "a move is one of the plan's own", PlanError)
        return move.elems * self.entries[move.entry].dst.itemsize_bytes

    def egress_bound_bytes(self, rank: int) -> float:
        """Return the most bytes a rank sends: per request queue, the mean and one request (see `replica_shares`)."""
        return self._schedule.egress_bound_bytes(_rank(rank))

    def check_coverage(self, ranks: Iterable[int] | None = None) -> int:
        """Prove that every element of every destination array is written exactly once; return the elements.

        For each rank the boxes of a tensor are disjoint, lie in its array, and add up to it.

        Raises:
            PlanError: they do not; the text names rank and tensor.
        """
        total = 0
        rule = "coverage is checked for a sequence of ranks, or None for all"
        for rank in self.ranks if ranks is None else wholes(ranks, rule, PlanError):
            boxes: dict[int, list[Box]] = {}
            for move in self.for_rank(rank).incoming:
                if shape_of(move.src_box) != shape_of(move.dst_box):
                    raise PlanError(f"{self.entries[move.entry].name}: {move} changes its shape on the way")
                boxes.setdefault(move.entry, []).append(move.dst_box)
            for number, entry in enumerate(self.entries):
                shape = entry.dst.local_shape(rank)
                if shape is None:
                    continue
                mine, held = boxes.get(number, []), sum(tile.elems for tile in entry.dst.tiles(rank))
                inside = all(is_within(box, shape) for box in mine)
                if not inside or sum(map(volume, mine)) != held or any_overlap(mine):
                    raise PlanError(
                        f"{entry.name}: rank {rank} writes {sum(map(volume, mine))} elements in {len(mine)} boxes of "
                        f"an array of shape {list(shape)}: not each element once"
                    )
                total += held
        return total

    def _verify(self) -> None:
        """Raise PlanError unless the sources hold all of each destination, and names are unique on each rank."""
        taken: set[tuple[int, str]] = set()
        for kind in self.kinds:
            for cell in range(kind.dst.partition.cells):
                self._schedule.check_sources(kind, cell, kind.dst.rank_map.rank(cell, 0))
        for entry in self.entries:
            for cell in range(entry.dst.rank_map.cells):
                for rank in entry.dst.rank_map.ranks(cell):
                    place = (rank, entry.dst_local_name(rank))
                    if place in taken:
                        raise PlanError(f"{place[1]}: rank {rank} gets two tensors of this name")
                    taken.add(place)

    def multicast_groups(self, entry: int) -> list[tuple[int, ...]]:
        """Return the groups of destination ranks that hold the same of a tensor, in the order of replicas."""
        most = len(self.entries) - 1
        number = whole(entry, f"an entry is the number of a tensor, 0 to {most}", PlanError, 0, most)
        rank_map = self.entries[number].dst.rank_map
        return [rank_map.ranks(cell) for cell in range(rank_map.cells) if rank_map.count(cell) > 1]

    # ---- text, JSON, digest

    def explain(self, rank: int | None = None) -> str:
        """Return the plan as text: what moves over all, or what one rank does.

        The bound of a rank is the most that it may send, as `egress_bound_bytes` says.
        """
        if rank is not None:
            return self._explain_rank(_rank(rank))
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
                f"  rank {r}: sends {self.sent_bytes(r):,} bytes to {len(self.for_rank(r).sends)} ranks (bound "
                f"{self.egress_bound_bytes(r):,.0f}), receives {self.received_bytes(r):,} from "
                f"{len(self.for_rank(r).receives)} ranks, keeps {self.copied_bytes(r):,}"
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
                    lines.append(f"  {what} {peer}: {len(mine)} box{'es' * (len(mine) != 1)}, {size:,} bytes")
                for m in mine[:8]:
                    name = self.entries[m.entry].name
                    lines.append(f"    {name} {box_text(m.src_box)} -> {box_text(m.dst_box)}")
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
        """Return the plan that `to_json` wrote, checked: the sources hold every element that is wanted, once.

        Raises:
            PlanError: another schema, or a field that is missing or does not fit.
        """
        return _read(data)

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


@dataclass(frozen=True)
class _Row:
    """An entry of the JSON table, its layouts by number."""

    name: str
    src: int
    dst: int
    src_name: str | None = None
    src_names: Mapping[int, str] = field(default_factory=dict)
    dst_names: Mapping[int, str] = field(default_factory=dict)


@reader("reshard plan", PlanError)
def _read(
    schema: Literal["lowshard-reshard-plan-1"],
    node_size: int | None,
    multicast: bool,
    layouts: tuple[TensorLayout, ...],
    entries: tuple[_Row, ...],
) -> ReshardPlan:
    made = []
    for row in entries:
        if not (0 <= row.src < len(layouts) and 0 <= row.dst < len(layouts)):
            raise PlanError(
                f"{row.name}: there are layouts 0 to {len(layouts) - 1}, got {row.src} and {row.dst}"
            )
        src_name = row.name if row.src_name is None else row.src_name
        made.append(
            Entry(row.name, src_name, layouts[row.src], layouts[row.dst], row.src_names, row.dst_names)
        )
    plan = ReshardPlan(tuple(made), node_size, multicast)
    plan._verify()
    return plan


def _rank(rank: int) -> int:
    return rank if type(rank) is int else whole(rank, "a rank is an integer", PlanError)


__all__ = ["ENTRIES", "Entry", "Move", "RankPlan", "ReshardPlan"]
