"""The ranks of one machine as a communicator: shared memory below, compiled calls that meet, move and reduce.

Small payloads go through slots beside the ranks' cards, one meeting a call. Larger ones are read where they lie: in
segments that peers have mapped (`empty`), or in private memory by a system call. Signatures are compared at the
meeting that every call begins with, so the check costs nothing.
"""

from __future__ import annotations

import ctypes
import gc
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.comm import check
from lowshard.comm.call import Call
from lowshard.comm.mailbox import Mailbox
from lowshard.comm.mpi import run_batch, start_message
from lowshard.comm.node.atomic import FUTEX_CALLS
from lowshard.comm.node.call_runner import FACT, STEP, Place, address_of
from lowshard.comm.node.calls import load_calls
from lowshard.comm.node.combine import schedule
from lowshard.comm.node.copy_choice import CLASSES, ROW_WORDS
from lowshard.comm.node.fold_views import fold_views, may_fold
from lowshard.comm.node.line_vectors import LINE_BYTES
from lowshard.comm.node.message_rings import ENTRY_HEAD_BYTES, HEAD_BYTES
from lowshard.comm.node.messages import NodeMailbox
from lowshard.comm.node.node_memory import NodeMemory, head_bytes, let_go_with
from lowshard.comm.node.node_plan import ALWAYS_SMALL_BYTES
from lowshard.comm.node.node_reach import NodeReach
from lowshard.comm.node.node_rendezvous import (
    CARD_BYTES,
    CARDS,
    CHOICES,
    CONTEXT_WORDS,
    DIFFERENT,
    ENTRIES,
    ENTRY_BYTES,
    FLAG,
    FLOWS,
    FUTEX_CALL,
    GONE,
    HEADS,
    MAPS,
    ME,
    MEMBERS,
    OK,
    OWN,
    PARTS,
    PIDS,
    PIPES,
    PROGRESS,
    RING_ENTRIES,
    SIZE,
    SLOT_BYTES,
    SLOTS,
    SMALL_BYTES,
    SPINS,
    TIMEOUT_NS,
    TURNS,
    WANTED,
    WATCHED,
    YIELDS,
)  # fmt: skip
from lowshard.comm.node.pipe import FLOW_WORDS
from lowshard.comm.node.quick_calls import QuickCalls
from lowshard.comm.progress import progress_address
from lowshard.comm.protocol import Communicator
from lowshard.comm.work import Work

Array = Any

_SLOT_BYTES = (256 << 10) + 4096
_GROUP_BYTES = 8 * _SLOT_BYTES
"""Of a slot, at most, with room for a table; of all ranks' slots of one turn."""
_RINGS_BYTES, _CONTENT_BYTES = 4 << 20, 2048
"""Of all rings of a group, about; of the content of an entry, at most."""
_FEW_GROUPS = 4
_SPINS_ALONE, _YIELDS_ALONE = 4000, 200
_SPINS_CROWDED, _YIELDS_CROWDED = 50, 50


