"""Embed lowshard: communicators for the threads of one process, no MPI at all.

    python examples/embed_threads.py

A framework that has its own ranks brings them: `loopback(n)` gives a communicator to each of n threads,
`from_mpi(comm)` takes an MPI communicator, `from_nccl(communicator, rank, size)` an NCCL communicator of CuPy that the
framework keeps. What runs over one runs over the others.

Output:

    thread 0 came with rows (0, 2) and left with column 0: [ 0  3  6  9 12 15]
    thread 1 came with rows (2, 4) and left with column 1: [ 1  4  7 10 13 16]
    thread 2 came with rows (4, 6) and left with column 2: [ 2  5  8 11 14 17]
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

import lowshard as ls
from lowshard import comm as lc

mesh = ls.DeviceMesh((3,), ("x",))
rows = ls.Layout(mesh, (6, 3), "int64", (ls.Sharded(0),))
columns = ls.Layout(mesh, (6, 3), "int64", (ls.Sharded(1),))
whole = np.arange(18).reshape(6, 3)


def work(comm: lc.Communicator) -> np.ndarray:
    """Do what one rank does."""
    (start, stop), _ = rows.box(comm.rank)
    return ls.redistribute(whole[start:stop], rows, columns, comm)


communicators = lc.loopback(mesh.size)
with ThreadPoolExecutor(mesh.size) as threads:
    for rank, column in enumerate(threads.map(work, communicators)):
        print(
            f"thread {rank} came with rows {rows.box(rank)[0]} and left with column {rank}: {column.ravel()}"
        )
for comm in communicators:
    comm.close()
