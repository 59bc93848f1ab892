"""Partial sums to the same bits, whatever moves them: order="tree".

    lowshard run -n 4 examples/sum_order.py

Floating-point sums depend on their order. "tree" adds in a balanced binary tree over the ranks and "rank" one after
the other, with the same bits on every transport; "fast" leaves the order to the transport.

Output of rank 0:

    tree: equals (x0 + x1) + (x2 + x3): True
    rank: equals ((x0 + x1) + x2) + x3: True
    tree and rank differ in 277 of 1000 sums
    all_reduce, reduce_scatter and redistribute give the same bits: True
"""

import numpy as np
from mpi4py import MPI

import lowshard as ls
from lowshard import comm as lc

parts = np.random.default_rng(0).standard_normal((4, 1000)).astype(np.float32)

with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
    mine = parts[comm.rank]
    tree, rank = np.empty_like(mine), np.empty_like(mine)
    comm.all_reduce(mine, tree, order="tree")
    comm.all_reduce(mine, rank, order="rank")

    scattered = np.empty(250, np.float32)
    comm.reduce_scatter(mine, scattered, order="tree")
    mesh = ls.DeviceMesh((4,), ("tp",))
    partial = ls.Layout(mesh, (1000,), "float32", (ls.Partial("sum"),))
    cut = ls.Layout(mesh, (1000,), "float32", (ls.Sharded(0),))
    moved = ls.redistribute(mine, partial, cut, comm)  # partial terms are always added in the tree

    if comm.rank == 0:
        x = parts
        print(f"tree: equals (x0 + x1) + (x2 + x3): {np.array_equal(tree, (x[0] + x[1]) + (x[2] + x[3]))}")
        print(f"rank: equals ((x0 + x1) + x2) + x3: {np.array_equal(rank, ((x[0] + x[1]) + x[2]) + x[3])}")
        print(f"tree and rank differ in {np.count_nonzero(tree != rank)} of 1000 sums")
        same = np.array_equal(scattered, tree[:250]) and np.array_equal(moved, tree[:250])
        print(f"all_reduce, reduce_scatter and redistribute give the same bits: {same}")
