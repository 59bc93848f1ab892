"""How the ranks of a measurement meet apart from the communicator that is measured: they wait, and swap facts.

What is measured may be wrong or slow; what says so must not rest on it. MPI ranks meet by mpi4py's own calls,
threads by a barrier of Python's.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lowshard.comm.interface import boot_id
from lowshard.errors import PeerFailed

_THREADS_WAIT_S = 600.0


class Meeting(Protocol):
    """Ranks that can wait for each other."""

    rank: int
    size: int

    def barrier(self) -> None:
        """Return once every rank has called it."""

    def exchange(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. Collective: all ranks call this."""


def timed(meeting: Meeting, call: Callable[[], object]) -> float:
    """Return the seconds from the first rank's start to the last one's end, on the host where that takes longest."""
    meeting.barrier()
    begin_s = time.monotonic()
    call()
    spans: dict[str, list[tuple[float, float]]] = {}
    for host, *span in meeting.exchange((boot_id(), begin_s, time.monotonic())):
        spans.setdefault(host, []).append((span[0], span[1]))
    return max(max(end for _, end in s) - min(begin for begin, _ in s) for s in spans.values())


class MpiMeeting:
    """Ranks of an mpi4py communicator, which it duplicates."""

    def __init__(self, mpi_comm: Any) -> None:
        self._comm = mpi_comm.Dup()
        self.rank, self.size = int(mpi_comm.Get_rank()), int(mpi_comm.Get_size())

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self._comm.Barrier()

    def exchange(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order."""
        return list(self._comm.allgather(value))

    def close(self) -> None:
        """Free the duplicate. Collective: all ranks call this."""
        self._comm.Free()


class ThreadBoard:
    """What threads that meet have in common."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[Any] = [None] * size
        self.gate = threading.Barrier(size)


class ThreadMeeting:
    """One thread's end of a board."""

    def __init__(self, board: ThreadBoard, rank: int) -> None:
        self._board = board
        self.rank, self.size = rank, board.size

    def barrier(self) -> None:
        """Return once every rank has called it; raise PeerFailed once one has left."""
        try:
            self._board.gate.wait(_THREADS_WAIT_S)
        except threading.BrokenBarrierError as error:
            raise PeerFailed("another rank of the measurement failed") from error

    def exchange(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order."""
        self._board.slots[self.rank] = value
        self.barrier()
        seen = list(self._board.slots)
        self.barrier()
        return seen

    def leave(self) -> None:
        """End every other rank's waits; called by a rank that fails."""
        self._board.gate.abort()


def usable_cores(meeting: Meeting) -> int:
    """Return how many cores the ranks can fill together: on each host no more than ranks or than cores they may use."""
    return fillable(meeting.exchange((socket.gethostname(), sorted(os.sched_getaffinity(0)))))


def fillable(places: Sequence[tuple[str, Sequence[int]]]) -> int:
    """Return the cores that ranks fill at most, from each rank's host and the cores it may run on."""
    total = 0
    for host in {host for host, _ in places}:
        theirs = [cores for name, cores in places if name == host]
        total += min(len(theirs), len({core for cores in theirs for core in cores}))
    return total
