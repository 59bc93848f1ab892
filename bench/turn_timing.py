"""Timing in turns: in each round every work runs once, so that whatever slows the machine for a while slows them all.

A round of a work is a batch of calls, one where nothing else is said. On ranks it begins on all of them together; the
time is that of the slowest rank (or as nccl-tests' `-a` says), or the span from the first begin to the last end. It is
clean if the ranks together got most of the CPU time of the cores that they can fill: they wait by spinning, so anything
less went to another program. Clean rounds alone count; where there are hardly any the figure is an upper bound.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np

Work = Callable[[], object]
Combine = Literal["span", 0, 1, 2, 3]
"""The time of a batch: the span over all ranks, or rank 0's, the average, the fastest or the slowest rank's."""

CLEAN_SHARE = 0.9
"""Part of the CPU time they can fill that the ranks must have got in a clean round."""
CLEAN_ROUNDS = 3
"""With fewer of them all rounds count."""

_BATCH_S = 2e-3
_MOST_CALLS = 2000
_ESTIMATES = 3
_MANY_CALLS, _DOUBT_S = 8, 0.05
_MOST_ROUNDS = 3  # times those asked for
_PATIENCE_S = 4.0  # after which no round is added for the sake of clean ones


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Runner:
    """What is timed, and what is done around each batch of it without being timed."""

    run: Work
    finish: Work = _nothing
    """Waits for what was called; timed."""
    before: Work = _nothing
    after: Work = _nothing


@dataclass(frozen=True)
class Timing:
    """Seconds of a call of one work in each round."""

    seconds: tuple[float, ...]
    shares: tuple[float, ...] = ()
    """Part of the CPU time that the ranks got in each round; empty where that was not watched."""
    calls: int = 1
    clean_share: float = CLEAN_SHARE

    @property
    def clean(self) -> tuple[bool, ...]:
        """Whether each round was clean; all are where that is not known."""
        return tuple(share >= self.clean_share for share in self.shares) or (True,) * len(self.seconds)

    @property
    def is_bound(self) -> bool:
        """Whether hardly a round was clean, so that the figures are upper bounds."""
        return sum(self.clean) < min(CLEAN_ROUNDS, len(self.seconds))

    @cached_property
    def counted(self) -> tuple[float, ...]:
        """The times that count: those of clean rounds, or all where there are hardly any."""
        if self.is_bound:
            return self.seconds
        return tuple(s for s, clean in zip(self.seconds, self.clean, strict=True) if clean)

    @property
    def median_s(self) -> float:
        """The figure: the median of what counts."""
        return float(np.median(self.counted))

    @property
    def cv(self) -> float:
        """Standard deviation over mean of what counts."""
        return float(np.std(self.counted) / np.mean(self.counted))

    @property
    def p99_s(self) -> float:
        """The time that 99% of the rounds that count keep to."""
        return float(np.quantile(self.counted, 0.99))

    def over(self, other: Timing, scale: float = 1.0) -> tuple[float, ...]:
        """Return each round's time over the other's, times `scale`; of rounds that were clean for both, if enough."""
        rounds = list(zip(self.seconds, other.seconds, self.clean, other.clean, strict=True))
        kept = [mine / theirs * scale for mine, theirs, a, b in rounds if a and b]
        if len(kept) >= min(CLEAN_ROUNDS, len(rounds)):
            return tuple(kept)
        return tuple(mine / theirs * scale for mine, theirs, _, _ in rounds)


class HostComm(Protocol):
    """Ranks that wait for each other and swap facts apart from the communicator that is measured."""

    rank: int
    size: int

    def barrier(self) -> None:
        """Return once every rank has called it."""

    def exchange(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. Collective: all ranks call this."""


class ProcessClock:
    """Base of clocks of one process, without batches."""

    def work_s(self, run: Work) -> float:
        """Run the work and return the seconds it took, without what starting it cost elsewhere."""
        raise NotImplementedError

    def call_s(self, run: Work) -> float:
        """Run the work to its end and return the seconds the caller waited."""
        return self.work_s(run)

    def calls_of(self, runner: Runner) -> int:
        """Return 1."""
        return 1

    def batch(self, runner: Runner, calls: int) -> float:
        """Run the work once."""
        runner.before()
        seconds = self.work_s(runner.run)
        runner.after()
        return seconds

    def timings(self, samples: Sequence[Sequence[float]], calls: Sequence[int]) -> list[Timing]:
        """Return the seconds as they are."""
        return [Timing(tuple(row)) for row in samples]

    def wants_more(self, timings: Sequence[Timing], rounds: int, spent_s: float) -> bool:
        """Say no."""
        return False


