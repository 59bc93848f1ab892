"""Handing out what some ranks read for others, in rounds of bounded size.

Where ranks can read each other's memory, a reader puts what it reads into a window that the others see, and they copy
it from there into its place; while they do, the next round is read. So a byte is copied once on its way, and that from
a cache. Elsewhere a round is one all_to_all_v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lowshard import dtypes
from lowshard.box import Box, shape_of, volume
from lowshard.comm import Communicator
from lowshard.tiling import Tiling
from lowshard.weights.plan import CHUNK_BYTES, Read

WINDOW_BYTES = 4 << 20
"""What a reader puts into its window in a round, about; there are two such windows, taken in turn."""
_ALIGN_BYTES = 64


class Courier(Protocol):
    """One rank's side of a delivery: it reads, and it places. Neither raises what the others would wait for."""

    rank: int

    def fetch(self, read: Read, into: np.ndarray) -> None:
        """Fill an array with what this rank reads for others."""

    def place(self, read: Read, block: np.ndarray) -> None:
        """Put what this rank takes where it belongs."""

    def read_own(self, share: float) -> None:
        """Read what this rank alone takes, until that share of it is done."""


@dataclass(frozen=True)
class Delivery:
    """What a group of ranks hands out among itself.

    Args:
        reads: those with takers besides the reader.
        tilings: by name.
        members: the ranks of the group, as the plan numbers them, in the order of its communicator.
    """

    reads: tuple[Read, ...]
    tilings: dict[str, Tiling]
    members: tuple[int, ...]

    def run(self, courier: Courier, comm: Communicator) -> None:
        """Move everything.

        Collective: all ranks of the communicator call this.
        """
        if not self.reads:
            courier.read_own(1.0)
        elif comm.shows:
            self._show(courier, comm)
        else:
            courier.read_own(1.0)
            self._send(courier, comm)

    def size_bytes(self, read: Read) -> int:
        """Return the bytes of a read."""
        return volume(read.box) * self.tilings[read.name].itemsize_bytes

    # ---- through windows

    def _show(self, courier: Courier, comm: Communicator) -> None:
        rank = courier.rank
        sent = sum(
            self.size_bytes(r) * sum(t != rank for t in r.takers) for r in self.reads if r.reader == rank
        )
        received = sum(self.size_bytes(r) for r in self.reads if r.reader != rank and rank in r.takers)
        text = f"load: {len(self.reads)} reads handed out"
        call = comm._make("load", text, 0, sent, received)
        call.run = self._show_rounds
        try:
            comm._do(call, courier, comm, call.signature, text)
        finally:
            call.run = _nothing  # the counters keep the call a while, and are not to keep this

    def _show_rounds(self, courier: Courier, comm: Communicator, signature: int, text: str) -> None:
        rounds = list(_rounds(self.reads, self._padded_bytes, WINDOW_BYTES))
        half = max(sum(map(self._padded_bytes, lane)) for lanes in rounds for lane in lanes.values())
        places = {member: place for place, member in enumerate(self.members)}
        mine = any(courier.rank in lanes for lanes in rounds)
        window = comm.empty(2 * half, "uint8") if mine else None

        def fill(number: int) -> None:
            if window is None or number == len(rounds):
                return
            at = number % 2 * half
            for read in rounds[number].get(courier.rank, ()):
                courier.fetch(read, self._block(read, window, at))
                at += self._padded_bytes(read)

        fill(0)
        _, see = comm._show(signature, text, window, 0)
        views: dict[int, np.ndarray] = {}
        for number, lanes in enumerate(rounds):
            if number:
                comm._barrier()  # this round is filled, and the one before is taken
            fill(number + 1)
            courier.read_own((number + 1) / len(rounds))
            for reader, lane in lanes.items():
                at = number % 2 * half
                for read in lane:
                    if courier.rank in read.takers:
                        if reader not in views:
                            views[reader] = see(places[reader], np.dtype(np.uint8), 2 * half)
                        courier.place(read, self._block(read, views[reader], at))
                    at += self._padded_bytes(read)
        comm._hide()

    def _padded_bytes(self, read: Read) -> int:
        return -(-self.size_bytes(read) // _ALIGN_BYTES) * _ALIGN_BYTES

    # ---- by messages

    def _send(self, courier: Courier, comm: Communicator) -> None:
        rounds = list(_rounds(self.reads, self._message_bytes, CHUNK_BYTES))
        place = {member: place for place, member in enumerate(self.members)}
        send = recv = np.empty(0, np.uint8)
        for lanes in rounds:
            out: list[list[Read]] = [[] for _ in self.members]
            into: list[list[Read]] = [[] for _ in self.members]
            for reader, lane in lanes.items():
                for read in lane:
                    for taker in read.takers:
                        if reader == courier.rank:
                            out[place[taker]].append(read)
                        elif taker == courier.rank:
                            into[place[reader]].append(read)
            out[place[courier.rank]] = []
            counts_out, displs_out = self._spans(out)
            counts_in, displs_in = self._spans(into)
            send, recv = _room(send, sum(counts_out)), _room(recv, sum(counts_in))
            self._pack(courier, lanes.get(courier.rank, ()), out, displs_out, send)
            comm.all_to_all_v(send, counts_out, displs_out, recv, counts_in, displs_in)
            for reads, start in zip(into, displs_in, strict=True):
                at = start
                for read in reads:
                    courier.place(read, self._block(read, recv, at))
                    at += self.size_bytes(read)

    def _pack(
        self, courier: Courier, lane: Iterable[Read], out: Sequence[Sequence[Read]], displs: Sequence[int],
        send: np.ndarray,
    ) -> None:  # fmt: skip
        found: dict[tuple[str, Box], np.ndarray] = {}
        for reads, start in zip(out, displs, strict=True):
            at = start
            for read in reads:
                block, key = self._block(read, send, at), (read.name, read.box)
                if key in found:
                    block[...] = found[key]
                else:
                    courier.fetch(read, block)
                found[key] = block
                at += self.size_bytes(read)
        for read in lane:
            if courier.rank in read.takers:
                courier.place(read, found[read.name, read.box])

    def _spans(self, reads: Sequence[Sequence[Read]]) -> tuple[list[int], list[int]]:
        counts, displs, at = [], [], 0
        for of_one in reads:
            counts.append(sum(map(self.size_bytes, of_one)))
            displs.append(at)
            at += counts[-1]
        return counts, displs

    def _message_bytes(self, read: Read) -> int:
        return self.size_bytes(read) * sum(t != read.reader for t in read.takers)

    def _block(self, read: Read, buffer: np.ndarray, at: int) -> np.ndarray:
        dtype = dtypes.get(self.tilings[read.name].dtype).numpy
        flat = buffer[at : at + self.size_bytes(read)]
        return np.ndarray(shape_of(read.box), dtype, buffer=flat.data)


def _rounds(
    reads: Iterable[Read], bytes_of: Callable[[Read], int], limit_bytes: int
) -> Iterable[dict[int, list[Read]]]:
    """Yield rounds, reads by reader: as many of each as fit the limit (one at least), in their order."""
    lanes: dict[int, list[Read]] = {}
    for read in reads:
        lanes.setdefault(read.reader, []).append(read)
    at = dict.fromkeys(lanes, 0)
    while lanes:
        made: dict[int, list[Read]] = {}
        for reader, lane in list(lanes.items()):
            start, used = at[reader], 0
            while at[reader] < len(lane) and (used == 0 or used + bytes_of(lane[at[reader]]) <= limit_bytes):
                used += bytes_of(lane[at[reader]])
                at[reader] += 1
            made[reader] = lane[start : at[reader]]
            if at[reader] == len(lane):
                del lanes[reader]
        yield made


def _nothing(*_: object) -> None:
    """Do nothing."""


def _room(buffer: np.ndarray, size_bytes: int) -> np.ndarray:
    """Return a buffer of that size: the one there is, where it is large enough."""
    return buffer[:size_bytes] if buffer.size >= size_bytes else np.empty(size_bytes, np.uint8)
