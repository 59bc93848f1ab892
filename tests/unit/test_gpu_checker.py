"""The GPU checker finds each fault at a random place of a program that is right elsewhere, and none without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import mode
from support.checked_gpu import checked_gpu
from support.host_kernels import needs_compiler

from lowshard.kernels import BoxTable, pack
from lowshard.kernels.cuda.cuda_engine import device_engine
from lowshard.kernels.runs import whole_array_runs

PLACES = 20
SUM, MAX, INT64, UINT64, FLOAT32 = 0, 2, 4, 5, 7
TO_DEVICE, TO_HOST = 1, 2

Step = Callable[[Any, bool], None]


class Rig:
    """Two streams and page-locked memory of a program."""

    def __init__(self, cupy: Any) -> None:
        self.cupy, self.runtime = cupy, cupy.cuda.runtime
        self.one, self.other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        raw = np.zeros(3 * 4096, np.uint8)
        self.slot = raw[-raw.ctypes.data % 4096 :][: 2 * 4096].view(np.float32)
        self.runtime.hostRegister(self.slot.ctypes.data, self.slot.nbytes, 0)

    def settle(self) -> None:
        self.one.synchronize()
        self.other.synchronize()


@pytest.fixture
def cupy() -> Iterator[Any]:
    with checked_gpu() as module:
        yield module


def race_between_streams(rig: Rig, is_right: bool) -> None:
    with rig.one:
        value = rig.cupy.ones(1000, "float32")
    if is_right:
        rig.other.wait_event(rig.one.record())
    with rig.other:
        value *= 2
    rig.settle()


def event_recorded_too_soon(rig: Rig, is_right: bool) -> None:
    with rig.one:
        value = rig.cupy.ones(1000, "float32")
        made = rig.one.record()
        value += 1
    rig.other.wait_event(rig.one.record() if is_right else made)
    with rig.other:
        value *= 2
    rig.settle()


def memory_handed_on_too_soon(rig: Rig, is_right: bool) -> None:
    with rig.one:
        value = rig.cupy.ones(3000, "float32")
    rig.other.wait_event(rig.one.record())
    with rig.other:
        value += 1
    if is_right:
        rig.one.wait_event(rig.other.record())
    del value
    with rig.one:
        rig.cupy.zeros(3000, "float32")
    rig.settle()


def use_after_free(rig: Rig, is_right: bool) -> None:
    with rig.one:
        value = rig.cupy.ones(100, "float32")
        at = value.data.ptr
        if not is_right:
            del value
        rig.runtime.memcpyAsync(rig.slot.ctypes.data, at, 400, TO_HOST, rig.one.ptr)
    rig.settle()


def out_of_bounds(rig: Rig, is_right: bool) -> None:
    with rig.one:
        value = rig.cupy.ones(100, "float32")
        rig.cupy.ndarray((100 + (not is_right),), "float32", value.data).fill(2)
    rig.settle()


def kernel_out_of_bounds(rig: Rig, is_right: bool) -> None:
    with rig.one:
        value, table = rig.cupy.ones((64, 128), "float32"), BoxTable((64, 128), (((0, 64), (0, 64)),))
        cut = (
            value if is_right else rig.cupy.ndarray((64, 128), "float32", rig.cupy.ones(100, "float32").data)
        )
        pack(cut, table)
    rig.settle()


def unaligned_access(rig: Rig, is_right: bool) -> None:
    with rig.one:
        rig.cupy.zeros(65, "uint8")[0 if is_right else 1 :][:64].view("float32").fill(1)
    rig.settle()


def threads_on_one_byte(rig: Rig, is_right: bool) -> None:
    runs = whole_array_runs((64,), (4,), (4,), 4, 4)
    with rig.one:
        array, packed = rig.cupy.zeros(64, "int32"), rig.cupy.ones(4, "int32")
        places = rig.cupy.asarray(np.array([1, 2, 3, 4 if is_right else 3]))
        device_engine(0).scatter(array, packed, places, runs)
    rig.settle()


def host_reads_a_slot_too_soon(rig: Rig, is_right: bool) -> None:
    with rig.one:
        value = rig.cupy.ones(100, "float32")
        rig.runtime.memcpyAsync(rig.slot.ctypes.data, value.data.ptr, 400, TO_HOST, rig.one.ptr)
        if is_right:
            rig.one.synchronize()
        float(rig.slot[:100].sum())
    rig.settle()


def host_writes_a_slot_too_soon(rig: Rig, is_right: bool) -> None:
    with rig.one:
        value = rig.cupy.ones(1500, "float32")
        rig.runtime.memcpyAsync(value.data.ptr, rig.slot.ctypes.data, 6000, TO_DEVICE, rig.one.ptr)
        if is_right:
            rig.one.synchronize()
        rig.slot[:1500] += 1
    rig.settle()


def destroyed_event_is_queried(rig: Rig, is_right: bool) -> None:
    event = rig.one.record()
    if not is_right:
        event.__del__()
    assert rig.runtime.eventQuery(event.ptr) in ((0, 600) if is_right else (709,))


def upload_within_a_capture(rig: Rig, is_right: bool) -> None:
    with rig.one:
        value, given = rig.cupy.zeros(8, "float32"), np.ones(8, np.float32)
        more = rig.cupy.asarray(given)
        rig.one.begin_capture()
        value += more if is_right else rig.cupy.asarray(given)
        graph = rig.one.end_capture()
        graph.launch()
    rig.settle()


def replay_of_freed_memory(rig: Rig, is_right: bool) -> None:
    with rig.one:
        value, more = rig.cupy.zeros(8, "float32"), rig.cupy.ones(8, "float32")
        rig.one.begin_capture()
        value += more
        graph = rig.one.end_capture()
        if not is_right:
            del more
            more = rig.cupy.ones(8, "float32")  # at the same address
        graph.launch()
    rig.settle()


FAULTS: dict[Step, str] = {
    race_between_streams: "race: cupy's multiply .* nothing orders",
    event_recorded_too_soon: "race: cupy's multiply .* cupy's add",
    memory_handed_on_too_soon: "race: cupy's fill .* cupy's add",
    use_after_free: "which was freed before",
    out_of_bounds: "out of bounds",
    kernel_out_of_bounds: "kernel copy_16 reads .* out of bounds",
    unaligned_access: "not aligned",
    threads_on_one_byte: "two threads of kernel scatter_4 write byte",
    host_reads_a_slot_too_soon: "the host reads page-locked memory",
    host_writes_a_slot_too_soon: "the host writes page-locked memory",
    destroyed_event_is_queried: "eventQuery of event .* destroyed",
    upload_within_a_capture: "upload of 32 bytes within a capture",
    replay_of_freed_memory: "a graph that is replayed, which was freed",
}


@needs_compiler
@pytest.mark.parametrize("step", FAULTS, ids=lambda step: step.__name__)
def test_a_planted_fault_is_found(step: Step, cupy: Any) -> None:
    def run(wrong: int) -> None:
        rig = Rig(cupy)
        try:
            for place in range(PLACES):
                step(rig, place != wrong)
        except cupy.checker.Misuse:
            assert wrong >= 0
        finally:
            rig.runtime.hostUnregister(rig.slot.ctypes.data)

    _expect(cupy, run, FAULTS[step], f"gpu checker {step.__name__}")


def _expect(cupy: Any, run: Callable[[int], None], pattern: str, name: str) -> None:
    run(-1)
    assert cupy.checker.reports() == []
    counts = cupy.checker.counts()
    assert counts["allocations"] or counts["host_waits"] or counts["collectives"]
    run(int(mode.rng(name).integers(PLACES)))
    assert any(pytest.importorskip("re").search(pattern, text) for text in cupy.checker.reports()), (
        cupy.checker.reports()
    )
