"""Private memory handed on through pipes: its owner puts its pages there, uncopied, and the other copies them out.

A rank that reads another's memory (process_vm_readv) must look up and pin each page from afar, which takes longer than
to copy one of 4 KiB. Their owner finds them in a fraction of that time, and a pipe keeps them until they are read. Huge
pages are pinned many at once, so that reading is faster there.

Each process has a pipe to each other one of its node. A call that uses one holds it, from before it says so until all
of it has been read; where a call ends in disorder the pipe stays held for good, since something may lie in it still.
"""

from __future__ import annotations

from typing import Any

from lowshard.comm.node.atomic import (
    acquire,
    add_to,
    field,
    give_pages,
    last_error,
    peek,
    poke,
    read_file,
    release,
    set_field,
)
from lowshard.comm.node.inlined import inner
from lowshard.comm.node.node_rendezvous import (
    FAULT,
    FLOWS,
    ME,
    MEMBERS,
    OK,
    PIPES,
    PIPES_FROM,
    SIZE,
    TIMEOUT_NS,
    VECTORS,
    clock_ns,
    line,
    pause,
)
from lowshard.comm.node.peer_copy import transfer

PIPE_BYTES = 1 << 20
"""What lies in a pipe at most, and is put there at a time."""
_TO_BYTES = PIPE_BYTES - 4096
"""Larger parts do not fit at once, wherever they begin in a page; in turns they take longer than to be read across."""
PIPE_WORDS = 3
_TO, _FROM, _HELD = range(PIPE_WORDS)
"""Of a process of the node: the descriptors of the pipes to it and from it; whether a call holds that to it."""

FLOW_WORDS = 8
_OUT, _OUT_LEFT, _INTO, _INTO_LEFT, _THERE = range(5)
"""Of a rank: what is still to be handed on to it, and to be read from it; where that lies in its own memory."""

WAY = 7
"""Place on a card, beside those of `meet`: how what a rank shows is to be had."""
PLAIN, HANDED, BROKEN = range(3)
"""By reading it; out of the pipes; by reading it after all."""

_NONBLOCK = 2
_AGAIN, _INTERRUPTED = 11, 4


@inner
def takes_pipes(ctx: int, size_bytes: int) -> Any:
    """Say whether parts of so many bytes may go through pipes."""
    return field(ctx, PIPES) != 0 and field(ctx, PIPES_FROM) <= size_bytes <= _TO_BYTES


@inner
def _pipe(ctx: int, rank: int, word: int) -> Any:
    member = field(field(ctx, MEMBERS), rank)
    return field(ctx, PIPES) + 8 * (PIPE_WORDS * member + word)


@inner
def flow_of(ctx: int, rank: int) -> Any:
    """Return the address of what is under way between this rank and another."""
    return field(ctx, FLOWS) + 8 * FLOW_WORDS * rank


@inner
def hold(ctx: int, rank: int) -> Any:
    """Hold the pipe to a rank, if no call does."""
    held = _pipe(ctx, rank, _HELD)
    if add_to(held, 1) == 0:
        return True
    add_to(held, -1)
    return False


@inner
def let_go(ctx: int, rank: int) -> None:
    """Let go of the pipe to a rank, once it is empty."""
    add_to(_pipe(ctx, rank, _HELD), -1)


@inner
def hold_all(ctx: int) -> Any:
    """Hold the pipes to all other ranks, or none."""
    me, size = field(ctx, ME), field(ctx, SIZE)
    for i in range(1, size):
        if not hold(ctx, (me + i) % size):
            for j in range(1, i):
                let_go(ctx, (me + j) % size)
            return False
    return True


@inner
def let_go_of_all(ctx: int) -> None:
    """Let go of the pipes to all other ranks."""
    me, size = field(ctx, ME), field(ctx, SIZE)
    for i in range(1, size):
        let_go(ctx, (me + i) % size)


@inner
def begin_out(flow: int, address: int, size_bytes: int) -> None:
    """Note what is to be handed on."""
    set_field(flow, _OUT, address)
    set_field(flow, _OUT_LEFT, size_bytes)


@inner
def begin_into(flow: int, address: int, there: int, size_bytes: int) -> None:
    """Note what is to be read, and where it lies in its owner's memory."""
    set_field(flow, _INTO, address)
    set_field(flow, _THERE, there)
    set_field(flow, _INTO_LEFT, size_bytes)


@inner
def into_left(flow: int) -> Any:
    """Return the bytes that are still to be read."""
    return field(flow, _INTO_LEFT)