class HostClock(ProcessClock):
    """Work that is done when its call returns."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now

    def work_s(self, run: Work) -> float:
        """Run the work and return its seconds."""
        start = self._now()
        run()
        return self._now() - start


class ToldClock(ProcessClock):
    """Work that returns the seconds it took, as another process or another clock has measured them."""

    def work_s(self, run: Work) -> float:
        """Run the work and return what it says."""
        return float(run())  # type: ignore[arg-type]


class RankClock:
    """Batches that all ranks begin together; every method is collective."""

    def __init__(
        self,
        host: HostComm,
        combine: Combine = "span",
        *,
        calls: int = 1,
        cores: int | None = None,
        cpu_s: Callable[[], float] = time.process_time,
        clean_share: float = CLEAN_SHARE,
        add_rounds: bool = False,
    ) -> None:
        """Set what counts; `calls` of 0 are as many as last two milliseconds, `cores` those that the ranks can fill."""
        from lowshard.comm.interface import boot_id

        self._host, self._combine, self._calls, self._cores = host, combine, calls, cores
        self._cpu_s, self._clean_share, self._adds = cpu_s, clean_share, add_rounds
        self._boots = host.exchange(boot_id())  # clocks of one host are alike

    def calls_of(self, runner: Runner) -> int:
        """Return the calls of a batch; where they were left open, as many as last about as long as it should."""
        if self._calls:
            return self._calls
        # Another program may run just now: a few calls that took long are not believed before some time is over.
        calls, begin_s = 1, time.perf_counter()
        while True:
            tries = [self.batch(runner, calls) for _ in range(_ESTIMATES)]
            took = min(end - begin for begin, end, _ in tries)
            told = self._host.exchange((took, time.perf_counter() - begin_s))  # the same on all ranks
            more = int(min(_MOST_CALLS, calls * _BATCH_S / max(1e-7, *(one for one, _ in told))))
            if more >= 2 * calls:
                calls = more
            elif calls >= _MANY_CALLS or told[0][1] > _DOUBT_S:
                return calls

    def batch(self, runner: Runner, calls: int) -> tuple[float, float, float]:
        """Run one batch; return this rank's begin and end, and its seconds on the CPU."""
        run = runner.run
        runner.before()
        self._host.barrier()
        spent_s, begin_s = self._cpu_s(), time.perf_counter()
        for _ in range(calls):
            run()
        runner.finish()
        end_s = time.perf_counter()
        spent_s = self._cpu_s() - spent_s
        runner.after()
        return begin_s, end_s, spent_s

    def timings(self, samples: Sequence[Sequence[Any]], calls: Sequence[int]) -> list[Timing]:
        """Return what all ranks' samples come to."""
        table = np.array(self._host.exchange([list(row) for row in samples]))  # [ranks, runners, rounds, 3]
        found = []
        for index, count in enumerate(calls):
            begins, ends, spent = np.moveaxis(table[:, index], 2, 0)
            walls = combined(begins, ends, self._combine, self._boots)
            shares: tuple[float, ...] = ()
            if self._cores is not None:
                longest = walls if self._combine == "span" else (ends - begins).max(axis=0)
                shares = tuple((spent.sum(axis=0) / (longest * self._cores)).tolist())
            found.append(Timing(tuple((walls / count).tolist()), shares, count, self._clean_share))
        return found

    def wants_more(self, timings: Sequence[Timing], rounds: int, spent_s: float) -> bool:
        """Say whether too few rounds were clean, and there is time for more."""
        done = len(timings[0].seconds)
        few = self._adds and any(2 * sum(timing.clean) < rounds for timing in timings)
        wants = few and spent_s <= _PATIENCE_S and done < _MOST_ROUNDS * rounds
        return bool(self._host.exchange(wants)[0])


def combined(
    begins: np.ndarray[Any, Any], ends: np.ndarray[Any, Any], how: Combine, boots: Sequence[str]
) -> np.ndarray[Any, Any]:
    """Return the seconds [rounds] that count of begins and ends [ranks, rounds]; a span is the longest of any host."""
    if how != "span":
        spans = ends - begins
        return np.asarray((spans[0], spans.mean(axis=0), spans.min(axis=0), spans.max(axis=0))[how])
    hosts = [[rank for rank, boot in enumerate(boots) if boot == one] for one in dict.fromkeys(boots)]
    return np.asarray(np.max([ends[at].max(axis=0) - begins[at].min(axis=0) for at in hosts], axis=0))


def take_turns(
    runners: Sequence[Runner],
    rounds: int,
    clock: ProcessClock | RankClock,
    *,
    warm: int = 0,
    order: Callable[[int], Sequence[int]] | None = None,
    say: Callable[[str], object] = lambda what: None,
) -> list[Timing]:
    """Return the timing of each runner over rounds in which all take turns; `warm` rounds before do not count.

    `order` gives the runners of a round in another order than theirs. With clocks of ranks collective.
    """
    calls = [clock.calls_of(runner) for runner in runners]
    samples: list[list[Any]] = [[] for _ in runners]
    start_s = time.perf_counter()
    while True:
        done = len(samples[0])
        with _no_collection():  # collecting takes longer than most measurements here
            for turn in range(0 if done else -warm, rounds):
                say("warming up" if turn < 0 else f"round {done + turn + 1} of {done + rounds}")
                for index in range(len(runners)) if order is None else order(turn):
                    sample = clock.batch(runners[index], calls[index])
                    if turn >= 0:
                        samples[index].append(sample)
        timings = clock.timings(samples, calls)
        if not clock.wants_more(timings, rounds, time.perf_counter() - start_s):
            return timings


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector off inside, and leave it as it was."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
