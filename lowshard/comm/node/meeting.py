"""How the ranks of a node meet: each raises the number on its own card and waits for the numbers of the others.

A group's cards lie in shared memory, one a rank. Numbers of a group differ by one at most, so what a card says beside
its number (signature, where the buffers lie), and the slots that payloads go through, need two places, taken in turn.
A wait spins, yields the core, then sleeps; it ends early when the flag of failure is set or the time is over.

The context of a group is a row of int64 in a process's own memory; the constants below are its places.
"""

from __future__ import annotations

from typing import Any

from lowshard.comm.node.atomic import (
    acquire,
    call_row,
    field,
    inner,
    peek,
    poke,
    read_clock,
    read_process,
    relax,
    release,
    set_field,
    sleep_us,
    write_process,
    yield_core,
)
from lowshard.compiled.emitted import copy_bytes, fence
from lowshard.kernels.cpu.memory_steps import stream_lines

# ---- places of a context, in int64

SIZE, ME, NUMBER, CARDS, SLOTS, SLOT_BYTES = range(6)
"""Ranks of the group; this one; meetings so far; addresses of the cards and of the slots, two a rank."""
FLAG, TIMEOUT_NS, SPINS, MISSING, FAULT = range(6, 11)
"""Address of an int64 that is not 0 once a failure is known; the deadline of a wait; looks at a number before the core
is yielded. Out: the rank that a wait was for when it ended early; whether a copy from a peer has failed in a call."""
GONE, WATCHED = 11, 12
"""Address of an int64 a rank of the side channel: when it ended its program, in ns, or 0 (0 for no table); and of an
int64 a rank of the group: its rank there."""
PROGRESS = 13
"""Address of six int64: a C function that lets MPI go on, 0 once MPI ends, and its arguments; 0 for none."""
PIDS, MEMBERS, MAPS, OWN, WANTED = range(14, 19)
"""Addresses: of an int64 a rank, its process and which process of the node that is; of SEGMENTS a process of the node,
where this one sees them or 0; of how many segments this one has, then address and size of each; of an int64 that is
set when a segment is met that is not mapped here yet."""
SCRATCH, PIECE_BYTES, PARTS = range(19, 22)
"""Of reductions: address of this rank's own memory; what is read of an operand at a time; address of an int64 a rank,
where a block of its operand lies, and one more for its piece."""
CLOCK, CLOCK_NS, VECTORS, CONTEXT_WORDS = 22, 23, 24, 28
"""Room for a time (seconds, nanoseconds), for an iovec here and one there; how many there are."""

SEGMENTS = 64
"""Segments of a rank that peers map; buffers in others are read as private memory is."""
READ_BYTES, PAST_BYTES = 1 << 20, 4 << 20
"""What one system call copies; what is copied past the caches, from mapped memory."""

# ---- bytes of a card: the number, two lines of eight int64, a word of the group

CARD_BYTES = 256
_LINES, _LINE_BYTES, WORD = 64, 64, 192
"""Where the first of the two lines begins; and on the first card, a word of the group."""
SIGNATURE, SEND, RECV = 0, 1, 4
"""Places in a line; behind SEND and RECV, where a buffer begins, a segment's number and where in that."""
NO_SEGMENT = -1
IN_SLOT = -2
"""In place of a segment's number: private memory, which peers read by a system call; a copy in the rank's slot."""

# ---- how a meeting ends

OK, DIFFERENT, FAILED, LATE, FAULTY, LEFT, UNEQUAL, WHOLE = range(8)

_MONOTONIC = 1
_YIELDS_NS, _DRIVES_NS = 2_000_000, 200_000
"""How long a wait yields before it sleeps; from when on it lets MPI go on."""
_SHORTEST_NAP_US, _LONGEST_NAP_US = 50, 1000
_GONE_NS = 1_000_000_000


