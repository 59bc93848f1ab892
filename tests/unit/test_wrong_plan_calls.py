"""What tests/unit/test_wrong_calls.py does, of plans, profiles, graphs, rules of files, quantisation and launching."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import mode
from support.wrong_values import LAYOUT, MESH, MOVED, A, B, Prepare, coerced, floats, key, swept

from lowshard import BufferPool, DeviceMesh, Layout, Replicated, Sharded
from lowshard.checkpoint import (
    Catalog,
    CheckpointReader,
    plan_box,
    plan_read,
    read_header,
)
from lowshard.comm import loopback, run_loopback
from lowshard.cost import ClusterProfile, Curve, Piece, factor
from lowshard.fsdp import SGD, AdamW, FlatPlan, Param, Precision, ShardingStrategy, Slot
from lowshard.kernels import (
    MXFP8Tensor,
    adamw_step,
    pack_quantize,
    quantize_mxfp8,
    sgd_step,
    unpack_dequantize,
)
from lowshard.launch import (
    Host,
    Spread,
    find_mpi,
    find_rank,
    parse_hosts,
    python_command,
    read_hostfile,
    spread_over,
)
from lowshard.op import Part, prove, run_unsharded, unsharded
from lowshard.reshard import (
    Cut,
    Grid,
    MXFP8ReshardTransform,
    ParameterMetadata,
    ReshardPlan,
    Roster,
    TensorLayout,
    build_reshard_plan,
    kv_cache_layout,
    resolve_name,
    ssm_state_layouts,
)
from lowshard.rules import (
    CheckReport,
    RuleSet,
    checkpoint_layouts,
    load_rules,
    name_tensors,
    named_shardings,
    tensor_layouts,
    unit_layouts,
)
from lowshard.solver import (
    Action,
    AxisAssignment,
    Graph,
    GraphPlan,
    GraphSolver,
    GreedyReshard,
    Rates,
    build_action_set,
    force_replicated,
    pick,
    solve_graph,
    solver,
)
from lowshard.weights import (
    LoadPlan,
    NamePatterns,
    Quantization,
    Segment,
    Sizes,
    Weight,
    expert_scales,
    nodes_of,
    plan_load,
    remove_leftovers,
    save,
    scale_strategy,
)
from lowshard.weights import ShardingStrategy as Cutting

PLAN = build_reshard_plan({"w": LAYOUT}, {"w": MOVED}, node_size=2)
PROFILE = ClusterProfile.default()
WHOLE = Layout(DeviceMesh((1,), ("x",)), (8, 6), "float32", (Replicated(),))
SAVED = Path("saved")


def boxes() -> list[Any]:
    return [((0, 2), (0, 64))]


def saved() -> Path:
    """Return a checkpoint in the working folder, made when it is asked for first."""
    if not SAVED.exists():
        save(SAVED, {"w": (WHOLE, floats(8, 6))})
    return SAVED


def first_file() -> Path:
    return next(saved().glob("*.safetensors"))


def read_by(method: str) -> Callable[..., object]:
    """Return a method of a reader of the saved file, which is opened for each call."""

    def call(**given: Any) -> object:
        with CheckpointReader(first_file()) as reader:
            return getattr(reader, method)(**given)

    return call


def graph() -> Graph:
    made = Graph("g")
    x = made.input("x", (8, 4))
    made.output(made.matmul(x, made.weight("w", (4, 8)), name="y"))
    return made


def read_as(kind: Any, text: str) -> Any:
    Path("given").write_text(text)
    return kind, {"path": Path("given")}


STEPS: dict[str, Prepare] = {
    "adamw_step": lambda: (
        adamw_step,
        {
            "param": floats(4), "grad": floats(4), "first": floats(4), "second": floats(4),
            "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "step": 2,
        },
    ),
    "sgd_step": lambda: (
        sgd_step,
        {
            "param": floats(4), "grad": floats(4), "buffer": floats(4),
            "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "first": True,
        },
    ),
    "pack_quantize": lambda: (
        pack_quantize,
        {
            "src": floats(2, 64), "table": boxes(), "elem": "e5m2", "mode": "even",
            "out": quantize_mxfp8(floats(128), "e5m2"), "min_scale_byte": 1,
        },
    ),
    "unpack_dequantize": lambda: (
        unpack_dequantize,
        {"q": quantize_mxfp8(floats(128)), "table": boxes(), "out": floats(2, 64)},
    ),
    "MXFP8Tensor.buffer_bytes": lambda: (MXFP8Tensor.buffer_bytes, {"shape": (2, 64)}),
}  # fmt: skip

WORLDS: dict[str, Prepare] = {
    "run_loopback": lambda: (run_loopback, {"size": 2, "function": lambda c: c.rank, "timeout_s": 5.0}),
    "BufferPool": lambda: (BufferPool, {"comm": loopback(1)[0], "limit_bytes": 1 << 20}),
    "Layout.box_at": lambda: (LAYOUT.box_at, {"coord": (0, 1)}),
    "Layout.local_elems": lambda: (LAYOUT.local_elems, {"rank": 1}),
    "nodes_of": lambda: (nodes_of, {"comm": loopback(1)[0]}),
}

COSTS: dict[str, Prepare] = {
    "ClusterProfile": lambda: (
        ClusterProfile, {"curves": PROFILE.curves, "machine": (("a", "b"),), "is_default": True},
    ),
    "ClusterProfile.curves_of": lambda: (
        PROFILE.curves_of, {"op": "all_reduce", "level": "node"},
    ),
    "ClusterProfile.from_json": lambda: (ClusterProfile.from_json, {"data": PROFILE.to_json()}),
    "ClusterProfile.save": lambda: (PROFILE.save, {"path": "profile"}),
    "ClusterProfile.load": lambda: (PROFILE.save("profile"), (ClusterProfile.load, {"path": "profile"}))[1],
    "factor": lambda: (factor, {"op": "all_reduce", "ranks": 2}),
    "Piece": lambda: (
        Piece,
        {"alpha_s": 1e-6, "beta_s_per_byte": 1e-9, "gamma_s_per_byte": 0.0, "below_bytes": 8},
    ),
    "Curve": lambda: (
        Curve,
        {
            "op": "all_reduce", "level": "node", "ranks": 2, "pieces": (Piece(1e-6, 1e-9),),
        },
    ),
    "Curve.seconds": lambda: (PROFILE.curves[0].seconds, {"ranks": 2, "size_bytes": 10.0}),
}  # fmt: skip

TENSOR = TensorLayout.from_layout(LAYOUT)
GRID, ROSTER, CUT = Grid(((((2, 2)),), ()), ((2, 1),)), Roster(((0, 1), (2, 3))), Cut(8, 2)


def mxfp8(**more: Any) -> MXFP8ReshardTransform:
    return MXFP8ReshardTransform(["w"], {"w": quantize_mxfp8(floats(4, 64))}, **more)


AT = (slice(0, 4), slice(0, 64))

RESHARD: dict[str, Prepare] = {
    "Cut": lambda: (
        Cut, {"length": 8, "parts": 2, "chunks": 2, "blocks": (4, 4), "points": None, "split": "balanced"},
    ),
    "Cut with points": lambda: (
        Cut, {"length": 8, "parts": 2, "chunks": 1, "blocks": None, "points": (0, 3, 8), "split": "balanced"},
    ),
    "Cut.extent": lambda: (CUT.extent, {"part": 1}),
    "Cut.segments": lambda: (CUT.segments, {"part": 1}),
    "Cut.holders": lambda: (CUT.holders, {"start": 1, "stop": 5}),
    "Cut.sizes": lambda: (Cut.sizes, {"widths": (3, 5)}),
    "Cut.whole": lambda: (Cut.whole, {"length": 8}),
    "Cut.from_json": lambda: (Cut.from_json, {"data": CUT.to_json()}),
    "Grid": lambda: (Grid, {"dims": (((2, 2),), ()), "copies": ((2, 1),), "offset": 1}),
    "Grid.count": lambda: (GRID.count, {"cell": 1}),
    "Grid.rank": lambda: (GRID.rank, {"cell": 1, "replica": 1}),
    "Grid.rank_array": lambda: (GRID.rank_array, {"cell": 1}),
    "Grid.ranks": lambda: (GRID.ranks, {"cell": 1}),
    "Grid.seat": lambda: (GRID.seat, {"rank": 1}),
    "Roster": lambda: (Roster, {"holders": ((0, 1), (2, 3))}),
    "Roster.count": lambda: (ROSTER.count, {"cell": 1}),
    "Roster.rank": lambda: (ROSTER.rank, {"cell": 1, "replica": 1}),
    "Roster.rank_array": lambda: (ROSTER.rank_array, {"cell": 1}),
    "Roster.ranks": lambda: (ROSTER.ranks, {"cell": 1}),
    "Roster.seat": lambda: (ROSTER.seat, {"rank": 1}),
    "TensorLayout": lambda: (
        TensorLayout, {"dtype": "float32", "partition": TENSOR.partition, "seats": TENSOR.seats},
    ),
    "TensorLayout.from_json": lambda: (TensorLayout.from_json, {"data": TENSOR.to_json()}),
    "TensorLayout.from_layout": lambda: (TensorLayout.from_layout, {"layout": LAYOUT}),
    "TensorLayout.from_tiling": lambda: (
        TensorLayout.from_tiling, {"tiling": Cutting.rowwise(2).layout((8, 6))},
    ),
    "TensorLayout.local_shape": lambda: (TENSOR.local_shape, {"rank": 1}),
    "TensorLayout.tiles": lambda: (TENSOR.tiles, {"rank": 1}),
    "TensorLayout.sharded": lambda: (
        TensorLayout.sharded,
        {
            "shape": (8, 6), "dtype": "bf16", "axes": {"a": (2, 1)}, "dims": {0: Cut(8, 2)}, "by": {0: "a"},
            "offset": 1,
        },
    ),
    "TensorLayout.sharded with an axis": lambda: (
        lambda size, stride, dim, cut: TensorLayout.sharded((8, 6), "bf16", {"a": (size, stride)}, {key(dim): cut}),
        {"size": 2, "stride": 1, "dim": 0, "cut": "a"},
    ),
    "kv_cache_layout": lambda: (
        kv_cache_layout,
        {
            "layers": 4, "heads": 2, "inner": (16, 8), "dtype": "bf16", "tp": 2, "pp": 2, "copies": 2,
            "windows": (1, 3), "offset": 1,
        },
    ),
    "ssm_state_layouts": lambda: (
        ssm_state_layouts,
        {
            "layers": 4, "heads": 4, "head_dim": 8, "groups": 2, "state_dim": 4, "conv_width": 4,
            "dtype": "bf16", "batch": 2, "tp": 2, "pp": 2, "offset": 1,
        },
    ),
    "resolve_name": lambda: (
        resolve_name,
        {
            "name": "layers.0.mlp.experts.linear_fc1.weight1", "expert_ranks": (0, 1), "rank": 1,
            "num_experts": 4, "layer_prefixes": {"layers.0": "layers.2"},
        },
    ),
    "ParameterMetadata.resolved": lambda: (
        ParameterMetadata("w", (4, 4)).resolved, {"layer_prefixes": {"a": "b"}},
    ),
    "ReshardPlan": lambda: (ReshardPlan, {"entries": PLAN.entries, "node_size": 2, "multicast": True}),
    "ReshardPlan.from_json": lambda: (ReshardPlan.from_json, {"data": PLAN.to_json()}),
    **{
        f"ReshardPlan.{name}": lambda name=name: (getattr(PLAN, name), {"rank": 1})
        for name in (
            "copied_bytes", "copies", "egress_bound_bytes", "explain", "for_rank", "peer_bytes",
            "received_bytes", "receives", "sends", "sent_bytes",
        )
    },
    "ReshardPlan.check_coverage": lambda: (PLAN.check_coverage, {"ranks": (0, 1)}),
    "ReshardPlan.multicast_groups": lambda: (PLAN.multicast_groups, {"entry": 0}),
    "ReshardPlan.move_bytes": lambda: (PLAN.move_bytes, {"move": PLAN.sends(0)[0]}),
    "MXFP8ReshardTransform": lambda: (
        MXFP8ReshardTransform,
        {
            "convertible_params": ["w"], "persistent_buffers": {"w": quantize_mxfp8(floats(4, 64))},
            "buffer_key_prefix": "", "convert_on_send": True, "elem": "e4m3", "mode": "even",
            "misaligned": "refuse",
        },
    ),
    "MXFP8ReshardTransform of buffers": lambda: (
        lambda name, buffer: MXFP8ReshardTransform(["w"], {key(name): buffer}),
        {"name": "w", "buffer": quantize_mxfp8(floats(4, 64))},
    ),
    "MXFP8ReshardTransform.should_transform": lambda: (mxfp8().should_transform, {"param_name": "w"}),
    "MXFP8ReshardTransform.prepare_send": lambda: (
        mxfp8(convert_on_send=True).prepare_send,
        {"param_name": "w", "src_slice": AT, "src_param": floats(4, 64)},
    ),
    "MXFP8ReshardTransform.prepare_recv": lambda: (
        mxfp8().prepare_recv, {"param_name": "w", "dst_slice": AT},
    ),
    "MXFP8ReshardTransform.finalize_recv": lambda: (
        mxfp8().finalize_recv,
        {"param_name": "w", "dst_slice": AT, "recv_buffers": mxfp8().prepare_recv("w", AT)},
    ),
}  # fmt: skip

COLUMNS = Cutting.columnwise(2)
QUANTISED = Quantization.scaled("block", (2, 2))

WEIGHTS: dict[str, Prepare] = {
    "Quantization": lambda: (
        Quantization, {"name": "q", "values": 2, "stored": 1, "granularity": "block", "block": (1, 32)},
    ),
    "Quantization.packed": lambda: (
        Quantization.packed, {"bits": 4, "granularity": "block", "block": (1, 32)},
    ),
    "Quantization.gguf": lambda: (Quantization.gguf, {"kind": "Q4_0"}),
    "Quantization.scaled": lambda: (Quantization.scaled, {"granularity": "block", "block": (1, 32)}),
    "Quantization.value_shape": lambda: (Quantization.packed(4).value_shape, {"stored_shape": (4, 8)}),
    "Quantization.scale_shape": lambda: (QUANTISED.scale_shape, {"stored_shape": (4, 8)}),
    "Quantization.blocks": lambda: (QUANTISED.blocks, {"ndim": 2}),
    "Quantization.pieces": lambda: (
        QUANTISED.pieces, {"strategy": COLUMNS, "stored_shape": (4, 8), "index": 1},
    ),
    "Quantization.is_legal": lambda: (QUANTISED.is_legal, {"strategy": COLUMNS, "stored_shape": (4, 8)}),
    "Quantization.scale_box": lambda: (
        QUANTISED.scale_box, {"box": ((0, 4), (0, 4)), "stored_shape": (4, 8)},
    ),
    "scale_strategy": lambda: (
        scale_strategy,
        {"strategy": COLUMNS, "granularity": "block", "weight_shape": (4, 8), "block": (2, 2)},
    ),
    "expert_scales": lambda: (expert_scales, {"moe_dim": 64, "block": 8, "num_devices": 2, "index": 1}),
    "Weight of quantised values": lambda: (
        Weight,
        {
            "name": "w", "array": floats(4, 8), "sharding_strategy": COLUMNS, "quantization": QUANTISED,
            "scale": floats(2, 4), "input_scale": floats(), "bias": None,
        },
    ),
    "Weight.part": lambda: (Weight("w", floats(4, 8)).part, {"strategy": COLUMNS, "index": 1}),
    "Segment.even": lambda: (Segment.even, {"size": 4}),
    "Segment.head_aware": lambda: (Segment.head_aware, {"num_heads": 4, "head_dim": 8}),
    "Segment.of": lambda: (Segment.of, {"value": {"size": 4}}),
    "Segment.interval": lambda: (Segment(4).interval, {"index": 1, "num_devices": 2}),
    "Sizes": lambda: (Sizes, {"num_heads": 4, "num_kv_heads": 2}),
    "Sizes.from_config": lambda: read_as(Sizes.from_config, '{"num_attention_heads": 4}'),
    "NamePatterns.load": lambda: (NamePatterns.load, {"source": "llama"}),
    "NamePatterns.match": lambda: (
        NamePatterns.load("llama").match, {"names": ["model.layers.0.mlp.up_proj.weight"]},
    ),
    "NamePatterns.strategies": lambda: (
        NamePatterns.load("llama").strategies,
        {
            "shapes": {"model.layers.0.self_attn.q_proj.weight": (32, 16)}, "num_devices": 2,
            "sizes": Sizes(4, 2),
        },
    ),
    "NamePatterns.strategies of a shape": lambda: (
        lambda name, shape: NamePatterns.load("llama").strategies({key(name): shape}, 2, Sizes(4, 2)),
        {"name": "model.layers.0.self_attn.q_proj.weight", "shape": (32, 16)},
    ),
    "remove_leftovers": lambda: (remove_leftovers, {"path": Path("out")}),
    "LoadPlan.from_json": lambda: (
        LoadPlan.from_json, {"data": plan_load(saved(), {"w": WHOLE}).to_json()},
    ),
    **{
        f"LoadPlan.{name}": lambda name=name: (getattr(plan_load(saved(), {"w": WHOLE}), name), {"rank": 0})
        for name in ("held_bytes", "read_bytes", "received_bytes", "sent_bytes")
    },
    "Catalog.of_rank_files": lambda: (
        Catalog.of_rank_files, {"files": [first_file()], "tilings": {"w": Cutting.replicate(1).layout((8, 6))}},
    ),
    "CheckpointReader": lambda: (lambda path: CheckpointReader(path).close(), {"path": first_file()}),
    "CheckpointReader.plan": lambda: (
        read_by("plan"), {"name": "w", "layout": WHOLE, "rank": 0, "reshape": True},
    ),
    "CheckpointReader.read": lambda: (
        read_by("read"),
        {"name": "w", "layout": WHOLE, "rank": 0, "out": floats(8, 6), "reshape": True},
    ),
    "CheckpointReader.read_box": lambda: (
        read_by("read_box"),
        {"name": "w", "box": ((0, 6), (0, 8)), "out": floats(6, 8), "shape": (6, 8)},
    ),
    "Header.entry": lambda: (read_header(first_file()).entry, {"name": "w"}),
    "plan_box": lambda: (
        plan_box,
        {"entry": read_header(first_file()).entry("w"), "box": ((0, 6), (0, 8)), "shape": (6, 8)},
    ),
    "plan_read": lambda: (
        plan_read,
        {"entry": read_header(first_file()).entry("w"), "layout": WHOLE, "rank": 0, "reshape": True},
    ),
}  # fmt: skip


def ep_rules() -> RuleSet:
    return load_rules("ep-as-cp")


def rule_mesh() -> DeviceMesh:
    return ep_rules().mesh(4)


TENSORS = {"w": (("embed", None), (8, 8))}

RULES: dict[str, Prepare] = {
    "RuleSet.bound_spec": lambda: (
        ep_rules().bound_spec,
        {"mesh": rule_mesh(), "names": ("embed", None), "shape": (8, 8), "parameter": "w", "uneven": True},
    ),
    "RuleSet.for_eval": lambda: (ep_rules().for_eval, {"other": ep_rules()}),
    "RuleSet.resolver": lambda: (ep_rules().resolver, {"parameter": "w"}),
    "RuleSet.place": lambda: (ep_rules().place, {"key": "mesh_axes"}),
    "CheckReport.of": lambda: (CheckReport.of, {"findings": []}),
    "tensor_layouts": lambda: (
        tensor_layouts,
        {
            "rules": ep_rules(), "mesh": rule_mesh(), "tensors": TENSORS, "dtype": "bf16", "uneven": True,
            "split": "ceil",
        },
    ),
    "named_shardings": lambda: (
        named_shardings, {"rules": ep_rules(), "mesh": rule_mesh(), "tensors": TENSORS, "dtype": "bf16"},
    ),
    "name_tensors": lambda: (
        name_tensors, {"rules": ep_rules(), "shapes": {"model.norm.weight": ((8,), "bf16")}},
    ),
    "name_tensors of a shape": lambda: (
        lambda name, shape, dtype: name_tensors(ep_rules(), {key(name): (shape, dtype)}),
        {"name": "model.norm.weight", "shape": (8,), "dtype": "bf16"},
    ),
    "checkpoint_layouts": lambda: (
        checkpoint_layouts,
        {
            "rules": ep_rules(), "mesh": rule_mesh(), "shapes": {"model.norm.weight": ((8,), "bf16")},
            "uneven": True, "split": "ceil",
        },
    ),
    "unit_layouts": lambda: (
        unit_layouts, {"layouts": {"l.0.w": LAYOUT}, "unit_of": lambda name: ("a", name)},
    ),
}  # fmt: skip


def plan_of_graph() -> GraphPlan:
    return solve_graph(graph(), MESH)


def with_solver(chosen: Any) -> None:
    with solver(chosen):
        pass


def added(method: str, **right: Any) -> Any:
    """Return a call that adds an op to a new graph; operands are numbered inputs of its own."""
    made = Graph("g")
    tensors = [made.input("x", (8, 4)), made.weight("w", (4, 8)), made.input("ids", (3,), "int32")]
    given = {k: tensors[v.n] if isinstance(v, Numbered) else v for k, v in right.items()}
    return lambda **given: (getattr(made, method)(**given), made.bind({"b": 8})), given


class Numbered:
    def __init__(self, n: int) -> None:
        self.n = n


X, W, IDS = map(Numbered, range(3))

ROW = AxisAssignment((Sharded(0), Replicated()), Sharded(0))

GRAPHS: dict[str, Prepare] = {
    "Graph": lambda: (Graph, {"name": "g"}),
    "Graph.input": lambda: added("input", name="y", shape=(8, "b"), dtype="bf16", place="dp=S0 tp=R"),
    "Graph.weight": lambda: added("weight", name="y", shape=(8, "b"), dtype="bf16", place=None),
    "Graph.tensor": lambda: added("tensor", name="x"),
    "Graph.output": lambda: added("output", tensor=X, place=None),
    "Graph.matmul": lambda: added("matmul", x=X, y=W, name="y"),
    "Graph.einsum": lambda: (
        lambda g: (lambda subscripts, a, name: g.einsum(subscripts, a, name=name),
                   {"subscripts": "ab->ba", "a": g.input("x", (8, 4)), "name": "y"})
    )(Graph()),
    "Graph.op": lambda: (
        lambda g: (lambda op, a, name: g.op(op, a, name=name), {"op": "relu", "a": g.input("x", (8,)), "name": "y"})
    )(Graph()),
    "Graph.reduce": lambda: added("reduce", op="sum", x=X, axis=1, name="y"),
    "Graph.pointwise": lambda: (
        lambda g: (lambda op, a, name: g.pointwise(op, a, name=name),
                   {"op": "relu", "a": g.input("x", (8,)), "name": "y"})
    )(Graph()),
    "Graph.norm": lambda: (
        lambda g: (g.norm, {"op": "layer_norm", "x": g.input("x", (8, 4)), "weight": g.weight("w", (4,)),
                            "bias": g.weight("b", (4,)), "name": "y"})
    )(Graph()),
    "Graph.gather": lambda: added("gather", table=W, ids=IDS, axis=0, name="y"),
    "Graph.softmax": lambda: added("softmax", x=X, axis=1, name="y"),
    "Graph.reshape": lambda: added("reshape", x=X, shape=[4, 8], name="y"),
    "Graph.permute": lambda: added("permute", x=X, dims=(1, 0), name="y"),
    "Graph.attention": lambda: (
        lambda g: (g.attention, {n: g.input(n, (2, 2, 8, 4)) for n in "qkv"} | {"causal": True, "name": "y"})
    )(Graph()),
    "Graph.bind": lambda: (
        lambda g: (g.relu(g.input("x", ("b", 4))) if hasattr(g, "relu") else g.op("relu", g.input("x", ("b", 4))),
                   (g.bind, {"sizes": {"b": 8}}))[1]
    )(Graph()),
    "Graph.bind of a size": lambda: (
        lambda g: (g.op("relu", g.input("x", ("b", 4))), (lambda size: g.bind({"b": size}), {"size": 8}))[1]
    )(Graph()),
    "GraphPlan.action": lambda: (plan_of_graph().action, {"name": "y"}),
    "GraphPlan.layout": lambda: (plan_of_graph().layout, {"name": "y"}),
    "GraphPlan.needed_moves": lambda: (plan_of_graph().needed_moves, {"step": 0}),
    "GraphPlan.from_json": lambda: (GraphPlan.from_json, {"data": plan_of_graph().to_json(), "profile": None}),
    "GraphSolver": lambda: (
        GraphSolver,
        {
            "profile": PROFILE, "rates": Rates(), "objective": "volume", "budget_bytes": 1e9,
            "allow_partial_to_sharded": True, "keep_activations": True, "node_size": 2, "method": "auto",
            "time_limit_s": 1.0,
        },
    ),
    "GraphSolver.solve": lambda: (
        GraphSolver().solve, {"graph": graph(), "mesh": MESH, "sizes": {}, "rules": "documented"},
    ),
    "GraphSolver()": lambda: (
        lambda offer, layouts: GraphSolver()(offer, layouts),
        {"offer": build_action_set([ROW], layouts=[A, B], result_shape=(8, 8)), "layouts": [A, B]},
    ),
    "solve_graph": lambda: (
        solve_graph,
        {
            "graph": graph(), "mesh": MESH, "solver": GreedyReshard(), "sizes": {}, "rules": "documented",
            "prices": GraphSolver(),
        },
    ),
    "Rates": lambda: (Rates, {"flops_per_s": 1e9, "memory_bytes_per_s": 1e9}),
    "Rates.of": lambda: (Rates.of, {"profile": PROFILE}),
    "solver": lambda: (with_solver, {"chosen": GreedyReshard()}),
    "force_replicated": lambda: (
        lambda offer, layouts: force_replicated(offer, layouts),
        {"offer": build_action_set([ROW], layouts=[A, B], result_shape=(8, 8)), "layouts": [A, B]},
    ),
    "build_action_set": lambda: (
        build_action_set,
        {
            "rows": [ROW], "layouts": [A, B], "extras": {"a": 1}, "result_shape": (8, 8), "finalize": None,
            "op": "mine", "prices": "volume", "refused": (), "fallback": True,
        },
    ),
    "build_action_set of results": lambda: (
        build_action_set, {"rows": [ROW], "layouts": [A, B], "results": [((8, 8), "float32")]},
    ),
    "AxisAssignment": lambda: (
        AxisAssignment,
        {
            "needed_inputs": (Sharded(0), Replicated()), "output": Sharded(0), "how": "local", "inner": (),
            "only": (), "kinds": frozenset({"float"}), "finite_only": False,
        },
    ),
    "AxisAssignment.outputs": lambda: (ROW.outputs, {"count": 1}),
    "AxisAssignment.holds_for": lambda: (ROW.holds_for, {"kind": "float"}),
    "Action.from_json": lambda: (Action.from_json, {"data": pick("matmul", [A, B]).to_json()}),
    "unsharded": lambda: (
        lambda op, x, axis: unsharded(op, x, axis=axis), {"op": "softmax", "x": floats(2, 3), "axis": 1},
    ),
    "run_unsharded": lambda: (
        run_unsharded, {"graph": graph().bind(), "inputs": {"x": floats(8, 4), "w": floats(4, 8)}},
    ),
    "run_unsharded of an array": lambda: (
        lambda x: run_unsharded(graph().bind(), {"x": x, "w": floats(4, 8)}), {"x": floats(8, 4)},
    ),
    "prove": lambda: (prove, {"plan": plan_of_graph(), "seed": 1, "tolerance": 0.1, "timeout_s": 5.0}),
    "Part": lambda: (
        Part, {"action": pick("matmul", [A, B]), "rank": 1, "comm": None},
    ),
}  # fmt: skip


def flat() -> FlatPlan:
    return FlatPlan.plan([Param("w", (4, 4))], 2)


FSDP: dict[str, Prepare] = {
    "FlatPlan.plan": lambda: (FlatPlan.plan, {"params": [Param("w", (4, 4))], "shards": 2, "align": 4}),
    "FlatPlan.from_json": lambda: (FlatPlan.from_json, {"text": flat().to_json()}),
    "FlatPlan.pieces": lambda: (flat().pieces, {"rank": 1}),
    "FlatPlan.range": lambda: (flat().range, {"rank": 1}),
    "FlatPlan.views": lambda: (flat().views, {"flat": floats(64)}),
    "FlatPlan.intersect": lambda: (flat().intersect, {"other": flat(), "rank": 0, "other_rank": 1}),
    "Precision.of": lambda: (Precision().of, {"unit": "l0", "params": [Param("w", (4, 4))]}),
    "ShardingStrategy.grid": lambda: (ShardingStrategy.FullShard.grid, {"world": 4, "rank": 1}),
    "ShardingStrategy": lambda: (
        ShardingStrategy, {"kind": "HybridShard", "intra_node_size": 2, "rest": "sharded"},
    ),
    "Slot": lambda: (
        Slot, {"unit": "l0", "param": floats(4), "grad": floats(4), "pieces": (), "xp": np},
    ),
    "AdamW()": lambda: (AdamW(0.1), {"slot": Slot("l0", floats(4), floats(4), (), np)}),
    "SGD()": lambda: (SGD(0.1), {"slot": Slot("l0", floats(4), floats(4), (), np)}),
}  # fmt: skip

HOSTS = (Host("a", 2), Host("b", 2))

LAUNCH: dict[str, Prepare] = {
    "Host": lambda: (lambda **given: spread_over([Host(**given)], 2), {"name": "a", "slots": 2}),
    "parse_hosts": lambda: (parse_hosts, {"text": "a:2,b:2"}),
    "read_hostfile": lambda: read_as(read_hostfile, "a slots=2\n"),
    "spread_over": lambda: (spread_over, {"hosts": HOSTS, "n": 3, "shell": "ssh", "iface": "eth0"}),
    "Spread": lambda: (Spread, {"hosts": HOSTS}),
    "find_mpi": lambda: (find_mpi, {"want": "auto"}),
    "find_rank": lambda: (find_rank, {"env": {}}),
    "python_command": lambda: (python_command, {"target": "x.py", "args": ["a"], "module": True}),
    "Spread.hostfile": lambda: (Spread(HOSTS).hostfile, {"family": "mpich"}),
}  # fmt: skip

CALLS = STEPS | WORLDS | COSTS | RESHARD | WEIGHTS | RULES | GRAPHS | FSDP | LAUNCH


@pytest.mark.parametrize("name", mode.sample([*CALLS], 30, "wrong arguments"))
def test_wrong_arguments(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not swept(CALLS[name])


@pytest.mark.parametrize("name", mode.sample([*CALLS], 30, "no numbers"))
def test_nothing_is_taken_for_a_number(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not coerced(CALLS[name])
