"""What the processes of a node know of each other: whose memory is where, and how it may be read."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lowshard.comm.node.arena import PAGE_BYTES, Arena, Block, Mapping, PeerMemory
from lowshard.comm.node.meeting import SEGMENTS
from lowshard.errors import CommError
from lowshard.settings import CROSS_MEMORY

_HEAD_BYTES = PAGE_BYTES


class NodeMemory:
    """This process's arena and those of the other processes of its node, ranks in one order for all of them.

    Attributes:
        rank: this process among those of the node.
        pids: process ids by rank.
        cores: cores that the ranks may run on, together.
        arena: what this process shares.
        reads_across: whether all ranks may read each other's private memory (process_vm_readv).
        maps: `[ranks, SEGMENTS]` int64: where this process sees the others' segments, 0 where it does not yet.
        wanted: int64[1], not 0 when a segment was met that is not mapped yet.
    """

    def __init__(self, rank: int, exchange: Callable[[Any], list[Any]]) -> None:
        """Make the arena, and map those of the others; CommError on all ranks where one of them cannot. Collective.

        `exchange` gives all ranks' values for this rank's, in rank order.
        """
        self.rank = rank
        arena: Arena | None = None
        problem = ""
        try:
            arena = Arena(SEGMENTS)
        except (OSError, MemoryError) as error:
            problem = f"no anonymous file can be made: {error}"
        cores = sorted(os.sched_getaffinity(0))
        rows = exchange((os.getpid(), -1 if arena is None else arena.descriptor, problem, cores))
        _raise_first([row[2] for row in rows])
        assert arena is not None
        self.arena = arena
        self.pids = [int(row[0]) for row in rows]
        self.cores = len({core for row in rows for core in row[3]})
        self._peers: list[PeerMemory | None] = [None] * len(rows)
        word = ctypes.c_int64(4711 + rank)
        try:
            for peer, (pid, descriptor, *_) in enumerate(rows):
                if peer != rank:
                    self._peers[peer] = PeerMemory(int(pid), int(descriptor))
        except (OSError, ValueError) as error:
            problem = f"the memory of process {pid} cannot be mapped: {error}"
        rows = exchange((problem, ctypes.addressof(word)))
        _raise_first([row[0] for row in rows])
        reads = CROSS_MEMORY.choice() != "off" and all(
            _read_word(self.pids[peer], row[1]) == 4711 + peer
            for peer, row in enumerate(rows)
            if peer != rank
        )
        self.reads_across = all(exchange(reads))
        # The word is read by others until the exchange above is over.
        del word
        self.maps = np.zeros((len(rows), SEGMENTS), np.int64)
        self.wanted = np.zeros(1, np.int64)
        self.map_new()
        self._lent: list[tuple[Block, int]] = []

    def map_new(self) -> None:
        """Map what the others have made since."""
        self.wanted[0] = 0
        for row, peer in enumerate(self._peers):
            if peer is not None:
                addresses = [segment.address for segment in peer.segments()]
                self.maps[row, : len(addresses)] = addresses

    def segment(self, member: int, number: int) -> Mapping:
        """Return a member's segment, mapped now if it was not."""
        peer = self._peers[member]
        return self.arena.segments[number] if peer is None else peer.segments()[number]

    def address(self, member: int, segment: int, offset: int) -> int:
        """Return where this process sees a place in a member's segment."""
        return self.segment(member, segment).address + offset

    # ---- blocks that several ranks use, and that go back to the arena when all have let go

    def lend(self, size_bytes: int, users: int) -> Block:
        """Return a block for so many ranks; what they use begins `head_bytes` into it, and is not cleared."""
        self._take_back()
        block = self.arena.allocate(head_bytes(users) + size_bytes)
        ctypes.memset(block.address, 0, 8 * users)
        self._lent.append((block, users))
        return block

    def withdraw(self, block: Block) -> None:
        """Take back at once a lent block that nobody has learned of."""
        self._lent = [(lent, users) for lent, users in self._lent if lent is not block]
        self.arena.free(block)

    def _take_back(self) -> None:
        kept = []
        for block, users in self._lent:
            flags = np.ctypeslib.as_array((ctypes.c_int64 * users).from_address(block.address))
            if flags.all():
                self.arena.free(block)
            else:
                kept.append((block, users))
        self._lent = kept


def _raise_first(problems: Sequence[str]) -> None:
    for rank, problem in enumerate(problems):
        if problem:
            raise CommError(f"the ranks of a node share memory, but on its rank {rank} {problem}")


def head_bytes(users: int) -> int:
    """Return the bytes before what a lent block is for: a word a user."""
    return -(-8 * users // _HEAD_BYTES) * _HEAD_BYTES


def let_go_with(owner: object, address: int, user: int) -> Callable[[], Any]:
    """Mark a lent block as let go by one of its users when an object is gone; returns what does so at once."""
    done = weakref.finalize(owner, _let_go, address + 8 * user, os.getpid())
    done.atexit = False
    return done


def _let_go(address: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has copies of what its parent still uses
        ctypes.c_int64.from_address(address).value = 1


def _read_word(pid: int, address: int) -> int | None:
    """Return an int64 of another process's memory, or None where that is not allowed."""
    call = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    if call is None:
        return None
    word, one = ctypes.c_int64(0), ctypes.c_ulong(1)
    here, there = ((ctypes.c_size_t * 2)(at, 8) for at in (ctypes.addressof(word), address))
    return word.value if call(pid, here, one, there, one, ctypes.c_ulong(0)) == 8 else None
