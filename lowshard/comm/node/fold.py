"""Reductions over the ranks of a node, compiled for one dtype and one op: through slots, or out of buffers.

Each rank combines a part of the elements from all operands, block by block, in the order of a schedule
(`lowshard.comm.node.combine`), so the bits depend on the operands and the order alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from numba import njit, types
from numba.extending import overload

from lowshard.comm.node.atomic import copy_bytes, fence, peek, poke
from lowshard.comm.node.combine import (
    BLOCK_BYTES,
    HALVES,
    NARROW,
    WIDEN,
    accumulator,
    combiner,
    divider,
    itemsizes,
    leave_alone,
)
from lowshard.comm.node.meet import ME, OK, PARTS, RECV, SCRATCH, SEND, SIZE, line, meet, slot, step
from lowshard.comm.node.move import STREAM_BYTES, fetch, leave, put, say, seen_at
from lowshard.compiled import compile_cached, digest_of

PART, EVERYWHERE, TO_ROOT, OWN_PART = range(4)
"""Where a fold's result goes: this rank's part to itself (reduce_scatter); everything to all ranks, each folding a part
that the others fetch; this rank's part to the root's buffer; its part of the balanced split to itself."""

_INT = types.int64


@dataclass(frozen=True)
class Fold:
    """The compiled reductions of a dtype and an op; addresses and counts are int64, the result is a code of `meet`.

    Attributes:
        slots: `(ctx, signature, send, send_bytes, recv, first, elems, divisor, steps)`: through the slots.
        buffers: `(ctx, signature, send, send_bytes, recv, recv_bytes, elems, mode, root, divisor, steps)`: straight out of the operands' memory.
    """

    slots: Callable[..., int]
    buffers: Callable[..., int]


@njit(nogil=True)  # type: ignore[untyped-decorator]
def scratch_blocks(ranks: int) -> int:
    """Return the blocks of scratch memory that a fold over so many ranks takes at most."""
    return 3 * ranks + 3  # fetched, widened, temporaries (one a level of the tree); two results


@njit(nogil=True)  # type: ignore[untyped-decorator]
def part_of(elems: int, ranks: int, rank: int) -> Any:
    """Return first and count of a rank's part in the balanced split."""
    base, rem = elems // ranks, elems % ranks
    return base * rank + min(rank, rem), base + (1 if rank < rem else 0)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def both_apart(ctx: int, size_bytes: int) -> bool:
    """Say whether no rank's result lies over the operand that others read; from the cards, so all ranks say the same."""
    for rank in range(peek(ctx + 8 * SIZE)):
        at = line(ctx, rank)
        if abs(peek(at + 8 * SEND) - peek(at + 8 * RECV)) < size_bytes:
            return False
    return True


def fold_block(dtype: str, op: str, ctx: int, out: int, n: int, divisor: int, steps: int, streaming: bool
) -> NoReturn:  # fmt: skip
    """Combine the blocks that PARTS names into out; only ever compiled, for a dtype and an op that are literals."""
    raise NotImplementedError("fold_block is compiled, never called")


@overload(fold_block, prefer_literal=True)  # type: ignore[untyped-decorator]
def _fold_block(
    dtype: Any, op: Any, ctx: Any, out: Any, n: Any, divisor: Any, steps: Any, streaming: Any
) -> Any:  # fmt: skip
    if not isinstance(dtype, types.StringLiteral) or not isinstance(op, types.StringLiteral):
        return None
    name = dtype.literal_value
    wide, halves = accumulator(name), name in HALVES
    combine, divide = combiner(wide, op.literal_value), divider(wide)
    widen, narrow = WIDEN.get(name, leave_alone), NARROW.get(name, leave_alone)

    def implementation(
        dtype: Any, op: Any, ctx: Any, out: Any, n: Any, divisor: Any, steps: Any, streaming: Any
    ) -> None:  # fmt: skip
        size, parts = peek(ctx + 8 * SIZE), peek(ctx + 8 * PARTS)
        free = peek(ctx + 8 * SCRATCH) + size * BLOCK_BYTES  # below: blocks fetched
        result = out
        if halves:
            for rank in range(size):
                widen(free, peek(parts + 8 * rank), n)
                poke(parts + 8 * rank, free)
                free += BLOCK_BYTES
            result = free
            free += BLOCK_BYTES
        for i in range(size - 1):
            into, left, right = peek(steps + 24 * i), peek(steps + 24 * i + 8), peek(steps + 24 * i + 16)
            a = peek(parts + 8 * left) if left < size else free + (left - size) * BLOCK_BYTES
            b = peek(parts + 8 * right) if right < size else free + (right - size) * BLOCK_BYTES
            last = into < 0
            # Past the caches only what is finished: a result that is still to be divided or narrowed is wanted again.
            past = streaming and last and divisor == 1 and not halves
            combine(result if last else free + (into - size) * BLOCK_BYTES, a, b, n, past)
        if divisor != 1:
            divide(result, n, divisor)
        if halves:
            narrow(out, result, n)

    return implementation


def fold_part(
    dtype: str, op: str, ctx: int, out: int, first: int, elems: int, root: int, divisor: int, steps: int
) -> NoReturn:  # fmt: skip
    """Fold elements out of all operands to an address, or (out 0) to their place in the root's result; compiled."""
    raise NotImplementedError("fold_part is compiled, never called")


