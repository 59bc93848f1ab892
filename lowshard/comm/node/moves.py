"""Moves between the ranks of a node: small payloads through the slots, larger ones from where they lie."""

from __future__ import annotations

from typing import Any

from lowshard.comm.node import meeting as m
from lowshard.comm.node.atomic import field, inner, peek, poke
from lowshard.compiled.emitted import copy_bytes

_PAGE_BYTES = 4096


@inner
def move_by_slots(
    ctx: int, signature: int, rows: int, first: int, ranks: int, row: int, row_bytes: int, chunk_bytes: int, send: int,
    recv: int,
) -> Any:  # fmt: skip
    """Show `rows` rows, and copy one row of what some ranks show: row `row` of `ranks` ranks from `first` on.

    Rows are equally long on all ranks; `chunk_bytes` of each go at one meeting.
    """
    me, begin = field(ctx, m.ME), 0
    while True:
        n = min(chunk_bytes, row_bytes - begin)
        m.step(ctx)
        if n == row_bytes:
            copy_bytes(m.slot(ctx, me), send, rows * n)
        else:
            for i in range(rows):
                copy_bytes(m.slot(ctx, me) + i * n, send + i * row_bytes + begin, n)
        code = m.meet(ctx, signature)
        if code != m.OK:
            return code
        for i in range(ranks):
            into = recv + i * row_bytes + begin
            if first + i != me or into != send + row * row_bytes + begin:
                copy_bytes(into, m.slot(ctx, first + i) + row * n, n)
        begin += n
        if begin >= row_bytes:
            return m.OK


@inner
def move(ctx: int, signature: int, send_bytes: int, row: int, row_bytes: int, send: int, recv: int) -> Any:
    """Copy one row of the operands of all ranks, straight from where they lie; see `move_by_slots`."""
    m.step(ctx)
    m.say(ctx, m.SEND, send, send_bytes)
    code = m.meet(ctx, signature)
    if code != m.OK:
        return code
    size, past = field(ctx, m.SIZE), row_bytes >= m.PAST_BYTES
    # What all ranks take goes by turns: it lies in a cache, which they may share, when the next reads it.
    turn = m.READ_BYTES if send_bytes == row_bytes else row_bytes
    for begin in range(0, row_bytes, turn):
        n = min(turn, row_bytes - begin)
        for i in range(size):
            # Each begins with another, so that no memory is asked by all at once.
            at = (field(ctx, m.ME) + i) % size
            m.fetch(ctx, at, m.SEND, row * row_bytes + begin, recv + at * row_bytes + begin, n, past)
    return m.leave(ctx)


@inner
def _begin_by_root(ctx: int, signature: int, send: int, send_bytes: int, recv: int, recv_bytes: int) -> Any:
    """Meet for a move to or from one rank, of which both ends copy a part."""
    m.step(ctx)
    m.say(ctx, m.SEND, send, send_bytes)
    m.say(ctx, m.RECV, recv, recv_bytes)
    return m.meet(ctx, signature)


@inner
def _is_in_place(ctx: int, root: int, begin: int) -> Any:
    """Say whether the root's result lies so many bytes behind the beginning of its operand: it has no row to copy."""
    card = m.line(ctx, root)
    return field(card, m.RECV) == field(card, m.SEND) + begin


@inner
def spread(
    ctx: int, signature: int, send_bytes: int, row_bytes: int, stride: int, root: int, send: int, recv: int
) -> Any:  # fmt: skip
    """Copy a row of the root's operand to each rank, which lies `stride` bytes behind that of the rank before.

    They take most of theirs, and the root writes the rest, unless it has one of its own to copy.
    """
    code = _begin_by_root(ctx, signature, send, send_bytes, recv, row_bytes)
    if code != m.OK:
        return code
    me, size = field(ctx, m.ME), field(ctx, m.SIZE)
    in_place, past = _is_in_place(ctx, root, stride * root), row_bytes >= m.PAST_BYTES
    cut = row_bytes // size * (size - 1) // _PAGE_BYTES * _PAGE_BYTES if in_place else row_bytes
    m.fetch(ctx, root, m.SEND, me * stride, recv, row_bytes if me == root else cut, past)
    for i in range(1, size if me == root else 0):
        at = (me + i) % size
        m.put(ctx, at, cut, send + at * stride + cut, row_bytes - cut)
    return m.leave(ctx)


