"""Public functions of one process: each argument in turn is replaced by what users pass by mistake.

The call then works, or raises a LowshardError, within a second of CPU time; what is no number is taken for none.
Collectives: tests/world/test_wrong_collectives.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import mode
from support.wrong_values import LAYOUT, MESH, MOVED, A, B, Prepare, call, floats, key, swept

from lowshard import BufferPool, DeviceMesh, Layout, Partial, Replicated, Sharded, execute, plan_redistribute
from lowshard.checkpoint import Catalog, CheckpointReader
from lowshard.comm import loopback, run_loopback
from lowshard.cost import ClusterProfile
from lowshard.errors import BufferMismatchError, CheckpointError, LowshardError
from lowshard.fsdp import FSDP, SGD, AdamW, FlatPlan, Param, Precision
from lowshard.fsdp import ShardingStrategy as Shard
from lowshard.kernels import (
    BoxTable,
    MXFP8Tensor,
    adamw_step,
    cast,
    content_sum,
    dequantize_mxfp8,
    pack,
    pack_quantize,
    quantize_mxfp8,
    sum_into,
    unpack,
    unpack_dequantize,
    unswizzle_scales,
)
from lowshard.launch import find_mpi, parse_hosts, python_command, read_hostfile
from lowshard.op import prove, run_unsharded
from lowshard.reshard import (
    MXFP8ReshardTransform,
    ParameterMetadata,
    Publisher,
    Refit,
    ReshardPlan,
    TensorLayout,
    build_reshard_plan,
    digest,
    ensure_sendable,
    execute_reshard_plan,
    kv_cache_layout,
    resolve_name,
    scale_slice_from_data_slice,
)
from lowshard.rules import checkpoint_layouts, load_rules, make_rules, parse_rules
from lowshard.solver import Graph, GraphSolver, GreedyReshard, action_set, build_action_set, pick, solve_graph
from lowshard.weights import (
    NamePatterns,
    Quantization,
    Segment,
    ShardingStrategy,
    Sizes,
    Weight,
    load,
    plan_load,
    save,
    shard_module,
)

MOVES = build_reshard_plan({"w": LAYOUT}, {"w": MOVED}, node_size=2)
PROFILE = ClusterProfile.default()
ROWS = ShardingStrategy.rowwise(2)
OFFERED = action_set("matmul", [A, B])
BOXES = [((0, 2), (0, 6))]
WHOLE = Layout(DeviceMesh((1,), ("x",)), (8, 6), "float32", (Replicated(),))
SAVED = Path("saved")


def saved() -> Path:
    """Return a checkpoint in the working folder, made when it is asked for first."""
    if not SAVED.exists():
        save(SAVED, {"w": (WHOLE, floats(8, 6))})
    return SAVED


def written(name: str, text: str) -> Path:
    Path(name).write_text(text)
    return Path(name)


def cut(method: str, *shape: int, **given: Any) -> Any:
    """Return a call that makes a strategy and cuts a shape by it: constructors never look at a shape."""
    return call(lambda **given: getattr(ShardingStrategy, method)(**given).pieces(shape, 0), **given)


def read_box(**given: Any) -> None:
    with CheckpointReader(next(saved().glob("*.safetensors"))) as reader:
        reader.read_box(**given)


def graph() -> Graph:
    made = Graph("g")
    made.output(made.matmul(made.input("x", (8, 4)), made.weight("w", (4, 8)), name="y"))
    return made


def added(method: str, *operands: int, **right: Any) -> Any:
    """Return a call that adds an op on some of a new graph's tensors."""
    made = Graph("g")
    tensors = [made.input("x", (8, 4)), made.weight("w", (4, 8)), made.input("ids", (3,), "int32")]
    given = [tensors[i] for i in operands]
    return call(lambda **right: (getattr(made, method)(*given, **right), made.bind({"b": 8})), **right)


RULES, MESH_OF_RULES = load_rules("ep-as-cp"), load_rules("ep-as-cp").mesh(4)
SIZES: dict[str, Any] = {"devices": 16, "ici": {"fsdp": -1, "expert": 4}, "slices": 2, "dcn": {"data": 2}}
RULE_FILE: dict[str, Any] = {"mode": "strict", "base": "default", "merge": "names"}

