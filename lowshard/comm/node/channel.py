"""Messages between two ranks of a node: a ring of entries for each ordered pair, in memory of the group's.

A short message is copied into an entry, and its sender goes on; of a long one the entry says where it lies, and its
sender waits until it is copied, and copies a share of it meanwhile. One rank alone writes each counter: the sender
how many it has posted, the receiver how many it has taken.
"""

from __future__ import annotations

from typing import Any

from lowshard.comm.node.atomic import acquire, add_to, copy_bytes, fence, peek, poke, release
from lowshard.comm.node.choice import MESSAGE, learn, row_for, second_is_next
from lowshard.comm.node.inner import inner
from lowshard.comm.node.meet import (
    CAME,
    CHOICES,
    ENTRIES,
    ENTRY_BYTES,
    FAULT,
    FAULTY,
    HEADS,
    ME,
    MISSING,
    OK,
    RING_ENTRIES,
    SIZE,
    TIMEOUT_NS,
    UNEQUAL,
    await_word,
    clock_ns,
    pause,
    wake,
)
from lowshard.comm.node.pipe import (
    begin_into,
    begin_out,
    flow_of,
    hold,
    into_left,
    let_go,
    pull,
    push,
    read_rest,
    takes_pipes,
)
from lowshard.comm.node.reach import NO_SEGMENT, copy, mapped_at, segment_of, transfer

HEAD_BYTES = 128
"""Of a pair: what its sender writes, what its receiver writes, a line each."""
_POSTED, _POSTED_SLEEPERS = 0, 8
_TAKEN, _TAKEN_SLEEPERS = 64, 72

_KIND, _BYTES, _ADDRESS, _SEGMENT, _OFFSET = range(5)
"""Words of an entry; its content, if it is short, begins at ENTRY_HEAD_BYTES."""
(
    _ACCEPTED, _CLAIMED, _COPIED, _TO_ADDRESS, _TO_SEGMENT, _TO_OFFSET, _ACCEPTED_SLEEPERS, _COPIED_SLEEPERS, _BROKEN,
) = range(5, 14)  # fmt: skip
"""Of one that both copy: whether the receiver says where to; pieces that somebody copies, and bytes that have been
copied; where to; who sleeps; whether a copy has failed."""
_BOTH_BYTES = 64 << 10
"""Messages from here on both sides copy."""
_PIECE_BYTES, _PIECES = 32 << 10, 16
"""Of a piece, at least; how many there are of a long message."""
ENTRY_HEAD_BYTES = 64
_HERE, _THERE, _THERE_BOTH, _THERE_OFFERED, _WITHDRAWN = range(5)
"""Kinds: in the entry; in memory; in memory, and its sender copies too, or hands it on through a pipe if asked to."""
ALONE, BOTH, OFFERED = range(3)
"""What a sender does for a long message."""

GROUP_WORDS = 8
"""Of a message in a group; see `run_group`."""

FULL = -1
"""In place of a message's number: the ring has no entry free."""
PENDING = 33
"""Result: nothing has come yet."""


@inner
def _head(ctx: int, src: int, dst: int) -> Any:
    return peek(ctx + 8 * HEADS) + (src * peek(ctx + 8 * SIZE) + dst) * HEAD_BYTES


@inner
def _entry(ctx: int, src: int, dst: int, number: int) -> Any:
    ring = peek(ctx + 8 * RING_ENTRIES)
    place = (src * peek(ctx + 8 * SIZE) + dst) * ring + number % ring
    return peek(ctx + 8 * ENTRIES) + place * peek(ctx + 8 * ENTRY_BYTES)


@inner
def post(ctx: int, dst: int, address: int, size_bytes: int, share: int) -> Any:
    """Post a message and return its number, or FULL; `share` is what its sender will do, ALONE for nothing."""
    me = peek(ctx + 8 * ME)
    head = _head(ctx, me, dst)
    number = peek(head + _POSTED)
    if number - acquire(head + _TAKEN) >= peek(ctx + 8 * RING_ENTRIES):
        return FULL
    entry = _entry(ctx, me, dst, number)
    poke(entry + 8 * _BYTES, size_bytes)
    if fits_an_entry(ctx, size_bytes):
        poke(entry + 8 * _KIND, _HERE)
        copy_bytes(entry + ENTRY_HEAD_BYTES, address, size_bytes)
    else:
        poke(entry + 8 * _KIND, _THERE + share)
        poke(entry + 8 * _ADDRESS, address)
        segment = segment_of(ctx, address, size_bytes)
        poke(entry + 8 * _SEGMENT, segment)
        if segment != NO_SEGMENT:
            poke(entry + 8 * _OFFSET, address - mapped_at(ctx, me, segment))
        for word in range(_ACCEPTED, _BROKEN + 1):
            poke(entry + 8 * word, 0)
    release(head + _POSTED, number + 1)
    fence()  # as in meet.arrive
    if peek(head + _POSTED_SLEEPERS) != 0:
        wake(ctx, head + _POSTED)
    return number


