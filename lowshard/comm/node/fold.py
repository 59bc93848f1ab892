"""Reductions over the ranks of a node; dtype and op are a recipe's.

Each rank combines elements of all operands, block by block, in the order of a schedule
(`lowshard.comm.node.combine`), so the bits depend on the operands and the order alone.
"""

from __future__ import annotations

from typing import Any

from lowshard.comm.node import meeting as m
from lowshard.comm.node.atomic import call_five, call_three, field, inner, peek, set_field
from lowshard.comm.node.combine import BLOCK_BYTES, COMBINE, DIVIDE, ITEM, NARROW, WIDE_ITEM, WIDEN
from lowshard.compiled.emitted import copy_bytes, fence

PART, EVERYWHERE, TO_ROOT = range(3)
"""Where a fold's result goes: this rank's part to itself (reduce_scatter); everything to all ranks, each folding a part
that it writes to the others' results or they fetch; everything to the root, which fetches the parts."""
NONE, PRIVATE, ALL = range(3)
"""What goes through the slots: nothing, buffers in memory that peers do not map, everything."""


@inner
def scratch_blocks(ranks: int) -> Any:
    """Return the blocks that `fold_block` takes at most: operands widened, a result, one a level of the tree."""
    return 2 * ranks + 2


@inner
def part_of(elems: int, ranks: int, rank: int) -> Any:
    """Return first and count of a rank's part in the balanced split."""
    base, rem = elems // ranks, elems % ranks
    return base * rank + min(rank, rem), base + (1 if rank < rem else 0)


@inner
def fold_block(ctx: int, out: int, n: int, divisor: int, steps: int, recipe: int, past: bool) -> None:
    """Combine the blocks that PARTS names into out, `past` the caches or not; their addresses are used up."""
    size, parts, free = field(ctx, m.SIZE), field(ctx, m.PARTS), field(ctx, m.SCRATCH)
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
        # What is still to be divided or narrowed is wanted again.
        goes_past = 1 if past and into < 0 and divisor == 1 and widen == 0 else 0
        call_five(combine, result if into < 0 else free + (into - size) * BLOCK_BYTES, a, b, n, goes_past)
    if divisor != 1:
        call_three(field(recipe, DIVIDE), result, n, divisor)
    if widen != 0:
        call_three(field(recipe, NARROW), out, result, n)


@inner
def _next_block(into: int, item: int, most: int) -> Any:
    """Return how many elements come next: those up to a cache line, as NumPy's arrays begin amid one, or most."""
    return (-into & 63) // item or most


@inner
def fold_rows(
    ctx: int, out: int, sources: int, table: int, levels: int, n: int, divisor: int, steps: int, recipe: int, past: int
) -> Any:  # fmt: skip
    """Fold rows of n elements that lie at regular distances, as many operands as the context has ranks.

    `sources` has the addresses of the operands' first rows, then room for as many; `table` has for each level,
    innermost first: count, bytes from row to row of the result, and of each operand.
    """
    size, parts, item = field(ctx, m.SIZE), field(ctx, m.PARTS), field(recipe, ITEM)
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
        start = 0
        while start < n:
            for term in range(size):
                set_field(parts, term, field(here, term) + start * item)
            count = min(_next_block(to + start * item, item, block_elems), n - start)
            fold_block(ctx, to + start * item, count, divisor, steps, recipe, past != 0)
            start += count
    fence()
    return m.OK


# ---- through the slots


