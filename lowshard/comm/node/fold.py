"""Reductions over the ranks of a node: through slots, or out of buffers; dtype and op are a recipe's.

Each rank combines a part of the elements from all operands, block by block, in the order of a schedule
(`lowshard.comm.node.combine`), so the bits depend on the operands and the order alone.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from lowshard.comm.node.atomic import call_five, call_three, copy_bytes, fence, peek, poke
from lowshard.comm.node.combine import BLOCK_BYTES, COMBINE, DIVIDE, ITEM, NARROW, WIDE_ITEM, WIDEN
from lowshard.comm.node.meet import ME, OK, PARTS, RECV, SCRATCH, SEND, SIZE, line, meet, slot, step
from lowshard.comm.node.move import STREAM_BYTES, fetch, leave, put, say, seen_at

PART, EVERYWHERE, TO_ROOT, OWN_PART = range(4)
"""Where a fold's result goes: this rank's part to itself (reduce_scatter); everything to all ranks, each folding a part
that the others fetch; this rank's part to the root's buffer; its part of the balanced split to itself."""


@njit(nogil=True)  # type: ignore[untyped-decorator]
def scratch_blocks(ranks: int) -> Any:
    """Return the blocks of scratch memory that a fold over so many ranks takes at most."""
    return 3 * ranks + 3  # fetched, widened, temporaries (one a level of the tree); two results


@njit(nogil=True)  # type: ignore[untyped-decorator]
def part_of(elems: int, ranks: int, rank: int) -> Any:
    """Return first and count of a rank's part in the balanced split."""
    base, rem = elems // ranks, elems % ranks
    return base * rank + min(rank, rem), base + (1 if rank < rem else 0)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def both_apart(ctx: int, size_bytes: int) -> bool:
    """Say whether no rank's result lies over the operand that others read; from the cards: the same on all ranks."""
    for rank in range(peek(ctx + 8 * SIZE)):
        at = line(ctx, rank)
        if abs(peek(at + 8 * SEND) - peek(at + 8 * RECV)) < size_bytes:
            return False
    return True


@njit(nogil=True)  # type: ignore[untyped-decorator]
def fold_block(ctx: int, out: int, n: int, divisor: int, steps: int, recipe: int, streaming: bool) -> None:
    """Combine the blocks that PARTS names into out; their addresses are used up."""
    size, parts = peek(ctx + 8 * SIZE), peek(ctx + 8 * PARTS)
    free = peek(ctx + 8 * SCRATCH) + size * BLOCK_BYTES  # below: blocks fetched
    combine, widen = peek(recipe + 8 * COMBINE), peek(recipe + 8 * WIDEN)
    result = out
    if widen != 0:
        for rank in range(size):
            call_three(widen, free, peek(parts + 8 * rank), n)
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
        past = 1 if streaming and last and divisor == 1 and widen == 0 else 0
        call_five(combine, result if last else free + (into - size) * BLOCK_BYTES, a, b, n, past)
    if divisor != 1:
        call_three(peek(recipe + 8 * DIVIDE), result, n, divisor)
    if widen != 0:
        call_three(peek(recipe + 8 * NARROW), out, result, n)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def fold_part(
    ctx: int, out: int, first: int, elems: int, root: int, divisor: int, steps: int, recipe: int
) -> None:
    """Fold elements out of all operands to an address, or (out 0) to their place in the root's result."""
    size, parts, scratch = peek(ctx + 8 * SIZE), peek(ctx + 8 * PARTS), peek(ctx + 8 * SCRATCH)
    item = peek(recipe + 8 * ITEM)
    block_elems = BLOCK_BYTES // peek(recipe + 8 * WIDE_ITEM)
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
            fold_block(ctx, out + start * item, n, divisor, steps, recipe, streaming)
        else:
            fold_block(ctx, own, n, divisor, steps, recipe, False)
            put(ctx, root, (first + start) * item, own, n * item)
    if streaming:
        fence()  # what went past the caches is there before anybody is told


@njit(nogil=True)  # type: ignore[untyped-decorator]
def fold_slots(
    ctx: int, signature: int, send: int, send_bytes: int, recv: int, first: int, elems: int, divisor: int,
    steps: int, recipe: int,
) -> Any:  # fmt: skip
    """Show this rank's operand in its slot, and fold `elems` elements from `first` on out of all slots."""
    step(ctx)
    size, parts, item = peek(ctx + 8 * SIZE), peek(ctx + 8 * PARTS), peek(recipe + 8 * ITEM)
    block_elems = BLOCK_BYTES // peek(recipe + 8 * WIDE_ITEM)
    copy_bytes(slot(ctx, peek(ctx + 8 * ME)), send, send_bytes)
    code = meet(ctx, signature)
    if code != OK:
        return code
    for start in range(0, elems, block_elems):
        for rank in range(size):
            poke(parts + 8 * rank, slot(ctx, rank) + (first + start) * item)
        n = min(block_elems, elems - start)
        fold_block(ctx, recv + start * item, n, divisor, steps, recipe, False)
    return code


@njit(nogil=True)  # type: ignore[untyped-decorator]
def fold_buffers(
    ctx: int, signature: int, send: int, send_bytes: int, recv: int, recv_bytes: int, elems: int, mode: int,
    root: int, divisor: int, steps: int, recipe: int,
) -> Any:  # fmt: skip
    """Fold straight out of the operands' memory; `mode` says where the result goes."""
    step(ctx)
    say(ctx, SEND, send, send_bytes)
    say(ctx, RECV, recv, recv_bytes)
    code = meet(ctx, signature)
    if code != OK:
        return code
    me, size, item = peek(ctx + 8 * ME), peek(ctx + 8 * SIZE), peek(recipe + 8 * ITEM)
    if mode == PART:
        fold_part(ctx, recv, me * elems, elems, -1, divisor, steps, recipe)
        return leave(ctx)
    if mode == EVERYWHERE and size == 2 and both_apart(ctx, elems * item):
        # Both ranks fold everything: one pass over memory, and nothing to fetch.
        fold_part(ctx, recv, 0, elems, -1, divisor, steps, recipe)
        return leave(ctx)
    first, count = part_of(elems, size, me)
    if mode == TO_ROOT:
        out = recv + first * item if me == root else 0
        fold_part(ctx, out, first, count, root, divisor, steps, recipe)
        return leave(ctx)
    fold_part(ctx, recv + first * item, first, count, -1, divisor, steps, recipe)
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
