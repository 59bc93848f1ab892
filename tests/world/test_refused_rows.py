"""Published rows that are offered nowhere: run as published, each gives other values than the unsharded op."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.op_gate import assembled, shards

from lowshard import DeviceMesh, Layout, Partial, Replicated, Sharded
from lowshard import comm as lc
from lowshard.op import run_action, unsharded
from lowshard.solver import REFUSED, AxisAssignment, Result, action_set, build_action_set
from lowshard.solver.table import elementwise_rules, index_rules, product_rules, reduction_rules, shape_rules

R, P, AVG = Replicated(), Partial("sum"), Partial("avg")
S0, S1, S2, S3 = (Sharded(dim) for dim in range(4))

CASES: list[tuple[Any, str, list[tuple[int, ...]], dict[str, Any], tuple[Any, ...], Any]] = [
    (elementwise_rules.ONE_SIDED, "add", [(4, 8), (4, 8)], {}, (S0, R), S0),
    (elementwise_rules.ONE_SIDED, "mul", [(4, 8), (4, 8)], {}, (R, S1), S1),
    (elementwise_rules.ONE_SIDED, "where", [(4, 8)] * 3, {}, (S0, R, R), S0),
    (index_rules.CROSS, "gather", [(8, 4), (8,)], {"axis": 0}, (S1, S0), S0),
    (product_rules.GROUPED_CHANNELS, "conv2d", [(2, 4, 4, 4), (1, 1, 2, 4)], {"groups": 2}, (R, S3), S3),
    (reduction_rules.CUMSUM, "cumsum", [(4, 8)], {"axis": 0}, (S0,), P),
    (reduction_rules.UNEVEN_MEAN, "mean", [(5, 8)], {"axis": 0}, (S0,), AVG),
    (shape_rules.CONCAT, "concat", [(4, 2), (4, 2)], {"axis": 0}, (S0, S0), S0),
    (shape_rules.SPLIT, "split", [(8, 4)], {"sizes": [4, 4], "axis": 0}, (S0,), S0),
    (shape_rules.MINOR, "reshape", [(4, 8)], {"shape": [32]}, (S1,), S0),
    (shape_rules.MINOR, "reshape", [(6, 8, 16)], {"shape": [6, 128]}, (S2,), S1),
    (shape_rules.UNALIGNED, "reshape", [(6, 8)], {"shape": [48]}, (S0,), S0),
    (shape_rules.REPEATED, "tile", [(4, 8)], {"repeats": [2, 1]}, (S0,), S0),
]


def test_every_refused_row_has_a_case() -> None:
    assert {id(case[0]) for case in CASES} == {id(refused) for refused in REFUSED}


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[1]}-{c[4]}")
def test_a_refused_row_gives_other_values(case: Any, rng: np.random.Generator) -> None:
    refused, op, shapes, args, needs, out = case
    assert op in refused.ops
    size = 2 if op in ("concat", "conv2d") else 4
    mesh = DeviceMesh((size,), ("tp",))
    arrays = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    if op == "gather":
        arrays[1] = rng.integers(0, shapes[0][0], shapes[1])  # type: ignore[assignment]
    if op == "where":
        arrays[0] = rng.integers(0, 2, shapes[0]).astype(np.float32)
    layouts = [Layout(mesh, x.shape, x.dtype, (need,)) for x, need in zip(arrays, needs, strict=True)]
    published = AxisAssignment(needs, out)
    for rules in ("documented", "extended"):
        offered = action_set(op, layouts, rules=rules, **args)  # type: ignore[arg-type]
        assert all(
            (r.needed_inputs, r.output, r.how) != (needs, out, "local") for r in offered.axis_assignments
        )
    expected = unsharded(op, *arrays, **args)
    results = [Result(x.shape, str(x.dtype)) for x in expected]
    action = build_action_set([published], layouts=layouts, op=op, extras=args, results=results).action(
        [published]
    )
    parts = [shards(rng, layout, x) for layout, x in zip(layouts, arrays, strict=True)]

    def run() -> list[np.ndarray]:
        made = lc.run_loopback(size, lambda c: run_action(action, [p[c.rank] for p in parts], c), 10)
        return [assembled(x, {r: made[r][k] for r in mesh.ranks}) for k, x in enumerate(action.outputs)]

    try:
        came = run()
    except (AssertionError, ValueError, IndexError):
        return  # the local shapes do not even fit
    assert not all(np.allclose(a, b) for a, b in zip(came, expected, strict=True))
