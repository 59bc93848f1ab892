"""Reductions of operands that go through the slots whole: by every rank that wants a result, or by the root alone."""

from __future__ import annotations

from typing import Any

from lowshard.comm.node.atomic import peek, poke
from lowshard.comm.node.combine import BLOCK_BYTES, ITEM, WIDE_ITEM
from lowshard.comm.node.copy_choice import (
    FOLD_AT_ROOT,
    hear_choice,
    learn,
    row_for,
    second_is_next,
    slots_row,
    tell_choice,
)
from lowshard.comm.node.fold import fold_block
from lowshard.comm.node.inlined import inner
from lowshard.comm.node.node_rendezvous import CHOICES, ME, OK, PARTS, SIZE, clock_ns, meet, slot, step
from lowshard.comm.node.peer_copy import show


@inner
def fold_slots(
    ctx: int, signature: int, send: int, send_bytes: int, recv: int, first: int, elems: int, divisor: int,
    steps: int, recipe: int,
) -> Any:  # fmt: skip
    """Show this rank's operand in its slot, and fold `elems` elements from `first` on out of all slots."""
    row, past, begin_ns = slots_row(peek(ctx + 8 * CHOICES), send_bytes), False, 0
    step(ctx)
    size, parts, item = peek(ctx + 8 * SIZE), peek(ctx + 8 * PARTS), peek(recipe + 8 * ITEM)
    block_elems = BLOCK_BYTES // peek(recipe + 8 * WIDE_ITEM)
    if row != 0:
        tell_choice(ctx, row)
        past, begin_ns = second_is_next(row), clock_ns(ctx)
    show(slot(ctx, peek(ctx + 8 * ME), 0), send, send_bytes, past)
    code = meet(ctx, signature)
    if code != OK:
        return code
    for start in range(0, elems, block_elems):
        for rank in range(size):
            poke(parts + 8 * rank, slot(ctx, rank, 0) + (first + start) * item)
        n = min(block_elems, elems - start)
        fold_block(ctx, recv + start * item, n, divisor, steps, recipe, False)
    if row != 0:
        hear_choice(ctx, row)
        learn(row, past, send_bytes, clock_ns(ctx) - begin_ns)
    return code


@inner
def fold_at_root(
    ctx: int, signature: int, send: int, recv: int, elems: int, root: int, divisor: int, steps: int, recipe: int,
    chunk_elems: int,
) -> Any:  # fmt: skip
    """Show this rank's operand in its slot, chunk by chunk, and let the root fold them: one meeting a chunk.

    Who is not the root is a chunk ahead of it, and in the next call when the root is still in this one.
    """
    me, size, parts = peek(ctx + 8 * ME), peek(ctx + 8 * SIZE), peek(ctx + 8 * PARTS)
    item = peek(recipe + 8 * ITEM)
    block_elems = BLOCK_BYTES // peek(recipe + 8 * WIDE_ITEM)
    row = row_for(peek(ctx + 8 * CHOICES), FOLD_AT_ROOT, elems * item)
    past, begin_ns = second_is_next(row), clock_ns(ctx)
    for begin in range(0, elems, chunk_elems):
        count = min(chunk_elems, elems - begin)
        step(ctx)
        if begin == 0:
            tell_choice(ctx, row)
        if me != root:
            show(slot(ctx, me, 0), send + begin * item, count * item, past)
        code = meet(ctx, signature)
        if code != OK:
            return code
        if begin == 0:
            hear_choice(ctx, row)
        if me == root:
            for start in range(0, count, block_elems):
                for rank in range(size):
                    shown = send + begin * item if rank == me else slot(ctx, rank, 0)
                    poke(parts + 8 * rank, shown + start * item)
                n = min(block_elems, count - start)
                fold_block(ctx, recv + (begin + start) * item, n, divisor, steps, recipe, False)
    learn(row, past, elems * item, clock_ns(ctx) - begin_ns)
    return OK