@inner
def fits_an_entry(ctx: int, size_bytes: int) -> Any:
    """Say whether a message is short: its sender does not wait."""
    return size_bytes <= peek(ctx + 8 * ENTRY_BYTES) - ENTRY_HEAD_BYTES


@inner
def is_taken(ctx: int, dst: int, number: int) -> Any:
    """Say whether the receiver has taken a message of this rank."""
    return acquire(_head(ctx, peek(ctx + 8 * ME), dst) + _TAKEN) > number


@inner
def send(ctx: int, dst: int, address: int, size_bytes: int) -> Any:
    """Send a message, and wait while the ring is full, and if it is long until it is taken."""
    me = peek(ctx + 8 * ME)
    head = _head(ctx, me, dst)
    share = BOTH if size_bytes >= _BOTH_BYTES else ALONE
    number = post(ctx, dst, address, size_bytes, share)
    if number == FULL:
        oldest = peek(head + _POSTED) - peek(ctx + 8 * RING_ENTRIES)
        code = await_word(ctx, head + _TAKEN, head + _TAKEN_SLEEPERS, oldest + 1, dst)
        if code != OK:
            return code
        number = post(ctx, dst, address, size_bytes, share)
    if fits_an_entry(ctx, size_bytes):
        return OK
    code = OK
    if share == BOTH:
        entry = _entry(ctx, me, dst, number)
        code = await_word(ctx, entry + 8 * _ACCEPTED, entry + 8 * _ACCEPTED_SLEEPERS, 1, dst)
        if code == OK:
            segment = peek(entry + 8 * _TO_SEGMENT)
            base = 0 if segment == NO_SEGMENT else mapped_at(ctx, dst, segment)
            there = peek(entry + 8 * _TO_ADDRESS) if base == 0 else base + peek(entry + 8 * _TO_OFFSET)
            _copy_pieces(ctx, entry, dst, address, there, base != 0, size_bytes, True)
    if code == OK:
        code = await_word(ctx, head + _TAKEN, head + _TAKEN_SLEEPERS, number + 1, dst)
    if code != OK:
        withdraw(ctx, dst, number)
    return code


