"""A message that was started goes on while its sender waits in shared memory, which its receiver comes to later."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from lowshard import comm as lc

ELEMS = 2 << 20

if __name__ == "__main__":
    with lc.from_mpi(MPI.COMM_WORLD, "cpu", timeout_s=20.0) as comm:
        buf, total = np.full(ELEMS, 7.0), np.ones(100)
        for sender in (0, 1):
            work = comm.start.send(buf, 1 - sender) if comm.rank == sender else None
            if work is None:
                buf[...] = 0
                comm.recv(buf, sender)
                assert (buf == 7.0).all()
            comm.all_reduce(total, total)
            if work is not None:
                work.wait()
        assert (total == 4.0).all()
        print("done", flush=True)
