"""Reductions over the ranks of a node: through slots, or out of buffers; dtype and op are a recipe's.

Each rank combines a part of the elements from all operands, block by block, in the order of a schedule
(`lowshard.comm.node.combine`), so the bits depend on the operands and the order alone.
"""

from __future__ import annotations

from typing import Any

from lowshard.comm.node.atomic import call_five, call_three, field, peek, set_field
from lowshard.comm.node.combine import BLOCK_BYTES, COMBINE, DIVIDE, ITEM, NARROW, WIDE_ITEM, WIDEN
from lowshard.comm.node.inlined import inner
from lowshard.comm.node.node_rendezvous import (
    LAST_CACHE,
    ME,
    OK,
    PARTS,
    RECV,
    SCRATCH,
    SEND,
    SIZE,
    line,
    meet,
    slot,
    step,
)
from lowshard.comm.node.peer_copy import (
    STREAM_BYTES,
    all_shared,
    copy_past,
    fetch,
    goes_past,
    is_private,
    leave,
    note_mapped,
    put,
    say,
    seen_at,
    show,
    transfer,
)
from lowshard.compiled.emitted import copy_bytes, fence

PART, EVERYWHERE, TO_ROOT, OWN_PART = range(4)
"""Where a fold's result goes: this rank's part to itself (reduce_scatter); everything to all ranks, each folding a part
that the others fetch; this rank's part to the root's buffer; its part of the balanced split to itself."""


@inner
def scratch_blocks(ranks: int) -> Any:
    """Return the blocks of scratch memory that a fold over so many ranks takes at most."""
    return 3 * ranks + 3  # fetched, widened, temporaries (one a level of the tree); two results


@inner
def part_of(elems: int, ranks: int, rank: int) -> Any:
    """Return first and count of a rank's part in the balanced split."""
    base, rem = elems // ranks, elems % ranks
    return base * rank + min(rank, rem), base + (1 if rank < rem else 0)


@inner
def both_apart(ctx: int, size_bytes: int) -> bool:
    """Say whether no rank's result lies over the operand that others read; from the cards: the same on all ranks."""
    for rank in range(field(ctx, SIZE)):
        at = line(ctx, rank)
        if abs(field(at, SEND) - field(at, RECV)) < size_bytes:
            return False
    return True


@inner
def fold_block(ctx: int, out: int, n: int, divisor: int, steps: int, recipe: int, streaming: bool) -> None:
    """Combine the blocks that PARTS names into out; their addresses are used up."""
    size, parts = field(ctx, SIZE), field(ctx, PARTS)
    free = field(ctx, SCRATCH) + size * BLOCK_BYTES  # below: blocks fetched
    combine, widen = field(recipe, COMBINE), field(recipe, WIDEN)
    result = out
    if widen != 0:
        for rank in range(size):
            call_three(widen, free, field(parts, rank), n)
            set_field(parts, rank, free)
            free += BLOCK_BYTES
        result = free
        free += BLOCK_BYTES
    for i in range(size - 1):
        into, left, right = field(steps, 3 * i), field(steps, 3 * i + 1), field(steps, 3 * i + 2)
        a = field(parts, left) if left < size else free + (left - size) * BLOCK_BYTES
        b = field(parts, right) if right < size else free + (right - size) * BLOCK_BYTES
        last = into < 0
        # Past the caches only what is finished: a result that is still to be divided or narrowed is wanted again.
        past = 1 if streaming and last and divisor == 1 and widen == 0 else 0
        call_five(combine, result if last else free + (into - size) * BLOCK_BYTES, a, b, n, past)
    if divisor != 1:
        call_three(field(recipe, DIVIDE), result, n, divisor)
    if widen != 0:
        call_three(field(recipe, NARROW), out, result, n)


@inner
def fold_rows(
    ctx: int, out: int, sources: int, table: int, levels: int, n: int, divisor: int, steps: int, recipe: int,
    streaming: int,
) -> Any:  # fmt: skip
    """Fold rows of n elements that lie at regular distances, as many operands as the context has ranks.

    Args:
        ctx: SIZE, PARTS and SCRATCH are looked at alone.
        out: address of the first row of the result.
        sources: address of the operands' first rows, then room for as many.
        table: for each level, innermost first: count, bytes from row to row of the result, and of each operand.
        levels: how many.
        n: elements of a row.
        divisor: see `fold_block`.
        steps: the same.
        recipe: the same.
        streaming: 1 to write past the caches.
    """
    size, parts, item = field(ctx, SIZE), field(ctx, PARTS), field(recipe, ITEM)
    block_elems, width, here = BLOCK_BYTES // field(recipe, WIDE_ITEM), 8 * (2 + size), sources + 8 * size
    rows = 1
    for level in range(levels):
        rows *= peek(table + level * width)
    for row in range(rows):
        rest, to = row, out
        for term in range(size):
            set_field(here, term, field(sources, term))
        for level in range(levels):
            at = table + level * width
            i = rest % peek(at)
            rest //= peek(at)
            to += i * field(at, 1)
            for term in range(size):
                set_field(here, term, field(here, term) + i * field(at + 16, term))
        for start in range(0, n, block_elems):
            for term in range(size):
                set_field(parts, term, field(here, term) + start * item)
            fold_block(
                ctx, to + start * item, min(block_elems, n - start), divisor, steps, recipe, streaming != 0
            )
    if streaming != 0:
        fence()
    return OK


