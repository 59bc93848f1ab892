"""The picks of torch's DTensor (2.13, recorded): found or beaten, by the bytes that its moves and ours take."""

from __future__ import annotations

from typing import Any

import pytest
from support import mode
from support.recorded import oracle_lines

from lowshard import DeviceMesh, Layout, Partial, Replicated, Sharded
from lowshard.placement import Placement
from lowshard.solver import Action, GreedyReshard, NoReshard, pick
from lowshard.solver.assignment import collective_of, price_bytes

LINES = oracle_lines("dtensor_picks")

OPS: dict[str, tuple[str, dict[str, Any]]] = {
    "mm": ("matmul", {}), "add": ("add", {}), "mul": ("mul", {}), "relu": ("relu", {}), "gelu": ("gelu", {}),
    "neg": ("negate", {}), "softmax(-1)": ("softmax", {"axis": -1}), "softmax(0)": ("softmax", {"axis": 0}),
    "mul scalar": ("mul_scalar", {"value": 2}), "add scalar": ("add_scalar", {"value": 2}),
    "sum()": ("sum", {"axis": None}), "sum(0)": ("sum", {"axis": 0}), "sum(1)": ("sum", {"axis": 1}),
    "mean(0)": ("mean", {"axis": 0}), "amax(0)": ("max", {"axis": 0}),
    "t": ("transpose", {"axis_1": 0, "axis_2": 1}), "view flat": ("reshape", {"shape": [256]}),
    "view (4,4,16)": ("reshape", {"shape": [4, 4, 16]}), "view (2,8,16)": ("reshape", {"shape": [2, 8, 16]}),
    "cumsum(0)": ("cumsum", {"axis": 0}), "layer_norm": ("layer_norm", {}), "unsqueeze(0)": ("unsqueeze", {"axis": 0}),
    "slice(0,0,8)": ("slice", {"slices": [[0, 8], None]}), "topk(3)": ("top_k", {"k": 3, "axis": -1}),
    "sort": ("sort", {"axis": 0}),
}  # fmt: skip
KEEPS_DIMS = {"sum()", "sum(0)", "sum(1)", "mean(0)", "amax(0)"}  # ours leave an extent of 1
# Along the split dim it gathers, or refuses; here nothing is gathered.
WEAK = {
    ("softmax(-1)", "S1"), ("softmax(0)", "S0"), ("layer_norm", "S1"), ("cumsum(0)", "S0"), ("slice(0,0,8)", "S0"),
    ("topk(3)", "S1"), ("sort", "S0"), ("view (2,8,16)", "S0"),
}  # fmt: skip
MESH = DeviceMesh((4,), ("tp",))
FREE = GreedyReshard(allow_partial_to_sharded=True)


def placed(code: str) -> Placement:
    if code == "R":
        return Replicated()
    return {"P": Partial("sum"), "P(avg)": Partial("avg"), "P(max)": Partial("max")}.get(code) or Sharded(
        int(code[1:])
    )


def wide(line: dict[str, Any]) -> tuple[str, list[Layout], dict[str, Any]]:
    """The recorded call, on a shape large enough that small statistics count as such."""
    op, args = OPS[line["op"]]
    layouts = [Layout(MESH, line["shape"], "float32", (placed(c),)) for c in line["inputs"]]
    if op == "layer_norm":
        layouts += [Layout(MESH, line["shape"][-1:], "float32", (Replicated(),))] * 2
    return op, layouts, args


def theirs(line: dict[str, Any]) -> float:
    """Bytes a rank sends for DTensor's moves, at the prices ours are taken at."""
    total = 0.0
    for move in line["moved"] or []:
        have, _, need = move.partition("->")
        name = collective_of(placed(have), placed(need), "volume")
        total += price_bytes(name, 4, 4.0 * 256, "volume")
    return total


PICKS = mode.sample([x for x in LINES if x["section"] == "pick"], 40, "picks of DTensor")


