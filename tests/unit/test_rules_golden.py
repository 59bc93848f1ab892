"""Golden files, byte for byte: MaxText's own and ours, by the digests in tests/data/goldens/index.json."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from support.recorded import MAXTEXT, Golden, goldens

from lowshard import DeviceMesh, cli
from lowshard.rules import RuleSet, load_rules, make_rules
from lowshard.rules.golden import FILE_NAMES, activation_shardings, dump_text, named_shardings, parse_dump

THEIRS, OURS = goldens("maxtext"), goldens("ours")
their_cases = pytest.mark.parametrize("case", THEIRS, ids=[case.id for case in THEIRS])


def check(case: Golden, kind: str, text: str) -> None:
    """Check that a text is a golden file, by its digest."""
    if case.whole is not None and (case.whole / FILE_NAMES[kind]).exists():  # type: ignore[index]
        assert text == (case.whole / FILE_NAMES[kind]).read_text(encoding="utf-8")  # type: ignore[index]
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == case.sha256[kind], (
        f"{case.id}: the {kind} file has the digest {digest}, the golden {case.sha256[kind]}. See what differs by "
        f"`lowshard rules dump --rules {case.rules}` for {case.sizes}, at a commit that passes and now, and `lowshard "
        "rules compare` of the two. If the change is meant (ours only), write the digest into goldens/index.json."
    )


def check_all(case: Golden, rules: RuleSet) -> None:
    """Check that rules give both files of a case."""
    bound, mesh = rules.bind(**case.sizes)
    logical = parse_dump(json.dumps(case.input("logical")))
    check(case, "named", dump_text(named_shardings(bound, mesh, logical.tensors())))
    traced = parse_dump(json.dumps(case.input("activations")))
    check(case, "activations", dump_text(activation_shardings(bound, mesh, traced.activations())))


@pytest.mark.parametrize("case", [*THEIRS, *OURS], ids=lambda case: case.id)
def test_the_names_that_are_kept_are_the_logical_file_byte_for_byte(case: Golden) -> None:
    check(case, "logical", dump_text(case.input("logical")))


@their_cases
@pytest.mark.parametrize("source", ["their file", "ours"])
def test_maxtext_s_goldens_byte_for_byte(case: Golden, source: str) -> None:
    check_all(case, load_rules(MAXTEXT / f"rules/{case.rules}.yml" if source == "their file" else case.rules))


@pytest.mark.parametrize("case", OURS, ids=[case.id for case in OURS])
def test_our_goldens_byte_for_byte(case: Golden) -> None:
    check_all(case, load_rules(case.rules))


@their_cases
@pytest.mark.parametrize("mode", ["strict", "maxtext"])
def test_the_command_writes_maxtext_s_goldens(
    case: Golden, mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = str(MAXTEXT / f"rules/{case.rules}.yml")
    common = ["rules", "dump", "--rules", rules, "--devices", str(case.sizes["devices"]), "--mode", mode]
    for option in ("ici", "dcn"):
        if case.sizes[option]:
            common += [f"--{option}", ",".join(f"{a}={n}" for a, n in case.sizes[option].items())]
    source, out = tmp_path / "input.json", tmp_path / "out.json"
    for option, kind, made in (("--logical", "logical", "named"), ("--activations",) + ("activations",) * 2):
        source.write_text(json.dumps(case.input(kind)))
        assert cli.main([*common, option, str(source), "-o", str(out)]) == 0
        check(case, made, out.read_bytes().decode())
    assert (mode == "strict") or capsys.readouterr().err == ""


# Bytes that a device needs for parameters, gradients and moments, and how many tensors had a rule blocked, by name.
FIGURES = {
    ("deepseek2-16b", "default"): (15_708_381_196, {"embed": 18, "embed_moe": 9}),
    ("deepseek2-16b", "pure-fsdp"): (15_708_381_196, {}),
    ("deepseek2-16b", "pipeline-large-moe"): (15_888_474_124, {}),
    ("deepseek2-16b", "ep-as-cp"): (31_534_800_908, {}),
    ("deepseek2-16b", "fsdp-as-dp-for-attn"): (19_249_422_348, {"embed": 18}),
    ("qwen3-0.6b", "default"): (597_032_972, {"embed": 9}),
}


@their_cases
def test_memory_and_blocked_rules_of_maxtext_s_models(case: Golden) -> None:
    rules, mesh = load_rules(MAXTEXT / f"rules/{case.rules}.yml").bind(**case.sizes)
    tensors = parse_dump(json.dumps(case.input("logical"))).tensors()
    needed, blocked = FIGURES[case.model, case.rules]
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


def test_an_activation_whose_names_nobody_knows_keeps_its_spec() -> None:
    entry = {"new_layer/x: bfloat16[4]": {"logic_axes": "Unknown", "PartitionSpec": "P('x',)"}}
    dump = parse_dump(json.dumps({"Activation Sharding Dump": [entry, entry]}))
    rules = make_rules(["x"], [])
    again = activation_shardings(rules, rules.mesh(2, ici={"x": 2}), dump.activations())
    assert again == {"Activation Sharding Dump": [entry, entry]}
