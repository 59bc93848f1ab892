"""The step `redistribute`: layouts to layouts over MPI ranks, against slices of the whole array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from lowshard import DeviceMesh, Layout, Partial, Replicated, Sharded, execute, plan_redistribute
from lowshard.box import slices_of
from lowshard.comm import Communicator
from lowshard.placement import Placement
from lowshard.selftest.arrays import hard, ordinary, put, settle
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.fold_cases import plain_fold
from lowshard.selftest.ranks import run_over_mpi
from lowshard.selftest.steps import Setting

_SHAPE = (67, 353)


def run(setting: Setting, tally: Tally) -> None:
    """Run the transitions on ranks."""
    through = run_over_mpi("redistribute_step", setting, tally)
    tally.summary = f"{tally.checks} shards, {setting.ranks} MPI ranks through {through}"


def run_rank(comm: Communicator, tally: Tally) -> None:
    """Run every transition as one rank. Collective: all ranks of the communicator call this."""
    for src, dst in transitions(comm.size, _SHAPE, ("float32", "bfloat16", "int64")):
        partial = any(isinstance(placement, Partial) for placement in src.placements)
        make, terms = (ordinary, comm.size) if partial else (hard, 1)
        wholes = [make(_SHAPE, src.dtype, "redistribute", rank) for rank in range(terms)]
        mine = wholes[comm.rank % terms][slices_of(src.box(comm.rank))]
        out = execute(plan_redistribute(src, dst), put(comm.xp, mine), comm)
        whole = plain_fold(wholes, "sum", "tree") if partial else wholes[0]
        what = f"{src} to {dst} on rank {comm.rank} of {comm.size}"
        tally.same(what, out, np.ascontiguousarray(whole[slices_of(dst.box(comm.rank))]))
    settle(comm.xp)


def transitions(size: int, shape: tuple[int, int], dtypes: Sequence[str]) -> Iterator[tuple[Layout, Layout]]:
    """Yield layouts of one array on one mesh of so many ranks, and those that it moves to."""
    states: tuple[Placement, ...] = (
        Replicated(),
        Sharded(0),
        Sharded(1),
        Sharded(0, "ceil"),
        Sharded(1, "ceil"),
    )
    line = DeviceMesh((size,), ("x",))
    pairs: list[tuple[DeviceMesh, tuple[Placement, ...], tuple[Placement, ...]]]
    pairs = [(line, (have,), (want,)) for have, want in product((*states, Partial("sum")), states)]
    if size % 2 == 0:
        grid = DeviceMesh((2, size // 2), ("x", "y"))
        two: list[tuple[Placement, ...]] = [
            (Sharded(0), Sharded(1)),
            (Replicated(), Sharded(0)),
            (Sharded(1), Sharded(1)),
        ]
        pairs += [(grid, have, want[::-1]) for have, want in product(two, two)]
    for (mesh, have, want), dtype in product(pairs, dtypes):
        yield Layout(mesh, shape, dtype, have), Layout(mesh, shape, dtype, want)
