"""Kernels and memory on a GPU: bytes, streams, what is kept as long as it is needed, and given back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import mode
from support.comm_kit import refused, same
from support.gpu import busy, host_waits, on_gpu, run_nccl

from lowshard import kernels as lk
from lowshard.comm import Communicator
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.nccl_over_mpi import _find_device
from lowshard.errors import CaptureError, StreamError
from lowshard.foreign_array import host_of
from lowshard.kernels import BoxTable, MXFP8Tensor, pack
from lowshard.kernels.change_boxes import ScratchBuffer
from lowshard.kernels.changes import ChangeBoxes
from lowshard.kernels.cuda.cuda_changes import device_search
from lowshard.selftest.arrays import ordinary, put
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.kernel_cases import FAMILIES
from lowshard.transfer.pinned import Round, Slots

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPE = (6, 50, 320)
BOXES = (((0, 6), (0, 50), (32, 64)), ((1, 2), (3, 4), (0, 32)), ((2, 6), (5, 49), (64, 320)))


def there(array: np.ndarray) -> Any:
    """Return a copy on the GPU, which is there: the kernel under test may run on another stream."""
    import cupy

    made = put(cupy, array)
    cupy.cuda.get_current_stream().synchronize()
    return made


@pytest.mark.whole
@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("family", mode.sample(FAMILIES, 4, "families on a GPU"))
def test_a_family_of_kernels_has_the_bytes_of_its_plain_twins(family: Any, blocking: bool, cupy: Any) -> None:
    tally = Tally()
    with cupy.cuda.Stream.null if blocking else cupy.cuda.Stream(non_blocking=True) as stream:
        for case in mode.sample([*family()], 40, f"cases of {family.__name__}"):
            case.check(there, tally)
        stream.synchronize()
    assert not tally.findings
    assert tally.checks > 10


def every_call(cupy: Any) -> dict[str, Callable[..., Any]]:
    """Return calls that go each way to a kernel, with buffers to write into."""
    table, empty, u8 = BoxTable(SHAPE, BOXES), cupy.empty, np.uint8
    total, x = table.total_elems, there(ordinary(SHAPE, "bfloat16", "x"))
    wire = MXFP8Tensor.over(empty(MXFP8Tensor.buffer_bytes((total,)), u8), (total,))
    sources = [there(ordinary(SHAPE, "float16", "x")) for _ in range(9)]
    scale, tiles = there(ordinary((300, 34), "uint8", "scale")), empty(3 * 9 * 512, u8)
    return {
        "pack": partial(pack, x, table, empty(total, BF16)),
        "pack_quantize": partial(lk.pack_quantize, x, table, out=wire),
        "unpack_dequantize": partial(lk.unpack_dequantize, wire, table, empty(SHAPE, BF16)),
        "cast": partial(lk.cast, x, "float32", empty(SHAPE, np.float32)),
        "sum_into": partial(lk.sum_into, there(np.zeros(SHAPE, "f")), sources, accumulate=False),
        "swizzle": partial(lk.swizzle_scales, scale, tiles),
        "unswizzle": partial(lk.unswizzle_scales, tiles, 300, 34, empty((300, 34), u8)),
    }


def bytes_of(result: Any) -> list[bytes]:
    parts = (result.data, result.scale) if isinstance(result, MXFP8Tensor) else (result,)
    return [host_of(array).tobytes() for array in parts]


def test_calls_run_on_the_stream_that_is_named_and_neither_wait_nor_allocate(cupy: Any) -> None:
    stream, calls = cupy.cuda.Stream(non_blocking=True), every_call(cupy)
    sizes, allocate = list[int](), cupy.cuda.get_allocator()
    noting = lambda size: (sizes.append(size), allocate(size))[1]  # noqa: E731
    with stream:
        busy(cupy, 0.0)
    for call in calls.values():  # tables and sources go up
        call(stream=stream)
        stream.synchronize()
    for name, call in calls.items():
        expected = bytes_of(call())
        for named in (stream, stream.ptr):
            cupy.cuda.Device().synchronize()
            with stream:
                busy(cupy, 0.03)
                over = stream.record()
            with host_waits(cupy) as waits, cupy.cuda.using_allocator(noting):
                result = call(stream=named)
            assert not over.done, f"{name} waited for what was ahead on its stream"
            assert (waits, sizes) == ([], [])
            with stream:  # behind the call: on another stream the checker sees a race
                assert bytes_of(result) == expected
    refused(partial(calls["pack"], stream="x"), StreamError, "got str")


@pytest.mark.parametrize("kept", [True, False])
def test_a_table_goes_up_once_a_stream_without_waiting_and_serves_several(kept: bool, cupy: Any) -> None:
    host = ordinary(SHAPE, "float32", "x")
    x, table = there(host), BoxTable(SHAPE, BOXES)
    streams, found = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)], []
    for index, stream in enumerate(streams):
        with stream:
            out = cupy.empty(table.total_elems, np.float32)
            pack(x, list(BOXES), out)  # CuPy's pools have memory of this size from here on
            stream.synchronize()
            busy(cupy, 0.1 if index == 0 else 0.0)  # the first upload is late; nobody else may read it
            over = stream.record()
            # Bare boxes: a table a call, freed while kernels that read it still wait.
            found += [pack(x, table if kept else list(BOXES), out) for _ in range(3)]
            assert not over.done or index
    for index, out in reversed([*enumerate(found)]):
        with streams[index // 3]:
            assert bytes_of(out) == bytes_of(pack(host, table))


def test_a_graph_keeps_the_tables_that_it_reads_and_records_no_upload(cupy: Any) -> None:
    shape, boxes = (64, 128), (((0, 64), (0, 64)), ((3, 4), (64, 96)))
    stream, table = cupy.cuda.Stream(non_blocking=True), lk.BoxTable(shape, boxes)
    host = np.random.default_rng(2).standard_normal(shape, np.float32)
    with stream:
        source, total = cupy.asarray(host), cupy.zeros(100, np.float32)
        terms = [cupy.full(100, float(i), np.float32) for i in range(12)]
        packed = lk.pack(source, boxes)  # another table
        stream.begin_capture()
        refused(partial(lk.pack, source, table, packed), CaptureError, "once on this stream before")
        stream.end_capture()
        for capture in (False, True):
            if capture:
                stream.synchronize()
                stream.begin_capture()
            lk.pack(source, table, packed)
            lk.sum_into(total, terms)
        graph = stream.end_capture()
    for turn in range(70):  # more streams than a table is kept for
        with cupy.cuda.Stream(non_blocking=True) as other:
            lk.pack(source, table)
            for at in range(turn, turn + 4):  # more tables of sources than are kept
                lk.sum_into(cupy.empty(1, np.float32), [term[at : at + 1] for term in terms])
            other.synchronize()
    wanted: Any = lk.pack(host, table)
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


def test_slots_that_nobody_closed_ask_no_event_that_is_gone(cupy: Any) -> None:
    binding, locked, told = Binding.load(with_nccl=False), list[int](), list[Any]()

    def lock(memory: np.ndarray) -> Callable[[], None]:
        undo, at = binding.lock(memory), memory.ctypes.data
        locked.append(at)
        return lambda: (undo(), locked.remove(at))[0]  # type: ignore[func-returns-value]

    events = [binding.new_event() for _ in range(4)]  # before the slots: they are finalized first
    watch = SimpleNamespace(flag=np.zeros(1, np.int64), tell=lambda *words: told.append(words))
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
    assert not told


def test_a_slice_of_a_gpu_is_known_by_its_own_name(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for shown in ("MIG-5fd9b8c4-0001", "MIG-5fd9b8c4-0002", "0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        names.add(_find_device(0, False).identity)
    assert len(names) == 3
