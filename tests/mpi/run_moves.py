"""Run by every rank of a job: random pairs of layouts, seeded alike, each checked against slicing."""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mpi4py import MPI
from support.moves import WAYS, check_move, random_pair, take_way

from lowshard import comm as lc
from lowshard.comm.node import fold_views
from lowshard.cost import ClusterProfile

count, seed = map(int, sys.argv[1:])
with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
    rng = random.Random(seed)
    for number in range(count):
        src, dst = random_pair(rng, comm.size)
        fold_views.FOLD_FROM_BYTES = number % 2 << 15
        take_way(WAYS[number % len(WAYS)])
        floats = number % 3 == 0 and src.dtype in ("float32", "float64")
        cost = ClusterProfile.default() if number % 5 == 0 else None
        nodes = rng.choice((None, 1, 2, 3)) if cost else None
        check_move(comm, src, dst, number, "float" if floats else "int", cost, nodes)
    if comm.rank == 0:
        print(f"{count} moves right on {comm.size} ranks")