CALLS: dict[str, Prepare] = {
    # geometry and plans
    "DeviceMesh": lambda: call(
        DeviceMesh, shape=(2, 2), axis_names=("dp", "tp"), memory_budget_bytes_per_device=1e9, ranks=(3, 2, 1, 0)
    ),
    "Sharded": lambda: call(Sharded, dim=0, split="ceil"),
    "Layout": lambda: call(Layout, mesh=MESH, shape=(8, 6), dtype="bf16", placements=(Sharded(0), Partial())),
    "Layout.from_spec": lambda: call(
        Layout.from_spec, mesh=MESH, shape=(8, 6), dtype="bf16", spec=("dp", None), split="ceil", partial={"tp": "sum"}
    ),
    "Layout.parse": lambda: call(Layout.parse, mesh=MESH, text=str(LAYOUT)),
    "Layout.from_json": lambda: call(Layout.from_json, data=LAYOUT.to_json()),
    "plan_redistribute": lambda: call(plan_redistribute, src=LAYOUT, dst=MOVED, cost=None, node_size=2),
    "ClusterProfile.load": lambda: (PROFILE.save("profile"), call(ClusterProfile.load, path="profile"))[1],
    # worlds
    "loopback": lambda: call(loopback, size=2, timeout_s=1.0),
    "run_loopback": lambda: call(run_loopback, size=2, function=lambda c: c.rank, timeout_s=5.0),
    "BufferPool": lambda: call(BufferPool, comm=loopback(1)[0], limit_bytes=1 << 20),
    "find_mpi": lambda: call(find_mpi, want="auto"),
    "parse_hosts": lambda: call(parse_hosts, text="a:2,b:2"),
    "read_hostfile": lambda: call(read_hostfile, path=written("hosts", "a slots=2\n")),
    "python_command": lambda: call(python_command, target="x.py", args=["a"], module=True),
    # kernels
    "content_sum": lambda: call(content_sum, x=floats(2, 64), box=((0, 2), (0, 64)), shape=(4, 64)),
    "quantize_mxfp8": lambda: call(
        quantize_mxfp8, x=floats(2, 64), elem="e5m2", mode="even", out=quantize_mxfp8(floats(2, 64), "e5m2"),
        min_scale_byte=1, streaming=False,
    ),
    "dequantize_mxfp8": lambda: call(
        dequantize_mxfp8, q=quantize_mxfp8(floats(2, 64)), dtype="float32", out=floats(2, 64)
    ),
    "MXFP8Tensor": lambda: call(
        MXFP8Tensor, data=np.zeros((2, 64), np.uint8), scale=np.zeros((2, 2), np.uint8), elem="e5m2"
    ),
    "BoxTable": lambda: call(BoxTable, shape=(8, 6), boxes=BOXES),
    "pack": lambda: call(pack, src=floats(8, 6), table=BOXES, out=floats(12)),
    "unpack": lambda: call(unpack, packed=floats(12), table=BOXES, out=floats(8, 6)),
    "pack_quantize": lambda: call(
        pack_quantize, src=floats(2, 64), table=[((0, 2), (0, 64))], elem="e5m2", mode="even",
        out=quantize_mxfp8(floats(128), "e5m2"), min_scale_byte=1,
    ),
    "unpack_dequantize": lambda: call(
        unpack_dequantize, q=quantize_mxfp8(floats(128)), table=[((0, 2), (0, 64))], out=floats(2, 64)
    ),
    "cast": lambda: call(cast, x=floats(4), dtype="bf16", out=None),
    "sum_into": lambda: call(sum_into, out=floats(4), sources=[floats(4), floats(4)], accumulate=False),
    "unswizzle_scales": lambda: call(
        unswizzle_scales, swizzled=np.zeros(512, np.uint8), rows=128, cols=4, out=np.zeros((128, 4), np.uint8)
    ),
    "adamw_step": lambda: call(
        adamw_step, param=floats(4), grad=floats(4), first=floats(4), second=floats(4), lr=0.1, beta1=0.9,
        beta2=0.99, eps=1e-8, weight_decay=0.1, step=2,
    ),
    # solver and graphs
    "pick": lambda: call(pick, op="matmul", layouts=[A, B], solver=GreedyReshard(), rules="documented"),
    "pick with an axis": lambda: call(pick, op="softmax", layouts=[A], axis=1),
    "GreedyReshard": lambda: call(
        GreedyReshard, on_reshard="warn", allow_partial_to_sharded=True, allowed_transitions=[("P", "R")]
    ),
    "build_action_set": lambda: call(
        build_action_set, rows=list(OFFERED.axis_assignments), layouts=[A, B], op="mine", result_shape=(8, 8)
    ),
    "Graph.input": lambda: added("input", name="y", shape=(8, "b"), dtype="bf16", place="dp=S0 tp=R"),
    "Graph.op": lambda: call(
        lambda op, name: (lambda g: g.op(op, g.input("x", (8,)), name=name))(Graph()), op="relu", name="y"
    ),
    "Graph.softmax": lambda: added("softmax", 0, axis=1, name="y"),
    "Graph.reshape": lambda: added("reshape", 0, shape=[4, 8], name="y"),
    "GraphSolver": lambda: call(
        GraphSolver, profile=PROFILE, objective="volume", budget_bytes=1e9, allow_partial_to_sharded=True,
        keep_activations=True, node_size=2, time_limit_s=1.0,
    ),
    "solve_graph": lambda: call(
        solve_graph, graph=graph(), mesh=MESH, solver=GreedyReshard(), sizes={}, rules="documented"
    ),
    "run_unsharded": lambda: call(run_unsharded, graph=graph().bind(), inputs={"x": floats(8, 4), "w": floats(4, 8)}),
    "prove": lambda: call(prove, plan=solve_graph(graph(), MESH), seed=1, tolerance=0.1, timeout_s=5.0),
    # weights
    "ShardingStrategy": lambda: call(ShardingStrategy, num_devices=2, shard=lambda w, i, n: w),
    "rowwise": lambda: cut("rowwise", 8, 6, num_devices=2),
    "head_aware_columnwise": lambda: cut("head_aware_columnwise", 8, 32, num_devices=2, num_heads=4, head_dim=8),
    "stacked_qkv": lambda: cut("stacked_qkv", 96, 6, num_devices=2, num_heads=4, head_dim=8),
    "segmented": lambda: cut("segmented", 8, 6, num_devices=2, axis=0, segments=[{"size": 4}, Segment(4, 2)]),
    "grouped_qkv": lambda: cut(
        "grouped_qkv", 32, 6, num_devices=2, num_heads=4, num_kv_heads=2, head_dim=8, few_kv="empty", section="q",
        axis=0,
    ),
    "pieces": lambda: call(ROWS.pieces, shape=(8, 6), index=1),
    "a strategy of a weight": lambda: call(ROWS, weight=floats(8, 6), index=1),
    "Weight": lambda: call(
        Weight, name="w", array=floats(8, 6), sharding_strategy=ROWS, quantization=None, scale=None,
        input_scale=None, bias=floats(8),
    ),
    "Weight.shard": lambda: call(Weight("w", floats(8, 6), ROWS).shard, devices=2),
    "shard_module": lambda: call(shard_module, weights={"w": floats(8, 6)}, strategies={"w": ROWS}),
    "Quantization": lambda: call(
        Quantization, name="q", values=2, stored=1, granularity="block", block=(1, 32)
    ),
    "NamePatterns.load": lambda: call(NamePatterns.load, source="llama"),
    "NamePatterns.strategies": lambda: call(
        lambda name, shape: NamePatterns.load("llama").strategies({key(name): shape}, 2, Sizes(4, 2)),
        name="model.layers.0.self_attn.q_proj.weight", shape=(32, 16),
    ),
    "Sizes.from_config": lambda: call(Sizes.from_config, path=written("config", '{"num_attention_heads": 4}')),
    # checkpoints
    "save": lambda: call(
        save, path=Path("checkpoint"), state={"w": (WHOLE, floats(8, 6))}, comm=None, merged=False, strategies=None,
        metadata={"a": "b"},
    ),
    "save of a table": lambda: call(
        lambda name, layout, array: save(Path("checkpoint"), {key(name): (layout, array)}),
        name="w", layout=WHOLE, array=floats(8, 6),
    ),
    "Catalog.open": lambda: call(Catalog.open, files=saved()),
    "CheckpointReader.read_box": lambda: call(
        read_box, name="w", box=((0, 6), (0, 8)), out=floats(6, 8), shape=(6, 8)
    ),
    "plan_load": lambda: call(
        plan_load, files=saved(), tilings={"w": WHOLE}, num_ranks=1, strategy="own-slice", nodes=[0]
    ),
    "load": lambda: call(
        load, files=saved(), plan=plan_load(saved(), {"w": WHOLE}), comm=None, verify=True, mapped=False,
        progress=None, reports=None,
    ),
    # rules
    "load_rules": lambda: call(load_rules, source="pure-fsdp", **RULE_FILE),
    "parse_rules": lambda: call(parse_rules, text="logical_axis_rules: [['a', 'fsdp']]", path="x", **RULE_FILE),
    "make_rules": lambda: call(
        make_rules, mesh_axes=("data", "fsdp"), rules=[("embed", "fsdp")], data_sharding=[["data"]], mode="strict",
        name="mine",
    ),
    "RuleSet.mesh": lambda: call(RULES.mesh, **SIZES),
    "RuleSet.resolve": lambda: call(RULES.resolve, names=("embed", None, "mlp"), parameter="w"),
    "RuleSet.resolve_activation": lambda: call(
        RULES.resolve_activation, names=("embed", None), mesh=MESH_OF_RULES, rank=2
    ),
    "RuleSet.with_rules": lambda: call(RULES.with_rules, rules=[("embed", "fsdp")], replace_all=False),
    "RuleSet.layout": lambda: call(
        RULES.layout, mesh=MESH_OF_RULES, names=("embed", None), shape=(8, 8), dtype="bf16", parameter="w",
        activation=False, uneven=True, split="ceil",
    ),
    "RuleSet.check": lambda: call(
        RULES.check, tensors={"w": (("embed", None), (8, 8))}, activations=None, mesh=None, dtype="bf16", **SIZES
    ),
    "RuleSet.explain": lambda: call(
        RULES.explain, names=("embed", None), shape=(8, 8), mesh=MESH_OF_RULES, parameter="w"
    ),
    "checkpoint_layouts": lambda: call(
        checkpoint_layouts, rules=RULES, mesh=MESH_OF_RULES, shapes={"model.norm.weight": ((8,), "bf16")}, uneven=True,
        split="ceil",
    ),
    # FSDP
    "Param": lambda: call(
        Param, name="w", shape=(4, 4), dtype="bf16", trainable=True, tie=None, keep="row", ignored=False
    ),
    "Precision": lambda: call(
        Precision, compute="bf16", wire="mxfp8", reduce="float32", grad="bf16", master="float32"
    ),
    "ShardGradOp": lambda: call(Shard.ShardGradOp, rest="sharded"),
    "HybridShard": lambda: call(Shard.HybridShard, intra_node_size=2),
    "AdamW": lambda: call(AdamW, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, decay=bool),
    "SGD": lambda: call(SGD, lr=0.1, momentum=0.9, weight_decay=0.1, decay=bool),
    "FlatPlan.plan": lambda: call(FlatPlan.plan, params=[Param("w", (4, 4))], shards=2, align=4),
    # reshard
    "build_reshard_plan": lambda: call(
        build_reshard_plan, src={"w": LAYOUT}, dst={"w": MOVED}, node_size=2, multicast=False
    ),
    "build_reshard_plan of a table": lambda: call(
        lambda name, layout: build_reshard_plan({key(name): layout}, {key(name): MOVED}), name="w", layout=LAYOUT
    ),
    "build_reshard_plan of records": lambda: call(
        build_reshard_plan,
        src=[ParameterMetadata("w", (4, 4), owner_rank=0)], dst=[ParameterMetadata("w", (4, 4), owner_rank=1)],
    ),
    "ParameterMetadata": lambda: call(
        lambda **given: build_reshard_plan([ParameterMetadata(**given)], [ParameterMetadata(**given)]),
        name="w", shape=(4, 4), dtype="bf16", element_size=2, is_tp=True, partition_dim=1, partition_stride=1,
        partition_sizes=(2, 2), num_experts=2, owner_rank=1, tensor_parallel_group_ranks=(1,),
        expert_parallel_group_ranks=(1,), data_parallel_group_ranks=(1,), pipeline_parallel_group_ranks=(0, 1),
        resolved_name="w", global_expert_index=0, partition_copies=1, expert_dim=None, is_gtp=True,
        gtp_remat_group_ranks=(1,), gtp_pad_length=0,
    ),
    "TensorLayout.sharded": lambda: call(
        TensorLayout.sharded, shape=(8, 6), dtype="bf16", axes={"a": (2, 1)}, dims={0: "a"}, offset=1
    ),
    "kv_cache_layout": lambda: call(
        kv_cache_layout, layers=4, heads=2, inner=(16, 8), dtype="bf16", tp=2, pp=2, copies=2, windows=(1, 3), offset=1
    ),
    "resolve_name": lambda: call(
        resolve_name, name="layers.0.mlp.experts.linear_fc1.weight1", expert_ranks=(0, 1), rank=1, num_experts=4,
        layer_prefixes={"layers.0": "layers.2"},
    ),
    "ReshardPlan.from_json": lambda: call(ReshardPlan.from_json, data=MOVES.to_json()),
    "MXFP8ReshardTransform": lambda: call(
        MXFP8ReshardTransform, convertible_params=["w"], persistent_buffers={"w": quantize_mxfp8(floats(4, 64))},
        buffer_key_prefix="", convert_on_send=True, elem="e4m3", mode="even", misaligned="refuse",
    ),
    "scale_slice_from_data_slice": lambda: call(
        scale_slice_from_data_slice, data_slice=(slice(0, 4), slice(0, 64)), block_size=32
    ),
    "ensure_sendable": lambda: call(ensure_sendable, tensor=floats(4, 4), dtype="bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("name", mode.sample([*CALLS], 50, "wrong arguments"))
def test_wrong_arguments(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not swept(CALLS[name])


@pytest.mark.parametrize("value", ["False", None, -1, 0.5], ids=repr)
def test_a_flag_is_true_or_false(value: Any) -> None:
    for refused in (
        lambda: GreedyReshard(allow_partial_to_sharded=value),
        lambda: build_reshard_plan({"w": WHOLE}, {"w": WHOLE}, multicast=value),
        lambda: sum_into(floats(4), [floats(4)], accumulate=value),
    ):
        with pytest.raises(LowshardError, match="is True or False"):
            refused()
    assert GreedyReshard(allow_partial_to_sharded=np.bool_(True)) == GreedyReshard("silent", True)  # type: ignore[arg-type]


def test_paths_that_only_a_shell_expands_and_empty_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("~/w", Path("~"), ""):
        for refused in (lambda p=path: save(p, {"w": (WHOLE, floats(8, 6))}), lambda p=path: Catalog.open(p)):
            with pytest.raises(CheckpointError, match=r"expanduser|got ''"):
                refused()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["byte order", "mask"])
def test_arrays_of_another_byte_order_or_with_a_mask_are_refused_wherever_they_come_in(
    tmp_path: Path, kind: str
) -> None:
    """Kernels convert the byte order on their own, so they are not here."""
    right, wrong = (
        floats(8, 6),
        floats(8, 6).astype(">f4") if kind == "byte order" else np.ma.array(floats(8, 6)),
    )
    layout, plan = TensorLayout.from_layout(WHOLE), plan_redistribute(WHOLE, WHOLE)
    (comm,) = loopback(1)
    engine = FSDP({"l": [Param("w", (8, 6))]}, comm)
    moves = build_reshard_plan({"w": layout}, {"w": layout})
    for refused in (
        lambda: comm.all_reduce(wrong, right), lambda: execute(plan, wrong, comm),
        lambda: execute(plan, right, comm, wrong), lambda: save(tmp_path / "c", {"w": (WHOLE, wrong)}),
        lambda: digest({"w": (WHOLE, wrong)}), lambda: engine.fill(lambda name, box: wrong),
        lambda: execute_reshard_plan(moves, {"w": wrong}, {"w": right}, comm),
        lambda: Refit(moves, comm, {"w": right}, {"w": wrong}), lambda: Weight("w", wrong),
        lambda: Publisher({"w": layout}, {"w": wrong}, address=f"unix:{tmp_path}/a"),
    ):  # fmt: skip
        with pytest.raises(BufferMismatchError, match=kind + r".*; pass .*(newbyteorder|filled)"):
            refused()
