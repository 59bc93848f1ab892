"""How the ranks of a node run each collective: as rows that compiled code performs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from lowshard import dtypes
from lowshard.comm.call import Call
from lowshard.comm.default_collectives import Run
from lowshard.comm.node.call_row import (
    APART,
    BARRIER,
    COLLECT,
    DEAL,
    EXCHANGE,
    FOLD_AT_ROOT,
    FOLD_BUFFERS,
    FOLD_SLOTS,
    GATHER_BUFFERS,
    GATHER_SLOTS,
    SPREAD,
    row_of,
)
from lowshard.comm.node.call_runner import FACT, NodeWays, address_of
from lowshard.comm.node.combine import BLOCK_BYTES, HALVES, NATIVE, OPS, recipe_of
from lowshard.comm.node.fold import EVERYWHERE, OWN_PART, PART, TO_ROOT, scratch_blocks
from lowshard.comm.node.node_memory import head_bytes, shared_array
from lowshard.comm.node.node_rendezvous import (
    DIFFERENT,
    SCRATCH,
    UNEQUAL,
)

Array = Any


ALWAYS_SMALL_BYTES = 8 << 10
"""What goes through the slots whole, at one meeting. Up to 32 KiB would be faster between cores that share a cache, and
two to three times as slow between others, which get each line that was just written from afar."""
_AT_ROOT_BYTES = 8 << 20
"""What a root folds alone at most."""


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


class NodePlans(NodeWays):
    """Plans of the collectives."""

    _slot_bytes: int
    _small_bytes: int
    _crowded: bool
    _steps_at: dict[str, int]
    _scratch: np.ndarray | None

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
            return self._small(call, GATHER_SLOTS, sizes, first, ranks, offset, each, most)
        return self._large(call, GATHER_BUFFERS, sizes, first, ranks, offset, each, in_place=in_place)

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
            run = self._pull(call, whole if mine else 0, 0 if mine else whole, root, 1, 0, whole)
            return (lambda buf: run(buf, None)) if mine else (lambda buf: run(None, buf))
        run = self._large(call, SPREAD, (whole if mine else 0, 0 if mine else whole), root)
        return (lambda buf: run(buf, None)) if mine else (lambda buf: run(None, buf))

    def _plan_gather(self, call: Call, dtype: Any, elems: int, root: int) -> Run:
        each = elems * dtype.itemsize
        if each <= self._small_bytes:
            return self._pull(call, each, each if self.rank == root else 0, 0, self.size, 0, each)
        return self._large(call, COLLECT, (each, each * self.size if self.rank == root else 0), root, each)

    def _plan_scatter(self, call: Call, dtype: Any, elems: int, root: int) -> Run:
        each = elems * dtype.itemsize
        whole = each * self.size
        shown = whole if self.rank == root else 0
        # The others wait until the root has shown all of it.
        if whole <= max(ALWAYS_SMALL_BYTES, self._small_bytes // 4):
            return self._pull(call, shown, each, root, 1, each * self.rank, whole)
        return self._large(call, DEAL, (shown, each), root, each)

    def _plan_barrier(self, call: Call) -> Run:
        run = self._small(call, BARRIER, (0, 0))
        return lambda: run(None, None)

    def _run_all_gather_v(
        self, call: Call, send: Array, recv: Array, counts: Sequence[int], displs: Sequence[int]
    ) -> None:
        if self._check == "full":
            self._verify(call)
        own, zero = [send.size] * self.size, [0] * self.size
        self._exchange(self._sign(call), call.text, send, recv, self._spans(send, own, zero, counts, displs))

    def _run_all_to_all_v(
        self, call: Call, send: Array, send_counts: Sequence[int], send_displs: Sequence[int], recv: Array,
        recv_counts: Sequence[int], recv_displs: Sequence[int],
    ) -> None:  # fmt: skip
        if self._check == "full":
            self._verify(call)
        if call.prepared is None:
            call.prepared = self._spans(send, send_counts, send_displs, recv_counts, recv_displs)
        self._exchange(self._sign(call), call.text, send, recv, call.prepared, self._check != "off")

    def _spans(self, send: Array, *spans: Sequence[int]) -> Spans:
        """Return counts and displacements (sent, received) in bytes, as the compiled exchange takes them."""
        counts, displs, expected, places = (np.array(span, np.int64) * send.itemsize for span in spans)
        table = np.stack([counts, displs, expected], axis=1)
        return Spans(table, places, address_of(table), address_of(places), send.itemsize)

    def _exchange(
        self, signature: int, text: str, send: Array, recv: Array, spans: Spans, check: bool = False
    ) -> None:  # fmt: skip
        memory = self._place.memory
        at, to, size = address_of(send), address_of(recv), send.nbytes
        lent = send
        if at < to + recv.nbytes and to < at + size:
            lent = send.copy()  # what is still to be sent must not be written over
        if not memory.reads_across:
            lent = memory.arena.array(send.size, send.dtype)
            lent[...] = send
            self._map_all(signature, text)
        if lent is not send:
            at = address_of(lent)
        code = self._compiled.exchange(
            self._ctx, signature, spans.table_at, spans.places_at, at, size, to, check
        )
        if memory.wanted[0]:
            memory.map_new()
        if code == UNEQUAL:
            self._unequal(text, spans)
        if code:
            self._end(code, text)

    def _unequal(self, text: str, spans: Spans) -> NoReturn:
        """Raise what is wrong where a rank sends more or less than its receiver expects."""
        sent, expected = (spans.table[:, i] // spans.item for i in (0, 2))
        self._differ_in_counts(text, sent.tolist(), expected.tolist())

    def _exchange_row(self, call: Call, send: Array, recv: Array) -> np.ndarray | None:
        """Return the row of an exchange that was made before, or None if a row is not all there is to it."""
        if self._check == "full" or not self._place.memory.reads_across:
            return None
        numbers = call.prepared.table_at, call.prepared.places_at, self._check != "off"
        return row_of(EXCHANGE, self._sign(call), send.nbytes, recv.nbytes, APART, *numbers)

    # ---- plans of reductions

    def _recipe(self, dtype: Any, op: str) -> int:
        """Return the address of the recipe of a dtype and an op, or 0 where there is none."""
        name = dtypes.get(dtype).name
        divides = op == "avg" and dtype.kind not in "iub"
        if name not in (*NATIVE, *HALVES) or not (op in OPS or divides) or self.size == 1:
            return 0
        if self._scratch is None:
            self._scratch = np.empty(scratch_blocks.py_func(self.size) * BLOCK_BYTES + 64, np.uint8)
            self._context[SCRATCH] = -(-address_of(self._scratch) // 64) * 64
        return address_of(recipe_of(name, "sum" if op == "avg" else op).words)

    def _plan_all_reduce(self, call: Call, dtype: Any, elems: int, op: str, order: str) -> Run:
        recipe = self._recipe(dtype, op)
        if not recipe:
            return super()._plan_all_reduce(call, dtype, elems, op, order)
        nbytes, divisor, steps = elems * dtype.itemsize, self._divisor(op), self._steps_at[order]
        if nbytes <= max(ALWAYS_SMALL_BYTES, self._small_bytes // self.size):  # each rank folds it all
            return self._small(call, FOLD_SLOTS, (nbytes, nbytes), 0, elems, divisor, steps, recipe)
        return self._straight(call, (nbytes, nbytes), elems, EVERYWHERE, 0, divisor, steps, recipe)

    def _plan_reduce_scatter(self, call: Call, dtype: Any, elems: int, op: str, order: str) -> Run:
        recipe = self._recipe(dtype, op)
        if not recipe:
            return super()._plan_reduce_scatter(call, dtype, elems, op, order)
        nbytes, divisor, steps = elems * dtype.itemsize * self.size, self._divisor(op), self._steps_at[order]
        sizes = nbytes, elems * dtype.itemsize
        if nbytes <= self._small_bytes:
            return self._small(call, FOLD_SLOTS, sizes, elems * self.rank, elems, divisor, steps, recipe)
        return self._straight(call, sizes, elems, PART, 0, divisor, steps, recipe)

    def _plan_reduce(self, call: Call, dtype: Any, elems: int, op: str, root: int, order: str) -> Run:
        recipe = self._recipe(dtype, op)
        if not recipe:
            return super()._plan_reduce(call, dtype, elems, op, root, order)
        nbytes, divisor, steps = elems * dtype.itemsize, self._divisor(op), self._steps_at[order]
        mine = elems if self.rank == root else 0
        sizes = nbytes, mine * dtype.itemsize
        if nbytes <= self._small_bytes:
            return self._small(call, FOLD_SLOTS, sizes, 0, mine, divisor, steps, recipe)
        # The root alone folds little: the others have shown theirs by then and wait for nothing. It is all there is to
        # do for two ranks, and for many on few cores, which cannot fold side by side, up to where caches end.
        alone = self.size == 2 or self._crowded
        if nbytes <= (_AT_ROOT_BYTES if alone else self._slot_bytes):
            numbers = elems, root, divisor, steps, recipe, self._slot_bytes // dtype.itemsize
            return self._large(call, FOLD_AT_ROOT, sizes, *numbers, reaches=False)
        return self._straight(call, sizes, elems, TO_ROOT, root, divisor, steps, recipe)

    def _divisor(self, op: str) -> int:
        return self.size if op == "avg" else 1

    def _straight(self, call: Call, sizes: tuple[int, int], elems: int, mode: int, *numbers: int) -> Run:
        in_turn = mode in (EVERYWHERE, TO_ROOT) and self._place.memory.reads_across
        chunk_elems = self._chunk_elems(sizes[0] // elems) if in_turn else 0
        return self._large(
            call, FOLD_BUFFERS, sizes, elems, mode, *numbers, chunk_elems, stages_recv=mode != OWN_PART
        )

    def _chunk_elems(self, item: int) -> int:
        """Return the elements of a chunk that fits a slot together with a rank's part of one."""
        whole = self._slot_bytes // item
        return int(whole * self.size // (self.size + 1) // self.size * self.size)

    # ---- results that the ranks share

    def _common(self, elems: int, dtype: Any) -> Array:
        """Return an array at one place in memory for all ranks; the first rank's arena has it."""
        return self._common_checked(elems, dtype, FACT, "a step of the transport")

    def _common_checked(self, elems: int, dtype: Any, signature: int, text: str) -> Array:
        """As `_common`; ranks compare a signature as they meet."""
        memory, head = self._place.memory, head_bytes(self.size)
        facts = np.zeros(2, np.int64)
        block = memory.lend(elems * dtype.itemsize, self.size) if self.rank == 0 else None
        if block is not None:
            facts[:] = block.segment, block.offset
        rows = np.empty((self.size, 2), np.int64)
        code = self._compiled.gather_slots(
            self._ctx, signature, address_of(facts), 16, address_of(rows), 0, self.size, 0, 16, 0
        )
        if code:
            if block is not None and code == DIFFERENT:
                memory.withdraw(block)
            self._end(code, text)
        segment, offset = rows[0].tolist()
        at = memory.address(self._place.members[0], segment, offset)
        return shared_array(at + head, at, self.rank, elems, dtype)

    def _shared_all_gather(self, call: Call, send: Array) -> Array:
        if self._check == "full":
            self._verify(call)
        n = send.size
        result = self._common_checked(n * self.size, send.dtype, self._sign(call), call.text)
        own = result[n * self.rank : n * (self.rank + 1)]
        self._compiled.place(address_of(own), address_of(send), send.nbytes)
        self._barrier()
        return result

    def _shared_all_reduce(self, call: Call, send: Array, op: str, order: str) -> Array:
        recipe = self._recipe(send.dtype, op)
        if not recipe:
            return super()._shared_all_reduce(call, send, op, order)
        if self._check == "full":
            self._verify(call)
        result = self._common_checked(send.size, send.dtype, self._sign(call), call.text)
        sizes, numbers = (send.nbytes, send.nbytes), (self._divisor(op), self._steps_at[order], recipe)
        self._straight(call, sizes, send.size, OWN_PART, 0, *numbers)(send, result)
        return result


def _copy(send: Array, recv: Array) -> None:
    if send is not recv:
        recv.reshape(-1)[...] = send.reshape(-1)
