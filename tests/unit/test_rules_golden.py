"""Golden files, byte for byte: MaxText's own in tests/data/maxtext, and ours in tests/data/goldens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.recorded import DATA, MAXTEXT

from lowshard import DeviceMesh, cli
from lowshard.errors import VerificationError
from lowshard.rules import RulesError, load_rules, make_rules
from lowshard.rules.golden import activation_shardings, dump_text, named_shardings, parse_dump, read_dump
from lowshard.rules.testing import assert_matches_golden

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


@pytest.mark.parametrize("case", their_cases())
@pytest.mark.parametrize("source", ["their file", "ours"])
def test_maxtext_s_goldens_byte_for_byte(case: dict[str, Any], source: str) -> None:
    name = Path(case["rules"]).stem
    rules = load_rules(MAXTEXT / case["rules"] if source == "their file" else name)
    assert_matches_golden(rules, MAXTEXT / case["dir"], **arguments(case), update=False)


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
        for rule, _ in rules.explain(tensor.names, tensor.shape, mesh, parameter=tensor.name).blocked:
            counts[rule.name] = counts.get(rule.name, 0) + 1
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
    assert_matches_golden(load_rules(case["rules"]), HERE / case["dir"], **bound(case), update=False)


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


# ---- the helper for users' tests


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    folder = tmp_path / "golden"
    shutil.copytree(HERE / "ep-as-cp-8", folder)
    return folder


def test_a_changed_configuration_fails_with_what_it_costs(golden: Path) -> None:
    rules = load_rules("ep-as-cp")
    assert_matches_golden(rules, golden, devices=8, ici={"expert": 2}, update=False)
    with pytest.raises(VerificationError, match=r"meshes that differ.*24 entries.*bytes a device"):
        flat(lambda: assert_matches_golden(rules, golden, devices=8, ici={"expert": 4}, update=False))
    with pytest.raises(
        AssertionError, match=r"decoder/layers/moe/wi \(3 entries\).*A \[expert, stage, fsdp, -\]"
    ):
        flat(
            lambda: assert_matches_golden(
                rules.with_rules([("exp", None)]), golden, devices=8, ici={"expert": 2}, update=False
            )
        )


def flat(call: Any) -> None:
    """Call, and put an error's lines on one."""
    try:
        call()
    except VerificationError as error:
        raise VerificationError(" ".join(str(error).split())) from error


@pytest.mark.parametrize("file", ["named_shardings.json", "input_shardings.json"])
def test_a_changed_missing_or_damaged_golden_fails(golden: Path, file: str) -> None:
    rules, path = load_rules("ep-as-cp"), golden / file
    text = path.read_text()
    for changed, message in (
        (text.replace('"expert"', '"fsdp"', 1).replace("'expert'", "'fsdp'", 1), "differ"),
        (text + "\n", "another form"),
        (text[:-1], "damaged"),
    ):
        path.write_text(changed)
        if message == "damaged" and file.startswith("input"):
            with pytest.raises(RulesError, match="not a JSON dump"):
                assert_matches_golden(rules, golden, devices=8, ici={"expert": 2}, update=False)
            continue
        with pytest.raises(VerificationError, match=f"{message}|damaged") as found:
            assert_matches_golden(rules, golden, devices=8, ici={"expert": 2}, update=False)
        assert "LOWSHARD_UPDATE_GOLDENS=1" in str(found.value)
    path.unlink()
    if file.startswith("named"):
        with pytest.raises(VerificationError, match="missing or unreadable"):
            assert_matches_golden(rules, golden, devices=8, ici={"expert": 2}, update=False)
    else:
        assert_matches_golden(rules, golden, devices=8, ici={"expert": 2}, update=False)


def test_goldens_are_written_anew_on_request(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = load_rules("cp-as-ep")
    (golden / "named_shardings.json").unlink()
    monkeypatch.setenv("LOWSHARD_UPDATE_GOLDENS", "1")
    assert_matches_golden(rules, golden, devices=8, ici={"expert": 2, "context": 2})
    monkeypatch.setenv("LOWSHARD_UPDATE_GOLDENS", "0")
    assert_matches_golden(rules, golden, devices=8, ici={"expert": 2, "context": 2})
    with pytest.raises(VerificationError):
        assert_matches_golden(rules, golden, devices=8, ici={"expert": 4, "context": 2})


def test_the_helper_takes_a_mesh_and_tensors_from_code(tmp_path: Path) -> None:
    rules = make_rules(["dp", "tp"], [("embed", "dp"), ("mlp", "tp")])
    mesh = rules.mesh(4, ici={"dp": 2, "tp": 2})
    tensors = {"w": (("embed", "mlp"), (8, 8))}
    path = tmp_path / "new" / "mine.json"
    assert_matches_golden(rules, path, mesh=mesh, tensors=tensors, update=True)
    assert_matches_golden(rules, path, mesh=mesh, tensors=tensors)
    with pytest.raises(RulesError, match="takes devices"):
        assert_matches_golden(rules, path, tensors=tensors)
    with pytest.raises(RulesError, match="no such file"):
        assert_matches_golden(rules, path, mesh=mesh)
