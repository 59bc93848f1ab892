"""The ranks of one machine: shared memory below, compiled calls that meet, move and reduce.

Small payloads go through slots beside the ranks' cards, one meeting a call. Larger ones are read where they lie: in
segments that peers have mapped (`empty`), or in private memory by a system call; where the system allows none of that,
they go through the slots in chunks. Signatures are compared at the meeting that every call begins with.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from lowshard import dtypes
from lowshard.comm import check
from lowshard.comm.call import Call
from lowshard.comm.call_comparison import STEP_SIGNATURE, compare_texts, differ, differ_in_counts
from lowshard.comm.messages import ByMailbox, Mailbox
from lowshard.comm.node import meeting as m
from lowshard.comm.node.arena import Block
from lowshard.comm.node.combine import HALVES, NATIVE, OPS, recipe_of
from lowshard.comm.node.fold import ALL, EVERYWHERE, NONE, PART, PRIVATE, TO_ROOT
from lowshard.comm.node.fold_views import fold_views, may_fold
from lowshard.comm.node.node_group import NodeGroup, address_of, lend_group
from lowshard.comm.node.node_memory import NodeMemory
from lowshard.comm.reach import Published, Reach
from lowshard.comm.transport import Planner, Run, Transport
from lowshard.comm.wait_guard import names_of
from lowshard.errors import CommError
from lowshard.settings import CROSS_MEMORY

Array = Any

_NOWHERE = 1 << 62
"""In place of how far behind recv an operand may begin: it is copied wherever they overlap."""
SMALL_BYTES = 16 << 10
"""A part of a move that goes through the slots. Larger ones would be two to three times as fast between cores that
share a cache, and as slow between others, which get each line that was just written from afar."""
FOLDED_BY_ALL_BYTES, FOLDED_BY_ROOT_BYTES = 32 << 10, 2 << 20
"""An operand of all_reduce that each rank folds by itself; what the root of reduce folds alone, times the ranks."""
_STEP = "a step of the transport"
_KINDS = ("gather_facts", "all_gather_v", "all_to_all_v", "broadcast", "gather", "scatter", "all_reduce")
_STEPS = {what: Call(_STEP, what, STEP_SIGNATURE) for what in _KINDS}
"""What transports ask of each other beside the users' calls."""


