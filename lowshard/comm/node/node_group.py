"""What the ranks of a group share on a node: cards and slots, the words compiled code finds them by, how calls end."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from lowshard.comm.node import meeting as m
from lowshard.comm.node.arena import Block
from lowshard.comm.node.calls import load_calls
from lowshard.comm.node.combine import BLOCK_BYTES, schedule
from lowshard.comm.node.fold import scratch_blocks
from lowshard.comm.node.node_memory import NodeMemory, head_bytes, let_go_with
from lowshard.comm.progress import progress_words
from lowshard.comm.wait_guard import Lookout

address_of = MPI.Get_address  # a tenth of the time that NumPy takes to tell

_SLOT_BYTES, _SLOTS_BYTES = 1 << 20, 32 << 20
"""Of a slot, and of all of a group, at most."""
_PIECE_BYTES, _PIECES_BYTES = 1 << 20, 4 << 20
"""What a reduction reads of an operand at a time, and of all operands, at most."""
_SPINS = 2000


class NodeGroup:
    """A group of ranks of one node.

    Attributes:
        memory: of the processes of the node.
        members: the ranks, as ranks of the node, in the group's order.
        rank: this one.
        size: of the group.
        slot_bytes: what goes through a slot at one meeting.
        words: what compiled code works on, and `ctx` their address; `lowshard.comm.node.meeting` says which is what.
        steps_at: by order, the address of the steps of a fold.
        watched: the ranks as ranks of the side channel.
        names: the ranks as errors name them.
        word: `Reach.word`.
    """

    def __init__(
        self, memory: NodeMemory, members: Sequence[int], block: int, rank: int, lookout: Lookout, timeout_s: float,
        watched: Sequence[int]
    ) -> None:  # fmt: skip
        self.memory, self.members, self.rank, self.size = memory, tuple(members), rank, len(members)
        self.lookout, self.timeout_s, self.watched = lookout, timeout_s, list(watched)
        self.names = list(range(self.size))
        self.compiled, self.slot_bytes = load_calls(), slot_bytes(self.size)
        size, piece = self.size, max(64 << 10, min(_PIECE_BYTES, _PIECES_BYTES // self.size // 4096 * 4096))
        self._steps = {order: schedule(size, order) for order in ("tree", "rank")}
        self.steps_at = {order: address_of(table) for order, table in self._steps.items()}
        self.steps_at["fast"] = self.steps_at["tree"]
        scratch_bytes = scratch_blocks.py_func(size) * BLOCK_BYTES + (size + 1) * piece
        # Pages of its own, which come with the first fold and go with the group; the heap would keep some.
        self._scratch = np.frombuffer(mmap.mmap(-1, scratch_bytes), np.uint8)
        self._progress = progress_words()
        self._rows = np.array([[memory.pids[i] for i in members], members, watched], np.int64)
        self._parts, self.words = np.zeros(2 * size, np.int64), np.zeros(m.CONTEXT_WORDS, np.int64)
        words, cards = self.words, block + head_bytes(size)
        words[m.SIZE], words[m.ME], words[m.CARDS] = size, rank, cards
        words[m.SLOTS], words[m.SLOT_BYTES] = cards + _cards_bytes(size), self.slot_bytes
        words[m.FLAG], words[m.GONE] = lookout.flag_address, lookout.gone_address
        words[m.TIMEOUT_NS] = int(timeout_s * 1e9)
        words[m.SPINS] = 0 if len(memory.pids) > memory.cores else _SPINS
        words[m.PROGRESS] = 0 if self._progress is None else address_of(self._progress)
        words[m.PIDS], words[m.MEMBERS], words[m.WATCHED] = map(address_of, self._rows)
        words[m.MAPS], words[m.OWN] = address_of(memory.maps), address_of(memory.arena.table)
        words[m.WANTED], words[m.PARTS] = address_of(memory.wanted), address_of(self._parts)
        words[m.SCRATCH], words[m.PIECE_BYTES] = address_of(self._scratch), piece
        self.ctx = address_of(words)
        self.word = np.ctypeslib.as_array(ctypes.c_int64.from_address(cards + m.WORD)).reshape(1)
        self.let_go = let_go_with(self, block, rank)


def slot_bytes(size: int) -> int:
    """Return the bytes of a slot in a group of so many ranks: three int64 a rank and a small payload fit."""
    most = max(64 << 10, min(_SLOT_BYTES, _SLOTS_BYTES // (2 * size)))
    return -(-(most + 32 * size) // 4096) * 4096


def _cards_bytes(size: int) -> int:
    return -(-size * m.CARD_BYTES // 4096) * 4096


def lend_group(memory: NodeMemory, size: int) -> Block:
    """Return a block for the cards and slots of a group; cards are cleared."""
    block = memory.lend(_cards_bytes(size) + 2 * size * slot_bytes(size), size)
    ctypes.memset(block.address + head_bytes(size), 0, _cards_bytes(size))
    return block
