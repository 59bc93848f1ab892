"""Comparing a checkpoint's checksums while it is loaded: from what was read anyway, and once more only for the rest."""

from __future__ import annotations

import json

import numpy as np

from lowshard.checkpoint.bytesource import ByteSource
from lowshard.checkpoint.catalog import StoredPart
from lowshard.checkpoint.checksum import Key, Piece, Tally, chain, sum_of
from lowshard.comm import Communicator, share_text
from lowshard.comm.agreement import share
from lowshard.weights.plan import LoadPlan


class Verification:
    """One rank's part in comparing the checksums of all stored arrays that a plan touches.

    An array that one rank has read whole is compared there. Of those that several have read, each a run, the sums
    are joined. What was read in rows of columns is looked at once more, by one rank.
    """

    def __init__(self, plan: LoadPlan, source: ByteSource, rank: int, size: int) -> None:
        self._source, self._rank, self._size = source, rank, size
        self.verified_bytes = 0
        found: dict[Key, tuple[str, StoredPart]] = {}
        for name, _ in plan.tilings:
            for part in source.catalog.tensor(name).parts:
                if part.crc32 is not None:
                    found.setdefault(part.key, (name, part))
        self._arrays = list(found.values())
        self.tally = Tally()
        self._seen = np.zeros(len(found), np.uint8)
        self._pieces: dict[int, list[Piece]] = {}

    @property
    def has_work(self) -> bool:
        """Whether there is a checksum; equal on all ranks."""
        return bool(self._arrays)

    def compare_own(self) -> None:
        """Compare the arrays that this rank has read whole.

        Raises:
            CheckpointError: one is damaged.
        """
        for number, (name, part) in enumerate(self._arrays):
            pieces = self.tally.pieces(part.key)
            found = chain(part.entry.start, part.entry.stop, pieces)
            if found is None:
                self._pieces[number] = pieces
            else:
                part.check(name, sum_of(found))
                self._seen[number] = 1
                self.verified_bytes += part.entry.size_bytes

    def share(self, comm: Communicator) -> None:
        """Tell all ranks what was compared, and the sums of arrays that no rank has read whole.

        Collective: all ranks of the communicator call this.
        """
        self._seen = np.bitwise_or.reduce(share(comm.control, self._seen))
        if self._seen.all():
            return
        mine = [[n, *p] for n, pieces in self._pieces.items() if not self._seen[n] for p in pieces]
        self._pieces = {}
        for text in share_text(comm.control, json.dumps(mine)):
            for number, start, stop, value in json.loads(text):
                self._pieces.setdefault(number, []).append((start, stop, value))

    def compare_rest(self) -> None:
        """Compare this rank's part of what is left.

        Raises:
            CheckpointError: an array is damaged, or cannot be read again.
        """
        load_bytes = [0] * self._size
        for number, (name, part) in enumerate(self._arrays):
            if self._seen[number]:
                continue
            found = chain(part.entry.start, part.entry.stop, self._pieces.get(number, []))
            if found is not None:
                if number % self._size == self._rank:
                    part.check(name, sum_of(found))
                    self.verified_bytes += part.entry.size_bytes
                continue
            turn = load_bytes.index(min(load_bytes))
            load_bytes[turn] += part.entry.size_bytes
            if turn == self._rank:
                self.verified_bytes += self._source.verify(name, part)
