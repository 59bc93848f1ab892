"""Makes and closes communicators, and prints what that has left of descriptors, threads and memory.

Usage: run_made.py TIMES
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import numpy as np
from mpi4py import MPI

from lowshard import comm as lc

FIRST = 100


def held() -> list[int]:
    """Return descriptors, threads, KiB of shared memory and KiB of resident memory."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    shared, resident = (int(fields[name].split()[0]) for name in ("RssShmem", "VmRSS"))
    return [len(os.listdir("/proc/self/fd")), threading.active_count(), shared, resident]


def main(times: int) -> None:
    world = lc.from_mpi(MPI.COMM_WORLD, "cpu")
    for turn in range(FIRST + times):
        if turn == FIRST:
            before = held()
        with world.split(0, -world.rank) as comm:  # type: ignore[union-attr]
            ones, total = np.ones(20_000), np.zeros(20_000)
            comm.all_reduce(ones, total)
            comm.send_recv(ones[:10], (comm.rank + 1) % comm.size, total[:10], (comm.rank - 1) % comm.size)
            assert total.tolist() == [1.0] * 10 + [float(comm.size)] * 19_990
    more = [now - then for now, then in zip(held(), before, strict=True)]
    for row in MPI.COMM_WORLD.gather(more) or []:
        print(*row, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
