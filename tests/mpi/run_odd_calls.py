"""Ranks that make odd calls, all of `support.odd_calls`; on several nodes where LOWSHARD_NODE_SIZE says so."""

from __future__ import annotations

import sys

from mpi4py import MPI
from support.odd_calls import ODD_CALLS

from lowshard import comm as lc

with lc.from_mpi(MPI.COMM_WORLD, device="cpu", timeout_s=30) as comm:
    for call in ODD_CALLS.values():
        call(comm)
    ways = sorted({pair["way"] for pair in comm.explain(json=True)["pairs"]})
    if comm.rank == 0:
        sys.stdout.write(f"{ways}\n{comm.explain()}\n")
