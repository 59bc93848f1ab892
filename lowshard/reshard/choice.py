"""Whether buckets are better written past the caches or into them: found out while they are written.

Writing lines that another core has read takes ten times as long where the two share no cache (1.9 GB/s beside 20 on an
EPYC, between whose kinds of cores virtual ones wander), and past the caches as long everywhere (18 GB/s); but what lies
in a shared cache is read from there at once. Each rank chooses for itself: the bytes are the same.
"""

from __future__ import annotations

import time

_TRIAL, _EVERY = 4, 128
"""Buckets of a trial, two either way of which the first is not believed; the next trial comes so many buckets on."""
TRIAL_BYTES = 256 << 10
"""Smaller buckets say little of writing."""
_WORTH = 0.6
"""Past the caches where writing takes so much less: reading takes more then."""


class WriteChoice:
    """One rank's choice for the buckets of a stream."""

    def __init__(self) -> None:
        self._count = -1
        self._believed = 0
        self._cost = [0.0, 0.0]  # ns a byte, into the caches and past them
        self._past = False
        self._began_ns = 0

    def begin(self, is_ready: bool) -> bool:
        """Return whether the next bucket goes past the caches, and take the time.

        Args:
            is_ready: it is large enough, and was written before, so that nothing else is done by the way.
        """
        self._count += is_ready
        place = self._count % _EVERY if is_ready else _TRIAL
        self._believed = place if place < _TRIAL and place % 2 else 0
        self._began_ns = time.thread_time_ns()  # not what others do on this core meanwhile
        return place >= _TRIAL // 2 if place < _TRIAL else self._past

    def end(self, size_bytes: int) -> None:
        """Note that the bucket is written."""
        if self._believed:
            took_ns = time.thread_time_ns() - self._began_ns
            self._cost[self._believed >= _TRIAL // 2] = took_ns / max(size_bytes, 1)
            self._past = self._cost[1] < _WORTH * self._cost[0]
