"""A rank ends while a thread of it still waits for the others, and by itself or by MPI.Finalize."""

from __future__ import annotations

import time

import numpy as np
import pytest
from mpi4py import MPI

from lowshard import comm as lc
from lowshard.errors import CommError

whole = lc.from_mpi(MPI.COMM_WORLD, device="cpu", timeout_s=30)
group = whole.split(whole.rank // 2)
if group is not None and group.size == 2 and group.rank == 0:
    waits = group.start.barrier()
    with pytest.raises(TimeoutError):
        waits.wait(0.05)
if whole.size == 2:
    ones = np.ones(3, np.float32)
    whole.all_reduce(ones, ones)
    whole.all_reduce(ones, ones)
    MPI.Finalize()
    for call in (
        lambda: whole.all_reduce(ones, ones),
        lambda: whole.send_recv(ones, 1 - whole.rank, ones.copy(), 1 - whole.rank),
        lambda: whole.split(0),
        whole.start.barrier().wait,
    ):
        with pytest.raises(CommError, match="closed, or MPI is"):
            call()
    with pytest.raises(CommError, match=r"MPI.Init\(\)"):
        lc.from_mpi(MPI.COMM_WORLD, device="cpu")
    whole.close()
    time.sleep(0.1)  # for what waits to look around
