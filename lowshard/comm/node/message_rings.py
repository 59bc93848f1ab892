"""Messages between two ranks of a node: a ring of entries for each ordered pair, in memory of the group's.

A short message is copied into an entry, and its sender goes on; of a long one the entry says where it lies, and its
sender waits until it is copied, and copies a share of it meanwhile. One rank alone writes each counter: the sender
how many it has posted, the receiver how many it has taken.
"""

from __future__ import annotations

from typing import Any

from lowshard.comm.node.atomic import acquire, add_to, field, peek, release, set_field
from lowshard.comm.node.inlined import inner
from lowshard.comm.node.node_rendezvous import (
    CAME,
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
from lowshard.comm.node.peer_copy import NO_SEGMENT, copy, mapped_at, segment_of, transfer
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
from lowshard.compiled.emitted import copy_bytes, fence

HEAD_BYTES = 128
"""Of a pair: what its sender writes, what its receiver writes, a line each."""
POSTED, POSTED_SLEEPERS = 0, 8
TAKEN, TAKEN_SLEEPERS = 64, 72

KIND, LENGTH, _ADDRESS, _SEGMENT, _OFFSET = range(5)
"""Words of an entry; its content, if it is short, begins at ENTRY_HEAD_BYTES."""
(
    ACCEPTED, _CLAIMED, _COPIED, _TO_ADDRESS, _TO_SEGMENT, _TO_OFFSET, _ACCEPTED_SLEEPERS, _COPIED_SLEEPERS, BROKEN,
) = range(5, 14)  # fmt: skip
"""Of one that both copy: whether the receiver says where to; pieces that somebody copies, and bytes that have been
copied; where to; who sleeps; whether a copy has failed."""
_REFUSED = 2
"""In ACCEPTED: the receiver expects another length."""
_BOTH_BYTES = 64 << 10
"""Messages from here on both sides copy."""
_PIECE_BYTES, _PIECES = 32 << 10, 16
"""Of a piece, at least; how many there are of a long message."""
ENTRY_HEAD_BYTES = 64
_HERE, _THERE, _THERE_BOTH, THERE_OFFERED, _WITHDRAWN = range(5)
"""Kinds: in the entry; in memory; in memory, and its sender copies too, or hands it on through a pipe if asked to."""
ALONE, BOTH, OFFERED = range(3)
"""What a sender does for a long message."""

PEER, ADDRESS, SIZE_BYTES, SENDS, NUMBER, CODE, CAME_BYTES = range(7)
GROUP_WORDS = 8
"""A row of `run_group`, a message: peer, where it lies, bytes, whether it is sent; out: its number, how it ended, bytes
that came in place of those expected."""

FULL = -1
"""In place of a message's number: the ring has no entry free."""
PENDING = 33
"""Result: nothing has come yet."""


@inner
def head_of(ctx: int, src: int, dst: int) -> Any:
    """Return the address of a pair's counters."""
    return field(ctx, HEADS) + (src * field(ctx, SIZE) + dst) * HEAD_BYTES


@inner
def entry_of(ctx: int, src: int, dst: int, number: int) -> Any:
    """Return the address of a message's entry."""
    ring = field(ctx, RING_ENTRIES)
    place = (src * field(ctx, SIZE) + dst) * ring + number % ring
    return field(ctx, ENTRIES) + place * field(ctx, ENTRY_BYTES)


@inner
def post(ctx: int, dst: int, address: int, size_bytes: int, share: int) -> Any:
    """Post a message and return its number, or FULL.

    Args:
        ctx: the context.
        dst: whom to.
        address: of what is sent.
        size_bytes: of it.
        share: what its sender will do if it is long, ALONE for nothing.
    """
    me = field(ctx, ME)
    head = head_of(ctx, me, dst)
    number = peek(head + POSTED)
    if number - acquire(head + TAKEN) >= field(ctx, RING_ENTRIES):
        return FULL
    entry = entry_of(ctx, me, dst, number)
    set_field(entry, LENGTH, size_bytes)
    if fits_an_entry(ctx, size_bytes):
        set_field(entry, KIND, _HERE)
        copy_bytes(entry + ENTRY_HEAD_BYTES, address, size_bytes)
    else:
        set_field(entry, KIND, _THERE + share)
        set_field(entry, _ADDRESS, address)
        segment = segment_of(ctx, address, size_bytes)
        set_field(entry, _SEGMENT, segment)
        if segment != NO_SEGMENT:
            set_field(entry, _OFFSET, address - mapped_at(ctx, me, segment))
        for word in range(ACCEPTED, BROKEN + 1):
            set_field(entry, word, 0)
    release(head + POSTED, number + 1)
    fence()  # as in meet.arrive
    if peek(head + POSTED_SLEEPERS) != 0:
        wake(ctx, head + POSTED)
    return number


@inner
def fits_an_entry(ctx: int, size_bytes: int) -> Any:
    """Say whether a message is short: its sender does not wait."""
    return size_bytes <= field(ctx, ENTRY_BYTES) - ENTRY_HEAD_BYTES


@inner
def is_taken(ctx: int, dst: int, number: int) -> Any:
    """Say whether the receiver has taken a message of this rank."""
    return acquire(head_of(ctx, field(ctx, ME), dst) + TAKEN) > number


@inner
def send(ctx: int, dst: int, address: int, size_bytes: int) -> Any:
    """Send a message, and wait while the ring is full, and if it is long until it is taken."""
    me = field(ctx, ME)
    head = head_of(ctx, me, dst)
    share = BOTH if size_bytes >= _BOTH_BYTES else ALONE
    number = post(ctx, dst, address, size_bytes, share)
    if number == FULL:
        oldest = peek(head + POSTED) - field(ctx, RING_ENTRIES)
        code = await_word(ctx, head + TAKEN, head + TAKEN_SLEEPERS, oldest + 1, dst)
        if code != OK:
            return code
        number = post(ctx, dst, address, size_bytes, share)
    if fits_an_entry(ctx, size_bytes):
        return OK
    code = OK
    if share == BOTH:
        entry = entry_of(ctx, me, dst, number)
        code = await_word(ctx, entry + 8 * ACCEPTED, entry + 8 * _ACCEPTED_SLEEPERS, 1, dst)
        if code == OK and field(entry, ACCEPTED) != _REFUSED:
            segment = field(entry, _TO_SEGMENT)
            base = 0 if segment == NO_SEGMENT else mapped_at(ctx, dst, segment)
            there = field(entry, _TO_ADDRESS) if base == 0 else base + field(entry, _TO_OFFSET)
            _copy_pieces(ctx, entry, dst, address, there, base != 0, size_bytes, True)
    if code == OK:
        code = await_word(ctx, head + TAKEN, head + TAKEN_SLEEPERS, number + 1, dst)
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
        if field(ctx, FAULT) != 0:
            set_field(ctx, FAULT, 0)
            set_field(entry, BROKEN, 1)
        add_to(entry + 8 * _COPIED, n)
        if field(entry, _COPIED_SLEEPERS) != 0:
            wake(ctx, entry + 8 * _COPIED)


@inner
def _copy_message(ctx: int, entry: int, src: int, address: int, size_bytes: int) -> Any:
    """Copy a long message, together with its sender if that waits for it."""
    segment = field(entry, _SEGMENT)
    base = 0 if segment == NO_SEGMENT else mapped_at(ctx, src, segment)
    there = field(entry, _ADDRESS) if base == 0 else base + field(entry, _OFFSET)
    code, both = OK, field(entry, KIND) == _THERE_BOTH
    if field(entry, KIND) == THERE_OFFERED:
        code = _pull_message(ctx, entry, src, address, size_bytes)
    elif both:
        own = segment_of(ctx, address, size_bytes)
        set_field(entry, _TO_ADDRESS, address)
        set_field(entry, _TO_SEGMENT, own)
        if own != NO_SEGMENT:
            set_field(entry, _TO_OFFSET, address - mapped_at(ctx, field(ctx, ME), own))
        _answer(ctx, entry, 1)
        _copy_pieces(ctx, entry, src, address, there, base != 0, size_bytes, False)
        code = await_word(ctx, entry + 8 * _COPIED, entry + 8 * _COPIED_SLEEPERS, size_bytes, src)
    elif base != 0:
        copy(address, there, size_bytes)
    else:
        transfer(ctx, src, address, there, size_bytes, False)
    if field(ctx, FAULT) != 0 or (both and field(entry, BROKEN) != 0):
        set_field(ctx, FAULT, 0)
        return FAULTY
    return code


@inner
def _answer(ctx: int, entry: int, word: int) -> None:
    """Tell the sender of a message that both would copy where it goes, or that it is refused."""
    release(entry + 8 * ACCEPTED, word)
    fence()
    if field(entry, _ACCEPTED_SLEEPERS) != 0:
        wake(ctx, entry + 8 * ACCEPTED)


@inner
def ask_for(ctx: int, entry: int, src: int, address: int, size_bytes: int) -> None:
    """Ask the sender of a message to hand it on."""
    begin_into(flow_of(ctx, src), address, field(entry, _ADDRESS), size_bytes)
    release(entry + 8 * ACCEPTED, 1)


@inner
def pull_some(ctx: int, entry: int, src: int) -> Any:
    """Read what has come of a message that is handed on: OK once all of it has, PENDING if none has."""
    at = flow_of(ctx, src)
    moved = pull(ctx, src)
    if moved == 0 and into_left(at) != 0:
        if acquire(entry + 8 * KIND) == _WITHDRAWN:
            return FAULTY
        if acquire(entry + 8 * BROKEN) == 0:
            return PENDING
        read_rest(ctx, src)
    return OK if into_left(at) == 0 else PENDING + 1


@inner
def _pull_message(ctx: int, entry: int, src: int, address: int, size_bytes: int) -> Any:
    """Have a message handed on; a wait that ends early leaves the pipe to nobody."""
    ask_for(ctx, entry, src, address, size_bytes)
    deadline_ns, tries = clock_ns(ctx) + field(ctx, TIMEOUT_NS), 0
    while True:
        code = pull_some(ctx, entry, src)
        if code in (OK, FAULTY):
            return code
        tries = tries + 1 if code == PENDING else 0
        if tries != 0:
            code = pause(ctx, tries, deadline_ns, src)
            if code != OK:
                set_field(entry, BROKEN, 1)
                return code


@inner
def withdraw(ctx: int, dst: int, number: int) -> Any:
    """Take back a long message that was not taken: its buffer may be gone when the receiver comes."""
    set_field(entry_of(ctx, field(ctx, ME), dst, number), KIND, _WITHDRAWN)
    return OK


@inner
def has_come(ctx: int, src: int) -> Any:
    """Say whether a message of a rank waits to be taken."""
    head = head_of(ctx, src, field(ctx, ME))
    return acquire(head + POSTED) > peek(head + TAKEN)


@inner
def receive(ctx: int, src: int, address: int, size_bytes: int) -> Any:
    """Wait for a message and take it; one of another length is let go (UNEQUAL, its length in CAME)."""
    me = field(ctx, ME)
    head = head_of(ctx, src, me)
    number = peek(head + TAKEN)
    code = await_word(ctx, head + POSTED, head + POSTED_SLEEPERS, number + 1, src)
    if code != OK:
        return code
    entry = entry_of(ctx, src, me, number)
    kind, came = field(entry, KIND), field(entry, LENGTH)
    if kind == _WITHDRAWN:
        code = FAULTY
    elif came != size_bytes:
        set_field(ctx, CAME, came)
        code = UNEQUAL
        if kind == _THERE_BOTH:
            _answer(ctx, entry, _REFUSED)
    elif kind == _HERE:
        copy_bytes(address, entry + ENTRY_HEAD_BYTES, size_bytes)
    else:
        code = _copy_message(ctx, entry, src, address, size_bytes)
    take(ctx, head, number)
    return code


@inner
def take(ctx: int, head: int, number: int) -> None:
    """Tell the sender of a message that this rank needs it no more."""
    release(head + TAKEN, number + 1)
    fence()
    if peek(head + TAKEN_SLEEPERS) != 0:
        wake(ctx, head + TAKEN)


@inner
def receive_if_come(ctx: int, src: int, address: int, size_bytes: int) -> Any:
    """As `receive`, but PENDING where it would wait."""
    if not has_come(ctx, src):
        return PENDING
    return receive(ctx, src, address, size_bytes)


# ---- messages that go and come in one call, none before another


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
