"""The memory that ranks of one machine reach: segments that they map, and private memory by system calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lowshard.comm.node.node_group import address_of
from lowshard.comm.node.node_memory import NodeMemory
from lowshard.comm.reach import Published, Reach
from lowshard.comm.transport import Transport

Array = Any


class NodeReach(Reach):
    """The ranks of one machine: all of a communicator's, or those of this host in a communicator over several."""

    def __init__(
        self, over: Transport, memory: NodeMemory, members: Sequence[int], homes: Sequence[int] | None = None,
        home: int = 0,
    ) -> None:  # fmt: skip
        homes = (home,) * over.size if homes is None else tuple(homes)
        super().__init__(over.rank, len(homes))
        self.homes, self.peers = homes, tuple(rank for rank, other in enumerate(homes) if other == home)
        self._over, self._memory = over, memory
        self.crosses = bool(self._memory.reads_across)
        self._members = dict(zip(self.peers, members, strict=True))

    def maps(self, array: Array) -> bool:
        """Say whether an array lies in memory that the peers map."""
        return self._memory.arena.where(address_of(array), array.nbytes)[0] >= 0

    def publish(self, arrays: Sequence[Array | None], note: int = 0) -> Published:
        """Tell where arrays lie, in one meeting; see `Reach.publish`."""
        arena, row = self._memory.arena, [note]
        for array in arrays:
            if array is None or not array.nbytes:
                row += (-1, 0, 0, 0)
            else:
                at = address_of(array)
                row += (*arena.where(at, array.nbytes), at, array.nbytes)
        rows = self._over.gather_facts(np.array(row, np.int64))
        return _Rows(self._memory, self._members, rows.tolist())

    def barrier(self) -> None:
        """Return once all peers have come."""
        self._over.barrier()

    def pid(self, rank: int) -> int:
        """Return the process of a peer."""
        return int(self._memory.pids[self._members[rank]])


class _Rows(Published):
    """A row a peer: its note; then of each array segment and offset, address and bytes."""

    def __init__(self, memory: NodeMemory, members: Mapping[int, int], rows: list[list[int]]) -> None:
        self._memory, self._members, self._rows = memory, members, dict(zip(members, rows, strict=True))
        self.notes = {rank: row[0] for rank, row in self._rows.items()}

    def view(self, rank: int, index: int = 0) -> np.ndarray | None:
        segment, offset, _, size_bytes = self._rows[rank][1 + 4 * index : 5 + 4 * index]
        if segment < 0:
            return None
        return self._memory.segment(self._members[rank], segment).bytes[offset : offset + size_bytes]

    def address(self, rank: int, index: int = 0) -> int:
        return self._rows[rank][3 + 4 * index]
