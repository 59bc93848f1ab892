"""What the GPU path keeps as long as it is needed, gives back, and does not ask CuPy for."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.comm_kit import refused, same
from support.gpu import on_gpu, run_nccl

from lowshard import kernels
from lowshard.comm import Communicator
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.nccl_over_mpi import _find_device
from lowshard.comm.pinned import Round, Slots
from lowshard.errors import CaptureError
from lowshard.kernels import BoxTable
from lowshard.kernels.change_boxes import ScratchBuffer
from lowshard.kernels.changes import ChangeBoxes
from lowshard.kernels.cuda.cuda_changes import device_search

SHAPE, BOXES = (64, 128), (((0, 64), (0, 64)), ((3, 4), (64, 96)))


def test_a_capture_refuses_a_kernel_whose_table_is_not_on_the_gpu_yet(cupy: Any) -> None:
    stream, table = cupy.cuda.Stream(non_blocking=True), BoxTable(SHAPE, BOXES)
    with stream:
        source = cupy.asarray(np.random.default_rng(1).standard_normal(SHAPE, np.float32))
        packed = kernels.pack(source, BoxTable(SHAPE, BOXES))  # of another table
        stream.begin_capture()
        refused(
            lambda: kernels.pack(source, table, out=packed),
            CaptureError,
            "once on this stream before the capture",
        )
        stream.end_capture()
        same(kernels.pack(source, table), packed.get())


def test_a_graph_keeps_the_tables_that_it_reads(cupy: Any) -> None:
    stream, table = cupy.cuda.Stream(non_blocking=True), BoxTable(SHAPE, BOXES)
    with stream:
        source = cupy.asarray(np.random.default_rng(2).standard_normal(SHAPE, np.float32))
        packed = kernels.pack(source, table)
        terms = [cupy.full(100, float(i), np.float32) for i in range(12)]
        total = cupy.empty(100, np.float32)
        kernels.sum_into(total, terms)
        stream.synchronize()
        stream.begin_capture()
        kernels.pack(source, table, out=packed)
        kernels.sum_into(total, terms)
        graph = stream.end_capture()
    for turn in range(70):  # more streams than a table is kept for
        with cupy.cuda.Stream(non_blocking=True) as other:
            kernels.pack(source, table)
            for more in range(4):  # more tables of sources than are kept
                kernels.sum_into(cupy.empty(1, np.float32), [t[turn + more : turn + more + 1] for t in terms])
            other.synchronize()
    wanted = table_bytes(table, source.get())
    del table
    gc.collect()
    with stream:
        rubbish = [cupy.full(1000, -1, np.int64) for _ in range(20)]
        packed.fill(0)
        total.fill(0)
        graph.launch(stream)
        same(packed, wanted)
        same(total, np.full(100, 66.0, np.float32))
        del rubbish, graph


def table_bytes(table: BoxTable, source: np.ndarray) -> np.ndarray:
    """Return what packing gives on the host."""
    packed: np.ndarray = kernels.pack(source, table)
    return packed


def test_slots_that_nobody_closed_ask_no_event_that_is_gone(cupy: Any) -> None:
    binding, locked = Binding.load(with_nccl=False), list[int]()

    def lock(memory: np.ndarray) -> Any:
        undo = binding.lock(memory)
        locked.append(1)
        return lambda: (undo(), locked.pop())  # type: ignore[func-returns-value]

    events = [
        binding.new_event() for _ in range(4)
    ]  # before the slots: so the collector finalizes them first
    watch = Watch()
    made = replace(binding, new_event=events.pop, lock=lock)
    slots: Any = Slots(made, lambda n: np.empty(n, np.uint8), 5.0, watch)
    device = cupy.ones(40, np.uint8)
    part = ((binding.pointer(device), 0, 40),)
    slots.run([Round(40, part, lambda slot: None, part)] * 2, "test")
    cupy.cuda.get_current_stream().synchronize()
    assert len(locked) == 2
    slots.itself = slots
    del slots
    gc.collect()
    assert not locked
    assert not watch.told


class Watch:
    """A side channel that notes what it is told."""

    def __init__(self) -> None:
        self.flag, self.told = np.zeros(1, np.int64), list[tuple[str, ...]]()

    def tell(self, *words: str) -> None:
        self.told.append(words)


def test_what_is_copied_to_the_side_is_copied_by_no_kernel_of_cupys(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(comm: Communicator) -> None:
        buf = on_gpu(comm, np.arange(6.0))
        comm.xp.cuda.get_current_stream().synchronize()
        comm.all_to_all(buf[:4], buf[1:5])  # they overlap
        same(buf[1:5], np.array([0.0, 1.0, 0.0, 1.0]) + 2 * comm.rank)

    def refuse(*_: Any) -> None:
        raise AssertionError(
            "loads a kernel, and waits for the device, where another rank's may wait for this one"
        )

    if not hasattr(cupy, "checker"):
        pytest.skip("CuPy's own type cannot be changed")
    monkeypatch.setattr(cupy.ndarray, "copy", refuse, raising=False)
    run_nccl(2, check)


def test_a_slice_of_a_gpu_is_known_by_its_own_name(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for shown in (
        "MIG-5fd9b8c4-0000-0000-0000-000000000001",
        "MIG-5fd9b8c4-0000-0000-0000-000000000002",
        "0",
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        names.add(_find_device(0, False).identity)
    assert len(names) == 3


def test_what_searches_share_is_there_on_every_stream(cupy: Any) -> None:
    device_search.cache_clear()
    new, old = cupy.arange(5000, dtype=np.int32), cupy.zeros(5000, np.int32)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True):
        device_search(0)
    with cupy.cuda.Stream(non_blocking=True):
        found = ChangeBoxes([((0, 5000),)], 4).find(new, old, ScratchBuffer(), may_stop=False)
        assert found.changed_elems == 4999
