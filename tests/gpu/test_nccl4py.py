"""NCCL called by nccl4py: the choice, every transfer through its lower layer, memory that NCCL allocates."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.comm_kit import refused, same
from support.gpu import alone, host_waits, on_gpu, recorded, run_nccl

from lowshard import settings
from lowshard.comm import Communicator
from lowshard.comm.nccl import nccl_communicator
from lowshard.comm.nccl_bindings import Binding, NCCL4Py, NCCL4PyHandle
from lowshard.comm.nccl_memory import FROM_BYTES, NCCLMemory
from lowshard.errors import DependencyError

LOWER = {
    "all_reduce": "allReduce", "reduce_scatter": "reduceScatter", "all_gather": "allGather",
    "broadcast": "broadcast", "send": "send", "recv": "recv", "comm_user_rank": "rank_id", "comm_count": "size",
    "comm_cu_device": "device_id", "comm_get_async_error": "check_async_error",
}  # fmt: skip
"""nccl4py's lower layer, and what CuPy calls the same."""


class Low:
    """nccl4py's lower layer over CuPy's binding; each step of the memory's life must follow the one before it."""

    NCCLError = type("NCCLError", (RuntimeError,), {"status": 0})

    def __init__(self, cupy: Any, made: dict[int, Any]) -> None:
        self.state: dict[int, str] = {}
        self.made, self.failing, self._next = made, "", 1 << 30
        nccl = cupy.cuda.nccl
        self.get_version, self.group_start, self.group_end = nccl.get_version, nccl.groupStart, nccl.groupEnd
        self.Comm = made.get

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if len(args) == 1:  # a question: the communicator
                return getattr(args[0], LOWER[name])()
            *rest, comm, stream = args
            return getattr(comm, LOWER[name])(*rest, stream)

        return call

    def check_status(self, status: int | None) -> None:
        assert not status

    def _step(self, name: str, at: int, *before: str) -> None:
        assert self.state.get(at, "") in before, (name, self.state.get(at))
        if self.failing == name:
            raise self.NCCLError(f"{name} failed")
        self.state[at] = name

    def mem_alloc(self, size: int) -> int:
        self._next += size
        self._step("mem_alloc", self._next, "")
        return self._next

    def comm_register(self, comm: Any, buff: int, size: int) -> int:
        self._step("comm_register", buff, "mem_alloc")
        return -buff

    def comm_deregister(self, comm: Any, handle: int) -> None:
        self._step("comm_deregister", -handle, "comm_register")

    def mem_free(self, ptr: int) -> None:
        self._step("mem_free", ptr, "comm_deregister", "mem_alloc", "aborted")


