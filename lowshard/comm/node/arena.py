"""Memory that the processes of a node share: segments that each process makes, and that its peers map.

A segment is an anonymous file (memfd), which a peer opens through /proc. It has no name that could be left behind and
does not count against the size of /dev/shm. The first page of a process's first segment lists its segments.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowshard.errors import CommError

PAGE_BYTES = 4096
ALIGN_BYTES = 64
_UNIT_BYTES = 2 << 20
"""Segments have an odd number of these. Equal places of segments that are mapped side by side, a sum's operands, would
lie a power of two apart: AMD's caches find lines by a hash of address bits 12 to 27 and hold one of those at a time."""
_FIRST_BYTES, _NEXT_BYTES = 33 * _UNIT_BYTES, 129 * _UNIT_BYTES


@dataclass(frozen=True)
class Block:
    """A piece of a segment of this process.

    Attributes:
        segment: number of the segment.
        offset: bytes from its beginning.
        size_bytes: length.
        address: where this process sees it.
    """

    segment: int
    offset: int
    size_bytes: int
    address: int


class Mapping:
    """A file mapped whole; it stays mapped while this object or an array over it lives."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.memory = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED)
        self.bytes = np.frombuffer(self.memory, np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self.size_bytes = size_bytes


class Arena:
    """What this process shares: memory given out in blocks, out of segments that are made as needed.

    Blocks come back when the arrays over them are gone; segments stay for the process's life, and only the
    pages that were written take memory.
    """

    def __init__(self, segments: int) -> None:
        """Make the first segment."""
        self._most = segments
        self._lock = threading.RLock()
        self.segments: list[Mapping] = []
        self._free: list[list[tuple[int, int]]] = []  # by segment: (offset, bytes), in order, never adjacent
        self.table = np.zeros(1 + 2 * segments, np.int64)
        """How many segments there are, then address and size of each."""
        self._returned: deque[Block] = deque()  # by finalizers, which run anywhere and take no lock
        self.descriptor = self._add_segment(_FIRST_BYTES)
        """The file descriptor of the first segment."""
        self.allocate(PAGE_BYTES)  # the list of all is the first block

    def allocate(self, size_bytes: int) -> Block:
        """Return a block of at least so many bytes, 64-byte aligned, with whatever it held before."""
        size = max(ALIGN_BYTES, -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES)
        if size >= PAGE_BYTES:
            size = -(-size // PAGE_BYTES) * PAGE_BYTES
        with self._lock:
            self._take_back()
            for number, free in enumerate(self._free):
                for i, (offset, length) in enumerate(free):
                    # Whole pages lie on pages, so that copies run at full speed.
                    at = -(-offset // PAGE_BYTES) * PAGE_BYTES if size >= PAGE_BYTES else offset
                    if at + size > offset + length:
                        continue
                    left = [(offset, at - offset), (at + size, offset + length - at - size)]
                    free[i : i + 1] = [piece for piece in left if piece[1]]
                    return Block(number, at, size, self.segments[number].address + at)
            self._add_segment(max(_NEXT_BYTES, size))
            return self.allocate(size_bytes)

    def free(self, block: Block) -> None:
        """Give a block back; may be called from any thread at any time."""
        self._returned.append(block)

    def array(self, shape: int | Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
        """Return an array in this memory; its block comes back when nothing refers to it any more."""
        dims = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(map(int, shape))
        count = math.prod(dims)
        block = self.allocate(count * dtype.itemsize)
        owner = (ctypes.c_uint8 * block.size_bytes).from_address(block.address)
        weakref.finalize(owner, self.free, block).atexit = False
        whole: np.ndarray = np.ctypeslib.as_array(owner)[: count * dtype.itemsize]
        return whole.view(dtype).reshape(dims)

    def where(self, address: int, size_bytes: int) -> tuple[int, int]:
        """Return the segment and offset of memory of this process, or -1 and 0 if it lies in none."""
        for number, segment in enumerate(self.segments):
            offset = address - segment.address
            if offset >= 0 and offset + size_bytes <= segment.size_bytes:
                return number, offset
        return -1, 0

    def _take_back(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            free = self._free[block.segment]
            free.append((block.offset, block.size_bytes))
            free.sort()
            merged: list[tuple[int, int]] = []
            for offset, length in free:
                if merged and merged[-1][0] + merged[-1][1] == offset:
                    merged[-1] = (merged[-1][0], merged[-1][1] + length)
                else:
                    merged.append((offset, length))
            self._free[block.segment] = merged

    def _add_segment(self, size_bytes: int) -> int:
        if len(self.segments) == self._most:
            raise CommError(
                f"a rank shares at most {self._most} segments of memory; free arrays of empty(), or make larger ones"
            )
        size = (-(-size_bytes // _UNIT_BYTES) | 1) * _UNIT_BYTES
        fd = os.memfd_create("lowshard", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            mapping = Mapping(fd, size)
        except (OSError, ValueError, OverflowError) as error:
            os.close(fd)
            raise MemoryError(f"no {size:,} bytes of shared memory can be had: {error}") from error
        self.segments.append(mapping)
        self._free.append([(0, size)])
        number = len(self.segments)
        self.table[2 * number - 1 : 2 * number + 1] = mapping.address, size
        self.table[0] = number
        words = self.segments[0].bytes[:PAGE_BYTES].view(np.int64)
        words[2 * number - 1 : 2 * number + 1] = fd, size
        words[0] = number  # last: who sees the number sees the entry
        return fd


class PeerMemory:
    """Another process's segments, mapped here as they are met."""

    def __init__(self, pid: int, descriptor: int) -> None:
        """Map the first segment."""
        self._pid = pid
        self._segments = [self._map(descriptor, _FIRST_BYTES)]
        self._words = self._segments[0].bytes[:PAGE_BYTES].view(np.int64)

    def segments(self) -> list[Mapping]:
        """Return all segments that the other process has made, mapped here now."""
        for number in range(len(self._segments), int(self._words[0])):
            fd, size = self._words[1 + 2 * number : 3 + 2 * number].tolist()
            try:
                self._segments.append(self._map(fd, size))
            except OSError as error:
                raise CommError(f"the memory of process {self._pid} cannot be mapped: {error}") from error
        return self._segments

    def _map(self, descriptor: int, size_bytes: int) -> Mapping:
        fd = os.open(f"/proc/{self._pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return Mapping(fd, size_bytes)
        finally:
            os.close(fd)
