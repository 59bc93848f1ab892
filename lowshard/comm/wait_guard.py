"""What a wait looks at beside the thing it waits for: whether a rank has failed, and whether its time is over."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from lowshard.comm.call import Activity
from lowshard.errors import CommError, PeerFailed, TimedOut

_SPIN_TESTS = 200
_YIELD_TESTS = 2000
_PAUSE_S = 5e-5
_LOOK_EVERY = 64


class Watching(Protocol):
    """What waits need of the failure channel."""

    flag: Any
    """int64[1]: 0 until a failure is known."""
    world_ranks: Sequence[int]
    """The ranks of the job that its ranks are."""

    def error(self, where: str) -> CommError:
        """Return the error to raise for that failure."""

    def tell(self, kind: str, text: str) -> None:
        """Tell all other ranks that this one fails; after a time-out each of them prints what it was in."""

    def check_gone(self, missing_ranks: Iterable[int], where: str) -> None:
        """Raise PeerFailed if one of these ranks ended its program a while ago."""

    @property
    def gone_address(self) -> int:
        """Address of an int64 a rank: when it ended its program, in ns of the monotonic clock, or 0."""


class Lookout:
    """The failure channel as waits see it, or none: then only deadlines end them."""

    def __init__(self, watch: Watching | None, activity: Activity) -> None:
        self.watch, self.activity = watch, activity
        self._own_flag = np.zeros(1, np.int64)
        flag = self._own_flag if watch is None else watch.flag
        self.flag_address = int(flag.ctypes.data)
        self.gone_address = 0 if watch is None else watch.gone_address
        self._flag = flag.data

    def failed(self) -> bool:
        """Say whether a failure is known."""
        return bool(self._flag[0])

    def failure(self) -> CommError:
        """Return the error to raise here for the failure that is known."""
        where = self.activity.where()
        if self.watch is None:
            return CommError(f"a failure is known, but not which; this rank was in {where}")
        return self.watch.error(where)

    def late(
        self, what: str, missing: Sequence[int], timeout_s: float, watched: Sequence[int] = ()
    ) -> TimedOut:
        """Return the error for a wait whose time is over, and tell all others; prints what this rank was in.

        `missing` are the ranks of the group that have not come, empty where that is not known; `watched` the same as
        ranks of the failure channel.
        """
        who = names_of(missing) if missing else "some rank"
        about = [] if self.watch is None else [self.watch.world_ranks[rank] for rank in watched]
        if about and about != list(missing):
            who += f" of its group ({names_of(about)} of the job)"
        text = f"{who} did not come to {what} within {timeout_s:g} s"
        if self.watch is not None:
            self.watch.tell("timed out", text)
        else:
            self.activity.dump_ring(sys.stderr)
        return TimedOut(f"{text}; this rank was in {self.activity.where()}").about(about)

    def left(self, rank: int) -> CommError:
        """Return the error for a rank (of the failure channel) that ended its program while this one waits for it."""
        where = self.activity.where()
        if self.watch is not None:
            try:
                self.watch.check_gone([rank], where)
            except CommError as error:
                return error
        return PeerFailed(f"rank {rank} has ended its program; this rank was in {where}")

    def wait(
        self, test: Callable[[], Any], what: str, missing: Callable[[], Sequence[int]] | None, timeout_s: float,
        watched: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Return once `test` returns true: it asks MPI whether something is done, which also makes it go on."""
        for _ in range(_SPIN_TESTS):
            if test():
                return
        start_s = time.monotonic()
        tests = 0
        while not test():
            tests += 1
            if tests < _YIELD_TESTS:
                os.sched_yield()
            else:
                time.sleep(_PAUSE_S)
            if tests % _LOOK_EVERY == 0 or tests > _YIELD_TESTS:
                if self.failed():
                    raise self.failure()
                if self.watch is not None and watched is not None:
                    gone = watched if missing is None else [watched[rank] for rank in missing()]
                    self.watch.check_gone(gone, self.activity.where())
                if time.monotonic() - start_s > timeout_s:
                    late = [] if missing is None else missing()
                    raise self.late(
                        what, late, timeout_s, [watched[rank] for rank in late] if watched else ()
                    )


def names_of(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 3, 5"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
