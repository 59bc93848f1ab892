"""Programs that use a GPU rightly, or with one fault: what the GPU checker must find.

A step does its work rightly or not; a program is a step many times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lowshard.kernels import BoxTable, pack
from lowshard.kernels.cuda.cuda_engine import device_engine
from lowshard.kernels.runs import whole_array_runs

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
    with rig.one:
        rig.cupy.ones(10)
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
    race_between_streams: "race: cupy's mul .* nothing orders",
    event_recorded_too_soon: "race: cupy's mul .* cupy's add",
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


# ---- NCCL: two ranks, which are threads


class Rank:
    """A rank with a stream, a communicator and two arrays of eight numbers."""

    def __init__(self, cupy: Any, unique: bytes, number: int) -> None:
        self.nccl, self.number = cupy.cuda.nccl, number
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.comm = self.nccl.NcclCommunicator(2, unique, number)
        with self.stream:
            self.send, self.recv = cupy.arange(8), cupy.zeros(8, "int64")
        self.source, self.target = self.send.data.ptr, self.recv.data.ptr

    def all_reduce(self, source: int, count: int = 8, kind: int = INT64, op: int = SUM) -> None:
        self.comm.allReduce(source, self.target, count, kind, op, self.stream.ptr)


RankStep = Callable[[Rank, bool], None]


def unbalanced_group(rank: Rank, is_right: bool) -> None:
    rank.nccl.groupStart()
    rank.all_reduce(rank.source)
    if is_right:
        rank.nccl.groupEnd()


def group_ended_twice(rank: Rank, is_right: bool) -> None:
    unbalanced_group(rank, True)
    if not is_right:
        rank.nccl.groupEnd()


def counts_differ(rank: Rank, is_right: bool) -> None:
    rank.all_reduce(rank.source, 8 if is_right or rank.number else 7)


def ops_differ(rank: Rank, is_right: bool) -> None:
    rank.all_reduce(rank.source, op=SUM if is_right or rank.number else MAX)


def types_differ(rank: Rank, is_right: bool) -> None:
    rank.all_reduce(rank.source, kind=INT64 if is_right or rank.number else UINT64)


def calls_in_another_order(rank: Rank, is_right: bool) -> None:
    def gather() -> None:
        rank.comm.allGather(rank.source, rank.target, 4, INT64, rank.stream.ptr)

    calls = [gather, lambda: rank.all_reduce(rank.source)]
    for call in calls if is_right or rank.number else reversed(calls):
        call()


def message_of_another_length(rank: Rank, is_right: bool) -> None:
    if rank.number:
        rank.comm.send(rank.source, 8 if is_right else 7, INT64, 0, rank.stream.ptr)
    else:
        rank.comm.recv(rank.target, 8, INT64, 1, rank.stream.ptr)


def overlap_that_is_not_in_place(rank: Rank, is_right: bool) -> None:
    rank.all_reduce(rank.target if is_right else rank.target + 8, 7)


def group_on_two_streams(rank: Rank, is_right: bool) -> None:
    rank.nccl.groupStart()
    rank.comm.send(rank.source, 8, INT64, 1 - rank.number, rank.stream.ptr)
    rank.comm.recv(rank.target, 8, INT64, 1 - rank.number, rank.stream.ptr if is_right else 0)
    rank.nccl.groupEnd()


def call_after_destroy(rank: Rank, is_right: bool) -> None:
    rank.all_reduce(rank.source)
    if not is_right:
        rank.stream.synchronize()
        rank.comm.destroy()
        rank.comm.check_async_error()


RANK_FAULTS: dict[RankStep, str] = {
    unbalanced_group: "within a group of NCCL calls that is not ended",
    group_ended_twice: "groupEnd without groupStart",
    counts_differ: r"\['allReduce', [78], 'int64', 0, -1\] on rank",
    ops_differ: r"\['allReduce', 8, 'int64', [02], -1\] on rank",
    types_differ: r"\['allReduce', 8, 'u?int64', 0, -1\] on rank",
    calls_in_another_order: r"\['all(Reduce|Gather)', .* on rank",
    message_of_another_length: r"a recv of \[8, 4\] .* meets a send of \[7, 4\]",
    overlap_that_is_not_in_place: "its arrays overlap",
    group_on_two_streams: "on several streams",
    call_after_destroy: "check_async_error on a communicator after destroy",
}
