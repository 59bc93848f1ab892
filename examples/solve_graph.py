"""Choose the layouts of a whole graph, and prove the plan on random shards.

    python examples/solve_graph.py

The solver weighs compute, the collectives inside ops, and moves between them, within a memory budget a device. `prove`
runs the plan, a thread a rank, and compares with the unsharded result. `run_graph` runs it on your arrays.

Output:

    mlp on dp=2 tp=2: ... ms, 2 moves, ... MB a device, integer program
    ...
    tensor    shape              layout  ...
    x         float32[128,512]   dp=R tp=R ...
    ...
    run on random shards: at most ... from the unsharded result
"""

import lowshard as ls
from lowshard.op import prove
from lowshard.solver import Graph, GraphSolver

graph = Graph("mlp")
x = graph.input("x", ("tokens", 512), place="R")
hidden = graph.pointwise("gelu", graph.matmul(x, graph.weight("up", (512, 2048))))
graph.output(graph.matmul(hidden, graph.weight("down", (2048, 512)), name="y"), place="R")

mesh = ls.DeviceMesh((2, 2), ("dp", "tp"))
plan = GraphSolver(budget_bytes=4e6).solve(graph, mesh, {"tokens": 128})
print(plan.explain())
print(f"run on random shards: at most {prove(plan):.0e} from the unsharded result")
