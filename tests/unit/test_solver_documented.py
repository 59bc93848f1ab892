"""rules="documented" beside the published table: the rows of each op on one axis."""

from __future__ import annotations

from typing import Any

import pytest

from lowshard import DeviceMesh, Layout
from lowshard.op import KERNELS
from lowshard.placement import parse_placement
from lowshard.solver import GreedyReshard, action_set, pick
from lowshard.solver.table import RULES

# Ours beside the table: no rule is documented for them.
UNDOCUMENTED = {
    "mul_scalar", "add_scalar", "pow_scalar", "einsum", "group_norm", "attention", "sort", "rebind",
}  # fmt: skip
# Ops, shapes of their operands (a placement after @, else whole), arguments, rows: what is needed > what comes.
ROWS: list[tuple[str, str, dict[str, Any], str]] = [
    ("relu abs floor round trunc exp log sqrt rsqrt sigmoid silu gelu tanh", "8,8", {}, "R>R S0>S0 S1>S1"),
    ("sin cos erf log1p atanh acos is_nan is_inf logical_not", "8,8", {}, "R>R S0>S0 S1>S1"),
    ("negate passthrough cast dequantize", "8,8", {}, "R>R S0>S0 S1>S1 P>P"),
    ("equal not_equal greater greater_equal less less_equal", "8,8 8,8", {}, "R,R>R S0,S0>S0 S1,S1>S1"),
    ("logical_and logical_or logical_xor mul maximum minimum", "8,8 8,8", {}, "R,R>R S0,S0>S0 S1,S1>S1"),
    ("complex_mul pow mod div", "8,8 8,8", {}, "R,R>R S0,S0>S0 S1,S1>S1"),
    ("add sub buffer_store", "8,8 8,8", {}, "R,R>R S0,S0>S0 S1,S1>S1 P,P>P"),
    ("add", "8,8 1,8", {}, "R,R>R S0,R>S0 S1,S1>S1 P,P>P"),
    ("where", "8,8 8,8 8", {}, "R,R,R>R S0,S0,R>S0 S1,S1,S0>S1"),
    ("matmul", "8,8 8,8", {}, "R,R>R S0,R>S0 R,S1>S1 S1,S0>P P,R>P R,P>P"),
    ("matmul", "4,8,8 8,8", {}, "R,R>R S0,R>S0 S1,R>S1 R,S1>S2 S2,S0>P P,R>P R,P>P"),
    ("matmul", "8 8", {}, "R,R>R S0,S0>P P,R>P R,P>P"),
    ("qmatmul", "8,8 8,8", {}, "R,R>R"),
    ("outer", "8 8", {}, "R,R>R S0,R>S0 R,S0>S1 P,R>P R,P>P"),
    ("conv2d", "8,8,8,8 3,3,8,8", {"groups": 1, "layout": "NHWC"}, "R,R>R S0,R>S0 R,S3>S3 S3,S2>P P,R>P R,P>P"),
    ("conv2d", "8,8,8,8 3,3,8,8 8", {"groups": 1, "layout": "NCHW"}, "R,R,R>R S0,R,R>S0 R,S3,S0>S1"),
    ("conv3d", "8,8,8,8,8 3,3,3,4,8", {"groups": 2, "layout": "NHWC"}, "R,R>R S0,R>S0 P,R>P R,P>P"),
    ("conv2d_transpose", "8,8,8,8 3,3,8,8 8", {"layout": "NHWC"}, "R,R,R>R S0,R,R>S0 R,S2,S0>S3"),
    ("conv3d_transpose", "8,8,8,8,8 3,3,3,8,8", {"layout": "NCHW"}, "R,R>R S0,R>S0 R,S3>S1 S1,S4>P P,R>P R,P>P"),
    ("grouped_matmul", "8,8 8,8,8 9", {}, "R,R,R>R R,S1,R>S1 S1,S2,R>P"),
    ("sum", "8,8", {"axis": 0}, "R>R S1>S1 S0>P P>P"),
    ("mean", "8,8", {"axis": 0}, "R>R S1>S1 S0>P:avg P>P"),
    ("max min prod argmax argmin softmax logsoftmax cumsum", "8,8", {"axis": 0}, "R>R S1>S1"),
    ("layer_norm", "8,8 8 8", {}, "R,R,R>R S0,R,R>S0"),
    ("rms_norm", "8,8,8 8,8", {}, "R,R>R S0,R>S0"),
    ("max_pool", "8,8,8,8", {"size": 2}, "R>R S0>S0 S3>S3"),
    ("avg_pool", "8,8,8,8", {"size": 2}, "R>R S0>S0 S3>S3 P>P"),
    ("permute", "8,8,8", {"dims": [2, 0, 1]}, "R>R S0>S1 S1>S2 S2>S0 P>P"),
    ("transpose", "8,8,8", {"axis_1": 0, "axis_2": 2}, "R>R S0>S2 S1>S1 S2>S0 P>P"),
    ("unsqueeze", "8,8", {"axis": 1}, "R>R S0>S0 S1>S2 P>P"),
    ("squeeze", "8,1,8", {"axis": 1}, "R>R S0>S0 S2>S1 P>P"),
    ("flatten", "8,8,8", {"start": 1, "end": 2}, "R>R S0>S0 P>P"),
    ("broadcast_to", "1,8", {"shape": [8, 8, 8]}, "R>R S1>S2 P>P"),
    ("concat", "8,8 8,8", {"axis": 0}, "R,R>R S1,S1>S1 P,P>P"),
    ("stack", "8,8 8,8", {"axis": 1}, "R,R>R S0,S0>S0 S1,S1>S2 P,P>P"),
    ("split", "8,8", {"sizes": [4, 4], "axis": 0}, "R>R S1>S1 P>P"),
    ("chunk", "8,8", {"axis": 0, "chunks": 2}, "R>R S1>S1 P>P"),
    ("slice", "8,8", {"slices": [[0, 4], None]}, "R>R S1>S1 P>P"),
    ("pad", "8,8", {"pads": [[1, 0], [0, 0]], "value": 0}, "R>R S1>S1 P>P"),
    ("pad", "8,8", {"pads": [[1, 0], [0, 0]], "value": 1}, "R>R S1>S1"),
    ("repeat_interleave", "8,8", {"repeats": 2, "axis": 0}, "R>R S1>S1 P>P"),
    ("tile", "8,8", {"repeats": [2, 1]}, "R>R S1>S1 P>P"),
    ("band_part", "4,8,8", {"lower": 0, "upper": 0}, "R>R S0>S0 P>P"),
    ("resize", "8,8,8,8", {"size": [4, 4]}, "R>R S0>S0 S3>S3 P>P"),
    ("irfft interleaved_complex", "8,8", {}, "R>R S0>S0 P>P"),
    ("fold", "8,8,12", {"shape": [8, 2, 4, 5], "kernel": [2, 2]}, "R>R S0>S0 P>P"),
    ("gather", "8,8 8", {"axis": 1}, "R,R>R S0,R>S0 R,S0>S1 P,R>P"),
    ("embedding", "8,8 8,8", {}, "R,R>R S1,R>S2 R,S0>S0 R,S1>S1 P,R>P"),
    ("gather_nd", "8,8 8,1", {"batch_dims": 1}, "R,R>R S0,S0>S0 P,R>P"),
    ("scatter scatter_add scatter_max scatter_min scatter_mul", "8,8 8,8 8,8", {"axis": 0}, "R,R,R>R S1,S1,S1>S1"),
    ("top_k bottom_k top_k_values", "8,8", {"axis": 0, "k": 2}, "R>R S1>S1"),
    ("argsort", "8,8", {}, "R>R"),
    ("moe_finalize", "16,8 8,2 8,2", {}, "R,R,R>R S1,R,R>S1 P,R,R>P"),
    ("reshape", "8,6@S0", {"shape": [48]}, "R>R S0>S0 P>P"),
    ("reshape", "8,6@S1", {"shape": [48]}, "R>R P>P"),
    ("reshape", "8,6@S0", {"shape": [4, 12]}, "R>R S0>S0 P>P"),
    ("reshape", "4,8,6@S2", {"shape": [32, 6]}, "R>R S2>S1 P>P"),
    ("reshape", "5,6@S0", {"shape": [30]}, "R>R P>P"),
    ("fused_silu", "8,8", {}, "R>R S0>S0"),
]  # fmt: skip


