"""The ranks of one machine: shared memory below, compiled calls that meet, move and reduce.

Small payloads go through slots beside the ranks' cards, one meeting a call. Larger ones are read where they lie: in
segments that peers have mapped (`empty`), or in private memory by a system call. Signatures are compared at the
meeting that every call begins with, so the check costs nothing. Each plan is a row that compiled code performs.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np

from lowshard import dtypes
from lowshard.comm import check
from lowshard.comm.call import Call
from lowshard.comm.call_comparison import STEP_SIGNATURE, differ_in_counts
from lowshard.comm.mailbox import Mailbox
from lowshard.comm.mpi import ByMailbox
from lowshard.comm.node import call_table as t
from lowshard.comm.node.arena import Block
from lowshard.comm.node.call_runner import STEP, CallRunner, QuickCalls, arrays_are_as_expected
from lowshard.comm.node.calls import load_calls
from lowshard.comm.node.combine import HALVES, NATIVE, OPS, recipe_of
from lowshard.comm.node.fold import EVERYWHERE, OWN_PART, PART, TO_ROOT
from lowshard.comm.node.fold_views import fold_views, may_fold
from lowshard.comm.node.group_block import (
    ALWAYS_SMALL_BYTES,
    GroupContext,
    Place,
    address_of,
    lend_group,
    slot_bytes,
)
from lowshard.comm.node.messages import NodeMailbox
from lowshard.comm.node.node_memory import NodeMemory, head_bytes, let_go_with, shared_array
from lowshard.comm.node.node_reach import NodeReach
from lowshard.comm.node.node_rendezvous import DIFFERENT, OK, UNEQUAL
from lowshard.comm.transport import Planner, Run, Transport
from lowshard.comm.wait_guard import names_of
from lowshard.errors import CommError
from lowshard.settings import CROSS_MEMORY

Array = Any

_AT_ROOT_BYTES = 8 << 20
"""What a root folds alone at most."""
_FEW_GROUPS = 4


class Spans(NamedTuple):
    """Of an exchange, in bytes, with their addresses.

    Attributes:
        table: `[ranks, 3]` int64: sent to a rank, where from, expected from it.
        places: `[ranks]` int64: where to.
        item: bytes of an element.
    """

    table: np.ndarray
    places: np.ndarray
    table_at: int
    places_at: int
    item: int

    def differ(self, over: Transport, text: str) -> NoReturn:
        """Raise what is wrong where a rank sends more or less than its receiver expects."""
        sent, expected = (self.table[:, i] // self.item for i in (0, 2))
        differ_in_counts(over, text, sent.tolist(), expected.tolist())


class NodeTransport(ByMailbox, Transport):
    """Ranks of one machine; each process is one.

    Attributes:
        place: where the cards and slots of the group lie.
        mailbox: messages of the group.
        context: what compiled code works on.
        runner: runs planned calls.
    """

    name = "mpi"

    def __init__(
        self, place: Place, rank: int, mailbox: Mailbox, *, group: str, timeout_s: float | None = None,
        activity: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(rank, len(place.members), group=group, timeout_s=timeout_s, activity=activity)
        self.place, memory, compiled = place, place.memory, load_calls()
        # The same on all ranks, wherever each may run. Who shares a core with others meets seldom.
        self._crowded = len(memory.pids) > max(2, memory.cores)
        self._slot_bytes = slot_bytes(self.size)
        # Ranks that share cores wait longer for each other than a copy takes.
        most = self._slot_bytes - 4096 if self._crowded else 0
        self._small_bytes = max(ALWAYS_SMALL_BYTES, most)
        self._let_go = let_go_with(self, place.block, rank)
        self.context = GroupContext(place, rank, mailbox, self.timeout_s, self._small_bytes)
        self.mailbox = mailbox
        if memory.reads_across:
            self.mailbox = NodeMailbox(mailbox, self.context.words, compiled, memory, self)
        self.runner = CallRunner(self, place, self.mailbox, self.context, compiled)
        if self.size > 1 and arrays_are_as_expected():
            self.quick = QuickCalls(self.runner, self.activity, self.exchange_row)

    def way_between(self, one: int, other: int) -> tuple[str, str]:
        memory = self.place.memory
        if memory.reads_across:
            pipes = " or handed on through pipes" if memory.pipes.table is not None else ""
            private = f"private arrays are read across{pipes}"
        else:
            off = CROSS_MEMORY.choice() == "off"
            why = f"{CROSS_MEMORY.name}=off" if off else "the system lets no process read another's memory"
            private = f"private arrays are copied through slots ({why})"
        return "shared memory", f"they are processes of one node; {private}"

    def empty(self, shape: int | Sequence[int], dtype: Any) -> Array:
        """Return an array, not filled, in memory that the other ranks of the node read where it lies."""
        kind = dtypes.get(dtype).numpy
        return self.place.memory.arena.array(check.extents(shape, kind.itemsize), kind)

    def new_reach(self) -> NodeReach:
        """Return what this rank reaches: all ranks of the group."""
        return NodeReach(self.runner)

    def fold(self, terms: Sequence[Array], out: Array, op: str, divisor: int = 1) -> None:
        """Write the reduction of arrays of any strides into `out`, in tree order; a step of this rank alone."""
        if len(terms) < 2 or not may_fold(out, op, divisor):
            super().fold(terms, out, op, divisor)
        else:
            fold_views(terms, out, op, divisor)

    # ---- primitives, for what has no plan of its own

    def compare(self, signature: int) -> bool:
        code = self.runner.compiled.barrier(self.runner.ctx, signature)
        if code not in (OK, DIFFERENT):
            self.runner.end(code, "the meeting of its ranks")
        return bool(code == OK)

    def all_gather_v(self, send: Array, recv: Array, counts: Sequence[int], displs: Sequence[int]) -> None:
        dense = all(
            n == counts[0] and d == i * n for i, (n, d) in enumerate(zip(counts, displs, strict=True))
        )
        n, signature = send.nbytes, 0 if self.check == "off" else STEP_SIGNATURE
        if dense and len(set(counts)) == 1 and n <= self._small_bytes:
            code = self.runner.compiled.gather_slots(
                self.runner.ctx, signature, address_of(send), n, address_of(recv), 0, self.size, 0, n
            )
            if code:
                self.runner.end(code, "a step of the transport")
            return
        own, zero = [send.size] * self.size, [0] * self.size
        spans = spans_of(send.itemsize, own, zero, counts, displs)
        self._exchange(STEP_SIGNATURE, "all_gather_v", send, recv, spans)

    def all_to_all_v(
        self, send: Array, send_counts: Sequence[int], send_displs: Sequence[int], recv: Array,
        recv_counts: Sequence[int], recv_displs: Sequence[int],
    ) -> None:  # fmt: skip
        spans = spans_of(send.itemsize, send_counts, send_displs, recv_counts, recv_displs)
        self._exchange(STEP_SIGNATURE, "all_to_all_v", send, recv, spans)

    def broadcast(self, buf: Array, root: int) -> None:
        run = self._plan_broadcast(Call(STEP, "broadcast", STEP_SIGNATURE), buf.dtype, buf.size, root)
        run(*((buf, None) if self.rank == root else (None, buf)))

    def gather(self, send: Array, recv: Array | None, root: int) -> None:
        self._plan_gather(Call(STEP, "gather", STEP_SIGNATURE), send.dtype, send.size, root)(send, recv)

    def scatter(self, send: Array | None, recv: Array, root: int) -> None:
        self._plan_scatter(Call(STEP, "scatter", STEP_SIGNATURE), recv.dtype, recv.size, root)(send, recv)

    def barrier(self) -> None:
        code = self.runner.compiled.barrier(self.runner.ctx, STEP_SIGNATURE)
        if code:
            self.runner.end(code, "barrier")

    # ---- plans of moves

    def _pull(
        self, call: Call, send_bytes: int, each: int, first: int, ranks: int, offset: int, most: int,
        in_place: bool = True,
    ) -> Run:  # fmt: skip
        """Return a run in which this rank takes `each` bytes at `offset` from each of some ranks.

        Args:
            call: the call.
            send_bytes: bytes that this rank shows.
            each: bytes it takes from a rank; 0 for none.
            first: the first rank it takes from.
            ranks: how many.
            offset: where in their buffers.
            most: the largest `send_bytes` of any rank, which decides on the way.
            in_place: see `_large`.
        """
        sizes = send_bytes, ranks * each
        if most <= self._small_bytes:
            return self.runner.small(call, t.GATHER_SLOTS, sizes, first, ranks, offset, each)
        return self.runner.large(call, t.GATHER_BUFFERS, sizes, first, ranks, offset, each, in_place=in_place)

    def _plan_all_gather(self, call: Call, dtype: Any, elems: int) -> Run:
        if self.size == 1:
            return _copy
        each = elems * dtype.itemsize
        # Each rank writes its part once and reads the others': half the result stands for what goes through the slots.
        return self._pull(call, each, each, 0, self.size, 0, each * self.size // 2 + 1)

    def _plan_all_to_all(self, call: Call, dtype: Any, elems: int) -> Run:
        if self.size == 1:
            return _copy
        whole = elems * dtype.itemsize
        each = whole // self.size
        return self._pull(call, whole, each, 0, self.size, each * self.rank, whole, in_place=False)

    def _plan_broadcast(self, call: Call, dtype: Any, elems: int, root: int) -> Run:
        mine, whole = self.rank == root, elems * dtype.itemsize
        if whole <= self._small_bytes:
            return self._pull(call, whole if mine else 0, 0 if mine else whole, root, 1, 0, whole)
        return self.runner.large(call, t.SPREAD, (whole if mine else 0, 0 if mine else whole), root)

    def _plan_gather(self, call: Call, dtype: Any, elems: int, root: int) -> Run:
        each = elems * dtype.itemsize
        if each <= self._small_bytes:
            return self._pull(call, each, each if self.rank == root else 0, 0, self.size, 0, each)
        return self.runner.large(
            call, t.COLLECT, (each, each * self.size if self.rank == root else 0), root, each
        )

    def _plan_scatter(self, call: Call, dtype: Any, elems: int, root: int) -> Run:
        each = elems * dtype.itemsize
        whole = each * self.size
        shown = whole if self.rank == root else 0
        # The others wait until the root has shown all of it.
        if whole <= max(ALWAYS_SMALL_BYTES, self._small_bytes // 4):
            return self._pull(call, shown, each, root, 1, each * self.rank, whole)
        return self.runner.large(call, t.DEAL, (shown, each), root, each)

    def _plan_barrier(self, call: Call, dtype: Any, elems: int) -> Run:
        return self.runner.small(call, t.BARRIER, (0, 0))

    def _plan_all_gather_v(
        self, call: Call, dtype: Any, elems: int, counts: Sequence[int], displs: Sequence[int]
    ) -> Run:
        own, zero = [elems] * self.size, [0] * self.size
        spans, signature = spans_of(dtype.itemsize, own, zero, counts, displs), self.runner.sign(call)

        def run(send: Array, recv: Array) -> None:
            if self.check == "full":
                self.verify(call)
            self._exchange(signature, call.text, send, recv, spans)

        return run

    def _plan_all_to_all_v(self, call: Call, dtype: Any, elems: int, *spans: Sequence[int]) -> Run:
        call.prepared = made = spans_of(dtype.itemsize, *spans)
        signature = self.runner.sign(call)

        def run(send: Array, recv: Array) -> None:
            if self.check == "full":
                self.verify(call)
            self._exchange(signature, call.text, send, recv, made, self.check != "off")

        return run

    def _exchange(
        self, signature: int, text: str, send: Array, recv: Array, spans: Spans, check: bool = False
    ) -> None:  # fmt: skip
        memory = self.place.memory
        at, to, size = address_of(send), address_of(recv), send.nbytes
        lent = send
        if at < to + recv.nbytes and to < at + size:
            lent = send.copy()  # what is still to be sent must not be written over
        if not memory.reads_across:
            lent = memory.arena.array(send.size, send.dtype)
            lent[...] = send.reshape(-1)
            self.runner.map_all(signature, text)
        if lent is not send:
            at = address_of(lent)
        code = self.runner.compiled.exchange(
            self.runner.ctx, signature, spans.table_at, spans.places_at, at, size, to, check
        )
        if memory.wanted[0]:
            memory.map_new()
        if code == UNEQUAL:
            spans.differ(self, text)
        if code:
            self.runner.end(code, text)

    def exchange_row(self, call: Call, send: Array, recv: Array) -> np.ndarray | None:
        """Return the row of an exchange that was made before, or None if a row is not all there is to it."""
        if self.check == "full" or not self.place.memory.reads_across:
            return None
        numbers = call.prepared.table_at, call.prepared.places_at, self.check != "off"
        return t.row_of(t.EXCHANGE, self.runner.sign(call), send.nbytes, recv.nbytes, t.APART, *numbers)

    # ---- plans of reductions

    def _recipe(self, dtype: Any, op: str) -> int:
        """Return the address of the recipe of a dtype and an op, or 0 where there is none."""
        name = dtype.name
        divides = op == "avg" and dtype.kind not in "iub"
        if name not in (*NATIVE, *HALVES) or not (op in OPS or divides) or self.size == 1:
            return 0
        return address_of(recipe_of(name, "sum" if op == "avg" else op).words)

    def _plan_all_reduce(self, call: Call, dtype: Any, elems: int, op: str, order: str) -> Run | None:
        recipe = self._recipe(dtype, op)
        if not recipe:
            return None
        nbytes, divisor, steps = elems * dtype.itemsize, self._divisor(op), self.context.steps_at[order]
        if nbytes <= max(ALWAYS_SMALL_BYTES, self._small_bytes // self.size):  # each rank folds it all
            return self.runner.small(call, t.FOLD_SLOTS, (nbytes, nbytes), 0, elems, divisor, steps, recipe)
        return self._straight(call, (nbytes, nbytes), elems, EVERYWHERE, 0, divisor, steps, recipe)

    def _plan_reduce_scatter(self, call: Call, dtype: Any, elems: int, op: str, order: str) -> Run | None:
        recipe = self._recipe(dtype, op)
        if not recipe:
            return None
        part_bytes, divisor, steps = elems * dtype.itemsize, self._divisor(op), self.context.steps_at[order]
        sizes, first = (part_bytes * self.size, part_bytes), elems * self.rank
        if sizes[0] <= self._small_bytes:
            return self.runner.small(call, t.FOLD_SLOTS, sizes, first, elems, divisor, steps, recipe)
        return self._straight(call, sizes, elems, PART, 0, divisor, steps, recipe)

    def _plan_reduce(self, call: Call, dtype: Any, elems: int, op: str, root: int, order: str) -> Run | None:
        recipe = self._recipe(dtype, op)
        if not recipe:
            return None
        nbytes, divisor, steps = elems * dtype.itemsize, self._divisor(op), self.context.steps_at[order]
        mine = elems if self.rank == root else 0
        sizes = nbytes, mine * dtype.itemsize
        if nbytes <= self._small_bytes:
            return self.runner.small(call, t.FOLD_SLOTS, sizes, 0, mine, divisor, steps, recipe)
        # The root alone folds little: the others have shown theirs by then and wait for nothing. It is all there is to
        # do for two ranks, and for many on few cores, which cannot fold side by side, up to where caches end.
        alone = self.size == 2 or self._crowded
        if nbytes <= (_AT_ROOT_BYTES if alone else self._slot_bytes):
            numbers = elems, root, divisor, steps, recipe, self._slot_bytes // dtype.itemsize
            return self.runner.large(call, t.FOLD_AT_ROOT, sizes, *numbers, reaches=False)
        return self._straight(call, sizes, elems, TO_ROOT, root, divisor, steps, recipe)

    def _divisor(self, op: str) -> int:
        return self.size if op == "avg" else 1

    def _straight(self, call: Call, sizes: tuple[int, int], elems: int, mode: int, *numbers: int) -> Run:
        in_turn = mode in (EVERYWHERE, TO_ROOT) and self.place.memory.reads_across
        chunk_elems = self._chunk_elems(sizes[0] // elems) if in_turn else 0
        return self.runner.large(
            call, t.FOLD_BUFFERS, sizes, elems, mode, *numbers, chunk_elems, stages_recv=mode != OWN_PART
        )

    def _chunk_elems(self, item: int) -> int:
        """Return the elements of a chunk that fits a slot together with a rank's part of one."""
        whole = self._slot_bytes // item
        return int(whole * self.size // (self.size + 1) // self.size * self.size)

    # ---- results that the ranks share

    def common(self, elems: int, dtype: Any) -> Array:
        """Return an array at one place in memory for all ranks; the first rank's arena has it."""
        return self._common_checked(elems, dtype, STEP_SIGNATURE, "a step of the transport")

    def _common_checked(self, elems: int, dtype: Any, signature: int, text: str) -> Array:
        """As `common`; ranks compare a signature as they meet."""
        memory, head = self.place.memory, head_bytes(self.size)
        lent = Lent(lambda: memory.lend(elems * dtype.itemsize, self.size)) if self.rank == 0 else Lent(None)
        facts, block = lent.facts, lent.block
        rows = np.empty((self.size, 2), np.int64)
        code = self.runner.compiled.gather_slots(
            self.runner.ctx, signature, address_of(facts), 16, address_of(rows), 0, self.size, 0, 16
        )
        if code:
            if block is not None and code == DIFFERENT:
                memory.withdraw(block)
            self.runner.end(code, text)
        lent.check(rows, memory)
        segment, offset = rows[0].tolist()
        at = memory.address(self.place.members[0], segment, offset)
        return shared_array(at + head, at, self.rank, elems, dtype)

    def _shared_all_gather(self, call: Call, send: Array) -> Array:
        if self.check == "full":
            self.verify(call)
        n = send.size
        result = self._common_checked(n * self.size, send.dtype, self.runner.sign(call), call.text)
        own = result[n * self.rank : n * (self.rank + 1)]
        self.runner.compiled.place(address_of(own), address_of(send), send.nbytes)
        self.barrier()
        return result

    def _shared_all_reduce(self, call: Call, send: Array, op: str, order: str) -> Array | None:
        recipe = self._recipe(send.dtype, op)
        if not recipe:
            return None
        if self.check == "full":
            self.verify(call)
        result = self._common_checked(send.size, send.dtype, self.runner.sign(call), call.text)
        sizes, numbers = (send.nbytes, send.nbytes), (self._divisor(op), self.context.steps_at[order], recipe)
        self._straight(call, sizes, send.size, OWN_PART, 0, *numbers)(send, result)
        return result

    plans: ClassVar[Mapping[str, Planner]] = {
        "all_gather": _plan_all_gather,
        "all_gather_v": _plan_all_gather_v,
        "all_to_all": _plan_all_to_all,
        "all_to_all_v": _plan_all_to_all_v,
        "broadcast": _plan_broadcast,
        "gather": _plan_gather,
        "scatter": _plan_scatter,
        "all_reduce": _plan_all_reduce,
        "reduce_scatter": _plan_reduce_scatter,
        "reduce": _plan_reduce,
        "barrier": _plan_barrier,
    }
    shared_plans: ClassVar[Mapping[str, Planner]] = {
        "all_gather": _shared_all_gather,
        "all_reduce": _shared_all_reduce,
    }

    # ---- groups and life

    def split(self, color: int | None, key: int) -> NodeTransport | None:
        asked = self.gather_facts(
            np.array([-1 if color is None else color, key, self.mailbox.next_tag], np.int64)
        )
        tag = int(asked[:, 2].max())
        ranks = [] if color is None else members_of(asked, color)
        memory = self.place.memory
        _collect_dropped()
        lent = Lent(lambda: lend_group(memory, len(ranks))) if ranks[:1] == [self.rank] else Lent(None)
        places = self.gather_facts(lent.facts)
        lent.check(places, memory)
        self.mailbox.reserve(tag + 1)
        if color is None:
            return None
        members = tuple(self.place.members[r] for r in ranks)
        at = memory.address(members[0], *(int(word) for word in places[ranks[0]]))
        rank = ranks.index(self.rank)
        made = NodeTransport(
            Place(memory, members, at), rank, self.mailbox.part(ranks, rank, tag),
            group=f"{self.group}/{tag}.{color}", timeout_s=self.timeout_s, activity=self.activity,
        )  # fmt: skip
        _split_off.add(made)
        return made

    @property
    def mpi_comm(self) -> Any:
        """The mpi4py communicator that messages go over; a group's is that of the ranks it was split from."""
        return self.mailbox.mpi_comm

    def end(self) -> None:
        super().end()
        self._let_go()
        if self.group == "0" and not self.failed:
            self.mailbox.free()


class Lent:
    """A block that this rank may lend others, who learn with its place whether it could.

    Attributes:
        block: the block; None where it lends none.
        facts: its segment and offset for the others, int64 [2]; -1 where there was no memory.
    """

    def __init__(self, lend: Callable[[], Block] | None) -> None:
        self.block: Block | None = None
        self.facts = np.zeros(2, np.int64)
        self._error: Exception | None = None
        if lend is None:
            return
        try:
            self.block = lend()
            self.facts[:] = self.block.segment, self.block.offset
        except (CommError, MemoryError) as error:
            self._error, self.facts[0] = error, -1

    def check(self, rows: np.ndarray, memory: NodeMemory) -> None:
        """Raise CommError on all ranks where one could not lend; `rows` are the facts of all, `[ranks, 2]`."""
        short = np.flatnonzero(rows[:, 0] < 0).tolist()
        if not short:
            return
        if self.block is not None:
            memory.withdraw(self.block)
        raise CommError(
            f"{names_of(short)} can share no more memory; let go of what empty() and shared=True have returned, and of "
            "communicators"
        ) from self._error


def members_of(asked: np.ndarray, color: int) -> list[int]:
    """Return the ranks that asked for a colour, by key, then rank; a row a rank: its colour, its key."""
    return [rank for _, rank in sorted((int(row[1]), r) for r, row in enumerate(asked) if row[0] == color)]


def spans_of(itemsize: int, *spans: Sequence[int]) -> Spans:
    """Return counts and displacements (sent, received) in bytes, as the compiled exchange takes them."""
    counts, displs, expected, places = (np.array(span, np.int64) * itemsize for span in spans)
    table = np.stack([counts, displs, expected], axis=1)
    return Spans(table, places, address_of(table), address_of(places), itemsize)


def _copy(send: Array, recv: Array) -> None:
    if send is not recv:
        recv.reshape(-1)[...] = send.reshape(-1)


_split_off: weakref.WeakSet[NodeTransport] = weakref.WeakSet()
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
