"""Handing out what some ranks read for others, in rounds of bounded size.

Where the processes of a node may write to each other's memory and all of them read for others, each writes what it
reads to its place in the others' arrays, out of a scratch in its cache; nobody waits for anybody on the way. Where only
some read, a reader puts it into a window that the others see, and they copy it from there into its place; while they
do, the next round is read. Elsewhere a round is one all_to_all_v. A taker gets only what it holds of a read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from lowshard import dtypes
from lowshard.box import Box, relative_slices, shape_of, volume
from lowshard.comm import Communicator
from lowshard.tiling import Tiling
from lowshard.weights.load_plan import CHUNK_BYTES, Read
from lowshard.weights.peer_write import may_write

WINDOW_BYTES = 2 << 20
"""What a reader puts into its window in a round, about; there are two such windows, taken in turn."""
_ALIGN_BYTES = 64


class Courier(Protocol):
    """One rank's side of a delivery: it reads, and it places. Neither raises what the others would wait for."""

    rank: int

    def fetch(self, read: Read, into: np.ndarray) -> None:
        """Fill an array with what this rank reads for others."""

    def place(self, name: str, where: Any, values: np.ndarray) -> None:
        """Put values where they belong: an index of this rank's array."""

    def write_out(self, comm: Communicator, members: Sequence[int]) -> None:
        """Read what this rank reads for others, and write it into their arrays.

        Collective: all ranks of the group call this.
        """

    def count_sent(self, size_bytes: int) -> None:
        """Note what another rank takes of what this one has read."""

    def read_own(self, share: float) -> None:
        """Read what this rank alone takes, until that share of it is done."""


