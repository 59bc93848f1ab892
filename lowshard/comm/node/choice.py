"""Which of two ways is the faster one: found out while they are used.

Whether slots are better written past the caches or into them: what another core has just written takes many times as
long to read where the cores are far apart as where they share a cache; past the caches it takes the same everywhere.
Whether private memory is better read from afar or handed on through pipes: the former takes long where pages are
small. Which it is shows in how long calls take. A rank may choose for itself: the bytes are the same.
"""

from __future__ import annotations

from typing import Any

from lowshard.comm.node.atomic import peek, poke
from lowshard.comm.node.inner import inner

_COUNT, _FIRST, _SECOND = range(3)
ROW_WORDS = 4
"""Of a class of calls: how many there were, and what one took by either way, in ns a KiB."""
FOLD, FOLD_TO_ROOT, GATHER, GATHER_IN_PLACE, EXCHANGE, MESSAGE = range(6)
"""Kinds of calls."""
KINDS, _POWERS = 6, 32
CLASSES = KINDS * _POWERS
_RUN, _EVERY = 4, 256
"""Calls that take the same way before the last of them is believed, since the caches must get used to it; from the
beginning of how many on as many take the way that seems worse."""


@inner
def row_for(table: int, kind: int, size_bytes: int) -> Any:
    """Return the row for calls of a kind and of about this size."""
    power = 0
    while size_bytes > 1 and power < _POWERS - 1:
        size_bytes >>= 1
        power += 1
    return table + 8 * ROW_WORDS * (KINDS * power + kind)


@inner
def second_is_next(row: int) -> Any:
    """Say whether the next call of a class takes the second way."""
    count = peek(row + 8 * _COUNT)
    poke(row + 8 * _COUNT, count + 1)
    if count < 2 * _RUN:
        return count < _RUN
    second_is_better = peek(row + 8 * _SECOND) <= peek(row + 8 * _FIRST)
    return second_is_better != (count % _EVERY < _RUN)


@inner
def learn(row: int, second: bool, size_bytes: int, took_ns: int) -> None:
    """Note how long a call took: less is believed at once, more by an eighth at most, for a rank may be interrupted."""
    count = peek(row + 8 * _COUNT) - 1
    if (count < 2 * _RUN or count % _EVERY < _RUN) and count % _RUN != _RUN - 1:
        return
    at = row + 8 * (_SECOND if second else _FIRST)
    cost, known = took_ns * 1024 // max(size_bytes, 1), peek(at)
    poke(at, cost if known == 0 or cost < known else known + (min(cost, 2 * known) - known + 7) // 8)
