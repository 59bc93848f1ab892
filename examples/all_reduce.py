"""Add up an array over all ranks: the first program.

    lowshard run -n 4 examples/all_reduce.py

Every rank passes its own array and an array for the result. Results are written into the buffers that are given:
nothing is returned, as in mpi4py.

Output of rank 0:

    sent [0. 1. 2.]
    sum over 4 ranks [ 6. 10. 14.]
"""

import numpy as np
from mpi4py import MPI

from lowshard import comm as lc

with lc.from_mpi(MPI.COMM_WORLD) as comm:  # NCCL where every rank has a GPU, else NumPy
    xp = comm.xp  # numpy, or cupy
    x = xp.arange(3, dtype=np.float32) + comm.rank
    total = xp.empty_like(x)
    comm.all_reduce(x, total)  # op="sum"; also "avg", "min", "max", "prod"

    if comm.rank == 0:
        print(f"sent {x}")
        print(f"sum over {comm.size} ranks {total}")
