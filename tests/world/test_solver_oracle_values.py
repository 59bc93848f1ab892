"""Every published case, unsound rows included, picked by both rule tables and run: the unsharded op's values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import mode
from support.op_gate import check
from support.recorded import oracle

from lowshard import DeviceMesh, Layout, Partial, Replicated, Sharded
from lowshard.solver import GreedyReshard, pick

CASES: list[Any] = oracle("max_greedy")["cases"]


def placement(code: str) -> Any:
    if code == "R":
        return Replicated()
    return {"P": Partial("sum"), "A": Partial("avg")}.get(code) or Sharded(int(code[1:]))


PICKED = mode.sample([c for c in CASES if "error" not in c["expected"]], 40, "published values")


@pytest.mark.parametrize("rules", ["documented", "extended"])
@pytest.mark.parametrize("case", PICKED, ids=lambda c: c["id"])
def test_a_pick_of_a_published_case_preserves_values(case: Any, rules: Any, rng: np.random.Generator) -> None:
    budget = case.get("memory_budget_bytes_per_device")
    mesh = DeviceMesh(case["mesh"]["shape"], case["mesh"]["axes"], budget)
    arrays = [rng.standard_normal(given["shape"]).astype(np.float32) for given in case["inputs"]]
    if case["op"] == "gather":
        extent = arrays[0].shape[case["args"]["axis"]]
        arrays[1] = rng.integers(0, extent, arrays[1].shape).astype(np.int32)
    if case["op"] == "where":
        arrays[0] = (arrays[0] > 0).astype(np.float32)
    layouts = [
        Layout(mesh, x.shape, x.dtype, tuple(map(placement, given["placements"])))
        for x, given in zip(arrays, case["inputs"], strict=True)
    ]
    action = pick(case["op"], layouts, solver=GreedyReshard(**case["flag"]), rules=rules, **case["args"])
    check(action, rng, arrays, case["args"])
