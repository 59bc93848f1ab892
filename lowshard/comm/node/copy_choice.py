"""Which of two ways is the faster one: found out while they are used.

Whether slots are better written past the caches or into them: what another core has just written takes many times as
long to read where the cores are far apart as where they share a cache; past the caches it takes the same everywhere.
Whether private memory is better read from afar or handed on through pipes: the former takes long where pages are
small. Which it is shows in how long calls take.

The ranks of a group follow the first of them, which says with every call what the next of its class is to take: a rank
that took another way than the rest would make all of them wait, and measure what neither way takes. It is no matter of
right or wrong, since the bytes are the same either way.
"""

from __future__ import annotations

from typing import Any

from lowshard.comm.node.atomic import peek, poke
from lowshard.comm.node.inlined import inner
from lowshard.comm.node.node_rendezvous import CHOICE, ME, aside

_COUNT, _AGREED, _FIRST, _FIRST_BEFORE, _SECOND, _SECOND_BEFORE = range(6)
ROW_WORDS = 6
"""Of a class of calls: how many there were; whether the second way is taken; what a call took by either way, in ns a
KiB, in the latest trial and in the one before."""
FOLD, FOLD_TO_ROOT, FOLD_AT_ROOT, SLOTS, GATHER, ALL_TO_ALL, EXCHANGE, MESSAGE, OWN_PART = range(9)
"""Kinds of calls."""
KINDS, _POWERS = 9, 32
CLASSES = KINDS * _POWERS
_RUN = 3
"""Calls that a trial makes by either way, of which the first is not believed, since the caches must get used to it."""
_TRIAL, _AGAIN, _EVERY = 2 * _RUN, 16, 256
"""Calls of a trial. Two begin a class; the next begin at so many calls, at twice as many and so on, and from so many on
as often: what the first calls take says little, since memory is touched first and programs have just begun."""
_SILENT, _NO_WORD = -1, 0
_SLOTS_BYTES = 16 << 10


@inner
def row_for(table: int, kind: int, size_bytes: int) -> Any:
    """Return the row for calls of a kind and of about this size."""
    power = 0
    while size_bytes > 1 and power < _POWERS - 1:
        size_bytes >>= 1
        power += 1
    return table + 8 * ROW_WORDS * (KINDS * power + kind)


@inner
def slots_row(table: int, size_bytes: int) -> Any:
    """Return the row for what goes through the slots whole, 0 where it is too little to matter."""
    return row_for(table, SLOTS, size_bytes) if size_bytes >= _SLOTS_BYTES else 0


@inner
def _place(count: int) -> Any:
    """Return the place of a call in a trial, of _TRIAL or more outside of one."""
    if count >= _EVERY:
        return count % _EVERY
    if count < 2 * _TRIAL:
        return count % _TRIAL
    begin = _AGAIN
    while 2 * begin <= count:
        begin *= 2
    return count - begin if count >= begin else _TRIAL


@inner
def second_is_next(row: int) -> Any:
    """Say whether the next call of a class takes the second way.

    A trial takes the one and the other whichever is agreed, so that ranks that disagree do not measure a mixture.
    """
    count = peek(row + 8 * _COUNT)
    poke(row + 8 * _COUNT, count + 1)
    place = _place(count)
    if place < _TRIAL:
        return place < _RUN
    return peek(row + 8 * _AGREED) != 0


@inner
def _cost(row: int, now: int, before: int) -> Any:
    """Return what a way takes: the less of two trials, since other programs may have run in one of them."""
    latest, earlier = peek(row + 8 * now), peek(row + 8 * before)
    return latest if earlier == 0 else min(latest, earlier)


@inner
def second_is_better(row: int) -> Any:
    """Say whether the second way was the faster one."""
    return _cost(row, _SECOND, _SECOND_BEFORE) <= _cost(row, _FIRST, _FIRST_BEFORE)


@inner
def tell_choice(ctx: int, row: int) -> None:
    """Before a meeting: say, if this is the first rank, what the class's next call is to take; `row` is 0 for none."""
    if peek(ctx + 8 * ME) == 0:
        said = _SILENT
        if row != 0:
            said = 1 if second_is_better(row) else 0
        poke(aside(ctx, 0, CHOICE), said)


@inner
def hear_choice(ctx: int, row: int) -> None:
    """After the meeting: note what the first rank has said; where it does not choose, each chooses for itself."""
    if row != 0:
        said = peek(aside(ctx, 0, CHOICE))
        if said == _SILENT:
            said = 1 if second_is_better(row) else 0
        poke(row + 8 * _AGREED, said)


@inner
def say_choice(row: int) -> Any:
    """Note what this rank would have the next call of a class take; return it as a word for another rank."""
    said = 1 if second_is_better(row) else 0
    poke(row + 8 * _AGREED, said)
    return 1 + said


@inner
def follow_choice(row: int, word: int) -> None:
    """Take the way that another rank's word tells of instead, if it is one."""
    if word != _NO_WORD:
        poke(row + 8 * _AGREED, word - 1)


@inner
def learn(row: int, second: bool, size_bytes: int, took_ns: int) -> None:
    """Note how long the call took that asked last, if it belongs to a trial and is believed."""
    place = _place(peek(row + 8 * _COUNT) - 1)
    nth = place % _RUN
    if place >= _TRIAL or nth == 0 or second != (place < _RUN):
        return
    at = row + 8 * (_SECOND if second else _FIRST)
    cost = max(1, took_ns * 1024 // max(size_bytes, 1))
    if nth == 1:
        poke(at + 8, peek(at))
        poke(at, cost)
    else:
        poke(at, min(cost, peek(at)))
