"""What a process sees of the other ranks of its node: memory that it maps, and memory that it may read by a call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from lowshard.comm.agreement import share
from lowshard.comm.protocol import Communicator

Array = Any


class NodeView:
    """Arrays of other ranks of the node, as this process sees them.

    Args:
        comm: a communicator whose ranks are threads of one process, or processes that map each other's memory.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    @staticmethod
    def of(comm: Communicator) -> NodeView | None:
        """Return the view of a communicator, or None where ranks do not see each other's memory."""
        if comm.transport == "loopback" or getattr(comm, "_place", None) is not None:
            return NodeView(comm)
        return None

    # ---- memory that is mapped

    def publish(self, arrays: Sequence[Array | None]) -> list[list[Array | None]]:
        """Return, for every rank, its arrays as this process sees them; None for those in private memory.

        Collective: all ranks of the communicator call this. An array is seen as flat bytes.
        """
        flat = [None if a is None else a.reshape(-1).view(np.uint8) for a in arrays]
        if self._comm.transport == "loopback":
            posted = self._comm._meet(flat)  # type: ignore[attr-defined]
            self._comm._leave()  # type: ignore[attr-defined]
            return [list(p) for p in posted]
        return self._map(flat)

    def _map(self, flat: list[Array | None]) -> list[list[Array | None]]:
        place = self._comm._place  # type: ignore[attr-defined]
        memory = place.memory
        rows = np.full((len(flat), 3), -1, np.int64)
        for i, array in enumerate(flat):
            if array is not None:
                segment, offset = memory.arena.where(array.ctypes.data, array.nbytes)
                rows[i] = segment, offset, array.nbytes
        found: list[list[Array | None]] = []
        for rank, theirs in enumerate(self._share_rows(rows)):
            mine: list[Array | None] = []
            for segment, offset, size in theirs.tolist():
                if segment < 0 or size == 0:
                    mine.append(None)
                    continue
                at = memory.address(place.members[rank], segment, offset)
                whole = (ctypes.c_uint8 * size).from_address(at)
                mine.append(np.frombuffer(whole, np.uint8))
            found.append(mine)
        return found

    # ---- memory that is not mapped

    @property
    def reads_across(self) -> bool:
        """Whether all ranks may read each other's private memory by a call; the same on all ranks."""
        place = getattr(self._comm, "_place", None)
        return place is not None and bool(place.memory.reads_across)

    def pid(self, rank: int) -> int:
        """Return the process of a rank."""
        place = self._comm._place  # type: ignore[attr-defined]
        return int(place.memory.pids[place.members[rank]])

    def lay_open(self, arrays: Sequence[Array | None]) -> list[list[int]]:
        """Return, for every rank, the addresses of its arrays in its own process; 0 in place of None.

        Collective: all ranks of the communicator call this. Who lays an array open keeps it for as long as it is read.
        """
        at = [[0 if a is None or not a.nbytes else int(a.ctypes.data)] for a in arrays]
        return [rows[:, 0].tolist() for rows in self._share_rows(np.array(at, np.int64).reshape(-1, 1))]

    def _share_rows(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return every rank's rows, int64 [its rows, columns]; all have as many columns."""
        comm, columns = self._comm, rows.shape[1]
        counts = [int(c[0]) for c in share(comm, np.array([len(rows)], np.int64))]
        wide = np.full((max(counts), columns), -1, np.int64)
        wide[: len(rows)] = rows
        return [
            theirs.reshape(-1, columns)[: counts[rank]]
            for rank, theirs in enumerate(share(comm, wide.reshape(-1)))
        ]
