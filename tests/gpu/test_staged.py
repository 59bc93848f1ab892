"""The staged communicator on real GPUs: the case table on one rank and on ranks that share a GPU; streams, overlap."""

from __future__ import annotations

import numpy as np
import pytest
from support.case_table import GPU_LIMIT_S, cases_of_jobs, check_case
from support.comm_cases import Way, cases_for, run_case
from support.comm_kit import same
from support.gpu import busy, warm_up, why_no_gpu

from lowshard import comm as lc
from lowshard.comm import Communicator
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.staged import staged_communicator

NO_GPU = why_no_gpu()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NO_GPU is not None, reason=f"CuPy cannot be used here: {NO_GPU}"),
]


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Leave nothing to compile for the time in which a stream is busy."""
    warm_up(Binding.load(with_nccl=False).xp)


def alone(slot_bytes: int = 1 << 20) -> Communicator:
    """Return a communicator of one rank."""
    (beside,) = lc.loopback(1)
    return staged_communicator(beside, Binding.load(with_nccl=False), slot_bytes=slot_bytes)


@pytest.mark.parametrize("name", cases_for(Way(1, "staged", on_gpu=True)))
def test_the_contract_holds_on_one_gpu(name: str) -> None:
    with alone(5000) as comm:
        run_case(name, comm)


@pytest.mark.mpi
@pytest.mark.time_limit(GPU_LIMIT_S + 30)
@pytest.mark.parametrize("path", ["auto", "mpi"])
@pytest.mark.parametrize(("name", "size"), cases_of_jobs([2], "staged"))
def test_the_contract_holds_on_two_ranks_that_share_a_gpu(name: str, size: int, path: str) -> None:
    check_case(name, size, "staged", CUDA_VISIBLE_DEVICES="0", LOWSHARD_CPU_PATH=path)


def test_page_locked_memory_is_page_locked() -> None:
    cupy = Binding.load(with_nccl=False).xp
    with alone() as comm:
        buf = cupy.ones(1000)
        comm.all_reduce(buf, buf)
        address = comm._transport._own_slots._slots[0].address
        assert cupy.cuda.runtime.pointerGetAttributes(address).type == cupy.cuda.runtime.memoryTypeHost


@pytest.mark.parametrize("elems", [10, 3_000_000])
def test_only_the_callers_stream_is_waited_for(elems: int) -> None:
    cupy = Binding.load(with_nccl=False).xp
    other, mine = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    with alone() as comm:
        with other:
            busy(cupy, 1.0)
            queued = other.record()
        with mine:
            buf = cupy.full(elems, 2.0)
            busy(cupy, 0.05)
            buf += 1
            comm.all_reduce(buf, buf)
            result = buf * 2
            assert not queued.done, "the other stream was waited for"
            mine.synchronize()
            same(result[:3], np.full(3, 6.0))
            same(result[-3:], np.full(3, 6.0))
        other.synchronize()


def test_slots_are_not_written_while_another_stream_still_copies_from_them() -> None:
    cupy = Binding.load(with_nccl=False).xp
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    with alone(1 << 16) as comm:
        bufs = []
        for i in range(60):
            with streams[i % 3]:
                buf = cupy.full(50_000, float(i))
                if i % 7 == 0:
                    busy(cupy, 0.01)
                comm.all_reduce(buf, buf)
                bufs.append(buf)
        for stream in streams:
            stream.synchronize()
        for i, buf in enumerate(bufs):
            assert bool((buf == i).all()), i


def test_a_started_call_runs_beside_the_callers_stream() -> None:
    cupy = Binding.load(with_nccl=False).xp
    with alone() as comm, cupy.cuda.Stream(non_blocking=True) as stream:
        buf = cupy.full(100_000, 3.0)
        work = comm.start.all_reduce(buf, buf)
        busy(cupy, 1.0)
        queued = stream.record()
        work.wait(timeout_s=20.0)
        assert not queued.done, "it waited for what was queued after it"
        result = buf + 1
        stream.synchronize()
        same(result[:3], np.full(3, 4.0))