@inner
def line(ctx: int, rank: int) -> Any:
    """Return the address of what a rank says beside the number that is being met."""
    return field(ctx, CARDS) + rank * CARD_BYTES + _LINES + (field(ctx, NUMBER) & 1) * _LINE_BYTES


@inner
def slot(ctx: int, rank: int, ahead: int = 0) -> Any:
    """Return the address of a rank's slot for the number being met, or 1 ahead: that is free once all have met."""
    return field(ctx, SLOTS) + (2 * rank + ((field(ctx, NUMBER) + ahead) & 1)) * field(ctx, SLOT_BYTES)


@inner
def step(ctx: int) -> None:
    """Go to the next number; `line` and `slot` are those of it from here on, and this rank's may be written."""
    set_field(ctx, NUMBER, field(ctx, NUMBER) + 1)


@inner
def clock_ns(ctx: int) -> Any:
    """Return a clock's time in nanoseconds."""
    read_clock(_MONOTONIC, ctx + 8 * CLOCK)
    return field(ctx, CLOCK) * 1_000_000_000 + field(ctx, CLOCK_NS)


@inner
def has_left(ctx: int, rank: int, now_ns: int) -> Any:
    """Say whether a rank has ended its program, long enough ago that its number would be seen."""
    table = field(ctx, GONE)
    if table == 0:
        return False
    gone_ns = acquire(table + 8 * field(field(ctx, WATCHED), rank))
    return gone_ns != 0 and now_ns - gone_ns > _GONE_NS


@inner
def let_mpi_go_on(ctx: int) -> None:
    """Be inside MPI for a moment: the rank that is waited for may wait for a message that still lies here."""
    words = field(ctx, PROGRESS)
    if words != 0 and field(words, 0) != 0:
        call_row(words)


@inner
def await_rank(ctx: int, rank: int) -> Any:
    """Return once a rank's number is as high as this one's, or why not."""
    card, wanted = field(ctx, CARDS) + rank * CARD_BYTES, field(ctx, NUMBER)
    for _ in range(field(ctx, SPINS)):
        if acquire(card) >= wanted:
            return OK
        relax()
    begun_ns = clock_ns(ctx)
    while acquire(card) < wanted:
        waited_ns = clock_ns(ctx) - begun_ns
        code = OK
        if acquire(field(ctx, FLAG)) != 0:
            code = FAILED
        elif waited_ns > field(ctx, TIMEOUT_NS):
            code = LATE
        elif has_left(ctx, rank, begun_ns + waited_ns):
            code = LEFT
        if code != OK:
            if acquire(card) >= wanted:
                return OK  # a rank that failed after this call was complete does not spoil it
            set_field(ctx, MISSING, rank)
            return code
        if waited_ns > _DRIVES_NS:
            let_mpi_go_on(ctx)
        if waited_ns < _YIELDS_NS:
            yield_core()
        else:
            sleep_us(min(max(_SHORTEST_NAP_US, waited_ns >> 16), _LONGEST_NAP_US))
    return OK


@inner
def meet(ctx: int, signature: int) -> Any:
    """Show the number that `step` went to and wait for all others; say whether their signatures are this one."""
    me, size, code = field(ctx, ME), field(ctx, SIZE), OK
    set_field(line(ctx, me), SIGNATURE, signature)
    release(field(ctx, CARDS) + me * CARD_BYTES, field(ctx, NUMBER))
    for i in range(1, size):
        rank = me + i
        if rank >= size:
            rank -= size
        ended = await_rank(ctx, rank)
        if ended != OK:
            return ended
        if field(line(ctx, rank), SIGNATURE) != signature:
            code = DIFFERENT
    return code


@inner
def barrier(ctx: int, signature: int) -> Any:
    """Meet."""
    step(ctx)
    return meet(ctx, signature)


@inner
def leave(ctx: int) -> Any:
    """Meet once more, so that nobody's buffer is reused while others read it; FAULTY if a copy failed anywhere."""
    fault = field(ctx, FAULT)
    set_field(ctx, FAULT, 0)
    code = barrier(ctx, fault)
    return FAULTY if fault != 0 or code == DIFFERENT else code


