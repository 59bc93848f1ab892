"""Comparing a checkpoint's checksums while it is loaded: from what was read anyway, and once more only for the rest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowshard.checkpoint.bytesource import ByteSource
from lowshard.checkpoint.catalog import StoredPart
from lowshard.checkpoint.crc import Piece, Tally, chain, sum_of
from lowshard.comm import Communicator
from lowshard.comm.agreement import share


class Verification:
    """One rank's part in comparing the checksums of all stored arrays that a plan touches."""

    def __init__(
        self, arrays: Sequence[tuple[str, StoredPart]], source: ByteSource, rank: int, size: int
    ) -> None:
        self._arrays, self._source, self._rank, self._size = arrays, source, rank, size
        self.verified_bytes = 0
        self.tally = Tally()
        self._seen = np.zeros(len(arrays), np.int64)
        self._pieces: dict[int, list[Piece]] = {}

    def compare_own(self) -> None:
        """Compare the arrays that this rank has read whole."""
        for number, (name, part) in enumerate(self._arrays):
            pieces = self.tally.pieces(part.key)
            found = chain(part.entry.start, part.entry.stop, pieces)
            if found is None:
                self._pieces[number] = pieces
            else:
                part.check(name, sum_of(found))
                self._seen[number] = 1
                self.verified_bytes += part.entry.size_bytes

    def share(self, comm: Communicator | None) -> bool:
        """Tell all ranks what was compared, and the sums of parts; return whether nothing is left to do."""
        if comm is not None and self._arrays:
            mine = [(n, *p) for n, pieces in self._pieces.items() for p in pieces]
            rows = np.array(mine, np.int64).reshape(-1, 4)
            told = share(comm.control, np.concatenate([[len(rows)], self._seen]))
            self._seen = np.bitwise_or.reduce([t[1:] for t in told])
            self._pieces = {}
            if most := max(int(t[0]) for t in told):
                table = np.zeros((most, 4), np.int64)
                table[: len(rows)] = rows
                for theirs, (count, *_) in zip(share(comm.control, table.reshape(-1)), told, strict=True):
                    for number, start, stop, value in theirs.reshape(-1, 4)[: int(count)].tolist():
                        self._pieces.setdefault(number, []).append((start, stop, value))
        return bool(self._seen.all())

    def compare_rest(self) -> None:
        """Compare this rank's part of what is left."""
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
