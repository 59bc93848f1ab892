"""The ranks of one machine as a communicator: shared memory below, compiled calls that meet, move and reduce.

Small payloads go through slots beside the ranks' cards, one meeting a call. Larger ones are read where they lie: in
segments that peers have mapped (`empty`), or in private memory by a system call. Signatures are compared at the
meeting that every call begins with, so the check costs nothing.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpi4py import MPI

from lowshard import dtypes
from lowshard.comm.algorithm import Run
from lowshard.comm.call import Call
from lowshard.comm.mailbox import Mailbox
from lowshard.comm.mpi import run_batch, start_message
from lowshard.comm.node.atomic import FUTEX_CALLS
from lowshard.comm.node.calls import load_calls
from lowshard.comm.node.combine import BLOCK_BYTES, HALVES, NATIVE, OPS, schedule
from lowshard.comm.node.fold import EVERYWHERE, OWN_PART, PART, TO_ROOT, WHOLE, fold_of, scratch_blocks
from lowshard.comm.node.meet import (
    CARD_BYTES,
    CARDS,
    CONTEXT_WORDS,
    DIFFERENT,
    FAILED,
    FAULTY,
    FLAG,
    FUTEX_CALL,
    LATE,
    MAPS,
    ME,
    OK,
    PARTS,
    PIDS,
    SCRATCH,
    SIZE,
    SLOT_BYTES,
    SLOTS,
    SPINS,
    STAMP,
    TIMEOUT_NS,
    YIELDS,
)
from lowshard.comm.node.move import NO_SEGMENT
from lowshard.comm.node.memory import NodeMemory, head_bytes, let_go_with, shared_array
from lowshard.comm.protocol import Communicator
from lowshard.comm.work import Work
from lowshard.errors import CommError

Array = Any

_address = MPI.Get_address  # a tenth of the time that NumPy takes to tell

_SLOT_BYTES = 16 << 10
_FACT = 3
"""Signature of what communicators ask of each other beside the users' calls."""
_STEP = "step"
_SPINS_ALONE, _YIELDS_ALONE = 4000, 200
_SPINS_CROWDED, _YIELDS_CROWDED = 100, 4


@dataclass(frozen=True)
class Place:
    """Where a group's cards and slots lie.

    Attributes:
        memory: of this process and its peers.
        members: the group's ranks as ranks of the node, in the group's order.
        block: address, in this process, of the lent block.
    """

    memory: NodeMemory
    members: tuple[int, ...]
    block: int


