"""Moves between the ranks of a node: out of slots, out of segments that are mapped, out of private memory."""

from __future__ import annotations

from typing import Any

from lowshard.comm.node.atomic import copy_bytes, fence, peek, poke, read_process, write_process
from lowshard.comm.node.inner import inner
from lowshard.comm.node.meet import (
    DIFFERENT,
    FAULT,
    FAULTY,
    MAPS,
    ME,
    MEMBERS,
    OK,
    OWN,
    PARTS,
    PIDS,
    RECV,
    SEGMENTS,
    SEND,
    SIZE,
    SLOT_BYTES,
    SMALL_BYTES,
    UNEQUAL,
    VECTORS,
    WANTED,
    line,
    meet,
    slot,
    step,
)
from lowshard.comm.node.vector import LINE_BYTES, STREAM_STEP_BYTES, stream_lines

NO_SEGMENT = -1
"""In place of a segment's number: private memory, which peers read by a system call."""
STREAM_BYTES = 1 << 20
"""From here on what is written at a time goes past the caches."""
PAGE_BYTES = 4096


@inner
def segment_of(ctx: int, address: int, size_bytes: int) -> Any:
    """Return the number of the segment of this process that a buffer lies in, or NO_SEGMENT."""
    own = peek(ctx + 8 * OWN)
    for number in range(peek(own)):
        offset = address - peek(own + 8 + 16 * number)
        if offset >= 0 and offset + size_bytes <= peek(own + 16 + 16 * number):
            return number
    return NO_SEGMENT


@inner
def mapped_at(ctx: int, rank: int, segment: int) -> Any:
    """Return where this process sees a segment of a rank, or 0 where it is not mapped (yet)."""
    if rank == peek(ctx + 8 * ME):
        return peek(peek(ctx + 8 * OWN) + 8 + 16 * segment)
    if segment < 0 or segment >= SEGMENTS:
        return 0
    member = peek(peek(ctx + 8 * MEMBERS) + 8 * rank)
    base = peek(peek(ctx + 8 * MAPS) + 8 * (member * SEGMENTS + segment))
    if base == 0:
        poke(peek(ctx + 8 * WANTED), 1)
    return base


@inner
def say(ctx: int, field: int, address: int, size_bytes: int) -> None:
    """Write on this rank's card where its operand (SEND) or its result (RECV) lies."""
    at, segment = line(ctx, peek(ctx + 8 * ME)) + 8 * field, segment_of(ctx, address, size_bytes)
    poke(at, address)
    poke(at + 8, segment)
    if segment != NO_SEGMENT:
        poke(at + 16, address - mapped_at(ctx, peek(ctx + 8 * ME), segment))


@inner
def seen_at(ctx: int, rank: int, field: int) -> Any:
    """Return where this process sees what a card says of a buffer (SEND or RECV), or 0 for private memory."""
    at = line(ctx, rank) + 8 * field
    if rank == peek(ctx + 8 * ME):
        return peek(at)
    base = mapped_at(ctx, rank, peek(at + 8))
    return base + peek(at + 16) if base != 0 else 0


@inner
def copy(into: int, source: int, size_bytes: int) -> None:
    """Copy bytes, past the caches where they are many."""
    if size_bytes < STREAM_BYTES:
        copy_bytes(into, source, size_bytes)
        return
    copy_past(into, source, size_bytes)
    fence()  # what went past the caches is there before anybody is told


@inner
def copy_past(into: int, source: int, size_bytes: int) -> None:
    """Copy bytes past the caches; a fence must follow before anybody is told."""
    head = min(-into % LINE_BYTES, size_bytes)
    copy_bytes(into, source, head)
    steps = (size_bytes - head) // STREAM_STEP_BYTES
    for i in range(head, head + steps * STREAM_STEP_BYTES, STREAM_STEP_BYTES):
        stream_lines(into + i, source + i)
    done = head + steps * STREAM_STEP_BYTES
    copy_bytes(into + done, source + done, size_bytes - done)


@inner
def transfer(ctx: int, rank: int, local: int, remote: int, size_bytes: int, writes: bool) -> None:
    """Copy between this process and another's private memory; what fails is noted in the context."""
    vectors = ctx + 8 * VECTORS
    pid, done = peek(peek(ctx + 8 * PIDS) + 8 * rank), 0
    while done < size_bytes:
        poke(vectors, local + done)
        poke(vectors + 8, size_bytes - done)
        poke(vectors + 16, remote + done)
        poke(vectors + 24, size_bytes - done)
        moved = (
            write_process(pid, vectors, vectors + 16) if writes else read_process(pid, vectors, vectors + 16)
        )
        if moved <= 0:
            poke(ctx + 8 * FAULT, 1 + rank)
            return
        done += moved


