"""Version numbers, and the commit or abort of each attempt, decided once.

On one host the ranks decide through a word in shared memory, so a death cannot split them. All ranks have agreed that
they are ready before any asks for a commit; a rank that notices a failure asks for an abort. The first to ask decides.
The word outlives the process that made it.
"""

from __future__ import annotations

from operator import index
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from lowshard.comm.communicator import Communicator
from lowshard.errors import PlanError

_COMMIT, _ABORT = 1, 2
_words: WeakKeyDictionary[Communicator, list[Any]] = WeakKeyDictionary()
"""Kept as long as the communicator is."""


class Vote:
    """Commit or abort decisions of a group: survivors on one host always decide alike."""

    def __init__(self, comm: Communicator) -> None:
        control = comm.control
        self._word: Any = None
        if len(control.reach.peers) == 1:
            return
        mine = control.empty(1, np.int64)
        mine[0] = 0
        # A rank that is late to decide still finds the word of the first.
        _words.setdefault(control, []).append(mine)
        with control.turn("Refit"):
            first = control.reach.publish([mine]).view(control.reach.peers[0])
        assert first is not None
        self._word = first.view(np.int64)
        from lowshard.reshard.atomic_word import compare_swap

        self._swap = compare_swap()
        self._at = int(self._word.ctypes.data)

    @property
    def shared(self) -> bool:
        """Whether the ranks of a host share one word."""
        return self._word is not None

    def decide(self, attempt: int, commit: bool) -> bool:
        """Ask for a commit or an abort of an attempt (1, 2, ...); return whether it is committed."""
        mine = _COMMIT if commit else _ABORT
        if self._word is None:
            return commit
        while True:
            held = int(self._word[0])
            if held // 4 >= attempt:
                return held % 4 == _COMMIT
            self._swap(self._at, held, attempt * 4 + mine)


def version_number(version: object) -> int:
    """Return a version as a Python integer."""
    try:
        number = -1 if isinstance(version, (bool, np.bool_)) else index(version)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 63:
        raise PlanError(f"a version is an integer from 0 to 2^63 - 1, got {version!r}")
    return number
