"""How a rank reaches buffers of the others: in segments that are mapped, or in private memory by a system call."""

from __future__ import annotations

from typing import Any

from lowshard.comm.node.atomic import field, peek, poke, read_process, set_field, write_process
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
from lowshard.compiled.emitted import copy_bytes, fence

NO_SEGMENT = -1
"""In place of a segment's number: private memory, which peers read by a system call."""
STREAM_BYTES = 1 << 20
"""From here on what is written at a time goes past the caches."""
PAGE_BYTES = 4096
_SEGMENT, _OFFSET = 1, 2
"""Places on a card behind SEND or RECV: which segment the buffer lies in, and where there."""


@inner
def segment_of(ctx: int, address: int, size_bytes: int) -> Any:
    """Return the number of the segment of this process that a buffer lies in, or NO_SEGMENT."""
    own = field(ctx, OWN)
    for number in range(peek(own)):
        offset = address - field(own, 1 + 2 * number)
        if offset >= 0 and offset + size_bytes <= field(own, 2 + 2 * number):
            return number
    return NO_SEGMENT


@inner
def mapped_at(ctx: int, rank: int, segment: int) -> Any:
    """Return where this process sees a segment of a rank, or 0 where it is not mapped (yet)."""
    if rank == field(ctx, ME):
        return field(field(ctx, OWN), 1 + 2 * segment)
    if segment < 0 or segment >= SEGMENTS:
        return 0
    member = field(field(ctx, MEMBERS), rank)
    base = field(field(ctx, MAPS), member * SEGMENTS + segment)
    if base == 0:
        poke(field(ctx, WANTED), 1)
    return base


@inner
def say(ctx: int, buffer: int, address: int, size_bytes: int) -> None:
    """Write on this rank's card where its operand (SEND) or its result (RECV) lies."""
    card, segment = line(ctx, field(ctx, ME)), segment_of(ctx, address, size_bytes)
    set_field(card, buffer, address)
    set_field(card, buffer + _SEGMENT, segment)
    if segment != NO_SEGMENT:
        set_field(card, buffer + _OFFSET, address - mapped_at(ctx, field(ctx, ME), segment))


@inner
def seen_at(ctx: int, rank: int, buffer: int) -> Any:
    """Return where this process sees what a card says of a buffer (SEND or RECV), or 0 for private memory."""
    card = line(ctx, rank)
    if rank == field(ctx, ME):
        return field(card, buffer)
    base = mapped_at(ctx, rank, field(card, buffer + _SEGMENT))
    return base + field(card, buffer + _OFFSET) if base != 0 else 0


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
    """Say whether what ranks of a node write for each other goes past the caches, by the bytes of the whole result."""
    return field(ctx, SHARE_PAST) <= size_bytes


@inner
def stays_in_caches(ctx: int, size_bytes: int) -> Any:
    """Say whether caches keep what so many bytes are copied from and to: a rank's own, which nobody fetches there."""
    return 2 * size_bytes < field(ctx, LAST_CACHE)


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
    pid, done = field(field(ctx, PIDS), rank), 0
    while done < size_bytes:
        poke(vectors, local + done)
        poke(vectors + 8, size_bytes - done)
        poke(vectors + 16, remote + done)
        poke(vectors + 24, size_bytes - done)
        moved = (
            write_process(pid, vectors, vectors + 16) if writes else read_process(pid, vectors, vectors + 16)
        )
        if moved <= 0:
            set_field(ctx, FAULT, 1 + rank)
            return
        done += moved


@inner
def _copy_seen(ctx: int, rank: int, into: int, source: int, size_bytes: int) -> None:
    if rank == field(ctx, ME) and stays_in_caches(ctx, size_bytes):
        copy_bytes(into, source, size_bytes)
    else:
        copy(into, source, size_bytes)


@inner
def fetch(ctx: int, rank: int, buffer: int, offset: int, target: int, size_bytes: int) -> None:
    """Copy a part of a rank's buffer (SEND or RECV) to an address of this process."""
    if size_bytes == 0:
        return
    base = seen_at(ctx, rank, buffer)
    if base != 0:
        if base + offset != target:
            _copy_seen(ctx, rank, target, base + offset, size_bytes)
        return
    transfer(ctx, rank, target, field(line(ctx, rank), buffer) + offset, size_bytes, False)


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
    transfer(ctx, rank, source, field(line(ctx, rank), RECV) + offset, size_bytes, True)


@inner
def leave(ctx: int) -> Any:
    """Meet once more, so that nobody's buffer is reused while others read it; FAULTY if a copy failed anywhere."""
    fault = field(ctx, FAULT)
    set_field(ctx, FAULT, 0)
    step(ctx)
    code = meet(ctx, fault)
    return FAULTY if fault != 0 or code == DIFFERENT else code


@inner
def all_shared(ctx: int, buffer: int) -> bool:
    """Say whether all operands (SEND) or results (RECV) lie in memory that peers map: the same on all ranks."""
    for rank in range(field(ctx, SIZE)):  # noqa: SIM110  Numba compiles no generator in all()
        if field(line(ctx, rank), buffer + _SEGMENT) == NO_SEGMENT:
            return False
    return True


@inner
def is_private(ctx: int) -> Any:
    """Say whether this rank's card tells of an operand that peers do not map."""
    return field(line(ctx, field(ctx, ME)), SEND + _SEGMENT) == NO_SEGMENT


@inner
def note_mapped(ctx: int) -> Any:
    """Write where each rank's operand is mapped, as the cards say it at this meeting, and return the table's address.

    A word a rank: 0 where its operand goes through the slots; the negative of its address in its own process where it
    is not mapped here yet.
    """
    size = field(ctx, SIZE)
    mapped = field(ctx, PARTS) + 8 * size
    for rank in range(size):
        card, word = line(ctx, rank), 0
        if field(card, SEND + _SEGMENT) != NO_SEGMENT:
            base = seen_at(ctx, rank, SEND)
            word = base if base != 0 else -field(card, SEND)
        set_field(mapped, rank, word)
    return mapped
