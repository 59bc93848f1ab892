"""What ranks choose for GPU arrays, over a stand-in for CuPy; rank 0 prints the names of the checks that held.

Usage: run_gpu_choice.py [cases], where "cases" runs the case table on staged communicators instead.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
import warnings
from collections.abc import Callable
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from mpi4py import MPI
from support.comm_cases import Way, cases_for, run_case
from support.comm_kit import outcome, same
from support.nccl_stand_in import Host

from lowshard.comm import Communicator, nccl_over_mpi
from lowshard.comm.build import build_host
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.nccl_over_mpi import barrier_within, build_over_mpi
from lowshard.comm.staged import staged_communicator
from lowshard.errors import DependencyError

WORLD = MPI.COMM_WORLD
N, RANK = WORLD.size, WORLD.rank
CONNECTED: list[tuple[int, int, bytes]] = []


class Numpy(ModuleType):
    """NumPy with the few things of cupy.cuda that the choice of a GPU asks for."""

    def __init__(self, gpus: int) -> None:
        super().__init__("cupy")
        self.__dict__.update({k: v for k, v in vars(np).items() if not k.startswith("__")})
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                getDeviceCount=lambda: gpus,
                deviceGetPCIBusId=lambda d: "0000:01:00.0",  # as parts of one GPU (MIG) have it
                getDeviceProperties=lambda d: {"uuid": bytes([d] * 16)},
            )
        )


class Nccl:
    """As far as connecting goes; the communicators it makes tell where they would be."""

    NcclError = type("NcclError", (RuntimeError,), {"status": 2})

    def __init__(self, version: int) -> None:
        self.version = version

    def get_version(self) -> int:
        return self.version

    def get_unique_id(self) -> bytes:
        return bytes(range(128))

    def NcclCommunicator(self, size: int, unique_id: bytes, rank: int) -> Any:
        CONNECTED.append((size, rank, unique_id))
        return SimpleNamespace(
            rank_id=lambda: rank, size=lambda: size, device_id=lambda: rank, check_async_error=lambda: None,
            destroy=lambda: None, send=nothing, recv=nothing, allReduce=nothing, allGather=nothing,
        )  # fmt: skip

    def groupStart(self) -> None:
        pass

    def groupEnd(self) -> None:
        pass


def nothing(*args: object) -> None:
    """Stand in for a transfer whose result nobody reads."""


def install(gpus: int, version: int | None = 23007) -> Host:
    """Let this process find so many GPUs and this NCCL; None: no NCCL."""
    host = Host()
    host.device_of = lambda array: host.selected[-1][1] if host.selected else 0
    host.need_device = lambda what: None  # type: ignore[method-assign]  # which one it is these checks find out
    host.stream_of = lambda device_id=-1: host.stream  # type: ignore[method-assign]

    def load(handle: Any = None, *, with_nccl: bool = True) -> Binding:
        if with_nccl and version is None:
            raise DependencyError("CuPy finds no NCCL library: install one")
        made = {**vars(host.binding()), "xp": Numpy(gpus), "nccl": Nccl(version or 0) if with_nccl else None}
        return Binding(**made)

    nccl_over_mpi.Binding = SimpleNamespace(load=load)  # type: ignore[misc, assignment]
    return host


@cache
def whole() -> Communicator:
    return build_host(WORLD)


def beside() -> Communicator:
    """Return a fresh communicator of the host over all ranks."""
    group = whole().split(0)
    assert group is not None
    return group


def made(transport: str) -> tuple[Any, list[str]]:
    """Return the communicator that is built, and the warnings of that."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm = build_over_mpi(beside(), transport=transport)  # type: ignore[arg-type]
    return comm, [str(w.message) for w in caught if w.category is RuntimeWarning]


def alike(text: str) -> bool:
    return len(set(WORLD.allgather(hashlib.sha256(text.encode()).digest()))) == 1


def check_sum(comm: Any) -> None:
    buf = comm.empty(3, "float64")
    buf[...] = RANK + 1.0
    comm.all_reduce(buf, buf)
    same(buf, np.full(3, N * (N + 1) / 2))


def ranks_that_share_a_gpu_are_staged_with_one_warning_that_says_what_to_set() -> None:
    host = install(gpus=1)
    comm, said = made("auto")
    assert comm.transport == "staged"
    assert comm.xp.__name__ == "cupy"
    assert len(said) == (RANK == 0), said
    if RANK == 0:
        assert f"{N} ranks of this node have 1 GPUs" in said[0]
        for word in ("NCCL_MULTI_RANK_GPU_ENABLE=1", "NCCL 2.30.3", "loaded: 2.30.7", "transport='staged'"):
            assert word in said[0], said
    assert host.selected[0][1] == 0
    check_sum(comm)
    comm.close()


