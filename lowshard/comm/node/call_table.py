"""A planned call as compiled code has it: its row, what performs a row, and the table of calls made before.

A row is int64 that say everything but where the buffers lie. `perform` is the one way from Python into the compiled
collectives. `quick` is the same for a call that is known: a call from Python costs more in checks and records than a
small message takes to move, so all of it is done here. A buffer's type, dtype, size and flags are read out of the array
object itself (NumPy's ABI, `PyArrayObject_fields` in ndarraytypes.h), and where anything is not as it was the answer is
UNKNOWN and nothing has happened.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowshard.comm.call import CALL_BYTES, INSIDE_AT, RING_CALLS, RING_WORDS, SEQUENCE_AT
from lowshard.comm.node import message_rings
from lowshard.comm.node.atomic import field, peek, poke, set_field
from lowshard.comm.node.fold import fold_at_root, fold_buffers, fold_slots
from lowshard.comm.node.inlined import inner
from lowshard.comm.node.node_moves import (
    barrier,
    collect,
    deal,
    exchange,
    gather_buffers,
    gather_slots,
    spread,
)
from lowshard.comm.node.node_rendezvous import ME, OK, WANTED, clock_ns
from lowshard.compiled.emitted import copy_bytes

# ---- a row

KIND, SIGNATURE, SEND_BYTES, RECV_BYTES, OVERLAP, FIRST = range(6)
"""Places of a row; from FIRST on lie the numbers that a kind takes beside these."""
ROW_WORDS = 16

(
    BARRIER, GATHER_SLOTS, GATHER_BUFFERS, COLLECT, SPREAD, EXCHANGE, FOLD_SLOTS, FOLD_BUFFERS, SEND, RECEIVE,
    SEND_RECEIVE, DEAL, FOLD_AT_ROOT,
) = range(13)  # fmt: skip
"""Kinds; each is the function of that name in `node_moves`, `fold` or `message_rings`."""

APART, OWN_PART_ONLY, ANY = range(3)
"""How send and recv may lie over each other: not at all; as one, or one as this rank's part of the other; anyhow."""


def row_of(
    kind: int, signature: int, send_bytes: int, recv_bytes: int, overlap: int, *numbers: int
) -> np.ndarray:
    """Return the row of a call; it must live as long as its address is used."""
    row = np.zeros(ROW_WORDS, np.int64)
    head = (kind, signature, send_bytes, recv_bytes, overlap, *numbers)
    row[: len(head)] = head
    return row


@inner
def _number(row: int, i: int) -> Any:
    return field(row, FIRST + i)


@inner
def perform(ctx: int, row: int, send: int, recv: int) -> Any:
    """Run a row over buffers at two addresses, 0 for none; return how its meetings ended."""
    kind, signature = field(row, KIND), field(row, SIGNATURE)
    send_bytes, recv_bytes = field(row, SEND_BYTES), field(row, RECV_BYTES)
    if kind == BARRIER:
        return barrier(ctx, signature)
    if kind == SEND:
        return message_rings.send(ctx, _number(row, 0), send, send_bytes)
    if kind == RECEIVE:
        return message_rings.receive(ctx, _number(row, 0), recv, recv_bytes)
    if kind == SEND_RECEIVE:
        dst, src = _number(row, 0), _number(row, 1)
        return message_rings.send_receive(ctx, dst, send, send_bytes, src, recv, recv_bytes)
    a, b, c, d = _number(row, 0), _number(row, 1), _number(row, 2), _number(row, 3)
    if kind == GATHER_SLOTS:
        return gather_slots(ctx, signature, send, send_bytes, recv, a, b, c, d)
    if kind == GATHER_BUFFERS:
        return gather_buffers(ctx, signature, send, send_bytes, recv, a, b, c, d)
    if kind == COLLECT:
        return collect(ctx, signature, send, recv, recv_bytes, a, b)
    if kind == DEAL:
        return deal(ctx, signature, send, send_bytes, recv, a, b)
    if kind == SPREAD:
        if send != 0:  # at the root
            return spread(ctx, signature, send, send_bytes, a)
        return spread(ctx, signature, recv, recv_bytes, a)
    if kind == EXCHANGE:
        return exchange(ctx, signature, a, b, send, send_bytes, recv, c != 0)
    e, f = _number(row, 4), _number(row, 5)
    if kind == FOLD_SLOTS:
        return fold_slots(ctx, signature, send, send_bytes, recv, a, b, c, d, e)
    if kind == FOLD_AT_ROOT:
        return fold_at_root(ctx, signature, send, recv, a, b, c, d, e, f)
    g = _number(row, 6)
    return fold_buffers(ctx, signature, send, send_bytes, recv, recv_bytes, a, b, c, d, e, f, g)


@inner
def may_lie_so(ctx: int, row: int, send: int, recv: int) -> bool:
    """Say whether two buffers lie as the row allows; where not, what is sent must be copied first."""
    overlap = field(row, OVERLAP)
    send_bytes, recv_bytes = field(row, SEND_BYTES), field(row, RECV_BYTES)
    if overlap == ANY or send == 0 or recv == 0 or send >= recv + recv_bytes or recv >= send + send_bytes:
        return True
    if overlap != OWN_PART_ONLY:
        return False
    apart, me = recv - send, field(ctx, ME)
    same = apart == 0 and send_bytes == recv_bytes
    return bool(same or apart == me * recv_bytes or -apart == me * send_bytes)


