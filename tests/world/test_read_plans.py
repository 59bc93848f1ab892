"""Plans that were damaged on the way are refused, or give the result that their layouts ask for."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from support import mode, outside_data
from support.mutation import mutated, spoilt

from lowshard import (
    DeviceMesh,
    Layout,
    Partial,
    RedistributePlan,
    Replicated,
    Sharded,
    execute,
    plan_redistribute,
)
from lowshard.box import relative_slices
from lowshard.comm import Communicator, run_loopback
from lowshard.errors import LowshardError
from lowshard.op.graph import prove
from lowshard.reading import READERS
from lowshard.reshard import execute_reshard_plan
from lowshard.reshard.plan import ReshardPlan
from lowshard.solver import GraphPlan

CASES = 10_000 if mode.full() else 150


def damaged(name: str, data: Any, read: Any) -> list[Any]:
    """Return what was read of so many damaged copies; those that are refused are left out."""
    found = []
    for case in range(CASES):
        rng = random.Random(f"{mode.seed()} {name} {case}")
        try:
            if case % 2:
                text = spoilt(json.dumps(data).encode(), rng).decode("latin-1")
                try:
                    made = json.loads(text)
                except (ValueError, RecursionError):
                    continue
            else:
                made = mutated(data, rng)
            found.append(read(made))
        except LowshardError:
            pass
    print(f"{name}: {CASES} cases, {len(found)} read")
    return found


def test_redistribution_plans() -> None:
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    src = Layout(mesh, (5, 6), "float64", (Partial("sum"), Sharded(0)))
    plan = plan_redistribute(src, src.with_placements((Sharded(1), Replicated())))
    value = np.arange(30.0).reshape(5, 6)
    for read in damaged("redistribution plan", plan.to_json(), RedistributePlan.from_json):
        if (read.src, read.dst) != (plan.src, plan.dst):
            continue  # another plan altogether; it was verified as such

        def work(comm: Communicator, read: RedistributePlan = read) -> np.ndarray:
            box = tuple(slice(a, b) for a, b in src.box(comm.rank))
            mine = value[box] if mesh.coord(comm.rank)[0] == 0 else np.zeros(src.local_shape(comm.rank))
            return execute(read, np.ascontiguousarray(mine), comm)

        for rank, came in enumerate(run_loopback(4, work, timeout_s=30.0)):
            np.testing.assert_array_equal(came, value[tuple(slice(a, b) for a, b in plan.dst.box(rank))])


def test_reshard_plans() -> None:
    plan = outside_data.reshard()
    for read in damaged("reshard plan", outside_data.plain(plan.to_json()), ReshardPlan.from_json):
        if read.world_size <= 4:
            run_reshard(read)


def run_reshard(plan: ReshardPlan) -> None:
    whole = {
        e.name: np.arange(np.prod(e.src.shape), dtype=e.src.dtype).reshape(e.src.shape) for e in plan.entries
    }

    def part(layout: Any, rank: int, array: np.ndarray) -> np.ndarray | None:
        shape = layout.local_shape(rank)
        if shape is None:
            return None
        out = np.empty(shape, array.dtype)
        for tile in layout.tiles(rank):
            out[relative_slices(tile.local, ((0, 0),) * len(shape))] = array[
                relative_slices(tile.box, ((0, 0),) * len(shape))
            ]
        return out

    def work(comm: Communicator) -> dict[str, np.ndarray]:
        mine = {e.src_local_name(comm.rank): part(e.src, comm.rank, whole[e.name]) for e in plan.entries}
        shapes = {
            e.dst_local_name(comm.rank): (e.dst.local_shape(comm.rank), e.dst.dtype) for e in plan.entries
        }
        out = {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items() if shape is not None}
        execute_reshard_plan(plan, {n: a for n, a in mine.items() if a is not None}, out, comm)
        return out

    for rank, came in enumerate(run_loopback(4, work, timeout_s=30.0)):
        for e in plan.entries:
            wanted = part(e.dst, rank, whole[e.name])
            if wanted is not None:
                np.testing.assert_array_equal(came[e.dst_local_name(rank)], wanted)


def test_graph_plans() -> None:
    plan = outside_data.plain(outside_data.graph_plan().to_json())
    for read in damaged("graph plan", plan, GraphPlan.from_json):
        if max(map(np.prod, read.graph.shapes)) < 1e4 and read.mesh.world_size <= 4:
            assert prove(read, tolerance=1e-2) <= 1e-2


@pytest.mark.parametrize("name", ["load plan", "exchange", "flat plan", "action"])
def test_single_numbers_of_a_plan(name: str) -> None:
    """Every number of a sound plan, changed by one: refused, or it was none that a result depends on."""
    outside_data.import_everything()
    data, accepted = outside_data.plain(outside_data.samples()[name]), set()

    def walk(holder: Any, key: Any, place: str) -> None:
        value = holder[key]
        if isinstance(value, (dict, list)):
            for inner in value if isinstance(value, dict) else range(len(value)):
                walk(value, inner, f"{place}.{inner}" if isinstance(value, dict) else place + "[]")
        elif isinstance(value, int) and not isinstance(value, bool):
            holder[key] = value + 1
            try:
                READERS[name](data)
                accepted.add(place)
            except LowshardError:
                pass
            holder[key] = value

    walk({"": data}, "", "")
    free = {
        # another reader, a box of which no more is taken, an array that nobody holds the end of; the checkpoint tells
        "load plan": {".nodes[]", ".reads[][]", ".reads[][][][]", ".tilings[][].shape[]"},
        "exchange": {".node_size", ".src.mesh.shape[]", ".dst.mesh.shape[]"},  # one between two meshes
        "flat plan": {".shards", ".shard_elems", ".align"},  # room behind the parameters
        "action": set(),
    }[name]
    assert accepted <= free, accepted
