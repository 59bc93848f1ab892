"""What the ranks of a group share, and the words that compiled code finds it by."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from lowshard.comm.mailbox import Mailbox
from lowshard.comm.node import node_rendezvous as w
from lowshard.comm.node.atomic import FUTEX_CALLS
from lowshard.comm.node.combine import BLOCK_BYTES, schedule
from lowshard.comm.node.fold import scratch_blocks
from lowshard.comm.node.line_vectors import LINE_BYTES
from lowshard.comm.node.message_rings import ENTRY_HEAD_BYTES, HEAD_BYTES
from lowshard.comm.node.node_memory import NodeMemory, head_bytes
from lowshard.comm.node.pipe import FLOW_WORDS
from lowshard.comm.progress import progress_words

address_of = MPI.Get_address  # a tenth of the time that NumPy takes to tell

ALWAYS_SMALL_BYTES = 8 << 10
"""What goes through the slots whole, at one meeting. Up to 32 KiB would be faster between cores that share a cache, and
two to three times as slow between others, which get each line that was just written from afar."""
_SLOT_BYTES = (256 << 10) + 4096
_GROUP_BYTES = 8 * _SLOT_BYTES
"""Of a slot, at most, with room for a table; of all ranks' slots of one turn."""
_RINGS_BYTES, _CONTENT_BYTES = 4 << 20, 2048
"""Of all rings of a group, about; of the content of an entry, at most."""
_PIPES_FROM_BYTES, _NEVER = 16 << 10, 1 << 40
_SPINS_ALONE, _YIELDS_ALONE = 4000, 200
_SPINS_CROWDED, _YIELDS_CROWDED = 50, 50


@dataclass(frozen=True)
class Place:
    """Where a group's cards and slots lie."""

    memory: NodeMemory
    members: tuple[int, ...]  # as ranks of the node, in the group's order
    block: int  # address, in this process, of the lent block


class GroupContext:
    """The words that compiled code works on in one group, and the arrays that they point to.

    Attributes:
        words: int64; `lowshard.comm.node.node_rendezvous` says which is what.
        address: of the words.
        steps_at: by order, the address of the steps of a fold.
        scratch: memory of folds; its pages come with the first.
    """

    def __init__(self, place: Place, rank: int, mailbox: Mailbox, timeout_s: float, small_bytes: int) -> None:
        size, memory = len(place.members), place.memory
        cards = place.block + head_bytes(size)
        self.words = np.zeros(w.CONTEXT_WORDS, np.int64)
        self._pids = np.array([memory.pids[m] for m in place.members], np.int64)
        self._parts = np.zeros(2 * size, np.int64)
        self.scratch = np.empty(scratch_blocks.py_func(size) * BLOCK_BYTES + 64, np.uint8)
        self._steps = {order: schedule(size, order) for order in ("tree", "rank")}
        self._steps["fast"] = self._steps["tree"]
        self.steps_at = {order: address_of(table) for order, table in self._steps.items()}
        crowded = len(memory.pids) > memory.cores
        words = self.words
        words[w.SIZE], words[w.ME], words[w.CARDS] = size, rank, cards
        words[w.SLOTS], words[w.SLOT_BYTES] = cards + size * w.CARD_BYTES, slot_bytes(size)
        words[w.FLAG] = mailbox.lookout.flag_address
        self._watched = np.array(mailbox.watched, np.int64)
        words[w.GONE], words[w.WATCHED] = mailbox.lookout.gone_address, address_of(self._watched)
        words[w.SMALL_BYTES] = small_bytes
        words[w.RING_ENTRIES], words[w.ENTRY_BYTES] = ring_of(size)
        words[w.HEADS] = words[w.SLOTS] + w.TURNS * size * slot_bytes(size)
        words[w.ENTRIES] = words[w.HEADS] + size * size * HEAD_BYTES
        # Ranks that share a core share its caches too.
        words[w.SHARE_PAST] = _NEVER if crowded else memory.cached_result_bytes
        words[w.LAST_CACHE], words[w.PIPES_FROM] = memory.cached_result_bytes, _PIPES_FROM_BYTES
        if memory.pipes.table is not None:
            words[w.PIPES] = address_of(memory.pipes.table)
        self._flows = np.zeros((size, FLOW_WORDS), np.int64)
        words[w.FLOWS] = address_of(self._flows)
        self._progress = progress_words()
        words[w.PROGRESS] = 0 if self._progress is None else address_of(self._progress)
        words[w.TIMEOUT_NS] = int(timeout_s * 1e9)
        words[w.SPINS] = _SPINS_CROWDED if crowded else _SPINS_ALONE
        words[w.YIELDS] = _YIELDS_CROWDED if crowded else _YIELDS_ALONE
        words[w.FUTEX_CALL] = FUTEX_CALLS.get(os.uname().machine, 0)
        words[w.SCRATCH] = -(-address_of(self.scratch) // 64) * 64
        words[w.PIDS], words[w.PARTS] = address_of(self._pids), address_of(self._parts)
        self._members = np.array(place.members, np.int64)
        words[w.MEMBERS], words[w.MAPS] = address_of(self._members), address_of(memory.maps)
        words[w.OWN], words[w.WANTED] = address_of(memory.arena.table), address_of(memory.wanted)
        self.address = address_of(words)


def slot_bytes(size: int) -> int:
    """Return the bytes of a slot in a group of so many ranks: small payloads and tables of three int64 a rank fit."""
    needed = max(ALWAYS_SMALL_BYTES, 32 * size + 64)
    return max(min(_SLOT_BYTES, _GROUP_BYTES // size // 4096 * 4096), -(-needed // 4096) * 4096)


def lend_group(memory: NodeMemory, size: int) -> Any:
    """Return a block for the cards, slots and rings of a group; cards and counters are cleared."""
    entries, entry_bytes = ring_of(size)
    cards, slots, heads = size * w.CARD_BYTES, w.TURNS * size * slot_bytes(size), size * size * HEAD_BYTES
    block = memory.lend(cards + slots + heads + size * size * entries * entry_bytes, size)
    begin = block.address + head_bytes(size)
    ctypes.memset(begin, 0, cards)
    ctypes.memset(begin + cards + slots, 0, heads)
    return block


def ring_of(size: int) -> tuple[int, int]:
    """Return the entries of a ring in a group of so many ranks, and the bytes of one."""
    entries = 32 if size <= 16 else 8
    content = _RINGS_BYTES // (size * size * entries) // LINE_BYTES * LINE_BYTES
    return entries, ENTRY_HEAD_BYTES + min(max(content, 3 * LINE_BYTES), _CONTENT_BYTES)
