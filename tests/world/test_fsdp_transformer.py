"""The transformer written by hand: its gradients are right, it learns, and no strategy changes a bit."""

from __future__ import annotations

import numpy as np
import pytest

from lowshard import comm as lc
from lowshard.demo.transformer import STRATEGIES, Shape, Transformer, batch_of, text, train
from lowshard.fsdp import FSDP, Precision

SMALL = Shape(width=8, heads=2, layers=2, context=6)


def test_every_gradient_is_the_slope_of_the_loss(rng: np.random.Generator) -> None:
    """In float64, against differences of the loss."""
    units = {u: [type(p)(p.name, p.shape, "float64", tie=p.tie) for p in ps] for u, ps in SMALL.units.items()}
    precision = Precision(master="float64")
    tokens, targets = batch_of(text(), SMALL, 2, (1,))
    (comm,) = lc.loopback(1)
    with FSDP(units, comm, precision=precision, average="sum", open_limit=3) as engine:
        engine.fill(lambda name, box: SMALL.first(name, box) * 10.0)
        model = Transformer(SMALL, engine)
        with engine.step():
            model.loss(tokens, targets)
        engine.join()
        for slot in engine.slots():
            for piece in slot.pieces:
                for at in rng.integers(piece.shard_lo, piece.shard_hi, 4).tolist():
                    h, value, found = 1e-4, slot.param[at], slot.grad[at]
                    losses = []
                    for step in (-2, -1, 1, 2):  # the error of these differences goes with h^4
                        slot.param[at] = value + step * h
                        losses.append(model.loss(tokens, targets, backward=False))
                    slot.param[at] = value
                    slope = (losses[0] - 8 * losses[1] + 8 * losses[2] - losses[3]) / (12 * h)
                    assert abs(found - slope) < 1e-6 * max(1, abs(found)), piece


@pytest.mark.parametrize("world", [2, 4])
def test_every_strategy_learns_the_same(world: int) -> None:
    found = {
        name: lc.run_loopback(world, lambda c, s=strategy: train(c, s, 6, SMALL, 4), 60)
        for name, strategy in STRATEGIES.items()
    }
    first = found["full"][0]
    assert all(losses == first for every in found.values() for losses in every)
    assert first[-1] < first[0]


def test_it_learns_from_real_text() -> None:
    losses = lc.run_loopback(2, lambda c: train(c, STRATEGIES["full"], 40, Shape(32, 2, 1, 32), 8), 100)[0]
    assert losses[0] > 5.4
    assert losses[-1] < 3.6
