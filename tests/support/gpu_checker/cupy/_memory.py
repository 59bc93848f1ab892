"""Memory that operations of the device touch: which bytes are whose, since when, and what touched them last.

Blocks of the device come from a pool that has an arena for each stream, as CuPy's: what is freed goes to the next that
takes as much on that stream, at once, whatever other streams still do with it. A page-locked part of the host's memory
is a block too, for as long as it is locked.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict, deque
from typing import Any, NamedTuple

import numpy as np

from cupy.checker import LOCK, count, need

GRAIN_BYTES = 512
_MOST_PIECES = 4096  # of a strided array: above, the gaps count as touched too
_LIVES = 8  # of a block that are remembered
serials = itertools.count(1)
"""Numbers everything that happens in the process: an operation may touch what lived when it was asked for."""


class Access(NamedTuple):
    """Bytes that an operation reads or writes: from `low` to `high`, or pieces: first addresses and ends, ascending."""

    low: int
    high: int
    writes: bool
    pieces: Any = None

    def crosses(self, other: Access) -> bool:
        if self.high <= other.low or other.high <= self.low:
            return False
        if self.pieces is None and other.pieces is None:
            return True
        sides = [one.pieces or (np.array([one.low]), np.array([one.high])) for one in (self, other)]
        (begins, ends), (begins_2, ends_2) = sides
        first = np.searchsorted(ends, begins_2, side="right")  # the first that ends behind each beginning
        inside = first < len(begins)
        return bool((begins[first[inside]] < ends_2[inside]).any())

    def covers(self, other: Access) -> bool:
        return self.pieces is None and self.low <= other.low and other.high <= self.high


class Block:
    """Memory that is handed out whole."""

    def __init__(self, begin: int, capacity: int, arena: Any = None, raw: Any = None) -> None:
        self.begin, self.capacity, self.arena, self._raw = begin, capacity, arena, raw
        self.lives: deque[list[float]] = deque(maxlen=_LIVES)
        """When it became somebody's, and nobody's, and how much of it was used."""
        self.records: list[tuple[Access, Any]] = []
        """What touched it, and the operations that did; see `_streams`."""
        blocks[begin] = self
        bisect.insort(_begins, begin)

    def begin_life(self, size: int) -> Block:
        self.lives.append([next(serials), math.inf, size])
        return self


blocks: dict[int, Block] = {}
_begins: list[int] = []
_unused: defaultdict[tuple[Any, int], list[Block]] = defaultdict(list)


def allocate(size: int, arena: Any) -> Block:
    capacity = max(1, -(-size // GRAIN_BYTES)) * GRAIN_BYTES
    with LOCK:
        count("allocations")
        if _unused[arena, capacity]:
            return _unused[arena, capacity].pop().begin_life(size)
        raw = np.empty(capacity + 2 * GRAIN_BYTES, np.uint8)  # there is room behind it: no two blocks touch
        begin = int(raw.ctypes.data) + -int(raw.ctypes.data) % GRAIN_BYTES
        return Block(begin, capacity, arena, raw).begin_life(size)


def release(block: Block) -> None:
    with LOCK:
        block.lives[-1][1] = next(serials)
        _unused[block.arena, block.capacity].append(block)


def forget(block: Block) -> None:
    del blocks[block.begin]
    _begins.remove(block.begin)


def block_at(address: int) -> Block | None:
    with LOCK:
        index = bisect.bisect_right(_begins, address) - 1
        block = blocks[_begins[index]] if index >= 0 else None
    return block if block is not None and address < block.begin + block.capacity + GRAIN_BYTES // 2 else None


def is_device(address: int) -> bool:
    block = block_at(address)
    return block is not None and block.arena is not None


def block_of(access: Access, name: str, place: str, serial: int, made: float = math.inf) -> Block:
    """Return the block of an access that was asked for at some time, by a CUDA graph that was made at another.

    Raises:
        Misuse: the memory was nobody's then, ends sooner, or was given out after the graph was made.
    """
    block = block_at(access.low)
    verb = "writes" if access.writes else "reads"
    what = f"{name} {verb} {access.high - access.low} bytes at {access.low:#x}"
    need(block is not None, f"{what}, which is no memory of the device", place)
    assert block is not None
    sizes = [size for born, died, size in block.lives if born < min(serial, made) and serial < died]
    is_long_ago = len(block.lives) == _LIVES and serial < block.lives[0][0]
    graph = " of a graph that is replayed" if made < math.inf else ""
    need(bool(sizes) or is_long_ago, f"{what}{graph}, which was freed before", place)
    size, offset = (sizes or [block.capacity])[0], access.low - block.begin
    is_inside = access.high <= block.begin + size
    need(is_inside, f"{what}, out of bounds: at offset {offset} of {size} bytes", place)
    return block


def accesses_of(array: np.ndarray[Any, Any], writes: bool) -> list[Access]:
    """Return what an operation touches that reads or writes every element of a NumPy array."""
    if not array.size:
        return []
    dims = [(extent, stride) for extent, stride in zip(array.shape, array.strides, strict=True) if extent > 1]
    ends = [(extent - 1) * stride for extent, stride in dims]
    low = int(array.ctypes.data) + sum(min(0, end) for end in ends)
    high, inner, gaps = low + sum(map(abs, ends)) + array.itemsize, array.itemsize, list[tuple[int, int]]()
    for stride, extent in sorted((abs(stride), extent) for extent, stride in dims if stride):
        if stride == inner and not gaps:
            inner *= extent
        else:
            gaps.append((extent, stride))
    if not gaps or math.prod(extent for extent, _ in gaps) > _MOST_PIECES:
        return [Access(low, high, writes)]
    begins = np.array([low], np.int64)
    for extent, stride in gaps:
        begins = (begins[:, None] + np.arange(extent) * stride).reshape(-1)
    begins.sort()
    return [Access(low, high, writes, (begins, begins + inner))]
