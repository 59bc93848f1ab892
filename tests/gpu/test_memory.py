"""What the GPU path keeps as long as it is needed, gives back, and does not ask CuPy for; page-locked slots."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.comm_kit import refused, same
from support.gpu import alone_staged, on_gpu, run_nccl, run_staged

from lowshard import kernels
from lowshard.comm import Communicator
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.pinned import Round, Slots
from lowshard.errors import CaptureError
from lowshard.kernels.change_boxes import ScratchBuffer
from lowshard.kernels.changes import ChangeBoxes
from lowshard.kernels.cuda.cuda_changes import device_search


def test_a_graph_keeps_the_tables_that_it_reads_and_records_no_upload(cupy: Any) -> None:
    shape, boxes = (64, 128), (((0, 64), (0, 64)), ((3, 4), (64, 96)))
    stream, table = cupy.cuda.Stream(non_blocking=True), kernels.BoxTable(shape, boxes)
    host = np.random.default_rng(2).standard_normal(shape, np.float32)
    with stream:
        source, total = cupy.asarray(host), cupy.zeros(100, np.float32)
        terms = [cupy.full(100, float(i), np.float32) for i in range(12)]
        packed = kernels.pack(source, boxes)  # another table
        stream.begin_capture()
        refused(partial(kernels.pack, source, table, packed), CaptureError, "once on this stream before")
        stream.end_capture()
        for capture in (False, True):
            if capture:
                stream.synchronize()
                stream.begin_capture()
            kernels.pack(source, table, packed)
            kernels.sum_into(total, terms)
        graph = stream.end_capture()
    for turn in range(70):  # more streams than a table is kept for
        with cupy.cuda.Stream(non_blocking=True) as other:
            kernels.pack(source, table)
            for at in range(turn, turn + 4):  # more tables of sources than are kept
                kernels.sum_into(cupy.empty(1, np.float32), [term[at : at + 1] for term in terms])
            other.synchronize()
    wanted: Any = kernels.pack(host, table)
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


def test_what_is_copied_to_the_side_is_copied_by_no_kernel_of_cupys(cupy: Any, monkeypatch: Any) -> None:
    """CuPy would load it, and wait for the device, where another rank's kernel may wait for this one."""

    def check(comm: Communicator) -> None:
        buf = on_gpu(comm, np.arange(6.0))
        comm.all_to_all(buf[:4], buf[1:5])  # they overlap
        same(buf[1:5], np.array([0.0, 1.0, 0.0, 1.0]) + 2 * comm.rank)

    if not hasattr(cupy, "checker"):
        pytest.skip("CuPy's own type cannot be changed")
    monkeypatch.setattr(cupy.ndarray, "copy", lambda *_: pytest.fail("copied by CuPy"), raising=False)
    run_nccl(2, check)


def test_what_searches_share_is_there_on_every_stream(cupy: Any) -> None:
    device_search.cache_clear()
    new, old = cupy.arange(5000, dtype=np.int32), cupy.zeros(5000, np.int32)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True):
        device_search(0)
    with cupy.cuda.Stream(non_blocking=True):
        found = ChangeBoxes([((0, 5000),)], 4).find(new, old, ScratchBuffer(), may_stop=False)
        assert found.changed_elems == 4999


# ---- the slots of staging


def test_slots_that_nobody_closed_ask_no_event_that_is_gone(cupy: Any) -> None:
    binding, told = Binding.load(with_nccl=False), list[Any]()
    events = [binding.new_event() for _ in range(4)]  # before the slots: the collector finalizes them first
    watch: Any = SimpleNamespace(flag=np.zeros(1, np.int64), tell=lambda *words: told.append(words))
    new = lambda size: np.empty(size, np.uint8)  # noqa: E731
    slots: Any = Slots(replace(binding, new_event=events.pop), new, 5.0, watch)
    device = cupy.ones(40, np.uint8)
    part = ((binding.pointer(device), 0, 40),)
    slots.run([Round(40, part, lambda slot: None, part)] * 2, "test")
    cupy.cuda.get_current_stream().synchronize()
    slots.itself = slots
    del slots
    gc.collect()
    assert not told


@pytest.mark.parametrize("can_lock", [True, False])
def test_page_locked_memory_is_made_on_first_use_and_bounded(
    can_lock: bool, cupy: Any, monkeypatch: Any
) -> None:
    locked, runtime = dict[int, int](), cupy.cuda.runtime
    lock, unlock = runtime.hostRegister, runtime.hostUnregister

    def register(at: int, size: int, flags: int) -> None:
        if not can_lock:
            raise runtime.CUDARuntimeError(801)
        lock(at, size, flags)
        locked[at] = size

    monkeypatch.setattr(runtime, "hostRegister", register)
    monkeypatch.setattr(runtime, "hostUnregister", lambda at: (unlock(at), locked.pop(at)))
    with alone_staged(slot_bytes=1 << 16) as comm:
        for elems, size in ((10, 4096), (100_000, 1 << 16)):
            buf = on_gpu(comm, np.ones(elems))
            for _ in range(2):
                comm.all_reduce(buf, buf)
            same(buf, np.ones(elems))
            assert list(locked.values()) == [size] * 2 * can_lock
    assert not locked
    if hasattr(cupy, "checker") and not can_lock:  # it is used as it is
        assert all("pageable" in report for report in cupy.checker.reports())
        cupy.checker.reset()


def test_a_slot_that_another_stream_still_reads_is_waited_for() -> None:
    def check(comm: Communicator) -> None:
        streams, bufs = [comm.xp.cuda.Stream(non_blocking=True) for _ in range(3)], []
        for i in range(12):
            with streams[i % 3]:
                bufs.append(on_gpu(comm, np.full(300, float(i + comm.rank))))
                comm.broadcast(bufs[i], i % 2) if i % 3 else comm.all_reduce(bufs[i], bufs[i])
        for i, buf in enumerate(bufs):
            with streams[i % 3]:
                same(buf, np.full(300, float(i + i % 2 if i % 3 else 2 * i + 1)))

    run_staged(2, check, slot_bytes=512)
