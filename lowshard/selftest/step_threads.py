"""The step `threads`: collectives of ranks that are threads of this process, through memory or, on a GPU, NCCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowshard import comm as lc
from lowshard import dtypes
from lowshard.comm import Communicator
from lowshard.comm.reduction import fold
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.device_arrays import array_module, fill_pools, settle
from lowshard.selftest.every_collective import DTYPES, EveryCollective
from lowshard.selftest.plain_fold import OPS
from lowshard.selftest.step_setting import MULTI_RANK_NCCL, Setting

_WAIT_S = 20.0


def run(setting: Setting, tally: Tally) -> None:
    """Run every collective on 2 threads, then on 4."""
    sizes = [2, 4]
    if setting.device == "cuda":
        from lowshard.comm.nccl_bindings import Binding

        version = int(Binding.load().nccl.get_version())
        if version < MULTI_RANK_NCCL:
            sizes = [1]
            tally.data["note"] = "several ranks on one GPU need NCCL 2.30.3 or newer"
        _warm()
    for size in sizes:
        print(f"{size} threads", flush=True)
        for found in lc.run_loopback(size, _program(setting), _WAIT_S):
            tally.add(found)
    ways = "NCCL" if setting.device == "cuda" else "this process's memory"
    note = f"; {tally.data['note']}" if "note" in tally.data else ""
    tally.summary = f"{tally.checks} results, {' and '.join(map(str, sizes))} ranks through {ways}{note}"


def _program(setting: Setting) -> Callable[[Communicator], Tally]:
    """Return what each thread runs."""
    if setting.device == "cpu":
        return _on_memory
    unique: list[Any] = []

    def on_gpu(host: Communicator) -> Tally:
        from lowshard.comm.nccl import NCCLTransport
        from lowshard.comm.nccl_bindings import Binding

        tally, binding = Tally(), Binding.load()
        xp: Any = binding.xp
        binding.select(0)
        if host.rank == 0:
            unique.append(binding.nccl.get_unique_id())
        host.barrier()
        # A stream each, apart from the default one: on one stream a kernel would wait for those of other ranks.
        with xp.cuda.Stream(non_blocking=True) as stream:
            fill_pools(xp)
            handle = binding.nccl.NcclCommunicator(host.size, unique[0], host.rank)
            made = NCCLTransport(handle, host.rank, host.size, host._transport, binding=binding)
            made.connect()
            with Communicator(made, host) as comm:
                EveryCollective(comm, tally).run()
                stream.synchronize()
                comm.barrier()
        return tally

    return on_gpu


def _on_memory(comm: Communicator) -> Tally:
    tally = Tally()
    EveryCollective(comm, tally).run()
    return tally


def _warm() -> None:
    """Load every kernel of the run before ranks meet on the device."""
    # CUDA loads a kernel on first use and waits for the device, where another rank's NCCL kernel may wait for this one.
    from lowshard.comm.nccl import nccl_communicator
    from lowshard.comm.nccl_bindings import Binding

    binding = Binding.load()
    handle = binding.nccl.NcclCommunicator(1, binding.nccl.get_unique_id(), 0)
    with nccl_communicator(handle, 0, 1, binding=binding) as comm:
        EveryCollective(comm, Tally()).run()
    xp = array_module("cuda")
    for dtype in DTYPES:
        for size in (2, 3, 4):
            rows = xp.zeros((size, 8), dtypes.get(dtype).numpy)
            for op in OPS:
                for order in ("tree", "rank"):
                    fold(list(rows), xp.empty_like(rows[0]), op, order)
    settle(xp)
