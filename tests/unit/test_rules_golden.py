"""Golden files, byte for byte: MaxText's own in tests/data/maxtext, and ours in tests/data/goldens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.recorded import DATA, MAXTEXT

from lowshard import DeviceMesh, cli
from lowshard.rules import RulesError, RuleSet, load_rules, make_rules
from lowshard.rules.golden import activation_shardings, dump_text, named_shardings, parse_dump, read_dump

HERE = DATA / "goldens"
THEIRS: list[dict[str, Any]] = json.loads((MAXTEXT / "index.json").read_text())["cases"]
OURS: list[dict[str, Any]] = json.loads((HERE / "index.json").read_text())


def their_cases() -> list[Any]:
    return [pytest.param(c, id=c["dir"].removeprefix("goldens/")) for c in THEIRS]


def arguments(case: dict[str, Any]) -> dict[str, Any]:
    slices = case["slices"]
    return {
        "devices": case["devices_per_slice"] * slices,
        "slices": slices,
        "ici": case["ici"],
        "dcn": case["dcn"],
    }


def sizes_text(sizes: dict[str, int]) -> str:
    return ",".join(f"{a}={n}" for a, n in sizes.items())


def check(rules: RuleSet, folder: Path, sizes: dict[str, Any]) -> None:
    """Check that rules give the named and the activation file of a folder, byte for byte."""
    rules, mesh = rules.bind(**sizes)
    named = named_shardings(rules, mesh, read_dump(folder / "logical_shardings.json").tensors())
    traced = activation_shardings(rules, mesh, read_dump(folder / "input_shardings.json").activations())
    assert dump_text(named) == (folder / "named_shardings.json").read_text()
    assert dump_text(traced) == (folder / "input_shardings.json").read_text()


@pytest.mark.parametrize("case", their_cases())
@pytest.mark.parametrize("source", ["their file", "ours"])
def test_maxtext_s_goldens_byte_for_byte(case: dict[str, Any], source: str) -> None:
    name = Path(case["rules"]).stem
    rules = load_rules(MAXTEXT / case["rules"] if source == "their file" else name)
    check(rules, MAXTEXT / case["dir"], arguments(case))


@pytest.mark.parametrize("case", their_cases())
@pytest.mark.parametrize("mode", ["strict", "maxtext"])
def test_the_command_writes_maxtext_s_goldens(
    case: dict[str, Any], mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, sizes = MAXTEXT / case["dir"], arguments(case)
    common = [
        "rules",
        "dump",
        "--rules",
        str(MAXTEXT / case["rules"]),
        "--devices",
        str(sizes["devices"]),
        "--mode",
        mode,
    ]
    if sizes["ici"]:
        common += ["--ici", sizes_text(sizes["ici"])]
    if sizes["dcn"]:
        common += ["--dcn", sizes_text(sizes["dcn"])]
    for option, file in (("--logical", "named_shardings.json"), ("--activations", "input_shardings.json")):
        read = "logical_shardings.json" if option == "--logical" else file
        out = tmp_path / file
        assert cli.main([*common, option, str(folder / read), "-o", str(out)]) == 0
        assert out.read_bytes() == (folder / file).read_bytes()
    assert (mode == "strict") or capsys.readouterr().err == ""


@pytest.mark.parametrize("case", their_cases())
def test_every_named_activation_and_every_unknown_one(case: dict[str, Any]) -> None:
    rules, mesh = load_rules(MAXTEXT / case["rules"]).bind(**arguments(case))
    activations = read_dump(MAXTEXT / case["dir"] / "input_shardings.json").activations()
    assert len(activations) == case["input_entries"]
    assert sum(a.names is None for a in activations) == case["input_entries_without_logical_axes"]
    for activation in activations:
        assert f"P{activation.spec(rules, mesh)!r}" == activation.spec_text, activation.key


# Bytes that a device needs for parameters, gradients and moments, and how many tensors had a rule blocked, by name.
FIGURES = {
    ("deepseek2-16b", "default"): (15_708_381_196, {"embed": 18, "embed_moe": 9}),
    ("deepseek2-16b", "pure-fsdp"): (15_708_381_196, {}),
    ("deepseek2-16b", "pipeline-large-moe"): (15_888_474_124, {}),
    ("deepseek2-16b", "ep-as-cp"): (31_534_800_908, {}),
    ("qwen3-0.6b", "default"): (597_032_972, {"embed": 9}),
}


@pytest.mark.parametrize("case", their_cases())
def test_memory_and_blocked_rules_of_maxtext_s_models(case: dict[str, Any]) -> None:
    name = Path(case["rules"]).stem
    rules, mesh = load_rules(MAXTEXT / case["rules"]).bind(**arguments(case))
    tensors = read_dump(MAXTEXT / case["dir"] / "logical_shardings.json").tensors()
    needed, blocked = FIGURES[case["model"], name]
    for budget, told_of in ((needed, 0), (needed - 1, 1)):
        codes = [
            f.code
            for f in rules.check(tensors, mesh=DeviceMesh(mesh.shape, mesh.axis_names, budget)).findings
        ]
        assert codes.count("memory-budget") == told_of
    counts: dict[str, int] = {}
    for tensor in tensors:
        for tried in rules.resolver(tensor.name).trace(tensor.names).attempts:
            if tried.outcome == "blocked":
                counts[tried.rule.name] = counts.get(tried.rule.name, 0) + 1
    assert counts == blocked
    findings = [
        f
        for f in rules.check(tensors, mesh=mesh).findings
        if f.code in ("name-fell-back", "name-all-blocked")
    ]
    told: dict[str, int] = {}
    for finding in findings:
        told[finding.rule.name] = told.get(finding.rule.name, 0) + len(finding.tensors)  # type: ignore[union-attr]
    assert told == blocked


# ---- our own


def bound(case: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in case.items() if k not in ("dir", "rules")}


@pytest.mark.parametrize("case", OURS, ids=[c["dir"] for c in OURS])
def test_our_goldens_byte_for_byte(case: dict[str, Any]) -> None:
    check(load_rules(case["rules"]), HERE / case["dir"], bound(case))


def test_a_dump_is_indented_ascii_without_a_final_newline(tmp_path: Path) -> None:
    rules = make_rules(["x"], [("a", "x")])
    text = dump_text(named_shardings(rules, rules.mesh(2, ici={"x": 2}), {"größe": (("a", None), (4, 3))}))
    assert text == (
        '{\n  "gr\\u00f6\\u00dfe": {\n    "mesh": {\n      "axis_names": [\n        "x"\n      ],\n      "shape": {\n'
        '        "x": 2\n      }\n    },\n    "partition_spec": [\n      "x",\n      null\n    ],\n    "shape": [\n'
        "      4,\n      3\n    ]\n  }\n}"
    )
    path = tmp_path / "named.json"
    path.write_text(text)
    assert dump_text(read_dump(path).entries) == text


def test_an_activation_whose_names_nobody_knows_keeps_its_spec() -> None:
    entry = {"new_layer/x: bfloat16[4]": {"logic_axes": "Unknown", "PartitionSpec": "P('x',)"}}
    dump = parse_dump(json.dumps({"Activation Sharding Dump": [entry, entry]}))
    rules = make_rules(["x"], [])
    again = activation_shardings(rules, rules.mesh(2, ici={"x": 2}), dump.activations())
    assert again == {"Activation Sharding Dump": [entry, entry]}


def test_an_activation_keeps_every_dim_however_long_its_number() -> None:
    def shape_of(text: str) -> tuple[int, ...]:
        entry = {f"a/x: f32[{text}]": {"logic_axes": "Unknown", "PartitionSpec": "P()"}}
        return parse_dump(json.dumps({"Activation Sharding Dump": [entry]})).activations()[0].shape

    assert (shape_of(""), shape_of("4,0"), shape_of(f"{10**18},4")) == ((), (4, 0), (10**18, 4))
    with pytest.raises(RulesError, match="an activation is called"):
        shape_of(f"{10**20},4")
