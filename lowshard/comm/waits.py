"""Who has been in a call for long, and where the others are: said once, while the wait may still come to an end.

Rank 0 has it from the heartbeats. A rank notes how long it has been in its call, and from which line, once a second.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from lowshard.comm.call import INSIDE_AT, PLACE_AT, WAITED_AT, read_text
from lowshard.comm.wait_guard import names_of

__all__ = ["Waits"]

_MOST_GROUPS = 8


class Waits:
    """Looks at what the ranks are in, and says once who waits in which call."""

    def __init__(self, after_ns: int) -> None:
        """Make it; a rank waits for long that has been in one call for `after_ns`, the next time for twice that."""
        self._after_ns = int(after_ns)
        self._before: dict[int, bytes] = {}
        self._said = False

    def look(self, texts: Mapping[int, bytes]) -> str:
        """Return what is to be said now, or "".

        Nothing is said twice of one wait, nor where all ranks are in the same call: that one is at work.

        Args:
            texts: what `Activity.text` holds on each rank that has not left.
        """
        waiting = {
            rank: text
            for rank, text in texts.items()
            if text[INSIDE_AT] and _waited_ns(text) >= self._after_ns
        }
        # A rank notes its wait now and then, so that what it has noted may be of the call before.
        known = [rank for rank, text in waiting.items() if self._before.get(rank) == text[:WAITED_AT]]
        self._before = {rank: text[:WAITED_AT] for rank, text in waiting.items()}
        if not known or len(known) < len(waiting):  # the others notice within a moment
            self._said = self._said and bool(waiting)
            return ""
        calls = {text[: INSIDE_AT + 1] for text in waiting.values()}
        groups: dict[str, list[int]] = {}
        for rank, text in sorted(texts.items()):
            groups.setdefault(_state(text, text[: INSIDE_AT + 1] in calls), []).append(rank)
        if self._said or len({text[: INSIDE_AT + 1] for text in texts.values()}) == 1:
            return ""
        self._said = True
        parts = [
            f"{names_of(ranks)} {state}"
            for state, ranks in sorted(groups.items(), key=lambda group: group[1])
        ]
        parts.sort(key=lambda part: " waiting in " not in part)
        more = "; others elsewhere" if len(parts) > _MOST_GROUPS else ""
        after_s = self._after_ns / 1e9
        self._after_ns *= 2  # a program whose ranks wait at every step is told of it a few times only
        return f"no progress for {after_s:g} s: {'; '.join(parts[:_MOST_GROUPS])}{more}"


def _waited_ns(text: bytes) -> int:
    return int.from_bytes(text[WAITED_AT:PLACE_AT], sys.byteorder)


def _state(text: bytes, waits: bool) -> str:
    """Return what a rank is in, and where in its program."""
    place = text[PLACE_AT:].rstrip(b"\0").decode(errors="replace")
    beside = f" ({place})" if place else ""
    call = read_text(text).removesuffix(" (done)")
    if text[INSIDE_AT]:
        return f"{'waiting in' if waits else 'in'} {call}{beside}"
    return f"in no collective{beside}" + (f", the last was {call}" if call else "")
