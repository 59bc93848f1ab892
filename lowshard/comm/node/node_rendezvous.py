"""How the ranks of a node meet: each writes its stamp on its own card and waits for the stamps of the others.

A group's cards lie in shared memory, one a rank. A rank steps to the next stamp with every meeting, so all stamps of a
group differ by one at most, and what a card says beside its stamp (signature, where the buffers lie) needs
two places, taken in turn. A wait spins, then yields the core, then sleeps on a futex, and ends early when the
flag of failure is set or the time is over.

The context of a group is a row of int64 in a process's own memory; the constants below are its places.
"""

from __future__ import annotations

from typing import Any

from lowshard.comm.node.atomic import (
    acquire,
    add_to,
    call_five,
    field,
    peek,
    read_clock,
    relax,
    release,
    set_field,
    system_call,
    yield_core,
)
from lowshard.comm.node.inlined import inner
from lowshard.compiled.emitted import fence

# ---- places of a context, in int64

SIZE = 0
"""Ranks of the group."""
ME = 1
"""This rank."""
CARDS = 2
"""Address of the cards."""
SLOTS = 3
"""Address of the slots, TURNS a rank, which meetings take in turn, for what goes through memory of the group's."""
SLOT_BYTES = 4
FLAG = 5
"""Address of an int64 that is not 0 once a failure is known."""
TIMEOUT_NS = 6
STAMP = 7
"""Meetings so far."""
SPINS = 8
"""Looks at a stamp before the core is yielded."""
YIELDS = 9
"""Yields before the wait sleeps."""
FUTEX_CALL = 10
"""Number of the system call, or 0."""
MISSING = 11
"""Out: the rank that a wait was for when it ended early."""
MAPS = 12
"""Address of a table of int64, SEGMENTS a process of the node: where this process sees their segments, or 0."""
PIDS = 13
"""Address of the ranks' process ids."""
SCRATCH = 14
"""Address of this rank's own scratch memory for reductions."""
FAULT = 15
"""Out: a system call that copies from a peer has failed."""
CLOCK, CLOCK_NS = 16, 17
"""Room for a time: seconds, nanoseconds."""
NAP, NAP_NS = 18, 19
"""The same for how long to sleep."""
VECTORS = 20  # to 23: an iovec here, an iovec there
PARTS = 24
"""Address of an int64 a rank: where a block of its operand lies. Then one a rank: where its operand is mapped, or 0."""
MEMBERS = 25
"""Address of an int64 a rank: which process of the node it is."""
OWN = 26
"""Address of a table of int64: how many segments this process has, then address and size of each."""
WANTED = 27
"""Address of an int64 that is set when a peer's segment is met that is not mapped here yet."""
GONE = 28
"""Address of an int64 a rank of the failure channel: when it ended its program, in ns, or 0; 0 for no table."""
WATCHED = 29
"""Address of an int64 a rank of the group: its rank in that table."""
HEADS = 30
"""Address of the counters of the pairs' messages."""
ENTRIES = 31
"""Address of the rings of entries, one a pair."""
RING_ENTRIES = 32
ENTRY_BYTES = 33
CAME = 34
"""Out: bytes of a message that was not as long as it should be."""
SMALL_BYTES = 35
"""What goes through a slot whole."""
SHARE_PAST = 36
"""Results of so many bytes are written past the caches for other ranks to read."""
PROGRESS = 37
"""Address of six int64: a C function that lets MPI go on, 0 once MPI ends, and its arguments; 0 for none."""
PIPES = 38
"""Address of the table of `lowshard.comm.node.pipe`, or 0."""
FLOWS = 39
"""Address of what it notes of each rank, of this context alone."""
LAST_CACHE = 40
"""How large a result the last cache keeps beside its operand."""
PIPES_FROM = 41
"""Private memory is handed on by pipes from so many bytes on."""
TURNS = 8
"""Slots a rank. Two would do, since all have read what was shown two meetings ago. But what another core has read is
cheap to write again only when the caches have forgotten it."""
CONTEXT_WORDS = 42

SEGMENTS = 64
"""Segments of a rank that peers map; buffers in others are read as private memory is."""

# ---- bytes of a card

CARD_BYTES = 256
_STAMP = 0
_SLEEPERS = 8
_WORDS = 64
"""Where what is said beside the stamp begins: two lines of eight int64."""
_LINE_BYTES = 64

SIGNATURE, SEND, SEND_SEGMENT, SEND_OFFSET, RECV, RECV_SEGMENT, RECV_OFFSET = range(7)

# ---- how a meeting ends

OK, DIFFERENT, FAILED, LATE, FAULTY, LEFT, UNEQUAL = range(7)

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_MONOTONIC = 1
_PAUSE_YIELDS = 1 << 14
_SHORTEST_NAP_NS, _LONGEST_NAP_NS = 100_000, 20_000_000
_ALL = 1 << 30
_GONE_NS = 1_000_000_000


@inner
def line(ctx: int, rank: int) -> Any:
    """Return the address of what a rank says beside the stamp that is being met."""
    return field(ctx, CARDS) + rank * CARD_BYTES + _WORDS + (field(ctx, STAMP) & 1) * _LINE_BYTES


@inner
def slot(ctx: int, rank: int, ahead: int) -> Any:
    """Return the address of a rank's slot for the stamp that is being met, or (ahead 1) for the next."""
    turn = (field(ctx, STAMP) + ahead) & (TURNS - 1)
    return field(ctx, SLOTS) + (TURNS * rank + turn) * field(ctx, SLOT_BYTES)


