"""Commit or abort, once for each attempt: by a word that all ranks of a node map, so that a death cannot split them.

All ranks have agreed that they are ready before anybody asks for a commit. A rank that hears of a failure instead asks
for an abort. Whoever asks first decides; the others find the decision. The word outlives the process that made it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowshard.comm.protocol import Communicator
from lowshard.reshard.view import NodeView

_COMMIT, _ABORT = 1, 2


class Vote:
    """The decisions of a group, attempt after attempt.

    Collective: all ranks of the communicator make it. Where its ranks share no memory (several hosts, GPUs without a
    host communicator) each rank's own view decides: survivors of a death within the vote may then differ.
    """

    def __init__(self, comm: Communicator) -> None:
        control = comm.control
        view = NodeView.of(control)
        self._word: Any = None
        self._decided = (0, 0)
        if view is None:
            return
        self._own = control.empty(1, "int64")
        self._own[...] = 0
        self._word = view.publish([self._own])[0][0]
        if self._word is None:  # empty() gave private memory
            return
        from lowshard.reshard.word import compare_swap

        self._swap = compare_swap()
        self._at = int(np.asarray(self._word).ctypes.data)

    @property
    def shared(self) -> bool:
        """Whether all ranks look at one word."""
        return self._word is not None

    def decide(self, attempt: int, commit: bool) -> bool:
        """Ask for a commit or an abort of an attempt (1, 2, ...), and return whether it is committed."""
        mine = _COMMIT if commit else _ABORT
        if self._word is None:
            return commit
        while True:
            held = int(self._word.view(np.int64)[0])
            if held // 4 >= attempt:
                return held % 4 == _COMMIT
            self._swap(self._at, held, attempt * 4 + mine)
