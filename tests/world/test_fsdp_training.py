"""Sharded training on threads: every strategy, every number of ranks and plain NumPy give the same bits."""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import fsdp_kit as kit
from support import mode
from support.fsdp_kit import STRATEGIES, UNITS, fits

from lowshard import comm as lc
from lowshard.fsdp import FSDP, SGD, AdamW, Param, Precision, ShardingStrategy, Slot
from lowshard.kernels import dequantize_mxfp8, quantize_mxfp8

STEPS = 10


@pytest.fixture(scope="module")
def plain() -> tuple[kit.Plain, list[float]]:
    return kit.plain_run(STEPS)


def check_equals_plain(path: Path, world: int, name: str, plain: Any, **options: Any) -> list[kit.Trained]:
    """Train and compare with one plain process: weights, moments, norms."""
    found = lc.run_loopback(
        world, lambda c: kit.train(c, STRATEGIES[name], range(STEPS), path=path, **options), 30
    )
    kit.check_file(path, plain[0])
    assert all(trained.norms == plain[1] for trained in found)
    return found


@pytest.mark.parametrize(
    ("world", "name"),
    mode.sample([(w, n) for w in (1, 2, 4, 8) for n in STRATEGIES if fits(n, w)], 4, "fsdp worlds"),
)
def test_every_strategy_and_world_is_one_process_bit_for_bit(
    tmp_path: Path, world: int, name: str, plain: Any
) -> None:
    check_equals_plain(tmp_path / "m", world, name, plain)


def test_any_depth_delay_and_number_of_communicators_gives_the_same_bits(
    tmp_path: Path, plain: Any, rng: np.random.Generator, full: bool
) -> None:
    for case in range(20 if full else 4):
        world = int(rng.choice([2, 4, 8]))
        name = str(rng.choice([n for n in STRATEGIES if fits(n, world)]))
        options = {
            "prefetch": int(rng.integers(0, 4)),
            "open_limit": int(rng.integers(2, 5)),
            "grad_limit": int(rng.integers(1, 4)),
            "communicators": int(rng.integers(1, 3)),
            "check": str(rng.choice(["off", "digest", "poison"])),
        }
        waits = iter((rng.random(10_000) * 0.003).tolist())

        class Slow(kit.Model):
            def run(self, *args: Any, waits: Any = waits) -> float:
                time.sleep(next(waits))
                return super().run(*args)

        def train(
            c: lc.Communicator, name: str = name, options: Any = options, model: Any = Slow
        ) -> kit.Trained:
            path = tmp_path / f"m{case}"  # noqa: B023
            return kit.train(c, STRATEGIES[name], range(STEPS), path=path, model=model, **options)

        found = lc.run_loopback(world, train, 30)
        kit.check_file(tmp_path / f"m{case}", plain[0])
        assert all(trained.norms == plain[1] for trained in found), (name, options)


@pytest.mark.parametrize("order", ["rank", "fast"])
@pytest.mark.parametrize("name", mode.sample(["full", "none", "hybrid2"], 1, "fsdp orders"))
def test_other_orders_are_close(order: Any, name: str) -> None:
    """A reduced gradient is within 4 eps of the ranks' largest; after 10 steps weights within 1e-6 of the largest."""
    units = {"u": [Param("w", (83, 61))]}
    world, elems = 4, 83 * 61
    terms = 1 + np.random.default_rng(5).random((world, elems), np.float32)

    def train(comm: lc.Communicator, order: Any) -> tuple[np.ndarray, np.ndarray]:
        with FSDP(units, comm, STRATEGIES[name], order=order) as engine:
            engine.fill(lambda _, box: np.add.outer(np.arange(*box[0]), np.arange(*box[1])) / 200)
            rule, grad = AdamW(lr=1e-3), np.empty(0)
            for step in range(STEPS):
                with engine.step():
                    p = engine.open("u", "backward")
                    value = terms[comm.rank].reshape(83, 61)
                    engine.grads("u")["w"][...] = value if step == 0 else value * p["w"]
                    engine.reduce("u")
                    engine.close("u")
                engine.join()
                grad = next(engine.slots()).grad.copy() if step == 0 else grad
                engine.update(rule)
            return grad, engine.full("u.w")

    exact = terms.astype(np.float64).mean(0)
    tree = lc.run_loopback(world, lambda c: train(c, "tree"), 30)
    for rank, (grad, weights) in enumerate(lc.run_loopback(world, lambda c: train(c, order), 30)):
        first = grad.size * (rank % (world if name == "full" else 2 if name == "hybrid2" else 1))
        mine = exact[first : first + grad.size]
        assert np.abs(grad[: mine.size] - mine).max() <= 4 * 2**-24 * world * np.abs(terms).max()
        assert np.abs(weights - tree[rank][1]).max() <= 1e-6 * np.abs(weights).max()


# ---- files