@inner
def fold_by_slots(
    ctx: int, signature: int, rows: int, row: int, elems: int, chunk_elems: int, divisor: int, steps: int, recipe: int,
    send: int, recv: int,
) -> Any:  # fmt: skip
    """Show the rows of this rank's operand, and fold one row of all operands to recv, unless that is -1.

    Of each row, `elems` long, `chunk_elems` go at one meeting.
    """
    me, parts, item, begin = field(ctx, m.ME), field(ctx, m.PARTS), field(recipe, ITEM), 0
    block_elems = BLOCK_BYTES // field(recipe, WIDE_ITEM)
    while True:
        n = min(chunk_elems, elems - begin)
        m.step(ctx)
        for i in range(rows):
            copy_bytes(m.slot(ctx, me) + i * n * item, send + (i * elems + begin) * item, n * item)
        code = m.meet(ctx, signature)
        if code != m.OK:
            return code
        for start in range(0, n if row >= 0 else 0, block_elems):
            for rank in range(field(ctx, m.SIZE)):
                set_field(parts, rank, m.slot(ctx, rank) + (row * n + start) * item)
            set_field(parts, me, send + (row * elems + begin + start) * item)
            into, count = recv + (begin + start) * item, min(block_elems, n - start)
            fold_block(ctx, into, count, divisor, steps, recipe, False)
        begin += n
        if begin >= elems:
            return m.OK


# ---- out of the operands where they lie


@inner
def _fold_piece(
    ctx: int, out: int, first: int, elems: int, divisor: int, steps: int, recipe: int, past: bool, block: int
) -> None:
    """Fold a piece of all operands: private ones are read as a whole, then all folded block by block.

    Results go `past` the caches or not; where `block` is not 0 they are made there, and go to the results of all ranks.
    """
    me, size, parts, item = field(ctx, m.ME), field(ctx, m.SIZE), field(ctx, m.PARTS), field(recipe, ITEM)
    block_elems = BLOCK_BYTES // field(recipe, WIDE_ITEM)
    pieces = field(ctx, m.SCRATCH) + scratch_blocks(size) * BLOCK_BYTES
    bases = parts + 8 * size
    for i in range(size):
        rank = (me + i) % size  # each begins with another, so that no memory is asked by all at once
        base = m.seen_at(ctx, rank, m.SEND)
        if base != 0:
            set_field(bases, rank, base + first * item)
        else:
            set_field(bases, rank, pieces + rank * field(ctx, m.PIECE_BYTES))
            m.fetch(ctx, rank, m.SEND, first * item, field(bases, rank), elems * item, False)
    start = 0
    while start < elems:
        for rank in range(size):
            set_field(parts, rank, field(bases, rank) + start * item)
        into = out + start * item
        count = min(_next_block(into, item, block_elems), elems - start)
        fold_block(ctx, into if block == 0 else block, count, divisor, steps, recipe, past and block == 0)
        for i in range(0 if block == 0 else size):
            rank, at = (me + i) % size, (first + start) * item
            base = m.seen_at(ctx, rank, m.RECV)
            if base != 0 and past:
                m.copy_past(base + at, block, count * item)
            else:
                m.put(ctx, rank, at, block, count * item)
        start += count


@inner
def _are_mapped(ctx: int, buffer: int) -> Any:
    """Say, on all ranks alike, whether every rank's buffer lies in memory that the others map."""
    mapped = True
    for rank in range(field(ctx, m.SIZE)):
        segment = field(m.line(ctx, rank), buffer + 1)
        mapped &= segment >= 0 and segment < m.SEGMENTS
    return mapped


@inner
def _show(ctx: int, buffer: int, slots: int, address: int, begin: int, end: int) -> None:
    """Copy bytes of a buffer to their place in this rank's slot, if it goes by that, and say that it lies there."""
    me, card = field(ctx, m.ME), m.line(ctx, field(ctx, m.ME))
    if slots == ALL or (slots == PRIVATE and field(card, buffer + 1) < 0):
        copy_bytes(m.slot(ctx, me) + begin, address + begin, end - begin)
        set_field(card, buffer + 1, m.IN_SLOT)


@inner
def _is_straight(ctx: int, buffer: int) -> Any:
    """Say, on all ranks alike, whether some rank's buffer is read where it lies."""
    straight = False
    for rank in range(field(ctx, m.SIZE)):
        straight |= field(m.line(ctx, rank), buffer + 1) != m.IN_SLOT
    return straight


