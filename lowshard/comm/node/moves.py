"""Moves between the ranks of a node: small payloads through the slots, larger ones from where they lie."""

from __future__ import annotations

from typing import Any

from lowshard.comm.node.atomic import field, peek, poke
from lowshard.comm.node.inlined import inner
from lowshard.comm.node.meeting import (
    ME,
    OK,
    RECV,
    SEND,
    SIZE,
    SLOT_BYTES,
    UNEQUAL,
    fetch,
    leave,
    meet,
    put,
    say,
    slot,
    step,
)
from lowshard.compiled.emitted import copy_bytes

_PAGE_BYTES = 4096


@inner
def move_by_slots(
    ctx: int, signature: int, send: int, rows: int, recv: int, first: int, ranks: int, row: int, row_bytes: int,
    chunk_bytes: int,
) -> Any:  # fmt: skip
    """Show rows, and copy one row of what others show.

    Args:
        ctx: the context.
        signature: of the call.
        send: address of what this rank shows.
        rows: how many rows; 0 for nothing.
        recv: address of what it takes.
        first: the first rank that it takes a row from.
        ranks: from how many ranks; 0 for none.
        row: which of their rows.
        row_bytes: of a row, the same on all ranks.
        chunk_bytes: of each row so many go at one meeting.
    """
    me, begin = field(ctx, ME), 0
    while True:
        n = min(chunk_bytes, row_bytes - begin)
        step(ctx)
        if n == row_bytes:
            copy_bytes(slot(ctx, me), send, rows * n)
        else:
            for i in range(rows):
                copy_bytes(slot(ctx, me) + i * n, send + i * row_bytes + begin, n)
        code = meet(ctx, signature)
        if code != OK:
            return code
        for i in range(ranks):
            into = recv + i * row_bytes + begin
            if first + i != me or into != send + row * row_bytes + begin:
                copy_bytes(into, slot(ctx, first + i) + row * n, n)
        begin += n
        if begin >= row_bytes:
            return OK


@inner
def move(
    ctx: int, signature: int, send: int, send_bytes: int, recv: int, first: int, ranks: int, row: int, row_bytes: int
) -> Any:  # fmt: skip
    """Copy one row of the operands of some ranks, straight from where they lie; see `move_by_slots`."""
    step(ctx)
    say(ctx, SEND, send, send_bytes)
    code = meet(ctx, signature)
    if code != OK:
        return code
    for i in range(ranks):
        # Each begins with another, so that no memory is asked by all at once.
        at = (field(ctx, ME) + i) % ranks
        fetch(ctx, first + at, SEND, row * row_bytes, recv + at * row_bytes, row_bytes)
    return leave(ctx)


@inner
def spread(ctx: int, signature: int, buf: int, size_bytes: int, root: int) -> Any:
    """Copy the root's bytes to all ranks: they take most, and the root, else idle, writes the rest."""
    step(ctx)
    say(ctx, SEND, buf, size_bytes)
    say(ctx, RECV, buf, size_bytes)
    code = meet(ctx, signature)
    if code != OK:
        return code
    me, size = field(ctx, ME), field(ctx, SIZE)
    cut = size_bytes // size * (size - 1) // _PAGE_BYTES * _PAGE_BYTES
    if me != root:
        fetch(ctx, root, SEND, 0, buf, cut)
    else:
        for i in range(1, size):
            put(ctx, (me + i) % size, cut, buf + cut, size_bytes - cut)
    return leave(ctx)


@inner
def _longest_part(ctx: int) -> Any:
    """Return the bytes of the longest part that any rank sends; -1 where a receiver expects another length.

    Each slot begins with three int64 a rank: bytes sent, where from, bytes expected. Every rank looks at all pairs,
    so that all come to the same answer.
    """
    size, longest = field(ctx, SIZE), 0
    for src in range(size):
        for dst in range(size):
            part = peek(slot(ctx, src) + 24 * dst)
            if part != peek(slot(ctx, dst) + 24 * src + 16):
                return -1
            longest = max(longest, part)
    return longest


@inner
def exchange(
    ctx: int, signature: int, table: int, places: int, send: int, send_bytes: int, recv: int, small_bytes: int,
    crosses: bool,
) -> Any:  # fmt: skip
    """Send each rank a part of its own length: all_to_all_v.

    Args:
        ctx: the context.
        signature: of the call.
        table: address of three int64 a rank: bytes sent to it, where in send, bytes expected from it.
        places: address of an int64 a rank: where in recv.
        send: address of what is sent.
        send_bytes: bytes of send.
        recv: address of what is received.
        small_bytes: up to here send goes through this rank's slot, behind the table.
        crosses: whether what does not is read from where it lies; else it goes through the slots too, in chunks.
    """
    step(ctx)
    me, size = field(ctx, ME), field(ctx, SIZE)
    head, mine, last = 24 * size, slot(ctx, me), field(ctx, SLOT_BYTES) - 8
    small = send_bytes <= small_bytes
    copy_bytes(mine, table, head)
    poke(mine + last, 1 if small else 0)
    if small:
        copy_bytes(mine + head, send, send_bytes)
    say(ctx, SEND, send, send_bytes)
    code = meet(ctx, signature)
    if code != OK:
        return code
    longest = _longest_part(ctx)
    if longest < 0:
        return UNEQUAL
    all_small = True
    for i in range(size):
        rank = (me + i) % size
        theirs, into = slot(ctx, rank), recv + field(places, rank)
        part, at = field(theirs, 3 * me), field(theirs, 3 * me + 1)
        if peek(theirs + last) != 0:
            copy_bytes(into, theirs + head + at, part)
            continue
        all_small = False
        if crosses and part != 0:
            fetch(ctx, rank, SEND, at, into, part)
    if all_small:
        return OK
    return leave(ctx) if crosses else _exchange_by_slots(ctx, table, places, send, recv, longest)


@inner
def _exchange_by_slots(ctx: int, table: int, places: int, send: int, recv: int, longest: int) -> Any:
    """Go on with an exchange in chunks, one for each rank at a time."""
    me, size = field(ctx, ME), field(ctx, SIZE)
    chunk = field(ctx, SLOT_BYTES) // size // 64 * 64
    for begin in range(0, longest, chunk):
        step(ctx)
        for rank in range(size):
            n = min(chunk, field(table, 3 * rank) - begin)
            if n > 0:
                copy_bytes(slot(ctx, me) + rank * chunk, send + field(table, 3 * rank + 1) + begin, n)
        code = meet(ctx, 0)
        if code != OK:
            return code
        for rank in range(size):
            n = min(chunk, field(table, 3 * rank + 2) - begin)
            if n > 0:
                copy_bytes(recv + field(places, rank) + begin, slot(ctx, rank) + me * chunk, n)
    return OK