class NodeTransport(ByMailbox, Transport):
    """Ranks of one machine; each process is one.

    Attributes:
        shared: what the ranks share, and the compiled calls work on.
        mailbox: messages of the group.
    """

    name = "mpi"

    def __init__(
        self, memory: NodeMemory, members: Sequence[int], block: int, rank: int, mailbox: Mailbox, *, group: str,
        timeout_s: float | None = None, activity: Any = None,
    ) -> None:  # fmt: skip
        """Make one end of the group of `members` (ranks of the node), to which `lend_group` has lent a block."""
        super().__init__(rank, len(members), group=group, timeout_s=timeout_s, activity=activity)
        self.mailbox = mailbox
        self.shared = NodeGroup(
            memory, members, block, rank, mailbox.lookout, self.timeout_s, mailbox.watched
        )
        self._memory, self._compiled, self._ctx = memory, self.shared.compiled, self.shared.ctx
        self._crosses, self._wanted = memory.reads_across, memory.wanted.data

    def way_between(self, one: int, other: int) -> tuple[str, str]:
        if self._crosses:
            private = "private arrays are read across"
        else:
            off = CROSS_MEMORY.choice() == "off"
            why = f"{CROSS_MEMORY.name}=off" if off else "the system lets no process read another's memory"
            private = f"private arrays are copied through slots ({why})"
        return "shared memory", f"they are processes of one node; {private}"

    def empty(self, shape: int | Sequence[int], dtype: Any) -> Array:
        """Return an array, not filled, in memory that the other ranks of the node read where it lies."""
        kind = dtypes.get(dtype).numpy
        return self._memory.arena.array(check.extents(shape, kind.itemsize), kind)

    def new_reach(self) -> NodeReach:
        """Return what this rank reaches: all ranks of the group."""
        return NodeReach(self)

    def fold(self, terms: Sequence[Array], out: Array, op: str, divisor: int = 1) -> None:
        """Write the reduction of arrays of any strides into `out`, in tree order; a step of this rank alone."""
        if len(terms) < 2 or not may_fold(out, op, divisor):
            super().fold(terms, out, op, divisor)
        else:
            fold_views(terms, out, op, divisor)

    def end_call(self, code: int, text: str) -> None:
        """Do what is left after a compiled call, or raise what it ended with."""
        if self._wanted[0]:
            self._memory.map_new()
        if code == m.OK:
            return
        if code == m.DIFFERENT:
            differ(self, text)
        if code == m.FAULTY:
            raise CommError(
                f"{text}: the memory of a rank could not be read; set {CROSS_MEMORY.name}=off to go without"
            )
        self.failed, shared = True, self.shared
        if code == m.FAILED:
            raise shared.lookout.failure()
        waited_for = int(shared.words[m.MISSING])
        if code == m.LEFT:
            raise shared.lookout.left(shared.watched[waited_for])
        cards, number = int(shared.words[m.CARDS]), int(shared.words[m.NUMBER])
        numbers = [ctypes.c_int64.from_address(cards + i * m.CARD_BYTES).value for i in range(self.size)]
        late = [rank for rank, other in enumerate(numbers) if other < number] or [waited_for]
        names, watched = ([row[rank] for rank in late] for row in (shared.names, shared.watched))
        raise shared.lookout.late(text, names, self.timeout_s, watched)

    def _sign(self, call: Call) -> int:
        """Return what ranks compare as they meet."""
        return 0 if self.check == "off" else call.signature

    def _checked(self, call: Call, run: Run) -> Run:
        """Return a run that compares whole texts first, where that is asked for."""
        if self.check != "full" or self.size == 1 or call.name == _STEP:
            return run

        text = call.text  # a run must not hold the call, which holds it

        def compared(*buffers: Any) -> Any:
            compare_texts(self, text)
            return run(*buffers)

        return compared

    # ---- primitives

    def compare(self, signature: int) -> bool:
        code = self._compiled.barrier(self._ctx, signature)
        if code not in (m.OK, m.DIFFERENT):
            self.end_call(code, "the meeting of its ranks")
        return bool(code == m.OK)

    def all_gather_v(self, send: Array, recv: Array, counts: Sequence[int], displs: Sequence[int]) -> None:
        self._plan_all_gather_v(_STEPS["all_gather_v"], send.dtype, send.size, counts, displs)(send, recv)

    def all_to_all_v(
        self, send: Array, send_counts: Sequence[int], send_displs: Sequence[int], recv: Array,
        recv_counts: Sequence[int], recv_displs: Sequence[int],
    ) -> None:  # fmt: skip
        spans = send_counts, send_displs, recv_counts, recv_displs
        self._plan_all_to_all_v(_STEPS["all_to_all_v"], send.dtype, send.size, *spans)(send, recv)

    def gather_facts(self, record: np.ndarray) -> np.ndarray:
        rows = np.empty((self.size, record.size), record.dtype)
        n = record.nbytes
        if n > SMALL_BYTES:
            self._plan_all_gather(_STEPS["gather_facts"], record.dtype, record.size)(record, rows)
            return rows
        at, to, slots = address_of(record), address_of(rows), self._compiled.move_by_slots
        code = slots(self._ctx, STEP_SIGNATURE, 1, 0, self.size, 0, n, n, at, to)
        if code:
            self.end_call(code, "facts")
        return rows

    def broadcast(self, buf: Array, root: int) -> None:
        run = self._plan_broadcast(_STEPS["broadcast"], buf.dtype, buf.size, root)
        run(*((buf, None) if self.rank == root else (None, buf)))

    def gather(self, send: Array, recv: Array | None, root: int) -> None:
        self._plan_gather(_STEPS["gather"], send.dtype, send.size, root)(send, recv)

    def scatter(self, send: Array | None, recv: Array, root: int) -> None:
        self._plan_scatter(_STEPS["scatter"], recv.dtype, recv.size, root)(send, recv)

    def barrier(self) -> None:
        code = self._compiled.barrier(self._ctx, STEP_SIGNATURE)
        if code:
            self.end_call(code, "barrier")

    # ---- plans of moves

    def _run(
        self, call: Call, send_bytes: int, recv_bytes: int, in_place: int, go: Callable[[int, int], int]
    ) -> Run:
        """Return a run of `go`, a compiled call with all but the addresses of send and recv.

        `in_place` is how many bytes behind recv the operand may begin: where it overlaps otherwise it is copied.
        """
        wanted, text = self._wanted, call.text

        def run(send: Array | None, recv: Array | None) -> None:
            at = 0 if send is None else address_of(send)
            to = at if recv is None else address_of(recv)
            if at < to + recv_bytes and to < at + send_bytes and at - to != in_place:
                assert send is not None
                send = send.copy()
                at = address_of(send)
            code = go(at, to)
            if code or wanted[0]:
                self.end_call(code, text)

        return self._checked(call, run)

    def _is_straight(self, row_bytes: int, rows: int = 1) -> bool:
        """Say whether rows, of which a rank shows so many, are copied from where they lie, not through the slots."""
        return self._crosses and (row_bytes > SMALL_BYTES or rows * row_bytes > self.shared.slot_bytes)

    def _bound(self, call: Call, function: Callable[..., int], *args: int) -> partial[int]:
        """Return a compiled call with all but the addresses of send and recv."""
        return partial(function, self._ctx, self._sign(call), *args)

    def _by_slots(self, call: Call, rows: int, most_rows: int, row_bytes: int, *taken: int) -> partial[int]:
        """Return the move of rows through the slots; `most_rows` is how many any rank shows."""
        # A row that goes in chunks is cut at elements of any dtype.
        chunk = min(row_bytes, self.shared.slot_bytes // most_rows // 64 * 64)
        return self._bound(call, self._compiled.move_by_slots, rows, *taken, row_bytes, chunk)

    def _by_all(self, call: Call, rows: int, row: int, row_bytes: int, in_place: int) -> Run:
        """Return a run in which each rank shows rows and takes one of each other's."""
        send_bytes = rows * row_bytes
        if self._is_straight(row_bytes, rows):
            move = self._bound(call, self._compiled.move, send_bytes, row, row_bytes)
            if rows > 1:
                in_place = _NOWHERE  # what others still read must not be written over
        else:
            move = self._by_slots(call, rows, rows, row_bytes, 0, self.size, row)
        return self._run(call, send_bytes, self.size * row_bytes, in_place, move)

    def _by_root(self, call: Call, rows: int, row_bytes: int, root: int) -> Run:
        """Return a run in which each rank gets one of the root's rows, the same where there is one."""
        stride, shown = row_bytes if rows > 1 else 0, rows if self.rank == root else 0
        if self._is_straight(row_bytes, rows):
            move = self._bound(call, self._compiled.spread, shown * row_bytes, row_bytes, stride, root)
        else:
            row = self.rank if rows > 1 else 0
            move = self._by_slots(call, shown, rows, row_bytes, root, 1, row)
        return self._run(call, shown * row_bytes, row_bytes, -stride * root, move)

    def _plan_all_gather(self, call: Call, dtype: Any, elems: int) -> Run:
        each = elems * dtype.itemsize
        return self._by_all(call, 1, 0, each, each * self.rank)

    def _plan_all_to_all(self, call: Call, dtype: Any, elems: int) -> Run:
        return self._by_all(call, self.size, self.rank, elems * dtype.itemsize // self.size, 0)

    def _plan_gather(self, call: Call, dtype: Any, elems: int, root: int) -> Run:
        each, taken = elems * dtype.itemsize, self.size if self.rank == root else 0
        if self._is_straight(each):
            move = self._bound(call, self._compiled.collect, taken * each, each, root)
        else:
            move = self._by_slots(call, 1, 1, each, 0, taken, 0)
        return self._run(call, each, taken * each, each * root, move)

    def _plan_scatter(self, call: Call, dtype: Any, elems: int, root: int) -> Run:
        return self._by_root(call, self.size, elems * dtype.itemsize, root)

    def _plan_broadcast(self, call: Call, dtype: Any, elems: int, root: int) -> Run:
        return self._by_root(call, 1, elems * dtype.itemsize, root)

    def _plan_barrier(self, call: Call, dtype: Any, elems: int) -> Run:
        text, barrier = call.text, self._bound(call, self._compiled.barrier)

        def run(send: None, recv: None) -> None:
            code = barrier()
            if code:
                self.end_call(code, text)

        return self._checked(call, run)

    def _plan_all_gather_v(self, call: Call, dtype: Any, elems: int, *spans: Sequence[int]) -> Run:
        item, own, zero = dtype.itemsize, [elems] * self.size, [0] * self.size
        return self._exchanged(call, item, spans[1][self.rank] * item, own, zero, *spans)

    def _plan_all_to_all_v(self, call: Call, dtype: Any, elems: int, *spans: Sequence[int]) -> Run:
        return self._exchanged(call, dtype.itemsize, _NOWHERE, *spans)

    def _exchanged(self, call: Call, item: int, in_place: int, *spans: Sequence[int]) -> Run:
        """Return a run in which each rank sends each a part of its own length; spans are those of all_to_all_v.

        An operand that begins `in_place` bytes behind recv is not copied where they overlap.
        """
        sent, begins, expected, places = (np.array(span, np.int64) * item for span in spans)
        table = np.stack([sent, begins, expected], axis=1)
        ctx, wanted, text, signature = self._ctx, self._wanted, call.text, self._sign(call)
        exchange = self._compiled.exchange

        def run(send: Array, recv: Array) -> None:
            at, to, size_bytes = address_of(send), address_of(recv), send.nbytes
            if at < to + recv.nbytes and to < at + size_bytes and at - to != in_place:
                send = send.copy()
                at = address_of(send)
            tables = address_of(table), address_of(places)
            code = exchange(ctx, signature, *tables, at, size_bytes, to, SMALL_BYTES, self._crosses)
            if code == m.UNEQUAL:
                differ_in_counts(self, text, spans[0], spans[2])
            if code or wanted[0]:
                self.end_call(code, text)

        return self._checked(call, run)

    # ---- plans of reductions

    def _plan_all_reduce(self, call: Call, dtype: Any, elems: int, op: str, order: str) -> Run | None:
        nbytes = elems * dtype.itemsize
        if nbytes <= FOLDED_BY_ALL_BYTES:
            return self._folded_from_slots(call, dtype, elems, op, order)
        # Private arrays come faster by chunks in the slots, which stay in a cache, than read where they lie.
        slots = PRIVATE if self._crosses else ALL
        return self._folded(call, dtype, elems, op, order, EVERYWHERE, slots)

    def _plan_reduce_scatter(self, call: Call, dtype: Any, elems: int, op: str, order: str) -> Run | None:
        if self._crosses and self.size * elems * dtype.itemsize > self.shared.slot_bytes:
            return self._folded(call, dtype, elems, op, order, PART)
        return self._folded_from_slots(call, dtype, elems, op, order, self.size, self.rank, self.size)

    def _plan_reduce(self, call: Call, dtype: Any, elems: int, op: str, root: int, order: str) -> Run | None:
        others_bytes = (self.size - 1) * elems * dtype.itemsize
        if self._crosses and self.size * others_bytes > FOLDED_BY_ROOT_BYTES:
            return self._folded(call, dtype, elems, op, order, TO_ROOT, PRIVATE, root)
        row = 0 if self.rank == root else -1
        return self._folded_from_slots(call, dtype, elems, op, order, -row, row)

    def _how(self, dtype: Any, op: str, order: str) -> tuple[int, int, int] | None:
        """Return what folds take last: a divisor, the addresses of steps and of a recipe; None where there is none."""
        divides = op == "avg" and dtype.kind not in "iub"
        if dtype.name not in (*NATIVE, *HALVES) or not (op in OPS or divides) or self.size == 1:
            return None
        recipe = recipe_of(dtype.name, "sum" if divides else op)
        return self.size if divides else 1, self.shared.steps_at[order], address_of(recipe.words)

    def _folded_from_slots(
        self, call: Call, dtype: Any, elems: int, op: str, order: str, shown: int = 1, row: int = 0, rows: int = 1
    ) -> Run | None:  # fmt: skip
        """Return a run in which a rank shows some rows of its operand, and folds one of all ranks', or none (-1)."""
        how, each = self._how(dtype, op, order), elems * dtype.itemsize
        if not how:
            return None
        chunk = max(1, min(elems, self.shared.slot_bytes // (rows * dtype.itemsize)))
        go = self._bound(call, self._compiled.fold_by_slots, shown, row, elems, chunk, *how)
        return self._run(call, rows * each, each if row >= 0 else 0, -row * each, go)

    def _folded(
        self, call: Call, dtype: Any, elems: int, op: str, order: str, mode: int, slots: int = NONE, root: int = 0
    ) -> Run | None:  # fmt: skip
        """Return a run in which each rank folds a part of the operands where they lie, or in `slots`."""
        how, each = self._how(dtype, op, order), elems * dtype.itemsize
        if not how:
            return None
        rows, row = (self.size, self.rank) if mode == PART else (1, 0)
        chunk = self.shared.slot_bytes // dtype.itemsize if slots != NONE else elems
        go = self._bound(call, self._compiled.fold, rows, elems, chunk, mode, slots, root, *how)
        gets = mode != TO_ROOT or self.rank == root
        return self._run(call, rows * each, each if gets else 0, -row * each, go)

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

    # ---- groups and life

    def _lent(self, lend: Callable[[], Block] | None) -> list[list[int]]:
        """Return segment and offset of what each rank lends, if it does."""
        lent = Lent(self._memory, lend)
        return lent.checked(self.gather_facts(np.array(lent.facts, np.int64)).tolist())

    def split(self, color: int | None, key: int) -> NodeTransport | None:
        row = [-1 if color is None else color, key, self.mailbox.post.next_group]
        asked = self.gather_facts(np.array(row, np.int64))
        number = int(asked[:, 2].max())
        ranks = [] if color is None else members_of(asked, color)
        lend = partial(lend_group, self._memory, len(ranks)) if ranks[:1] == [self.rank] else None
        places = self._lent(lend)
        self.mailbox.reserve(number + 1)
        if color is None:
            return None
        members = [self.shared.members[r] for r in ranks]
        at, rank = self._memory.address(members[0], *places[ranks[0]]), ranks.index(self.rank)
        return NodeTransport(
            self._memory, members, at, rank, self.mailbox.part(ranks, rank, number),
            group=f"{self.group}/{number}.{color}", timeout_s=self.timeout_s, activity=self.activity,
        )  # fmt: skip

    def end(self) -> None:
        super().end()
        self.shared.let_go()
        if self.group == "0" and not self.failed:
            self.mailbox.free()


class NodeReach(Reach):
    """The ranks of one machine: all of a communicator's, or those of this host in a communicator over several."""

    def __init__(self, over: NodeTransport, homes: Sequence[int] | None = None, home: int = 0) -> None:
        homes = (home,) * over.size if homes is None else tuple(homes)
        super().__init__(over.rank, len(homes))
        self.homes, self.peers = homes, tuple(rank for rank, other in enumerate(homes) if other == home)
        self._over, self._memory = over, over.shared.memory
        self.crosses, self.word = bool(self._memory.reads_across), over.shared.word
        self._members = dict(zip(self.peers, over.shared.members, strict=True))

    def maps(self, array: Array) -> bool:
        """Say whether an array lies in memory that the peers map."""
        return self._memory.arena.where(address_of(array), array.nbytes)[0] >= 0

    def publish(self, arrays: Sequence[Array | None], note: int = 0) -> Published:
        """Tell where arrays lie, in one meeting; see `Reach.publish`."""
        arena, row = self._memory.arena, [note]
        for array in arrays:
            if array is None or not array.nbytes:
                row += (-1, 0, 0, 0)
            else:
                at = address_of(array)
                row += (*arena.where(at, array.nbytes), at, array.nbytes)
        rows = self._over.gather_facts(np.array(row, np.int64))
        return _Rows(self._memory, self._members, rows.tolist())

    def barrier(self) -> None:
        """Return once all peers have come."""
        self._over.barrier()

    def pid(self, rank: int) -> int:
        """Return the process of a peer."""
        return int(self._memory.pids[self._members[rank]])


class _Rows(Published):
    """A row a peer: its note; then of each array segment and offset, address and bytes."""

    def __init__(self, memory: NodeMemory, members: Mapping[int, int], rows: list[list[int]]) -> None:
        self._memory, self._members, self._rows = memory, members, dict(zip(members, rows, strict=True))
        self.notes = {rank: row[0] for rank, row in self._rows.items()}

    def view(self, rank: int, index: int = 0) -> np.ndarray | None:
        segment, offset, _, size_bytes = self._rows[rank][1 + 4 * index : 5 + 4 * index]
        if segment < 0:
            return None
        return self._memory.segment(self._members[rank], segment).bytes[offset : offset + size_bytes]

    def address(self, rank: int, index: int = 0) -> int:
        return self._rows[rank][3 + 4 * index]


class Lent:
    """A block that this rank may lend others, who learn with its place whether it could.

    Attributes:
        facts: segment and offset of the block; a segment of -1 where there was no memory.
    """

    def __init__(self, memory: NodeMemory, lend: Callable[[], Block] | None) -> None:
        self._memory, self._block, self.facts = memory, None, [0, 0]
        self._error: Exception | None = None
        if lend is None:
            return
        try:
            self._block = block = lend()
            self.facts = [block.segment, block.offset]
        except (CommError, MemoryError) as error:
            self._error, self.facts = error, [-1, 0]

    def checked(self, rows: list[list[int]]) -> list[list[int]]:
        """Return the facts of all ranks; CommError on all of them where one could not lend."""
        short = [rank for rank, row in enumerate(rows) if row[0] < 0]
        if short and self._block is not None:
            self._memory.withdraw(self._block)
        if short:
            raise CommError(
                f"{names_of(short)} can share no more memory; let go of what empty() has returned, and of "
                "communicators"
            ) from self._error
        return rows


def members_of(asked: np.ndarray, color: int) -> list[int]:
    """Return the ranks that asked for a colour, by key, then rank; a row a rank: its colour, its key."""
    return [rank for _, rank in sorted((int(row[1]), r) for r, row in enumerate(asked) if row[0] == color)]
