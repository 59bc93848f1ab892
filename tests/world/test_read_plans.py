"""Plans that were damaged on the way are refused, or give the result that their layouts ask for."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from support import mode, outside_data
from support.moves import random_pair, run_plan
from support.mutation import mutated, places, spoilt
from support.reshard_cases import local_part, random_case

from lowshard import (
    DeviceMesh,
    Layout,
    Partial,
    RedistributePlan,
    Replicated,
    Sharded,
    dtypes,
    plan_redistribute,
)
from lowshard.comm import Communicator, run_loopback
from lowshard.errors import LowshardError, PlanError
from lowshard.exchange import Exchange
from lowshard.fsdp import Param
from lowshard.fsdp.flat_plan import FlatPlan
from lowshard.reading import READERS
from lowshard.redistribute_plan import Step
from lowshard.reshard import execute_reshard_plan
from lowshard.reshard.reshard_plan import ReshardPlan

CASES = 10_000 if mode.full() else 150
PLANS = 40
"""Sound ones of a kind."""
MOST_RANKS, MOST_ELEMS = 8, 100_000
"""Of plans that are run."""


def check_damaged(name: str, sound: Sequence[Any], run: Callable[[Any], bool]) -> None:
    """Read so many damaged copies, and all in which one number is larger by one; run what is read.

    Args:
        name: of the reader.
        sound: plain data of sound plans; of the first every number is changed in turn.
        run: runs a value that was read and asserts that its result is right; False where the value was not run.
    """
    sound = [outside_data.plain(data) for data in sound]
    outside_data.import_everything()
    read, count, came, ran = READERS[name], 0, 0, 0
    for made in itertools.chain(larger_by_one(sound[0]), random_damage(name, sound)):
        count += 1
        try:
            found = read(made)
        except LowshardError:
            continue
        came += 1
        try:
            ran += run(found)
        except Exception as error:
            error.add_note(f"{name}, case {count}: {json.dumps(made)}")
            raise
    print(f"{name}: {count} cases, {came} read, {ran} run")
    assert ran


def random_damage(name: str, sound: Sequence[Any]) -> Iterator[Any]:
    rng, found = random.Random(f"{mode.seed()} {name}"), 0
    while found < CASES:
        data = rng.choice(sound)
        if rng.random() < 0.5:
            made = mutated(data, rng)
        else:
            try:
                made = json.loads(spoilt(json.dumps(data).encode(), rng).decode("latin-1"))
            except (ValueError, RecursionError):
                continue
        found += 1
        yield made


def larger_by_one(data: Any) -> Iterator[Any]:
    """Yield the data with each of its numbers changed in turn: one value, changed in place."""
    data = copy.deepcopy(data)
    for holder, key in places(data):
        value = holder[key]
        if isinstance(value, int) and not isinstance(value, bool):
            holder[key] = value + 1
            yield data
            holder[key] = value


def redistributions() -> list[RedistributePlan]:
    rng = random.Random(f"{mode.seed()} redistributions")
    return [outside_data.redistribution(), *(plan_redistribute(*random_pair(rng, 4)) for _ in range(PLANS))]


def test_redistribution_plans() -> None:
    check_damaged("redistribution plan", [plan.to_json() for plan in redistributions()], run_redistribution)


def of_integers(*plans: RedistributePlan) -> list[Any]:
    """Return the steps of plans for float32, one plan after the other, as those of a plan for int32."""
    steps = [step for plan in plans for step in plan.to_json()["steps"]]
    found: list[Any] = json.loads(json.dumps(steps).replace("float32", "int32"))
    return found


def test_steps_that_are_missing_or_lead_elsewhere_are_refused() -> None:
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    means, half, whole, cut = (
        Layout(mesh, (4, 4), "float32", placements)
        for placements in (
            (Partial("avg"), Partial("avg")), (Replicated(), Partial("avg")), (Replicated(), Replicated()),
            (Sharded(0), Sharded(1)),
        )
    )  # fmt: skip
    other = Layout(DeviceMesh((4,), ("tp",)), (4, 4), "float32", (Sharded(0),))
    for src, dst in itertools.permutations((whole, cut, other, half, means), 2):
        if not any(dst.partials):
            with pytest.raises(PlanError):
                RedistributePlan.from_json({**plan_redistribute(src, dst).to_json(), "steps": []})
    between = plan_redistribute(half, whole).to_json()
    assert len(between["steps"][0]["exchanges"]) == 2
    between["steps"][0]["exchanges"][1]["src"]["spec"].reverse()
    with pytest.raises(PlanError, match="step 1 of this plan is not what leads"):
        RedistributePlan.from_json(between)
    integers = [Layout(mesh, (4, 4), "int32", layout.placements) for layout in (means, whole)]
    rounded_twice = of_integers(plan_redistribute(means, half), plan_redistribute(half, whole))
    with pytest.raises(PlanError, match="folded in one step"):
        RedistributePlan.from_json({**plan_redistribute(*integers).to_json(), "steps": rounded_twice})
    integers = [Layout(mesh, (4, 4), "int32", layout.placements) for layout in (means, half)]
    folded_apart = of_integers(plan_redistribute(means, half))
    with pytest.raises(PlanError, match="at most by way of None"):
        RedistributePlan.from_json({**plan_redistribute(*integers).to_json(), "steps": folded_apart})


def test_exchanges() -> None:
    def run(read: Exchange) -> bool:
        return run_redistribution(RedistributePlan(read.src, read.dst, (Step("exchange", (), (read,)),)))

    exchanges = [
        part.to_json() for plan in redistributions() for step in plan.steps for part in step.exchanges
    ]
    check_damaged("exchange", exchanges, run)


def run_redistribution(plan: RedistributePlan) -> bool:
    if plan.world_size > MOST_RANKS or math.prod(plan.src.shape) > MOST_ELEMS:
        return False
    run_loopback(plan.world_size, lambda comm: run_plan(comm, plan, seed=1), timeout_s=30.0)
    return True


def test_reshard_plans(rng: np.random.Generator) -> None:
    plans = [outside_data.reshard(), *(random_case(rng, 4).plan for _ in range(PLANS))]
    check_damaged("reshard plan", [plan.to_json() for plan in plans], run_reshard)


def run_reshard(plan: ReshardPlan) -> bool:
    if plan.world_size > MOST_RANKS or any(math.prod(e.src.shape) > MOST_ELEMS for e in plan.entries):
        return False
    whole = {}
    for e in plan.entries:
        values = np.arange(math.prod(e.src.shape)) % 120
        whole[e.name] = values.reshape(e.src.shape).astype(dtypes.get(e.src.dtype).numpy)

    def work(comm: Communicator) -> dict[str, np.ndarray]:
        src, dst = {}, {}
        for e in plan.entries:
            if comm.rank in e.src:
                src[e.src_local_name(comm.rank)] = local_part(e.src, comm.rank, whole[e.name])
            if comm.rank in e.dst:
                wanted = local_part(e.dst, comm.rank, whole[e.name])
                dst[e.dst_local_name(comm.rank)] = np.full_like(wanted, 77)
        execute_reshard_plan(plan, src, dst, comm)
        return dst

    for rank, came in enumerate(run_loopback(plan.world_size, work, timeout_s=30.0)):
        for e in plan.entries:
            if rank in e.dst:
                np.testing.assert_array_equal(
                    came[e.dst_local_name(rank)], local_part(e.dst, rank, whole[e.name])
                )
    return True


def test_flat_plans(rng: np.random.Generator) -> None:
    """Shards that are cut by a plan hold every element of every parameter once, where the plan says."""

    def run(plan: FlatPlan) -> bool:
        if plan.size > MOST_ELEMS:
            return False
        flat = np.full(plan.size, -1)
        for number, view in enumerate(plan.views(flat).values()):
            assert (view == -1).all(), "a place belongs to one parameter"
            view[...] = np.arange(view.size).reshape(view.shape) + 1000 * number
        found: dict[str, list[int]] = {entry.name: [] for entry in plan.entries}
        for rank in range(plan.shards):
            shard = flat[slice(*plan.range(rank))]
            for piece in plan.pieces(rank):
                assert len(found[piece.name]) == piece.param_lo
                found[piece.name].extend(shard[piece.shard_lo : piece.shard_hi])
        for number, entry in enumerate(plan.entries):
            assert found[entry.name] == list(range(1000 * number, 1000 * number + math.prod(entry.shape)))
        return True

    plans = []
    for _ in range(PLANS):
        shapes = [tuple(rng.integers(0, 9, rng.integers(0, 3)).tolist()) for _ in range(rng.integers(1, 5))]
        params = [Param(f"p{i}", shape, keep=int(rng.choice([1, 1, 2, 8]))) for i, shape in enumerate(shapes)]
        align = int(rng.choice([1, 2, 32]))
        plans.append(FlatPlan.plan(params, int(rng.integers(1, 5)), align=align))
    check_damaged("flat plan", [json.loads(plan.to_json()) for plan in plans], run)
