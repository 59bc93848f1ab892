"""Mesh sizes: filling, slices, device order, what MaxText refuses and what it ignores; the pipeline's changes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from support import mode

from lowshard import DeviceMesh
from lowshard.rules import RulesError, load_rules, make_rules, parse_rules


def sizes(mesh: DeviceMesh) -> dict[str, int]:
    return {a: n for a, n in zip(mesh.axis_names, mesh.shape, strict=True) if n > 1}


@pytest.mark.parametrize(
    ("name", "devices", "slices", "ici", "dcn", "expected"),
    [
        ("default", 16, 1, None, None, {"fsdp": 16}),
        ("default", 16, 1, {}, {}, {"fsdp": 16}),
        ("default", 16, 1, {"fsdp": -1}, {"data": 7}, {"fsdp": 16}),  # one slice: dcn is not looked at
        ("default", 16, 1, {"expert": 4}, None, {"fsdp": 4, "expert": 4}),
        ("default", 16, 1, {"expert": 16}, None, {"expert": 16}),
        ("default", 16, 1, {"fsdp": 1, "tensor": -1}, None, {"tensor": 16}),
        ("default", 16, 1, {"tensor": -1}, None, {"tensor": 16}),
        ("default", 16, 4, None, None, {"data": 4, "fsdp": 4}),
        ("default", 16, 4, {"tensor": 2}, {"data": 2, "fsdp": -1}, {"data": 2, "fsdp": 4, "tensor": 2}),
        ("default", 16, 4, None, {"expert": -1}, {"fsdp": 4, "expert": 4}),
        ("pure-fsdp", 16, 4, None, {"fsdp": 4}, {"fsdp": 16}),
        ("ep-as-cp", 8, 1, {"fsdp": -1, "expert": 2}, None, {"fsdp": 4, "expert": 2}),
        ("default", 1, 1, None, None, {}),
    ],
)
def test_one_size_takes_what_is_left(
    name: str, devices: int, slices: int, ici: dict | None, dcn: dict | None, expected: dict
) -> None:
    assert sizes(load_rules(name).mesh(devices, slices=slices, ici=ici, dcn=dcn)) == expected


@pytest.mark.parametrize(
    ("name", "devices", "slices", "ici", "dcn", "message", "axis"),
    [
        ("default", 16, 1, {"fsdp": -1, "expert": -1}, None, "one ici size at most is -1", "expert"),
        ("default", 16, 4, None, {"fsdp": -1, "data": -1}, "one dcn size at most is -1", "fsdp"),
        ("default", 16, 1, {"expert": 3}, None, "leaves 16/3 for fsdp", "fsdp"),
        ("default", 16, 1, {"expert": 32}, None, "leaves 16/32 for fsdp", "fsdp"),
        (
            "default",
            16,
            1,
            {"fsdp": 8},
            None,
            "multiply to 8 .*16 devices of a slice: none may be left idle",
            "fsdp",
        ),
        ("default", 16, 1, {"fsdp": 32}, None, "multiply to 32", "fsdp"),
        ("default", 16, 4, {"fsdp": 16}, None, "multiply to 16 .*4 devices of a slice", "fsdp"),
        ("default", 16, 4, None, {"data": 2}, "dcn sizes multiply to 2 .*4 slices", "data"),
        ("pure-fsdp", 16, 4, None, None, "no data axis to span the slices", "fsdp"),
        ("default", 16, 1, {"fdsp": 4}, None, "did you mean fsdp", "fdsp"),
        ("default", 16, 4, None, {"bogus": 4}, "neither the mesh", "bogus"),
    ],
)
@pytest.mark.parametrize("how", ["maxtext", "strict"])
def test_sizes_that_do_not_fit_name_the_axis_and_the_file(
    name: str,
    devices: int,
    slices: int,
    ici: dict | None,
    dcn: dict | None,
    message: str,
    axis: str,
    how: str,
) -> None:
    rules = load_rules(name, mode=how)  # type: ignore[arg-type]
    with pytest.raises(RulesError, match=message) as found:
        rules.mesh(devices, slices=slices, ici=ici, dcn=dcn)
    assert found.value.axis == axis
    assert found.value.path == f"ready/{name}.yml"
    assert found.value.line == dict(rules.places)["mesh_axes"].line


def test_a_size_for_an_absent_axis_is_ignored_by_maxtext_and_refused_in_strict_mode() -> None:
    assert sizes(load_rules("pure-fsdp").mesh(8, ici={"tensor": 4, "fsdp": -1})) == {"fsdp": 8}
    with pytest.raises(
        RulesError, match=r"ici asks for tensor=4, but the mesh has no axis 'tensor'"
    ) as found:
        load_rules("pure-fsdp", mode="strict").mesh(8, ici={"tensor": 4, "fsdp": -1})
    assert found.value.axis == "tensor"


@pytest.mark.parametrize("dcn", [{"data": 4}, {"data": 4, "fsdp": -1}, {"fsdp": 2, "data": 2}])
def test_sizes_across_one_slice_are_refused_in_strict_mode(dcn: dict[str, int]) -> None:
    rules = load_rules("default", mode="strict")
    with pytest.raises(RulesError, match=r"dcn asks for .*=.*--slices\), such as 4") as found:
        rules.mesh(16, dcn=dcn)
    assert found.value.axis == next(iter(dcn))
    assert [f.code for f in rules.check(devices=16, dcn=dcn).errors] == ["size-across-one-slice"]
    assert [f.code for f in load_rules("default").check(devices=16, dcn=dcn).warnings] == [
        "size-across-one-slice"
    ]
    assert sizes(rules.mesh(16, dcn={"data": -1, "fsdp": 1})) == {"fsdp": 16}
    assert sizes(rules.mesh(16, slices=4, dcn=dcn))


def test_slices_that_do_not_divide_the_devices() -> None:
    with pytest.raises(RulesError, match="16 devices do not divide into 3 slices"):
        load_rules("default").mesh(16, slices=3)


def test_axes_of_one_s_own_need_a_size_that_is_said() -> None:
    rules = parse_rules("mesh_axes: [dp, tp]\nlogical_axis_rules: []", "own.yml")
    assert sizes(rules.mesh(8, ici={"dp": -1, "tp": 4})) == {"dp": 2, "tp": 4}
    with pytest.raises(RulesError, match=r"own\.yml:1:1: .*'dp' is none of MaxText's") as found:
        rules.mesh(8, ici={"tp": 8})
    assert found.value.axis == "dp"
    codes = [f.code for f in rules.check(devices=8, ici={"dp": -1, "tp": 4}).warnings]
    assert codes.count("mesh-axis-unknown") == 2


def test_settings_that_maxtext_calls_otherwise() -> None:
    rules = make_rules(["data", "stage", "model"], [])
    assert sizes(rules.mesh(8, ici={"pipeline": 2, "tensor": 4})) == {"stage": 2, "model": 4}
    fixed = make_rules(["data", "attn_dp"], [])
    with pytest.raises(RulesError, match="no size setting"):
        fixed.mesh(8, ici={"attn_dp": 2, "data": 4})


def test_two_sizes_that_would_take_what_is_left_are_told() -> None:
    report = load_rules("default").check(devices=8, ici={"tensor": -1})
    (found,) = [f for f in report.warnings if f.code != "name-split-off"]
    assert found.code == "two-fill-defaults"
    assert "ici_fsdp_parallelism=1" in found.text


# ---- device order


def test_device_order_agrees_with_blocks_put_together(rng: np.random.Generator) -> None:
    for _ in range(200 if mode.full() else 40):
        axes = ["data", "fsdp", "tensor", "expert"][: int(rng.integers(1, 5))]
        ici = [int(n) for n in rng.integers(1, 4, len(axes))]
        dcn = [int(n) for n in rng.integers(1, 4, len(axes))]
        slices, per_slice = int(np.prod(dcn)), int(np.prod(ici))
        grid = np.empty([i * d for i, d in zip(ici, dcn, strict=True)], int)
        for number, place in enumerate(product(*map(range, dcn))):
            block = np.arange(number * per_slice, (number + 1) * per_slice).reshape(ici)
            grid[tuple(slice(p * i, (p + 1) * i) for p, i in zip(place, ici, strict=True))] = block
        mesh = make_rules(axes, []).mesh(
            slices * per_slice,
            slices=slices,
            ici=dict(zip(axes, ici, strict=True)),
            dcn=dict(zip(axes, dcn, strict=True)),
        )
        assert list(mesh.ranks) == grid.ravel().tolist()


# ---- the pipeline


def test_a_pipeline_swaps_stage_and_data_and_changes_one_rule() -> None:
    rules, mesh = load_rules("ep-as-cp").bind(8, ici={"pipeline": 2, "expert": 2})
    assert mesh.axis_names == ("stage", "data", "fsdp", "expert")
    assert rules.mesh_axes == mesh.axis_names
    assert rules.data_sharding == (("stage", "data", "fsdp", "expert"),)
    assert rules.resolve(("activation_embed_and_logits_batch",)) == (
        ("stage", "data", "fsdp", "fsdp_transpose", "expert"),
    )
    assert rules.resolve_activation(("activation_embed_and_logits_batch",), mesh) == (
        ("stage", "fsdp", "expert"),
    )
    found = load_rules("ep-as-cp").check(devices=8, ici={"stage": 2}).findings
    assert len([f for f in found if f.code == "pipeline-edit"]) == 3


def test_without_a_pipeline_nothing_changes() -> None:
    plain = load_rules("ep-as-cp")
    for ici in ({}, {"stage": 1}, {"stage": -1, "fsdp": 1}):  # MaxText looks at the size before it is filled
        rules, mesh = plain.bind(8, ici=ici)
        assert rules == plain
        assert mesh.axis_names == plain.mesh_axes


def test_a_pipeline_across_slices() -> None:
    _, mesh = load_rules("default").bind(8, slices=2, dcn={"stage": 2, "data": 1})
    assert mesh.axis_names[:3] == ("diloco", "stage", "data")
    assert sizes(mesh) == {"stage": 2, "fsdp": 4}


def test_a_pipeline_without_a_data_axis_says_so() -> None:
    rules = parse_rules("mesh_axes: [stage, fsdp]\nlogical_axis_rules: []", "p.yml")
    with pytest.raises(RulesError, match=r"p\.yml:1:1: a pipeline .* needs the mesh axis 'data'") as found:
        rules.mesh(8, ici={"stage": 2})
    assert found.value.axis == "data"