@inner
def fold_part(
    ctx: int, out: int, first: int, elems: int, root: int, divisor: int, steps: int, recipe: int
) -> None:
    """Fold elements out of all operands to an address, or (out 0) to their place in the root's result."""
    size, parts, scratch = field(ctx, SIZE), field(ctx, PARTS), field(ctx, SCRATCH)
    item = field(recipe, ITEM)
    block_elems = BLOCK_BYTES // field(recipe, WIDE_ITEM)
    own = scratch + (scratch_blocks(size) - 1) * BLOCK_BYTES
    streaming = elems * item >= STREAM_BYTES
    for start in range(0, elems, block_elems):
        n = min(block_elems, elems - start)
        for rank in range(size):
            base = seen_at(ctx, rank, SEND)
            if base != 0:
                set_field(parts, rank, base + (first + start) * item)
            else:
                into = scratch + rank * BLOCK_BYTES
                fetch(ctx, rank, SEND, (first + start) * item, into, n * item)
                set_field(parts, rank, into)
        if out != 0:
            fold_block(ctx, out + start * item, n, divisor, steps, recipe, streaming)
        else:
            fold_block(ctx, own, n, divisor, steps, recipe, False)
            put(ctx, root, (first + start) * item, own, n * item)
    if streaming:
        fence()  # what went past the caches is there before anybody is told


@inner
def fold_to_all(ctx: int, elems: int, divisor: int, steps: int, recipe: int) -> None:
    """Fold this rank's part block by block, and write each block to every rank's result, past the caches."""
    me, size, parts = field(ctx, ME), field(ctx, SIZE), field(ctx, PARTS)
    item, scratch = field(recipe, ITEM), field(ctx, SCRATCH)
    block_elems = BLOCK_BYTES // field(recipe, WIDE_ITEM)
    own = scratch + (scratch_blocks(size) - 1) * BLOCK_BYTES
    first, count = part_of(elems, size, me)
    for start in range(first, first + count, block_elems):
        n = min(block_elems, first + count - start)
        for rank in range(size):
            at = seen_at(ctx, rank, SEND)
            if at != 0:
                set_field(parts, rank, at + start * item)
            else:  # not mapped here yet
                into = scratch + rank * BLOCK_BYTES
                fetch(ctx, rank, SEND, start * item, into, n * item)
                set_field(parts, rank, into)
        fold_block(ctx, own, n, divisor, steps, recipe, False)
        for i in range(size):
            rank = (me + i) % size
            to = seen_at(ctx, rank, RECV)
            if to != 0:
                copy_past(to + start * item, own, n * item)
            else:
                put(ctx, rank, start * item, own, n * item)
    fence()  # what went past the caches is there before anybody is told


@inner
def _overflows(ctx: int, size_bytes: int) -> Any:
    """Say whether operands of so many bytes that peers map go in turn too, where results are private."""
    return size_bytes >= 2 * field(ctx, LAST_CACHE)


@inner
def _goes_to_all(ctx: int, size_bytes: int) -> Any:
    """Say whether ranks write their parts to all results; from the cards: the same on all ranks.

    They do where peers map these too, and it is much beside the last cache: memory is read and written least so. In
    place it is for more, since caches hold much of what the other way reads again.
    """
    if 4 * size_bytes < 3 * field(ctx, LAST_CACHE) or not (all_shared(ctx, SEND) and all_shared(ctx, RECV)):
        return False
    return _overflows(ctx, size_bytes) or both_apart(ctx, size_bytes)


@inner
def _show(ctx: int, send: int, begin: int, count: int, item: int, past: bool) -> None:
    """Put the elements of a chunk that other ranks fold into this rank's slot, each at its place in the chunk."""
    me, size = field(ctx, ME), field(ctx, SIZE)
    first, own = part_of(count, size, me)
    to, source = slot(ctx, me, 0), send + begin * item
    done = first + own
    show(to, source, first * item, past)
    show(to + done * item, source + done * item, (count - done) * item, past)


@inner
def _fold_chunk(
    ctx: int, send: int, begin: int, count: int, mapped: int, result: int, divisor: int, steps: int, recipe: int,
    streaming: bool,
) -> None:  # fmt: skip
    """Fold this rank's part of a chunk to an address.

    Operands lie in the slots, where `mapped` has 0 for a rank; else there, or (negative) there in its own memory.
    """
    me, size = field(ctx, ME), field(ctx, SIZE)
    parts, item = field(ctx, PARTS), field(recipe, ITEM)
    block_elems = BLOCK_BYTES // field(recipe, WIDE_ITEM)
    first, own = part_of(count, size, me)
    for start in range(first, first + own, block_elems):
        n = min(block_elems, first + own - start)
        for rank in range(size):
            base, offset = field(mapped, rank), (begin + start) * item
            if rank == me:
                at = send + offset
            elif base == 0:
                at = slot(ctx, rank, 0) + start * item
            elif base > 0:
                at = base + offset
            else:
                at = field(ctx, SCRATCH) + rank * BLOCK_BYTES
                transfer(ctx, rank, at, offset - base, n * item, False)
            set_field(parts, rank, at)
        into = result + (start - first) * item
        if streaming and (divisor != 1 or field(recipe, WIDEN) != 0):
            finished = field(ctx, SCRATCH) + (scratch_blocks(size) - 1) * BLOCK_BYTES
            fold_block(ctx, finished, n, divisor, steps, recipe, False)
            copy_past(into, finished, n * item)
        else:
            fold_block(ctx, into, n, divisor, steps, recipe, streaming)


