"""Run by every rank of a job: two threads of rank 0 call a communicator, and one of a part of the ranks."""

from __future__ import annotations

from mpi4py import MPI
from support.thread_cases import check_threads

from lowshard import comm as lc

with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
    check_threads(comm, MPI.COMM_WORLD.Barrier)
    with comm.split(0) as part:
        check_threads(part, MPI.COMM_WORLD.Barrier)
    if comm.rank == 0:
        print("right")
