"""Planned calls performed: the one way from Python into the compiled collectives."""

from __future__ import annotations

from typing import Any

from lowshard.comm.node import fold_groups, message_rings
from lowshard.comm.node.atomic import peek
from lowshard.comm.node.call_row import (
    ANY,
    BARRIER,
    COLLECT,
    DEAL,
    EXCHANGE,
    FIRST,
    FOLD_AT_ROOT,
    FOLD_SLOTS,
    GATHER_BUFFERS,
    GATHER_SLOTS,
    KIND,
    OVERLAP,
    OWN_PART_ONLY,
    RECEIVE,
    RECV_BYTES,
    SEND,
    SEND_BYTES,
    SEND_RECEIVE,
    SIGNATURE,
    SPREAD,
)
from lowshard.comm.node.fold import fold_buffers
from lowshard.comm.node.fold_shown import fold_at_root, fold_slots
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
from lowshard.comm.node.node_rendezvous import ME


@inner
def _number(row: int, i: int) -> Any:
    return peek(row + 8 * (FIRST + i))


@inner
def perform(ctx: int, row: int, send: int, recv: int) -> Any:
    """Run a row over buffers at two addresses, 0 for none; return how its meetings ended."""
    kind, signature = peek(row + 8 * KIND), peek(row + 8 * SIGNATURE)
    send_bytes, recv_bytes = peek(row + 8 * SEND_BYTES), peek(row + 8 * RECV_BYTES)
    if kind == BARRIER:
        return barrier(ctx, signature)
    if kind == SEND:
        return message_rings.send(ctx, _number(row, 0), send, send_bytes)
    if kind == RECEIVE:
        return message_rings.receive(ctx, _number(row, 0), recv, recv_bytes)
    if kind == SEND_RECEIVE:
        dst, src = _number(row, 0), _number(row, 1)
        return fold_groups.send_receive(ctx, dst, send, send_bytes, src, recv, recv_bytes)
    a, b, c, d = _number(row, 0), _number(row, 1), _number(row, 2), _number(row, 3)
    if kind == GATHER_SLOTS:
        return gather_slots(ctx, signature, send, send_bytes, recv, a, b, c, d, _number(row, 4))
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
    overlap = peek(row + 8 * OVERLAP)
    send_bytes, recv_bytes = peek(row + 8 * SEND_BYTES), peek(row + 8 * RECV_BYTES)
    if overlap == ANY or send == 0 or recv == 0 or send >= recv + recv_bytes or recv >= send + send_bytes:
        return True
    if overlap != OWN_PART_ONLY:
        return False
    apart, me = recv - send, peek(ctx + 8 * ME)
    return apart == 0 or apart == me * recv_bytes or -apart == me * send_bytes
