"""What must be installed, and (where they are) that the real packages have what is called.

No GPU is needed: NCCL itself answers a call on a null communicator, by name, without touching a device.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from support.comm_kit import refused
from support.gpu import why_no_gpu

from lowshard import settings
from lowshard.comm.nccl_bindings import Binding, NCCL4Py
from lowshard.comm.nccl_over_mpi import crowding, why_unusable
from lowshard.comm.nccl_wait import last_error
from lowshard.errors import CommError, DependencyError

TRANSFERS: dict[str, tuple[int, ...]] = {
    "allReduce": (0, 0, 1, 7, 0, 0), "reduceScatter": (0, 0, 1, 7, 0, 0), "allGather": (0, 0, 1, 7, 0),
    "broadcast": (0, 0, 1, 7, 0, 0), "send": (0, 1, 7, 0, 0), "recv": (0, 1, 7, 0, 0),
}  # fmt: skip
QUESTIONS = ("rank_id", "size", "device_id", "check_async_error")
NCCL4PY = {
    "all_reduce": "sendbuff recvbuff count datatype op comm stream",
    "reduce_scatter": "sendbuff recvbuff recvcount datatype op comm stream",
    "all_gather": "sendbuff recvbuff sendcount datatype comm stream",
    "broadcast": "sendbuff recvbuff count datatype root comm stream",
    "send": "sendbuff count datatype peer comm stream", "recv": "recvbuff count datatype peer comm stream",
    "mem_alloc": "size", "mem_free": "ptr", "comm_register": "comm buff size", "comm_deregister": "comm handle",
    "comm_user_rank": "comm", "comm_count": "comm", "comm_cu_device": "comm", "comm_get_async_error": "comm",
}  # fmt: skip


def test_an_unknown_choice_and_what_is_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.NCCL.name, "torch")
    refused(Binding.load, CommError, settings.NCCL.name, "cupy or nccl4py", "'torch'")
    for name in ("cupy", "nccl", "nccl.core", "nccl.bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    for choice in settings.NCCL.values.split("|"):
        monkeypatch.setenv(settings.NCCL.name, choice)
        refused(Binding.load, DependencyError, "CuPy", r"pip install 'lowshard\[cuda12\]'")
    refused(
        NCCL4Py, DependencyError, "LOWSHARD_NCCL=nccl4py", "pip install", "cuda12-nccl4py", "cuda13-nccl4py"
    )
    assert "CuPy" in str(why_unusable())


def test_importing_the_module_does_not_import_cupy() -> None:
    code = "import sys, lowshard.comm.nccl_over_mpi; assert not {'cupy', 'mpi4py'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_ranks_that_share_a_gpu_are_refused_unless_nccl_can_and_may() -> None:
    may = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    assert crowding(["0:1", "0:2"], 22809, {}) is None
    assert crowding(["0:1", "", ""], 22809, {}) is None  # what has no GPU has another error
    for version, environ in ((22809, may), (23007, {}), (23007, {"NCCL_MULTI_RANK_GPU_ENABLE": "0"})):
        assert "3 ranks of this node have 2 GPUs" in str(crowding(["0:1", "0:2", "0:1"], version, environ))
    assert "loaded: 2.28.9" in str(crowding(["0:1", "0:1"], 22809, may))
    assert crowding(["0:1", "0:1"], 23007, may) is None


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


def check_null(handle: Any, error: type[Exception], complain: Callable[[], str]) -> None:
    """Demand that NCCL itself takes each call and refuses it for its communicator alone."""
    for name, args in [*TRANSFERS.items(), *((name, ()) for name in QUESTIONS)]:
        with pytest.raises(error) as caught:
            getattr(handle, name)(*args)
        assert caught.value.status == 4, name  # type: ignore[attr-defined]
        assert "comm argument is NULL" in complain(), name
        assert (name[0].upper() + name[1:] in complain()) == (name in TRANSFERS), complain()


def test_cupy_hands_every_call_to_nccl_whose_words_are_told(cupys_nccl: Any) -> None:
    null = cupys_nccl.NcclCommunicator.__new__(cupys_nccl.NcclCommunicator)
    assert null.comm == 0
    check_null(null, cupys_nccl.NcclError, last_error)
    null.abort()
    null.destroy()
    for status in (7, 8):
        with pytest.raises(KeyError):  # the table of names ends at 6
            cupys_nccl.NcclError(status)


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
    assert nccl4py.get_version() == cupys_nccl.get_version()
    nccl4py.groupStart()
    nccl4py.groupEnd()


def test_nccl4py_has_the_names_and_arguments_that_are_called(nccl4py: NCCL4Py) -> None:
    for name, wanted in NCCL4PY.items():
        assert list(inspect.signature(getattr(nccl4py.low, name)).parameters) == wanted.split(), name
    theirs = nccl4py.core.Communicator
    methods = {"init": "nranks rank unique_id", "split": "self color key", "abort": "self", "destroy": "self"}
    for name, wanted in methods.items():
        given = list(inspect.signature(getattr(theirs, name)).parameters)
        assert given[: len(wanted.split())] == wanted.split(), name
    assert "Comm(" in nccl4py.low.Comm.__doc__
    if why_no_gpu() is not None:
        with pytest.raises(nccl4py.NcclError) as caught:
            nccl4py.NcclCommunicator(1, nccl4py.get_unique_id(), 0)
        assert caught.value.status == 1  # a CUDA error: everything before it was as NCCL wants it