class NodeCommunicator(QuickCalls):
    """Ranks of one machine; each process is one."""

    def __init__(
        self, place: Place, rank: int, mailbox: Mailbox, *, group: str, timeout_s: float | None = None,
        activity: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(rank, len(place.members), group=group, timeout_s=timeout_s, activity=activity)
        self._place, self._mailbox = place, mailbox
        self._compiled = load_calls()
        # The same on all ranks, wherever each may run. Who shares a core with others meets seldom.
        self._crowded = len(place.memory.pids) > max(2, place.memory.cores)
        self._slot_bytes = slot_bytes(self.size)
        # Ranks that share cores wait longer for each other than a copy takes.
        most = self._slot_bytes - 4096 if self._crowded else 0
        self._small_bytes = max(ALWAYS_SMALL_BYTES, most)
        self._let_go = let_go_with(self, place.block, rank)
        self._lay_out()
        if place.memory.reads_across:
            self._mailbox = NodeMailbox(mailbox, self._context, self._compiled, place.memory, self)
        self._open_table()

    def _lay_out(self) -> None:
        size, memory = self.size, self._place.memory
        cards = self._place.block + head_bytes(size)
        self._context = np.zeros(CONTEXT_WORDS, np.int64)
        self._pids = np.array([memory.pids[m] for m in self._place.members], np.int64)
        self._parts = np.zeros(2 * size, np.int64)
        self._scratch: np.ndarray | None = None
        self._steps = {order: schedule(size, order) for order in ("tree", "rank")}
        self._steps["fast"] = self._steps["tree"]
        self._steps_at = {order: address_of(table) for order, table in self._steps.items()}
        crowded = len(memory.pids) > memory.cores
        words = self._context
        words[SIZE], words[ME], words[CARDS] = size, self.rank, cards
        words[SLOTS], words[SLOT_BYTES] = cards + size * CARD_BYTES, self._slot_bytes
        words[FLAG] = self._mailbox.lookout.flag_address
        self._watched = np.array(self._mailbox.watched, np.int64)
        words[GONE], words[WATCHED] = self._mailbox.lookout.gone_address, address_of(self._watched)
        words[SMALL_BYTES] = self._small_bytes
        words[RING_ENTRIES], words[ENTRY_BYTES] = ring_of(size)
        words[HEADS] = words[SLOTS] + TURNS * size * self._slot_bytes
        words[ENTRIES] = words[HEADS] + size * size * HEAD_BYTES
        self._choices = np.zeros(CLASSES * ROW_WORDS, np.int64)
        words[CHOICES] = address_of(self._choices)
        if memory.pipes.table is not None:
            words[PIPES] = address_of(memory.pipes.table)
        self._flows = np.zeros((size, FLOW_WORDS), np.int64)
        words[FLOWS] = address_of(self._flows)
        words[PROGRESS] = progress_address()
        words[TIMEOUT_NS] = int(self.timeout_s * 1e9)
        words[SPINS] = _SPINS_CROWDED if crowded else _SPINS_ALONE
        words[YIELDS] = _YIELDS_CROWDED if crowded else _YIELDS_ALONE
        words[FUTEX_CALL] = FUTEX_CALLS.get(os.uname().machine, 0)
        words[PIDS], words[PARTS] = address_of(self._pids), address_of(self._parts)
        self._members = np.array(self._place.members, np.int64)
        words[MEMBERS], words[MAPS] = address_of(self._members), address_of(memory.maps)
        words[OWN], words[WANTED] = address_of(memory.arena.table), address_of(memory.wanted)
        self._ctx = address_of(words)

    @property
    def transport(self) -> str:
        """The transport's name."""
        return "mpi"

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Array:
        """Return an array, not filled, in memory that the other ranks of the node read where it lies."""
        kind = dtypes.get(dtype).numpy
        return self._place.memory.arena.array(check.extents(shape, kind.itemsize), kind)

    def _new_reach(self) -> NodeReach:
        return NodeReach(self)

    def fold(self, terms: Sequence[Array], out: Array, op: str, divisor: int = 1) -> None:
        """Write the reduction of arrays of any strides into `out`, in tree order; a step of this rank alone."""
        if len(terms) < 2 or not may_fold(out, op, divisor):
            super().fold(terms, out, op, divisor)
        else:
            fold_views(terms, out, op, divisor)

    # ---- primitives, for what has no plan of its own

    def _compare(self, signature: int) -> bool:
        code = self._compiled.barrier(self._ctx, signature)
        if code != DIFFERENT:
            self._end(code, "a check")
        return bool(code == OK)

    def _fact(self, send: Array | None, recv: Array | None, *pull: Any) -> None:
        call = Call(STEP, "a step of the transport", 0 if self._check == "off" else FACT)
        self._pull(call, *pull)(send, recv)

    def _all_gather_v(self, send: Array, recv: Array, counts: Sequence[int], displs: Sequence[int]) -> None:
        dense = all(
            n == counts[0] and d == i * n for i, (n, d) in enumerate(zip(counts, displs, strict=True))
        )
        if dense and len(set(counts)) == 1 and send.nbytes <= self._small_bytes:
            self._fact(send, recv, send.nbytes, send.nbytes, 0, self.size, 0, send.nbytes)
            return
        own, zero = [send.size] * self.size, [0] * self.size
        self._exchange(FACT, "all_gather_v", send, recv, self._spans(send, own, zero, counts, displs))

    def _all_to_all_v(
        self, send: Array, send_counts: Sequence[int], send_displs: Sequence[int], recv: Array,
        recv_counts: Sequence[int], recv_displs: Sequence[int],
    ) -> None:  # fmt: skip
        spans = self._spans(send, send_counts, send_displs, recv_counts, recv_displs)
        self._exchange(FACT, "all_to_all_v", send, recv, spans)

    def _broadcast(self, buf: Array, root: int) -> None:
        call = Call(STEP, "broadcast", FACT)
        self._plan_broadcast(call, buf.dtype, buf.size, root)(buf)

    def _gather(self, send: Array, recv: Array | None, root: int) -> None:
        self._plan_gather(Call(STEP, "gather", FACT), send.dtype, send.size, root)(send, recv)

    def _scatter(self, send: Array | None, recv: Array, root: int) -> None:
        self._plan_scatter(Call(STEP, "scatter", FACT), recv.dtype, recv.size, root)(send, recv)

    def _barrier(self) -> None:
        self._end(self._compiled.barrier(self._ctx, FACT), "barrier")

    def _send(self, buf: Array, dst: int) -> None:
        self._mailbox.send(buf, dst)

    def _recv(self, buf: Array, src: int) -> None:
        self._mailbox.recv(buf, src)

    def _start_message(self, name: str, buf: Array, peer: int) -> Work:
        return start_message(self, self._mailbox, name, buf, peer)

    def _run_batch(self, batch: Sequence[tuple[Call, Array, int]]) -> None:
        run_batch(self._mailbox, batch)

    # ---- groups and life

    def _split(self, color: int | None, key: int) -> Communicator | None:
        asked = self._gather_facts(
            np.array([-1 if color is None else color, key, self._mailbox.next_tag], np.int64)
        )
        tag = int(asked[:, 2].max())
        chosen = sorted((int(k), r) for r, (c, k, _) in enumerate(asked) if c == color)
        ranks = [r for _, r in chosen] if color is not None else []
        memory = self._place.memory
        _collect_dropped()
        facts = np.zeros(2, np.int64)
        if ranks and ranks[0] == self.rank:
            block = lend_group(memory, len(ranks))
            facts[:] = block.segment, block.offset
        places = self._gather_facts(facts)
        self._mailbox.reserve(tag + 1)
        if color is None:
            return None
        members = tuple(self._place.members[r] for r in ranks)
        at = memory.address(members[0], *(int(word) for word in places[ranks[0]]))
        rank = ranks.index(self.rank)
        made = NodeCommunicator(
            Place(memory, members, at), rank, self._mailbox.part(ranks, rank, tag),
            group=f"{self._group_name}/{tag}.{color}", timeout_s=self.timeout_s, activity=self._activity,
        )  # fmt: skip
        _split_off.add(made)
        return made

    @property
    def mpi_comm(self) -> Any:
        """The mpi4py communicator that messages go over; a group's is that of the ranks it was split from."""
        return self._mailbox.mpi_comm

    def _close(self) -> None:
        self._close_table()
        if isinstance(self._mailbox, NodeMailbox):
            self._mailbox.drop_all(self)
        self._let_go()
        if self._group_name == "0" and not self._failed:
            self._mailbox.free()


_split_off: weakref.WeakSet[NodeCommunicator] = weakref.WeakSet()
_collect_from = _FEW_GROUPS


def _collect_dropped() -> None:
    """Let go of groups that nobody holds, and that were not closed, whenever there are half as many as are in use.

    What a group knows of its calls refers to it, so it goes with Python's next collection of cycles. That may take
    long, and each group holds megabytes that all of its ranks have to let go of.
    """
    global _collect_from
    if len(_split_off) >= _collect_from:
        gc.collect()
        _collect_from = len(_split_off) * 3 // 2 + _FEW_GROUPS


def slot_bytes(size: int) -> int:
    """Return the bytes of a slot in a group of so many ranks: small payloads and tables of three int64 a rank fit."""
    needed = max(ALWAYS_SMALL_BYTES, 32 * size + 64)
    return max(min(_SLOT_BYTES, _GROUP_BYTES // size // 4096 * 4096), -(-needed // 4096) * 4096)


def lend_group(memory: NodeMemory, size: int) -> Any:
    """Return a block for the cards, slots and rings of a group; cards and counters are cleared."""
    entries, entry_bytes = ring_of(size)
    cards, slots, heads = size * CARD_BYTES, TURNS * size * slot_bytes(size), size * size * HEAD_BYTES
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