@pytest.mark.parametrize("line", PICKS, ids=lambda x: f"{x['op']}-{'.'.join(x['inputs'])}")
def test_a_pick(line: dict[str, Any]) -> None:
    op, layouts, args = wide(line)
    ours = pick(op, layouts, solver=FREE, **args)
    if "error" in line:
        assert (line["op"], *line["inputs"]) in WEAK
        return  # it refuses, ours runs
    if line["out"].startswith("_StridedShard"):
        # Not written here: rows change hands, none is gathered.
        assert ours.outputs[0].placements != (Replicated())
        return
    assert ours.cost_bytes <= theirs(line), ours.explain()
    if (line["op"], *line["inputs"]) in WEAK:
        assert ours.cost_bytes < theirs(line), ours.explain()
        assert all(m.collective != "all_gather" for operand in ours.reshards for m in operand)
    elif not line["moved"] and line["op"] not in KEEPS_DIMS:
        assert ours.outputs[0].placements == (placed(line["out"]),)
        assert ours.moves_nothing


# ---- blocks, whose layouts do not depend on the recording


def lay(code: str, *shape: int, mesh: DeviceMesh = MESH) -> Layout:
    return Layout(mesh, shape, "float32", (placed(code),))


class Chain:
    """Ops one after the other, each picked for what the one before left; any move is an error unless it is expected."""

    def __init__(self) -> None:
        self.moves: list[str] = []

    def __call__(self, op: str, *layouts: Layout, **args: Any) -> Layout:
        action: Action = pick(op, layouts, solver=GreedyReshard(), **args)
        self.moves += [m.collective for operand in action.reshards for m in operand if m.cost_bytes]
        self.moves += [name for row in action.rows for name, _ in row.inner]
        return action.outputs[0]


def code(layout: Layout) -> str:
    return str(layout.placements[0])


def test_megatron_mlp() -> None:
    do = Chain()
    x = lay("R", 32, 64)
    up = do("matmul", x, lay("S1", 64, 128))
    up = do("add", up, lay("S0", 128))
    up = do("gelu", up)
    assert code(up) == "S1"
    down = do("matmul", up, lay("S0", 128, 64))
    assert code(down) == "P"
    # The bias, then the residual, become terms of the sum; nothing is communicated until asked.
    assert code(do("add", do("add", down, lay("R", 64)), x)) == "P"
    assert do.moves == []


def heads(do: Chain, x: Layout, count: int, size: int) -> Layout:
    y = do("reshape", do("matmul", x, lay("S1", 64, count * size)), shape=[2, 16, count, size])
    assert code(y) == "S2"
    return do("transpose", y, axis_1=1, axis_2=2)


def test_attention_by_heads() -> None:
    do = Chain()
    x = lay("R", 2, 16, 64)
    q, k, v = (heads(do, x, 8, 8) for _ in range(3))
    scores = do("softmax", do("matmul", q, do("transpose", k, axis_1=2, axis_2=3)))
    assert code(scores) == "S1"
    mixed = do("transpose", do("matmul", scores, v), axis_1=1, axis_2=2)
    merged = do("reshape", mixed, shape=[2, 16, 64])
    assert code(merged) == "S2"
    assert code(do("add", x, do("matmul", merged, lay("S0", 64, 64)))) == "P"
    assert do.moves == []


def test_six_heads_on_four_ranks() -> None:
    do = Chain()
    q, k, v = (heads(do, lay("R", 2, 16, 64), 6, 8) for _ in range(3))
    assert do.moves == ["exchange"] * 3  # rows change hands where heads 2, 2, 1, 1 are not 12 columns each
    do.moves.clear()
    mixed = do("attention", q, k, v)
    assert code(mixed) == "S1"
    merged = do("reshape", do("transpose", mixed, axis_1=1, axis_2=2), shape=[2, 16, 48])
    assert code(do("matmul", merged, lay("S0", 48, 64))) == "P"
    assert "all_gather" not in do.moves


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_norms_of_a_cut_hidden_dim_stay_cut(op: str) -> None:
    action = pick(op, [lay("S2", 4, 16, 64), lay("S0", 64)], solver=NoReshard())
    assert action.outputs[0].placements == (Sharded(2),)
    assert pick(op, [lay("S2", 4, 16, 4096), lay("R", 4096)]).outputs[0].placements == (Sharded(2),)
