"""A program as a user's first one: partial sums of four ranks become whole rows; prints whence compiled code came."""

from __future__ import annotations

import json

import numpy as np
from mpi4py import MPI

import lowshard as ls
from lowshard import comm as lc
from lowshard.compiled import origins

with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
    mesh = ls.DeviceMesh((2, 2), ("dp", "tp"))
    src = ls.Layout(mesh, (1003, 517), "float32", (ls.Partial("sum"), ls.Sharded(1)))
    dst = ls.Layout(mesh, (1003, 517), "float32", (ls.Sharded(0), ls.Replicated()))
    local = np.ones(src.local_shape(comm.rank), np.float32)
    out = ls.execute(ls.plan_redistribute(src, dst), local, comm)
    assert out.shape == dst.local_shape(comm.rank)
    assert (out == 2).all()

every = MPI.COMM_WORLD.gather(origins, 0)
if every is not None:
    print(
        json.dumps({name: [found[name] for found in every if name in found] for name in origins}), flush=True
    )
