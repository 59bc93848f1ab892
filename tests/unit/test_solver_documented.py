"""rules="documented" beside the documented solver written down once more: the same rows, prices and results."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from support.documented_rule import EXCEPTIONS, Operand, choose
from support.op_samples import SAMPLES

from lowshard import DeviceMesh, Layout, Partial, Replicated, Sharded
from lowshard.errors import SolverError
from lowshard.solver import GreedyReshard, pick

Rng = np.random.Generator
MESHES = ((1,), (2,), (3,), (4,), (8,), (2, 2), (1, 3), (3, 2), (4, 2), (2, 2, 2), (3, 2, 4))
# Ours beside the table: no rule is documented for them.
UNDOCUMENTED = {
    "mul_scalar", "add_scalar", "pow_scalar", "einsum", "group_norm", "attention", "sort", "rebind",
}  # fmt: skip


def placement(code: str | int) -> Any:
    return (
        Sharded(code)
        if isinstance(code, int)
        else {"R": Replicated(), "P": Partial(), "A": Partial("avg")}[code]
    )


def random_codes(rng: Rng, ndim: int, axes: int) -> tuple[str | int, ...]:
    every: list[str | int] = ["R", "R", "P", *range(ndim), *range(ndim)]
    return tuple(every[int(rng.integers(len(every)))] for _ in range(axes))


def test_the_pick_is_the_documented_one(rng: Rng, full: bool) -> None:
    differs: Counter[str] = Counter()
    picked = 0
    while picked < (20_000 if full else 1_500):
        op = str(rng.choice(sorted(set(SAMPLES) - UNDOCUMENTED)))
        arrays, args = SAMPLES[op](rng)
        sizes = MESHES[int(rng.integers(len(MESHES)))]
        mesh = DeviceMesh(sizes, ("a", "b", "c")[: len(sizes)])
        codes = [random_codes(rng, x.ndim, len(sizes)) for x in arrays]
        layouts = [
            Layout(mesh, x.shape, x.dtype, tuple(map(placement, own)))
            for x, own in zip(arrays, codes, strict=True)
        ]
        operands = [Operand(x.shape, x.itemsize, own) for x, own in zip(arrays, codes, strict=True)]
        allow = bool(rng.integers(2))
        greedy = GreedyReshard(allow_partial_to_sharded=allow)
        try:
            action = pick(op, layouts, solver=greedy, rules="documented", **args)
        except SolverError:
            action = None
        expected = choose(op, operands, sizes, args, allow, exceptions=True)
        told = f"{op} {args} {[str(x) for x in layouts]} P->S {allow}"
        assert (action is None) == (expected is None), told
        if action is None or expected is None:
            continue
        picked += 1
        rows, cost = expected
        assert action.cost_bytes == pytest.approx(cost, rel=1e-12), (
            f"{told}\n{rows} {cost}\n{action.explain()}"
        )
        needs = [tuple(map(placement, r.needs)) for r in rows]
        assert [r.needed_inputs for r in action.rows] == needs, f"{told}\n{rows} {cost}\n{action.explain()}"
        assert [r.output for r in action.rows] == [placement(r.out) for r in rows], told
        published = choose(op, operands, sizes, args, allow, exceptions=False)
        assert published is not None
        if published != expected:
            differs.update({r.unsound for r in published[0] if r.unsound} or {"short result"})
    assert set(differs) <= set(EXCEPTIONS)
    print(f"{picked} picks as documented, but for exceptions:", dict(differs))


def test_a_dim_in_use_is_not_cut_into_single_rows() -> None:
    """3 rows over 3 ranks are one each: 4 more cannot share them, though dim 0 of the weight is cut over the 4."""
    mesh = DeviceMesh((3, 2, 4), ("a", "b", "c"))
    x = Layout(mesh, (3, 3, 16), "float32", tuple(map(placement, (0, "R", "P"))))
    weight = Layout(mesh, (16,), "float32", tuple(map(placement, ("R", "R", 0))))
    greedy = GreedyReshard(allow_partial_to_sharded=True)
    action = pick("rms_norm", [x, weight], solver=greedy, rules="documented")
    assert [m.collective for m in action.reshards[0]] == ["all_reduce"]
    assert action.cost_bytes == 2 * 576 * 3 / 4 + 64 * 3 / 4
