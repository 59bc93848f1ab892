"""The bindings: which one is taken, and (where they are installed) that the real packages have what is called.

No GPU is needed: NCCL itself answers a call on a null communicator, by name, without touching a device.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.comm_kit import refused
from support.fake_cupy import Cupy
from support.nccl_stand_in import Host, StandInCommunicator, World, run_stand_in

from lowshard import settings
from lowshard.comm import Communicator
from lowshard.comm.nccl import nccl_communicator
from lowshard.comm.nccl_bindings import Binding, NCCL4Py, NCCL4PyHandle, _lock
from lowshard.comm.nccl_wait import last_error
from lowshard.errors import CommError, DependencyError

TRANSFERS: dict[str, tuple[int, ...]] = {
    "allReduce": (0, 0, 1, 7, 0, 0),
    "reduceScatter": (0, 0, 1, 7, 0, 0),
    "allGather": (0, 0, 1, 7, 0),
    "broadcast": (0, 0, 1, 7, 0, 0),
    "send": (0, 1, 7, 0, 0),
    "recv": (0, 1, 7, 0, 0),
}
QUESTIONS = ("rank_id", "size", "device_id", "check_async_error")


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


# ---- the choice


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.NCCL.name, "torch")
    refused(Binding.load, CommError, settings.NCCL.name, "cupy or nccl4py", "'torch'")


@pytest.mark.parametrize("choice", settings.NCCL.values.split("|"))
def test_what_is_missing_is_named_with_what_installs_it(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.NCCL.name, choice)
    without(monkeypatch, "cupy", "nccl", "nccl.core", "nccl.bindings")
    refused(Binding.load, DependencyError, "CuPy", r"pip install 'lowshard\[cuda12\]'")
    refused(lambda: Binding.load(with_nccl=False), DependencyError, "CuPy")
    refused(
        NCCL4Py, DependencyError, "LOWSHARD_NCCL=nccl4py", "pip install", "cuda12-nccl4py", "cuda13-nccl4py"
    )


def test_a_cupy_without_nccl_serves_staging_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Cupy(available=False)
    for name, module in (("cupy", fake), ("cupy.cuda", fake.cuda), ("cupy.cuda.nccl", fake.nccl)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv(settings.NCCL.name, raising=False)
    refused(Binding.load, DependencyError, "no NCCL library", "lowshard\\[cuda12\\]")
    assert Binding.load(with_nccl=False).nccl is None
    fake.nccl.available = True
    assert Binding.load().nccl is fake.nccl


def test_memory_that_cannot_be_locked_is_used_as_it_is() -> None:
    calls: list[tuple[Any, ...]] = []

    def register(*args: int) -> None:
        calls.append(args)
        if len(calls) > 1:
            raise RuntimeError("cudaErrorNotSupported")

    memory = np.zeros(8192, np.uint8)
    runtime = SimpleNamespace(hostRegister=register, hostUnregister=lambda at: calls.append(("undone", at)))
    at = memory.ctypes.data
    _lock(runtime, memory)()
    assert calls == [(at, 8192, 0), ("undone", at)]
    _lock(runtime, memory)()
    assert len(calls) == 3


# ---- nccl4py's side over a stand-in of its lower layer


class Upper:
    """nccl4py's Communicator, as far as it is a place for an address."""

    def __init__(self, ptr: int = 0) -> None:
        self.ptr = ptr


class Lower:
    """nccl4py's lower layer, over the stand-in that has CuPy's names."""

    NCCLError = type("NCCLError", (RuntimeError,), {"status": 0})

    def __init__(self, handle: StandInCommunicator, nccl: Any) -> None:
        self._made = {id(handle): handle}
        self._nccl = nccl
        self.core = SimpleNamespace(Communicator=Upper)

    def get_version(self) -> int:
        return 23007

    def Comm(self, at: int) -> Any:
        return self._made.get(at)

    def group_start(self) -> None:
        self._nccl.groupStart()

    def group_end(self) -> None:
        self._nccl.groupEnd()

    def comm_user_rank(self, comm: StandInCommunicator) -> int:
        return comm.rank_id()

    def comm_count(self, comm: StandInCommunicator) -> int:
        return comm.size()

    def comm_cu_device(self, comm: StandInCommunicator) -> int:
        return comm.device_id()

    def comm_get_async_error(self, comm: StandInCommunicator) -> int:
        comm.check_async_error()
        return 0

    def check_status(self, status: int) -> None:
        assert status == 0

    def all_reduce(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, op: int, comm: Any, stream: int
    ) -> None:
        comm.allReduce(sendbuff, recvbuff, count, datatype, op, stream)

    def reduce_scatter(
        self, sendbuff: int, recvbuff: int, recvcount: int, datatype: int, op: int, comm: Any, stream: int
    ) -> None:
        comm.reduceScatter(sendbuff, recvbuff, recvcount, datatype, op, stream)

    def all_gather(
        self, sendbuff: int, recvbuff: int, sendcount: int, datatype: int, comm: Any, stream: int
    ) -> None:
        comm.allGather(sendbuff, recvbuff, sendcount, datatype, stream)

    def broadcast(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, comm: Any, stream: int
    ) -> None:
        comm.broadcast(sendbuff, recvbuff, count, datatype, root, stream)

    def send(self, sendbuff: int, count: int, datatype: int, peer: int, comm: Any, stream: int) -> None:
        comm.send(sendbuff, count, datatype, peer, stream)

    def recv(self, recvbuff: int, count: int, datatype: int, peer: int, comm: Any, stream: int) -> None:
        comm.recv(recvbuff, count, datatype, peer, stream)


