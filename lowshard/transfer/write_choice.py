"""Whether buckets are better written past the caches or into them: found out while they are written.

Writing lines that another core has read takes ten times as long where the two share no cache (1.9 GB/s beside 20 on an
EPYC, between whose kinds of cores virtual ones wander), and past the caches as long everywhere (18 GB/s); but what lies
in a shared cache is read from there at once. Each rank chooses for itself: the bytes are the same.
"""

from __future__ import annotations

import time

_TRIAL, _EVERY = 4, 96
"""Buckets of a trial of the other way; the next trial comes so many buckets on."""
_NEW = 0.3
"""What the latest bucket counts for in the cost of a way: one alone says little."""
TRIAL_BYTES = 256 << 10
"""Smaller buckets say little of writing."""
_WORTH = 0.6
"""Past the caches where writing takes so much less: reading takes more then."""


class WriteChoice:
    """One rank's choice for the buckets of a stream."""

    def __init__(self) -> None:
        self._count = -1
        self._cost = [0.0, 0.0]  # ns a byte, into the caches and past them
        self._past = self._way = self._counts = False
        self._began_ns = 0

    def begin(self, counts: bool) -> bool:
        """Return whether the next bucket goes past the caches, and take the time.

        Args:
            counts: it is large enough, and was written before, so that nothing else is done by the way.
        """
        self._count += counts
        self._counts = counts
        self._way = self._past != (counts and self._count % _EVERY < _TRIAL)
        self._began_ns = time.thread_time_ns()  # not what others do on this core meanwhile
        return self._way

    def end(self, size_bytes: int) -> None:
        """Note that the bucket is written."""
        if not self._counts:
            return
        cost = (time.thread_time_ns() - self._began_ns) / size_bytes
        known = self._cost[self._way] or cost
        self._cost[self._way] = known + _NEW * (cost - known)
        if self._count % _EVERY >= _TRIAL and all(self._cost):
            self._past = self._cost[1] < _WORTH * self._cost[0]
