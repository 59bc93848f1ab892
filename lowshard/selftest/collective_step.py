"""The steps `collectives` and `threads`: every collective on MPI ranks, and on ranks that are threads of a process.

On a GPU MPI ranks go through host memory first, then through NCCL, and threads through NCCL on streams of their own.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, Literal

from lowshard import comm as lc
from lowshard import dtypes
from lowshard.comm import Communicator
from lowshard.comm.nccl import NCCLTransport, nccl_communicator
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.reduction import fold
from lowshard.errors import DependencyError
from lowshard.selftest.arrays import array_module, fill_pools, settle
from lowshard.selftest.collective_cases import DTYPES, run_every_collective
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.fold_cases import OPS
from lowshard.selftest.ranks import run_over_mpi
from lowshard.selftest.steps import MULTI_RANK_NCCL, Setting

_WAIT_S = 20.0

run_rank = run_every_collective


def run(setting: Setting, tally: Tally) -> None:
    """Run every collective over each transport that this machine has for so many ranks."""
    ways: list[Literal["auto", "nccl", "staged"]] = ["auto"]
    reason = ""
    if setting.device == "cuda":
        reason = _why_no_nccl(setting.ranks)
        ways = ["staged"] if reason else ["staged", "nccl"]
    parts = [replace(setting, transport=way, limit_s=setting.limit_s / len(ways)) for way in ways]
    through = [run_over_mpi("collective_step", part, tally) for part in parts]
    tally.summary = f"{tally.checks} results, {setting.ranks} MPI ranks through {' and '.join(through)}"
    tally.summary += f"; not NCCL: {reason}" if reason else ""


def _why_no_nccl(ranks: int) -> str:
    """Return why so many ranks cannot use NCCL on this machine, or ""."""
    try:
        binding = Binding.load()
    except DependencyError as error:
        return str(error)
    version, gpus = int(binding.nccl.get_version()), int(binding.xp.cuda.runtime.getDeviceCount())
    if ranks > gpus and version < MULTI_RANK_NCCL:
        return f"{ranks} ranks on {gpus} GPU(s) need NCCL 2.30.3 or newer, loaded is {version}"
    return ""


def run_threads(setting: Setting, tally: Tally) -> None:
    """Run every collective on 2 threads, then on 4."""
    sizes, note = [2, 4], ""
    unique: dict[int, Any] = {}
    if setting.device == "cuda":
        if int(Binding.load().nccl.get_version()) < MULTI_RANK_NCCL:
            sizes, note = [1], "; several ranks on one GPU need NCCL 2.30.3 or newer"
        _load_kernels()

    def thread(comm: Communicator) -> Tally:
        found = Tally()
        if setting.device == "cuda":
            _on_gpu(comm, unique, found)
        else:
            run_every_collective(comm, found)
        return found

    for size in sizes:
        print(f"{size} threads", flush=True)
        for found in lc.run_loopback(size, thread, _WAIT_S):
            tally.add(found)
    ways = "NCCL" if setting.device == "cuda" else "this process's memory"
    tally.summary = f"{tally.checks} results, {' and '.join(map(str, sizes))} ranks through {ways}{note}"


def _on_gpu(host: Communicator, unique: dict[int, Any], tally: Tally) -> None:
    """Run every collective over NCCL as one thread; `unique` has NCCL's id for a number of ranks."""
    binding = Binding.load()
    xp: Any = binding.xp
    binding.select(0)
    if host.rank == 0:
        unique[host.size] = binding.nccl.get_unique_id()
    host.barrier()
    # A stream each, apart from the default one: on one stream a kernel would wait for those of other ranks.
    with xp.cuda.Stream(non_blocking=True) as stream:
        fill_pools(xp)
        handle = binding.nccl.NcclCommunicator(host.size, unique[host.size], host.rank)
        made = NCCLTransport(handle, host.rank, host.size, host._transport, binding=binding)
        made.connect()
        with Communicator(made, host) as comm:
            run_every_collective(comm, tally)
            stream.synchronize()
            comm.barrier()


def _load_kernels() -> None:
    """Load every kernel of the run before ranks meet on the device."""
    # CUDA loads a kernel on first use and waits for the device, where another rank's NCCL kernel may wait for this one.
    binding = Binding.load()
    handle = binding.nccl.NcclCommunicator(1, binding.nccl.get_unique_id(), 0)
    with nccl_communicator(handle, 0, 1, binding=binding) as comm:
        run_every_collective(comm, Tally())
    xp = array_module("cuda")
    for dtype, size, op, order in product(DTYPES, (2, 3, 4), OPS, ("tree", "rank")):
        rows = xp.zeros((size, 8), dtypes.get(dtype).numpy)
        fold(list(rows), xp.empty_like(rows[0]), op, order)
    settle(xp)
