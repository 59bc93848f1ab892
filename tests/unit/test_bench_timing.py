"""Timing beside a yardstick: order of the rounds, arithmetic on a clock of our own, first calls, GPU clock logic."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lowshard.bench.bench_device import CudaClock, HostDevice, Yardstick, require_memory
from lowshard.bench.turn_timing import Case, Copy, HostClock, Pair, Spread, measure, speed_ups
from lowshard.errors import BufferMismatchError


class Scene:
    """Work that takes the seconds it is told, on a clock that only moves with it; and a log of what ran."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.log: list[str] = []

    def clock(self) -> HostClock:
        return HostClock(lambda: self.now_s)

    def work(self, name: str, *seconds: float) -> Callable[[], None]:
        left = list(seconds)

        def run() -> None:
            self.log.append(name)
            self.now_s += left.pop(0) if len(left) > 1 else left[0]

        return run

    def case(self, name: str, work_s: tuple[float, ...], copy_s: tuple[float, ...], **more: Any) -> Case:
        # Work runs twice before the rounds that count, its copy once.
        work = self.work(name, 64.0, 32.0, *work_s)
        copy = Copy(self.work(f"copy of {name}", 16.0, *copy_s), more.pop("copied_bytes", 500))
        return Case(name, work, more.pop("moved_bytes", 1000), copy, **more)


def test_each_round_runs_every_case_and_its_copy_right_after_it() -> None:
    scene = Scene()
    steps: list[str] = []
    cases = [scene.case("a", (1.0,), (1.0,)), scene.case("b", (1.0,), (1.0,))]
    measure(cases, 2, scene.clock(), steps.append)
    a_round = ["a", "copy of a", "b", "copy of b"]
    assert scene.log == [
        "a",
        "b",
        *a_round,
        *a_round,
        *a_round,
    ]  # first calls, one warm round, two that count
    assert steps == ["first call: a", "first call: b", "warming up", "round 1 of 2", "round 2 of 2"]


def test_the_ratio_is_the_median_of_the_rounds_ratios() -> None:
    scene = Scene()
    (row,) = measure([scene.case("a", (2.0, 8.0, 3.0), (1.0, 2.0, 1.0))], 3, scene.clock())
    assert row.work_s == (2.0, 8.0, 3.0)
    assert row.copy_s == (1.0, 2.0, 1.0)
    assert row.ratios == (2.0, 4.0, 3.0)
    assert row.ratio == Spread(least=2.0, low=2.5, median=3.0, high=3.5, most=4.0)
    assert row.median_s == 3.0
    assert row.gb_per_s == pytest.approx(1000 / 3.0 / 1e9)
    assert row.copy_gb_per_s == pytest.approx(2 * 500 / 1.0 / 1e9)


def test_what_a_case_reads_is_filled_untimed_before_its_first_call() -> None:
    scene = Scene()
    case = scene.case("a", (1.0,), (1.0,), prepare=scene.work("prepare a", 128.0))
    (row,) = measure([case], 1, scene.clock())
    assert scene.log[:2] == ["prepare a", "a"]
    assert scene.log.count("prepare a") == 1
    assert row.first_call_s == 64.0


def test_with_unequal_traffic_the_ratio_is_that_of_the_times_a_byte() -> None:
    scene = Scene()
    (row,) = measure([scene.case("a", (3.0,), (4.0,), moved_bytes=100, copied_bytes=800)], 1, scene.clock())
    assert row.ratio.median == 3.0 / 100 / (4.0 / 1600)


@pytest.mark.parametrize(("limit", "ok"), [(None, None), (2.0, True), (1.99, False)])
def test_a_row_keeps_its_limit_up_to_the_limit_itself(limit: float | None, ok: bool | None) -> None:
    scene = Scene()
    (row,) = measure([scene.case("a", (2.0,), (1.0,), ratio_limit=limit)], 1, scene.clock())
    assert row.ok is ok


def test_a_speed_up_is_worked_out_round_by_round_and_a_byte() -> None:
    scene = Scene()
    rows = measure(
        [
            scene.case("ours", (1.0, 2.0, 1.0), (1.0,)),
            scene.case("theirs", (3.0, 4.0, 5.0), (1.0,), moved_bytes=500),
        ],
        3,
        scene.clock(),
    )
    pairs = [Pair("ours", "theirs", least=6.0), Pair("ours", "absent")]
    (found,) = speed_ups(rows, pairs)
    assert found.times == (6.0, 4.0, 10.0)  # on half the bytes
    assert found.spread.median == 6.0
    assert found.ok is True
    assert speed_ups(rows, [Pair("ours", "theirs", least=6.1)])[0].ok is False
    assert speed_ups(rows, [Pair("ours", "theirs")])[0].ok is None


def test_no_garbage_is_collected_during_rounds_and_it_is_again_after_an_error() -> None:
    seen: list[bool] = []

    def work() -> None:
        seen.append(gc.isenabled())
        if len(seen) == 3:
            raise RuntimeError("the work broke")

    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="the work broke"):
        measure([Case("a", work, 2, Copy(lambda: None, 1))], 5, HostClock())
    assert seen == [True, False, False]
    assert gc.isenabled()


def test_a_yardstick_copies_half_the_traffic_and_rounds_up() -> None:
    yardstick = Yardstick(HostDevice(), 100)
    assert yardstick.copy(161).copied_bytes == 81
    assert yardstick.copy(161).moved_bytes == 162
    assert yardstick.copy(200, times=4).copied_bytes == 100
    with pytest.raises(BufferMismatchError, match="at most 100 bytes here, got 101"):
        yardstick.copy(202)


def test_too_little_memory_is_an_error_before_anything_is_allocated() -> None:
    host = HostDevice()
    free = host.free_bytes()
    assert free is not None
    assert free > 0
    require_memory(host, 1)
    with pytest.raises(BufferMismatchError, match=r"take 1000000\.0 GB, .* pass a smaller --size"):
        require_memory(host, 10**15)


class StandInEvent:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record(self) -> None:
        self.log.append("record")

    def synchronize(self) -> None:
        self.log.append("synchronize")


class StandInCuPy:
    """The few names of CuPy that the GPU clock uses; it says that each piece of work took 5 ms."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.held_s: list[float] = []
        self.cuda = self

    def RawKernel(self, source: str, name: str) -> Callable[..., None]:
        assert f"void {name}(" in source

        def hold(grid: tuple[int], block: tuple[int], args: tuple[np.uint64]) -> None:
            self.held_s.append(int(args[0]) / 1e9)
            self.log.append("hold")

        return hold

    def Event(self) -> StandInEvent:
        return StandInEvent(self.log)

    def get_elapsed_time(self, start: StandInEvent, stop: StandInEvent) -> float:
        return 5.0


def test_the_gpu_clock_queues_work_between_events_behind_a_waiting_kernel() -> None:
    cupy = StandInCuPy()
    assert CudaClock(cupy).work_s(lambda: cupy.log.append("work")) == 5e-3
    assert cupy.log[-5:] == ["hold", "record", "work", "record", "synchronize"]


def test_the_gpu_clock_measures_again_when_the_host_was_slower_than_the_wait() -> None:
    cupy = StandInCuPy()
    clock = CudaClock(cupy)
    clock.work_s(lambda: time.sleep(0.01))
    assert cupy.log.count("hold") >= 2
    assert cupy.held_s[0] < 0.01 < cupy.held_s[-1]
    times = cupy.log.count("hold")
    clock.work_s(lambda: time.sleep(1.0))  # longer than any wait: it gives up, and does not go on for ever
    assert cupy.log.count("hold") <= times + 3
