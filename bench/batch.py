"""Timing what all ranks do together: batches of calls that take turns, whose time a batch is, and clean batches.

In each round every runner runs one batch of back-to-back calls, all ranks beginning together, so that whatever slows
the machine for a while slows them all. A batch takes as long as its slowest rank (or as `-a` says). It is clean if
the ranks together got 90% of the CPU time of the cores that they can fill: they wait by spinning, so anything less
went to somebody else. Clean batches alone count; where there is none the figure is an upper bound, and says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lowshard.bench.bench_meeting import Meeting
from lowshard.bench.turn_timing import no_collection

Work = Callable[[], object]

CLEAN_SHARE = 0.9
"""Part of the CPU time they can fill that the ranks must have got in a clean batch."""

BATCH_S = 2e-3
_MOST_CALLS = 2000
_ESTIMATES = 3
_MANY_CALLS, _DOUBT_S = 8, 0.05
_MOST_ROUNDS = 3  # times those asked for
_PATIENCE_S = 4.0  # after which no round is added for the sake of clean ones


@dataclass(frozen=True)
class Runner:
    """What is timed."""

    run: Work
    finish: Work = lambda: None


@dataclass(frozen=True)
class Timing:
    """Times of one runner over the rounds."""

    seconds: tuple[float, ...]
    shares: tuple[float, ...] = ()
    calls: int = 1

    @property
    def clean(self) -> tuple[bool, ...]:
        """Whether each round was clean; all are where that is not known."""
        return tuple(share >= CLEAN_SHARE for share in self.shares) or (True,) * len(self.seconds)

    @property
    def is_bound(self) -> bool:
        """Whether no round was clean, so that the figures are upper bounds."""
        return not any(self.clean)

    @cached_property
    def counted(self) -> tuple[float, ...]:
        """The times that count: those of clean rounds, or all where there is none."""
        kept = tuple(s for s, clean in zip(self.seconds, self.clean, strict=True) if clean)
        return kept or self.seconds

    @property
    def median_s(self) -> float:
        """The figure: the median of what counts."""
        return float(np.median(self.counted))

    @property
    def least_s(self) -> float:
        """The shortest time that counts."""
        return min(self.counted)

    @property
    def most_s(self) -> float:
        """The longest time that counts."""
        return max(self.counted)

    @property
    def p99_s(self) -> float:
        """The time that 99% of the rounds that count keep to."""
        return float(np.quantile(self.counted, 0.99))

    @property
    def cv(self) -> float:
        """Standard deviation over mean of what counts."""
        return float(np.std(self.counted) / np.mean(self.counted))

    def over(self, other: Timing) -> float:
        """Return the median over the rounds of this time over the other's, both clean; over all where none is."""
        rounds = list(zip(self.seconds, other.seconds, self.clean, other.clean, strict=True))
        kept = [mine / theirs for mine, theirs, a, b in rounds if a and b]
        return float(np.median(kept or [mine / theirs for mine, theirs, _, _ in rounds]))


def measure(
    meeting: Meeting,
    runners: Sequence[Runner],
    rounds: int,
    *,
    average: int = 3,
    calls: int = 0,
    cores: int | None = None,
    cpu_s: Callable[[], float] = time.process_time,
    say: Callable[[str], object] = lambda what: None,
) -> list[Timing]:
    """Return the timing of each runner over rounds in which all take turns. Collective."""
    batch_calls = [calls or _calls(meeting, runner) for runner in runners]
    walls: list[list[list[float]]] = [[] for _ in runners]
    shares: list[list[float]] = [[] for _ in runners]
    start_s, done = time.perf_counter(), 0
    while True:
        with no_collection(first=False):  # collecting takes longer than most measurements here
            own = []
            for turn in range(rounds):
                say(f"round {done + turn + 1}")
                pairs = zip(runners, batch_calls, strict=True)
                own.append([_batch(meeting, runner, calls, cpu_s) for runner, calls in pairs])
        table = np.array(meeting.exchange(own))  # [ranks, rounds, runners, 2]
        done += rounds
        for index, spent in enumerate(np.moveaxis(table, 2, 0)):
            walls[index] += spent[:, :, 0].T.tolist()
            if cores is not None:
                shares[index] += (spent[:, :, 1].sum(axis=0) / (spent[:, :, 0].max(axis=0) * cores)).tolist()
        few = any(2 * sum(share >= CLEAN_SHARE for share in row) < rounds for row in shares if row)
        late = time.perf_counter() - start_s > _PATIENCE_S
        if not meeting.exchange(few and not late and done < _MOST_ROUNDS * rounds)[0]:
            break
    return [
        Timing(tuple(combined(wall, average) / n for wall in wall_rows), tuple(row), n)
        for wall_rows, row, n in zip(walls, shares, batch_calls, strict=True)
    ]


def _batch(meeting: Meeting, runner: Runner, calls: int, cpu_s: Callable[[], float]) -> tuple[float, float]:
    """Run one batch and return this rank's seconds on the clock and on the CPU."""
    run = runner.run
    meeting.barrier()
    spent_s, begin_s = cpu_s(), time.perf_counter()
    for _ in range(calls):
        run()
    runner.finish()
    return time.perf_counter() - begin_s, cpu_s() - spent_s


def _calls(meeting: Meeting, runner: Runner) -> int:
    """Return how many calls last about as long as a batch should."""
    # Another program may run just now: a few calls that took long are not believed before some time is over.
    calls, begin_s = 1, time.perf_counter()
    while True:
        took = min(_batch(meeting, runner, calls, time.process_time)[0] for _ in range(_ESTIMATES))
        told = meeting.exchange((took, time.perf_counter() - begin_s))  # the same on all ranks
        more = int(min(_MOST_CALLS, calls * BATCH_S / max(1e-7, *(one for one, _ in told))))
        if more >= 2 * calls:
            calls = more
        elif calls >= _MANY_CALLS or told[0][1] > _DOUBT_S:
            return calls


def combined(times: Sequence[float], average: int) -> float:
    """Return the time that counts of those of all ranks: rank 0's, the average, the fastest's, the slowest's."""
    if average == 0:
        return times[0]
    return float((np.mean, np.min, np.max)[average - 1](times))
