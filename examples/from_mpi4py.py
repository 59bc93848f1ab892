"""Coming from mpi4py: the same calls, side by side.

    lowshard run -n 4 examples/from_mpi4py.py

Start it with mpiexec as well. Buffers are arrays, the result is the second argument, and mpi4py's op= words are taken.
Your own MPI calls may stand between lowshard's.

Output of rank 0:

    Allreduce       the same as all_reduce
    Allgather       the same as all_gather
    Reduce_scatter  the same as reduce_scatter
    Alltoall        the same as all_to_all
    Bcast           the same as broadcast
    Sendrecv        the same as send_recv
"""

import numpy as np
from mpi4py import MPI

from lowshard import comm as lc

world = MPI.COMM_WORLD
rank, size = world.Get_rank(), world.Get_size()
mine = np.arange(8, dtype=np.int64) + 100 * rank
wide_a, wide_b = np.empty((2, 8 * size), np.int64)
a, b = np.empty((2, 8), np.int64)
part_a, part_b = np.empty((2, 8 // size), np.int64)


def compare(name: str, ours: str, theirs: np.ndarray, found: np.ndarray) -> None:
    """Print, on rank 0, whether both calls gave the same."""
    same = world.allreduce(bool((theirs == found).all()), op=MPI.LAND)
    if rank == 0:
        print(f"{name:<15} {'the same as' if same else 'NOT the same as'} {ours}")


with lc.from_mpi(world, device="cpu") as comm:
    world.Allreduce(mine, a, op=MPI.SUM)
    comm.all_reduce(mine, b, op=MPI.SUM)  # or op="sum"
    compare("Allreduce", "all_reduce", a, b)

    world.Allgather(mine, wide_a)
    comm.all_gather(mine, wide_b)
    compare("Allgather", "all_gather", wide_a, wide_b)

    world.Reduce_scatter_block(mine, part_a, op=MPI.MAX)
    comm.reduce_scatter(mine, part_b, op=MPI.MAX)
    compare("Reduce_scatter", "reduce_scatter", part_a, part_b)

    world.Alltoall(mine, a)
    comm.all_to_all(mine, b)
    compare("Alltoall", "all_to_all", a, b)

    a[:], b[:] = mine, mine
    world.Bcast(a, root=1)
    comm.broadcast(b, root=1)
    compare("Bcast", "broadcast", a, b)

    right, left = (rank + 1) % size, (rank - 1) % size
    world.Sendrecv(mine, dest=right, recvbuf=a, source=left)
    comm.send_recv(mine, right, b, left)
    compare("Sendrecv", "send_recv", a, b)