@pytest.fixture
def low(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Low:
    """The lower layer of an nccl4py that is installed for this test."""
    made: dict[int, Any] = {}
    lower, core, nccl, bindings = (
        Low(cupy, made),
        ModuleType("nccl.core"),
        ModuleType("nccl"),
        ModuleType("nccl.b"),
    )
    core.Communicator = type("Communicator", (), {"__init__": lambda self, ptr=0: setattr(self, "ptr", ptr)})  # type: ignore[attr-defined]
    nccl.core, bindings.nccl = core, lower  # type: ignore[attr-defined]
    for name, module in (("nccl", nccl), ("nccl.core", core), ("nccl.bindings", bindings)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv(settings.NCCL.name, "nccl4py")
    return lower


def test_every_transfer_goes_through_the_lower_layer_with_the_same_arguments(low: Low) -> None:
    binding = Binding.load()

    def check(comm: Communicator) -> None:
        raw, me, n = recorded(comm), comm.rank, comm.size
        low.made[id(raw)] = raw  # CuPy's object gives nccl4py the address of what it made
        over = nccl_communicator(SimpleNamespace(comm=id(raw)), me, n, owned=False, binding=binding)
        assert isinstance(over._transport._handle, NCCL4PyHandle)  # type: ignore[attr-defined]
        one, all_of_it = on_gpu(comm, np.full(4, me + 1.0), np.zeros(4 * n))
        over.all_gather(one, all_of_it)
        same(all_of_it, np.repeat([1.0, 2.0, 3.0], 4))
        over.all_reduce(one, one)
        over.reduce_scatter(all_of_it, one)
        same(one, np.full(4, 3.0 * (me + 1)))
        over.broadcast(one, 1)
        same(one, np.full(4, 6.0))
        over.all_to_all(all_of_it, all_of_it)
        assert {"allGather", "allReduce", "reduceScatter", "broadcast", "send", "recv"} == {
            c[0] for c in raw.moved()
        }
        over.close()

    with pytest.MonkeyPatch.context() as unset:
        unset.delenv(settings.NCCL.name)  # the communicators below it are CuPy's
        run_nccl(3, check)


def test_a_handle_of_nccl4py_and_the_setting_choose_nccl4py(
    low: Low, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = type("Communicator", (), {"__module__": "nccl.core.communicator"})()
    assert isinstance(Binding.load().nccl, NCCL4Py)
    monkeypatch.delenv(settings.NCCL.name)
    assert isinstance(Binding.load(theirs).nccl, NCCL4Py)
    assert not isinstance(Binding.load(SimpleNamespace()).nccl, NCCL4Py)


def test_a_cupy_without_nccl_serves_staging_and_nothing_else(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cupy.cuda.nccl, "available", False)
    refused(Binding.load, DependencyError, "no NCCL library", "lowshard\\[cuda12\\]")
    assert Binding.load(with_nccl=False).nccl is None


# ---- memory


@pytest.mark.parametrize("aborted", [False, True])
def test_memory_is_registered_and_is_freed_only_once_nothing_uses_it(
    low: Low, cupy: Any, aborted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = SimpleNamespace(malloc=lambda n_bytes: memory._malloc(n_bytes, 0), free_all_blocks=lambda: None)
    monkeypatch.setattr(cupy.cuda, "MemoryPool", lambda malloc: pool)
    allocator = lambda malloc, free: SimpleNamespace(malloc=malloc)  # noqa: E731
    monkeypatch.setattr(cupy.cuda, "PythonFunctionAllocator", allocator, raising=False)
    memory = NCCLMemory(low, "comm", cupy)
    with memory.allocating():
        allocate = cupy.cuda.get_allocator()
        small, at, gone = (allocate(n) for n in (FROM_BYTES - 1, FROM_BYTES, FROM_BYTES))
        assert low.state == {at: "comm_register", gone: "comm_register"}
        for low.failing in ("mem_alloc", "comm_register"):
            told = f"{FROM_BYTES} bytes on device 0", f"{low.failing} failed"
            refused(lambda: allocate(FROM_BYTES), MemoryError, *told)
        low.failing = ""
    with host_waits(cupy) as waits:
        memory._free(gone, 0)
    assert (waits, low.state[gone]) == (["deviceSynchronize"], "mem_free"), "what is queued may still use it"
    if aborted:
        low.state[at] = "aborted"  # NCCL has forgotten it: to deregister it would be an error
    memory.close(aborted)
    assert low.state[at] == ("aborted" if aborted else "comm_deregister")
    memory._free(at, 0)  # an array that outlives the communicator
    assert set(low.state.values()) == {"mem_free"}
    del small


@pytest.mark.parametrize("end", ["destroy", "abort"])
def test_a_communicator_gives_its_memory_back_before_it_is_destroyed_and_after_it_is_aborted(
    end: str,
) -> None:
    comm, told = alone(), list[Any]()
    handle = recorded(comm)
    close = lambda aborted: told.append((aborted, handle.ended))  # noqa: E731
    handle.memory = lambda xp: SimpleNamespace(allocating=nullcontext, close=close)
    assert comm.empty(3, "float32").shape == (3,)
    comm._transport._nccl.failed = end == "abort"  # type: ignore[attr-defined]
    comm.close()
    assert told == [(end == "abort", "abort" if end == "abort" else "")]
    assert handle.ended == end