def test_every_transfer_goes_through_nccl4pys_lower_layer_with_the_same_arguments() -> None:
    def check(comm: Communicator) -> None:
        assert comm.transport == "nccl"
        binding, raw, me, n = comm._transport._binding, comm._transport._handle, comm.rank, comm.size
        lower = Lower(raw, binding.nccl)
        nccl = NCCL4Py.__new__(NCCL4Py)
        nccl.core, nccl.low, nccl.NcclError = lower.core, lower, lower.NCCLError
        # CuPy's object gives nccl4py the address of what it made.
        cupys = SimpleNamespace(comm=id(raw))
        over = nccl_communicator(
            cupys, me, n, comm.control, binding=Binding(**{**vars(binding), "nccl": nccl})
        )
        assert isinstance(over._transport._handle, NCCL4PyHandle)
        assert over._transport._handle.comm == id(raw)
        one, all_of_it = np.full(4, me + 1.0), np.zeros(4 * n)
        over.all_gather(one, all_of_it)
        assert all_of_it.reshape(n, 4)[:, 0].tolist() == [1.0, 2.0, 3.0]
        over.all_reduce(one, one)
        over.reduce_scatter(all_of_it, one)
        assert one.tolist() == [3.0 * (me + 1)] * 4
        over.broadcast(one, 1)
        assert one.tolist() == [6.0] * 4
        over.all_to_all(all_of_it, all_of_it)
        names = [call[0] for call in raw.calls]
        assert {"allGather", "allReduce", "reduceScatter", "broadcast", "send", "recv"} <= set(names)

    run_stand_in(3, check)


