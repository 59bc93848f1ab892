"""Public functions of one process: each argument in turn is replaced by what users pass by mistake.

The call then works, or raises a LowshardError, within a second of CPU time. Each error is also of the fitting builtin,
so callers may catch either; a plain TypeError, KeyError or AttributeError from inside the library helps nobody.
Collectives: tests/world/test_wrong_collectives.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import mode
from support.wrong_values import LAYOUT, MESH, MOVED, A, B, Prepare, coerced, floats, key, swept

from lowshard import (
    DeviceMesh,
    Layout,
    Partial,
    Replicated,
    Sharded,
    plan_redistribute,
    predict_redistribute,
)
from lowshard.checkpoint import Catalog, read_header
from lowshard.comm import Communicator, loopback, refuse, run_loopback, share_text
from lowshard.errors import (
    CheckpointError,
    CommError,
    KernelError,
    LayoutError,
    LowshardError,
    ShardingError,
    SolverError,
    StepError,
)
from lowshard.fsdp import FSDP as Engine
from lowshard.fsdp import SGD, AdamW, Param, Precision
from lowshard.fsdp import ShardingStrategy as Shard
from lowshard.kernels import (
    BoxTable,
    MXFP8Tensor,
    cast,
    content_sum,
    dequantize_mxfp8,
    pack,
    quantize_mxfp8,
    sum_into,
    swizzle_scales,
    unpack,
    unswizzle_scales,
)
from lowshard.reshard import (
    MXFP8ReshardTransform,
    ParameterMetadata,
    build_reshard_plan,
    digest,
    ensure_sendable,
    model_digest,
    scale_slice_from_data_slice,
)
from lowshard.rules import RuleSet, load_rules, make_rules, parse_rules
from lowshard.solver import (
    GreedyReshard,
    NoReshard,
    PartialsOnly,
    action_set,
    build_action_set,
    force_replicated_action_set,
    pick,
    solver,
)
from lowshard.tiling import Tiling
from lowshard.weights import Segment, ShardingStrategy, Weight, load, plan_load, save, shard_module

PLAN = plan_redistribute(LAYOUT, MOVED)
ROWS = ShardingStrategy.rowwise(2)
SEGMENTS = [{"size": 4}, {"size": 4, "num_heads": 2}]


def scales() -> np.ndarray:
    return np.zeros((128, 4), np.uint8)


def ep_rules() -> RuleSet:
    return load_rules("ep-as-cp")


def offered() -> Any:
    return action_set("matmul", [A, B])


GEOMETRY: dict[str, Prepare] = {
    "DeviceMesh": lambda: (
        DeviceMesh,
        {
            "shape": (2, 2),
            "axis_names": ("dp", "tp"),
            "memory_budget_bytes_per_device": 1e9,
            "ranks": (3, 2, 1, 0),
        },
    ),
    "DeviceMesh.axis_size": lambda: (MESH.axis_size, {"name": "tp"}),
    "DeviceMesh.axis_index": lambda: (MESH.axis_index, {"name": "tp"}),
    "DeviceMesh.coord": lambda: (MESH.coord, {"rank": 3}),
    "DeviceMesh.rank": lambda: (MESH.rank, {"coord": (1, 0)}),
    "DeviceMesh.groups": lambda: (MESH.groups, {"name": "tp"}),
    "DeviceMesh.memory_budget_for": lambda: (MESH.memory_budget_for, {"rank": 0}),
    "DeviceMesh.from_json": lambda: (DeviceMesh.from_json, {"data": MESH.to_json()}),
    "Sharded": lambda: (Sharded, {"dim": 0, "split": "ceil"}),
    "Partial": lambda: (Partial, {"op": "max"}),
    "Layout": lambda: (
        Layout,
        {"mesh": MESH, "shape": (8, 6), "dtype": "bf16", "placements": (Sharded(0), Partial())},
    ),
    "Layout.from_spec": lambda: (
        Layout.from_spec,
        {
            "mesh": MESH,
            "shape": (8, 6),
            "dtype": "bf16",
            "spec": ("dp", None),
            "split": "ceil",
            "partial": {"tp": "sum"},
        },
    ),
    "Layout.parse": lambda: (Layout.parse, {"mesh": MESH, "text": str(LAYOUT)}),
    "Layout.from_json": lambda: (Layout.from_json, {"data": LAYOUT.to_json()}),
    "Layout.box": lambda: (LAYOUT.box, {"rank": 3}),
    "Layout.local_shape": lambda: (LAYOUT.local_shape, {"rank": 3}),
    "Layout.local_bytes": lambda: (LAYOUT.local_bytes, {"rank": 3}),
    "Layout.with_placements": lambda: (LAYOUT.with_placements, {"placements": (Partial(), Sharded(1))}),
    "Layout.with_shape": lambda: (LAYOUT.with_shape, {"shape": (4, 4)}),
    "Layout.with_spec": lambda: (LAYOUT.with_spec, {"spec": (None, "tp"), "split": "ceil"}),
    "plan_redistribute": lambda: (
        plan_redistribute,
        {"src": LAYOUT, "dst": MOVED, "cost": None, "node_size": 2},
    ),
    "predict_redistribute": lambda: (
        predict_redistribute,
        {"src": LAYOUT, "dst": MOVED, "cost": None, "node_size": 2},
    ),
    "RedistributePlan.sent_bytes": lambda: (PLAN.sent_bytes, {"rank": 0}),
    "RedistributePlan.received_bytes": lambda: (PLAN.received_bytes, {"rank": 0}),
    "RedistributePlan.from_json": lambda: (type(PLAN).from_json, {"data": PLAN.to_json()}),
    "loopback": lambda: (loopback, {"size": 2, "timeout_s": 1.0}),
}

KERNELS: dict[str, Prepare] = {
    "content_sum": lambda: (
        content_sum,
        {"x": floats(2, 64), "box": ((0, 2), (0, 64)), "shape": (4, 64)},
    ),
    "quantize_mxfp8": lambda: (
        quantize_mxfp8,
        {
            "x": floats(2, 64),
            "elem": "e5m2",
            "mode": "even",
            "out": quantize_mxfp8(floats(2, 64), "e5m2"),
            "min_scale_byte": 1,
            "streaming": False,
        },
    ),
    "dequantize_mxfp8": lambda: (
        dequantize_mxfp8,
        {"q": quantize_mxfp8(floats(2, 64)), "dtype": "float32", "out": floats(2, 64)},
    ),
    "MXFP8Tensor": lambda: (
        MXFP8Tensor,
        {"data": np.zeros((2, 64), np.uint8), "scale": np.zeros((2, 2), np.uint8), "elem": "e5m2"},
    ),
    "MXFP8Tensor.over": lambda: (
        MXFP8Tensor.over,
        {"buffer": np.zeros(132, np.uint8), "shape": (2, 64), "elem": "e5m2"},
    ),
    "BoxTable": lambda: (BoxTable, {"shape": (8, 6), "boxes": [((0, 2), (0, 6))]}),
    "pack": lambda: (pack, {"src": floats(8, 6), "table": [((0, 2), (0, 6))], "out": floats(12)}),
    "unpack": lambda: (unpack, {"packed": floats(12), "table": [((0, 2), (0, 6))], "out": floats(8, 6)}),
    "cast": lambda: (cast, {"x": floats(4), "dtype": "bf16", "out": None}),
    "sum_into": lambda: (
        sum_into,
        {"out": floats(4), "sources": [floats(4), floats(4)], "accumulate": False},
    ),
    "swizzle_scales": lambda: (swizzle_scales, {"scale": scales(), "out": scales().reshape(-1)}),
    "unswizzle_scales": lambda: (
        unswizzle_scales,
        {"swizzled": np.zeros(512, np.uint8), "rows": 128, "cols": 4, "out": scales()},
    ),
}

SOLVER: dict[str, Prepare] = {
    "pick": lambda: (
        pick,
        {"op": "matmul", "layouts": [A, B], "solver": GreedyReshard(), "rules": "documented"},
    ),
    "pick with an axis": lambda: (pick, {"op": "softmax", "layouts": [A], "axis": 1}),
    "pick with a shape": lambda: (pick, {"op": "reshape", "layouts": [A], "shape": (4, 8)}),
    "pick with dims": lambda: (pick, {"op": "permute", "layouts": [A], "dims": (1, 0)}),
    "pick with sizes": lambda: (pick, {"op": "split", "layouts": [A], "sizes": (2, 2), "axis": 1}),
    "pick with two axes": lambda: (pick, {"op": "transpose", "layouts": [A], "axis_1": 0, "axis_2": 1}),
    "action_set": lambda: (action_set, {"op": "matmul", "layouts": [A, B], "rules": "documented"}),
    "GreedyReshard": lambda: (
        GreedyReshard,
        {"on_reshard": "warn", "allow_partial_to_sharded": True},
    ),
    "GreedyReshard()": lambda: (
        lambda offer, layouts: GreedyReshard()(offer, layouts),
        {"offer": offered(), "layouts": [A, B]},
    ),
    "NoReshard()": lambda: (
        lambda offer, layouts: NoReshard()(offer, layouts),
        {"offer": offered(), "layouts": [A, B]},
    ),
    "PartialsOnly()": lambda: (
        lambda offer, layouts: PartialsOnly()(offer, layouts),
        {"offer": offered(), "layouts": [A, B]},
    ),
    "ActionSet.candidates": lambda: (offered().candidates, {"axis": 1}),
    "ActionSet.action": lambda: (
        offered().action,
        {"rows": [c.row for c in map(lambda a: offered().candidates(a)[0], (0, 1))]},
    ),
    "build_action_set": lambda: (
        build_action_set,
        {"rows": list(offered().axis_assignments), "layouts": [A, B], "op": "mine", "result_shape": (8, 8)},
    ),
    "force_replicated_action_set": lambda: (
        lambda layout, op: force_replicated_action_set(layout, op=op),
        {"layout": A, "op": "mine"},
    ),
}


def cut(make: Callable[..., ShardingStrategy], *shape: int) -> Callable[..., object]:
    """Return a function that makes a strategy and cuts a shape by it: constructors never look at a shape."""
    return lambda **given: make(**given).pieces(shape, 0)


WEIGHTS: dict[str, Prepare] = {
    "ShardingStrategy": lambda: (ShardingStrategy, {"num_devices": 2, "shard": lambda w, i, n: w}),
    "rowwise": lambda: (cut(ShardingStrategy.rowwise, 8, 6), {"num_devices": 2}),
    "columnwise": lambda: (cut(ShardingStrategy.columnwise, 8, 6), {"num_devices": 2}),
    "replicate": lambda: (cut(ShardingStrategy.replicate, 8, 6), {"num_devices": 2}),
    "expert_parallel": lambda: (ShardingStrategy.expert_parallel, {"num_devices": 2}),
    "tensor_parallel": lambda: (ShardingStrategy.tensor_parallel, {"num_devices": 2}),
    "axiswise": lambda: (cut(ShardingStrategy.axiswise, 8, 6), {"axis": 1, "num_devices": 2}),
    "gate_up": lambda: (cut(ShardingStrategy.gate_up, 8, 6), {"num_devices": 2, "axis": 1}),
    "head_aware_columnwise": lambda: (
        cut(ShardingStrategy.head_aware_columnwise, 8, 32),
        {"num_devices": 2, "num_heads": 4, "head_dim": 8},
    ),
    "stacked_qkv": lambda: (
        cut(ShardingStrategy.stacked_qkv, 96, 6),
        {"num_devices": 2, "num_heads": 4, "head_dim": 8},
    ),
    "segmented": lambda: (
        cut(ShardingStrategy.segmented, 8, 6),
        {"num_devices": 2, "axis": 0, "segments": SEGMENTS},
    ),
    "grouped_qkv": lambda: (
        cut(ShardingStrategy.grouped_qkv, 32, 6),
        {
            "num_devices": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "few_kv": "empty",
            "section": "q",
            "axis": 0,
        },
    ),
    "Segment": lambda: (Segment, {"size": 4, "num_heads": 2}),
    "pieces": lambda: (ROWS.pieces, {"shape": (8, 6), "index": 1}),
    "layout": lambda: (ROWS.layout, {"shape": (8, 6), "dtype": "bf16"}),
    "balanced_range": lambda: (ROWS.balanced_range, {"extent": 8, "index": 1}),
    "a strategy of a weight": lambda: (ROWS, {"weight": floats(8, 6), "index": 1}),
    "Weight": lambda: (
        Weight,
        {
            "name": "w",
            "array": floats(8, 6),
            "sharding_strategy": ROWS,
            "quantization": None,
            "scale": None,
            "input_scale": None,
            "bias": floats(8),
        },
    ),
    "Weight.shard": lambda: (Weight("w", floats(8, 6), ROWS).shard, {"devices": 2}),
    "shard_module": lambda: (
        shard_module,
        {"weights": {"w": floats(8, 6)}, "strategies": {"w": ROWS}},
    ),
}

RULES: dict[str, Prepare] = {
    "load_rules": lambda: (
        load_rules,
        {"source": "pure-fsdp", "mode": "strict", "base": "default", "merge": "names"},
    ),
    "parse_rules": lambda: (
        parse_rules,
        {
            "text": "logical_axis_rules: [['a', 'fsdp']]",
            "path": "x",
            "mode": "strict",
            "base": "default",
            "merge": "names",
        },
    ),
    "make_rules": lambda: (
        make_rules,
        {
            "mesh_axes": ("data", "fsdp"),
            "rules": [("embed", "fsdp")],
            "data_sharding": [["data"]],
            "mode": "strict",
            "name": "mine",
        },
    ),
    "RuleSet.mesh": lambda: (
        ep_rules().mesh,
        {"devices": 16, "ici": {"fsdp": -1, "expert": 4}, "slices": 2, "dcn": {"data": 2}},
    ),
    "RuleSet.bind": lambda: (
        ep_rules().bind,
        {"devices": 16, "ici": {"fsdp": -1, "expert": 4}, "slices": 2, "dcn": {"data": 2}},
    ),
    "RuleSet.resolve": lambda: (ep_rules().resolve, {"names": ("embed", None, "mlp"), "parameter": "w"}),
    "RuleSet.resolution": lambda: (
        ep_rules().resolution,
        {"names": ("embed", None, "mlp"), "parameter": "w"},
    ),
    "RuleSet.resolve_activation": lambda: (
        ep_rules().resolve_activation,
        {"names": ("embed", None), "mesh": ep_rules().mesh(4), "rank": 2},
    ),
    "RuleSet.with_rules": lambda: (
        ep_rules().with_rules,
        {"rules": [("embed", "fsdp")], "replace_all": False},
    ),
    "RuleSet.layout": lambda: (
        ep_rules().layout,
        {
            "mesh": ep_rules().mesh(4),
            "names": ("embed", None),
            "shape": (8, 8),
            "dtype": "bf16",
            "parameter": "w",
            "activation": False,
            "uneven": True,
            "split": "ceil",
        },
    ),
    "RuleSet.layout of an activation": lambda: (
        lambda mesh, names, shape: ep_rules().layout(mesh, names, shape, activation=True),
        {"mesh": ep_rules().mesh(4), "names": ("embed", None), "shape": (8, 8)},
    ),
    "RuleSet.data_layout": lambda: (
        ep_rules().data_layout,
        {"mesh": ep_rules().mesh(4), "shape": (8, 8), "dtype": "int32"},
    ),
    "RuleSet.check": lambda: (
        ep_rules().check,
        {
            "tensors": {"w": (("embed", None), (8, 8))},
            "activations": None,
            "mesh": None,
            "devices": 16,
            "slices": 2,
            "ici": {"fsdp": -1},
            "dcn": {"data": 2},
            "dtype": "bf16",
        },
    ),
    "RuleSet.explain": lambda: (
        ep_rules().explain,
        {"names": ("embed", None), "shape": (8, 8), "mesh": ep_rules().mesh(4), "parameter": "w"},
    ),
    "RuleSet.memory": lambda: (
        ep_rules().memory,
        {
            "mesh": ep_rules().mesh(4),
            "tensors": {"w": (("embed", None), (8, 8))},
            "dtype": "bf16",
            "gradient_dtype": "bf16",
            "moment_dtype": "bf16",
            "moments": 2,
        },
    ),
}

FSDP: dict[str, Prepare] = {
    "Param": lambda: (
        Param,
        {
            "name": "w",
            "shape": (4, 4),
            "dtype": "bf16",
            "trainable": True,
            "tie": None,
            "keep": "row",
            "ignored": False,
        },
    ),
    "Precision": lambda: (
        Precision,
        {"compute": "bf16", "wire": "mxfp8", "reduce": "float32", "grad": "bf16", "master": "float32"},
    ),
    "ShardGradOp": lambda: (Shard.ShardGradOp, {"rest": "sharded"}),
    "HybridShard": lambda: (Shard.HybridShard, {"intra_node_size": 2}),
    "AdamW": lambda: (
        AdamW,
        {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "decay": bool},
    ),
    "SGD": lambda: (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "decay": bool}),
}

RESHARD: dict[str, Prepare] = {
    "build_reshard_plan": lambda: (
        build_reshard_plan,
        {"src": {"w": LAYOUT}, "dst": {"w": MOVED}, "node_size": 2, "multicast": False},
    ),
    "build_reshard_plan of a table": lambda: (
        lambda name, layout: build_reshard_plan({key(name): layout}, {key(name): MOVED}),
        {"name": "w", "layout": LAYOUT},
    ),
    "build_reshard_plan of records": lambda: (
        build_reshard_plan,
        {
            "src": [ParameterMetadata("w", (4, 4), owner_rank=0)],
            "dst": [ParameterMetadata("w", (4, 4), owner_rank=1)],
        },
    ),
    "ParameterMetadata": lambda: (
        lambda **given: build_reshard_plan([ParameterMetadata(**given)], [ParameterMetadata(**given)]),
        {
            "name": "w",
            "shape": (4, 4),
            "dtype": "bf16",
            "element_size": 2,
            "is_tp": True,
            "partition_dim": 1,
            "partition_stride": 1,
            "partition_sizes": (2, 2),
            "num_experts": 2,
            "owner_rank": 1,
            "tensor_parallel_group_ranks": (1,),
            "expert_parallel_group_ranks": (1,),
            "data_parallel_group_ranks": (1,),
            "pipeline_parallel_group_ranks": (0, 1),
            "resolved_name": "w",
            "global_expert_index": 0,
            "partition_copies": 1,
            "expert_dim": None,
        },
    ),
    "scale_slice_from_data_slice": lambda: (
        scale_slice_from_data_slice,
        {"data_slice": (slice(0, 4), slice(0, 64)), "block_size": 32},
    ),
    "scale_slice_from_data_slice of a slice": lambda: (
        lambda start, stop, step: scale_slice_from_data_slice((slice(start, stop, step),)),
        {"start": 0, "stop": 64, "step": 1},
    ),
    "ensure_sendable": lambda: (ensure_sendable, {"tensor": floats(4, 4), "dtype": "bfloat16"}),
}

FOLDER, SAVED = Path("checkpoint"), Path("saved")
WHOLE = Layout(DeviceMesh((1,), ("x",)), (8, 6), "float32", (Replicated(),))


def saved() -> Path:
    """Return a checkpoint in the working folder, made when it is asked for first."""
    if not SAVED.exists():
        save(SAVED, {"w": (WHOLE, floats(8, 6))})
    return SAVED


CHECKPOINTS: dict[str, Prepare] = {
    "save": lambda: (
        save,
        {
            "path": FOLDER,
            "state": {"w": (WHOLE, floats(8, 6))},
            "comm": None,
            "merged": False,
            "strategies": None,
            "metadata": {"a": "b"},
        },
    ),
    "save of a table": lambda: (
        lambda name, layout, array: save(FOLDER, {key(name): (layout, array)}),
        {"name": "w", "layout": WHOLE, "array": floats(8, 6)},
    ),
    "Catalog.open": lambda: (Catalog.open, {"files": saved()}),
    "Catalog.tensor": lambda: (Catalog.open(saved()).tensor, {"name": "w"}),
    "read_header": lambda: (read_header, {"path": next(saved().glob("*.safetensors"))}),
    "plan_load": lambda: (
        plan_load,
        {
            "files": saved(),
            "tilings": {"w": WHOLE},
            "num_ranks": 1,
            "strategy": "own-slice",
            "nodes": [0],
        },
    ),
    "load": lambda: (
        load,
        {
            "files": saved(),
            "plan": plan_load(saved(), {"w": WHOLE}),
            "comm": None,
            "verify": True,
            "mapped": False,
            "progress": None,
            "reports": None,
        },
    ),
}

CALLS = GEOMETRY | KERNELS | SOLVER | WEIGHTS | RULES | FSDP | RESHARD | CHECKPOINTS


@pytest.mark.parametrize("name", mode.sample([*CALLS], 30, "wrong arguments"))
def test_wrong_arguments(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not swept(CALLS[name])


@pytest.mark.parametrize("name", mode.sample([*CALLS], 30, "no numbers"))
def test_nothing_is_taken_for_a_number(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not coerced(CALLS[name])


@pytest.mark.parametrize("value", ["False", "no", b"", [], None, -1, 0.5], ids=repr)
def test_a_flag_is_true_or_false(value: Any) -> None:
    for call in (
        lambda: GreedyReshard(allow_partial_to_sharded=value),
        lambda: build_reshard_plan({"w": WHOLE}, {"w": WHOLE}, multicast=value),
        lambda: sum_into(floats(4), [floats(4)], accumulate=value),
        lambda: MXFP8ReshardTransform(["w"], convert_on_send=value),
    ):
        with pytest.raises(LowshardError, match="is True or False"):
            call()


@pytest.mark.parametrize("value", [True, 1, np.bool_(True), np.array(True)], ids=repr)
def test_what_else_is_taken_for_true(value: Any) -> None:
    assert GreedyReshard(allow_partial_to_sharded=value) == GreedyReshard(allow_partial_to_sharded=True)


def test_paths_that_only_a_shell_expands_and_empty_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save("there", {"w": (WHOLE, floats(8, 6))})
    for path in ("~/w", Path("~/w"), "~"):
        for call in (
            lambda path=path: save(path, {"w": (WHOLE, floats(8, 6))}),
            lambda path=path: Catalog.open(path),
        ):
            with pytest.raises(CheckpointError, match=r"a program by os.path.expanduser\(path\)"):
                call()
    monkeypatch.chdir("there")
    for refused in (lambda: save("", {"w": (WHOLE, floats(8, 6))}), lambda: Catalog.open("")):
        with pytest.raises(CheckpointError, match="got ''"):
            refused()
    monkeypatch.chdir(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["there"]
    with pytest.raises(CheckpointError, match=r"got the file .*; give a folder"):
        save("there/lowshard.index.json", {"w": (WHOLE, floats(8, 6))})


def test_a_model_digest_is_of_digests() -> None:
    known = digest({"w": (WHOLE, floats(8, 6))})
    assert len(model_digest(known)) == 32
    with pytest.raises(LayoutError, match="got 'abc' for 'w'"):
        model_digest({"w": "abc"})


def test_a_solver_that_cannot_be_called_is_refused_where_it_is_bound() -> None:
    with pytest.raises(SolverError, match="such as GreedyReshard"), solver(GreedyReshard):  # type: ignore[arg-type]
        pass


def test_parameters_that_are_filled_are_known() -> None:
    (comm,) = loopback(1)
    engine = Engine({"l": [Param("w", (4,))]}, comm)
    for names, kind in (("l.w", StepError), (["l.v"], LayoutError)):
        with pytest.raises(kind, match=r"names are full names|no parameter 'l.v'"):
            engine.fill(lambda name, box: 1.0, names)
    engine.fill(lambda name, box: 2.0, ["l.w"])
    assert (engine.full("l.w") == 2).all()


def test_what_is_told_to_other_ranks_is_an_error_and_a_text() -> None:
    (comm,) = loopback(1)
    for call in (
        lambda: refuse(comm, "wrong", "call"),  # type: ignore[arg-type]
        lambda: refuse(None, LowshardError("wrong"), "call"),  # type: ignore[arg-type]
        lambda: share_text(comm, b"text"),  # type: ignore[arg-type]
        lambda: share_text(comm, "\udc80"),
        lambda: comm.send(floats(4), 1),
    ):
        with pytest.raises(CommError):
            call()
    with pytest.raises(CommError, match="a single rank; start more"):
        comm.recv(floats(4), 0)
    assert run_loopback(np.array(2), lambda c: c.rank) == [0, 1]  # type: ignore[arg-type]


def test_errors_name_arguments_as_callers_know_them() -> None:
    with pytest.raises(ShardingError, match="axis is an integer"):
        ShardingStrategy.axiswise(None, 2)  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="lr is a number of 0 or more, got None"):
        AdamW(lr=None)  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match="name of a weight is text"):
        Weight(None, floats(4))  # type: ignore[arg-type]


def test_traffic_is_readable_where_it_is_printed() -> None:
    def main(comm: Communicator) -> str:
        before = str(comm.traffic)
        comm.all_gather(floats(2), floats(4))
        return f"{before} {comm.traffic}"

    told = "<Traffic: no calls; 0 bytes sent, 0 received, 0 of these by memory> "
    told += "<Traffic: all_gather 1; 8 bytes sent, 8 received, 0 of these by memory>"
    assert run_loopback(2, main) == [told, told]


def test_a_load_of_another_form_says_what_to_give(tmp_path: Path) -> None:
    save(tmp_path / "c", {"w": (Tiling.whole((4,), "float32"), np.zeros(4, np.float32))})
    for wanted, advice in (
        (((5,), "float32"), "give the shape that is stored"),
        (((4,), "float16"), "then convert"),
    ):
        with pytest.raises(CheckpointError, match=f"{advice}$"):
            plan_load(tmp_path / "c", {"w": Tiling.whole(*wanted)})