@inner
def fetch(ctx: int, rank: int, field: int, offset: int, target: int, size_bytes: int) -> None:
    """Copy a part of a rank's buffer (SEND or RECV) to an address of this process."""
    if size_bytes == 0:
        return
    base = seen_at(ctx, rank, field)
    if base != 0:
        if base + offset != target:
            copy(target, base + offset, size_bytes)
        return
    transfer(ctx, rank, target, peek(line(ctx, rank) + 8 * field) + offset, size_bytes, False)


@inner
def put(ctx: int, rank: int, offset: int, source: int, size_bytes: int) -> None:
    """Copy from an address of this process to a part of a rank's result."""
    if size_bytes == 0:
        return
    base = seen_at(ctx, rank, RECV)
    if base != 0:
        if base + offset != source:
            copy(base + offset, source, size_bytes)
        return
    transfer(ctx, rank, source, peek(line(ctx, rank) + 8 * RECV) + offset, size_bytes, True)


@inner
def leave(ctx: int) -> Any:
    """Meet once more, so that nobody's buffer is reused while others read it; FAULTY if a copy failed anywhere."""
    fault = peek(ctx + 8 * FAULT)
    poke(ctx + 8 * FAULT, 0)
    step(ctx)
    code = meet(ctx, fault)
    return FAULTY if fault != 0 or code == DIFFERENT else code


@inner
def gather_slots(
    ctx: int, signature: int, send: int, send_bytes: int, recv: int, first: int, ranks: int, offset: int,
    each_bytes: int,
) -> Any:  # fmt: skip
    """Show `send_bytes` of this rank, and copy a part of what others show: one meeting.

    From each of `ranks` ranks from `first` on, `each_bytes` at `offset` go to recv, one behind the other.
    """
    step(ctx)
    copy_bytes(slot(ctx, peek(ctx + 8 * ME), 0), send, send_bytes)
    code = meet(ctx, signature)
    if code != OK or each_bytes == 0:
        return code
    me = peek(ctx + 8 * ME)
    for i in range(ranks):
        rank, into = first + i, recv + i * each_bytes
        if rank != me:
            copy_bytes(into, slot(ctx, rank, 0) + offset, each_bytes)
        elif into != send + offset:
            copy_bytes(into, slot(ctx, me, 0) + offset, each_bytes)  # send may have been written over
    return code


@inner
def all_shared(ctx: int) -> bool:
    """Say whether all operands lie in memory that peers map; from the cards: the same on all ranks."""
    for rank in range(peek(ctx + 8 * SIZE)):  # noqa: SIM110  Numba compiles no generator in all()
        if peek(line(ctx, rank) + 8 * SEND + 8) == NO_SEGMENT:
            return False
    return True


@inner
def is_private(ctx: int) -> Any:
    """Say whether this rank's card tells of an operand that peers do not map."""
    return peek(line(ctx, peek(ctx + 8 * ME)) + 8 * SEND + 8) == NO_SEGMENT


@inner
def note_mapped(ctx: int) -> Any:
    """Write where each rank's operand is mapped, as the cards say it at this meeting, and return the table's address.

    A word a rank: 0 where its operand goes through the slots; the negative of its address in its own process where it
    is not mapped here yet.
    """
    size = peek(ctx + 8 * SIZE)
    mapped = peek(ctx + 8 * PARTS) + 8 * size
    for rank in range(size):
        card, word = line(ctx, rank) + 8 * SEND, 0
        if peek(card + 8) != NO_SEGMENT:
            base = seen_at(ctx, rank, SEND)
            word = base if base != 0 else -peek(card)
        poke(mapped + 8 * rank, word)
    return mapped


@inner
def gather_buffers(
    ctx: int, signature: int, send: int, send_bytes: int, recv: int, first: int, ranks: int, offset: int,
    each_bytes: int,
) -> Any:  # fmt: skip
    """As `gather_slots`, straight out of the others' buffers: a meeting before and one after."""
    step(ctx)
    say(ctx, SEND, send, send_bytes)
    code = meet(ctx, signature)
    if code != OK:
        return code
    if each_bytes:
        me = peek(ctx + 8 * ME)
        for i in range(ranks):
            rank = (
                first + (me + i) % ranks
            )  # each begins with another, so that no memory is asked by all at once
            fetch(ctx, rank, SEND, offset, recv + (rank - first) * each_bytes, each_bytes)
    return leave(ctx)


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
    if small:
        copy_bytes(mine + head, send, send_bytes)
    say(ctx, SEND, send, send_bytes)
    code = meet(ctx, signature)
    if code != OK:
        return code
    if check and not _tables_agree(ctx):
        return UNEQUAL
    all_in_slots = True
    for i in range(size):
        rank = (me + i) % size
        theirs = slot(ctx, rank, 0)
        part, at = peek(theirs + 24 * me), peek(theirs + 24 * me + 8)
        target = recv + peek(places + 8 * rank)
        if peek(theirs + last) != 0:
            if part:
                copy_bytes(target, theirs + head + at, part)
        else:
            all_in_slots = False
            fetch(ctx, rank, SEND, at, target, part)
    return OK if all_in_slots else leave(ctx)


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