class NodeCommunicator(Communicator):
    """Ranks of one machine; each process is one."""

    def __init__(
        self, place: Place, rank: int, mailbox: Mailbox, *, group: str, timeout_s: float | None = None,
        activity: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(rank, len(place.members), group=group, timeout_s=timeout_s, activity=activity)
        self._place, self._mailbox = place, mailbox
        self._calls_of_node = load_calls()
        self._slot_bytes = slot_bytes(self.size)
        self._let_go = let_go_with(self, place.block, rank)
        self._lay_out()

    def _lay_out(self) -> None:
        size, memory = self.size, self._place.memory
        cards = self._place.block + head_bytes(size)
        self._context = np.zeros(CONTEXT_WORDS, np.int64)
        self._pids = np.array([memory.pids[m] for m in self._place.members], np.int64)
        self._parts = np.zeros(size, np.int64)
        self._scratch: np.ndarray | None = None
        self._steps = {order: schedule(size, order) for order in ("tree", "rank")}
        self._steps["fast"] = self._steps["tree"]
        self._steps_at = {order: _address(table) for order, table in self._steps.items()}
        self._table = np.zeros(3 * size, np.int64)
        self._places = np.zeros(size, np.int64)
        crowded = len(memory.pids) > len(os.sched_getaffinity(0))
        words = self._context
        words[SIZE], words[ME], words[CARDS] = size, self.rank, cards
        words[SLOTS], words[SLOT_BYTES] = cards + size * CARD_BYTES, self._slot_bytes
        words[FLAG] = self._mailbox.lookout.flag_address
        words[TIMEOUT_NS] = int(self.timeout_s * 1e9)
        words[SPINS] = _SPINS_CROWDED if crowded else _SPINS_ALONE
        words[YIELDS] = _YIELDS_CROWDED if crowded else _YIELDS_ALONE
        words[FUTEX_CALL] = FUTEX_CALLS.get(os.uname().machine, 0)
        words[PIDS], words[PARTS] = _address(self._pids), _address(self._parts)
        self._generation = -1
        self._map()
        self._ctx = _address(words)

    def _map(self) -> None:
        """Look for segments that the others have made since."""
        memory = self._place.memory
        memory.map_new()
        if memory.generation != self._generation:
            self._generation = memory.generation
            self._maps = memory.table(self._place.members)
            self._context[MAPS] = _address(self._maps)

    @property
    def transport(self) -> str:
        """The transport's name."""
        return "mpi"

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Array:
        """Return an array, not filled, in memory that the other ranks of the node read where it lies."""
        return self._place.memory.arena.array(shape, dtypes.get(dtype).numpy)

    # ---- how calls end

    def _end(self, code: int, text: str) -> None:
        """Raise what a meeting ended with."""
        if code == OK:
            return
        if code == DIFFERENT:
            self._differ(text)
        if code == FAULTY:
            raise CommError(
                f"{text}: the memory of a rank could not be read; set LOWSHARD_CROSS_MEMORY=off to go without"
            )
        self._failed = True
        if code == FAILED:
            raise self._mailbox.lookout.failure()
        assert code == LATE
        raise self._mailbox.lookout.late(text, self._missing(), self.timeout_s)

    def _missing(self) -> list[int]:
        """Return the ranks whose stamps are behind this rank's."""
        cards = int(self._context[CARDS])
        stamps = [int(np.frombuffer(_view(cards + r * CARD_BYTES, 8), np.int64)[0]) for r in range(self.size)]
        return [rank for rank, stamp in enumerate(stamps) if stamp < self._context[STAMP]]

    def _sign(self, call: Call) -> int:
        return 0 if self._check == "off" else call.signature

    def _checked(self, call: Call, run: Run) -> Run:
        """Return a run that compares whole texts first, where that is asked for."""
        if self._check != "full" or self.size == 1 or call.name == _STEP:
            return run

        def compared(*buffers: Any) -> Any:
            self._verify(call)
            return run(*buffers)

        return compared

    # ---- plans of moves

    def _lend(self, buf: Array, size_bytes: int) -> tuple[Any, int, int, int]:
        """Return a buffer that peers can read, its address, and its segment and offset."""
        memory = self._place.memory
        at = _address(buf)
        segment, offset = memory.arena.where(at, size_bytes)
        if segment < 0 and not memory.reads_across and size_bytes:
            staged = memory.arena.array(buf.size, buf.dtype)
            staged[...] = buf.reshape(-1)
            return (staged, *self._lend(staged, size_bytes)[1:])
        return buf, at, segment, offset

    def _meet_new_segments(self) -> None:
        """See to it that all segments are mapped, where private memory cannot be read in their place."""
        if self._place.memory.reads_across:
            self._map()
            return
        self._end(self._calls_of_node.barrier(self._ctx, _FACT), "a step of the transport")
        self._map()
        self._end(self._calls_of_node.barrier(self._ctx, _FACT), "a step of the transport")

    def _pull(
        self, call: Call, send_bytes: int, each: int, first: int, ranks: int, offset: int, most: int
    ) -> Run:
        """Return a run in which this rank takes `each` bytes at `offset` from each of some ranks.

        Args:
            call: the call.
            send_bytes: bytes that this rank shows.
            each: bytes it takes from a rank; 0 for none.
            first: the first rank it takes from.
            ranks: how many.
            offset: where in their buffers.
            most: the largest `send_bytes` of any rank, which decides on the way.
        """
        ctx, signature, calls = self._ctx, self._sign(call), self._calls_of_node
        if most <= self._slot_bytes:
            gather = calls.gather_slots

            def through_slots(send: Array | None, recv: Array | None) -> None:
                code = gather(
                    ctx, signature, 0 if send is None else _address(send), send_bytes,
                    0 if recv is None else _address(recv), first, ranks, offset, each,
                )  # fmt: skip
                if code:
                    self._end(code, call.text)

            return self._checked(call, through_slots)

        def straight(send: Array | None, recv: Array | None) -> None:
            self._meet_new_segments()
            at, segment, place, lent = 0, NO_SEGMENT, 0, None
            if send is not None:
                lent, at, segment, place = self._lend(send, send_bytes)
            code = calls.gather_buffers(
                ctx,
                signature,
                at,
                segment,
                place,
                0 if recv is None else _address(recv),
                first,
                ranks,
                offset,
                each,
            )
            del lent
            if code:
                self._end(code, call.text)

        return self._checked(call, straight)

    def _plan_all_gather(self, call: Call, dtype: Any, elems: int) -> Run:
        if self.size == 1:
            return _copy
        each = elems * dtype.itemsize
        return self._pull(call, each, each, 0, self.size, 0, each)

    def _plan_all_to_all(self, call: Call, dtype: Any, elems: int) -> Run:
        if self.size == 1:
            return _copy
        whole = elems * dtype.itemsize
        each = whole // self.size
        run = self._pull(call, whole, each, 0, self.size, each * self.rank, whole)
        if whole <= self._slot_bytes:
            return run
        return lambda send, recv: run(send.copy() if np.may_share_memory(send, recv) else send, recv)

    def _plan_broadcast(self, call: Call, dtype: Any, elems: int, root: int) -> Run:
        mine, whole = self.rank == root, elems * dtype.itemsize
        run = self._pull(call, whole if mine else 0, 0 if mine else whole, root, 1, 0, whole)
        return (lambda buf: run(buf, None)) if mine else (lambda buf: run(None, buf))

    def _plan_gather(self, call: Call, dtype: Any, elems: int, root: int) -> Run:
        each = elems * dtype.itemsize
        return self._pull(call, each, each if self.rank == root else 0, 0, self.size, 0, each)

    def _plan_scatter(self, call: Call, dtype: Any, elems: int, root: int) -> Run:
        each = elems * dtype.itemsize
        whole = each * self.size
        return self._pull(call, whole if self.rank == root else 0, each, root, 1, each * self.rank, whole)

    def _plan_barrier(self, call: Call) -> Run:
        ctx, signature, barrier = self._ctx, self._sign(call), self._calls_of_node.barrier

        def run() -> None:
            code = barrier(ctx, signature)
            if code:
                self._end(code, call.text)

        return self._checked(call, run)

    def _run_all_gather_v(
        self, call: Call, send: Array, recv: Array, counts: Sequence[int], displs: Sequence[int]
    ) -> None:
        if self._check == "full":
            self._verify(call)
        own = [send.size] * self.size
        self._exchange(self._sign(call), call.text, send, own, [0] * self.size, recv, counts, displs, False)

    def _run_all_to_all_v(
        self, call: Call, send: Array, send_counts: Sequence[int], send_displs: Sequence[int], recv: Array,
        recv_counts: Sequence[int], recv_displs: Sequence[int],
    ) -> None:  # fmt: skip
        if self._check == "full":
            self._verify(call)
        text = call.text
        if self._check != "off":
            text += f" send_counts={list(send_counts)} recv_counts={list(recv_counts)}"
        if np.may_share_memory(send, recv):
            send = send.copy()
        self._exchange(
            self._sign(call), text, send, send_counts, send_displs, recv, recv_counts, recv_displs,
            self._check != "off",
        )  # fmt: skip

    def _exchange(
        self, signature: int, text: str, send: Array, send_counts: Sequence[int], send_displs: Sequence[int],
        recv: Array, recv_counts: Sequence[int], recv_displs: Sequence[int], check: bool,
    ) -> None:  # fmt: skip
        item, table = send.itemsize, self._table
        table[0::3], table[1::3], table[2::3] = send_counts, send_displs, recv_counts
        table *= item
        self._places[:] = recv_displs
        self._places *= item
        self._meet_new_segments()
        lent, at, segment, offset = self._lend(send, send.nbytes)
        code = self._calls_of_node.exchange(
            self._ctx, signature, _address(table), _address(self._places), at, segment, offset, send.nbytes,
            _address(recv), check,
        )  # fmt: skip
        del lent
        self._end(code, text)

    # ---- plans of reductions

    def _fold(self, dtype: Any, op: str) -> Any:
        """Return the compiled reduction of a dtype and an op, or None where there is none."""
        name = dtypes.get(dtype).name
        divides = op == "avg" and dtype.kind not in "iub"
        if name not in (*NATIVE, *HALVES) or not (op in OPS or divides) or self.size == 1:
            return None
        if self._scratch is None:
            self._scratch = np.empty(scratch_blocks(self.size) * BLOCK_BYTES + 64, np.uint8)
            self._context[SCRATCH] = -(-_address(self._scratch) // 64) * 64
        return fold_of(name, "sum" if op == "avg" else op)

    def _plan_all_reduce(self, call: Call, dtype: Any, elems: int, op: str, order: str) -> Run:
        fold = self._fold(dtype, op)
        if fold is None:
            return super()._plan_all_reduce(call, dtype, elems, op, order)
        nbytes = elems * dtype.itemsize
        if nbytes <= self._slot_bytes:
            return self._through_slots(call, fold.slots, nbytes, 0, elems, op, order)
        run = self._straight(call, fold.buffers, elems, EVERYWHERE, 0, op, order)
        if self.size > 2 or not self._place.memory.reads_across:
            return run
        # Two ranks both fold everything: one pass over memory, and nothing to fetch. Not where the result
        # lies over the operand that the other still reads.
        whole = self._straight(call, fold.buffers, elems, WHOLE, 0, op, order)
        return lambda send, recv: (run if np.may_share_memory(send, recv) else whole)(send, recv)

    def _plan_reduce_scatter(self, call: Call, dtype: Any, elems: int, op: str, order: str) -> Run:
        fold = self._fold(dtype, op)
        if fold is None:
            return super()._plan_reduce_scatter(call, dtype, elems, op, order)
        nbytes = elems * dtype.itemsize * self.size
        if nbytes <= self._slot_bytes:
            return self._through_slots(call, fold.slots, nbytes, elems * self.rank, elems, op, order)
        return self._straight(call, fold.buffers, elems, PART, 0, op, order)

    def _plan_reduce(self, call: Call, dtype: Any, elems: int, op: str, root: int, order: str) -> Run:
        fold = self._fold(dtype, op)
        if fold is None:
            return super()._plan_reduce(call, dtype, elems, op, root, order)
        nbytes = elems * dtype.itemsize
        if nbytes <= self._slot_bytes:
            return self._through_slots(
                call, fold.slots, nbytes, 0, elems if self.rank == root else 0, op, order
            )
        return self._straight(call, fold.buffers, elems, TO_ROOT, root, op, order)

    def _through_slots(
        self, call: Call, fold: Any, send_bytes: int, first: int, elems: int, op: str, order: str
    ) -> Run:  # fmt: skip
        ctx, signature, steps = self._ctx, self._sign(call), self._steps_at[order]
        divisor = self.size if op == "avg" else 1

        def run(send: Array, recv: Array | None) -> None:
            code = fold(
                ctx, signature, _address(send), send_bytes, 0 if recv is None else _address(recv), first, elems,
                divisor, steps,
            )  # fmt: skip
            if code:
                self._end(code, call.text)

        return self._checked(call, run)

    def _straight(self, call: Call, fold: Any, elems: int, mode: int, root: int, op: str, order: str) -> Run:
        ctx, signature, steps = self._ctx, self._sign(call), self._steps_at[order]
        divisor = self.size if op == "avg" else 1

        def run(send: Array, recv: Array | None) -> None:
            self._meet_new_segments()
            lent, at, segment, offset = self._lend(send, send.nbytes)
            out, out_at, out_segment, out_offset = recv, 0, NO_SEGMENT, 0
            if recv is not None:
                if mode == EVERYWHERE or mode == TO_ROOT:  # others read or write it
                    out, out_at, out_segment, out_offset = self._lend(recv, recv.nbytes)
                else:
                    out_at = _address(recv)
            code = fold(
                ctx, signature, at, segment, offset, out_at, out_segment, out_offset, elems, mode, root, divisor,
                steps,
            )  # fmt: skip
            del lent
            if code:
                self._end(code, call.text)
            if out is not recv and recv is not None:
                recv[...] = out.reshape(recv.shape)

        return self._checked(call, run)

    # ---- results that the ranks share

    def _common(self, elems: int, dtype: Any) -> Array:
        """Return an array at one place in memory for all ranks; the first rank's arena has it."""
        memory, head = self._place.memory, head_bytes(self.size)
        facts = np.zeros(2, np.int64)
        if self.rank == 0:
            block = memory.lend(elems * dtype.itemsize, self.size)
            facts[:] = block.segment, block.offset
        segment, offset = (int(word) for word in self._gather_facts(facts)[0])
        at = memory.address(self._place.members[0], segment, offset)
        return shared_array(at + head, at, self.rank, elems, dtype)

    def _shared_all_reduce(self, call: Call, send: Array, op: str, order: str) -> Array:
        fold = self._fold(send.dtype, op)
        if fold is None:
            return super()._shared_all_reduce(call, send, op, order)
        self._verify(call)
        result = self._common(send.size, send.dtype)
        self._straight(call, fold.buffers, send.size, OWN_PART, 0, op, order)(send, result)
        return result

    # ---- primitives, for what has no plan of its own

    def _compare(self, signature: int) -> bool:
        code = self._calls_of_node.barrier(self._ctx, signature)
        if code != DIFFERENT:
            self._end(code, "a check")
        return bool(code == OK)

    def _fact(self, send: Array | None, recv: Array | None, *pull: int) -> None:
        call = Call(_STEP, "a step of the transport", 0 if self._check == "off" else _FACT)
        self._pull(call, *pull)(send, recv)

    def _all_gather_v(self, send: Array, recv: Array, counts: Sequence[int], displs: Sequence[int]) -> None:
        dense = all(
            n == counts[0] and d == i * n for i, (n, d) in enumerate(zip(counts, displs, strict=True))
        )
        if dense and len(set(counts)) == 1 and send.nbytes <= self._slot_bytes:
            self._fact(send, recv, send.nbytes, send.nbytes, 0, self.size, 0, send.nbytes)
            return
        own = [send.size] * self.size
        self._exchange(_FACT, "all_gather_v", send, own, [0] * self.size, recv, counts, displs, False)

    def _all_to_all_v(
        self, send: Array, send_counts: Sequence[int], send_displs: Sequence[int], recv: Array,
        recv_counts: Sequence[int], recv_displs: Sequence[int],
    ) -> None:  # fmt: skip
        if np.may_share_memory(send, recv):
            send = send.copy()
        self._exchange(
            _FACT, "all_to_all_v", send, send_counts, send_displs, recv, recv_counts, recv_displs, False
        )

    def _broadcast(self, buf: Array, root: int) -> None:
        call = Call(_STEP, "broadcast", _FACT)
        self._plan_broadcast(call, buf.dtype, buf.size, root)(buf)

    def _gather(self, send: Array, recv: Array | None, root: int) -> None:
        self._plan_gather(Call(_STEP, "gather", _FACT), send.dtype, send.size, root)(send, recv)

    def _scatter(self, send: Array | None, recv: Array, root: int) -> None:
        self._plan_scatter(Call(_STEP, "scatter", _FACT), recv.dtype, recv.size, root)(send, recv)

    def _barrier(self) -> None:
        self._end(self._calls_of_node.barrier(self._ctx, _FACT), "barrier")

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
        return NodeCommunicator(
            Place(memory, members, at), rank, self._mailbox.part(ranks, rank, tag),
            group=f"{self._group_name}/{tag}.{color}", timeout_s=self.timeout_s, activity=self._activity,
        )  # fmt: skip

    def _close(self) -> None:
        self._let_go()


def slot_bytes(size: int) -> int:
    """Return the bytes of a slot in a group of so many ranks: tables of three int64 a rank must fit."""
    needed = 32 * size + 64
    return max(_SLOT_BYTES, -(-needed // 4096) * 4096)


def lend_group(memory: NodeMemory, size: int) -> Any:
    """Return a block for the cards and slots of a group, cards cleared."""
    block = memory.lend(size * (CARD_BYTES + 2 * slot_bytes(size)), size)
    cards = np.frombuffer(_view(block.address + head_bytes(size), size * CARD_BYTES), np.uint8)
    cards[:] = 0
    return block


def _copy(send: Array, recv: Array) -> None:
    if send is not recv:
        recv.reshape(-1)[...] = send.reshape(-1)


def _view(address: int, size_bytes: int) -> Any:
    return (ctypes.c_uint8 * size_bytes).from_address(address)
