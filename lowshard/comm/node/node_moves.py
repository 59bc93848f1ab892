"""Moves between the ranks of a node: out of slots, out of segments that are mapped, out of private memory."""

from __future__ import annotations

from typing import Any

from lowshard.comm.node.atomic import field, peek, poke
from lowshard.comm.node.inlined import inner
from lowshard.comm.node.node_rendezvous import (
    ME,
    OK,
    RECV,
    SEND,
    SIZE,
    SLOT_BYTES,
    SMALL_BYTES,
    UNEQUAL,
    line,
    meet,
    slot,
    step,
)
from lowshard.comm.node.peer_copy import (
    PAGE_BYTES,
    copy,
    copy_past,
    fetch,
    is_private,
    leave,
    put,
    say,
    stays_in_caches,
)
from lowshard.comm.node.pipe import (
    BROKEN,
    WAY,
    begin_flows,
    begin_into,
    begin_out,
    finish_flows,
    flow,
    flow_of,
    is_handed,
    let_go_of_all,
    offer,
    takes_pipes,
)
from lowshard.compiled.emitted import copy_bytes, fence

OWN_TURN_BYTES, TURN_BYTES = 4 << 20, 1 << 20
"""From the one on a rank copies its own part by turns with those of others, so many bytes each: what it reads of its
own lies in a cache, which ranks may share, when others read it. What it writes goes past the caches where these would
not keep it."""


@inner
def gather_slots(
    ctx: int, signature: int, send: int, send_bytes: int, recv: int, first: int, ranks: int, offset: int,
    each_bytes: int,
) -> Any:  # fmt: skip
    """Show `send_bytes` of this rank, and copy a part of what others show: one meeting.

    From each of `ranks` ranks from `first` on, `each_bytes` at `offset` go to recv, one behind the other.
    """
    step(ctx)
    copy_bytes(slot(ctx, field(ctx, ME), 0), send, send_bytes)
    code = meet(ctx, signature)
    if code != OK:
        return code
    if each_bytes != 0:
        _take_from_slots(ctx, send, recv, first, ranks, offset, each_bytes)
    return code


@inner
def _take_from_slots(
    ctx: int, send: int, recv: int, first: int, ranks: int, offset: int, each_bytes: int
) -> None:
    """Copy a part of what each of some ranks shows."""
    me = field(ctx, ME)
    for i in range(ranks):
        rank, into = first + i, recv + i * each_bytes
        if rank != me:
            copy_bytes(into, slot(ctx, rank, 0) + offset, each_bytes)
        elif into != send + offset:
            copy_bytes(into, slot(ctx, me, 0) + offset, each_bytes)  # send may have been written over


@inner
def gather_buffers(
    ctx: int, signature: int, send: int, send_bytes: int, recv: int, first: int, ranks: int, offset: int,
    each_bytes: int,
) -> Any:  # fmt: skip
    """As `gather_slots` for all ranks, straight out of the others' buffers: a meeting before and one after.

    Each takes its part of what is shown, or all of it: what another rank takes begins at its number times a part.
    """
    me, size = field(ctx, ME), field(ctx, SIZE)
    apart = each_bytes if send_bytes > each_bytes else 0
    step(ctx)
    say(ctx, SEND, send, send_bytes)
    handed = offer(ctx, takes_pipes(ctx, each_bytes) and is_private(ctx))
    turns = apart == 0 and each_bytes >= OWN_TURN_BYTES and send != recv + me * each_bytes
    past = turns and not stays_in_caches(ctx, each_bytes)
    code = meet(ctx, signature)
    if code != OK:
        if handed:
            let_go_of_all(ctx)
        return code
    begin_flows(ctx)
    for i in range(1, size):
        rank = (me + i) % size
        if handed:
            begin_out(flow_of(ctx, rank), send + rank * apart, each_bytes)
            flow(ctx, rank)
        if is_handed(ctx, rank, each_bytes):
            there = field(line(ctx, rank), SEND) + offset
            begin_into(flow_of(ctx, rank), recv + rank * each_bytes, there, each_bytes)
    turn = TURN_BYTES if turns else max(1, each_bytes)
    for begin in range(0, each_bytes, turn):
        n = min(turn, each_bytes - begin)
        for i in range(size):
            rank = (me + i) % size  # each begins with another, so that no memory is asked by all at once
            into = recv + rank * each_bytes + begin
            if rank == me and past:
                copy_past(into, send + begin, n)
            elif rank == me or not is_handed(ctx, rank, each_bytes):
                fetch(ctx, rank, SEND, offset + begin, into, n)
    if past:
        fence()  # what went past the caches is there before anybody is told
    return _finish(ctx, handed)


@inner
def _finish(ctx: int, handed: bool) -> Any:
    """End a call that may take pipes."""
    code = finish_flows(ctx)
    if code != OK:
        return code
    whole = field(line(ctx, field(ctx, ME)), WAY) != BROKEN
    code = leave(ctx)
    if code == OK and handed and whole:
        let_go_of_all(ctx)
    return code


@inner
def _own_share(size_bytes: int, ranks: int) -> Any:
    """Return what a rank copies of what it and the root exchange, so that the root has as much to do as each other."""
    return size_bytes // ranks * (ranks - 1) // PAGE_BYTES * PAGE_BYTES


