"""Run by every rank of a job: random rows of random ops, seeded alike, each checked against the op on whole arrays."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from mpi4py import MPI
from support.op_gate import random_action, shards
from support.op_samples import SAMPLES

from lowshard import comm as lc
from lowshard import redistribute
from lowshard.op import run_action, unsharded
from lowshard.placement import Replicated

count, seed = map(int, sys.argv[1:])
with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
    rng = np.random.default_rng(seed)
    done = 0
    while done < count:
        op = str(rng.choice(sorted(SAMPLES)))
        arrays, args = SAMPLES[op](rng)
        action = random_action(rng, op, arrays, args, "extended")
        if action is None or max(action.mesh.ranks) >= comm.size:
            continue
        operands = [
            shards(rng, layout, x).get(comm.rank) for layout, x in zip(action.sources, arrays, strict=True)
        ]
        made = run_action(action, operands, comm)
        for part, layout, whole in zip(made, action.outputs, unsharded(op, *arrays, **args), strict=True):
            everywhere = layout.with_placements((Replicated(),) * layout.mesh.ndim)
            came = redistribute(part, layout, everywhere, comm)
            if comm.rank in layout.mesh:
                np.testing.assert_allclose(came, whole, rtol=3e-4, atol=3e-4, err_msg=str(action))
        done += 1
    if comm.rank == 0:
        print(f"{count} ops right on {comm.size} ranks")
