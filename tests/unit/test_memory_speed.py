"""What goes through a model's memory takes little longer than it must: digests and the search for what changed beside
reading, quantising and dequantising in NumPy's own buffers beside buffers on cache lines.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import pytest

import lowshard as ls
from lowshard.kernels import MXFP8Tensor, dequantize_mxfp8, quantize_mxfp8
from lowshard.kernels.change_boxes import ScratchBuffer
from lowshard.kernels.changes import ChangeBoxes
from lowshard.reshard import digest

pytestmark = [pytest.mark.full_only, pytest.mark.quiet]

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

    _require(made, 1.2)


@pytest.mark.parametrize("by_steps", [False, True])
def test_finding_one_per_cent_takes_at_most_1_3_times_reading_both(
    rng: np.random.Generator, by_steps: bool
) -> None:
    def made() -> tuple[Job, Job]:
        old = np.full(SHAPE, 0x3F80, np.uint16)
        new = old.copy()
        new.reshape(-1)[rng.integers(0, new.size, new.size // 100)] ^= 1
        boxes, scratch = ChangeBoxes([((0, SHAPE[0]), (0, SHAPE[1]))], 2), ScratchBuffer()
        return lambda: boxes.find(new, old, scratch, True, by_steps), lambda: (_read(old), _read(new))

    _require(made, 1.3)


ELEMS = 1 << 25
"""64 MB of bf16, 128 MB of fp32."""


def _at(scratch: np.ndarray, past: int, dtype: np.dtype, count: int) -> np.ndarray:
    """Return so many elements of a buffer, the first some bytes past a pair of cache lines."""
    begin = -scratch.ctypes.data % 128 + past
    return scratch[begin : begin + count * dtype.itemsize].view(dtype)


@pytest.mark.parametrize("past", [(16, 16), (0, 16), (16, 0), (48, 16), (64, 0), (64, 16)])
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("floats_of", [ml_dtypes.bfloat16, np.float32])
def test_buffers_that_begin_anywhere_cost_at_most_1_15_times_others(
    rng: np.random.Generator, floats_of: type, back: bool, past: tuple[int, int]
) -> None:
    """The bytes past a pair of cache lines of source and target; those of np.empty are 16, or 80."""

    def made() -> tuple[Job, Job]:
        dtype, byte = np.dtype(floats_of), np.dtype(np.uint8)
        sizes = (dtype.itemsize * ELEMS, ELEMS, ELEMS // 32)
        floats, codes, scales = (np.zeros(size + 256, np.uint8) for size in sizes)
        values = (rng.standard_normal(1 << 20, dtype=np.float32) * 0.02).astype(dtype)

        def job(source: int, target: int) -> Job:
            begins = (source, target, target) if not back else (target, source, source)
            x = _at(floats, begins[0], dtype, ELEMS)
            q = MXFP8Tensor(_at(codes, begins[1], byte, ELEMS), _at(scales, begins[2], byte, ELEMS // 32))
            x[...] = np.resize(values, ELEMS)
            quantize_mxfp8(x, out=q)
            return (lambda: dequantize_mxfp8(q, dtype, out=x)) if back else (lambda: quantize_mxfp8(x, out=q))

        return job(*past), job(0, 0)

    _require(made, 1.15)
