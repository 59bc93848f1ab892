"""Rank 0 comes to its end with a long message under way, which the last rank takes later."""

from __future__ import annotations

import time

import numpy as np
from mpi4py import MPI

from lowshard import comm as lc

if __name__ == "__main__":
    world = MPI.COMM_WORLD
    with lc.from_mpi(world, "cpu") as comm:
        comm.barrier()
    # Memory of MPI's own, which outlives the interpreter's variables.
    message = np.frombuffer(MPI.Alloc_mem(8 << 20), np.float64)
    message[:] = 7
    if world.rank == 0:
        request = world.Isend(message, world.size - 1)
        print("this rank ends", flush=True)
    elif world.rank == world.size - 1:
        time.sleep(0.5)
        message[:] = 0
        world.Recv(message, 0)
        assert (message == 7).all()