def test_a_handle_of_nccl4py_chooses_nccl4py(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    monkeypatch.setattr("lowshard.comm.nccl_bindings._load_cupy", lambda: Cupy(True))
    monkeypatch.setattr("lowshard.comm.nccl_bindings.NCCL4Py", lambda: chosen.append("nccl4py"))
    monkeypatch.setattr("lowshard.comm.nccl_bindings._load_cupys_nccl", lambda: chosen.append("cupy"))
    monkeypatch.delenv(settings.NCCL.name, raising=False)
    theirs = type("Communicator", (), {"__module__": "nccl.core.communicator"})()
    Binding.load(theirs)
    Binding.load(SimpleNamespace())
    monkeypatch.setenv(settings.NCCL.name, "nccl4py")
    Binding.load()
    assert chosen == ["nccl4py", "cupy", "nccl4py"]


# ---- the real packages


@pytest.fixture
def cupys_nccl() -> Any:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from cupy.cuda import nccl

    if not nccl.available:
        pytest.skip("CuPy finds no NCCL library")
    return nccl


@pytest.fixture
def nccl4py() -> NCCL4Py:
    pytest.importorskip("nccl.core", reason="nccl4py is not installed", exc_type=ImportError)
    return NCCL4Py()


def arguments_of(function: Any) -> list[str]:
    """Return the names of the arguments in the first line of a Cython function's docstring, without self."""
    line = function.__doc__.splitlines()[0].split("(", 1)[1].rpartition(")")[0]
    return [part.split()[-1].split("=")[0] for part in line.split(", ") if part and part != "self"]


def test_the_stand_in_has_cupys_names_and_arguments(cupys_nccl: Any) -> None:
    assert cupys_nccl.NcclError(4).status == 4
    for status in (7, 8):
        with pytest.raises(KeyError):
            cupys_nccl.NcclError(status)
    for name in ("groupStart", "groupEnd"):
        assert callable(getattr(cupys_nccl, name))
    for name, method in vars(StandInCommunicator).items():
        if name.startswith("_") or name == "run" or not callable(method):
            continue
        given = arguments_of(getattr(cupys_nccl.NcclCommunicator, name))
        assert len(given) == len(inspect.signature(method).parameters) - 1, f"{name}: {given}"


def test_nccl4py_has_the_names_and_arguments_that_are_called(nccl4py: NCCL4Py) -> None:
    for name, method in vars(Lower).items():
        if name.startswith("_") or not callable(method) or name in ("Comm", "NCCLError"):
            continue
        theirs = list(inspect.signature(getattr(nccl4py.low, name)).parameters)
        assert theirs == list(inspect.signature(method).parameters)[1:], name
    for name, wanted in (
        ("mem_alloc", ["size"]),
        ("mem_free", ["ptr"]),
        ("comm_register", ["comm", "buff", "size"]),
        ("comm_deregister", ["comm", "handle"]),
    ):
        assert list(inspect.signature(getattr(nccl4py.low, name)).parameters) == wanted
    communicator = nccl4py.core.Communicator
    for method, wanted in (
        (communicator.init, ["nranks", "rank", "unique_id"]),
        (communicator.split, ["self", "color", "key"]),
        (communicator.abort, ["self"]),
        (communicator.destroy, ["self"]),
        (communicator.__init__, ["self", "ptr"]),
    ):
        assert list(inspect.signature(method).parameters)[: len(wanted)] == wanted
    assert nccl4py.core.Communicator().ptr == 0
    assert "Comm(" in nccl4py.low.Comm.__doc__


def check_null(handle: Any, error: type[Exception], complain: Callable[[], str]) -> None:
    """Demand that NCCL itself takes each call and refuses it for its communicator alone."""
    for name, args in [*TRANSFERS.items(), *((name, ()) for name in QUESTIONS)]:
        with pytest.raises(error) as caught:
            getattr(handle, name)(*args)
        assert caught.value.status == 4, name  # type: ignore[attr-defined]
        assert "comm argument is NULL" in complain(), name
        assert (name[0].upper() + name[1:] in complain()) == (name in TRANSFERS), complain()


def test_cupy_hands_every_call_to_nccl(cupys_nccl: Any) -> None:
    null = cupys_nccl.NcclCommunicator.__new__(cupys_nccl.NcclCommunicator)
    assert null.comm == 0
    check_null(null, cupys_nccl.NcclError, last_error)
    null.abort()
    null.destroy()


def test_nccl4py_hands_every_call_to_nccl_for_whoevers_communicator(
    cupys_nccl: Any, nccl4py: NCCL4Py
) -> None:
    cupys = cupys_nccl.NcclCommunicator.__new__(cupys_nccl.NcclCommunicator)
    for given in (cupys, nccl4py.core.Communicator(), 0):
        handle = nccl4py.adopt(given)
        assert handle.comm == 0
        assert nccl4py.adopt(handle) is handle
        check_null(handle, nccl4py.NcclError, last_error)
        handle.abort()
        handle.destroy()


def test_both_load_one_nccl_library(cupys_nccl: Any, nccl4py: NCCL4Py) -> None:
    assert nccl4py.get_version() == cupys_nccl.get_version()
    ids = [nccl4py.get_unique_id(), cupys_nccl.get_unique_id()]
    assert [len(made) for made in ids] == [128, 128]
    assert ids[0] != ids[1]
    nccl4py.groupStart()
    nccl4py.groupEnd()


def test_nccl4py_reads_a_unique_id_and_connects_as_far_as_there_is_a_gpu(nccl4py: NCCL4Py) -> None:
    cupy = pytest.importorskip("cupy")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except RuntimeError:
        count = 0
    if count:
        pytest.skip("there is a GPU: tests/gpu connects")
    with pytest.raises(nccl4py.NcclError) as caught:
        nccl4py.NcclCommunicator(1, nccl4py.get_unique_id(), 0)
    assert caught.value.status == 1  # a CUDA error: everything before it was as NCCL wants it


def test_an_error_carries_nccls_own_words(cupys_nccl: Any) -> None:
    null = cupys_nccl.NcclCommunicator.__new__(cupys_nccl.NcclCommunicator)
    host = Host()
    binding = Binding(**{**vars(host.binding()), "nccl": cupys_nccl})
    stand_in = StandInCommunicator(World(1), 0, host)
    comm = nccl_communicator(stand_in, 0, 1, binding=binding)
    comm._transport._handle = null
    refused(
        lambda: comm.broadcast(np.zeros(3)),
        CommError,
        "failed in broadcast",
        "Broadcast : comm argument is NULL",
    )
