"""What ranks read for each other in a load, sent in rounds of bounded size: one rank's part, as frozen data.

A reader puts what it reads into its half of a round, whole: peers, who see its memory, take their parts from there.
Parts for ranks out of reach are packed behind and sent. A taker gets only what it holds of a read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lowshard import dtypes
from lowshard.box import Box, relative_slices, shape_of, slices_of, volume
from lowshard.tiling import Tiling
from lowshard.transfer.mover import Message
from lowshard.weights.load_plan import Read

WINDOW_BYTES = 2 << 20
"""What a reader reads for others in a round, about."""
_ALIGN_BYTES = 64


class Block(NamedTuple):
    """A box of a read in a half of memory, and what goes out of it or into it."""

    read: Read
    at: int
    """First byte in the half."""
    shape: tuple[int, ...]
    dtype: Any


class Take(NamedTuple):
    """What a rank takes of a block: whose it is, index of the block, and index of its array."""

    reader: int
    block: Block
    inner: Any
    where: Any


class Pack(NamedTuple):
    """What is packed of a block for a rank out of reach: index of the block, and where it goes in the half."""

    block: Block
    inner: Any
    target: Block


@dataclass(frozen=True)
class ScatterRound:
    """One rank's part of a round."""

    reads: tuple[Block, ...]
    packs: tuple[Pack, ...]
    sends: tuple[Message, ...]
    takes: tuple[Take, ...]
    receives: tuple[Message, ...]
    unpacks: tuple[Take, ...]


@dataclass(frozen=True)
class ReadScatter:
    """One rank's part of what is handed out."""

    rounds: tuple[ScatterRound, ...]
    half_bytes: int
    into_bytes: int
    sent_bytes: int
    near_sent_bytes: int
    near_received_bytes: int


def shared_reads(reads: Iterable[Read]) -> tuple[Read, ...]:
    """Return the reads that a rank besides the reader takes something of."""
    return tuple(r for r in reads if r.takers != (r.reader,))


def read_scatter(
    reads: Sequence[Read], tilings: Mapping[str, Tiling], rank: int, homes: Sequence[int]
) -> ReadScatter:
    """Return a rank's part of handing reads out."""
    near = {r for r, home in enumerate(homes) if home == homes[rank]}
    rounds = [_round(lanes, tilings, rank, near) for lanes in _lanes(reads, tilings)]
    sent = {
        taker: sum(_taken_bytes(r, taker, tilings) for r in reads if r.reader == rank)
        for taker in {t for r in reads if r.reader == rank for t in r.takers} - {rank}
    }
    received = sum(_taken_bytes(r, rank, tilings) for r in reads if r.reader != rank and r.reader in near)
    return ReadScatter(
        tuple(made for made, _, _ in rounds), max((half for _, half, _ in rounds), default=0),
        max((into for _, _, into in rounds), default=0), sum(sent.values()),
        sum(size for taker, size in sent.items() if taker in near), received,
    )  # fmt: skip


def _round(
    lanes: Mapping[int, Sequence[Read]], tilings: Mapping[str, Tiling], rank: int, near: set[int]
) -> tuple[ScatterRound, int, int]:
    """Return a rank's part of a round, and the bytes of its half and of what it receives into."""
    reads: list[Block] = []
    packs: list[Pack] = []
    sends: list[Message] = []
    takes: list[Take] = []
    receives: list[Message] = []
    unpacks: list[Take] = []
    into = 0
    half, blocks = _blocks(lanes.get(rank, ()), tilings)
    reads += blocks
    for taker in sorted({t for r in lanes.get(rank, ()) for t in r.takers} - near):
        start = half
        for block in blocks:
            for box, _ in _places(block.read, taker, tilings):
                part = _block(block.read, box, half, tilings)
                packs.append(Pack(block, relative_slices(box, block.read.box), part))
                half += volume(box) * part.dtype.itemsize
        sends.append(Message(taker, start, half))
        half = _padded(half)
    for reader, lane in lanes.items():
        if reader in near:
            for block in _blocks(lane, tilings)[1]:
                for box, local in _places(block.read, rank, tilings):
                    takes.append(Take(reader, block, relative_slices(box, block.read.box), _index(local)))
            continue
        at = into
        for read in lane:
            for box, local in _places(read, rank, tilings):
                part = _block(read, box, at - into, tilings)
                unpacks.append(Take(reader, part, ..., _index(local)))
                at += volume(box) * part.dtype.itemsize
        if at > into:
            receives.append(Message(reader, into, at))
            into = _padded(at)
    made = ScatterRound(*map(tuple, (reads, packs, sends, takes, receives, unpacks)))  # type: ignore[arg-type]
    return made, half, into


def _blocks(lane: Iterable[Read], tilings: Mapping[str, Tiling]) -> tuple[int, list[Block]]:
    """Return where the whole reads of one reader lie in its half, and their end."""
    at, found = 0, []
    for read in lane:
        found.append(_block(read, read.box, at, tilings))
        at += _padded(_size_bytes(read, tilings))
    return at, found


def _block(read: Read, box: Box, at: int, tilings: Mapping[str, Tiling]) -> Block:
    return Block(read, at, shape_of(box), dtypes.get(tilings[read.name].dtype).numpy)


def _lanes(reads: Iterable[Read], tilings: Mapping[str, Tiling]) -> Iterator[dict[int, list[Read]]]:
    """Yield rounds, reads by reader: as many of each as fit the limit (one at least), in their order."""
    lanes: dict[int, list[Read]] = {}
    for read in reads:
        lanes.setdefault(read.reader, []).append(read)
    at = dict.fromkeys(lanes, 0)
    while lanes:
        made: dict[int, list[Read]] = {}
        for reader, lane in list(lanes.items()):
            start, used = at[reader], 0
            while at[reader] < len(lane):
                used += _padded(_size_bytes(lane[at[reader]], tilings))
                if used > WINDOW_BYTES and at[reader] > start:
                    break
                at[reader] += 1
            made[reader] = lane[start : at[reader]]
            if at[reader] == len(lane):
                del lanes[reader]
        yield made


def _places(read: Read, rank: int, tilings: Mapping[str, Tiling]) -> Iterable[tuple[Box, Box]]:
    return tilings[read.name].places(rank, read.box) if rank in read.takers else ()


def _size_bytes(read: Read, tilings: Mapping[str, Tiling]) -> int:
    return volume(read.box) * tilings[read.name].itemsize_bytes


def _taken_bytes(read: Read, rank: int, tilings: Mapping[str, Tiling]) -> int:
    return sum(volume(box) for box, _ in _places(read, rank, tilings)) * tilings[read.name].itemsize_bytes


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _index(box: Box) -> Any:
    return (..., *slices_of(box))  # with ..., a view even of a 0-d array
