"""What differs between two snapshots, looked for once for all members that want the same boxes of it.

Servers of one layout ask for the same: the publisher's ranks search as often as there are layouts, not members.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from lowshard.box import Box
from lowshard.kernels.change_search import Room
from lowshard.kernels.change_text import Changes
from lowshard.kernels.changes import ChangeBoxes
from lowshard.reshard.version_store import Memory, Place

NOT_TOLD = Changes(0, 0, 0, None, 0)
_KEPT_PART = 8
"""Texts are kept up to such a part of a snapshot's bytes."""
_Key = tuple[int, str, tuple[Box, ...], int]


@dataclass
class _Search:
    """One search; who comes while it goes on waits for it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False
    found: Changes | None = None


class SharedSearch:
    """Searches in the snapshots of one rank; texts of the newest snapshot are kept. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = self._left_bytes = 0
        self._searches: dict[_Key, _Search] = {}

    def find(
        self, new: Memory, number: int, old: Memory, since: int, place: Place, boxes: ChangeBoxes, room: Room
    ) -> Changes:
        """Return what differs in a tensor's boxes; without a text where they had better come whole."""
        search = self._search(new, number, (since, place.name, boxes.boxes, boxes.block_elems))
        with search.lock:
            if not search.is_over:
                found = _find(new, number, old, since, place, boxes, room)
                if self._keeps(number, found):
                    search.found = found
                search.is_over = True
                return found
        return _find(new, number, old, since, place, boxes, room) if search.found is None else search.found

    def _search(self, new: Memory, number: int, key: _Key) -> _Search:
        with self._lock:
            if number > self._number:
                self._number, self._searches = number, {}
                self._left_bytes = new.size_bytes // _KEPT_PART
            return self._searches.setdefault(key, _Search()) if number == self._number else _Search()

    def _keeps(self, number: int, found: Changes) -> bool:
        """Say whether a text is to be kept: that of a snapshot still the newest, where there is room for it."""
        if found is NOT_TOLD:
            return False
        size_bytes = 0 if found.text is None else int(found.text.size)
        with self._lock:
            if number != self._number or size_bytes > self._left_bytes:
                return False
            self._left_bytes -= size_bytes
            return True


def _find(
    new: Memory, number: int, old: Memory, since: int, place: Place, boxes: ChangeBoxes, room: Room
) -> Changes:
    found = boxes.find(place.view(new.bytes), place.view(old.bytes), room, may_stop=True)
    return found if (new.number, old.number) == (number, since) else NOT_TOLD
