"""What each rank of the matrix of failures runs: one rank fails at a place where the others need it.

Arguments: cause; place; the rank that fails; a folder for the ranks' notes and for what they save.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mpi4py import MPI

from lowshard import DeviceMesh, Layout, Replicated, Sharded, execute, plan_redistribute
from lowshard.comm import Communicator, from_mpi
from lowshard.errors import CommError
from lowshard.fsdp import FSDP, SGD, Param
from lowshard.reshard import Refit, TensorLayout, build_reshard_plan
from lowshard.weights import save

CAUSES = ("SIGKILL", "raise", "sys.exit(3)", "os._exit(0)", "raise in a thread", "leave early")
PLACES = ("first call", "collective", "execute", "save", "vote", "FSDP step")
LONG_S = 60.0
INSIDE_S = 0.3  # from all ranks' coming to the fault: the others are inside by then
WORDS = 1 << 16


def call_of(place: str, comm: Communicator, folder: Path) -> Callable[[], object]:
    """Returns the call of a place; what it needs is made before, by all ranks."""
    n, rank = comm.size, comm.rank
    mesh = DeviceMesh((n,), ("x",))
    layout = Layout(mesh, (WORDS,), "float32", (Sharded(0),))
    local = np.zeros(layout.local_shape(rank), np.float32)
    send, recv = np.ones(WORDS, np.float32), np.empty(WORDS, np.float32)
    if place == "execute":
        plan = plan_redistribute(layout, Layout(mesh, (WORDS,), "float32", (Replicated(),)))
        return lambda: execute(plan, local, comm)
    if place == "save":
        return lambda: save(folder / "saved", {"w": (layout, local)}, comm)
    if place == "vote":
        src = {"a": TensorLayout.sharded((64, WORDS // 64), "float32", {"tp": (n, 1)}, {0: "tp"})}
        dst = {"a": TensorLayout.sharded((64, WORDS // 64), "float32", {"tp": (n, 1)}, {1: "tp"})}
        mine, out = ({"a": np.zeros(x["a"].local_shape(rank), np.float32)} for x in (src, dst))
        refit = Refit(build_reshard_plan(src, dst), comm, mine, out)
        return lambda: refit.push(1)
    if place == "FSDP step":
        engine = FSDP({"l0": [Param("w", (37, 53))]}, comm)
        engine.fill(lambda name, box: np.zeros([stop - start for start, stop in box], np.float32))

        def step() -> None:
            with engine.step():
                engine.open("l0")
                engine.close("l0")
                engine.open("l0", "backward")
                engine.grads("l0")["w"][...] = 1
                engine.reduce("l0")
                engine.close("l0")
            engine.join()
            engine.update(SGD(lr=0.1))

        return step
    if place == "collective":
        comm.all_reduce(send, recv)
    return lambda: comm.all_reduce(send, recv)


def boom() -> None:
    raise ValueError("boom in a thread")


def fail(cause: str) -> None:
    if cause == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if cause == "SIGSTOP":
        os.kill(os.getpid(), signal.SIGSTOP)
    if cause == "raise":
        raise ValueError("boom")
    if cause == "sys.exit(3)":
        sys.exit(3)
    if cause == "os._exit(0)":
        os._exit(0)
    if cause == "raise in a thread":
        threading.Thread(target=boom, name="worker").start()
        time.sleep(LONG_S)


def main(cause: str, place: str, victim: int, folder: Path) -> None:
    world = MPI.COMM_WORLD
    comm = from_mpi(world, "cpu")
    call = call_of(place, comm, folder)
    world.Barrier()
    if comm.rank == victim:
        time.sleep(INSIDE_S)
        (folder / "failed").write_text(str(time.time()))
        fail(cause)
        return
    try:
        call()
    except CommError as error:
        ranks = " ".join(map(str, error.ranks))
        part = folder / f"part-{comm.rank}"  # mpiexec may kill a rank that writes
        part.write_text(f"{time.time()} {type(error).__name__} {ranks}\n{error}")
        part.rename(folder / f"said-{comm.rank}")
        raise
    (folder / f"not-reached-{comm.rank}").touch()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
