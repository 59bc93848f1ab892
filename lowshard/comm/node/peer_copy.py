"""How a rank reaches buffers of the others: in segments that are mapped, or in private memory by a system call."""

from __future__ import annotations

from typing import Any

from lowshard.comm.node.atomic import copy_bytes, fence, peek, poke, read_process, write_process
from lowshard.comm.node.inlined import inner
from lowshard.comm.node.line_vectors import LINE_BYTES, STREAM_STEP_BYTES, stream_lines
from lowshard.comm.node.node_rendezvous import (
    DIFFERENT,
    FAULT,
    FAULTY,
    LAST_CACHE,
    MAPS,
    ME,
    MEMBERS,
    OWN,
    PARTS,
    PIDS,
    RECV,
    SEGMENTS,
    SEND,
    SHARE_PAST,
    SIZE,
    VECTORS,
    WANTED,
    line,
    meet,
    step,
)

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
def goes_past(ctx: int, size_bytes: int) -> Any:
    """Say whether so many bytes, written for other ranks to read, go past the caches."""
    return peek(ctx + 8 * SHARE_PAST) <= size_bytes


@inner
def stays_in_caches(ctx: int, size_bytes: int) -> Any:
    """Say whether caches keep what so many bytes are copied from and to: a rank's own, which nobody fetches there."""
    return 2 * size_bytes < peek(ctx + 8 * LAST_CACHE)


@inner
def show(into: int, source: int, size_bytes: int, past: bool) -> None:
    """Copy bytes to where others read them soon, past the caches or not."""
    if past:
        copy_past(into, source, size_bytes)
        fence()
    else:
        copy_bytes(into, source, size_bytes)


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
def _copy_seen(ctx: int, rank: int, into: int, source: int, size_bytes: int) -> None:
    if rank == peek(ctx + 8 * ME) and stays_in_caches(ctx, size_bytes):
        copy_bytes(into, source, size_bytes)
    else:
        copy(into, source, size_bytes)


@inner
def fetch(ctx: int, rank: int, field: int, offset: int, target: int, size_bytes: int) -> None:
    """Copy a part of a rank's buffer (SEND or RECV) to an address of this process."""
    if size_bytes == 0:
        return
    base = seen_at(ctx, rank, field)
    if base != 0:
        if base + offset != target:
            _copy_seen(ctx, rank, target, base + offset, size_bytes)
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
            _copy_seen(ctx, rank, base + offset, source, size_bytes)
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
def all_shared(ctx: int, field: int) -> bool:
    """Say whether all operands (SEND) or results (RECV) lie in memory that peers map: the same on all ranks."""
    for rank in range(peek(ctx + 8 * SIZE)):  # noqa: SIM110  Numba compiles no generator in all()
        if peek(line(ctx, rank) + 8 * field + 8) == NO_SEGMENT:
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
