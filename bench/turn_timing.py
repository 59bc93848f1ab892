"""Timing beside a yardstick: every case takes turns with a copy of as many bytes, round after round.

A case is some work and a copy whose traffic equals the work's. In each round every case runs once and its copy
right after it, so that whatever slows the machine for a while slows both. The ratio of a round is the time of the
work over the time of the copy, both a byte; the ratio of a case is the median of its rounds' ratios. First
calls, which compile and touch fresh memory, are timed apart and never count.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

Work = Callable[[], object]


class Clock(Protocol):
    """Times work where it runs: on this process, on a GPU's stream, or over all ranks."""

    def work_s(self, run: Work) -> float:
        """Run the work and return the seconds it took, without what starting it cost elsewhere."""

    def call_s(self, run: Work) -> float:
        """Run the work to its end and return the seconds the caller waited."""


class HostClock:
    """Work that is done when its call returns."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now

    def work_s(self, run: Work) -> float:
        """Run the work and return its seconds."""
        start = self._now()
        run()
        return self._now() - start

    def call_s(self, run: Work) -> float:
        """Run the work and return its seconds."""
        return self.work_s(run)


@dataclass(frozen=True)
class Copy:
    """The yardstick of a case: a copy, which reads each of its bytes once and writes it once."""

    run: Work
    copied_bytes: int

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written."""
        return 2 * self.copied_bytes


@dataclass(frozen=True)
class Case:
    """Work to time."""

    name: str
    run: Work
    moved_bytes: int
    copy: Copy
    note: str = ""
    ratio_limit: float | None = None
    prepare: Work | None = None


@dataclass(frozen=True)
class Pair:
    """Two cases of one measurement, to say how many times faster one is than the other, a byte."""

    fast: str
    slow: str
    least: float | None = None


@dataclass(frozen=True)
class Workload:
    """Cases that are measured together."""

    title: str
    sizes: tuple[tuple[str, int], ...]
    cases: tuple[Case, ...]
    pairs: tuple[Pair, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spread:
    """A figure over the rounds: smallest, lower quartile, median, upper quartile, largest."""

    least: float
    low: float
    median: float
    high: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one value a round; quartiles are interpolated linearly."""
        return cls(*(float(q) for q in np.quantile(values, (0.0, 0.25, 0.5, 0.75, 1.0))))


@dataclass(frozen=True)
class Row:
    """What came out for one case."""

    name: str
    note: str
    moved_bytes: int
    copied_bytes: int
    ratio_limit: float | None
    first_call_s: float
    work_s: tuple[float, ...]
    copy_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Median time of the work."""
        return float(np.median(self.work_s))

    @property
    def gb_per_s(self) -> float:
        """Bytes moved over the median time, in 10^9 bytes a second."""
        return self.moved_bytes / self.median_s / 1e9

    @property
    def copy_gb_per_s(self) -> float:
        """The same of the yardstick, which moves each byte twice."""
        return 2 * self.copied_bytes / float(np.median(self.copy_s)) / 1e9

    @property
    def ratios(self) -> tuple[float, ...]:
        """The ratio of each round: time of the work over time of the copy, both a byte moved."""
        per_byte = 2 * self.copied_bytes / self.moved_bytes
        return tuple(work / copy * per_byte for work, copy in zip(self.work_s, self.copy_s, strict=True))

    @cached_property
    def ratio(self) -> Spread:
        """The ratio over the rounds; its median is the figure."""
        return Spread.of(self.ratios)

    @property
    def ok(self) -> bool | None:
        """Whether the ratio keeps its limit; None without a limit."""
        return None if self.ratio_limit is None else self.ratio.median <= self.ratio_limit


@dataclass(frozen=True)
class SpeedUp:
    """How many times faster one case was than another, a byte, in each round."""

    fast: str
    slow: str
    least: float | None
    times: tuple[float, ...]

    @cached_property
    def spread(self) -> Spread:
        """The speed-up over the rounds; its median is the figure."""
        return Spread.of(self.times)

    @property
    def ok(self) -> bool | None:
        """Whether it is as much as it has to be; None without a promise."""
        return None if self.least is None else self.spread.median >= self.least


def measure(
    cases: Sequence[Case],
    rounds: int,
    clock: Clock,
    step: Callable[[str], object] = lambda what: None,
) -> tuple[Row, ...]:
    """Return a row for each case, measured in interleaved rounds."""
    first_s = []
    for case in cases:
        step(f"first call: {case.name}")
        if case.prepare is not None:
            case.prepare()
        first_s.append(clock.call_s(case.run))
    work_s: list[list[float]] = [[] for _ in cases]
    copy_s: list[list[float]] = [[] for _ in cases]
    with no_collection():
        for index in range(rounds + 1):
            step(f"round {index} of {rounds}" if index else "warming up")
            for place, case in enumerate(cases):
                work, copy = clock.work_s(case.run), clock.work_s(case.copy.run)
                if index:
                    work_s[place].append(work)
                    copy_s[place].append(copy)
    return tuple(
        Row(
            case.name,
            case.note,
            case.moved_bytes,
            case.copy.copied_bytes,
            case.ratio_limit,
            first,
            tuple(work),
            tuple(copy),
        )
        for case, first, work, copy in zip(cases, first_s, work_s, copy_s, strict=True)
    )


def speed_ups(rows: Sequence[Row], pairs: Sequence[Pair]) -> tuple[SpeedUp, ...]:
    """Return the speed-up of each pair whose two cases were measured, round by round."""
    named = {row.name: row for row in rows}
    found = []
    for pair in pairs:
        if pair.fast not in named or pair.slow not in named:
            continue
        fast, slow = named[pair.fast], named[pair.slow]
        per_byte = fast.moved_bytes / slow.moved_bytes
        times = tuple(s / f * per_byte for s, f in zip(slow.work_s, fast.work_s, strict=True))
        found.append(SpeedUp(pair.fast, pair.slow, pair.least, times))
    return tuple(found)


@contextmanager
def no_collection(first: bool = True) -> Iterator[None]:
    """Keep the garbage collector off inside, and leave it as it was; collect once before if `first`."""
    was_on = gc.isenabled()
    if first:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
