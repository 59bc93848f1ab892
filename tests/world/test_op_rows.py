"""The soundness gate: rows of both rule tables run on real shards, against the op on whole arrays."""

from __future__ import annotations

import numpy as np
import pytest
from support.op_gate import check, random_action
from support.op_samples import SAMPLES

from lowshard.op import KERNELS
from lowshard.solver.table import RULES


def test_every_op_with_a_kernel_has_samples() -> None:
    assert set(SAMPLES) == set(KERNELS)
    assert set(KERNELS) <= set(RULES)


@pytest.mark.parametrize("rules", ["documented", "extended"])
@pytest.mark.parametrize("op", sorted(SAMPLES))
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
