"""Messages that go and come in one call, none before another."""

from __future__ import annotations

from typing import Any

from lowshard.comm.node.atomic import acquire, peek, poke, release
from lowshard.comm.node.inlined import inner
from lowshard.comm.node.message_rings import (
    ACCEPTED,
    ALONE,
    BROKEN,
    FULL,
    GROUP_WORDS,
    KIND,
    LENGTH,
    OFFERED,
    PENDING,
    POSTED,
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
    me = peek(ctx + 8 * ME)
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
    me = peek(ctx + 8 * ME)
    entry, out, into = entry_of(ctx, me, dst, number), head_of(ctx, me, dst), head_of(ctx, src, me)
    expected = peek(into + TAKEN)
    coming = entry_of(ctx, src, me, expected)
    deadline_ns, tries = clock_ns(ctx) + peek(ctx + 8 * TIMEOUT_NS), 0
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
                if peek(ctx + 8 * FAULT) != 0:
                    poke(ctx + 8 * FAULT, 0)
                    ended = FAULTY
                take(ctx, into, expected)
        elif acquire(into + POSTED) > expected:
            moved = True
            if peek(coming + 8 * KIND) == THERE_OFFERED and peek(coming + 8 * LENGTH) == recv_bytes:
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
                    poke(coming + 8 * BROKEN, 1)
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
        rows: address of rows of GROUP_WORDS int64: peer, address, bytes, whether it sends; out: number of the message,
            how it ended, bytes that came instead.
        count: rows.

    Returns:
        OK where every row has ended, well or not; FULL where a ring had no room for all sends, and nothing but the
        sends that have a number was done; else why a wait ended.
    """
    for i in range(count):
        row = rows + 8 * GROUP_WORDS * i
        poke(row + 32, FULL)
        poke(row + 40, OK)
    for i in range(count):
        row = rows + 8 * GROUP_WORDS * i
        if peek(row + 24) != 0:
            poke(row + 32, post(ctx, peek(row), peek(row + 8), peek(row + 16), ALONE))
            if peek(row + 32) == FULL:
                return FULL
    for i in range(count):
        row = rows + 8 * GROUP_WORDS * i
        if peek(row + 24) == 0:
            code = receive(ctx, peek(row), peek(row + 8), peek(row + 16))
            poke(row + 40, code)
            poke(row + 48, peek(ctx + 8 * CAME))
            if code != OK and code != UNEQUAL and code != FAULTY:
                poke(ctx + 8 * MISSING, peek(row))
                for j in range(count):
                    other = rows + 8 * GROUP_WORDS * j
                    if peek(other + 24) != 0:
                        withdraw(ctx, peek(other), peek(other + 32))
                return code
    for i in range(count):
        row = rows + 8 * GROUP_WORDS * i
        if peek(row + 24) != 0 and not fits_an_entry(ctx, peek(row + 16)):
            head = head_of(ctx, peek(ctx + 8 * ME), peek(row))
            code = await_word(
                ctx, head + TAKEN, head + TAKEN_SLEEPERS, peek(row + 32) + 1, peek(row)
            )  # fmt: skip
            if code != OK:
                return code
    return OK
