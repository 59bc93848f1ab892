"""NCCL on real GPUs: the case table on one rank, on all GPUs, on ranks that share one; streams, starts, waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.case_table import CASES, GPU_LIMIT_S, cases_of_jobs, check_case
from support.comm_cases import Way, cases_for, run_case
from support.comm_kit import refused, same
from support.gpu import REASON, SHARED_GPU, busy, gpus, nccl_version, version_text, warm_up
from support.starting import start_ranks

from lowshard import comm as lc
from lowshard.comm import Communicator
from lowshard.comm.nccl import nccl_communicator
from lowshard.comm.nccl_bindings import Binding
from lowshard.errors import BufferMismatchError, CommError, TimedOut

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(REASON is not None, reason=f"NCCL cannot be used here: {REASON}"),
]

sharing = pytest.mark.skipif(
    nccl_version() < 23003,
    reason=f"several ranks on one GPU need NCCL 2.30.3, and {version_text()} is loaded: install a newer "
    "nvidia-nccl-cu12 or -cu13, or preload its libnccl.so.2 (docs/bare-machine.md)",
)


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Leave nothing to compile for the time in which a stream is busy."""
    warm_up(Binding.load(with_nccl=False).xp)


@pytest.fixture(scope="module")
def handle() -> Iterator[Any]:
    """An NCCL communicator of one rank, made and ended by the caller of lowshard."""
    nccl = Binding.load().nccl
    made = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    yield made
    made.destroy()


def new(**options: Any) -> Communicator:
    """Return a communicator of one rank that owns its NCCL communicator."""
    binding = Binding.load()
    made = binding.nccl.NcclCommunicator(1, binding.nccl.get_unique_id(), 0)
    return nccl_communicator(made, 0, 1, binding=binding, **options)


# ---- the case table

ALONE = Way(1, "nccl", on_gpu=True)


@pytest.mark.parametrize("name", cases_for(ALONE))
def test_the_contract_holds_on_one_gpu(name: str, handle: Any) -> None:
    with lc.from_nccl(handle, 0, 1) as comm:
        run_case(name, comm)


@pytest.mark.mpi
@pytest.mark.time_limit(GPU_LIMIT_S + 30)
@pytest.mark.skipif(gpus() < 2, reason=f"this machine has {gpus()} GPU(s); at least 2 are needed")
@pytest.mark.parametrize(("name", "size"), cases_of_jobs([max(gpus(), 2)], "nccl"))
def test_the_contract_holds_on_all_gpus(name: str, size: int) -> None:
    check_case(name, size, "nccl")


@pytest.mark.mpi
@pytest.mark.time_limit(GPU_LIMIT_S + 30)
@sharing
@pytest.mark.parametrize(("name", "size"), cases_of_jobs([2, 4], "nccl"))
def test_the_contract_holds_on_ranks_that_share_a_gpu(name: str, size: int) -> None:
    check_case(name, size, "nccl", **SHARED_GPU)


SPLITS = tuple(name for name in CASES if name.startswith(("split", "groups_of_groups", "groups_that")))


@pytest.mark.mpi
@pytest.mark.time_limit(GPU_LIMIT_S + 30)
@sharing
@pytest.mark.parametrize("name", SPLITS)
def test_groups_may_share_what_their_communicator_has(name: str) -> None:
    check_case(name, 4, "nccl", SPLITS, **SHARED_GPU, NCCL_COMM_SPLIT_SHARE_RESOURCES="1")


# ---- who may use it


