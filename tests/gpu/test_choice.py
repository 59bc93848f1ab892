"""What ranks choose for GPU arrays, over a checker with other GPUs and versions of NCCL. A program, too."""

from __future__ import annotations

import os
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checked_gpu import checker_env
from support.comm_kit import outcome, same
from support.gpu import on_gpu
from support.starting import start_ranks

from lowshard.comm.build import build_host
from lowshard.comm.nccl_over_mpi import build_over_mpi

HERE = threading.local()
SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"


@pytest.mark.mpi
def test_ranks_choose_how_gpu_arrays_are_moved_alike(tmp_path: Path) -> None:
    start_ranks(__file__, 2, timeout_s=60, env=checker_env(tmp_path / "reports")).ok()


def rows(rank: int) -> list[tuple[int, int | None, str, str, str, tuple[str, ...]]]:
    """Return GPUs and NCCL's version as this rank finds them, what sharing is set to, what is asked for,
    the way that is gone or the error of all ranks, and words of it or of the only warning."""
    share, lost = ("2 ranks of this node have 1 GPUs", f"{SHARE}=1"), None if rank else 23007
    return [
        (1, 23007, "", "auto", "staged", (*share, "loaded: 2.30.7")),
        (1, 22809, "1", "auto", "staged", (*share, "loaded: 2.28.9")),
        (1, 23007, "0", "nccl", "CommError", share),
        (1, 23007, "1", "auto", "nccl", ()),
        (1, None, "", "staged", "staged", ()),
        (2, lost, "", "auto", "staged", ("CuPy finds no NCCL library",)),
        (2, lost, "", "nccl", "DependencyError", ("no NCCL library",)),
        *((2 - 2 * rank, 23007, "", how, "DependencyError", ("rank 1", "sees no CUDA device"))
          for how in ("auto", "nccl", "staged")),
        (2, 23007 if rank else 22809, "", "auto", "MismatchError", ("22809",)),
        (2, 23007, "", "nccl" if rank else "staged", "MismatchError", ()),
        (2, 23007, "", "mpi", "CommError", ("'auto', 'nccl', 'staged'",)),
        (2, 23007, "", "auto", "nccl", ()),
    ]  # fmt: skip


def check(
    world: Any, whole: Any, gpus: int, version: Any, share: str, asked: Any, way: str, words: Any
) -> None:
    import cupy

    runtime, nccl, mine = cupy.cuda.runtime, cupy.cuda.nccl, world.rank % max(gpus, 1)
    selected, made = list[tuple[int, int]](), list[Any]()
    runtime.getDeviceCount = lambda: gpus
    runtime.getDevice = lambda: getattr(HERE, "device", 0)
    runtime.setDevice = lambda at: (setattr(HERE, "device", at), selected.append((threading.get_ident(), at)))
    runtime.deviceGetPCIBusId = lambda device: f"0000:{device:02x}:00.0"
    nccl.available, nccl.get_version = version is not None, lambda: version
    nccl.NcclCommunicator.device_id = lambda self: mine
    cupy.ndarray.device = property(lambda self: cupy.cuda.Device(mine))
    os.environ[SHARE] = share
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cls, text = outcome(lambda: made.append(build_over_mpi(whole.split(0), transport=asked)))
    if cls:
        assert len(set(world.allgather(text))) == 1, text
    else:
        said = [str(w.message) for w in caught if w.category is RuntimeWarning]
        assert len(said) == (world.rank == 0 and bool(words)), said
        text = said[0] if said else " ".join(words)
    assert (cls or made[0].transport, [word for word in words if word not in text]) == (way, []), text
    if made:
        assert made[0].control.transport == "mpi"
        with made[0] as comm:
            buf = on_gpu(comm, np.full(3, world.rank + 1.0))
            comm.all_reduce(buf, buf)
            same(buf, np.full(3, 3.0))
    if way == "nccl":  # on the thread that connects, too
        assert {at for _, at in selected} == {mine}
        assert len({thread for thread, _ in selected}) > 1


if __name__ == "__main__":
    from mpi4py import MPI

    everyone = build_host(MPI.COMM_WORLD)
    for row in rows(MPI.COMM_WORLD.rank):
        check(MPI.COMM_WORLD, everyone, *row)
        MPI.COMM_WORLD.Barrier()
