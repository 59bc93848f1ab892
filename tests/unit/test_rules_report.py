"""What is said about a configuration: explain, check, compare; and checkpoints by name patterns."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.recorded import MAXTEXT

from lowshard import DeviceMesh
from lowshard.rules import CheckReport, RulesError, load_rules, parse_rules
from lowshard.rules.checkpoint_rules import (
    checkpoint_layouts,
    name_tensors,
    split_unit,
    tensor_layouts,
    unit_layouts,
)
from lowshard.rules.comparison import compare_dumps
from lowshard.rules.golden import dump_text, named_shardings, parse_dump
from lowshard.rules.rules_check import SPLIT_OFF

RULES = """
mesh_axes: [data, fsdp, tensor]
data_sharding: [[data, fsdp]]
logical_axis_rules:
  - [mlp, [fsdp, tensor]]
  - [embed, [fsdp]]
  - [embed, [tensor, data]]
  - [embed, [data]]
  - [vocab, []]
"""


def report(text: str, tensors: Any = None, mode: str = "strict", **sizes: Any) -> CheckReport:
    return parse_rules(text, "r.yml", mode=mode).check(tensors, **sizes)  # type: ignore[arg-type]


def codes(found: CheckReport, severity: str | None = None) -> list[str]:
    return sorted(f.code for f in found.findings if severity in (None, f.severity))


# ---- explain


def test_every_dim_is_explained_with_places() -> None:
    rules = parse_rules(RULES, "r.yml")
    mesh = rules.mesh(8, ici={"data": 2, "fsdp": 2, "tensor": 2})
    found = rules.explain(("embed", None, "mlp", "gone", "vocab"), (8, 3, 8, 5, 6), mesh, parameter="l.0.w")
    held = "serves 'mlp' on dim 2, by rule [mlp, [fsdp, tensor]] (r.yml:5:5)"
    assert str(found).splitlines() == [
        "l.0.w [8, 3, 8, 5, 6]",
        "  dim 0 embed = 8: sharded over data into 2: rule [embed, [data]] (r.yml:8:5)",
        f"    blocked: rule [embed, [fsdp]] (r.yml:6:5): fsdp already {held}",
        f"    blocked: rule [embed, [tensor, data]] (r.yml:7:5): tensor already {held}",
        "  dim 1 - = 3: stays whole",
        "  dim 2 mlp = 8: sharded over fsdp x tensor into 4: rule [mlp, [fsdp, tensor]] (r.yml:5:5)",
        "  dim 3 gone = 5: stays whole: no rule is for 'gone'",
        "  dim 4 vocab = 6: stays whole: rule [vocab, []] (r.yml:9:5)",
    ]
    assert found.resolution.spec == rules.resolve(("embed", None, "mlp", "gone", "vocab"))


# ---- check


def test_what_silently_replicates_is_told() -> None:
    found = report(
        RULES.replace("  - [embed, [data]]\n", ""),
        {"l.0.w": (("embed", "mlp"), (8, 8)), "l.1.w": (("embed", "mlp"), (8, 8)), "n": (("norm",), (8,))},
        devices=8,
    )
    assert codes(found) == ["name-all-blocked", "name-all-blocked", "name-without-rule"]
    blocked = [f for f in found.findings if f.code == "name-all-blocked"]
    assert [f.tensors for f in blocked] == [("l.0.w", "l.1.w")] * 2
    assert "fsdp serves 'mlp' by rule [mlp, [fsdp, tensor]] at r.yml:5:5" in blocked[0].text
    assert (blocked[0].where.line, blocked[1].where.line) == (6, 7)  # type: ignore[union-attr]
    assert found.ok


def test_rules_that_can_never_win() -> None:
    text = "mesh_axes: [x, y]\ndata_sharding: [[x]]\nlogical_axis_rules:\n" + "".join(
        f"- [{rule}]\n"
        for rule in ("a, x", "a, [x, y]", "a, [y]", "b, []", "b, y", "c, [x, y]", "c, x", "c, [y, x]")
    )
    found = report(text)
    never = [(f.rule.name, f.rule.axes) for f in found.findings if f.code == "rule-never-wins"]  # type: ignore[union-attr]
    assert never == [("a", ("x", "y")), ("b", ("y",)), ("c", ("y", "x"))]
    assert found.ok


def test_axes_the_mesh_lacks_are_errors_for_weights_and_warnings_for_activations() -> None:
    text = (
        "mesh_axes: [fsdp]\ndata_sharding: [[fsdp]]\nlogical_axis_rules:\n"
        "- [embed, [fsdp, gone]]\n- [activation_x, gone]\n"
    )
    weights = {"w": (("embed",), (8,))}
    for mode in ("strict", "maxtext"):
        found = report(text, weights, mode=mode, devices=8)
        assert codes(found, "error") == ["axis-absent-weight"]
        assert found.errors[0].axis == "gone"
        assert found.errors[0].where.line == 4  # type: ignore[union-attr]
        assert codes(found, "warning") == ["axis-absent-other"]
    assert codes(report(text, {"w": (("mlp",), (8,))}, devices=8), "error") == []
    assert codes(report(text), "error") == ["axis-absent-perhaps-weight"]
    assert codes(report(text, mode="maxtext"), "error") == []
    flowing = parse_rules(text).check(activations={"a/x": (("activation_x",), (8,))}, devices=8)
    assert [f.tensors for f in flowing.warnings if f.code == "axis-absent-other"] == [("a/x",)]


def test_every_error_of_the_tensors_is_in_one_report() -> None:
    text = (
        "mesh_axes: [fsdp, tensor]\ndata_sharding: [[fsdp]]\nlogical_axis_rules:\n"
        "- [a, fsdp]\n- [b, [gone]]\n- [c, [[tensor]]]\n- [d, [tensor, tensor]]\n"
    )
    tensors = {
        "odd": (("a",), (6,)), "absent": (("b",), (8,)), "nested": (("c",), (8,)), "twice": (("d",), (8,)),
        "same": (("a", "a"), (8, 8)), "long": (("a", "z"), (8,)), "scalar": ((), ()),
    }  # fmt: skip
    found = report(text, tensors, mode="maxtext", devices=8, ici={"fsdp": 4, "tensor": 2})
    assert codes(found, "error") == [
        "axis-absent-weight", "dim-indivisible", "name-twice", "names-beyond-rank", "target-form",
        "target-repeats-axis",
    ]  # fmt: skip
    by_code = {f.code: f for f in found.errors}
    lines = {c: f.where.line for c, f in by_code.items() if f.where}
    assert lines == {
        "axis-absent-weight": 5, "dim-indivisible": 4, "name-twice": 4, "target-form": 6, "target-repeats-axis": 7,
    }  # fmt: skip
    assert by_code["dim-indivisible"].axis == "fsdp"
    assert by_code["dim-indivisible"].tensors == ("odd",)
    json.dumps(found.to_json())
    with pytest.raises(RulesError, match=r"and 5 more errors"):
        found.raise_first()


def test_dims_that_are_not_divided_come_with_the_largest_sizes_that_fit() -> None:
    text = "mesh_axes: [fsdp, expert]\nlogical_axis_rules:\n- [embed, [fsdp, expert]]\n- [lora, fsdp]\n"
    tensors = {"w": (("embed",), (512,)), "v": (("lora",), (96,)), "u": (("embed",), (1024,))}
    found = report(text, tensors, devices=1024, ici={"fsdp": 64, "expert": 16})
    texts = {f.tensors: f.text for f in found.errors}
    assert set(texts) == {("w",), ("v",)}
    assert "fsdp=64 x expert=16 = 1024 shards" in texts[("w",)]
    assert (
        "the most that fit are 512 shards (fsdp=32 or expert=8 with the others as they are)" in texts[("w",)]
    )
    assert "for all tensors together: fsdp=32" in texts[("w",)]  # expert alone cannot mend lora = 96 over 64
    assert "fsdp=48" in texts[("v",)]


def test_sizes_and_the_budget_are_in_the_report() -> None:
    tensors = {"w": (("embed",), (1024,))}
    assert codes(report(RULES, tensors, devices=8, ici={"fsdp": 3}), "error") == ["mesh-size"]
    assert codes(report(RULES, tensors, devices=8, ici={"expert": 2, "fsdp": -1}), "error") == [
        "size-for-absent-axis"
    ]
    budget = RULES + "lowshard: {memory_budget_bytes_per_device: 2000}\n"
    # 1024 / 8 elements, 4 bytes, parameters, gradients, two moments.
    found = report(budget, tensors, devices=8)
    assert codes(found, "error") == ["memory-budget"]
    assert "a device needs 0.000 GB" in found.errors[0].text
    assert report(budget.replace("2000", "2048"), tensors, devices=8).ok
    moments = {f".opt_state/[0]/.{m}/['params']/['w']": (("embed",), (1024,)) for m in ("mu", "nu")}
    for state, bytes_ in ((tensors | moments, 2048), (tensors | moments | {".step": ((), ())}, 2052)):
        assert report(budget.replace("2000", str(bytes_)), state, devices=8).ok
        assert codes(report(budget.replace("2000", str(bytes_ - 1)), state, devices=8), "error") == [
            "memory-budget"
        ]


# ---- layouts: the same errors, raised


def test_uneven_dims_activations_and_short_names() -> None:
    rules = parse_rules(RULES, "r.yml")
    mesh = rules.mesh(8, ici={"data": 2, "fsdp": 2, "tensor": 2})
    assert rules.layout(mesh, ("mlp",), (6,), uneven=True).local_shape(0) == (2,)
    assert rules.layout(mesh, ("mlp",), (6,), activation=True).spec == (("fsdp", "tensor"),)
    assert rules.layout(mesh, ("vocab", "mlp", "embed"), (6, 6), activation=True).spec == (
        None,
        ("fsdp", "tensor"),
    )
    assert rules.layout(mesh, ("mlp",), (8, 3)).spec == (("fsdp", "tensor"), None)
    with pytest.raises(RulesError, match="has no axis 'tensor'") as found:
        rules.layout(DeviceMesh((2,), ("fsdp",)), ("mlp",), (8,))
    assert (found.value.axis, found.value.line) == ("tensor", 5)


# ---- compare


def dump_of(rules: Any, tensors: Any, devices: int = 8, **ici: int) -> Any:
    made, mesh = rules.bind(devices, ici=ici)
    return parse_dump(dump_text(named_shardings(made, mesh, tensors)), f"{devices} devices")


def test_equal_changes_are_one_over_layers_and_moments() -> None:
    keys = [f".params/['params']/['layers_{i}']/['w']" for i in range(3)] + [
        f".opt_state/[0]/.{m}/['params']/['layers_{i}']/['w']" for m in ("mu", "nu") for i in range(3)
    ]
    tensors = dict.fromkeys([*keys, ".params/['params']/['wi_0']"], (("embed", "vocab"), (16, 4)))
    rules = parse_rules(RULES)
    before = dump_of(rules, tensors, fsdp=8)
    after = dump_of(rules.with_rules([("embed", None)]), tensors, fsdp=8)
    found = compare_dumps(before, after)
    assert [(c.field, c.group, len(c.keys)) for c in found.changes] == [
        ("partition_spec", "layers_*/w", 9),
        ("partition_spec", "wi_0", 1),
    ]
    assert "partition_spec of layers_*/w (9 entries)\n    A [fsdp, -]\n    B [-, -]" in str(found)
    json.dumps(found.to_json())
    assert str(compare_dumps(before, before)).endswith("the same: 10 named entries")


def test_each_kind_of_change_is_told() -> None:
    base = {"a": (("embed",), (16,)), "b": (("embed",), (16,)), "c": ((), ())}
    rules = parse_rules(RULES)
    one = dump_of(rules, base, fsdp=8)

    def fields(other: Any) -> list[str]:
        return [c.field for c in compare_dumps(one, other).changes]

    assert fields(dump_of(rules, {k: v for k, v in base.items() if k != "a"}, fsdp=8)) == ["entry"]
    (added,) = compare_dumps(one, dump_of(rules, base | {"d": ((), ())}, fsdp=8)).changes
    assert (added.field, added.keys, added.a, added.b) == ("entry", ("d",), "-", "[] []")
    assert fields(dump_of(rules, base | {"a": (("embed",), (24,))}, fsdp=8)) == ["shape"]
    assert fields(dump_of(rules, base | {"a": (("vocab",), (16,))}, fsdp=8)) == ["partition_spec"]
    (mesh,) = compare_dumps(one, dump_of(rules, base, fsdp=4, data=2)).changes
    assert (mesh.a, mesh.b) == ("data=1 fsdp=8 tensor=1", "data=2 fsdp=4 tensor=1")
    entries = json.loads(dump_text(one.entries))
    entries["a"]["extra"] = 1
    assert fields(parse_dump(json.dumps(entries))) == ["extra"]
    logical = parse_dump(json.dumps({"a": {"partition_spec": ["embed"], "shape": [16]}}))
    with pytest.raises(
        RulesError, match=r"dumps of one kind are compared: 8 devices is named, .* is logical"
    ):
        compare_dumps(one, logical)


def test_activation_files_are_told_apart_in_full() -> None:
    def entry(name: str, axes: str = "('a',)", spec: str = "P('x',)") -> dict[str, Any]:
        return {f"f/{name}: bf16[4]": {"logic_axes": axes, "PartitionSpec": spec}}

    def dump(*entries: dict[str, Any]) -> Any:
        return parse_dump(json.dumps({"Activation Sharding Dump": list(entries)}))

    one = dump(entry("a"), entry("b"), entry("b"), entry("c"))
    assert compare_dumps(one, one).changes == ()
    fields = lambda other: [c.field for c in compare_dumps(one, other).changes]  # noqa: E731
    assert fields(dump(entry("a"), entry("b"), entry("c"))) == ["entry"]
    assert fields(dump(entry("a"), entry("b"), entry("b"), entry("c", spec="P(None,)"))) == ["PartitionSpec"]
    assert fields(dump(entry("a"), entry("b", axes="Unknown"), entry("b"), entry("c"))) == ["logic_axes"]
    other = dump(entry("c"), entry("a"), entry("b"), entry("b"))
    assert "order of all entries (2 entries)\n    A f/a: bf16[4] is here\n    B f/c: bf16[4] is here" in str(
        compare_dumps(one, other)
    )


# ---- checkpoints


def test_names_of_a_checkpoint_get_logical_axes_by_pattern() -> None:
    rules = load_rules("pipeline-large-moe")
    shapes = {
        "model.embed_tokens.weight": ((512, 64), "bfloat16"),
        "model.layers.0.self_attn.q_proj.weight": ((64, 64), "bfloat16"),
        "model.layers.0.mlp.down_proj.weight": ((64, 256), "bfloat16"),
        "model.layers.0.mlp.experts.3.up_proj.weight": ((96, 64), "bfloat16"),
        "model.layers.0.input_layernorm.weight": ((64,), "bfloat16"),
        "mystery.table": ((8, 8), "float32"),
        "a.scalar": ((), "int64"),
    }
    tensors, findings = name_tensors(rules, shapes)
    assert [t.names for t in tensors] == [
        ("vocab", "embed_vocab"), ("q_heads", "embed_attn"), ("embed", "mlp"), ("mlp_moe", "embed_moe"), ("norm",),
        (None, None), (),
    ]  # fmt: skip
    assert [f.tensors for f in findings] == [("mystery.table",)]
    layouts = tensor_layouts(rules, rules.mesh(8, ici={"fsdp": 4, "tensor": 2}), tensors)
    assert layouts["model.layers.0.mlp.down_proj.weight"].spec == (("fsdp", "expert"), "tensor")
    units = unit_layouts(layouts)
    assert set(units) == {"model.embed_tokens", "model.layers.0", "mystery", "a"}
    assert set(units["model.layers.0"]) == {
        "self_attn.q_proj.weight", "mlp.down_proj.weight", "mlp.experts.3.up_proj.weight", "input_layernorm.weight",
    }  # fmt: skip
    mesh = rules.mesh(8, ici={"fsdp": 4, "tensor": 2})
    assert checkpoint_layouts(rules, mesh, shapes) == layouts
    assert checkpoint_layouts(rules, mesh, {"a.up_proj.weight": ((7, 64), "f32")})[
        "a.up_proj.weight"
    ].local_shape(0) == (4, 16)
    assert split_unit("w") == ("w", "w")
    assert unit_layouts(layouts, lambda n: ("all", n)).keys() == {"all"}


def test_a_file_s_own_patterns_come_in_place_of_the_ready_made_ones() -> None:
    text = RULES + 'lowshard:\n  parameters:\n    - ["*.weight", [embed, mlp]]\n    - ["*.weight", [embed]]\n'
    tensors, _ = name_tensors(parse_rules(text), {"a.weight": ((8, 8), "f32"), "b.weight": ((8,), "f32")})
    assert [t.names for t in tensors] == [("embed", "mlp"), ("embed",)]


# ---- names that newer versions of MaxText ask for, and near ones


def test_a_file_without_a_rule_for_a_name_that_was_split_off_is_warned_of() -> None:
    found = load_rules(MAXTEXT / "rules/ep-as-dp.yml").check()
    (finding,) = [f for f in found.findings if f.code == "name-split-off"]
    assert finding.severity == "warning"
    assert all(repr(name) in finding.text for name in SPLIT_OFF)
    assert (
        "add [embed_attn, [fsdp, fsdp_transpose]], [embed_attn, [fsdp]], [embed_router, [fsdp]]"
        in finding.text
    )
    assert finding.text.endswith("[embed_shared, [fsdp]], [mlp_shared, [fsdp_transpose]]")
    both = parse_rules(RULES).check()
    (finding,) = [f for f in both.findings if f.code == "name-split-off"]
    assert "[embed_attn, [fsdp]], [embed_attn, [tensor, data]], [embed_attn, [data]]" in finding.text
    # A router without embed_moe was embed's once.
    assert all(f"[{name}, [" in finding.text for name in SPLIT_OFF)


def test_weights_that_use_the_name_are_told_with_the_rules_to_add() -> None:
    found = report(RULES + "  - [heads, []]\n", {"w": (("embed_attn", "mpl", "head_dim"), (8, 8, 8))})
    texts = [f.text for f in found.findings if f.code == "name-without-rule"]
    assert "name-split-off" not in codes(found)
    assert any("'embed_attn'" in t and "add [embed_attn, [fsdp]]" in t for t in texts)
    assert any("'mpl'" in t and "did you mean mlp?" in t for t in texts)
    assert any("'head_dim'" in t and "did you mean" not in t for t in texts)  # no misspelt heads
