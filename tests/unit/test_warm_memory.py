"""Memory of results that are gone is lent again, never while anything refers to it, and not kept for long."""

from __future__ import annotations

import gc
import multiprocessing
import resource
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import mode

from lowshard import DeviceMesh, Layout, Sharded, redistribute, warm_memory
from lowshard import comm as lc
from lowshard.kernels import MXFP8Tensor, quantize_mxfp8
from lowshard.kernels.buffer import address
from lowshard.warm_memory import KEEP_S, WarmMemory

MB = 1 << 20


@pytest.fixture
def memory() -> WarmMemory:
    return WarmMemory(16 * MB, keep_s=0.2)


def block_of(lent: np.ndarray[Any, Any]) -> int:
    """Where memory is that two arrays have in common or not."""
    return address(lent) // MB


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
def test_memory_that_something_refers_to_is_not_lent_again(name: str) -> None:
    memory = WarmMemory(16 * MB, keep_s=60)
    first = memory.lend(3 * MB)
    first[...] = 7
    at, held = block_of(first), HOLDERS[name](first)
    del first
    gc.collect()
    others = [memory.lend(3 * MB) for _ in range(4)]
    assert at not in map(block_of, others)
    for other in others:
        other[...] = 1
    del others, held, other
    gc.collect()
    assert memory.idle_bytes == 16 * MB  # of five blocks of 4 MB: the bound
    assert memory.lend(3 * MB).size == 3 * MB


def test_what_torch_made_of_it_counts(memory: WarmMemory) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    first = memory.lend(3 * MB)
    at, tensor = block_of(first), torch.from_numpy(first)[4:]
    del first
    assert block_of(memory.lend(3 * MB)) != at
    del tensor


def test_what_came_back_is_lent_again_and_is_aligned() -> None:
    memory = WarmMemory(16 * MB, keep_s=60)
    first = memory.lend(3 * MB + 5)
    at = block_of(first)
    assert address(first) % 64 == 0
    del first
    again = memory.lend(3 * MB + 1000)
    assert (block_of(again), address(again) % 64) == (at, 0)
    assert again.flags.writeable
    assert again.flags.c_contiguous


def test_it_goes_back_to_the_system_when_idle_and_the_thread_sleeps(memory: WarmMemory) -> None:
    lent = memory.lend(8 * MB)
    lent[...] = 1
    del lent
    time.sleep(0.6)
    assert memory.idle_bytes == 0
    held = memory.lend(8 * MB)  # and once more, after the thread has slept
    del held
    time.sleep(0.6)
    assert memory.idle_bytes == 0
    assert not memory._is_awake


def test_a_destructor_that_asks_for_memory_amid_a_call_gets_some() -> None:
    """Garbage is collected anywhere, also where the lock is held."""
    memory = WarmMemory(16 * MB, keep_s=60)
    first = memory.lend(3 * MB)
    del first
    with memory._lock:
        second = memory.lend(3 * MB)
        second[...] = 1
        del second
    assert memory.idle_bytes == 8 * MB


def test_threads_never_get_the_same(memory: WarmMemory) -> None:
    wrong: list[int] = []

    def use(number: int) -> None:
        rng, kept = np.random.default_rng(number), []
        for i in range(200):
            array = memory.lend(int(rng.integers(1, 4)) * MB - 64)
            array[:: 64 << 10] = mark = (number * 16 + i) % 256
            kept.append((array, mark))
            if len(kept) > 2:
                old, expected = kept.pop(int(rng.integers(3)))
                if (old[:: 64 << 10] != expected).any():
                    wrong.append(number)

    threads = [threading.Thread(target=use, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _in_child(lent: Any, memory: WarmMemory, answer: Any) -> None:
    own = memory.lend(3 * MB)
    own[...] = 9
    del own
    time.sleep(0.6)
    answer.put((int(lent[5]), memory.idle_bytes))


def test_a_forked_child_has_one_of_its_own(memory: WarmMemory) -> None:
    lent = memory.lend(3 * MB)
    lent[...] = 4
    fork = multiprocessing.get_context("fork")
    answer = fork.SimpleQueue()
    child = fork.Process(target=_in_child, args=(lent, memory, answer))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert answer.get() == (4, 0)


def test_results_in_a_loop_take_no_new_pages_and_none_stay() -> None:
    comm = lc.loopback(1)[0]
    mesh = DeviceMesh((1,), ("x",))
    src = Layout(mesh, (4096, 1024), "float32", (Sharded(0),))
    x = np.ones((4096, 1024), np.float32)
    faults = []
    q = quantize_mxfp8(x)
    for _ in range(12):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        q = quantize_mxfp8(x)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert sorted(faults[2:])[len(faults) // 2] < 32, faults  # of 1,024 and more pages
    del q
    time.sleep(2 * KEEP_S)
    assert warm_memory.idle_bytes() == 0
    assert redistribute(x, src, src, comm).shape == (4096, 1024)
