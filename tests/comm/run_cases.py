"""Runs the case table on MPI ranks; rank 0 prints one JSON line a case: how it ended on every rank.

Usage: run_cases.py DEVICE [NAME ...], where DEVICE is "cpu", "cuda", or "nccl" or "staged" for GPU arrays by that
transport and no other; without names, all cases of the communicator contract; names may be of support.program_cases
too. With LOWSHARD_TESTS_BARRED in the environment no rank may read another's memory; LOWSHARD_TESTS_CORES is how many
cores the machine is said to have.
Results travel by mpi4py's own gather, so that a broken collective of ours cannot hide them.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings

from support.barred import bar

if os.environ.get("LOWSHARD_TESTS_BARRED"):
    bar()  # before MPI looks what it may do

from mpi4py import MPI
from support.comm_cases import CASES, run_case

from lowshard import comm as lc
from lowshard.comm.build import build_host
from lowshard.comm.nccl_over_mpi import build_over_mpi

if cores := os.environ.get("LOWSHARD_TESTS_CORES"):
    os.sched_getaffinity = lambda pid: set(range(int(cores)))


def make(device: str) -> lc.Communicator:
    """Return a new communicator over all ranks."""
    if device in ("nccl", "staged"):
        return build_over_mpi(build_host(MPI.COMM_WORLD), transport=device)  # type: ignore[arg-type]
    return lc.from_mpi(MPI.COMM_WORLD, device)  # type: ignore[arg-type]


def main(device: str, names: list[str]) -> None:
    world = MPI.COMM_WORLD
    if not set(names) <= CASES.keys():
        import support.program_cases  # noqa: F401
    warnings.simplefilter("error")
    # A communicator of its own for each case: what one leaves behind does not reach the next. Those of NCCL take
    # seconds to make, more where ranks share a GPU: they serve until a case has spoilt one.
    serves_many = device == "nccl"
    comm: lc.Communicator | None = None
    for name in names or CASES:
        start = time.perf_counter()
        error = ""
        comm = make(device) if comm is None else comm
        try:
            run_case(name, comm)
        except Exception:
            error = traceback.format_exc()
            # At once, for the other ranks may hang in the case and never come to the gather.
            print(f"rank {world.rank} of {world.size}, case {name}:\n{error}", file=sys.stderr, flush=True)
        ends = world.gather(error, 0)
        spoilt = world.allreduce(bool(error) or comm._transport.closed or comm._transport.failed, MPI.LOR)
        if spoilt or not serves_many:
            comm.close()
            comm = None
        if ends is not None:
            line = {
                "case": name,
                "errors": {rank: e for rank, e in enumerate(ends) if e},
                "seconds": round(time.perf_counter() - start, 3),
            }
            print(json.dumps(line), flush=True)
    if comm is not None:
        comm.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
