"""Which strategies give FullShard's bits, and norms of gradients that are not finite: exactly as the docstrings say."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from support import mode

from lowshard import comm as lc
from lowshard import dtypes
from lowshard.fsdp import FSDP, Param, Precision, ShardingStrategy

UNITS = {"a": [Param("w", (7, 31)), Param("b", (3,))], "z": [Param("w", (130,))]}
PRECISIONS = {
    "float32": Precision(), "bfloat16 sums": Precision(reduce="bfloat16"), "float16 sums": Precision(reduce="float16"),
    "bfloat16 gradients": Precision(compute="bfloat16"), "float64": Precision(compute="float64", master="float64"),
    "bfloat16": Precision(compute="bfloat16", reduce="bfloat16", master="bfloat16"),
    "bfloat16 computed, float64 sums": Precision(compute="bfloat16", reduce="float64"),
}  # fmt: skip


def random_grads(rng: np.random.Generator) -> Any:
    return lambda name, shape: rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6)


def set_grads(engine: FSDP, value: Any) -> None:
    """Write a micro-batch's gradients, `value(name, shape)`, and start their sums."""
    for unit in UNITS:
        engine.open(unit, "backward")
        for name, view in engine.grads(unit).items():
            view[...] = value(f"{unit}.{name}", view.shape)
        engine.reduce(unit)
        engine.close(unit)


def reduced(
    world: int, strategy: ShardingStrategy, precision: Precision, **options: Any
) -> tuple[dict[str, Any], bool]:
    """Return the whole reduced gradients of random ones, and whether they are said to be FullShard's."""
    micro_batches = options.pop("micro_batches", 1)

    def run(comm: lc.Communicator) -> tuple[list[tuple[str, int, np.ndarray]], bool]:
        with FSDP(UNITS, comm, strategy, precision=precision, **options) as engine:
            engine.fill(lambda name, box: 0.0)
            for micro in range(micro_batches):
                with engine.step(last=micro == micro_batches - 1):
                    set_grads(engine, random_grads(np.random.default_rng([comm.rank, micro])))
            engine.join()
            held = [
                (
                    f"{slot.unit}.{piece.name}",
                    piece.param_lo,
                    slot.grad[piece.shard_lo : piece.shard_hi].copy(),
                )
                for slot in engine.slots()
                for piece in slot.pieces
            ]
            return held, engine.report().full_shard_bits

    found = lc.run_loopback(world, run, 60)
    whole = {
        f"{unit}.{param.name}": np.zeros(param.elems, dtypes.get(precision.master).numpy)
        for unit, params in UNITS.items()
        for param in params
    }
    for held, _ in found:
        for name, start, values in held:
            whole[name][start : start + values.size] = values
    assert len({said for _, said in found}) == 1
    return whole, found[0][1]


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(a[name].tobytes() == b[name].tobytes() for name in a)


@pytest.mark.time_limit(60 if not mode.full() else 900)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_strategies_have_the_bits_of_full_shard_just_where_they_say(precision: str) -> None:
    cases = [
        (world, size) for world in range(2, 13) for size in range(world) if size == 0 or world % size == 0
    ]
    kept: dict[int, dict[str, Any]] = {}
    for world, size in mode.sample(cases, 3, f"bits in {precision}"):
        if world not in kept:
            kept[world], said = reduced(world, ShardingStrategy.FullShard, PRECISIONS[precision])
            assert said
        for strategy in (
            [ShardingStrategy.HybridShard(size)] if size
            else [ShardingStrategy.NoShard, ShardingStrategy.ShardGradOp]
        ):  # fmt: skip
            found, said = reduced(world, strategy, PRECISIONS[precision])
            groups = world // size if size > 1 else 1
            wide = precision in (
                "float32",
                "float64",
                "bfloat16 gradients",
                "bfloat16 computed, float64 sums",
            )
            assert said == (groups == 1 or (wide and groups in (1, 2, 4, 8))), (world, strategy)
            # Else sums are hardly rounded.
            if said or "bfloat16 " not in precision or "bfloat16 sums" in precision:
                assert same(found, kept[world]) == said, (world, strategy)


def test_several_micro_batches_and_other_orders_keep_to_it_too() -> None:
    rng = random.Random(f"{mode.seed()} bits")
    for _ in range(40 if mode.full() else 3):
        world = rng.choice([2, 3, 4, 6, 8, 9, 12])
        size = rng.choice([n for n in range(1, world + 1) if world % n == 0])
        options: dict[str, Any] = {
            "micro_batches": rng.choice([1, 2, 3]), "order": rng.choice(["tree", "tree", "rank"]),
            "average": rng.choice(["mean", "sum", 3.0]), "communicators": rng.choice([1, 2]),
        }  # fmt: skip
        precision = PRECISIONS[rng.choice(sorted(PRECISIONS))]
        full, _ = reduced(world, ShardingStrategy.FullShard, precision, **options)
        found, said = reduced(world, ShardingStrategy.HybridShard(size), precision, **options)
        assert same(found, full) or not said, (world, size, options, precision)
        plain, said = reduced(world, ShardingStrategy.NoShard, precision, **options)
        assert said
        assert same(plain, full), (world, options, precision)