@inner
def _fold_in_turn(
    ctx: int, send: int, recv: int, elems: int, chunk_elems: int, root: int, divisor: int, steps: int, recipe: int,
    past: bool,
) -> Any:  # fmt: skip
    """Fold chunk by chunk through the slots, from the meeting on at which the first chunk was shown.

    Each rank folds its part of a chunk straight into its next slot, behind the next chunk's operand. So a chunk takes
    one meeting, and what another rank wrote is read once.

    Args:
        ctx: the context.
        send: this rank's operand.
        recv: where the whole result goes; looked at on the root alone if there is one.
        elems: of the operand.
        chunk_elems: of a chunk; with the largest part of it once more they fit a slot.
        root: rank that wants the result, -1 for all of them.
        divisor: see `fold_block`.
        steps: the same.
        recipe: the same.
        past: write slots past the caches.
    """
    me, size, item = field(ctx, ME), field(ctx, SIZE), field(recipe, ITEM)
    private, mapped = is_private(ctx), note_mapped(ctx)
    behind = chunk_elems * item
    streaming = elems * item >= field(ctx, LAST_CACHE)  # less stays there
    begin = 0
    while True:
        count = min(chunk_elems, elems - begin)
        result, result_past = slot(ctx, me, 1) + behind, past
        if me == root:  # nobody else wants it
            result, result_past = recv + (begin + part_of(count, size, me)[0]) * item, streaming
        _fold_chunk(ctx, send, begin, count, mapped, result, divisor, steps, recipe, result_past)
        step(ctx)
        after = begin + count
        if private and after < elems:
            _show(ctx, send, after, min(chunk_elems, elems - after), item, past)
        if result_past:
            fence()
        code = meet(ctx, 0)
        if code != OK:
            return code
        if root < 0 or me == root:
            for i in range(1 if me == root else 0, size):
                rank = (me + i) % size
                first, n = part_of(count, size, rank)
                into, source = recv + (begin + first) * item, slot(ctx, rank, 0) + behind
                if streaming:
                    copy_past(into, source, n * item)
                else:
                    copy_bytes(into, source, n * item)
        begin = after
        if begin >= elems:
            if streaming:
                fence()
            return OK


@inner
def fold_buffers(
    ctx: int, signature: int, send: int, send_bytes: int, recv: int, recv_bytes: int, elems: int, mode: int,
    root: int, divisor: int, steps: int, recipe: int, chunk_elems: int,
) -> Any:  # fmt: skip
    """Fold straight out of the operands' memory; `mode` says where the result goes.

    If `chunk_elems` is not 0 the result goes through the slots instead, so many at a time; and so do private operands,
    since the system call that reads them pins each of their pages, which takes longer than to copy it.
    """
    item = field(recipe, ITEM)
    past = goes_past(ctx, elems * item)
    step(ctx)
    say(ctx, SEND, send, send_bytes)
    say(ctx, RECV, recv, recv_bytes)
    if chunk_elems != 0 and is_private(ctx):
        _show(ctx, send, 0, min(chunk_elems, elems), item, past)
    code = meet(ctx, signature)
    if code != OK:
        return code
    if mode == EVERYWHERE and _goes_to_all(ctx, elems * item):
        fold_to_all(ctx, elems, divisor, steps, recipe)
        return leave(ctx)
    if chunk_elems != 0 and (mode == TO_ROOT or _overflows(ctx, elems * item) or not all_shared(ctx, SEND)):
        whom = root if mode == TO_ROOT else -1
        return _fold_in_turn(ctx, send, recv, elems, chunk_elems, whom, divisor, steps, recipe, past)
    me, size = field(ctx, ME), field(ctx, SIZE)
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


# ---- operands that go through the slots whole: folded by every rank that wants a result, or by the root alone


@inner
def fold_slots(
    ctx: int, signature: int, send: int, send_bytes: int, recv: int, first: int, elems: int, divisor: int,
    steps: int, recipe: int,
) -> Any:  # fmt: skip
    """Show this rank's operand in its slot, and fold `elems` elements from `first` on out of all slots."""
    step(ctx)
    size, parts, item = field(ctx, SIZE), field(ctx, PARTS), field(recipe, ITEM)
    block_elems = BLOCK_BYTES // field(recipe, WIDE_ITEM)
    copy_bytes(slot(ctx, field(ctx, ME), 0), send, send_bytes)
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
    past = goes_past(ctx, elems * item)
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
