"""Whether slots are better written past the caches or into them: found out while they are used.

What another core has just written takes many times as long to read where the cores are far apart as where they share a
cache; past the caches it takes the same everywhere. Which it is shows in how long calls take. A rank may choose for
itself: the bytes are the same.
"""

from __future__ import annotations

from typing import Any

from lowshard.comm.node.atomic import peek, poke
from lowshard.comm.node.inner import inner

_COUNT, _INTO, _PAST = range(3)
ROW_WORDS = 4
"""Of a class of calls: how many there were, and what one took by either way, in ns a KiB."""
CLASSES = 64
_RUN, _EVERY = 4, 256
"""Calls that take the same way before the last of them is believed, since the caches must get used to it; from the
beginning of how many on as many take the way that seems worse."""


@inner
def row_for(table: int, kind: int, size_bytes: int) -> Any:
    """Return the row for calls of a kind (0 or 1) and of about this size."""
    power = 0
    while size_bytes > 1 and power < CLASSES // 2 - 1:
        size_bytes >>= 1
        power += 1
    return table + 8 * ROW_WORDS * (2 * power + kind)


@inner
def past_is_next(row: int) -> Any:
    """Say whether the next call of a class writes past the caches."""
    count = peek(row + 8 * _COUNT)
    poke(row + 8 * _COUNT, count + 1)
    if count < 2 * _RUN:
        return count < _RUN
    past_is_better = peek(row + 8 * _PAST) <= peek(row + 8 * _INTO)
    return past_is_better != (count % _EVERY < _RUN)


@inner
def learn(row: int, past: bool, size_bytes: int, took_ns: int) -> None:
    """Note how long a call took: less is believed at once, more by an eighth at most, for a rank may be interrupted."""
    count = peek(row + 8 * _COUNT) - 1
    if (count < 2 * _RUN or count % _EVERY < _RUN) and count % _RUN != _RUN - 1:
        return
    at = row + 8 * (_PAST if past else _INTO)
    cost, known = took_ns * 1024 // max(size_bytes, 1), peek(at)
    poke(at, cost if known == 0 or cost < known else known + (min(cost, 2 * known) - known + 7) // 8)
