"""Moves between the ranks of a node: out of slots, out of segments that are mapped, out of private memory."""

from __future__ import annotations

from typing import Any

from lowshard.comm.node.atomic import copy_bytes, fence, peek, poke
from lowshard.comm.node.copy_choice import (
    ALL_TO_ALL,
    EXCHANGE,
    GATHER,
    OWN_PART,
    hear_choice,
    learn,
    row_for,
    second_is_next,
    slots_row,
    tell_choice,
)
from lowshard.comm.node.inlined import inner
from lowshard.comm.node.node_rendezvous import (
    CHOICES,
    ME,
    OK,
    RECV,
    SEND,
    SIZE,
    SLOT_BYTES,
    SMALL_BYTES,
    UNEQUAL,
    clock_ns,
    line,
    meet,
    slot,
    step,
)
from lowshard.comm.node.peer_copy import (
    OWN_STREAM_BYTES,
    PAGE_BYTES,
    copy,
    copy_past,
    fetch,
    is_private,
    leave,
    put,
    say,
    show,
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

OWN_TURN_BYTES, TURN_BYTES = 4 << 20, 1 << 20
"""From the one on a rank copies its own part by turns with those of others, so many bytes each: what it reads of its
own lies in a cache, which ranks may share, when others read it. From OWN_STREAM_BYTES on it goes past the caches where
that is found to be faster."""


@inner
def gather_slots(
    ctx: int, signature: int, send: int, send_bytes: int, recv: int, first: int, ranks: int, offset: int,
    each_bytes: int, most_bytes: int,
) -> Any:  # fmt: skip
    """Show `send_bytes` of this rank, and copy a part of what others show: one meeting.

    From each of `ranks` ranks from `first` on, `each_bytes` at `offset` go to recv, one behind the other. No rank shows
    more than `most_bytes`, the same number on all of them.
    """
    me, row, past, begin_ns = peek(ctx + 8 * ME), slots_row(peek(ctx + 8 * CHOICES), most_bytes), False, 0
    step(ctx)
    if row != 0:
        tell_choice(ctx, row)
        past, begin_ns = second_is_next(row), clock_ns(ctx)
    show(slot(ctx, me, 0), send, send_bytes, past)
    code = meet(ctx, signature)
    if code != OK:
        return code
    if each_bytes != 0:
        _take_from_slots(ctx, send, recv, first, ranks, offset, each_bytes)
    if row != 0:
        hear_choice(ctx, row)
        learn(row, past, most_bytes, clock_ns(ctx) - begin_ns)
    return code


@inner
def _take_from_slots(
    ctx: int, send: int, recv: int, first: int, ranks: int, offset: int, each_bytes: int
) -> None:
    """Copy a part of what each of some ranks shows."""
    me = peek(ctx + 8 * ME)
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
    me, size, choice = peek(ctx + 8 * ME), peek(ctx + 8 * SIZE), 0
    apart = each_bytes if send_bytes > each_bytes else 0
    step(ctx)
    say(ctx, SEND, send, send_bytes)
    if takes_pipes(ctx, each_bytes) and is_private(ctx):
        kind = GATHER if apart == 0 else ALL_TO_ALL
        choice = row_for(peek(ctx + 8 * CHOICES), kind, each_bytes)
    handed = offer(ctx, choice)
    turns = apart == 0 and each_bytes >= OWN_TURN_BYTES and send != recv + me * each_bytes
    large = turns and choice == 0 and each_bytes >= OWN_STREAM_BYTES
    own = row_for(peek(ctx + 8 * CHOICES), OWN_PART, each_bytes) if large else 0
    past = own != 0 and second_is_next(own)
    if own != 0:
        tell_choice(ctx, own)
    code = meet(ctx, signature)
    if code != OK:
        if handed:
            let_go_of_all(ctx)
        return code
    hear_choice(ctx, choice + own)  # one of them is 0
    begin_ns = clock_ns(ctx) if choice + own != 0 else 0
    begin_flows(ctx)
    for i in range(1, size):
        rank = (me + i) % size
        if handed:
            begin_out(flow_of(ctx, rank), send + rank * apart, each_bytes)
            flow(ctx, rank)
        if is_handed(ctx, rank, each_bytes):
            there = peek(line(ctx, rank) + 8 * SEND) + offset
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
    code = _finish(ctx, handed, choice, begin_ns, each_bytes)
    if code == OK and own != 0:
        learn(own, past, each_bytes, clock_ns(ctx) - begin_ns)
    return code


@inner
def _finish(ctx: int, handed: bool, choice: int, begin_ns: int, size_bytes: int) -> Any:
    """End a call that may take pipes, and note how long it took."""
    code = finish_flows(ctx)
    if code != OK:
        return code
    whole = peek(line(ctx, peek(ctx + 8 * ME)) + 8 * WAY) != BROKEN
    code = leave(ctx)
    if code == OK and handed and whole:
        let_go_of_all(ctx)
    if code == OK and choice != 0:
        learn(choice, handed, size_bytes, clock_ns(ctx) - begin_ns)
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
    me, size = peek(ctx + 8 * ME), peek(ctx + 8 * SIZE)
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
    me, size = peek(ctx + 8 * ME), peek(ctx + 8 * SIZE)
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
    me, size = peek(ctx + 8 * ME), peek(ctx + 8 * SIZE)
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
    size = peek(ctx + 8 * SIZE)
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
    me, size = peek(ctx + 8 * ME), peek(ctx + 8 * SIZE)
    head, mine = 24 * size, slot(ctx, me, 0)
    last = peek(ctx + 8 * SLOT_BYTES) - 8
    copy_bytes(mine, table, head)
    small = send_bytes <= peek(ctx + 8 * SMALL_BYTES) and head + send_bytes <= last
    poke(mine + last, 1 if small else 0)
    slots = slots_row(peek(ctx + 8 * CHOICES), send_bytes) if small else 0
    past = slots != 0 and second_is_next(slots)
    begin_ns = clock_ns(ctx) if slots != 0 else 0
    if small:
        show(mine + head, send, send_bytes, past)
    say(ctx, SEND, send, send_bytes)
    choice = 0
    if not small and takes_pipes(ctx, send_bytes // size) and is_private(ctx):
        choice = row_for(peek(ctx + 8 * CHOICES), EXCHANGE, send_bytes)
    handed = offer(ctx, choice)
    if slots != 0:
        tell_choice(ctx, slots)
    code = meet(ctx, signature)
    if code == OK and check and not _tables_agree(ctx):
        code = UNEQUAL
    if code != OK:
        if handed:
            let_go_of_all(ctx)
        return code
    hear_choice(ctx, choice + slots)  # one of them is 0
    begin_ns = clock_ns(ctx) if choice != 0 else begin_ns
    begin_flows(ctx)
    all_in_slots = True
    for i in range(size):
        rank = (me + i) % size
        part = peek(table + 24 * rank)
        if handed and rank != me and takes_pipes(ctx, part):
            begin_out(flow_of(ctx, rank), send + peek(table + 24 * rank + 8), part)
            flow(ctx, rank)
        theirs = slot(ctx, rank, 0)
        if peek(theirs + last) != 0:
            continue
        all_in_slots = False
        part, at = peek(theirs + 24 * me), peek(theirs + 24 * me + 8)
        if rank != me and is_handed(ctx, rank, part):
            there = peek(line(ctx, rank) + 8 * SEND) + at
            begin_into(flow_of(ctx, rank), recv + peek(places + 8 * rank), there, part)
    for i in range(size):
        rank = (me + i) % size
        theirs = slot(ctx, rank, 0)
        part, at = peek(theirs + 24 * me), peek(theirs + 24 * me + 8)
        target = recv + peek(places + 8 * rank)
        if peek(theirs + last) != 0:
            if part:
                copy_bytes(target, theirs + head + at, part)
        elif rank == me or not is_handed(ctx, rank, part):
            fetch(ctx, rank, SEND, at, target, part)
    if not all_in_slots:
        return _finish(ctx, handed, choice, begin_ns, send_bytes)
    if slots != 0:
        learn(slots, past, send_bytes, clock_ns(ctx) - begin_ns)
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
