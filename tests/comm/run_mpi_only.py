"""What only the MPI communicator does; every rank checks, rank 0 prints the names of the checks that held.

Usage: run_mpi_only.py
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable

import numpy as np
from mpi4py import MPI
from support.comm_kit import outcome, refused, same

from lowshard import comm as lc
from lowshard.comm.nccl_over_mpi import usable_on_all, why_unusable
from lowshard.errors import BufferMismatchError, CommError

WORLD = MPI.COMM_WORLD
N, RANK = WORLD.size, WORLD.rank


def our_messages_do_not_meet_those_of_the_program() -> None:
    comm = lc.from_mpi(WORLD, "cpu")
    ours, theirs = np.array([1.0]), np.array([2.0])
    if RANK == 0:
        request = WORLD.Isend(theirs, 1, tag=7)
        comm.send(ours, 1)
        request.Wait()
    elif RANK == 1:
        first, second = np.zeros(1), np.zeros(1)
        comm.recv(first, 0)
        WORLD.Recv(second, MPI.ANY_SOURCE, MPI.ANY_TAG)
        same(first, ours)
        same(second, theirs)
    comm.close()


def the_programs_communicator_outlives_ours() -> None:
    part = WORLD.Split(RANK % 2, -RANK)
    comm = lc.from_mpi(part, "cpu")
    assert (comm.rank, comm.size) == (part.rank, part.size)
    comm.close()
    assert part.allreduce(1) == part.size
    part.Free()


def a_message_of_another_length_is_refused_by_the_receiver() -> None:
    comm = lc.from_mpi(WORLD, "cpu")
    for sent, expected in ((3, 4), (5, 4), (0, 4), (5000, 4)):
        if RANK == 0:
            comm.send(np.zeros(sent), 1)
        elif RANK == 1:
            buf = np.zeros(expected)
            refused(lambda buf=buf: comm.recv(buf, 0), BufferMismatchError, "rank 0 sent", "32")
    if RANK == 0:
        comm.send(np.arange(4.0), 1)
    elif RANK == 1:
        comm.recv(buf, 0)
        same(buf, np.arange(4.0))
    comm.barrier()
    comm.close()


def an_unknown_device_is_refused_on_all_ranks() -> None:
    refused(lambda: lc.from_mpi(WORLD, "gpu"), CommError, "'gpu'", "'auto'")  # type: ignore[arg-type]


def auto_is_the_cpu_unless_every_rank_has_a_gpu() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # where ranks share a GPU
        comm = lc.from_mpi(WORLD, "auto")
    everyone = WORLD.allreduce(int(why_unusable() is None), MPI.MIN)
    assert comm.transport in (("nccl", "staged") if everyone else ("mpi",))
    assert not comm.traffic.calls
    assert comm.traffic.sent_bytes == 0
    comm.close()


def cuda_without_a_gpu_is_refused_alike_on_all_ranks() -> None:
    reason = why_unusable()
    if WORLD.allreduce(int(reason is None), MPI.MAX):
        return  # tests/gpu has what follows then
    comm = lc.from_mpi(WORLD, "cpu")
    assert usable_on_all(comm) is False  # type: ignore[arg-type]
    assert not comm.traffic.calls
    comm.close()
    name, text = outcome(lambda: lc.from_mpi(WORLD, "cuda"))
    assert name == "DependencyError"
    assert "every rank needs CuPy and a GPU" in text
    digests = WORLD.allgather(hashlib.sha256(text.encode()).digest())
    assert len(set(digests)) == 1


CHECKS: list[Callable[[], None]] = [
    our_messages_do_not_meet_those_of_the_program,
    the_programs_communicator_outlives_ours,
    a_message_of_another_length_is_refused_by_the_receiver,
    an_unknown_device_is_refused_on_all_ranks,
    auto_is_the_cpu_unless_every_rank_has_a_gpu,
    cuda_without_a_gpu_is_refused_alike_on_all_ranks,
]

if __name__ == "__main__":
    warnings.simplefilter("error")
    for check in CHECKS:
        check()
        WORLD.Barrier()
        if RANK == 0:
            print(check.__name__, flush=True)
