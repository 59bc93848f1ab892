"""Reductions of operands that go through the slots whole: by every rank that wants a result, or by the root alone."""

from __future__ import annotations

from typing import Any

from lowshard.comm.node.atomic import field, set_field
from lowshard.comm.node.combine import BLOCK_BYTES, ITEM, WIDE_ITEM
from lowshard.comm.node.fold import fold_block
from lowshard.comm.node.inlined import inner
from lowshard.comm.node.node_rendezvous import ME, OK, PARTS, SIZE, meet, slot, step
from lowshard.comm.node.peer_copy import goes_past, show


@inner
def fold_slots(
    ctx: int, signature: int, send: int, send_bytes: int, recv: int, first: int, elems: int, divisor: int,
    steps: int, recipe: int,
) -> Any:  # fmt: skip
    """Show this rank's operand in its slot, and fold `elems` elements from `first` on out of all slots."""
    step(ctx)
    size, parts, item = field(ctx, SIZE), field(ctx, PARTS), field(recipe, ITEM)
    block_elems = BLOCK_BYTES // field(recipe, WIDE_ITEM)
    show(slot(ctx, field(ctx, ME), 0), send, send_bytes, goes_past(ctx, send_bytes))
    code = meet(ctx, signature)
    if code != OK:
        return code
    for start in range(0, elems, block_elems):
        for rank in range(size):
            set_field(parts, rank, slot(ctx, rank, 0) + (first + start) * item)
        n = min(block_elems, elems - start)
        fold_block(ctx, recv + start * item, n, divisor, steps, recipe, False)
    return code


@inner
def fold_at_root(
    ctx: int, signature: int, send: int, recv: int, elems: int, root: int, divisor: int, steps: int, recipe: int,
    chunk_elems: int,
) -> Any:  # fmt: skip
    """Show this rank's operand in its slot, chunk by chunk, and let the root fold them: one meeting a chunk.

    Who is not the root is a chunk ahead of it, and in the next call when the root is still in this one.
    """
    me, size, parts = field(ctx, ME), field(ctx, SIZE), field(ctx, PARTS)
    item = field(recipe, ITEM)
    block_elems = BLOCK_BYTES // field(recipe, WIDE_ITEM)
    past = goes_past(ctx, min(chunk_elems, elems) * item)
    for begin in range(0, elems, chunk_elems):
        count = min(chunk_elems, elems - begin)
        step(ctx)
        if me != root:
            show(slot(ctx, me, 0), send + begin * item, count * item, past)
        code = meet(ctx, signature)
        if code != OK:
            return code
        if me == root:
            for start in range(0, count, block_elems):
                for rank in range(size):
                    shown = send + begin * item if rank == me else slot(ctx, rank, 0)
                    set_field(parts, rank, shown + start * item)
                n = min(block_elems, count - start)
                fold_block(ctx, recv + (begin + start) * item, n, divisor, steps, recipe, False)
    return OK
