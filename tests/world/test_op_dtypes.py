"""Every row under every dtype: on shards as the unsharded op, to the last bit for integers, or the dtype is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from support import mode
from support.op_gate import action_of, check, elicited, random_layout, random_mesh, reducible
from support.op_samples import SAMPLES

from lowshard import DeviceMesh, Layout, Partial, Replicated, Sharded, dtypes
from lowshard import comm as lc
from lowshard.errors import DTypeError, LowshardError, SolverError
from lowshard.op import run_action, unsharded
from lowshard.solver import GreedyReshard, Result, build_action_set, pick
from lowshard.solver.table import RULES, dtype_error

Rng = np.random.Generator
DTYPES = (
    "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "int32", "uint8", "uint32",
    "bool",
)  # fmt: skip


def sample(rng: Rng, op: str, dtype: str) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Return operands of a dtype: integers of every size, so that sums wrap; floats whose sums are exact."""
    arrays, args = SAMPLES[op](rng)
    row = dtypes.get(dtype)
    made = []
    for k, x in enumerate(arrays):
        if x.dtype != np.float32 or (k in RULES[op].indices and op != "where"):
            made.append(x)
        elif row.kind == "float":
            few = 2 if row.bits == 8 else 9
            made.append((x if row.bits > 16 else rng.integers(1 - few, few, x.shape)).astype(row.numpy))
        else:
            high = 1 << (row.bits if rng.random() < 0.5 else 2)
            made.append(rng.integers(0, high, x.shape).astype(row.numpy))
    if op == "mul_scalar":
        args = {"value": [2, 0.5, 3.0][int(rng.integers(3))]}
    if op in ("cast", "dequantize") and rng.random() < 0.5:
        args = {"dtype": str(rng.choice(DTYPES))}
    return made, args


def runs(op: str, layouts: Any, rows: Any) -> bool:
    """Whether the op takes the dtypes; where not, the unsharded op refuses them too."""
    error = dtype_error(op, layouts, rows)
    if error is None:
        return True
    with pytest.raises(DTypeError, match="takes operands of kind"):
        unsharded(op, *(np.ones(x.shape, x.numpy_dtype) for x in layouts))
    return False


