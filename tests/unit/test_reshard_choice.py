"""How buckets are written: into the caches where that is nearly as fast, past them where it takes far longer."""

from __future__ import annotations

import pytest

from lowshard.transfer import write_choice
from lowshard.transfer.write_choice import WriteChoice


class Clock:
    """A processor whose writes take what the way they go costs."""

    def __init__(self, cached_ns: int, past_ns: int) -> None:
        self.now, self.costs = 0, {False: cached_ns, True: past_ns}

    def thread_time_ns(self) -> int:
        return self.now


def ways(clock: Clock, made: WriteChoice, count: int, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    monkeypatch.setattr(write_choice.time, "thread_time_ns", clock.thread_time_ns)
    found = []
    for _ in range(count):
        past = made.begin(True)
        clock.now += clock.costs[past]
        made.end(1000)
        found.append(past)
    return found


@pytest.mark.parametrize(
    ("cached_ns", "past_ns", "past"), [(10, 11, False), (100, 70, False), (100, 10, True)]
)
def test_past_the_caches_where_writing_takes_far_less(
    cached_ns: int, past_ns: int, past: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = ways(Clock(cached_ns, past_ns), WriteChoice(), 96, monkeypatch)
    assert seen[:4] == [True] * 4  # a trial
    assert seen[5:] == [past] * 91


def test_it_is_found_out_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, made = Clock(100, 10), WriteChoice()
    assert ways(clock, made, 96, monkeypatch)[-1]
    clock.costs[False] = 9  # the cores share a cache now
    seen = ways(clock, made, 3 * 96, monkeypatch)
    assert seen[:4] == [False] * 4
    assert not seen[-1]


def test_it_changes_between_trials_where_the_way_that_is_taken_gets_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, made = Clock(10, 11), WriteChoice()
    assert not ways(clock, made, 20, monkeypatch)[-1]
    clock.costs[False] = 100
    assert ways(clock, made, 10, monkeypatch)[-1]


def test_the_first_time_a_bucket_is_written_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, made = Clock(9, 10), WriteChoice()
    monkeypatch.setattr(write_choice.time, "thread_time_ns", clock.thread_time_ns)
    for _ in range(20):
        assert not made.begin(False)
        clock.now += 10_000
        made.end(1000)
    assert ways(clock, made, 50, monkeypatch)[5:] == [False] * 45