@inner
def _copy_pieces(
    ctx: int, entry: int, rank: int, here: int, there: int, mapped: bool, size_bytes: int, writes: bool
) -> None:  # fmt: skip
    """Copy pieces of a message from or to another rank, each that nobody has claimed yet."""
    piece = max(_PIECE_BYTES, (size_bytes // _PIECES + 4096) // 4096 * 4096)
    while True:
        begin = add_to(entry + 8 * _CLAIMED, 1) * piece
        if begin >= size_bytes:
            return
        n = min(piece, size_bytes - begin)
        if not mapped:
            transfer(ctx, rank, here + begin, there + begin, n, writes)
        elif writes:
            copy(there + begin, here + begin, n)
        else:
            copy(here + begin, there + begin, n)
        if peek(ctx + 8 * FAULT) != 0:
            poke(ctx + 8 * FAULT, 0)
            poke(entry + 8 * _BROKEN, 1)
        add_to(entry + 8 * _COPIED, n)
        if peek(entry + 8 * _COPIED_SLEEPERS) != 0:
            wake(ctx, entry + 8 * _COPIED)


@inner
def _copy_message(ctx: int, entry: int, src: int, address: int, size_bytes: int) -> Any:
    """Copy a long message, together with its sender if that waits for it."""
    segment = peek(entry + 8 * _SEGMENT)
    base = 0 if segment == NO_SEGMENT else mapped_at(ctx, src, segment)
    there = peek(entry + 8 * _ADDRESS) if base == 0 else base + peek(entry + 8 * _OFFSET)
    code, both = OK, peek(entry + 8 * _KIND) == _THERE_BOTH
    if peek(entry + 8 * _KIND) == _THERE_OFFERED:
        code = _pull_message(ctx, entry, src, address, size_bytes)
    elif both:
        own = segment_of(ctx, address, size_bytes)
        poke(entry + 8 * _TO_ADDRESS, address)
        poke(entry + 8 * _TO_SEGMENT, own)
        if own != NO_SEGMENT:
            poke(entry + 8 * _TO_OFFSET, address - mapped_at(ctx, peek(ctx + 8 * ME), own))
        release(entry + 8 * _ACCEPTED, 1)
        fence()
        if peek(entry + 8 * _ACCEPTED_SLEEPERS) != 0:
            wake(ctx, entry + 8 * _ACCEPTED)
        _copy_pieces(ctx, entry, src, address, there, base != 0, size_bytes, False)
        code = await_word(ctx, entry + 8 * _COPIED, entry + 8 * _COPIED_SLEEPERS, size_bytes, src)
    elif base != 0:
        copy(address, there, size_bytes)
    else:
        transfer(ctx, src, address, there, size_bytes, False)
    if peek(ctx + 8 * FAULT) != 0 or (both and peek(entry + 8 * _BROKEN) != 0):
        poke(ctx + 8 * FAULT, 0)
        return FAULTY
    return code


@inner
def _ask_for(ctx: int, entry: int, src: int, address: int, size_bytes: int) -> None:
    """Ask the sender of a message to hand it on."""
    begin_into(flow_of(ctx, src), address, peek(entry + 8 * _ADDRESS), size_bytes)
    release(entry + 8 * _ACCEPTED, 1)


@inner
def _pull_some(ctx: int, entry: int, src: int) -> Any:
    """Read what has come of a message that is handed on: OK once all of it has, PENDING if none has."""
    at = flow_of(ctx, src)
    moved = pull(ctx, src)
    if moved == 0 and into_left(at) != 0:
        if acquire(entry + 8 * _KIND) == _WITHDRAWN:
            return FAULTY
        if acquire(entry + 8 * _BROKEN) == 0:
            return PENDING
        read_rest(ctx, src)
    return OK if into_left(at) == 0 else PENDING + 1


@inner
def _pull_message(ctx: int, entry: int, src: int, address: int, size_bytes: int) -> Any:
    """Have a message handed on; a wait that ends early leaves the pipe to nobody."""
    _ask_for(ctx, entry, src, address, size_bytes)
    deadline_ns, tries = clock_ns(ctx) + peek(ctx + 8 * TIMEOUT_NS), 0
    while True:
        code = _pull_some(ctx, entry, src)
        if code in (OK, FAULTY):
            return code
        tries = tries + 1 if code == PENDING else 0
        if tries != 0:
            code = pause(ctx, tries, deadline_ns, src)
            if code != OK:
                poke(entry + 8 * _BROKEN, 1)
                return code


@inner
def withdraw(ctx: int, dst: int, number: int) -> Any:
    """Take back a long message that was not taken: its buffer may be gone when the receiver comes."""
    poke(_entry(ctx, peek(ctx + 8 * ME), dst, number) + 8 * _KIND, _WITHDRAWN)
    return OK


@inner
def has_come(ctx: int, src: int) -> Any:
    """Say whether a message of a rank waits to be taken."""
    head = _head(ctx, src, peek(ctx + 8 * ME))
    return acquire(head + _POSTED) > peek(head + _TAKEN)


@inner
def receive(ctx: int, src: int, address: int, size_bytes: int) -> Any:
    """Wait for a message and take it; one of another length is let go (UNEQUAL, its length in CAME)."""
    me = peek(ctx + 8 * ME)
    head = _head(ctx, src, me)
    number = peek(head + _TAKEN)
    code = await_word(ctx, head + _POSTED, head + _POSTED_SLEEPERS, number + 1, src)
    if code != OK:
        return code
    entry = _entry(ctx, src, me, number)
    kind, came = peek(entry + 8 * _KIND), peek(entry + 8 * _BYTES)
    if kind == _WITHDRAWN:
        code = FAULTY
    elif came != size_bytes:
        poke(ctx + 8 * CAME, came)
        code = UNEQUAL
    elif kind == _HERE:
        copy_bytes(address, entry + ENTRY_HEAD_BYTES, size_bytes)
    else:
        code = _copy_message(ctx, entry, src, address, size_bytes)
    _take(ctx, head, number)
    return code


@inner
def _take(ctx: int, head: int, number: int) -> None:
    """Tell the sender of a message that this rank needs it no more."""
    release(head + _TAKEN, number + 1)
    fence()
    if peek(head + _TAKEN_SLEEPERS) != 0:
        wake(ctx, head + _TAKEN)


@inner
def send_receive(
    ctx: int, dst: int, send_at: int, send_bytes: int, src: int, recv_at: int, recv_bytes: int
) -> Any:  # fmt: skip
    """Send a message and receive another, neither before the other."""
    me, choice = peek(ctx + 8 * ME), 0
    if takes_pipes(ctx, send_bytes) and dst != me and segment_of(ctx, send_at, send_bytes) == NO_SEGMENT:
        choice = row_for(peek(ctx + 8 * CHOICES), MESSAGE, send_bytes)
        if second_is_next(choice) and hold(ctx, dst):
            number = post(ctx, dst, send_at, send_bytes, OFFERED)
            if number != FULL:
                begin_out(flow_of(ctx, dst), send_at, send_bytes)
                return _hand_on_and_receive(ctx, dst, number, src, recv_at, recv_bytes, choice)
            let_go(ctx, dst)
    number = post(ctx, dst, send_at, send_bytes, ALONE)
    begin_ns = 0
    if choice != 0:
        head = _head(ctx, src, me)
        await_word(ctx, head + _POSTED, head + _POSTED_SLEEPERS, peek(head + _TAKEN) + 1, src)
        begin_ns = clock_ns(ctx)
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
        head = _head(ctx, me, dst)
        ended = await_word(ctx, head + _TAKEN, head + _TAKEN_SLEEPERS, number + 1, dst)
    if choice != 0 and ended == OK:
        learn(choice, False, send_bytes, clock_ns(ctx) - begin_ns)
    return ended if ended != OK else code


@inner
def _hand_on_and_receive(
    ctx: int, dst: int, number: int, src: int, recv_at: int, recv_bytes: int, choice: int
) -> Any:  # fmt: skip
    """Hand on a message that was offered, once its receiver asks for it, and receive another meanwhile."""
    me = peek(ctx + 8 * ME)
    entry, out, into = _entry(ctx, me, dst, number), _head(ctx, me, dst), _head(ctx, src, me)
    expected = peek(into + _TAKEN)
    coming = _entry(ctx, src, me, expected)
    deadline_ns, begin_ns, tries = clock_ns(ctx) + peek(ctx + 8 * TIMEOUT_NS), 0, 0
    asked = received = False
    ended = OK
    while True:
        moved = False
        if acquire(entry + 8 * _ACCEPTED) != 0:
            pushed = push(ctx, dst)
            moved = pushed != 0
            if pushed < 0:
                release(entry + 8 * _BROKEN, 1)
        if received:
            if acquire(out + _TAKEN) > number:
                break
        elif asked:
            ended = _pull_some(ctx, coming, src)
            moved = moved or ended != PENDING
            if ended in (OK, FAULTY):
                received = True
                if peek(ctx + 8 * FAULT) != 0:
                    poke(ctx + 8 * FAULT, 0)
                    ended = FAULTY
                _take(ctx, into, expected)
        elif acquire(into + _POSTED) > expected:
            begin_ns, moved = clock_ns(ctx), True
            if peek(coming + 8 * _KIND) == _THERE_OFFERED and peek(coming + 8 * _BYTES) == recv_bytes:
                _ask_for(ctx, coming, src, recv_at, recv_bytes)
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
                    poke(coming + 8 * _BROKEN, 1)
                withdraw(ctx, dst, number)
                return code
    if acquire(entry + 8 * _BROKEN) == 0:
        let_go(ctx, dst)
        if ended == OK:
            learn(choice, True, peek(entry + 8 * _BYTES), clock_ns(ctx) - begin_ns)
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
            head = _head(ctx, peek(ctx + 8 * ME), peek(row))
            code = await_word(
                ctx, head + _TAKEN, head + _TAKEN_SLEEPERS, peek(row + 32) + 1, peek(row)
            )  # fmt: skip
            if code != OK:
                return code
    return OK


@inner
def receive_if_come(ctx: int, src: int, address: int, size_bytes: int) -> Any:
    """As `receive`, but PENDING where it would wait."""
    if not has_come(ctx, src):
        return PENDING
    return receive(ctx, src, address, size_bytes)
