"""Move an array from one layout to another, and see who sends what.

    lowshard run -n 4 examples/move_array.py

A mesh names the axes of the ranks; a layout says for each axis how it lays the array out. The plan is data that every
rank works out for itself; `execute` compares the ranks' plans, then moves the bytes.

Output of rank 0:

    before: rank 0 holds ((0, 3), (0, 8)), rank 3 holds ((8, 10), (0, 8))
    after:  rank 0 holds ((0, 10), (0, 2)), rank 3 holds ((0, 10), (6, 8))
    rank 0 sends 72 bytes
    its columns now:
    [[ 0.  1.]
     [ 8.  9.]
     [16. 17.]]
"""

import numpy as np
from mpi4py import MPI

import lowshard as ls
from lowshard import comm as lc

mesh = ls.DeviceMesh((4,), ("tp",))
rows = ls.Layout(mesh, (10, 8), "float32", (ls.Sharded(0),))  # 10 rows over 4 ranks: 3, 3, 2, 2
columns = ls.Layout(mesh, (10, 8), "float32", (ls.Sharded(1),))
plan = ls.plan_redistribute(rows, columns)

with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
    (start, stop), _ = rows.box(comm.rank)
    local = np.arange(start * 8, stop * 8, dtype=np.float32).reshape(rows.local_shape(comm.rank))
    out = ls.execute(plan, local, comm)  # out= writes into an array of yours

    if comm.rank == 0:
        for word, layout in (("before:", rows), ("after: ", columns)):
            print(f"{word} rank 0 holds {layout.box(0)}, rank 3 holds {layout.box(3)}")
        print(f"rank 0 sends {plan.sent_bytes(0)} bytes")
        print("its columns now:")
        print(out[:3])
