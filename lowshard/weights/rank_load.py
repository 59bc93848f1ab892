"""Itinerary: a load plan as one rank walks it: where its arrays lie, and which bytes of which file go where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from lowshard import dtypes
from lowshard.box import Box, full_box, intersect, relative_slices, single_run, volume
from lowshard.checkpoint.catalog import Catalog, StoredPart
from lowshard.tiling import Tiling
from lowshard.weights.load_plan import LoadPlan, Read
from lowshard.weights.peer_write import Room, Sheet, sheets_of
from lowshard.weights.read_fanout import Handout, handout_of, shared_reads

_BLOCK_BYTES = 64 << 20
_ALIGN_BYTES = 64


class Errand(NamedTuple):
    """A box of a stored array that a rank reads into its own array."""

    name: str
    part: StoredPart
    box: Box
    """In the stored array's coordinates."""
    run: tuple[int, int, int] | None
    """File offset, block and first byte in it, where the box is one run both in the file and in memory."""
    where: Any
    """Index of the local array."""
    size_bytes: int


@dataclass(frozen=True)
class Itinerary:
    """One rank's part of a plan, worked out as it is asked for. It holds no buffer and no open file."""

    plan: LoadPlan
    catalog: Catalog
    rank: int
    _handouts: dict[Any, Handout] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, plan: LoadPlan, catalog: Catalog, rank: int) -> Itinerary:
        """Return a rank's part of a plan for a catalog, kept with the plan for the next time."""
        kept = plan._itineraries.get(rank)
        if not isinstance(kept, Itinerary) or kept.catalog is not catalog:
            kept = plan._itineraries[rank] = cls(plan, catalog, rank)
        return kept

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Bytes of the few large blocks that the arrays lie in: huge pages take a tenth of the faults."""
        return self._near[self.rank][0]

    @property
    def rooms(self) -> Iterable[Room]:
        """Where each array of this rank lies."""
        return self._near[self.rank][1].values()

    @cached_property
    def own(self) -> tuple[Errand, ...]:
        """What this rank reads for itself alone."""
        rank, rooms, tilings = self.rank, self._near[self.rank][1], self.plan.by_name
        return tuple(
            errand
            for read in self.plan.reads
            if read.reader == rank and read.takers == (rank,)
            for errand in _errands(read, tilings[read.name], self.catalog, rank, rooms[read.name])
        )

    @cached_property
    def own_bytes(self) -> int:
        """Bytes of `own`."""
        return sum(errand.size_bytes for errand in self.own)

    @cached_property
    def read_bytes(self) -> int:
        """Bytes that this rank reads, for itself and for others."""
        return self.plan.read_bytes(self.rank)

    @cached_property
    def shared(self) -> tuple[Read, ...]:
        """What ranks hand out among themselves; equal on all ranks."""
        return shared_reads(self.plan.reads)

    def handout(self, reads: Sequence[Read], homes: tuple[int, ...]) -> Handout:
        """Return this rank's part of handing out reads, kept for the next time; see `handout_of`."""
        key = (len(reads), homes)  # all that are shared, or those of this rank's home
        found = self._handouts.get(key)
        if found is None:
            found = self._handouts[key] = handout_of(reads, self.plan.by_name, self.rank, homes)
        return found

    @cached_property
    def sheets(self) -> tuple[Sheet, ...]:
        """What this rank reads for others, as it is written into their arrays."""
        found: list[Sheet] = []
        for read in self.shared:
            if read.reader == self.rank:
                rooms = {taker: self._near[taker][1][read.name] for taker in read.takers}
                found += sheets_of(read.name, read.box, self.plan.by_name[read.name], rooms, self.catalog)
        return tuple(found)

    @cached_property
    def strips(self) -> np.ndarray:
        """The strips of all sheets, one behind the other."""
        return np.concatenate([np.zeros((0, 8), np.int64), *(sheet.strips for sheet in self.sheets)])

    @cached_property
    def checked(self) -> tuple[tuple[str, StoredPart], ...]:
        """Each stored array that has a checksum, and a tensor it belongs to; equal on all ranks."""
        parts = ((name, part) for name, _ in self.plan.tilings for part in self.catalog.tensor(name).parts)
        return tuple({part.key: (name, part) for name, part in parts if part.crc32 is not None}.values())

    @cached_property
    def _near(self) -> dict[int, tuple[tuple[int, ...], dict[str, Room]]]:
        """By rank of this rank's node, its blocks and where its arrays lie."""
        nodes = self.plan.nodes
        return {r: _rooms(self.plan, r) for r, node in enumerate(nodes) if node == nodes[self.rank]}


def _rooms(plan: LoadPlan, rank: int) -> tuple[tuple[int, ...], dict[str, Room]]:
    needs = [-(-t.local_bytes(rank) // _ALIGN_BYTES) * _ALIGN_BYTES for _, t in plan.tilings]
    blocks, rooms, at, left = [0], {}, 0, sum(needs)
    for (name, tiling), need in zip(plan.tilings, needs, strict=True):
        if rank not in tiling:
            continue
        if at + need > blocks[-1]:
            blocks.append(max(need, min(left, _BLOCK_BYTES)))
            at = 0
        dtype = dtypes.get(tiling.dtype).numpy
        rooms[name] = Room(name, len(blocks) - 1, at, tiling.local_shape(rank), dtype)
        at, left = at + need, left - need
    return tuple(blocks), rooms


def _errands(read: Read, tiling: Tiling, catalog: Catalog, rank: int, room: Room) -> Iterator[Errand]:
    itemsize = room.dtype.itemsize
    for part in catalog.tensor(read.name).parts:
        wanted = intersect(part.box, read.box)
        if wanted is None:
            continue
        for box, local in tiling.places(rank, wanted):
            stored, size_bytes = part.local(box), volume(box) * itemsize
            first, target = single_run(stored, part.entry.shape), single_run(local, room.shape)
            run = None
            if first is not None and target is not None:
                run = part.entry.start + first * itemsize, room.block, room.at + target * itemsize
            yield Errand(
                read.name, part, stored, run, (..., *relative_slices(local, full_box(room.shape))), size_bytes
            )