def test_micro_batches_that_are_summed_one_by_one_are_not_said_to_be_the_same() -> None:
    options = {"micro_batches": 2, "accumulate": "reduce"}
    full, said = reduced(4, ShardingStrategy.FullShard, Precision(), **options)
    found, claimed = reduced(4, ShardingStrategy.HybridShard(2), Precision(), **options)
    assert said
    assert not claimed
    assert not same(found, full)


# ---- norms


STRATEGIES = [
    ShardingStrategy.FullShard, ShardingStrategy.ShardGradOp, ShardingStrategy.NoShard, ShardingStrategy.HybridShard(1),
    ShardingStrategy.HybridShard(2),
]  # fmt: skip
PLACES = [("a.w", 0), ("a.w", 216), ("a.b", 2), ("z.w", 0), ("z.w", 129)]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
@pytest.mark.parametrize("p", mode.sample([1, 2, 3, 0.5, 0.01, math.inf, np.float32(2)], 3, "norms"))
def test_a_norm_shows_what_is_not_finite_wherever_it_is(strategy: ShardingStrategy, p: float) -> None:
    cases: list[dict[tuple[str, int], float]] = [{}, {place: -0.0 for place in PLACES}]
    cases += [{place: bad} for place in PLACES for bad in (math.nan, math.inf, -math.inf)]
    cases += [{PLACES[0]: math.inf, PLACES[4]: math.nan}, {PLACES[0]: math.nan, PLACES[4]: -math.inf}]
    chosen = mode.sample(cases, 3, f"norm {p} {strategy}")

    def run(comm: lc.Communicator) -> list[tuple[float, float, list[np.ndarray]]]:
        found = []
        for master in ("float32", "bfloat16"):
            precision = Precision(master=master, compute=master)
            with FSDP(UNITS, comm, strategy, precision=precision, average="sum") as engine:
                engine.fill(lambda name, box: 0.0)
                for case in chosen:
                    with engine.step():
                        set_grads(engine, lambda name, shape: one_rank(comm, case, name, shape))  # noqa: B023
                    engine.join()
                    norm = engine.norm(p)
                    clipped = engine.clip(1.0, p)
                    found.append((norm, clipped, [slot.grad.astype(np.float32) for slot in engine.slots()]))
                    engine.update(lambda slot: None)
                    engine.broadcast_updated_params()
        return found

    def one_rank(comm: lc.Communicator, case: Any, name: str, shape: tuple[int, ...]) -> np.ndarray:
        value = np.zeros(int(np.prod(shape)), np.float32)
        if comm.rank == comm.size - 1:  # a sum with the others' zeros
            value[:] = np.linspace(-1, 1, value.size)
            for (where, at), given in case.items():
                if where == name:
                    value[at] = given
        return value.reshape(shape)

    for rows in zip(*lc.run_loopback(4, run, 60), strict=True):
        norms = {repr(row[:2]) for row in rows}
        assert len(norms) == 1, norms
    for case, (norm, clipped, _) in zip(chosen * 2, lc.run_loopback(4, run, 60)[0], strict=True):
        values = list(case.values())
        if any(map(math.isnan, values)):
            assert math.isnan(norm)
        elif any(map(math.isinf, values)) or (p == 0.01 and norm == math.inf):
            assert norm == math.inf
        else:
            assert math.isfinite(norm)
            assert norm > 0
        assert repr(clipped) == repr(norm)


def test_clipping_at_infinity_changes_nothing_and_below_the_norm_scales() -> None:
    def run(comm: lc.Communicator) -> None:
        with FSDP({"u": [Param("w", (40,))]}, comm, average="sum") as engine:
            engine.fill(lambda name, box: 0.0)
            for bad in (2.0, math.inf, math.nan):
                for p in (2, math.inf, 3):
                    with engine.step():
                        engine.open("u", "backward")
                        engine.grads("u")["w"][...] = [bad] + [1.0] * 39
                        engine.reduce("u")
                        engine.close("u")
                    engine.join()
                    slot = next(engine.slots())
                    before = slot.grad.copy()
                    norm = engine.clip(math.inf, p)
                    assert math.isfinite(norm) == math.isfinite(bad)
                    assert slot.grad.tobytes() == before.tobytes()
                    if bad == 2:
                        factor = np.float32(0.9 * norm / (norm + 1e-6))
                        assert engine.clip(0.9 * norm, p) == norm
                        assert slot.grad.tobytes() == (before * factor).tobytes()
                    engine.update(lambda slot: None)

    lc.run_loopback(2, run, 20)