@overload(fold_part, prefer_literal=True)  # type: ignore[untyped-decorator]
def _fold_part(
    dtype: Any, op: Any, ctx: Any, out: Any, first: Any, elems: Any, root: Any, divisor: Any, steps: Any
) -> Any:  # fmt: skip
    if not isinstance(dtype, types.StringLiteral):
        return None
    item, block_elems = _sizes(dtype.literal_value)

    def implementation(
        dtype: Any, op: Any, ctx: Any, out: Any, first: Any, elems: Any, root: Any, divisor: Any, steps: Any
    ) -> None:  # fmt: skip
        size, parts, scratch = peek(ctx + 8 * SIZE), peek(ctx + 8 * PARTS), peek(ctx + 8 * SCRATCH)
        own = scratch + (scratch_blocks(size) - 1) * BLOCK_BYTES
        streaming = elems * item >= STREAM_BYTES
        for start in range(0, elems, block_elems):
            n = min(block_elems, elems - start)
            for rank in range(size):
                base = seen_at(ctx, rank, SEND)
                if base != 0:
                    poke(parts + 8 * rank, base + (first + start) * item)
                else:
                    into = scratch + rank * BLOCK_BYTES
                    fetch(ctx, rank, SEND, (first + start) * item, into, n * item)
                    poke(parts + 8 * rank, into)
            if out != 0:
                fold_block(dtype, op, ctx, out + start * item, n, divisor, steps, streaming)
            else:
                fold_block(dtype, op, ctx, own, n, divisor, steps, False)
                put(ctx, root, (first + start) * item, own, n * item)
        if streaming:
            fence()  # what went past the caches is there before anybody is told

    return implementation


def _sizes(dtype: str) -> tuple[int, int]:
    """Return the bytes of an element and the elements of a block."""
    return itemsizes([dtype])[dtype], BLOCK_BYTES // itemsizes([accumulator(dtype)])[accumulator(dtype)]


@cache
def fold_of(dtype: str, op: str) -> Fold:
    """Return the reductions of a dtype and an op, compiled on first use and kept on disk."""
    # Numba keeps a function by what it closes over: words and numbers are the same in every process, functions are not.
    item, block_elems = _sizes(dtype)

    def fold_slots(
        ctx: int, signature: int, send: int, send_bytes: int, recv: int, first: int, elems: int,
        divisor: int, steps: int,
    ) -> int:  # fmt: skip
        step(ctx)
        size, parts = peek(ctx + 8 * SIZE), peek(ctx + 8 * PARTS)
        copy_bytes(slot(ctx, peek(ctx + 8 * ME)), send, send_bytes)
        code = meet(ctx, signature)
        if code != OK:
            return code
        for start in range(0, elems, block_elems):
            for rank in range(size):
                poke(parts + 8 * rank, slot(ctx, rank) + (first + start) * item)
            fold_block(
                dtype, op, ctx, recv + start * item, min(block_elems, elems - start), divisor, steps, False
            )
        return code

    def fold_buffers(
        ctx: int, signature: int, send: int, send_bytes: int, recv: int, recv_bytes: int, elems: int,
        mode: int, root: int, divisor: int, steps: int,
    ) -> int:  # fmt: skip
        step(ctx)
        say(ctx, SEND, send, send_bytes)
        say(ctx, RECV, recv, recv_bytes)
        code = meet(ctx, signature)
        if code != OK:
            return code
        me, size = peek(ctx + 8 * ME), peek(ctx + 8 * SIZE)
        if mode == PART:
            fold_part(dtype, op, ctx, recv, me * elems, elems, -1, divisor, steps)
            return leave(ctx)
        if mode == EVERYWHERE and size == 2 and both_apart(ctx, elems * item):
            # Both ranks fold everything: one pass over memory, and nothing to fetch.
            fold_part(dtype, op, ctx, recv, 0, elems, -1, divisor, steps)
            return leave(ctx)
        first, count = part_of(elems, size, me)
        if mode == TO_ROOT:
            out = recv + first * item if me == root else 0
            fold_part(dtype, op, ctx, out, first, count, root, divisor, steps)
            return leave(ctx)
        fold_part(dtype, op, ctx, recv + first * item, first, count, -1, divisor, steps)
        if mode == OWN_PART:
            return leave(ctx)
        step(ctx)
        say(ctx, RECV, recv, recv_bytes)  # on the card's other line
        code = meet(ctx, signature)
        if code != OK:
            return code
        for i in range(1, size):
            rank = (me + i) % size
            first, count = part_of(elems, size, rank)
            fetch(ctx, rank, RECV, first * item, recv + first * item, count * item)
        return leave(ctx)

    fold_slots.__qualname__ = f"fold_slots_{dtype}_{op}_{source_digest()}"
    fold_buffers.__qualname__ = f"fold_buffers_{dtype}_{op}_{source_digest()}"
    return Fold(
        compile_cached(fold_slots, _INT(*(_INT,) * 9)), compile_cached(fold_buffers, _INT(*(_INT,) * 11))
    )


@cache
def source_digest() -> str:
    """Return a digest of all source files of this package."""
    return digest_of(Path(__file__).parent.glob("*.py"))
