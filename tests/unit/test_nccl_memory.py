"""Memory that NCCL allocates: allocated, registered, deregistered and freed in that order, and nothing left."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.comm_kit import refused
from support.nccl_stand_in import Host, StandInCommunicator, World

from lowshard.comm.nccl import nccl_communicator
from lowshard.comm.nccl_memory import FROM_BYTES, NCCLMemory

COMM = object()
PAGE = FROM_BYTES


class Low:
    """nccl4py's lower layer, as far as memory goes: each step is noted, and must follow the one before it."""

    NCCLError = type("NCCLError", (RuntimeError,), {})

    def __init__(self) -> None:
        self.state: dict[int, str] = {}
        self.next, self.failing = 1 << 30, ""

    def _step(self, name: str, address: int, before: str) -> None:
        assert self.state.get(address, "") == before, (name, self.state.get(address))
        if self.failing == name:
            raise self.NCCLError(f"{name} failed")
        self.state[address] = name

    def mem_alloc(self, size: int) -> int:
        self.next += size
        self._step("mem_alloc", self.next, "")
        return self.next

    def comm_register(self, comm: Any, buff: int, size: int) -> int:
        assert comm is COMM
        self._step("comm_register", buff, "mem_alloc")
        return -buff

    def comm_deregister(self, comm: Any, handle: int) -> None:
        assert comm is COMM
        self._step("comm_deregister", -handle, "comm_register")

    def mem_free(self, ptr: int) -> None:
        assert self.state[ptr] in ("comm_deregister", "mem_alloc", "aborted"), self.state[ptr]
        self.state[ptr] = "mem_free"


class Block:
    """What a pool hands out; its memory goes back when nobody has it."""

    def __init__(self, pool: Pool, address: int, n_bytes: int) -> None:
        self.pool, self.address, self.n_bytes = pool, address, n_bytes

    def __del__(self) -> None:
        if self.pool.is_open:
            self.pool.unused.append((self.address, self.n_bytes))
        else:
            self.pool.free(self.address, 3)


class Pool:
    """CuPy's MemoryPool over a PythonFunctionAllocator, as far as memory goes."""

    def __init__(self, allocator: Any) -> None:
        self.allocate, self.free = allocator
        self.unused: list[tuple[int, int]] = []
        self.is_open = True

    def malloc(self, n_bytes: int) -> Block:
        for i, (address, size) in enumerate(self.unused):
            if size == n_bytes:
                del self.unused[i]
                return Block(self, address, n_bytes)
        return Block(self, self.allocate(n_bytes, 3), n_bytes)

    def free_all_blocks(self) -> None:
        while self.unused:
            self.free(self.unused.pop()[0], 3)


class CuPy:
    """CuPy's allocators; an array is what the current allocator returns."""

    def __init__(self) -> None:
        self.others: list[int] = []
        self.synchronized = 0
        self.allocator: Any = self.others.append
        self.cuda = SimpleNamespace(
            MemoryPool=Pool,
            PythonFunctionAllocator=lambda malloc, free: SimpleNamespace(malloc=(malloc, free)),
            get_allocator=lambda: self.allocator,
            using_allocator=self.using,
            Device=lambda number: np.errstate(),  # a context
            runtime=SimpleNamespace(deviceSynchronize=self.synchronize),
        )

    def synchronize(self) -> None:
        self.synchronized += 1

    @contextmanager
    def using(self, allocator: Any) -> Any:
        before, self.allocator = self.allocator, allocator
        yield
        self.allocator = before


@pytest.fixture
def low() -> Low:
    return Low()


@pytest.fixture
def cupy() -> CuPy:
    return CuPy()


def test_large_arrays_lie_in_registered_memory_that_is_used_again(low: Low, cupy: CuPy) -> None:
    memory = NCCLMemory(low, COMM, cupy)
    with memory.allocating():
        assert cupy.allocator(PAGE - 1) is None
        first = cupy.allocator(PAGE)
        again = first.address
        del first
        assert cupy.allocator(PAGE).address == again
    assert cupy.others == [PAGE - 1]
    assert low.state == {again: "comm_register"}
    memory.close(aborted=False)
    assert low.state == {again: "mem_free"}
    assert cupy.synchronized == 1, "work that is queued may still use it"


@pytest.mark.parametrize("aborted", [False, True])
def test_an_array_outlives_its_communicator(low: Low, cupy: CuPy, aborted: bool) -> None:
    memory = NCCLMemory(low, COMM, cupy)
    with memory.allocating():
        array = cupy.allocator(PAGE)
    if aborted:
        low.state[array.address] = "aborted"  # NCCL has forgotten it: to deregister it would be an error
    memory.close(aborted)
    assert low.state[array.address] == ("aborted" if aborted else "comm_deregister")
    pool, address = array.pool, array.address
    pool.is_open = False
    del array, memory
    assert low.state == {address: "mem_free"}


@pytest.mark.parametrize("failing", ["mem_alloc", "comm_register"])
def test_what_nccl_refuses_is_no_memory_and_leaves_none(low: Low, cupy: CuPy, failing: str) -> None:
    memory = NCCLMemory(low, COMM, cupy)
    low.failing = failing
    with memory.allocating():
        refused(lambda: cupy.allocator(PAGE), MemoryError, f"{PAGE} bytes on device 3", f"{failing} failed")
    assert set(low.state.values()) <= {"mem_free"}
    low.failing = ""
    with memory.allocating():
        assert cupy.allocator(PAGE).address


@pytest.mark.parametrize("end", ["destroy", "abort"])
def test_a_communicator_gives_its_memory_back_before_it_is_destroyed_and_after_it_is_aborted(
    end: str,
) -> None:
    host, told = Host(), []
    handle = StandInCommunicator(World(1), 0, host)

    class Memory:
        @contextmanager
        def allocating(self) -> Any:
            told.append("allocating")
            yield

        def close(self, aborted: bool) -> None:
            told.append((aborted, handle.ended, host.current))

    handle.memory = lambda xp: Memory()  # type: ignore[attr-defined]
    comm = nccl_communicator(handle, 0, 1, binding=host.binding())
    assert comm.empty(3).shape == comm.empty(3).shape == (3,)
    comm._transport._nccl.failed = end == "abort"
    comm.close()
    assert told == [
        "allocating",
        "allocating",
        (end == "abort", "abort" if end == "abort" else "", host.device),
    ]
    assert handle.ended == end


def test_an_array_of_a_communicator_lies_on_its_device_whichever_is_current() -> None:
    host = Host(device=2)
    comm = nccl_communicator(StandInCommunicator(World(1), 0, host), 0, 1, binding=host.binding())
    seen = []
    binding = comm._transport._binding

    class Xp:
        def empty(self, shape: Any, dtype: Any) -> np.ndarray:
            seen.append(binding.current())
            return np.empty(shape, dtype)

        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

    object.__setattr__(binding, "xp", Xp())
    comm.empty((2, 3), "float32")
    assert seen == [2]
    assert host.current == 0
    comm.close()