@inner
def step(ctx: int) -> None:
    """Go to the next stamp; `line` and `slot` are those of it from here on, and this rank's may be written."""
    set_field(ctx, STAMP, field(ctx, STAMP) + 1)


@inner
def arrive(ctx: int, signature: int) -> None:
    """Show this rank's stamp, and wake who sleeps on it."""
    me = field(ctx, ME)
    card = field(ctx, CARDS) + me * CARD_BYTES
    set_field(line(ctx, me), SIGNATURE, signature)
    release(card + _STAMP, field(ctx, STAMP))
    fence()  # the stamp is out before the sleepers are counted: they count themselves before they look at it
    if peek(card + _SLEEPERS) != 0:
        wake(ctx, card + _STAMP)


@inner
def wake(ctx: int, word: int) -> None:
    """Wake all who sleep on a word."""
    if field(ctx, FUTEX_CALL) != 0:
        system_call(field(ctx, FUTEX_CALL), word, _FUTEX_WAKE, _ALL, 0, 0, 0)


@inner
def clock_ns(ctx: int) -> Any:
    """Return a clock's time in nanoseconds."""
    read_clock(_MONOTONIC, ctx + 8 * CLOCK)
    return field(ctx, CLOCK) * 1_000_000_000 + field(ctx, CLOCK_NS)


@inner
def has_left(ctx: int, rank: int, now_ns: int) -> Any:
    """Say whether a rank has ended its program, long enough ago that its stamp would be seen."""
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
        call_five(
            field(words, 0),
            field(words, 1),
            field(words, 2),
            field(words, 3),
            field(words, 4),
            field(words, 5),
        )


@inner
def await_word(ctx: int, word: int, sleepers: int, wanted: int, rank: int) -> Any:
    """Return once a word that a rank counts up is at least `wanted`, or why not; waits are counted at `sleepers`."""
    flag, call = field(ctx, FLAG), field(ctx, FUTEX_CALL)
    spins, yields = field(ctx, SPINS), field(ctx, YIELDS)
    for _ in range(spins):
        if acquire(word) >= wanted:
            return OK
        relax()
    deadline_ns = clock_ns(ctx) + field(ctx, TIMEOUT_NS)
    tries, nap_ns = 0, _SHORTEST_NAP_NS
    while True:
        seen = acquire(word)
        if seen >= wanted:
            return OK
        if acquire(flag) != 0:
            if acquire(word) >= wanted:
                return OK  # a rank that failed after this call was complete does not spoil it
            set_field(ctx, MISSING, rank)
            return FAILED
        if (tries & 31) == 31:
            now_ns = clock_ns(ctx)
            if now_ns > deadline_ns:
                set_field(ctx, MISSING, rank)
                return LATE
            if has_left(ctx, rank, now_ns):
                set_field(ctx, MISSING, rank)
                return LEFT
            let_mpi_go_on(ctx)
        tries += 1
        if tries <= yields or call == 0:
            yield_core()
            continue
        tries |= 31  # a nap is long enough to look at the clock after each
        set_field(ctx, NAP, 0)
        set_field(ctx, NAP_NS, nap_ns)
        nap_ns = min(2 * nap_ns, _LONGEST_NAP_NS)
        add_to(sleepers, 1)
        if acquire(word) == seen:
            # The kernel compares the low half of the word (the machines above are little-endian).
            system_call(call, word, _FUTEX_WAIT, seen & 0xFFFFFFFF, ctx + 8 * NAP, 0, 0)
        add_to(sleepers, -1)


@inner
def pause(ctx: int, tries: int, deadline_ns: int, rank: int) -> Any:
    """Wait for a moment between two tries to go on with a rank that is in the same call; why not, if it is no use."""
    spins, call = field(ctx, SPINS), field(ctx, FUTEX_CALL)
    if tries < spins:
        relax()
        return OK
    if acquire(field(ctx, FLAG)) != 0:
        set_field(ctx, MISSING, rank)
        return FAILED
    if (tries & 31) == 31:
        now_ns = clock_ns(ctx)
        if now_ns > deadline_ns or has_left(ctx, rank, now_ns):
            set_field(ctx, MISSING, rank)
            return LATE if now_ns > deadline_ns else LEFT
        let_mpi_go_on(ctx)
    if tries < spins + _PAUSE_YIELDS or call == 0:
        yield_core()
        return OK
    set_field(ctx, NAP, 0)
    set_field(ctx, NAP_NS, _SHORTEST_NAP_NS)
    me = ctx + 8 * ME  # a word that nobody changes
    system_call(call, me, _FUTEX_WAIT, peek(me), ctx + 8 * NAP, 0, 0)
    return OK


@inner
def await_all(ctx: int, signature: int) -> Any:
    """Return once all ranks have shown the stamp: whether their signatures are equal, or why the wait ended."""
    me, size, code = field(ctx, ME), field(ctx, SIZE), OK
    for i in range(1, size):
        rank = me + i
        if rank >= size:
            rank -= size
        card = field(ctx, CARDS) + rank * CARD_BYTES
        ended = await_word(ctx, card + _STAMP, card + _SLEEPERS, field(ctx, STAMP), rank)
        if ended != OK:
            return ended
        if field(line(ctx, rank), SIGNATURE) != signature:
            code = DIFFERENT
    return code


@inner
def meet(ctx: int, signature: int) -> Any:
    """Show the stamp that `step` went to and wait for all others."""
    arrive(ctx, signature)
    return await_all(ctx, signature)
