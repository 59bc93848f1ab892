"""The soundness gate: rows of both rule tables run on real shards, against the op on whole arrays."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from support import mode
from support.op_gate import action_of, check, elicited, random_action
from support.op_samples import SAMPLES

from lowshard import DeviceMesh, Layout, Replicated, Sharded
from lowshard.op import KERNELS
from lowshard.solver import action_set
from lowshard.solver.table import RULES

# Each op by itself under either set of rules; random draws of some of them.
OPS_AND_RULES = list(product(sorted(SAMPLES), ("documented", "extended")))


def test_every_op_with_a_kernel_has_samples() -> None:
    assert set(SAMPLES) == set(KERNELS)
    assert set(KERNELS) <= set(RULES)


@pytest.mark.parametrize(("op", "rules"), mode.sample(OPS_AND_RULES, 35, "rows"))
def test_rows_preserve_values(op: str, rules: str, rng: np.random.Generator, full: bool) -> None:
    wanted = 150 if full else 5
    done = 0
    for _ in range(wanted * 20):
        arrays, args = SAMPLES[op](rng)
        action = random_action(rng, op, arrays, args, rules)
        if action is None:
            continue
        check(action, rng, arrays, args)
        done += 1
        if done == wanted:
            return
    raise AssertionError(f"only {done} of {wanted} draws gave an action")


@pytest.mark.parametrize(("op", "rules"), mode.sample(OPS_AND_RULES, 60, "each row"))
def test_each_row_by_itself(op: str, rules: str, rng: np.random.Generator, full: bool) -> None:
    """Every row that some operands elicit, on one mesh axis, for operands as it needs them."""
    ran = 0
    for _ in range(20 if full else 1):
        arrays, args = SAMPLES[op](rng)
        mesh = DeviceMesh((int(rng.integers(2, 5)),), ("tp",))
        for row in elicited(op, arrays, args, rules, mesh):
            action = action_of(op, arrays, args, rules, mesh, row)
            assert action is not None, f"{row} is not offered for operands that come so"
            check(action, rng, arrays, args)
            ran += 1
    assert ran


@pytest.mark.parametrize(("op", "rules"), mode.sample(OPS_AND_RULES, 35, "pairs of rows"))
def test_pairs_of_rows_on_two_axes(op: str, rules: str, rng: np.random.Generator, full: bool) -> None:
    """Rows are valid on any one axis, but on two at once they may cut one dim, or leave two reductions to do."""
    mesh = DeviceMesh((2, int(rng.integers(2, 4))), ("dp", "tp"))
    for _ in range(3 if full else 1):
        arrays, args = SAMPLES[op](rng)
        rows = elicited(op, arrays, args, rules, DeviceMesh((2,), ("dp",)))
        pairs = list(product(rows, repeat=2))
        if not full:
            pairs = [pairs[int(i)] for i in rng.choice(len(pairs), min(4, len(pairs)), replace=False)]
        for pair in pairs:
            action = action_of(op, arrays, args, rules, mesh, *pair)
            if action is not None:
                check(action, rng, arrays, args)


def test_an_average_is_even_over_all_axes_that_cut_the_dim(rng: np.random.Generator) -> None:
    """6 rows divide by 2, but not by the 4 ranks that both axes make."""
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    x = rng.standard_normal((6, 4)).astype(np.float32)
    for held in ((Sharded(0), Replicated()), (Sharded(0), Sharded(0)), (Replicated(), Replicated())):
        for rules in ("documented", "extended"):
            found = action_set("mean", [Layout(mesh, x.shape, x.dtype, held)], rules=rules, axis=0)  # type: ignore[arg-type]
            for action in found.actions():
                check(action, rng, [x], {"axis": 0})