def operand(text: str, mesh: DeviceMesh, dtype: str = "float32") -> Layout:
    extents, _, placed = text.partition("@")
    placements = [parse_placement(p) for p in (placed or ",".join("R" for _ in mesh.shape)).split(",")]
    return Layout(mesh, [int(n) for n in extents.split(",")], dtype, placements)


@pytest.mark.whole
@pytest.mark.parametrize(("ops", "shapes", "args", "rows"), ROWS, ids=range(len(ROWS)))
def test_the_rows_are_the_documented_ones(ops: str, shapes: str, args: dict[str, Any], rows: str) -> None:
    mesh = DeviceMesh((4,), ("x",))
    for op in ops.split():
        dtypes = ["int64" if k in RULES[op].indices else "float32" for k, _ in enumerate(shapes.split())]
        layouts = [operand(text, mesh, dtype) for text, dtype in zip(shapes.split(), dtypes, strict=True)]
        found = action_set(op, layouts, rules="documented", **args).axis_assignments
        told = " ".join(f"{','.join(map(str, row.needed_inputs))}>{row.output}" for row in found)
        assert told == rows, op


def test_every_documented_op_has_its_rows_here() -> None:
    assert {op for ops, *_ in ROWS for op in ops.split()} == set(KERNELS) - UNDOCUMENTED


def test_a_dim_in_use_is_not_cut_into_single_rows() -> None:
    """3 rows over 3 ranks are one each: 4 more cannot share them, though dim 0 of the weight is cut over the 4."""
    mesh = DeviceMesh((3, 2, 4), ("a", "b", "c"))
    greedy = GreedyReshard(allow_partial_to_sharded=True)
    layouts = [operand(text, mesh) for text in ("3,3,16@S0,R,P", "16@R,R,S0")]
    action = pick("rms_norm", layouts, solver=greedy, rules="documented")
    assert [m.collective for m in action.reshards[0]] == ["all_reduce"]
    assert action.cost_bytes == 2 * 576 * 3 / 4 + 64 * 3 / 4