def asking_for_staged_is_no_cause_for_a_warning_and_needs_no_nccl() -> None:
    install(gpus=1, version=None)
    comm, said = made("staged")
    assert (comm.transport, said) == ("staged", [])
    check_sum(comm)
    comm.close()


def a_rank_without_nccl_makes_all_stage() -> None:
    install(gpus=N, version=None if RANK == N - 1 else 23007)
    comm, said = made("auto")
    assert comm.transport == "staged"
    assert len(said) == (RANK == 0), said
    assert RANK or "CuPy finds no NCCL library" in said[0]
    comm.close()


def asking_for_nccl_is_refused_alike_on_all_ranks_where_it_cannot_be() -> None:
    for gpus, version, name, word in (
        (1, 23007, "CommError", "NCCL_MULTI_RANK_GPU_ENABLE=1"),
        (N, None if RANK == 0 else 23007, "DependencyError", "no NCCL library"),
    ):
        install(gpus, version)
        got, text = outcome(lambda: made("nccl"))
        assert got == name, text
        assert word in text
        assert alike(text)


def a_rank_without_a_gpu_is_refused_alike_on_all_ranks() -> None:
    for transport in ("auto", "nccl", "staged"):
        install(gpus=0 if RANK == 1 else 2)
        name, text = outcome(lambda t=transport: made(t))
        assert name == "DependencyError", text
        assert "rank 1" in text
        assert "sees no CUDA device" in text
        assert alike(text)


def different_versions_or_wishes_are_a_mismatch() -> None:
    install(gpus=N, version=23007 if RANK else 22809)
    name, text = outcome(lambda: made("auto"))
    assert name == "MismatchError"
    assert "00022809" in text
    install(gpus=N)
    name, text = outcome(lambda: made("nccl" if RANK else "staged"))
    assert name == "MismatchError", text
    name, text = outcome(lambda: made("mpi"))
    assert name == "CommError"
    assert "'auto', 'nccl', 'staged'" in text


def ranks_with_a_gpu_each_are_connected_with_one_id() -> None:
    host = install(gpus=N)
    CONNECTED.clear()
    comm, said = made("auto")
    assert (comm.transport, said) == ("nccl", [])
    assert [(N, RANK, bytes(range(128)))] == CONNECTED
    assert comm.control.transport == "mpi"
    # On the thread that connects, too.
    assert {device for _, device in host.selected} == {RANK}
    assert "NCCL" in host.selected[1][0]
    comm.close()


def sharing_a_gpu_is_left_to_nccl_where_it_can_and_may() -> None:
    install(gpus=1)
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    try:
        CONNECTED.clear()
        comm, said = made("auto")
        assert (comm.transport, said) == ("nccl", [])
        comm.close()
    finally:
        del os.environ["NCCL_MULTI_RANK_GPU_ENABLE"]


def a_rank_that_does_not_come_is_found_before_nccl_connects() -> None:
    own = WORLD.Dup()
    begun = time.monotonic()
    if RANK:
        name, text = outcome(lambda: barrier_within(own, 0.3, None, "the barrier before NCCL connects"))
        assert name == "TimedOut"
        assert text.startswith("the barrier before NCCL connects was not done after 0.3")
        assert time.monotonic() - begun < 5.0
    WORLD.Barrier()
    barrier_within(WORLD, 20.0)
    if RANK == 0:
        own.Ibarrier()  # so that the others' ends


CHECKS: list[Callable[[], None]] = [
    ranks_that_share_a_gpu_are_staged_with_one_warning_that_says_what_to_set,
    asking_for_staged_is_no_cause_for_a_warning_and_needs_no_nccl,
    a_rank_without_nccl_makes_all_stage,
    asking_for_nccl_is_refused_alike_on_all_ranks_where_it_cannot_be,
    a_rank_without_a_gpu_is_refused_alike_on_all_ranks,
    different_versions_or_wishes_are_a_mismatch,
    ranks_with_a_gpu_each_are_connected_with_one_id,
    sharing_a_gpu_is_left_to_nccl_where_it_can_and_may,
    a_rank_that_does_not_come_is_found_before_nccl_connects,
]


def run_cases() -> None:
    for name in cases_for(Way(N, "staged")):
        host = Host()
        comm = staged_communicator(beside(), host.binding(with_nccl=False), slot_bytes=50_000)
        run_case(name, comm)
        host.synchronize()
        comm.close()
        if RANK == 0:
            print(name, flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["cases"]:
        run_cases()
    else:
        for check in CHECKS:
            check()
            WORLD.Barrier()
            if RANK == 0:
                print(check.__name__, flush=True)
