"""The step `redistribute`: layouts to layouts over MPI ranks, against slices of the whole array."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lowshard import DeviceMesh, Layout, Partial, Replicated, Sharded, execute, plan_redistribute
from lowshard.box import slices_of
from lowshard.comm import Communicator
from lowshard.placement import Placement
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.device_arrays import put, settle
from lowshard.selftest.over_mpi import run_over_mpi
from lowshard.selftest.plain_fold import plain_fold
from lowshard.selftest.random_arrays import hard, ordinary
from lowshard.selftest.step_setting import Setting

_SHAPE = (67, 353)
_DTYPES = ("float32", "bfloat16", "int64")


def run(setting: Setting, tally: Tally) -> None:
    """Run the transitions on ranks."""
    through = run_over_mpi("redistribute", setting, tally)
    tally.summary = f"{tally.checks} shards, {setting.ranks} MPI ranks through {through}"


def move_everything(comm: Communicator, tally: Tally) -> None:
    """Run every transition as one rank. Collective."""
    for mesh, have, want in _transitions(comm.size):
        for dtype in _DTYPES:
            src, dst = Layout(mesh, _SHAPE, dtype, have), Layout(mesh, _SHAPE, dtype, want)
            is_partial = any(isinstance(placement, Partial) for placement in have)
            make = ordinary if is_partial else hard
            wholes = [
                make(_SHAPE, dtype, "redistribute", rank if is_partial else 0) for rank in range(comm.size)
            ]
            local = put(comm.xp, np.ascontiguousarray(wholes[comm.rank][slices_of(src.box(comm.rank))]))
            out = execute(plan_redistribute(src, dst), local, comm)
            whole = plain_fold(wholes, "sum", "tree") if is_partial else wholes[0]
            what = f"{_text(have)} to {_text(want)} {dtype} {list(_SHAPE)} on rank {comm.rank} of {comm.size}"
            tally.same(what, out, whole[slices_of(dst.box(comm.rank))])
    settle(comm.xp)


def _transitions(size: int) -> Iterator[tuple[DeviceMesh, tuple[Placement, ...], tuple[Placement, ...]]]:
    """Yield meshes over all ranks, and what moves on them."""
    line = DeviceMesh((size,), ("x",))
    states: tuple[Placement, ...] = (Sharded(0), Sharded(1), Sharded(1, "ceil"), Replicated())
    for have in (*states, Partial("sum")):
        for want in states:
            yield line, (have,), (want,)
    if size % 2 == 0:
        grid = DeviceMesh((2, size // 2), ("x", "y"))
        yield grid, (Sharded(0), Sharded(1)), (Sharded(1), Sharded(0))
        yield grid, (Replicated(), Sharded(0)), (Sharded(1), Replicated())


def _text(placements: tuple[Placement, ...]) -> str:
    return ", ".join(map(str, placements))
