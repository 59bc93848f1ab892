"""What each rank of the matrix of causes runs: one rank leaves or fails in a phase in which the others need it.

Arguments: how it fails; the phase; its rank; a folder for the ranks' notes and for what they save.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mpi4py import MPI

from lowshard import DeviceMesh, Layout, Sharded
from lowshard.comm import Communicator, from_mpi
from lowshard.fsdp import FSDP, SGD, Param
from lowshard.reshard import Refit, TensorLayout, build_reshard_plan
from lowshard.weights import save

LONG_S = 90.0
COME_S = 40.0  # for all ranks to come to the phase
INSIDE_S = 0.3  # from then to the fault: the others are inside by then
WORDS = 1 << 16


def phase_of(name: str, world: MPI.Comm, comm: Communicator | None, folder: Path) -> Callable[[], object]:
    """Returns the call of a phase; what it needs is made before, by all ranks."""
    if name == "MPI":
        return world.Barrier
    if name == "from_mpi":
        return lambda: from_mpi(world, "cpu")
    assert comm is not None
    n = comm.size
    send, recv = np.ones(WORDS, np.float32), np.empty(WORDS, np.float32)
    if name == "save":
        layout = Layout(DeviceMesh((n,), ("x",)), (WORDS,), "float32", (Sharded(0),))
        local = np.zeros(layout.local_shape(comm.rank), np.float32)
        return lambda: save(folder / "saved", {"w": (layout, local)}, comm)
    if name.startswith("refit"):
        src = {"a": TensorLayout.sharded((64, WORDS // 64), "float32", {"tp": (n, 1)}, {0: "tp"})}
        dst = {"a": TensorLayout.sharded((64, WORDS // 64), "float32", {"tp": (n, 1)}, {1: "tp"})}
        mine, out = ({"a": np.zeros(x["a"].local_shape(comm.rank), np.float32)} for x in (src, dst))
        refit = Refit(build_reshard_plan(src, dst), comm, mine, out)
        return lambda: refit.push(1) if name == "refit" else refit.push(1, wait=False).wait()  # type: ignore[union-attr]
    if name == "FSDP":
        engine = FSDP({"l0": [Param("w", (37, 53))], "l1": [Param("w", (53, 5))]}, comm)
        engine.fill(lambda name, box: np.zeros([stop - start for start, stop in box], np.float32))

        def step() -> None:
            with engine.step():
                for unit in ("l0", "l1"):
                    engine.open(unit)
                    engine.close(unit)
                for unit in ("l1", "l0"):
                    engine.open(unit, "backward")
                    engine.grads(unit)["w"][...] = 1
                    engine.reduce(unit)
                    engine.close(unit)
            engine.join()
            engine.update(SGD(lr=0.1))

        return step
    return {
        "barrier": comm.barrier,
        "split": lambda: comm.split(0),
        "all_reduce": lambda: comm.all_reduce(send, recv),
    }[name]


def boom() -> None:
    time.sleep(INSIDE_S)
    raise ValueError("boom in a thread")


def main(how: str, phase: str, victim: int, folder: Path) -> None:
    world = MPI.COMM_WORLD
    rank, n = world.rank, world.size
    comm = None
    if phase not in ("MPI", "from_mpi") or how.endswith("side channel"):
        comm = from_mpi(world, "cpu")
        comm.barrier()
    call = phase_of(phase, world, comm, folder)
    (folder / f"came-{rank}").touch()
    end_s = time.monotonic() + COME_S
    while len(list(folder.glob("came-*"))) < n and time.monotonic() < end_s:
        time.sleep(0.005)
    how = how.removesuffix(", side channel")
    if how == "thread":
        # The victim's main thread waits too, for a third rank: it hears of its own thread's failure like all others.
        if rank == victim:
            threading.Thread(target=boom, name="worker").start()
        elif rank == (victim + 1) % n:
            time.sleep(LONG_S)
    elif rank == victim:
        time.sleep(INSIDE_S)
        if how == "os._exit(0)":
            os._exit(0)
        if how == "return":
            return
        if how == "sys.exit(0)":
            sys.exit(0)
        assert how == "never"
        time.sleep(LONG_S)
    call()
    print("not reached", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
