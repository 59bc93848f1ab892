"""The NCCL communicator on real GPUs: the case table on one rank, on all GPUs, and on ranks that share one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.case_table import CASES, LIMIT_S, check_case
from support.comm_cases import CannotRun, run_case
from support.comm_kit import refused, same
from support.starting import start_ranks

from lowshard import comm as lc
from lowshard.comm.nccl import Binding
from lowshard.comm.nccl_over_mpi import why_unusable
from lowshard.errors import BufferMismatchError

REASON = why_unusable()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(REASON is not None, reason=f"NCCL cannot be used here: {REASON}"),
]


def gpus() -> int:
    """Return the number of GPUs that NCCL can use here; 0 where it cannot."""
    return 0 if REASON else int(Binding.load().xp.cuda.runtime.getDeviceCount())


def nccl_version() -> int:
    """Return the loaded NCCL's version, 23007 for 2.30.7; 0 where there is none."""
    return 0 if REASON else int(Binding.load().nccl.get_version())


@pytest.fixture(scope="module")
def handle() -> Iterator[Any]:
    """An NCCL communicator of one rank, made and ended by the caller of lowshard."""
    nccl = Binding.load().nccl
    made = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    yield made
    made.destroy()


@pytest.mark.parametrize("name", CASES)
def test_the_contract_holds_on_one_gpu(name: str, handle: Any) -> None:
    with lc.from_nccl(handle, 0, 1) as comm:
        try:
            run_case(name, comm)
        except CannotRun as reason:
            pytest.skip(str(reason))


@pytest.mark.mpi
@pytest.mark.time_limit(LIMIT_S + 30)
@pytest.mark.skipif(gpus() < 2, reason=f"this machine has {gpus()} GPU(s); at least 2 are needed")
@pytest.mark.parametrize("name", CASES)
def test_the_contract_holds_on_all_gpus(name: str) -> None:
    check_case(name, gpus(), "cuda")


@pytest.mark.mpi
@pytest.mark.time_limit(LIMIT_S + 30)
@pytest.mark.skipif(nccl_version() < 23003, reason=f"NCCL 2.30.3 is needed, loaded is {nccl_version()}")
@pytest.mark.parametrize("name", CASES)
def test_the_contract_holds_on_two_ranks_that_share_a_gpu(name: str) -> None:
    check_case(
        name,
        2,
        "cuda",
        CUDA_VISIBLE_DEVICES="0",
        NCCL_MULTI_RANK_GPU_ENABLE="1",
        NCCL_NVLS_ENABLE="0",  # it cannot be shared
        NCCL_MAX_CTAS="2",  # all ranks' blocks must be resident at once
    )


@pytest.mark.mpi
def test_ranks_that_share_a_gpu_are_refused_on_all_ranks_without_the_switch(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from mpi4py import MPI\nfrom lowshard import comm as lc\nfrom lowshard.errors import CommError\n"
        "try:\n    lc.from_mpi(MPI.COMM_WORLD, 'cuda')\n"
        "except CommError as error:\n    print(error)\n"
    )
    env = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_MULTI_RANK_GPU_ENABLE": "0"}
    ended = start_ranks(script, 2, timeout_s=60, env=env, prefix_output=True).ok()
    lines = sorted(ended.stdout.splitlines())
    assert [line[:4] for line in lines] == ["[0] ", "[1] "]
    assert lines[0][4:] == lines[1][4:]
    assert "2 ranks of this node have 1 GPUs" in lines[0]


def test_calls_are_queued_on_the_current_stream(handle: Any) -> None:
    cupy = Binding.load().xp
    comm = lc.from_nccl(handle, 0, 1)
    stream = cupy.cuda.Stream(non_blocking=True)
    done = cupy.cuda.Event()
    with stream:
        a = cupy.full((3000, 3000), 1e-3, cupy.float32)
        for _ in range(20):  # keeps the stream busy for a while
            a = a @ a
            a /= cupy.abs(a).max()
        value = a[:1, :8].reshape(-1).copy()
        total = cupy.zeros(8, cupy.float32)
        comm.all_reduce(value, total)
        done.record(stream)
        waited = not done.done  # the call came back before the work before it was done
        doubled = total * 2
    stream.synchronize()
    assert waited
    same(doubled, value.get() * 2)


def test_a_host_array_is_refused(handle: Any) -> None:
    comm = lc.from_nccl(handle, 0, 1)
    buf = np.zeros(4)
    refused(lambda: comm.all_reduce(buf, buf), BufferMismatchError, "cupy array, got ndarray")


def test_closing_leaves_the_callers_communicator_alone(handle: Any) -> None:
    lc.from_nccl(handle, 0, 1).close()
    comm = lc.from_nccl(handle, 0, 1)
    buf = comm.xp.ones(3)
    comm.broadcast(buf)
    same(buf, np.ones(3))
