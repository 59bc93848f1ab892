"""Refit: weights that are trained on some ranks and served on others, version by version.

    lowshard run -n 4 examples/refit.py

Ranks 0 and 1 train, with the gate and up halves of a fused layer sharded separately over two ranks; ranks 2 and 3
serve, with columns. A version is switched to when all of it has arrived and all ranks agree; until then the
old one is served.

Output of rank 0:

    version 1: rank 2 serves [1.0, 1.0], rank 3 serves [1.0, 1.0]
    version 2: rank 2 serves [2.0, 2.0], rank 3 serves [2.0, 2.0]
    version 3: rank 2 serves [3.0, 3.0], rank 3 serves [3.0, 3.0]
"""

from mpi4py import MPI

from lowshard import comm as lc
from lowshard.reshard import DimSharding, Refit, TensorLayout, build_reshard_plan

SHAPE = (4096, 1024)
two_ranks = {"tp": (2, 1)}  # an axis of 2 ranks, 1 apart
halves = DimSharding(SHAPE[0], 2, chunks=2)  # gate and up: rank 0 holds the first part of both
train = {"fc1": TensorLayout.sharded(SHAPE, "bfloat16", two_ranks, {0: halves}, by={0: "tp"})}
serve = {"fc1": TensorLayout.sharded(SHAPE, "bfloat16", two_ranks, {1: "tp"}, offset=2)}
plan = build_reshard_plan(train, serve)  # equal on every rank; see plan.explain()

with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
    mine = {n: comm.empty(x.local_shape(comm.rank), x.dtype) for n, x in train.items() if comm.rank in x}
    out = {n: comm.empty(x.local_shape(comm.rank), x.dtype) for n, x in serve.items() if comm.rank in x}
    with Refit(plan, comm, mine, out) as refit:  # makes a second set of `out`
        for version in (1, 2, 3):
            for array in mine.values():
                array[...] = version  # a training step would do this
            refit.push(version) if mine else refit.pull()
            ends = [float(w[i, i]) for w in refit.weights.values() for i in (0, -1)]
            shown = MPI.COMM_WORLD.gather(ends)
            if shown:
                print(f"version {refit.version}: rank 2 serves {shown[2]}, rank 3 serves {shown[3]}")
