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
from lowshard.comm.node.inner import inner
from lowshard.comm.node.meet import CHOICE, ME, aside

_COUNT, _FIRST, _SECOND, _AGREED = range(4)
ROW_WORDS = 4
"""Of a class of calls: how many there were, what one took by either way, in ns a KiB, whether the second is taken."""
FOLD, FOLD_TO_ROOT, FOLD_AT_ROOT, SLOTS, GATHER, ALL_TO_ALL, EXCHANGE, MESSAGE = range(8)
"""Kinds of calls."""
KINDS, _POWERS = 8, 32
CLASSES = KINDS * _POWERS
_RUN, _EVERY = 3, 256
"""Calls that take the same way one after the other to find out what it takes, of which the first is not believed, since
the caches must get used to it; from the beginning of how many on as many take the way that seems worse."""
_RUNS = 4
"""Such runs that a class begins with, each way in turn: one alone may meet with an interruption."""
_SILENT = -1
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
def second_is_next(row: int) -> Any:
    """Say whether the next call of a class takes the second way."""
    count = peek(row + 8 * _COUNT)
    poke(row + 8 * _COUNT, count + 1)
    if count < _RUNS * _RUN:
        return (count // _RUN) & 1 == 0
    return (peek(row + 8 * _AGREED) != 0) != (count % _EVERY < _RUN)


@inner
def second_is_better(row: int) -> Any:
    """Say whether the second way was the faster one so far."""
    return peek(row + 8 * _SECOND) <= peek(row + 8 * _FIRST)


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
def choose_alone(row: int) -> None:
    """Note what this rank would have the next call of a class take."""
    poke(row + 8 * _AGREED, 1 if second_is_better(row) else 0)


@inner
def learn(row: int, second: bool, size_bytes: int, took_ns: int) -> None:
    """Note how long a call took: less is believed at once, more by an eighth at most, for a rank may be interrupted."""
    count = peek(row + 8 * _COUNT) - 1
    inside = count if count < _RUNS * _RUN else count % _EVERY
    if inside % _RUN == 0 and inside <= _RUNS * _RUN:
        return  # the first call after another way was taken
    at = row + 8 * (_SECOND if second else _FIRST)
    cost, known = took_ns * 1024 // max(size_bytes, 1), peek(at)
    poke(at, cost if known == 0 or cost < known else known + (min(cost, 2 * known) - known + 7) // 8)
