"""Memory of large results that are gone, kept warm for a second for the next ones.

Pages that a process gets from the system are cleared first, one fault each: a new result of 64 MB takes two to three
times as long to fill as one whose pages were touched before. Who writes `out = redistribute(...)` in a loop would pay
for it each time.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

Block = npt.NDArray[np.uint8]

FROM_BYTES = 1 << 20
"""Smaller arrays are warm by themselves: the C library keeps what is freed."""
KEEP_S = 1.0
"""Memory that was not used for so long goes back to the system."""
_STEP_BYTES = 1 << 20
_MOST_BYTES = 256 << 20
_LINE_BYTES = 64


def lent(block: Block, give_back: Callable[[Block], object]) -> Block:
    """Return a block under another identity, and have it given back when nothing refers to that any more.

    Views, memoryviews, DLPack capsules and what other libraries make of them all refer to it.

    Args:
        block: of uint8; nobody else uses it meanwhile.
        give_back: runs in whatever thread drops the last reference, amid anything: it may take no lock.
    """
    handle = _Handle(block)
    weakref.finalize(handle, give_back, block).atexit = False
    whole: Block = np.asarray(handle)
    return whole


class _Handle:
    """Arrays made of it keep it alive, and it does not keep the block."""

    def __init__(self, block: Block) -> None:
        self.__array_interface__ = block.__array_interface__


class WarmMemory:
    """Lends memory and keeps what comes back, up to a bound and for a time.

    Args:
        limit_bytes: most that waits to be lent again.
        keep_s: how long it waits, up to a quarter more.
    """

    def __init__(self, limit_bytes: int, keep_s: float = KEEP_S) -> None:
        self._limit_bytes, self._keep_s = limit_bytes, keep_s
        self._begin()
        os.register_at_fork(after_in_child=self._begin)  # threads and locks are left behind

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[tuple[float, Block]]] = {}
        self._idle_bytes = 0
        self._returned: deque[tuple[float, Block]] = deque()
        self._wake: SimpleQueue[None] = SimpleQueue()  # whose put may be called amid anything
        self._is_awake = self._has_thread = False

    @property
    def idle_bytes(self) -> int:
        """Bytes that wait to be lent again."""
        with self._lock:
            self._take_back()
            return self._idle_bytes

    def lend(self, size_bytes: int) -> Block:
        """Return uint8 `[size_bytes]` that begins on a cache line, not filled."""
        room_bytes = -(-(size_bytes + _LINE_BYTES) // _STEP_BYTES) * _STEP_BYTES
        block = self._waiting(room_bytes)
        if block is None:
            block = self._new(room_bytes)
        start = -block.__array_interface__["data"][0] % _LINE_BYTES
        return lent(block, self._came_back)[start : start + size_bytes]

    def _waiting(self, size_bytes: int) -> Block | None:
        """Return a block that waits, None where there is none or the lock is held.

        It may be held by this very thread, which is collecting garbage amid what it does under it.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._let_go, name="lowshard-memory", daemon=True).start()
            self._take_back()
            fitting = self._free.get(size_bytes)
            if not fitting:
                return None
            self._idle_bytes -= size_bytes
            return fitting.pop()[1]  # the latest, which is the warmest
        finally:
            self._lock.release()

    def _new(self, size_bytes: int) -> Block:
        try:
            return np.empty(size_bytes, np.uint8)
        except MemoryError:
            if self._lock.acquire(blocking=False):
                try:
                    self._free.clear()
                    self._idle_bytes = 0
                finally:
                    self._lock.release()
            return np.empty(size_bytes, np.uint8)

    def _came_back(self, block: Block) -> None:
        self._returned.append((time.monotonic(), block))
        if not self._is_awake:
            self._wake.put(None)

    def _take_back(self) -> None:
        """Have what came back wait, as far as the bound goes; the rest is freed."""
        while self._returned:
            since_s, block = self._returned.popleft()
            if self._idle_bytes + block.nbytes <= self._limit_bytes:
                self._free.setdefault(block.nbytes, []).append((since_s, block))
                self._idle_bytes += block.nbytes

    def _let_go(self) -> None:
        """Free what has waited too long; the thread sleeps while nothing waits."""
        returned, wake, lock = self._returned, self._wake, self._lock
        while True:
            wake.get()
            self._is_awake = True
            while returned or self._idle_bytes:
                time.sleep(self._keep_s / 4)
                with lock:
                    self._take_back()
                    old = self._older_than(time.monotonic() - self._keep_s)
                del old  # not under the lock: it takes milliseconds
            self._is_awake = False
            if returned:  # what came back just before woke nobody
                wake.put(None)

    def _older_than(self, since_s: float) -> list[Block]:
        old: list[Block] = []
        for size_bytes in list(self._free):
            kept = [pair for pair in self._free[size_bytes] if pair[0] > since_s]
            gone = [block for at_s, block in self._free[size_bytes] if at_s <= since_s]
            old += gone
            self._idle_bytes -= size_bytes * len(gone)
            if kept:
                self._free[size_bytes] = kept
            else:
                del self._free[size_bytes]
        return old


def _limit_bytes() -> int:
    """Return a bound that many ranks on a machine do not exhaust it by."""
    return min(_MOST_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 64)


_memory = WarmMemory(_limit_bytes())


def warm_array(
    shape: tuple[int, ...], dtype: np.dtype[np.generic], size_bytes: int
) -> npt.NDArray[np.generic]:
    """Return a new C-contiguous array of FROM_BYTES or more on a cache line, not filled."""
    return _memory.lend(size_bytes).view(dtype).reshape(shape)


def idle_bytes() -> int:
    """Return how many bytes of results that are gone this process keeps for the next ones."""
    return _memory.idle_bytes
