"""What ranks choose for GPU arrays, over the checker with other numbers of GPUs and versions of NCCL.

Rank 0 prints the names of the checks that held.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import cupy
import numpy as np
from mpi4py import MPI
from support.comm_kit import outcome, same
from support.gpu import on_gpu

from lowshard.comm import Communicator
from lowshard.comm.build import build_host
from lowshard.comm.nccl_over_mpi import build_over_mpi

os.environ.pop("NCCL_MULTI_RANK_GPU_ENABLE", None)  # as it is without the checker
WORLD = MPI.COMM_WORLD
N, RANK = WORLD.size, WORLD.rank
HERE = threading.local()
SELECTED: list[tuple[str, int]] = []


def select(device: int) -> None:
    HERE.device = device
    SELECTED.append((threading.current_thread().name, device))


def install(gpus: int, version: int | None = 23007) -> None:
    """Let this process find so many GPUs and this NCCL; None: no NCCL."""
    runtime, nccl = cupy.cuda.runtime, cupy.cuda.nccl
    runtime.getDeviceCount = lambda: gpus
    runtime.getDevice, runtime.setDevice = lambda: getattr(HERE, "device", 0), select
    runtime.deviceGetPCIBusId = lambda device: f"0000:{device:02x}:00.0"
    nccl.available, nccl.get_version = version is not None, lambda: version
    nccl.NcclCommunicator.device_id = lambda self: RANK % max(gpus, 1)
    cupy.ndarray.device = property(lambda self: cupy.cuda.Device(RANK % max(gpus, 1)))
    SELECTED.clear()


@cache
def whole() -> Communicator:
    return build_host(WORLD)


def made(transport: str) -> tuple[Any, list[str]]:
    """Return the communicator that is built over a fresh one of the host, and the warnings of that."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm = build_over_mpi(whole().split(0), transport=transport)  # type: ignore[arg-type]
    return comm, [str(w.message) for w in caught if w.category is RuntimeWarning]


def works(transport: str, way: str) -> list[str]:
    """Build a communicator that goes a way, and use it; return the warnings."""
    comm, said = made(transport)
    assert comm.transport == way, (comm.transport, said)
    assert comm.control.transport == "mpi"
    with comm:
        buf = on_gpu(comm, np.full(3, RANK + 1.0))
        comm.all_reduce(buf, buf)
        same(buf, np.full(3, N * (N + 1) / 2))
    return said


def refused_alike(transport: str, cls: str, *words: str) -> None:
    name, text = outcome(lambda: made(transport))
    assert name == cls, text
    assert all(word in text for word in words), text
    assert len(set(WORLD.allgather(text))) == 1


def ranks_that_share_a_gpu_are_staged_with_one_warning_that_says_what_to_set() -> None:
    install(gpus=1)
    said = works("auto", "staged")
    assert len(said) == (RANK == 0), said
    for word in (f"{N} ranks of this node have 1 GPUs", "NCCL_MULTI_RANK_GPU_ENABLE=1", "loaded: 2.30.7"):
        assert RANK or word in said[0], said
    refused_alike("nccl", "CommError", "NCCL_MULTI_RANK_GPU_ENABLE=1")


def asking_for_staged_is_no_cause_for_a_warning_and_needs_no_nccl() -> None:
    install(gpus=1, version=None)
    assert works("staged", "staged") == []


def a_rank_without_nccl_makes_all_stage_or_is_refused() -> None:
    install(gpus=N, version=None if RANK == N - 1 else 23007)
    said = works("auto", "staged")
    assert len(said) == (RANK == 0), said
    assert RANK or "CuPy finds no NCCL library" in said[0]
    refused_alike("nccl", "DependencyError", "no NCCL library")


def a_rank_without_a_gpu_is_refused_alike_on_all_ranks() -> None:
    for transport in ("auto", "nccl", "staged"):
        install(gpus=0 if RANK == 1 else 2)
        refused_alike(transport, "DependencyError", "rank 1", "sees no CUDA device")


def different_versions_or_wishes_are_a_mismatch() -> None:
    install(gpus=N, version=23007 if RANK else 22809)
    refused_alike("auto", "MismatchError", "00022809")
    install(gpus=N)
    assert outcome(lambda: made("nccl" if RANK else "staged"))[0] == "MismatchError"
    refused_alike("mpi", "CommError", "'auto', 'nccl', 'staged'")


def ranks_with_a_gpu_each_are_connected() -> None:
    install(gpus=N)
    assert works("auto", "nccl") == []
    assert {device for _, device in SELECTED} == {RANK}
    assert any("NCCL" in name for name, _ in SELECTED), "on the thread that connects, too"


def sharing_a_gpu_is_left_to_nccl_where_it_can_and_may() -> None:
    install(gpus=1)
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    cupy.cuda.nccl.NcclCommunicator.device_id = lambda self: 0
    cupy.ndarray.device = property(lambda self: cupy.cuda.Device(0))
    try:
        assert works("auto", "nccl") == []
    finally:
        del os.environ["NCCL_MULTI_RANK_GPU_ENABLE"]


CHECKS: list[Callable[[], None]] = [
    ranks_that_share_a_gpu_are_staged_with_one_warning_that_says_what_to_set,
    asking_for_staged_is_no_cause_for_a_warning_and_needs_no_nccl,
    a_rank_without_nccl_makes_all_stage_or_is_refused,
    a_rank_without_a_gpu_is_refused_alike_on_all_ranks,
    different_versions_or_wishes_are_a_mismatch,
    ranks_with_a_gpu_each_are_connected,
    sharing_a_gpu_is_left_to_nccl_where_it_can_and_may,
]

if __name__ == "__main__":
    for check in CHECKS:
        check()
        WORLD.Barrier()
        if RANK == 0:
            print(check.__name__, flush=True)