@inner
def fold(
    ctx: int, signature: int, rows: int, elems: int, chunk_elems: int, mode: int, slots: int, root: int, divisor: int,
    steps: int, recipe: int, send: int, recv: int,
) -> Any:  # fmt: skip
    """Fold rows of `elems` elements, each rank a part, `chunk_elems` at a time; see `mode` and `slots` above."""
    item = field(recipe, ITEM)
    past = elems * item >= m.PAST_BYTES * (1 if mode == PART else field(ctx, m.SIZE))
    for begin in range(0, elems, chunk_elems):
        n, rest, at = min(chunk_elems, elems - begin), elems - begin, begin * item
        code = _fold_chunk(
            ctx, signature, rows, n, rest, mode, slots, past, root, divisor, steps, recipe, send + at, recv + at
        )  # fmt: skip
        if code != m.OK:
            return m.OK if code == m.WHOLE else code
    return m.OK


@inner
def _fold_chunk(
    ctx: int, signature: int, rows: int, elems: int, rest: int, mode: int, slots: int, past: bool, root: int,
    divisor: int, steps: int, recipe: int, send: int, recv: int,
) -> Any:  # fmt: skip
    """Fold one chunk, or all the rest where all is mapped: meet, fold a part, meet again and fetch the others'."""
    me, size, item = field(ctx, m.ME), field(ctx, m.SIZE), field(recipe, ITEM)
    first, count = (me * elems, elems) if mode == PART else part_of(elems, size, me)
    after = first + count
    m.step(ctx)
    m.say(ctx, m.SEND, send, rows * elems * item)
    m.say(ctx, m.RECV, recv, elems * item)
    _show(ctx, m.SEND, slots, send, 0, first * item)
    _show(ctx, m.SEND, slots, send, after * item, elems * item)
    code = m.meet(ctx, signature)
    if code != m.OK:
        return code
    piece_elems = field(ctx, m.PIECE_BYTES) // item
    own = field(ctx, m.SCRATCH) + scratch_blocks(size) * BLOCK_BYTES + size * field(ctx, m.PIECE_BYTES)
    shared = mode == EVERYWHERE and slots != ALL and _are_mapped(ctx, m.RECV)
    whole = shared and _are_mapped(ctx, m.SEND)  # nothing is in a slot: chunks would but add meetings
    first, count = part_of(rest, size, me) if whole else (first, count)
    straight = shared or _is_straight(ctx, m.SEND)
    recv = m.slot(ctx, me, 1) if mode == TO_ROOT and me != root else recv
    for begin in range(0, count, piece_elems):
        n, at = min(piece_elems, count - begin), (first + begin) * item
        into = recv + (begin * item if mode == PART else at)
        # Lines of an operand are in a cache once they are read, and a slot is filled from there.
        goes_past = past and (slots == NONE or shared) and into != send + at
        _fold_piece(ctx, into, first + begin, n, divisor, steps, recipe, goes_past, own if shared else 0)
    fence()  # what went past the caches is there before anybody is told
    if mode != PART and not shared:
        # All meet again once the parts are there. Where they lie is said on the card's other line.
        m.step(ctx)
        if mode == EVERYWHERE:
            m.say(ctx, m.RECV, recv, elems * item)
            _show(ctx, m.RECV, slots, recv, first * item, after * item)
        else:
            set_field(m.line(ctx, me), m.RECV + 1, m.IN_SLOT)
        code = m.meet(ctx, 0)
        if code != m.OK:
            return code
        straight = _is_straight(ctx, m.RECV)  # the operands have been read
        for i in range(1, size if mode == EVERYWHERE or me == root else 0):
            rank = (me + i) % size
            first, count = part_of(elems, size, rank)
            m.fetch(ctx, rank, m.RECV, first * item, recv + first * item, count * item, past)
    code = m.leave(ctx) if straight else m.OK
    return m.WHOLE if whole and code == m.OK else code
