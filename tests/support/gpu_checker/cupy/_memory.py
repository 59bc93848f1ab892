"""Memory that operations of the device touch: which bytes are whose, since when, and what touched them last.

Blocks of the device come from a pool that has an arena for each stream, as CuPy's: what is freed goes to the next that
takes as much on that stream, at once, whatever other streams still do with it. A page-locked part of the host's memory
is a block too, for as long as it is locked.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupy.checker import LOCK, OFF, count, need

Words = npt.NDArray[np.int64]

POISON = 0xA5
GRAIN_BYTES = 512
_MOST_RECORDS = 256  # of a block
_MOST_PIECES = 4096  # of a strided array: above, the gaps count as touched too
_LIVES = 8  # of a block that are remembered
serials = itertools.count(1)
"""Numbers everything that happens in the process: an operation may touch what lived when it was asked for."""


class Access(NamedTuple):
    """Bytes that an operation reads or writes: from `low` to `high`, or the pieces between them."""

    low: int
    high: int
    writes: bool
    pieces: tuple[Words, Words] | None = None
    """First addresses and ends, ascending."""

    def crosses(self, other: Access) -> bool:
        """Say whether both touch a byte."""
        if self.high <= other.low or other.high <= self.low:
            return False
        if self.pieces is None and other.pieces is None:
            return True
        begins, ends = self._as_pieces()
        begins_2, ends_2 = other._as_pieces()
        first = np.searchsorted(
            ends, begins_2, side="right"
        )  # the first piece that ends behind each beginning
        inside = first < len(begins)
        return bool((begins[first[inside]] < ends_2[inside]).any())

    def covers(self, other: Access) -> bool:
        """Say whether this surely touches all bytes that the other does."""
        return self.pieces is None and self.low <= other.low and other.high <= self.high

    def _as_pieces(self) -> tuple[Words, Words]:
        return self.pieces or (np.array([self.low], np.int64), np.array([self.high], np.int64))


class Life(NamedTuple):
    """A stretch of time in which a block was somebody's."""

    born: int
    size: int
    died: float = math.inf


class Block:
    """Memory that is handed out whole."""

    def __init__(self, begin: int, capacity: int, arena: Hashable = None, raw: Any = None) -> None:
        self.begin, self.capacity, self.arena, self._raw = begin, capacity, arena, raw
        self.lives: deque[Life] = deque(maxlen=_LIVES)
        self.records: list[Any] = []
        """(access, operation) of what touched it; see `_streams.Operation`."""

    def life_at(self, serial: int) -> Life | None:
        """Return the life during which something happened; of what is too long ago, one that allows all."""
        if len(self.lives) == _LIVES and serial < self.lives[0].born:
            return Life(0, self.capacity)
        return next((life for life in self.lives if life.born < serial < life.died), None)

    def remember(self, access: Access, operation: Any, is_alone: bool) -> None:
        """Keep an access, and drop those that it makes needless: what is ordered with it is ordered with them.

        Where it is alone, and nothing waits for its turn, all that follows comes after what the host knows.
        """
        self.records = [
            (old, by)
            for old, by in self.records[1 - _MOST_RECORDS :]
            if not (is_alone and by.is_known)
            and not (access.covers(old) and by.precedes(operation) and (access.writes or not old.writes))
        ]
        self.records.append((access, operation))


_blocks: dict[int, Block] = {}
_begins: list[int] = []
_unused: defaultdict[tuple[Hashable, int], list[Block]] = defaultdict(list)


def allocate(size: int, arena: Hashable) -> tuple[Block, bool]:
    """Return a block of the arena of a stream, and whether the device had to be asked for it."""
    capacity = max(1, -(-size // GRAIN_BYTES)) * GRAIN_BYTES
    with LOCK:
        count("allocations")
        unused = _unused[arena, capacity]
        is_new = not unused
        if is_new:
            raw = np.empty(
                capacity + 2 * GRAIN_BYTES, np.uint8
            )  # there is room behind it: no two blocks touch
            at = int(raw.ctypes.data)
            block = Block(at + -at % GRAIN_BYTES, capacity, arena, raw)
            add(block)
        else:
            block = unused.pop()
        block.lives.append(Life(next(serials), size))
        return block, is_new


def release(block: Block) -> None:
    """Give a block back to its arena."""
    with LOCK:
        end(block)
        _unused[block.arena, block.capacity].append(block)


def end(block: Block) -> None:
    """End a block's life."""
    block.lives[-1] = block.lives[-1]._replace(died=next(serials))


def add(block: Block) -> None:
    """Make a block known."""
    _blocks[block.begin] = block
    bisect.insort(_begins, block.begin)


def remove(block: Block) -> None:
    """Forget a block: its memory is nobody's business any more."""
    del _blocks[block.begin]
    _begins.remove(block.begin)


def block_at(address: int) -> Block | None:
    """Return the block that has a byte, alive or not."""
    with LOCK:
        index = bisect.bisect_right(_begins, address) - 1
        block = _blocks[_begins[index]] if index >= 0 else None
    return block if block is not None and address < block.begin + block.capacity + GRAIN_BYTES // 2 else None


def is_device(address: int) -> bool:
    """Say whether memory is the device's."""
    block = block_at(address)
    return block is not None and block.arena is not None


def block_of(access: Access, name: str, serial: int, made: float, place: str) -> Block:
    """Return the block of an access of the device.

    Args:
        access: where it is.
        name: what does it.
        serial: when it was asked for.
        made: when the CUDA graph that does it was made; infinite without one.
        place: who asked.

    Raises:
        Misuse: the memory was nobody's then, ends sooner, or was given out after the graph was made.
    """
    block = block_at(access.low)
    what = (
        f"{name} {'writes' if access.writes else 'reads'} {access.high - access.low} bytes at {access.low:#x}"
    )
    if block is None:
        need(False, f"{what}, which is no memory of the device", place)
    assert block is not None
    life = block.life_at(serial)
    graph = " of a graph that is replayed" if made < math.inf else ""
    need(life is not None, f"{what}{graph}, which was freed before", place)
    assert life is not None
    need(life.born < made, f"{what}{graph}, which was freed, and given out again, after the capture", place)
    offset = access.low - block.begin
    need(
        access.high <= block.begin + life.size,
        f"{what}, out of bounds: at offset {offset} of {life.size} bytes",
        place,
    )
    return block


def accesses_of(array: npt.NDArray[Any], writes: bool) -> list[Access]:
    """Return what an operation touches that reads or writes every element of a NumPy array."""
    if not array.size:
        return []
    low = high = int(array.ctypes.data)
    inner = array.itemsize
    strides: list[tuple[int, int]] = []
    for extent, stride in sorted(zip(array.shape, array.strides, strict=True), key=lambda dim: abs(dim[1])):
        low += min(0, (extent - 1) * stride)
        high += max(0, (extent - 1) * stride)
        if extent > 1 and stride:
            if abs(stride) == inner and not strides:
                inner *= extent
            else:
                strides.append((extent, abs(stride)))
    high += array.itemsize
    if not strides or math.prod(extent for extent, _ in strides) > _MOST_PIECES or OFF:
        return [Access(low, high, writes)]
    begins = np.array([low], np.int64)
    for extent, stride in strides:
        begins = (begins[:, None] + np.arange(extent) * stride).reshape(-1)
    begins.sort()
    return [Access(low, high, writes, (begins, begins + inner))]


def poison(block: Block) -> None:
    """Fill a block with what nobody can take for a result."""
    ctypes.memset(block.begin, POISON, block.capacity)
