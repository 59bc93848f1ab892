"""Timing over ranks: whose time counts, which rounds are clean, ratios of rounds, more rounds on a busy machine."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from lowshard.bench.batch import Runner, Timing, combined, measure
from lowshard.bench.bench_meeting import ThreadBoard, ThreadMeeting, fillable
from lowshard.errors import PeerFailed


def on_threads(size: int, work: Callable[[ThreadMeeting], Any]) -> list[Any]:
    board = ThreadBoard(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        meeting = ThreadMeeting(board, rank)
        try:
            results[rank] = work(meeting)
        except BaseException as error:
            results[rank] = error
            meeting.leave()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


class Clock:
    """CPU time that a rank says it got: a share of the wall time since it was last asked."""

    def __init__(self, share: float) -> None:
        self.share, self.total, self.last = share, 0.0, time.perf_counter()

    def __call__(self) -> float:
        now = time.perf_counter()
        self.total += self.share * (now - self.last)
        self.last = now
        return self.total


def test_clean_rounds_alone_count_and_without_one_the_figure_is_a_bound() -> None:
    timing = Timing((1.0, 9.0, 2.0, 3.0), (0.95, 0.5, 0.9, 1.0))
    assert timing.clean == (True, False, True, True)
    assert timing.counted == (1.0, 2.0, 3.0)
    assert (timing.median_s, timing.least_s, timing.most_s, timing.is_bound) == (2.0, 1.0, 3.0, False)
    assert timing.cv == pytest.approx((2 / 3) ** 0.5 / 2)
    busy = Timing((1.0, 9.0), (0.5, 0.5))
    assert (busy.is_bound, busy.counted, busy.median_s) == (True, (1.0, 9.0), 5.0)
    assert Timing((4.0, 6.0)).clean == (True, True)  # nobody watched


def test_a_ratio_is_of_rounds_in_which_both_were_clean() -> None:
    mine = Timing((2.0, 8.0, 90.0, 6.0), (1.0, 1.0, 0.1, 1.0))
    theirs = Timing((1.0, 2.0, 1.0, 60.0), (1.0, 1.0, 1.0, 0.2))
    assert mine.over(theirs) == 3.0  # the median of 2 and 4
    assert mine.over(Timing((1.0,) * 4, (0.0,) * 4)) == 7.0  # no such round: all of them


@pytest.mark.parametrize(("average", "expected"), [(0, 2.0), (1, 3.0), (2, 1.0), (3, 6.0)])
def test_the_time_that_counts_is_the_slowest_ranks_or_as_asked(average: int, expected: float) -> None:
    assert combined([2.0, 1.0, 6.0], average) == expected


def test_a_batchs_time_is_divided_by_its_calls_and_all_ranks_get_the_same_figures() -> None:
    def work(meeting: ThreadMeeting) -> list[Timing]:
        return measure(meeting, [Runner(lambda: time.sleep(0.01 * (1 + meeting.rank)))], 3, calls=2)

    both = on_threads(2, work)
    assert both[0] == both[1]
    (timing,) = both[0]
    assert timing.calls == 2
    assert len(timing.seconds) == 3
    assert 0.02 <= timing.least_s < 0.038  # two calls of the slower rank take 40 ms


def test_all_ranks_begin_a_batch_together_and_runners_take_turns() -> None:
    order: list[tuple[int, str, float]] = []

    def work(meeting: ThreadMeeting) -> None:
        def step(name: str) -> Callable[[], None]:
            def run() -> None:
                order.append((meeting.rank, name, time.perf_counter()))
                time.sleep(0.1 * meeting.rank)  # rank 1 is late from then on, if nobody waits for it

            return run

        measure(meeting, [Runner(step("a")), Runner(step("b"))], 3, calls=1)

    on_threads(2, work)
    for rank in (0, 1):
        assert "".join(name for r, name, _ in order if r == rank) == "ababab"
    starts = [[at for r, _, at in order if r == rank] for rank in (0, 1)]
    assert max(abs(a - b) for a, b in zip(*starts, strict=True)) < 0.08


def test_short_calls_are_timed_in_batches_and_long_ones_alone() -> None:
    counts = [0, 0]

    def quick() -> None:
        counts[0] += 1

    def slow() -> None:
        counts[1] += 1
        time.sleep(5e-3)

    def work(meeting: ThreadMeeting) -> list[Timing]:
        return measure(meeting, [Runner(quick), Runner(slow)], 2)

    timings = on_threads(1, work)[0]
    assert timings[0].calls > 50
    assert timings[1].calls == 1
    assert counts[0] >= 3 + 2 * timings[0].calls  # three to see how long a call takes
    assert 3 + 2 <= counts[1] <= 3 + 50 / 5 + 2  # for fifty milliseconds at most
    assert timings[0].median_s < 1e-4
    assert timings[1].median_s >= 5e-3


@pytest.mark.parametrize(("share", "clean"), [(2.0, True), (0.3, False)])
def test_rounds_are_added_up_to_three_times_while_others_use_the_machine(share: float, clean: bool) -> None:
    def work(meeting: ThreadMeeting) -> list[Timing]:
        runner = Runner(lambda: time.sleep(2e-3))
        return measure(meeting, [runner], 4, calls=1, cores=2, cpu_s=Clock(share))

    (timing,) = on_threads(2, work)[0]
    assert len(timing.seconds) == len(timing.shares) == (4 if clean else 12)
    assert timing.is_bound is not clean
    assert all((found >= 0.9) is clean for found in timing.shares)


def test_no_garbage_is_collected_meanwhile() -> None:
    seen: list[bool] = []
    on_threads(1, lambda m: measure(m, [Runner(lambda: seen.append(gc.isenabled()))], 2, calls=1))
    assert seen == [False, False]
    assert gc.isenabled()


def test_ranks_swap_values_in_rank_order_and_one_that_leaves_ends_the_others_waits() -> None:
    assert (
        on_threads(3, lambda m: [m.exchange(m.rank * 10), m.exchange(str(m.rank))])
        == [[[0, 10, 20], ["0", "1", "2"]]] * 3
    )

    def fail(meeting: ThreadMeeting) -> None:
        if meeting.rank == 1:
            raise ValueError("boom")
        meeting.barrier()

    ends = on_threads(2, fail)
    assert isinstance(ends[0], PeerFailed)
    assert isinstance(ends[1], ValueError)


def test_ranks_fill_no_more_cores_than_they_are_or_may_use() -> None:
    assert fillable([("a", [0, 1])] * 2) == 2
    assert fillable([("a", [0, 1])] * 4) == 2
    assert fillable([("a", range(16))] * 4) == 4
    assert fillable([("a", [0]), ("a", [1]), ("b", [0]), ("b", [0])]) == 3
