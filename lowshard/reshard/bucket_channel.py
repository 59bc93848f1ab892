"""How buckets get from rank to rank: as messages, or by slots of memory that the ranks of a node all map."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from lowshard.comm.protocol import Communicator
from lowshard.comm.work import Work
from lowshard.errors import CommError
from lowshard.reshard.node_view import NodeView

Array = Any

SLOTS = 2
"""Buckets that a rank fills while others are on their way."""
_READY, _FREE = 1, 2


def set_aside(comm: Communicator, bucket_bytes: int, count: int) -> list[Array]:
    """Return room for buckets, uint8 [bucket_bytes] each, that others see where ranks see each other's memory.

    Raises:
        CommError: there is no memory for them.
    """
    try:
        return [comm.empty(bucket_bytes, "uint8") for _ in range(count)]
    except (MemoryError, OSError) as error:
        raise CommError(
            f"there is no memory for {count} buckets of {bucket_bytes} bytes ({error}); give a smaller staging_bytes"
        ) from error


class Channel(ABC):
    """Buckets of one rank, to one peer and from one peer at a time.

    Args:
        comm: the communicator.
        slots: room for buckets, of one size, from `set_aside`.
    """

    def __init__(self, comm: Communicator, slots: list[Array]) -> None:
        self.comm, self.bucket_bytes = comm, len(slots[0])
        self._out = slots[:SLOTS]

    @abstractmethod
    def acquire(self) -> Array:
        """Return a slot, uint8 [bucket_bytes], to be filled; wait until its last content has arrived."""

    def would_wait(self) -> bool:
        """Say whether `acquire` would wait; False where that cannot be told."""
        return False

    @abstractmethod
    def post(self, peer: int, size_bytes: int) -> None:
        """Send the slot that was acquired last."""

    @abstractmethod
    def expect(self, peer: int, size_bytes: int) -> None:
        """Say that a bucket will be taken soon; in the order of the wire."""

    @abstractmethod
    def take(self, peer: int) -> Array:
        """Return the next bucket of a peer, uint8 [size_bytes]; wait until it is there."""

    def would_wait_for(self, peer: int) -> bool:
        """Say whether `take` would wait; False where that cannot be told."""
        return False

    @abstractmethod
    def release(self, peer: int) -> None:
        """Say that the bucket taken last is not needed any more."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until everything that was posted has arrived."""


class MessageChannel(Channel):
    """Buckets as messages that are started and not waited for: packing, sending and unpacking overlap."""

    def __init__(self, comm: Communicator, slots: list[Array]) -> None:
        super().__init__(comm, slots)
        self._in = slots[SLOTS:]
        self._sent: list[Work | None] = [None] * SLOTS
        self._coming: list[tuple[int, Work, Array]] = []
        self._at = self._in_at = 0

    def acquire(self) -> Array:
        """Return a slot to be filled."""
        work = self._sent[self._at]
        if work is not None:
            work.wait()
            self._sent[self._at] = None
        return self._out[self._at]

    def post(self, peer: int, size_bytes: int) -> None:
        """Send the slot that was acquired last."""
        self._sent[self._at] = self.comm.start.send(self._out[self._at][:size_bytes], peer)
        self._at = (self._at + 1) % SLOTS

    def expect(self, peer: int, size_bytes: int) -> None:
        """Start to receive a bucket."""
        slot = self._in[self._in_at][:size_bytes]
        self._in_at = (self._in_at + 1) % SLOTS
        self._coming.append((peer, self.comm.start.recv(slot, peer), slot))

    def take(self, peer: int) -> Array:
        """Return the next bucket of a peer."""
        came_from, work, slot = self._coming.pop(0)
        assert came_from == peer
        work.wait()
        return slot

    def release(self, peer: int) -> None:
        """Nothing to say: the slot is this rank's own."""

    def finish(self) -> None:
        """Wait for the sends."""
        for i, work in enumerate(self._sent):
            if work is not None:
                work.wait()
                self._sent[i] = None


class SlotChannel(Channel):
    """Buckets in memory that the receivers map: they unpack where the sender packed, and nothing is sent.

    A word tells that a slot is full, another that it is free again. Both kinds of a pair come in one line, in an order
    that the receiver need not know: they are counted.
    """

    def __init__(self, comm: Communicator, slots: list[Array], node: NodeView) -> None:
        super().__init__(comm, slots)
        self._theirs = node.publish(self._out)
        self._ready = [0] * comm.size
        self._free = [0] * comm.size
        self._owed: list[int | None] = [None] * SLOTS
        self._at = 0
        self._taken = [0] * comm.size
        self._expected: dict[int, list[int]] = {}
        self._slots: dict[tuple[int, int], int] = {}
        self._views: dict[tuple[int, int, int], Array] = {}
        self._word = np.zeros(2, np.int64)
        self._full = [np.array([_READY, slot], np.int64) for slot in range(SLOTS)]
        self._emptied = np.array([_FREE, 0], np.int64)
        self._hear = getattr(getattr(comm, "_mailbox", None), "recv_if_come", None)

    def acquire(self) -> Array:
        """Return a slot to be filled."""
        peer = self._owed[self._at]
        if peer is not None:
            while not self._free[peer]:
                self._listen(peer)
            self._free[peer] -= 1
            self._owed[self._at] = None
        return self._out[self._at]

    def would_wait(self) -> bool:
        """Say whether `acquire` would wait."""
        peer = self._owed[self._at]
        return peer is not None and not self._free[peer] and not self._heard(peer, self._free)

    def post(self, peer: int, size_bytes: int) -> None:
        """Tell the peer of the slot that was acquired last."""
        self.comm._send(self._full[self._at], peer)
        self._owed[self._at] = peer
        self._at = (self._at + 1) % SLOTS

    def expect(self, peer: int, size_bytes: int) -> None:
        """Note the size."""
        self._expected.setdefault(peer, []).append(size_bytes)

    def take(self, peer: int) -> Array:
        """Return the next bucket of a peer, in the peer's memory."""
        while not self._ready[peer]:
            self._listen(peer)
        self._ready[peer] -= 1
        slot = self._slots.pop((peer, self._taken[peer]))
        key = peer, slot, self._expected[peer].pop(0)
        view = self._views.get(key)
        if view is None:
            whole = self._theirs[peer][slot]
            assert whole is not None  # empty() gave memory that is seen
            view = self._views[key] = whole[: key[2]]
        return view

    def would_wait_for(self, peer: int) -> bool:
        """Say whether `take` would wait."""
        return not self._ready[peer] and not self._heard(peer, self._ready)

    def release(self, peer: int) -> None:
        """Tell the peer that its slot is free."""
        self._taken[peer] += 1
        self.comm._send(self._emptied, peer)

    def finish(self) -> None:
        """Wait until every slot is free."""
        for _ in range(SLOTS):
            self.acquire()
            self._at = (self._at + 1) % SLOTS

    def _listen(self, peer: int) -> None:
        self.comm._recv(self._word, peer)
        self._note(peer)

    def _heard(self, peer: int, counts: list[int]) -> bool:
        """Take what has come from a peer until it is counted; True where that cannot be done without a wait."""
        if self._hear is None:
            return True
        while not counts[peer]:
            if not self._hear(self._word, peer):
                return False
            self._note(peer)
        return True

    def _note(self, peer: int) -> None:
        kind, slot = self._word.tolist()
        if kind == _FREE:
            self._free[peer] += 1
            return
        self._slots[peer, self._taken[peer] + self._ready[peer]] = slot
        self._ready[peer] += 1