@inner
def collect(
    ctx: int, signature: int, send: int, recv: int, recv_bytes: int, root: int, each_bytes: int
) -> Any:
    """Put every rank's bytes into the root's buffer: each rank most of its own, and the root the rest."""
    step(ctx)
    say(ctx, SEND, send, each_bytes)
    say(ctx, RECV, recv, recv_bytes)
    code = meet(ctx, signature)
    if code != OK:
        return code
    me, size = field(ctx, ME), field(ctx, SIZE)
    cut = _own_share(each_bytes, size)
    if me != root:
        put(ctx, root, me * each_bytes, send, cut)
        return leave(ctx)
    put(ctx, root, me * each_bytes, send, each_bytes)
    for i in range(1, size):
        rank = (me + i) % size
        fetch(ctx, rank, SEND, cut, recv + rank * each_bytes + cut, each_bytes - cut)
    return leave(ctx)


@inner
def deal(ctx: int, signature: int, send: int, send_bytes: int, recv: int, root: int, each_bytes: int) -> Any:
    """Copy each rank's part out of the root's buffer: each rank most of its own, and the root the rest: scatter."""
    step(ctx)
    say(ctx, SEND, send, send_bytes)
    say(ctx, RECV, recv, each_bytes)
    code = meet(ctx, signature)
    if code != OK:
        return code
    me, size = field(ctx, ME), field(ctx, SIZE)
    cut = _own_share(each_bytes, size)
    if me != root:
        fetch(ctx, root, SEND, me * each_bytes, recv, cut)
        return leave(ctx)
    fetch(ctx, root, SEND, me * each_bytes, recv, each_bytes)
    for i in range(1, size):
        rank = (me + i) % size
        put(ctx, rank, cut, send + rank * each_bytes + cut, each_bytes - cut)
    return leave(ctx)


@inner
def spread(ctx: int, signature: int, buf: int, size_bytes: int, root: int) -> Any:
    """Copy the root's bytes to all ranks: they take most, and the root, else idle, gives the rest."""
    step(ctx)
    say(ctx, SEND, buf, size_bytes)
    say(ctx, RECV, buf, size_bytes)
    code = meet(ctx, signature)
    if code != OK:
        return code
    me, size = field(ctx, ME), field(ctx, SIZE)
    cut = _own_share(size_bytes, size)
    if me != root:
        fetch(ctx, root, SEND, 0, buf, cut)
    else:
        for i in range(1, size):
            put(ctx, (me + i) % size, cut, buf + cut, size_bytes - cut)
    return leave(ctx)


@inner
def _tables_agree(ctx: int) -> bool:
    """Say whether each part that a rank sends is as long as the part that its receiver expects.

    Each slot begins with three int64 a rank: bytes sent, where from, bytes expected. Every rank looks at all pairs,
    so that all come to the same answer.
    """
    size = field(ctx, SIZE)
    for src in range(size):
        for dst in range(size):
            if peek(slot(ctx, src, 0) + 24 * dst) != peek(slot(ctx, dst, 0) + 24 * src + 16):
                return False
    return True


@inner
def exchange(
    ctx: int, signature: int, table: int, places: int, send: int, send_bytes: int, recv: int, check: bool,
) -> Any:  # fmt: skip
    """Send each rank a part of its own length: all_to_all_v.

    Args:
        ctx: the context.
        signature: of the call.
        table: address of three int64 a rank: bytes sent to it, where in send, bytes expected from it.
        places: address of an int64 a rank: where in recv.
        send: address of what is sent.
        send_bytes: bytes of send; where they fit they go through this rank's slot.
        recv: address of what is received.
        check: compare the tables of all ranks before anything moves.
    """
    step(ctx)
    me, size = field(ctx, ME), field(ctx, SIZE)
    head, mine = 24 * size, slot(ctx, me, 0)
    last = field(ctx, SLOT_BYTES) - 8
    copy_bytes(mine, table, head)
    small = send_bytes <= field(ctx, SMALL_BYTES) and head + send_bytes <= last
    poke(mine + last, 1 if small else 0)
    if small:
        copy_bytes(mine + head, send, send_bytes)
    say(ctx, SEND, send, send_bytes)
    handed = offer(ctx, not small and takes_pipes(ctx, send_bytes // size) and is_private(ctx))
    code = meet(ctx, signature)
    if code == OK and check and not _tables_agree(ctx):
        code = UNEQUAL
    if code != OK:
        if handed:
            let_go_of_all(ctx)
        return code
    begin_flows(ctx)
    all_in_slots = True
    for i in range(size):
        rank = (me + i) % size
        part = field(table, 3 * rank)
        if handed and rank != me and takes_pipes(ctx, part):
            begin_out(flow_of(ctx, rank), send + field(table, 3 * rank + 1), part)
            flow(ctx, rank)
        theirs = slot(ctx, rank, 0)
        if peek(theirs + last) != 0:
            continue
        all_in_slots = False
        part, at = field(theirs, 3 * me), field(theirs, 3 * me + 1)
        if rank != me and is_handed(ctx, rank, part):
            there = field(line(ctx, rank), SEND) + at
            begin_into(flow_of(ctx, rank), recv + field(places, rank), there, part)
    for i in range(size):
        rank = (me + i) % size
        theirs = slot(ctx, rank, 0)
        part, at = field(theirs, 3 * me), field(theirs, 3 * me + 1)
        target = recv + field(places, rank)
        if peek(theirs + last) != 0:
            if part:
                copy_bytes(target, theirs + head + at, part)
        elif rank == me or not is_handed(ctx, rank, part):
            fetch(ctx, rank, SEND, at, target, part)
    if not all_in_slots:
        return _finish(ctx, handed)
    return OK


@inner
def place(into: int, source: int, size_bytes: int) -> Any:
    """Copy bytes within this process, as `copy` does."""
    copy(into, source, size_bytes)
    return OK


@inner
def barrier(ctx: int, signature: int) -> Any:
    """Meet."""
    step(ctx)
    return meet(ctx, signature)
