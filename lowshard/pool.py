"""Warm memory for results: pages that were touched before, in place of new ones that the system clears first.

A fresh result of 64 to 256 MB takes two to four times as long to fill as a warm one. Memory of a pool comes back to it
when nothing refers to the array any more, and where ranks of a node share memory, results lie where the others can
read them, so that the next move of them takes one pass.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.argument import whole
from lowshard.comm import check
from lowshard.comm.agreement import control_of
from lowshard.comm.communicator import Communicator
from lowshard.errors import BufferMismatchError

Array = Any

_STEP_BYTES = 1 << 20
_SMALL_BYTES = 64 << 10  # below, a new array is warm already


class BufferPool:
    """Gives out arrays and takes their memory back when they are gone.

    Args:
        comm: whose buffers they are. On a GPU its library keeps a pool of its own, and this one passes on to it.
        limit_bytes: idle memory kept at most; what comes back beyond that is let go. None keeps all.
    """

    def __init__(self, comm: Communicator, limit_bytes: int | None = None) -> None:
        control_of(comm)  # which says what a communicator is
        if limit_bytes is not None:
            rule = "a pool keeps 0 bytes or more, or None for no limit"
            limit_bytes = whole(limit_bytes, rule, BufferMismatchError, 0)
        self._comm, self._limit = comm, limit_bytes
        self._free: dict[int, list[Array]] = {}
        self._idle_bytes = 0
        self._returned: deque[Array] = deque()  # by finalizers, which run anywhere and take no lock

    def __repr__(self) -> str:
        limit = "no limit" if self._limit is None else f"at most {self._limit:,}"
        return f"<BufferPool: {self.idle_bytes:,} bytes idle, {limit}>"

    @property
    def idle_bytes(self) -> int:
        """Bytes that wait to be used again."""
        self._take_back()
        return self._idle_bytes

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Array:
        """Return an array, not filled. Not collective.

        Raises:
            DTypeError: a dtype outside the table.
            BufferMismatchError: an invalid shape.
        """
        kind = dtypes.get(dtype).numpy
        extents = check.extents(shape, kind.itemsize)
        size_bytes = math.prod(extents) * kind.itemsize
        if self._comm.xp is not np:
            return self._comm.xp.empty(extents, dtypes.get(dtype).in_memory(self._comm.xp))
        if size_bytes < _SMALL_BYTES:
            return np.empty(extents, kind)
        block = self._block(-(-size_bytes // _STEP_BYTES) * _STEP_BYTES)
        whole = _lent(block, self._returned.append)
        return whole[:size_bytes].view(kind).reshape(extents)

    def _block(self, size_bytes: int) -> Array:
        self._take_back()
        waiting = self._free.get(size_bytes)
        if waiting:
            self._idle_bytes -= size_bytes
            return waiting.pop()
        return self._comm.empty(size_bytes, "uint8")

    def _take_back(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            if self._limit is None or self._idle_bytes + block.nbytes <= self._limit:
                self._free.setdefault(block.nbytes, []).append(block)
                self._idle_bytes += block.nbytes


def _lent(block: Array, give_back: Callable[[Array], object]) -> Array:
    """Return a block of uint8 under another identity, given back when nothing refers to that any more.

    Views, memoryviews, DLPack capsules and what other libraries make of them all refer to it. `give_back` runs in
    whatever thread drops the last reference, amid anything: it may take no lock.
    """
    handle = _Handle(block)
    weakref.finalize(handle, give_back, block).atexit = False
    return np.asarray(handle)


class _Handle:
    """Arrays made of it keep it alive, and it does not keep the block."""

    def __init__(self, block: Array) -> None:
        self.__array_interface__ = block.__array_interface__
