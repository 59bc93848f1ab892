"""Run by two ranks of one node: which functions of lowshard each way enters, from the public call to its return.

Argument: a folder that both ranks see. Rank 0 prints, as JSON, the files and functions of each way as they are entered.
The first all_reduce is the first of the process; of the others, a call after two like it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from mpi4py import MPI

import lowshard
from lowshard import DeviceMesh, Layout, Replicated, Sharded, execute, plan_redistribute
from lowshard import comm as lc
from lowshard.checkpoint import Catalog
from lowshard.comm.failure import channels
from lowshard.errors import PeerFailed
from lowshard.kernels import quantize_mxfp8
from lowshard.reshard import Refit, TensorLayout, build_reshard_plan
from lowshard.tiling import Tiling
from lowshard.weights import ShardingStrategy, load, nodes_of, plan_load, save

ROOT = Path(lowshard.__file__).resolve().parents[1]
HOMES = tuple(str(ROOT / name) + "/" for name in ("lowshard", "kernels", "launch", "bench"))


CLOSED = ("comm/failure.py", "Hub._hear")
Walk = list[tuple[str, str]]
"""File, as of the package, and function."""


def walk(call: Callable[..., Any], *args: Any) -> Walk:
    """Return the functions of lowshard that a call enters, in order."""
    entered: Walk = []

    def look(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOMES):
            file = code.co_filename.removeprefix(f"{ROOT}/").removeprefix("lowshard/")
            entered.append((file, code.co_qualname))

    sys.setprofile(look)
    try:
        call(*args)
    finally:
        sys.setprofile(None)
    return entered


def third(call: Callable[..., Any], *args: Any) -> Walk:
    """Return the walk of the third of like calls: nothing is looked up for the first time any more."""
    return [walk(call, *args) for _ in range(3)][-1]


def main(folder: Path) -> None:
    walks: dict[str, Walk] = {}
    with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
        values, out = np.ones(1 << 20, np.float32), np.empty(1 << 20, np.float32)
        walks["all_reduce"] = walk(comm.all_reduce, values, out)

        mesh = DeviceMesh((2,), ("x",))
        src, dst = (Layout(mesh, (512, 4096), "float32", (p,)) for p in (Sharded(1), Replicated()))
        result = np.empty(dst.local_shape(comm.rank), np.float32)
        private = np.ones(src.local_shape(comm.rank), np.float32)
        walks["execute"] = third(execute, plan_redistribute(src, dst), private, comm, result)

        held = {"w": TensorLayout.sharded((2048, 2048), "float32", {"tp": (2, 1)}, {0: "tp"})}
        served = {"w": TensorLayout.sharded((2048, 2048), "float32", {"tp": (2, 1)}, {1: "tp"})}
        mine, theirs = np.ones((1024, 2048), np.float32), np.zeros((2048, 1024), np.float32)
        with Refit(build_reshard_plan(held, served), comm, {"w": mine}, {"w": theirs}) as refit:
            pushed = [walk(refit.push, version) for version in range(5)]  # two sets, in turn
            walks["Refit.push"] = pushed[-1]

        if comm.rank == 0:
            save(folder / "c", {"w": (Tiling.whole((512, 512), "float32"), np.ones((512, 512), np.float32))})
        comm.barrier()
        catalog = Catalog.open(folder / "c")
        tilings = {"w": ShardingStrategy.rowwise(2).layout((512, 512), "float32")}
        plan = plan_load(catalog, tilings, 2, nodes=nodes_of(comm))
        walks["load"] = third(load, catalog, plan, comm)
        walks["quantize"] = third(quantize_mxfp8, values.reshape(1024, 1024))
        if comm.rank == 0:
            print(json.dumps(walks))


def death(folder: Path) -> None:
    """Have the connection of rank 1 close while rank 0, where the hub is, waits in a barrier."""
    entered: Walk = []

    def look(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOMES):
            entered.append((code.co_filename.removeprefix(f"{ROOT}/lowshard/"), code.co_qualname))

    threading.setprofile(look)  # of those that the communicator starts
    comm = lc.from_mpi(MPI.COMM_WORLD, device="cpu")
    for _ in range(2):
        comm.barrier()
    if comm.rank:
        time.sleep(1.0)  # rank 0 waits by then
        channels()[0]._socket.shutdown(socket.SHUT_RDWR)
        end_s = time.monotonic() + 30
        while not (folder / "death").exists() and time.monotonic() < end_s:
            time.sleep(0.01)
        os._exit(0)
    sys.setprofile(look)
    try:
        comm.barrier()
    except PeerFailed as error:
        sys.setprofile(None)
        made = folder / "made"
        made.write_text(json.dumps([error.ranks, entered[entered.index(CLOSED) :]]))
        made.rename(folder / "death")
    os._exit(0)


if __name__ == "__main__":
    (death if sys.argv[2:] == ["death"] else main)(Path(sys.argv[1]))