class Block(NamedTuple):
    """A read as it lies in its reader's window."""

    read: Read
    at: int
    """First byte, from the begin of its round's half of the window."""
    stop: int
    shape: tuple[int, ...]
    dtype: Any
    takes: tuple[tuple[Any, Any], ...]
    """What this rank takes: index of its array, and of the block."""
    taken_bytes: int
    """Of them."""
    sent_bytes: int
    """What others than the reader take."""


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
    _scripts: dict[int, list[dict[int, list[Block]]]] = field(default_factory=dict, init=False, compare=False)

    def run(self, courier: Courier, comm: Communicator) -> None:
        """Move everything.

        Collective: all ranks of the communicator call this.
        """
        if not self.reads:
            courier.read_own(1.0)
        elif len({r.reader for r in self.reads}) == len(self.members) and may_write(comm):
            self._do(courier, comm, self._write)
        elif comm.shows:
            self._do(courier, comm, self._show_rounds)
        else:
            courier.read_own(1.0)
            self._send(courier, comm)

    def size_bytes(self, read: Read) -> int:
        """Return the bytes of a read."""
        return volume(read.box) * self.tilings[read.name].itemsize_bytes

    def within(self, nodes: Sequence[int], rank: int) -> Delivery:
        """Return what the ranks of this rank's node hand out among themselves."""
        here = tuple(m for m in self.members if nodes[m] == nodes[rank])
        return Delivery(tuple(r for r in self.reads if nodes[r.reader] == nodes[rank]), self.tilings, here)

    def _do(self, courier: Courier, comm: Communicator, run: Callable[..., None]) -> None:
        """Run one way of handing out as a call of the communicator, which counts it and names it where a rank fails."""
        blocks = [b for lanes in self._script(courier.rank) for lane in lanes.values() for b in lane]
        sent = sum(b.sent_bytes for b in blocks if b.read.reader == courier.rank)
        received = sum(b.taken_bytes for b in blocks if b.read.reader != courier.rank)
        text = f"load: {len(self.reads)} reads handed out"
        call = comm._make("load", text, 0, sent, received)
        call.run = run
        try:
            comm._do(call, courier, comm, call.signature, text)
        finally:
            call.run = _nothing  # the counters keep the call a while, and are not to keep this

    # ---- straight into the others' arrays

    def _write(self, courier: Courier, comm: Communicator, signature: int, text: str) -> None:
        courier.write_out(comm, self.members)
        courier.read_own(1.0)

    # ---- through windows

    def _show_rounds(self, courier: Courier, comm: Communicator, signature: int, text: str) -> None:
        rank, rounds = courier.rank, self._script(courier.rank)
        half = max(lane[-1].stop for lanes in rounds for lane in lanes.values())
        places = {member: place for place, member in enumerate(self.members)}
        mine = any(rank in lanes for lanes in rounds)
        window = comm.empty(2 * half, "uint8") if mine else None

        def fill(number: int) -> None:
            if window is None or number == len(rounds):
                return
            for block in rounds[number].get(rank, ()):
                at = number % 2 * half + block.at
                courier.fetch(block.read, np.ndarray(block.shape, block.dtype, window.data, at))
                courier.count_sent(block.sent_bytes)

        fill(0)
        _, see = comm._show(signature, text, window, 0)
        views: dict[int, np.ndarray] = {}
        for number, lanes in enumerate(rounds):
            if number:
                comm._barrier()  # this round is filled, and the one before is taken
            fill(number + 1)
            courier.read_own((number + 1) / len(rounds))
            for reader, lane in lanes.items():
                for block in lane:
                    if not block.takes:
                        continue
                    if reader not in views:
                        views[reader] = see(places[reader], np.dtype(np.uint8), 2 * half)
                    at = number % 2 * half + block.at
                    values = np.ndarray(block.shape, block.dtype, views[reader].data, at)
                    for where, inner in block.takes:
                        courier.place(block.read.name, where, values[inner])
        comm._hide()

    def _script(self, rank: int) -> list[dict[int, list[Block]]]:
        """Return what lies in the windows in each round, by reader; worked out once."""
        if rank not in self._scripts:
            self._scripts[rank] = [
                {reader: list(self._blocks(lane, rank)) for reader, lane in lanes.items()}
                for lanes in _rounds(self.reads, self._padded_bytes, WINDOW_BYTES)
            ]
        return self._scripts[rank]

    def _blocks(self, lane: Iterable[Read], rank: int) -> Iterable[Block]:
        at = 0
        for read in lane:
            dtype, stop = dtypes.get(self.tilings[read.name].dtype).numpy, at + self._padded_bytes(read)
            takes = (
                (_index(local), relative_slices(box, read.box)) for box, local in self._places(read, rank)
            )
            yield Block(
                read,
                at,
                stop,
                shape_of(read.box),
                dtype,
                tuple(takes),
                self._taken_bytes(read, rank),
                self._sent_bytes(read),
            )
            at = stop

    def _padded_bytes(self, read: Read) -> int:
        return -(-self.size_bytes(read) // _ALIGN_BYTES) * _ALIGN_BYTES

    # ---- by messages

    def _send(self, courier: Courier, comm: Communicator) -> None:
        rounds = list(_rounds(self.reads, self._sent_bytes, CHUNK_BYTES))
        rank, here = courier.rank, range(len(self.members))
        send = recv = np.empty(0, np.uint8)
        for lanes in rounds:
            counts_out, counts_in = [0 for _ in here], [0 for _ in here]
            for place, member in enumerate(self.members):
                if member != rank:
                    counts_out[place] = sum(self._taken_bytes(r, member) for r in lanes.get(rank, ()))
                    counts_in[place] = sum(self._taken_bytes(r, rank) for r in lanes.get(member, ()))
            displs_out, displs_in = _displs(counts_out), _displs(counts_in)
            send, recv = _room(send, sum(counts_out)), _room(recv, sum(counts_in))
            self._pack(courier, lanes.get(rank, ()), send, displs_out)
            comm.all_to_all_v(send, counts_out, displs_out, recv, counts_in, displs_in)
            for member, start in zip(self.members, displs_in, strict=True):
                at = start
                for read in lanes.get(member, ()) if member != rank else ():
                    for box, local in self._places(read, rank):
                        values = self._block(replace(read, box=box), recv, at)
                        courier.place(read.name, _index(local), values)
                        at += values.nbytes

    def _pack(self, courier: Courier, lane: Iterable[Read], send: np.ndarray, displs: Sequence[int]) -> None:
        at = list(displs)
        for read in lane:
            block = self._block(read, np.empty(self.size_bytes(read), np.uint8), 0)
            courier.fetch(read, block)
            courier.count_sent(self._sent_bytes(read))
            for place, member in enumerate(self.members):
                for box, local in self._places(read, member):
                    if member == courier.rank:
                        courier.place(read.name, _index(local), block[relative_slices(box, read.box)])
                        continue
                    packed = self._block(replace(read, box=box), send, at[place])
                    packed[...] = block[relative_slices(box, read.box)]
                    at[place] += packed.nbytes

    # ---- what a rank takes

    def _places(self, read: Read, rank: int) -> Iterable[tuple[Box, Box]]:
        return self.tilings[read.name].places(rank, read.box) if rank in read.takers else ()

    def _taken_bytes(self, read: Read, rank: int) -> int:
        elems = sum(volume(box) for box, _ in self._places(read, rank))
        return elems * self.tilings[read.name].itemsize_bytes

    def _sent_bytes(self, read: Read) -> int:
        return sum(self._taken_bytes(read, t) for t in read.takers if t != read.reader)

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


def _displs(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts))]


def _index(box: Box) -> Any:
    return (..., *(slice(start, stop) for start, stop in box))  # with ..., a view even of a 0-d array


def _nothing(*_: object) -> None:
    """Do nothing."""


def _room(buffer: np.ndarray, size_bytes: int) -> np.ndarray:
    """Return a buffer of that size: the one there is, where it is large enough."""
    return buffer[:size_bytes] if buffer.size >= size_bytes else np.empty(size_bytes, np.uint8)
