"""Run by every rank of a job: the example graphs, solved and walked, run on shards and compared with the whole."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mpi4py import MPI

from lowshard import DeviceMesh, Replicated, redistribute
from lowshard import comm as lc
from lowshard.op import run_graph, run_unsharded
from lowshard.op.graph_run import random_inputs, shard
from lowshard.solver import GraphSolver, GreedyReshard, Rates, solve_graph
from lowshard.solver.graph.graph_file import load_graph

SIZES = {"mlp": {"tokens": 24}, "attention": {"batch": 2, "length": 12}}
with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
    ran = 0
    meshes = [DeviceMesh((comm.size,), ("tp",))]
    if comm.size % 2 == 0:
        meshes.append(DeviceMesh((2, comm.size // 2), ("dp", "tp")))
    for name, sizes in SIZES.items():
        graph, _ = load_graph(name)
        bound = graph.bind(sizes)
        arrays = random_inputs(bound, 5)
        expected = run_unsharded(bound, arrays)
        for mesh in meshes:
            free = GraphSolver(rates=Rates(1e9, 1e9)).solve(bound, mesh)
            tight = GraphSolver(rates=Rates(1e9, 1e9), budget_bytes=0.8 * free.peak_bytes)
            for plan in (free, tight.solve(bound, mesh), solve_graph(bound, mesh, GreedyReshard())):
                mine = {n: shard(plan.layout(n), v, comm.rank) for n, v in arrays.items()}
                came = run_graph(plan, mine, comm)
                for out, layout in plan.output_layouts.items():
                    whole = layout.with_placements([Replicated()] * mesh.ndim)
                    full = redistribute(came[out], layout, whole, comm)
                    np.testing.assert_allclose(full, expected[out], rtol=1e-3, atol=1e-4)
                ran += 1
    if comm.rank == 0:
        print(f"{ran} graphs right on {comm.size} ranks")
