"""Messages that go and come in one call, none before another."""

from __future__ import annotations

from typing import Any

from lowshard.comm.node.atomic import acquire, field, peek, release, set_field
from lowshard.comm.node.inlined import inner
from lowshard.comm.node.message_rings import (
    ACCEPTED,
    ADDRESS,
    ALONE,
    BROKEN,
    CAME_BYTES,
    CODE,
    FULL,
    GROUP_WORDS,
    KIND,
    LENGTH,
    NUMBER,
    OFFERED,
    PEER,
    PENDING,
    POSTED,
    SENDS,
    SIZE_BYTES,
    TAKEN,
    TAKEN_SLEEPERS,
    THERE_OFFERED,
    ask_for,
    entry_of,
    fits_an_entry,
    head_of,
    post,
    pull_some,
    receive,
    send,
    take,
    withdraw,
)
from lowshard.comm.node.node_rendezvous import (
    CAME,
    FAULT,
    FAULTY,
    ME,
    MISSING,
    OK,
    TIMEOUT_NS,
    UNEQUAL,
    await_word,
    clock_ns,
    pause,
)
from lowshard.comm.node.peer_copy import NO_SEGMENT, segment_of
from lowshard.comm.node.pipe import begin_out, flow_of, hold, let_go, push, takes_pipes


@inner
def send_receive(
    ctx: int, dst: int, send_at: int, send_bytes: int, src: int, recv_at: int, recv_bytes: int
) -> Any:  # fmt: skip
    """Send a message and receive another, neither before the other."""
    me = field(ctx, ME)
    private = dst != me and segment_of(ctx, send_at, send_bytes) == NO_SEGMENT
    if private and takes_pipes(ctx, send_bytes) and hold(ctx, dst):
        number = post(ctx, dst, send_at, send_bytes, OFFERED)
        if number != FULL:
            begin_out(flow_of(ctx, dst), send_at, send_bytes)
            return _hand_on_and_receive(ctx, dst, number, src, recv_at, recv_bytes)
        let_go(ctx, dst)
    number = post(ctx, dst, send_at, send_bytes, ALONE)
    code = receive(ctx, src, recv_at, recv_bytes)
    if code != OK and code != UNEQUAL:
        if number != FULL:
            withdraw(ctx, dst, number)
        return code
    if number == FULL:
        ended = send(ctx, dst, send_at, send_bytes)
    elif fits_an_entry(ctx, send_bytes):
        ended = OK
    else:
        head = head_of(ctx, me, dst)
        ended = await_word(ctx, head + TAKEN, head + TAKEN_SLEEPERS, number + 1, dst)
    return ended if ended != OK else code


@inner
def _hand_on_and_receive(
    ctx: int, dst: int, number: int, src: int, recv_at: int, recv_bytes: int
) -> Any:  # fmt: skip
    """Hand on a message that was offered, once its receiver asks for it, and receive another meanwhile."""
    me = field(ctx, ME)
    entry, out, into = entry_of(ctx, me, dst, number), head_of(ctx, me, dst), head_of(ctx, src, me)
    expected = peek(into + TAKEN)
    coming = entry_of(ctx, src, me, expected)
    deadline_ns, tries = clock_ns(ctx) + field(ctx, TIMEOUT_NS), 0
    asked = received = False
    ended = OK
    while True:
        moved = False
        if acquire(entry + 8 * ACCEPTED) != 0:
            pushed = push(ctx, dst)
            moved = pushed != 0
            if pushed < 0:
                release(entry + 8 * BROKEN, 1)
        if received:
            if acquire(out + TAKEN) > number:
                break
        elif asked:
            ended = pull_some(ctx, coming, src)
            moved = moved or ended != PENDING
            if ended in (OK, FAULTY):
                received = True
                if field(ctx, FAULT) != 0:
                    set_field(ctx, FAULT, 0)
                    ended = FAULTY
                take(ctx, into, expected)
        elif acquire(into + POSTED) > expected:
            moved = True
            if field(coming, KIND) == THERE_OFFERED and field(coming, LENGTH) == recv_bytes:
                ask_for(ctx, coming, src, recv_at, recv_bytes)
                asked = True
            else:
                ended = receive(ctx, src, recv_at, recv_bytes)
                received = True
        if received and ended != OK and ended != UNEQUAL:
            withdraw(ctx, dst, number)
            return ended
        tries = 0 if moved else tries + 1
        if tries != 0:
            code = pause(ctx, tries, deadline_ns, dst if received else src)
            if code != OK:
                if asked and not received:
                    set_field(coming, BROKEN, 1)
                withdraw(ctx, dst, number)
                return code
    if acquire(entry + 8 * BROKEN) == 0:
        let_go(ctx, dst)
    return ended


@inner
def run_group(ctx: int, rows: int, count: int) -> Any:
    """Run sends and recvs that start together: post, receive, wait for what was posted.

    Args:
        ctx: the context.
        rows: address of rows of GROUP_WORDS int64; see there.
        count: rows.

    Returns:
        OK where every row has ended, well or not; FULL where a ring had no room for all sends, and nothing but the
        sends that have a number was done; else why a wait ended.
    """
    for i in range(count):
        row = rows + 8 * GROUP_WORDS * i
        set_field(row, NUMBER, FULL)
        set_field(row, CODE, OK)
    for i in range(count):
        row = rows + 8 * GROUP_WORDS * i
        if field(row, SENDS) != 0:
            set_field(
                row, NUMBER, post(ctx, field(row, PEER), field(row, ADDRESS), field(row, SIZE_BYTES), ALONE)
            )
            if field(row, NUMBER) == FULL:
                return FULL
    for i in range(count):
        row = rows + 8 * GROUP_WORDS * i
        if field(row, SENDS) == 0:
            code = receive(ctx, field(row, PEER), field(row, ADDRESS), field(row, SIZE_BYTES))
            set_field(row, CODE, code)
            set_field(row, CAME_BYTES, field(ctx, CAME))
            if code != OK and code != UNEQUAL and code != FAULTY:
                set_field(ctx, MISSING, field(row, PEER))
                for j in range(count):
                    other = rows + 8 * GROUP_WORDS * j
                    if field(other, SENDS) != 0:
                        withdraw(ctx, field(other, PEER), field(other, NUMBER))
                return code
    for i in range(count):
        row = rows + 8 * GROUP_WORDS * i
        if field(row, SENDS) != 0 and not fits_an_entry(ctx, field(row, SIZE_BYTES)):
            head = head_of(ctx, field(ctx, ME), field(row, PEER))
            code = await_word(
                ctx, head + TAKEN, head + TAKEN_SLEEPERS, field(row, NUMBER) + 1, field(row, PEER)
            )  # fmt: skip
            if code != OK:
                return code
    return OK