@inner
def collect(
    ctx: int, signature: int, recv_bytes: int, row_bytes: int, root: int, send: int, recv: int
) -> Any:
    """Copy each rank's operand to its row of the root's result: they write most, and the root takes the rest."""
    code = _begin_by_root(ctx, signature, send, row_bytes, recv, recv_bytes)
    if code != m.OK:
        return code
    me, size, past = field(ctx, m.ME), field(ctx, m.SIZE), row_bytes >= m.PAST_BYTES
    cut = row_bytes // size // _PAGE_BYTES * _PAGE_BYTES if _is_in_place(ctx, root, -row_bytes * root) else 0
    if me != root:
        m.put(ctx, root, me * row_bytes + cut, send + cut, row_bytes - cut)
    for i in range(size if me == root else 0):
        at = (me + i) % size
        m.fetch(ctx, at, m.SEND, 0, recv + at * row_bytes, row_bytes if at == me else cut, past)
    return m.leave(ctx)


@inner
def _longest_part(ctx: int) -> Any:
    """Return the bytes of the longest part that any rank sends; -1 where a receiver expects another length.

    Each slot begins with three int64 a rank: bytes sent, where from, bytes expected. Every rank looks at all pairs,
    so that all come to the same answer.
    """
    size, longest = field(ctx, m.SIZE), 0
    for src in range(size):
        for dst in range(size):
            part = peek(m.slot(ctx, src) + 24 * dst)
            if part != peek(m.slot(ctx, dst) + 24 * src + 16):
                return -1
            longest = max(longest, part)
    return longest


@inner
def exchange(
    ctx: int, signature: int, table: int, places: int, send: int, send_bytes: int, recv: int, small_bytes: int,
    crosses: bool,
) -> Any:  # fmt: skip
    """Send each rank a part of its own length: all_to_all_v.

    `table` has three int64 a rank: bytes sent to it, where in send, bytes expected from it; `places` has one: where in
    recv. Up to `small_bytes` send goes through this rank's slot, behind the table. Larger ones are read from where they
    lie, or where no rank `crosses`, go through the slots too, in chunks.
    """
    m.step(ctx)
    me, size = field(ctx, m.ME), field(ctx, m.SIZE)
    head, mine, last = 24 * size, m.slot(ctx, me), field(ctx, m.SLOT_BYTES) - 8
    small = send_bytes <= small_bytes
    copy_bytes(mine, table, head)
    poke(mine + last, 1 if small else 0)
    if small:
        copy_bytes(mine + head, send, send_bytes)
    m.say(ctx, m.SEND, send, send_bytes)
    code = m.meet(ctx, signature)
    if code != m.OK:
        return code
    longest = _longest_part(ctx)
    if longest < 0:
        return m.UNEQUAL
    all_small = True
    for i in range(size):
        rank = (me + i) % size
        theirs, into = m.slot(ctx, rank), recv + field(places, rank)
        part, at = field(theirs, 3 * me), field(theirs, 3 * me + 1)
        if peek(theirs + last) != 0:
            copy_bytes(into, theirs + head + at, part)
            continue
        all_small = False
        if crosses and part != 0:
            m.fetch(ctx, rank, m.SEND, at, into, part, part >= m.PAST_BYTES)
    if all_small:
        return m.OK
    return m.leave(ctx) if crosses else _exchange_by_slots(ctx, table, places, send, recv, longest)


@inner
def _exchange_by_slots(ctx: int, table: int, places: int, send: int, recv: int, longest: int) -> Any:
    """Go on with an exchange in chunks, one for each rank at a time."""
    me, size = field(ctx, m.ME), field(ctx, m.SIZE)
    chunk = field(ctx, m.SLOT_BYTES) // size // 64 * 64
    for begin in range(0, longest, chunk):
        m.step(ctx)
        for rank in range(size):
            n = min(chunk, field(table, 3 * rank) - begin)
            if n > 0:
                copy_bytes(m.slot(ctx, me) + rank * chunk, send + field(table, 3 * rank + 1) + begin, n)
        code = m.meet(ctx, 0)
        if code != m.OK:
            return code
        for rank in range(size):
            n = min(chunk, field(table, 3 * rank + 2) - begin)
            if n > 0:
                copy_bytes(recv + field(places, rank) + begin, m.slot(ctx, rank) + me * chunk, n)
    return m.OK
