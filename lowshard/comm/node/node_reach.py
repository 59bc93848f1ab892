"""The memory that ranks of one machine reach: segments that they map, and private memory by system calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lowshard.comm.call_comparison import STEP_SIGNATURE
from lowshard.comm.node.call_runner import CallRunner
from lowshard.comm.node.group_block import ALWAYS_SMALL_BYTES, Place, address_of
from lowshard.comm.reach import Published, Reach

Array = Any


class NodeReach(Reach):
    """All ranks of a communicator over one machine."""

    def __init__(self, runner: CallRunner) -> None:
        over = runner.over
        super().__init__(over.rank, over.size)
        self.peers, self.homes = tuple(range(over.size)), (0,) * over.size
        self._runner, self._over, self._place = runner, over, runner.place
        self._barrier, self._ctx = runner.compiled.barrier, runner.ctx
        self.crosses = bool(runner.place.memory.reads_across)

    def maps(self, array: Array) -> bool:
        """Say whether an array lies in memory that the peers map."""
        return self._place.memory.arena.where(address_of(array), array.nbytes)[0] >= 0

    def publish(self, arrays: Sequence[Array | None], note: int = 0) -> Published:
        """Tell where arrays lie, in one meeting; see `Reach.publish`."""
        runner, size, arena, row = self._runner, self._over.size, self._place.memory.arena, [note]
        for array in arrays:
            if array is None or not array.nbytes:
                row += (-1, 0, 0, 0)
            else:
                at = address_of(array)
                row += (*arena.where(at, array.nbytes), at, array.nbytes)
        mine = np.array(row, np.int64)
        n = mine.nbytes
        if n > ALWAYS_SMALL_BYTES:
            return _Rows(self._place, self._over.gather_facts(mine).tolist())
        rows = np.empty((size, mine.size), np.int64)
        code = runner.compiled.gather_slots(
            runner.ctx, STEP_SIGNATURE, address_of(mine), n, address_of(rows), 0, size, 0, n
        )
        if code:
            runner.end(code, "publish")
        return _Rows(self._place, rows.tolist())

    def barrier(self) -> None:
        """Return once all ranks have come."""
        code = self._barrier(self._ctx, STEP_SIGNATURE)
        if code:
            self._runner.end(code, "barrier")

    def common(self, elems: int, dtype: Any) -> Array:
        """Return one array for all ranks; the first rank's arena has it."""
        found: Array = self._over.common(elems, dtype)
        return found

    def pid(self, rank: int) -> int:
        """Return the process of a rank."""
        return int(self._place.memory.pids[self._place.members[rank]])


class _Rows(Published):
    """A row a rank: its note; then of each array segment and offset, address and bytes."""

    def __init__(self, place: Place, rows: list[list[int]]) -> None:
        self._place, self._rows = place, rows
        self.notes = {rank: row[0] for rank, row in enumerate(rows)}

    def view(self, rank: int, index: int = 0) -> np.ndarray | None:
        segment, offset, _, size_bytes = self._rows[rank][1 + 4 * index : 5 + 4 * index]
        if segment < 0:
            return None
        return self._place.memory.bytes_of(self._place.members[rank], segment)[offset : offset + size_bytes]

    def address(self, rank: int, index: int = 0) -> int:
        return self._rows[rank][3 + 4 * index]


class HostReach(Reach):
    """The ranks of this host, in a communicator over several: they are numbered as the whole numbers them.

    Args:
        inner: of the ranks of this host among themselves.
        homes: by rank of the whole, a number of its host.
        home: of this host.
    """

    def __init__(self, inner: Reach, homes: Sequence[int], home: int) -> None:
        super().__init__(0, 0)
        self.homes = tuple(homes)
        self.peers = tuple(rank for rank, other in enumerate(homes) if other == home)
        self._inner, self._place = inner, {rank: i for i, rank in enumerate(self.peers)}
        self.crosses = inner.crosses

    def maps(self, array: Array) -> bool:
        """Say whether an array lies in memory that the ranks of this host map."""
        return self._inner.maps(array)

    def barrier(self) -> None:
        """Return once all ranks of this host have come."""
        self._inner.barrier()

    def common(self, elems: int, dtype: Any) -> Array | None:
        """Return one array for all ranks of this host."""
        return self._inner.common(elems, dtype)

    def publish(self, arrays: Sequence[Array | None], note: int = 0) -> Published:
        """Tell the ranks of this host where arrays lie; see `Reach.publish`."""
        return _Renumbered(self._inner.publish(arrays, note), self._place)

    def pid(self, rank: int) -> int:
        """Return the process of a rank of this host."""
        return self._inner.pid(self._place[rank])


class _Renumbered(Published):
    def __init__(self, inner: Published, place: dict[int, int]) -> None:
        self._inner, self._place = inner, place
        self.notes = {rank: inner.notes[i] for rank, i in place.items()}

    def view(self, rank: int, index: int = 0) -> np.ndarray | None:
        return self._inner.view(self._place[rank], index)

    def address(self, rank: int, index: int = 0) -> int:
        return self._inner.address(self._place[rank], index)
