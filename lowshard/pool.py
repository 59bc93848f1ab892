"""A pool of result buffers: reused pages, which are already mapped.

A new result of 64 to 256 MB takes two to four times as long to fill as a reused one. A buffer returns to the pool when
nothing refers to its array any more. If ranks of a node share memory, results are allocated where the others can read
them, so that their next move takes one pass.
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
    """A pool of arrays whose memory is reused.

    Args:
        comm: the communicator that uses the buffers. On a GPU its library has a pool, which this one uses.
        limit_bytes: most idle memory; more is freed. None keeps all.
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
        """Bytes of idle memory."""
        self._take_back()
        return self._idle_bytes

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Array:
        """Return an uninitialised array. Not collective.

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
    """Return a block of uint8 as a new object, given back when nothing refers to that any more.

    Views, memoryviews, DLPack capsules and what other libraries make of them all refer to it. `give_back` runs in
    whatever thread drops the last reference, at any point: it may take no lock.
    """
    handle = _Handle(block)
    weakref.finalize(handle, give_back, block).atexit = False
    return np.asarray(handle)


class _Handle:
    """Arrays made of it keep it alive, and it does not keep the block."""

    def __init__(self, block: Array) -> None:
        self.__array_interface__ = block.__array_interface__