# ---- places of a table's head, in int64

(
    CONTEXT, ARRAY_TYPE, ENTRIES, MASK, TEXT, RING, RING_COUNT, LAST,
) = range(8)  # fmt: skip
"""Addresses of the context, of the type ndarray, of the entries; their number less one, a power of two less one;
addresses of what the record of calls is kept in; out: the number of the entry that was run last."""
HEAD_WORDS = 8

# ---- and of an entry

ACT, DTYPE, SEND_ELEMS, RECV_ELEMS, ROW, ENCODED, USES, NAME = range(8)
"""What was asked; address of the dtype object; elements, NONE where there is no such buffer; address of the row,
0 in an empty entry; address of the text; calls not yet added up; number of the call in the record."""
ENTRY_WORDS = 8
PROBES = 8
NONE = -1

UNKNOWN = 32
"""Result: no such entry."""
NEW_SEGMENTS = 64
"""Added to a result: peers have made segments that are not mapped here."""

# ---- an array object

_TYPE, _DATA, _DIMS_COUNT, _DIMS, _DTYPE, _FLAGS = 8, 16, 24, 32, 56, 64
_CONTIGUOUS, _WRITEABLE = 1, 0x400
HEADER_BYTES = 16
"""Of an object, before NumPy's own fields."""


@inner
def _low(address: int) -> Any:
    return peek(address) & 0xFFFFFFFF


@inner
def elems_of(array: int) -> Any:
    """Return the elements of an array object."""
    elems, dims = 1, peek(array + _DIMS)
    for i in range(_low(array + _DIMS_COUNT)):
        elems *= field(dims, i)
    return elems


@inner
def _passes(array: int, array_type: int, wanted_flags: int) -> Any:
    return peek(array + _TYPE) == array_type and _low(array + _FLAGS) & wanted_flags == wanted_flags


@inner
def place_of(act: int, dtype: int, send_elems: int, recv_elems: int, mask: int) -> Any:
    """Return the number of the first entry where a call may be found."""
    mixed = act * 0x9E3779B1 + (dtype >> 4) * 0x85EBCA6B + send_elems * 0xC2B2AE35 + recv_elems * 0x27D4EB2F
    return (mixed ^ (mixed >> 15)) & mask


@inner
def _find(head: int, act: int, dtype: int, send_elems: int, recv_elems: int) -> Any:
    mask, entries = field(head, MASK), field(head, ENTRIES)
    place = place_of(act, dtype, send_elems, recv_elems, mask)
    for i in range(PROBES):
        entry = entries + 8 * ENTRY_WORDS * ((place + i) & mask)
        if field(entry, ROW) == 0:
            return 0
        if (
            field(entry, ACT) == act
            and field(entry, DTYPE) == dtype
            and field(entry, SEND_ELEMS) == send_elems
            and field(entry, RECV_ELEMS) == recv_elems
        ):
            return entry
    return 0


@inner
def quick(head: int, act: int, sequence: int, send: int, recv: int) -> Any:
    """Run a call that is in the table.

    Args:
        head: address of the table's head.
        act: what is asked.
        sequence: the call's number on its communicator.
        send: address of the array object, 0 for none.
        recv: the same.

    Returns:
        How it ended (OK or another of `lowshard.comm.node.node_rendezvous`), NEW_SEGMENTS added where there are some;
        UNKNOWN where nothing was done. Where it has failed the rank is in the call still: the error tells so.
    """
    array_type, dtype = field(head, ARRAY_TYPE), 0
    send_elems = recv_elems = NONE
    send_at = recv_at = 0
    if send != 0:
        if not _passes(send, array_type, _CONTIGUOUS):
            return UNKNOWN
        dtype, send_elems, send_at = peek(send + _DTYPE), elems_of(send), peek(send + _DATA)
    if recv != 0:
        if not _passes(recv, array_type, _CONTIGUOUS | _WRITEABLE):
            return UNKNOWN
        if send != 0 and peek(recv + _DTYPE) != dtype:
            return UNKNOWN
        dtype, recv_elems, recv_at = peek(recv + _DTYPE), elems_of(recv), peek(recv + _DATA)
    entry = _find(head, act, dtype, send_elems, recv_elems)
    if entry == 0:
        return UNKNOWN
    ctx, row = field(head, CONTEXT), field(entry, ROW)
    if not may_lie_so(ctx, row, send_at, recv_at):
        return UNKNOWN

    text, count = field(head, TEXT), peek(field(head, RING_COUNT))
    kept = field(head, RING) + 8 * RING_WORDS * (count % RING_CALLS)
    set_field(kept, 0, field(entry, NAME))
    set_field(kept, 1, sequence)
    set_field(kept, 2, clock_ns(ctx))
    poke(field(head, RING_COUNT), count + 1)
    copy_bytes(text, field(entry, ENCODED), CALL_BYTES)
    poke(text + SEQUENCE_AT, sequence)
    poke(text + INSIDE_AT, 1)
    code = perform(ctx, row, send_at, recv_at)
    set_field(head, LAST, field(entry, NAME))
    if code == OK:
        poke(text + INSIDE_AT, 0)
        set_field(entry, USES, field(entry, USES) + 1)
    return code + (NEW_SEGMENTS if peek(field(ctx, WANTED)) != 0 else 0)
