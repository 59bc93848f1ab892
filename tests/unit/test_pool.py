"""Pools: memory comes back when nothing refers to it, and not before."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import mode

from lowshard import BufferPool, DeviceMesh, Layout, Sharded, execute, plan_redistribute
from lowshard import comm as lc
from lowshard.kernels import MXFP8Tensor


def test_memory_comes_back_with_the_last_view_of_it() -> None:
    pool = BufferPool(lc.loopback(1)[0])
    first = pool.empty((1000, 500))
    at = first.ctypes.data
    view = first[3:, ::2].T
    del first
    assert pool.idle_bytes == 0
    assert pool.empty((1000, 500)).ctypes.data != at
    del view
    assert pool.idle_bytes > 0
    again = pool.empty((1000, 500), "int32")  # the other block came back too
    more = pool.empty(500_000)
    assert at in (again.ctypes.data, more.ctypes.data)
    assert again.dtype == np.int32
    assert again.flags.writeable
    assert again.flags.c_contiguous


class _Over:
    def __init__(self, kept: Any) -> None:
        self.kept, self.__array_interface__ = kept, kept.__array_interface__


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "a view": lambda a: a[5:9],
    "a view of another dtype": lambda a: a[:64].view("float64")[::2],
    "a memoryview": lambda a: memoryview(a)[3:4],
    "a DLPack capsule": lambda a: a.__dlpack__(),
    "an array made by DLPack": lambda a: np.from_dlpack(a)[7:],
    "an array over another's interface": lambda a: np.asarray(_Over(a)),
    "an iterator": lambda a: a.flat,
    "a circle": lambda a: (ring := [a[:1]]).append(ring) or ring,
    "an MXFP8 tensor": lambda a: MXFP8Tensor(a[:64].reshape(2, 32), np.zeros((2, 1), np.uint8), "e4m3"),
}  # fmt: skip


@pytest.mark.parametrize("name", mode.sample([*HOLDERS], 4, "holders of memory"))
def test_memory_that_something_refers_to_is_not_given_out_again(name: str) -> None:
    pool = BufferPool(lc.loopback(1)[0])
    first = pool.empty(1 << 20, "uint8")
    at, held = first.ctypes.data, HOLDERS[name](first)
    del first
    gc.collect()
    assert pool.empty(1 << 20, "uint8").ctypes.data != at
    del held
    gc.collect()
    assert at in [array.ctypes.data for array in [pool.empty(1 << 20, "uint8") for _ in range(2)]]


def test_no_two_arrays_share_memory() -> None:
    pool = BufferPool(lc.loopback(1)[0])
    held = []
    rng = np.random.default_rng(5)
    for i in range(200):
        array = pool.empty(int(rng.integers(1, 90_000)), "float64")
        array[...] = i
        held.append((i, array))
        if rng.random() < 0.6:
            held.pop(int(rng.integers(len(held))))
    assert all((array == i).all() for i, array in held)


def test_a_limit_lets_go_of_what_is_beyond() -> None:
    pool = BufferPool(lc.loopback(1)[0], limit_bytes=2 << 20)
    arrays = [pool.empty(1 << 20, "uint8") for _ in range(4)]
    del arrays
    assert pool.idle_bytes == 2 << 20


def test_results_come_from_it_again_and_again() -> None:
    mesh = DeviceMesh((2,), ("x",))
    src = Layout(mesh, (512, 512), "float32", (Sharded(0),))
    plan = plan_redistribute(src, src.with_placements((Sharded(1),)))

    def run(comm: lc.Communicator) -> set[int]:
        pool, places = BufferPool(comm), set()
        for turn in range(5):
            local = np.full(src.local_shape(comm.rank), turn, np.float32)
            got = execute(plan, local, comm, pool=pool)
            assert got is not None
            assert (got == turn).all()
            places.add(got.ctypes.data)
            del got
        return places

    assert [len(places) for places in lc.run_loopback(2, run)] == [1, 1]