@pytest.mark.time_limit(300)
@pytest.mark.parametrize("rules", ["documented", "extended"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_under_every_dtype(dtype: str, rules: str, rng: Rng, full: bool) -> None:
    ran, refused = 0, set()
    for op in mode.sample(sorted(SAMPLES), 12, f"{dtype} {rules}"):
        for _ in range(8 if full else 1):
            arrays, args = sample(rng, op, dtype)
            mesh = DeviceMesh((int(rng.integers(2, 5)),), ("tp",))
            for row in elicited(op, arrays, args, rules, mesh):
                action = action_of(op, arrays, args, rules, mesh, row)
                assert action is not None, f"{row} is not offered for operands that come so"
                if not runs(op, action.sources, action.rows):
                    refused.add(op)
                    continue
                check(action, rng, arrays, args)
                ran += 1
    assert ran
    assert dtypes.get(dtype).kind != "float" or not refused
    print(f"{dtype}, {rules}: {ran} rows run, refused: {sorted(refused)}")


@pytest.mark.time_limit(600)
@pytest.mark.parametrize("rules", ["documented", "extended"])
def test_random_picks_over_all_dtypes(rules: str, rng: Rng, full: bool) -> None:
    count: Counter[str] = Counter()
    ops = ("sum", "avg", "max", "min", "prod")
    while count["ran"] + count["refused"] < (5000 if full else 100):
        op, dtype = str(rng.choice(sorted(SAMPLES))), str(rng.choice(DTYPES))
        arrays, args = sample(rng, op, dtype)
        mesh = random_mesh(rng)
        own = reducible(op, arrays, ops)
        try:
            layouts = [random_layout(rng, mesh, x, o) for x, o in zip(arrays, own, strict=True)]
            greedy = GreedyReshard(allow_partial_to_sharded=bool(rng.integers(2)))
            action = pick(op, layouts, solver=greedy, rules=rules, **args)  # type: ignore[arg-type]
        except SolverError:
            continue  # the documented rules know no way from a max, min or product
        if runs(op, layouts, action.rows):
            check(action, rng, arrays, args)
            count["ran"] += 1
        else:
            count["refused"] += 1
    print(f"{rules}: {count['ran']} random picks run, {count['refused']} refused for their dtype")
    assert count["ran"] > count["refused"]


R, P, S0 = Replicated(), Partial("sum"), Sharded(0)
AVG, MAX = Partial("avg"), Partial("max")


HOLDS_OVER_THE_REALS = [
    ("mean", "int32", S0, [[1, 0], [3, 0]], {"axis": 0}, [1]),
    ("mean", "int32", P, [[1, 0], [1, 0]], {"axis": 0}, [1]),
    ("mean", "int32", S0, [[1, 1], [4]], {"axis": 0}, [2]),
    ("mul_scalar", "int32", P, [[3], [3]], {"value": 0.5}, [3]),
    ("avg_pool", "int32", P, [[1, 0], [1, 0]], {"size": [2, 1]}, [1]),
    ("dequantize", "float32", P, [[0.5], [0.5]], {"dtype": "int32"}, [1]),
    ("dequantize", "int8", P, [[100], [100]], {"dtype": "float32"}, [-56]),
    ("negate", "uint8", MAX, [[0], [1]], {}, [255]),
    ("negate", "int8", MAX, [[-128], [5]], {}, [-5]),
    ("negate", "int32", AVG, [[0], [1]], {}, [0]),
    ("sum", "int32", AVG, [[1, 1], [2, 2]], {"axis": 0}, [2]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rules", "op", "dtype", "held", "parts", "args", "expected"),
    [
        (rules, *case)
        for rules in ("documented", "extended")
        for case in HOLDS_OVER_THE_REALS
        if case[2] is not MAX or rules == "extended"  # the documented rules reduce no maximum
    ],
)
def test_what_holds_over_the_reals_only(
    op: str, dtype: str, held: Any, parts: Any, args: Any, expected: Any, rules: Any
) -> None:
    tail = (2, 1, 1) if op == "avg_pool" else None
    arrays = [np.array(p, dtype).reshape(1, *tail) if tail else np.array(p, dtype) for p in parts]
    extent = sum(map(len, parts)) if held is S0 else len(parts[0])
    shape = (1, *tail) if tail else (extent,)
    layout = Layout(DeviceMesh((2,), ("tp",)), shape, dtype, (held,))
    action = pick(op, [layout], rules=rules, **args)

    def work(comm: lc.Communicator) -> Any:
        return run_action(action, [arrays[comm.rank]], comm)[0]

    came = lc.run_loopback(2, work, 10)
    assert not any(action.outputs[0].partials)
    assert [x.ravel().tolist() for x in came] == [expected] * 2


def test_a_row_of_ones_own_that_does_not_hold_is_refused_before_anything_moves() -> None:
    layout = Layout(DeviceMesh((2,), ("tp",)), (4,), "int32", (S0,))
    row = next(r for r in pick("mean", [Layout(layout.mesh, (4,), "float32", (S0,))], axis=0).rows)
    assert row.kinds == {"float"}
    found = build_action_set(
        [row], layouts=[layout], op="mean", extras={"axis": 0}, results=[Result((1,), "int32")]
    )

    def work(comm: lc.Communicator) -> int:
        with pytest.raises(DTypeError, match=r"the row .* does not hold for int32"):
            run_action(found.action([row]), [np.ones(2, np.int32)], comm)
        return comm.traffic.sent_bytes

    assert lc.run_loopback(2, work, 10) == [0, 0]


@pytest.mark.parametrize(
    ("op", "shapes", "args", "error"),
    [
        ("buffer_store", [(4, 0), (4, 8)], {}, "one shape"),
        ("scatter", [(8, 4), (4,), (4,)], {}, "updates and indices have one shape"),
        ("grouped_matmul", [(6, 8), (2, 4, 7), (3,)], {}, r"weight \[E, N, K\]"),
        ("top_k", [(4, 8)], {"k": 2.5}, "'k' is an integer"),
        ("pad", [(4,)], {"pads": [(0, 1)], "mode": "maximum"}, "mode is 'constant', 'edge'"),
    ],
)
def test_operands_and_arguments_that_do_not_go_together_are_refused_by_the_rule(
    op: str, shapes: Any, args: Any, error: str
) -> None:
    mesh = DeviceMesh((2,), ("tp",))
    dtypes_of = ["int64" if k in RULES[op].indices else "float32" for k in range(len(shapes))]
    layouts = [Layout(mesh, s, d, (R,)) for s, d in zip(shapes, dtypes_of, strict=True)]
    with pytest.raises(LowshardError, match=error):
        pick(op, layouts, **args)


# ---- values that are not finite


@pytest.mark.parametrize(
    ("op", "held", "parts", "other", "expected"),
    [
        ("div", P, [1.0, 0.0], 0.0, np.inf),
        ("div", P, [3.0, -1.0], 0.0, np.inf),
        ("add", MAX, [1.0, -np.inf], np.inf, np.inf),
        ("mul_scalar", P, [1.0, 0.0], np.inf, np.inf),
        ("mul_scalar", P, [1.0, 0.0], 1e300, np.inf),  # infinite where float32 is computed in
    ],
)
def test_infinities_are_those_of_the_unsharded_op(
    op: str, held: Any, parts: Any, other: float, expected: float
) -> None:
    mesh = DeviceMesh((2,), ("tp",))
    layouts = [Layout(mesh, (3,), "float32", (held,)), Layout(mesh, (3,), "float32", (R,))]
    action = pick(op, layouts[:1], value=other) if op == "mul_scalar" else pick(op, layouts)

    def work(comm: lc.Communicator) -> Any:
        mine = [np.full(3, x, np.float32) for x in (parts[comm.rank], other)[: len(action.sources)]]
        return run_action(action, mine, comm)[0]

    assert not any(action.outputs[0].partials)
    assert all((x == expected).all() for x in lc.run_loopback(2, work, 10))
