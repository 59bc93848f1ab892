"""Run by every rank of a job: rank 0 decides, lets go of its vote and uses its memory anew; then the others decide."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from lowshard import comm as lc
from lowshard.reshard.vote import Vote

with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
    vote = Vote(comm)
    assert vote.shared
    if comm.rank == 0:
        assert vote.decide(1, True)
        del vote
        arrays = [comm.empty(8, "int64") for _ in range(200)]
        for array in arrays:
            array[...] = 0
    comm.barrier()
    if comm.rank:
        assert vote.decide(1, True), "the decision was lost"
    comm.barrier()
    if comm.rank == 0:
        assert not any(np.any(array) for array in arrays), "a late decision was written into another array"
        print("all decided alike")