@inner
def _may_try_again() -> Any:
    error = last_error()
    return error in (_AGAIN, _INTERRUPTED)


@inner
def push(ctx: int, rank: int) -> Any:
    """Hand on as much as the pipe to a rank takes now; the bytes, or -1 where the pages cannot be had."""
    flow, vectors = flow_of(ctx, rank), ctx + 8 * VECTORS
    left = field(flow, _OUT_LEFT)
    if left == 0:
        return 0
    poke(vectors, field(flow, _OUT))
    poke(vectors + 8, min(left, PIPE_BYTES))
    moved = give_pages(peek(_pipe(ctx, rank, _TO)), vectors, _NONBLOCK)
    if moved > 0:
        begin_out(flow, field(flow, _OUT) + moved, left - moved)
        return moved
    if moved < 0 and not _may_try_again():
        set_field(flow, _OUT_LEFT, 0)
        return -1
    return 0


@inner
def pull(ctx: int, rank: int) -> Any:
    """Read what the pipe from a rank holds now; the bytes."""
    flow = flow_of(ctx, rank)
    into, left = field(flow, _INTO), field(flow, _INTO_LEFT)
    if left == 0:
        return 0
    moved = read_file(peek(_pipe(ctx, rank, _FROM)), into, left)
    if moved > 0:
        begin_into(flow, into + moved, field(flow, _THERE) + moved, left - moved)
        return moved
    if moved < 0 and not _may_try_again():
        set_field(ctx, FAULT, 1 + rank)
        set_field(flow, _INTO_LEFT, 0)
    return 0


@inner
def offer(ctx: int, wants: bool) -> Any:
    """Write on this rank's card, for all, how what it shows is to be had; say whether it is handed on.

    Args:
        ctx: the context.
        wants: it is to be handed on, where the pipes are free.
    """
    handed = wants and hold_all(ctx)
    say_way(ctx, handed)
    return handed


@inner
def say_way(ctx: int, handed: bool) -> None:
    """Write on this rank's card whether what it shows is handed on."""
    set_field(line(ctx, field(ctx, ME)), WAY, HANDED if handed else PLAIN)


@inner
def is_handed(ctx: int, rank: int, size_bytes: int) -> Any:
    """Say whether a part comes through the pipe from a rank, by its card."""
    return takes_pipes(ctx, size_bytes) and acquire(line(ctx, rank) + 8 * WAY) != PLAIN


@inner
def begin_flows(ctx: int) -> None:
    """Note that nothing is under way."""
    for rank in range(field(ctx, SIZE)):
        begin_out(flow_of(ctx, rank), 0, 0)
        begin_into(flow_of(ctx, rank), 0, 0, 0)


@inner
def flow(ctx: int, rank: int) -> Any:
    """Hand on to a rank, and read from it, what can be done now; the bytes."""
    pushed = push(ctx, rank)
    if pushed < 0:
        release(line(ctx, field(ctx, ME)) + 8 * WAY, BROKEN)
        pushed = 0
    pulled, at = pull(ctx, rank), flow_of(ctx, rank)
    if pulled == 0 and into_left(at) != 0 and acquire(line(ctx, rank) + 8 * WAY) == BROKEN:
        pulled = read_rest(ctx, rank)
    return pushed + pulled


@inner
def read_rest(ctx: int, rank: int) -> Any:
    """Read from a rank's memory what does not come through its pipe; the bytes."""
    at = flow_of(ctx, rank)
    left = into_left(at)
    transfer(ctx, rank, field(at, _INTO), field(at, _THERE), left, False)
    set_field(at, _INTO_LEFT, 0)
    return left


@inner
def finish_flows(ctx: int) -> Any:
    """Go on until all is handed on and read; why not, if a wait ended early."""
    me, size = field(ctx, ME), field(ctx, SIZE)
    deadline_ns = clock_ns(ctx) + field(ctx, TIMEOUT_NS)
    tries = 0
    while True:
        moved, waits_for = 0, -1
        for i in range(1, size):
            rank = (me + i) % size
            moved += flow(ctx, rank)
            at = flow_of(ctx, rank)
            if field(at, _OUT_LEFT) != 0 or into_left(at) != 0:
                waits_for = rank
        if waits_for < 0:
            return OK
        tries = 0 if moved != 0 else tries + 1
        if tries != 0:
            code = pause(ctx, tries, deadline_ns, waits_for)
            if code != OK:
                return code