# ---- buffers where they lie: in segments that are mapped, or in private memory by a system call


@inner
def say(ctx: int, buffer: int, address: int, size_bytes: int) -> None:
    """Write on this rank's card where its operand (SEND) or its result (RECV) lies."""
    card, own = line(ctx, field(ctx, ME)), field(ctx, OWN)
    set_field(card, buffer, address)
    set_field(card, buffer + 1, NO_SEGMENT)
    for number in range(peek(own)):
        offset = address - field(own, 1 + 2 * number)
        if offset >= 0 and offset + size_bytes <= field(own, 2 + 2 * number):
            set_field(card, buffer + 1, number)
            set_field(card, buffer + 2, offset)


@inner
def seen_at(ctx: int, rank: int, buffer: int) -> Any:
    """Return where this process sees a rank's operand (SEND) or result (RECV), or 0 for private memory."""
    card = line(ctx, rank)
    if rank == field(ctx, ME):
        return field(card, buffer)
    segment = field(card, buffer + 1)
    if segment == IN_SLOT:
        return slot(ctx, rank)
    if segment < 0 or segment >= SEGMENTS:
        return 0
    base = field(field(ctx, MAPS), field(field(ctx, MEMBERS), rank) * SEGMENTS + segment)
    if base == 0:
        poke(field(ctx, WANTED), 1)
        return 0
    return base + field(card, buffer + 2)


@inner
def transfer(ctx: int, rank: int, local: int, remote: int, size_bytes: int, writes: bool) -> None:
    """Copy between this process and another's private memory; what fails is noted in the context."""
    vectors, pid, done = ctx + 8 * VECTORS, field(field(ctx, PIDS), rank), 0
    while done < size_bytes:
        n = min(size_bytes - done, READ_BYTES)
        poke(vectors, local + done)
        poke(vectors + 8, n)
        poke(vectors + 16, remote + done)
        poke(vectors + 24, n)
        moved = (
            write_process(pid, vectors, vectors + 16) if writes else read_process(pid, vectors, vectors + 16)
        )
        if moved <= 0:
            set_field(ctx, FAULT, 1 + rank)
            return
        done += moved


@inner
def copy_past(target: int, source: int, size_bytes: int) -> None:
    """Copy bytes past the caches, which would read each line before they write it; a fence must follow."""
    end, head = target + size_bytes, min(-target & 63, size_bytes)
    copy_bytes(target, source, head)
    source, target = source + head, target + head
    while target + 256 <= end:
        stream_lines(target, source, 4)
        source, target = source + 256, target + 256
    copy_bytes(target, source, end - target)


@inner
def copy_part(target: int, source: int, size_bytes: int, past: bool) -> None:
    """Copy bytes, `past` the caches or not."""
    if past:
        copy_past(target, source, size_bytes)
        fence()
    else:
        copy_bytes(target, source, size_bytes)


@inner
def fetch(ctx: int, rank: int, buffer: int, offset: int, target: int, size_bytes: int, past: bool) -> None:
    """Copy a part of a rank's buffer (SEND or RECV) to an address of this process, `past` the caches or not."""
    base = seen_at(ctx, rank, buffer)
    if base == 0:
        transfer(ctx, rank, target, field(line(ctx, rank), buffer) + offset, size_bytes, False)
    elif base + offset != target:
        copy_part(target, base + offset, size_bytes, past)


@inner
def put(ctx: int, rank: int, offset: int, source: int, size_bytes: int) -> None:
    """Copy from an address of this process to a part of a rank's result."""
    base = seen_at(ctx, rank, RECV)
    if base == 0:
        transfer(ctx, rank, source, field(line(ctx, rank), RECV) + offset, size_bytes, True)
    elif base + offset != source:
        copy_part(base + offset, source, size_bytes, size_bytes >= PAST_BYTES)
