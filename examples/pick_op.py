"""Pick the layouts that an op runs in, and run it on shards.

    lowshard run -n 4 examples/pick_op.py

`pick` asks a solver which row of an op's table fits its operands: what each operand is moved to, what the result then
is, and what that costs. `run_action` does it.

Output of rank 0:

    matmul: 0 bytes (bytes a rank sends) on mesh dp=2 tp=2
      operand 0: float32[64,32] dp=S0 tp=S1, as it comes
      operand 1: float32[32,48] dp=R tp=S0, as it comes
      result 0: float32[64,48] dp=S0 tp=P
    axis  operand 0  operand 1  result  collectives                 bytes
    dp    S0->R      R          R       all_gather                  2,048
    dp    S0         R          S0      -                           0      chosen
    ...
    tp    S1         S0         P       -                           0      chosen

    equals x @ w: True
"""

import numpy as np
from mpi4py import MPI

import lowshard as ls
from lowshard import comm as lc
from lowshard.op import run_action
from lowshard.solver import pick

mesh = ls.DeviceMesh((2, 2), ("dp", "tp"))
x = ls.Layout(mesh, (64, 32), "float32", (ls.Sharded(0), ls.Sharded(1)))
w = ls.Layout(mesh, (32, 48), "float32", (ls.Replicated(), ls.Sharded(0)))
action = pick("matmul", [x, w])

whole_x = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
whole_w = np.random.default_rng(1).standard_normal((32, 48)).astype(np.float32)


def part(whole: np.ndarray, layout: ls.Layout, rank: int) -> np.ndarray:
    """Return what a rank holds of an array."""
    return np.ascontiguousarray(whole[tuple(slice(*edges) for edges in layout.box(rank))])


with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
    (y,) = run_action(action, [part(whole_x, x, comm.rank), part(whole_w, w, comm.rank)], comm)
    replicated = ls.Layout(mesh, (64, 48), "float32", (ls.Replicated(), ls.Replicated()))
    whole_y = ls.redistribute(y, action.outputs[0], replicated, comm)
    if comm.rank == 0:
        print(action.explain(), end="\n\n")
        print(f"equals x @ w: {np.allclose(whole_y, whole_x @ whole_w, atol=1e-4)}")
