"""See what a plan does, what it should cost, and what it did cost.

    lowshard run -n 4 examples/explain_plan.py

Without a profile a plan is the one that moves the fewest bytes; with one, the one that takes the least time. Plan with
a profile of your cluster, a file that `ClusterProfile.default().save(FILE)` writes and you put your numbers into:

    lowshard run -n 4 examples/explain_plan.py cluster.json

Output of rank 0:

    from  float32[1024,1024] dp=P tp=S1
    to    float32[1024,1024] dp=R tp=S0
    step 1: ...
            at most ... bytes a rank, predicted ... (no profile), measured ...
    step 2: ...
            at most ... bytes a rank, predicted ... (no profile), measured ...
    all steps: predicted ..., measured ...
    moves ... bytes in all
      rank 0: sends ..., receives ...
      ...
"""

import sys

import numpy as np
from mpi4py import MPI

import lowshard as ls
from lowshard import comm as lc
from lowshard.cost import ClusterProfile

cost = ClusterProfile.load(sys.argv[1]) if len(sys.argv) > 1 else None
mesh = ls.DeviceMesh((2, 2), ("dp", "tp"))
src = ls.Layout(mesh, (1024, 1024), "float32", (ls.Partial("sum"), ls.Sharded(1)))
dst = ls.Layout(mesh, (1024, 1024), "float32", (ls.Replicated(), ls.Sharded(0)))
plan = ls.plan_redistribute(src, dst, cost=cost)

with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
    local = np.ones(src.local_shape(comm.rank), np.float32)
    out = np.empty(dst.local_shape(comm.rank), np.float32)
    ls.execute(plan, local, comm, out)  # the first time everything is made ready
    ls.execute(plan, local, comm, out, profile=True)  # takes the time of each step on the slowest rank
    if comm.rank == 0:
        print(plan.explain())
