"""The pipes between the processes of a node, as `lowshard.comm.node.pipe` takes them."""

from __future__ import annotations

import ctypes
import fcntl
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from lowshard.comm.node.pipe import PIPE_BYTES, PIPE_WORDS
from lowshard.settings import PIPES

MOST_RANKS = 8
"""A pipe to each other rank, of 256 pages: a user without privileges may have about 64 (`man 7 pipe`)."""


class PipeSet:
    """A pipe from each process of a node to each other, or none at all.

    Attributes:
        table: `[ranks, PIPE_WORDS]` int64 of this process; None where there are no pipes.
    """

    def __init__(
        self, rank: int, pids: Sequence[int], exchange: Callable[[Any], list[Any]], wanted: bool
    ) -> None:
        """Make the pipes of this process, and open those of the others.

        Collective: all ranks of the node call this.

        Args:
            rank: this rank.
            pids: process ids by rank.
            exchange: gives all ranks' values for this rank's, in rank order; collective.
            wanted: the same on all ranks.
        """
        size = len(pids)
        self.table: np.ndarray | None = None
        self._descriptors: list[int] = []
        self._close = weakref.finalize(self, _close_all, self._descriptors, os.getpid())
        self._close.atexit = False
        if not wanted or not 1 < size <= MOST_RANKS:
            return
        table = np.full((size, PIPE_WORDS), -1, np.int64)
        table[:, 2] = 0
        ends, well = [-1] * size, PIPES.choice() != "off"
        try:
            for peer in range(size):
                if well and peer != rank:
                    ends[peer], table[peer, 0] = self._make()
        except OSError:
            well = False
        rows = exchange((well, ends))
        well = all(row[0] for row in rows)
        try:
            for peer, pid in enumerate(pids):
                if well and peer != rank:
                    table[peer, 1] = os.open(
                        f"/proc/{pid}/fd/{rows[peer][1][rank]}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
                    )
                    self._descriptors.append(int(table[peer, 1]))
        except OSError:
            well = False
        if all(exchange(well)):
            self.table = table
        else:
            self._close()

    def _make(self) -> tuple[int, int]:
        """Return the ends of a new pipe: to read from, to write to. Both stay open here, so that none is ever broken.

        Raises:
            OSError: it cannot be had, is too small, or takes no pages.
        """
        ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._descriptors.extend(ends)
        if fcntl.fcntl(ends[0], fcntl.F_SETPIPE_SZ, PIPE_BYTES) < PIPE_BYTES or not _takes_pages(*ends):
            raise OSError("a pipe that takes no pages")
        return ends


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _takes_pages(out_of: int, into: int) -> bool:
    """Say whether a few bytes can be handed on through an empty pipe."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "vmsplice", None)
    if call is None:
        return False
    call.restype = ctypes.c_ssize_t
    call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_uint)
    content = ctypes.create_string_buffer(b"4711", 4)
    return (
        bool(call(into, ctypes.byref(_Vector(ctypes.addressof(content), 4)), 1, 0) == 4)
        and os.read(out_of, 4) == b"4711"
    )


def _close_all(descriptors: list[int], pid: int) -> None:
    if os.getpid() != pid:  # a forked child's descriptors are its own, but so is its end
        return
    while descriptors:
        with suppress(OSError):
            os.close(descriptors.pop())
