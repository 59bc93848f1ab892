"""What a rank reaches of other ranks' memory: `Communicator.reach`, which movers of boxes ask and nothing else.

A transport whose ranks see each other's memory gives a `Reach` of its own; the one here reaches nobody.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = Any


class Published(ABC):
    """What peers have published: arrays by peer and place in the list that it gave, and a number with them."""

    notes: dict[int, int]
    """By peer, the number that it gave."""

    @abstractmethod
    def view(self, rank: int, index: int = 0) -> np.ndarray | None:
        """Return a peer's array as this process sees it, uint8 [bytes]; None where it cannot be read by loads."""

    def address(self, rank: int, index: int = 0) -> int:
        """Return where a peer's array begins in the peer's own process; 0 where it gave none or an empty one."""
        return 0


class _Nothing(Published):
    def __init__(self, rank: int, note: int) -> None:
        self.notes = {rank: note}

    def view(self, rank: int, index: int = 0) -> np.ndarray | None:
        return None


class Reach:
    """The memory that a rank reaches. This one, of ranks that share none, reaches its own alone.

    Calls that meet the peers are made within a call of the communicator (`Communicator.turn` or `step`), by all peers
    alike. Their waits have the communicator's deadline.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.peers: tuple[int, ...] = (rank,)
        """The ranks whose memory this one reaches, itself among them, ascending; equal on all of them."""
        self.homes: tuple[int, ...] = tuple(range(size))
        """By rank of the communicator, a number of the group of peers it belongs to; equal on all ranks."""
        self.crosses = False
        """Whether peers may read and write each other's private memory by a system call; the same on all peers."""
        self.word: Array | None = None
        """int64[1], 0 at first, that all peers see, and that outlives any of them; None where no peer is reached."""

    @property
    def whole(self) -> bool:
        """Whether all ranks of the communicator reach each other."""
        return len(self.peers) == len(self.homes)

    def maps(self, array: Array) -> bool:
        """Say whether peers can read an array of this rank by loads: `empty` gave it, or they are threads."""
        return False

    def publish(self, arrays: Sequence[Array | None], note: int = 0) -> Published:
        """Tell the peers where arrays of this rank lie, and return what they tell.

        Collective: all peers call this, with lists of one length. Who publishes an array keeps it, and leaves it as it
        is, until the peers have met again.

        Args:
            arrays: C-contiguous; None for nothing.
            note: a number that goes with them, an int64.
        """
        return _Nothing(self.peers[0], note)

    def barrier(self) -> None:
        """Return once all peers have come.

        Collective: all peers call this.
        """

    def pid(self, rank: int) -> int:
        """Return the process of a peer, where peers `crosses`."""
        raise NotImplementedError(f"rank {rank} is out of reach")