def test_a_file_goes_on_with_any_number_of_ranks_and_any_strategy(tmp_path: Path, plain: Any) -> None:
    saved, half = tmp_path / "half", STEPS // 2
    lc.run_loopback(4, lambda c: kit.train(c, STRATEGIES["full"], range(half), path=saved), 30)
    for world, name in [
        (1, "none"),
        (2, "hybrid2"),
        (8, "full"),
        (8, "hybrid4"),
        (4, "sgo"),
        (2, "sgo-sharded"),
    ]:
        path = tmp_path / f"{world}{name}"
        lc.run_loopback(
            world,
            lambda c, n=name, p=path: kit.train(c, STRATEGIES[n], range(half, STEPS), path=p, load=saved),
            30,
        )
        kit.check_file(path, plain[0])
        assert path.read_bytes() == (tmp_path / "1none").read_bytes()


# ---- optimizers and precision


def test_sgd_and_a_rule_of_the_users_own_agree_with_numpy() -> None:
    units = {"u": [Param("w", (11, 3)), Param("b", (5,))]}
    start = {
        "u.w": np.arange(33, dtype=np.float32).reshape(11, 3) / 7,
        "u.b": np.linspace(-1, 1, 5).astype("f4"),
    }

    def grad(name: str, rank: int, step: int) -> np.ndarray:
        return np.asarray(start[name] * np.float32(0.3 + rank) + np.float32(step))

    def rule(slot: Slot) -> None:
        slot.state["seen"] += slot.grad
        slot.param -= np.float32(0.1) * slot.state["seen"]

    def train(comm: lc.Communicator, own: bool) -> dict[str, np.ndarray]:
        with FSDP(units, comm) as engine:
            engine.fill(lambda name, box: start[name][tuple(slice(*s) for s in box)])
            sgd = SGD(lr=0.1, momentum=0.9, weight_decay=0.01)
            for step in range(4):
                with engine.step():
                    engine.open("u", "backward")
                    for short in ("w", "b"):
                        engine.add_grad("u", short, grad(f"u.{short}", comm.rank, step))
                    engine.reduce("u")
                    engine.close("u")
                engine.join()
                engine.update(rule if own else sgd)
            return {name: engine.full(name) for name in start}

    for own in (False, True):
        wanted = {name: value.copy() for name, value in start.items()}
        kept = {name: np.zeros_like(value) for name, value in start.items()}
        for step in range(4):
            for name, p in wanted.items():
                g = (grad(name, 0, step) + grad(name, 1, step)) / np.float32(2)
                if own:
                    kept[name] += g
                    p -= np.float32(0.1) * kept[name]
                    continue
                d = g + np.float32(0.01) * p
                kept[name] = d if step == 0 else np.float32(0.9) * kept[name] + d
                p -= np.float32(0.1) * kept[name]
        for found in lc.run_loopback(2, lambda c, own=own: train(c, own), 20):
            for name, value in wanted.items():
                kit.same_bits(found[name], value, name)


@pytest.mark.parametrize(
    ("compute", "wire"),
    mode.sample(list(product(("float32", "bfloat16"), (None, "bfloat16", "mxfp8"))), 3, "low precision"),
)
def test_low_precision_is_the_same_for_every_strategy(tmp_path: Path, wire: str | None, compute: str) -> None:
    """And for one plain process, whose parameters go through the same casts."""
    precision = Precision(compute=compute, wire=wire, grad="float32")
    files = {}
    for world, name in [
        (1, "none"),
        (2, "none"),
        (2, "full"),
        (4, "sgo"),
        (4, "hybrid2"),
        (2, "sgo-sharded"),
    ]:
        path = tmp_path / f"{world}{name}"
        lc.run_loopback(
            world,
            lambda c, n=name, p=path: kit.train(c, STRATEGIES[n], range(3), path=p, precision=precision),
            30,
        )
        files[world, name] = path.read_bytes()
    assert len(set(files.values())) == 1, [key for key, data in files.items() if data != files[1, "none"]]

    def cast(name: str, value: np.ndarray) -> np.ndarray:
        flat = value.reshape(-1)
        if wire == "mxfp8":
            padded = np.zeros(-(-flat.size // 32) * 32, np.float32)
            padded[: flat.size] = flat
            flat = dequantize_mxfp8(quantize_mxfp8(padded), compute)[: flat.size]
        elif "bfloat16" in (wire, compute):
            flat = flat.astype(ml_dtypes.bfloat16)
        return np.asarray(flat.astype(compute).reshape(value.shape))

    def cast_all(name: str, value: np.ndarray) -> np.ndarray:  # what is ignored goes over no wire
        return np.asarray(value.astype(compute)) if name == "mask" else cast(name, value)

    plain = kit.Plain(cast_all)
    for step in range(3):
        plain.step([kit.batch(step, micro) for micro in range(8)])
    kit.check_file(tmp_path / "2full", plain, compute)


def test_hybrid_shard_needs_a_divisor_and_every_rank_says_so() -> None:
    def wrong(comm: lc.Communicator) -> str:
        with pytest.raises(ValueError, match="no multiple") as caught:
            FSDP(UNITS, comm, ShardingStrategy.HybridShard(intra_node_size=3))
        return type(caught.value).__name__

    assert set(lc.run_loopback(4, wrong, 10)) == {"BadGrid"}
