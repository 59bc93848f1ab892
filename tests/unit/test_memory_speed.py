"""What reads a model's memory once takes little longer than reading it: digests, and the search for what changed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import lowshard as ls
from lowshard.kernels.changes import ChangeBoxes, Room
from lowshard.reshard import digest

pytestmark = pytest.mark.full_only

SHAPE = (16384, 8192)
"""268 MB of 16-bit elements."""
TURNS, TRIES = 9, 6
Job = Callable[[], object]


@pytest.fixture(autouse=True)
def _one_core() -> Iterator[None]:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


def _read(array: np.ndarray) -> None:
    np.bitwise_or.reduce(array.view(np.uint64).reshape(-1))


def _times_as_long(job: Job, other: Job) -> float:
    """Return the ratio of the least seconds of this thread's processor that each takes, in turns."""
    least = [float("inf"), float("inf")]
    for _ in range(TURNS):
        for at, each in enumerate((job, other)):
            begun = time.thread_time()
            each()
            least[at] = min(least[at], time.thread_time() - begun)
    return least[0] / least[1]


def _require(made: Callable[[], tuple[Job, Job]], most: float) -> None:
    """Others use the memory too, and it may lie in small pages: the least of some tries counts, each with its own."""
    ratios: list[float] = []
    while not ratios or (min(ratios) > most and len(ratios) < TRIES):
        job, other = made()
        job()
        ratios.append(_times_as_long(job, other))
        del job, other
    print(f"{min(ratios):.2f} times")
    assert min(ratios) <= most


@pytest.mark.parametrize("dtype", ["uint16", "float32", "uint8"])
def test_a_digest_takes_little_longer_than_reading(dtype: str) -> None:
    def made() -> tuple[Job, Job]:
        array = np.full(2 * SHAPE[0] * SHAPE[1], 63, np.uint8).view(dtype)
        layout = ls.Layout(ls.DeviceMesh((1,), ("x",)), array.shape, dtype, (ls.Replicated(),))
        return lambda: digest({"w": (layout, array)}), lambda: _read(array)

    _require(made, 1.3)  # 1.0 to 1.2, by where the memory lies and what else uses it


@pytest.mark.parametrize("by_steps", [False, True])
def test_finding_one_per_cent_takes_at_most_1_3_times_reading_both(
    rng: np.random.Generator, by_steps: bool
) -> None:
    def made() -> tuple[Job, Job]:
        old = np.full(SHAPE, 0x3F80, np.uint16)
        new = old.copy()
        new.reshape(-1)[rng.integers(0, new.size, new.size // 100)] ^= 1
        boxes, room = ChangeBoxes([((0, SHAPE[0]), (0, SHAPE[1]))], 2), Room()
        return lambda: boxes.find(new, old, room, True, by_steps), lambda: (_read(old), _read(new))

    _require(made, 1.3)