@pytest.mark.mpi
def test_ranks_that_share_a_gpu_are_staged_or_refused_without_the_switch(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import warnings\nfrom mpi4py import MPI\nfrom lowshard import comm as lc\n"
        "from lowshard.comm.build import build_host\nfrom lowshard.comm.nccl_over_mpi import build_over_mpi\n"
        "from lowshard.errors import CommError\n"
        "with warnings.catch_warnings(record=True) as caught:\n    warnings.simplefilter('always')\n"
        "    comm = lc.from_mpi(MPI.COMM_WORLD, 'cuda')\n"
        "print(comm.transport, *[w.message for w in caught if w.category is RuntimeWarning])\n"
        "try:\n    build_over_mpi(build_host(MPI.COMM_WORLD), transport='nccl')\n"
        "except CommError as error:\n    print(error)\n"
    )
    env = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_MULTI_RANK_GPU_ENABLE": "0"}
    ended = start_ranks(script, 2, timeout_s=60, env=env, prefix_output=True).ok()
    said = {
        rank: [line[4:] for line in ended.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        for rank in (0, 1)
    }
    assert said[0][0].startswith("staged GPU arrays go through host memory")
    assert said[1][0] == "staged"
    assert said[0][1] == said[1][1]
    assert "2 ranks of this node have 1 GPUs" in said[0][1]


def test_a_host_array_is_refused(handle: Any) -> None:
    comm = lc.from_nccl(handle, 0, 1)
    buf = np.zeros(4)
    refused(
        lambda: comm.all_reduce(buf, buf),
        BufferMismatchError,
        "cupy array, or one of another library on a GPU, got numpy.ndarray",
    )


def test_closing_leaves_the_callers_communicator_alone(handle: Any) -> None:
    lc.from_nccl(handle, 0, 1).close()
    comm = lc.from_nccl(handle, 0, 1)
    buf = comm.xp.ones(3)
    comm.broadcast(buf)
    same(buf, np.ones(3))


# ---- streams and started calls


@pytest.mark.parametrize("kind", ["non-blocking", "blocking", "external"])
def test_calls_are_queued_on_the_current_stream(handle: Any, kind: str) -> None:
    cupy = Binding.load().xp
    comm = lc.from_nccl(handle, 0, 1)
    owner = cupy.cuda.Stream(non_blocking=kind != "blocking")
    stream = owner if kind != "external" else cupy.cuda.Stream.from_external(owner)
    done = cupy.cuda.Event()
    with stream:
        value = cupy.arange(8, dtype=cupy.float32)
        total = cupy.zeros(8, cupy.float32)
        busy(cupy, 0.2)
        value *= 2
        comm.all_reduce(value, total)
        done.record(stream)
        waited = not done.done  # the call came back before the work before it was done
        doubled = total * 2
    owner.synchronize()
    assert waited
    same(doubled, np.arange(8, dtype=np.float32) * 4)


def test_a_started_call_waits_for_the_callers_stream_and_runs_beside_what_comes_later() -> None:
    cupy = Binding.load().xp
    with new() as comm, cupy.cuda.Stream(non_blocking=True) as stream:
        value, total = cupy.arange(8, dtype=cupy.float32), cupy.zeros(8, cupy.float32)
        comm.all_reduce(value, total)  # NCCL makes its connections on first use
        stream.synchronize()
        busy(cupy, 0.2)
        value += 1
        work = comm.start.all_reduce(value, total)
        assert not work.done(), "it did not wait for what was queued before it"
        busy(cupy, 1.0)
        queued = stream.record()
        begun = time.monotonic()
        work.wait(timeout_s=20.0)  # the host waits for the call alone
        assert work.done()
        assert not queued.done, "it waited for what was queued after it"
        assert time.monotonic() - begun < 0.8
        result = total + 0  # on the current stream, which waits for the call
        stream.synchronize()
        same(result, np.arange(1, 9, dtype=np.float32))


def test_results_may_be_used_after_a_wait_that_does_not_block_the_host() -> None:
    cupy = Binding.load().xp
    with new() as comm:
        for turn in range(20):
            value = cupy.full(1 << 20, turn, cupy.float32)
            total = cupy.zeros(1 << 20, cupy.float32)
            busy(cupy, 0.005)
            value += 1
            work = comm.start.all_reduce(value, total)
            del value  # the work holds it; the pool must not hand its memory on
            other = cupy.full(1 << 20, -1.0, cupy.float32)
            work.wait()
            same((total + 0)[:4], np.full(4, turn + 1, np.float32))
            del other


def test_started_messages_of_a_group_of_one_are_refused_by_wait() -> None:
    with new() as comm:
        refused(comm.start.send(comm.xp.zeros(3), 0).wait, CommError, "another rank")


# ---- waits


def test_a_wait_that_is_too_long_aborts_and_the_communicator_says_so() -> None:
    cupy = Binding.load().xp
    comm = new(timeout_s=0.3)
    buf = cupy.zeros(4, cupy.float32)
    comm.all_reduce(buf, buf)
    cupy.cuda.Device().synchronize()
    busy(cupy, 2.0)
    work = comm.start.all_reduce(buf, buf)
    begun = time.monotonic()
    refused(lambda: work.wait(timeout_s=0.1), TimedOut, "all_reduce on rank 0 has not ended within")
    refused(lambda: work.wait(timeout_s=5.0), TimedOut, "all_reduce on rank 0 was not done after 0.3")
    refused(lambda: comm.all_reduce(buf, buf), CommError, "aborted")
    comm.close()
    cupy.cuda.Device().synchronize()
    assert time.monotonic() - begun < 20.0


def test_a_barrier_without_control_waits_for_the_stream() -> None:
    cupy = Binding.load().xp
    with new() as comm, cupy.cuda.Stream(non_blocking=True) as stream:
        comm.barrier()
        busy(cupy, 0.2)
        before = stream.record()
        comm.barrier()
        assert before.done


@pytest.mark.mpi
@sharing
def test_a_rank_that_makes_no_call_is_given_up_and_the_device_is_free_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import time\nfrom mpi4py import MPI\nfrom lowshard.comm.build import build_host\n"
        "from lowshard.comm.nccl_over_mpi import build_over_mpi\nfrom lowshard.errors import TimedOut\n"
        "world = MPI.COMM_WORLD\ncomm = build_over_mpi(build_host(world), transport='nccl')\n"
        "comm._transport._nccl.timeout_s = 1.0\nbuf = comm.xp.ones(1000)\ncomm.all_reduce(buf, buf)\n"
        "comm.xp.cuda.Device().synchronize()\nif comm.rank == 0:\n"
        "    work = comm.start.all_reduce(buf, buf)\n"
        "    begun = time.monotonic()\n"
        "    try:\n        work.wait(timeout_s=5.0)\n"
        "    except TimedOut as error:\n        print('given up:', error)\n"
        "    comm.xp.cuda.Device().synchronize()\n"
        "    print('free', time.monotonic() - begun < 10)\n"
        "world.Barrier()\ncomm._nccl.give_up()\n"  # a destroy would wait for the other rank
    )
    env = {**SHARED_GPU, "LOWSHARD_CHECK": "off", "LOWSHARD_WATCH": "off"}
    ended = start_ranks(script, 2, timeout_s=60, env=env)
    assert "given up: all_reduce on rank 0 was not done after 1" in ended.stdout, ended.text
    assert "free True" in ended.stdout, ended.text
