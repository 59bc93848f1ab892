"""`lowshard rules`: what each command prints and writes, its exit codes, its help; and how long big models take."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.recorded import GOLDENS, MAXTEXT

from lowshard import cli
from lowshard.rules import load_rules
from lowshard.rules.checkpoint_rules import tensor_layouts
from lowshard.rules.loading import ready_made_text
from lowshard.rules.rules_command import EXAMPLES

LOGICAL = str(GOLDENS / "ep-as-cp-8" / "logical_shardings.json")
RULES = ["--rules", "ep-as-cp", "--devices", "8", "--ici", "fsdp=-1,expert=2"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def run_command(*argv: str, code: int = 0) -> str:
        try:
            got = cli.main(["rules", *argv])
        except SystemExit as end:  # wrong usage
            got = end.code
        out, err = capsys.readouterr()
        assert got == code, out + err
        return str(out + err if code else out)

    return run_command


COMMANDS = ("dump", "compare", "explain", "check")


def test_dump_writes_a_golden_and_fails_loudly(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "named.json"
    run("dump", *RULES, "--logical", LOGICAL, "-o", str(out))
    assert out.read_bytes() == (GOLDENS / "ep-as-cp-8" / "named_shardings.json").read_bytes()
    assert run("dump", *RULES, "--logical", LOGICAL, "-o", "-", "--mode", "maxtext") == out.read_text()
    before = out.read_bytes()
    for extra, message in (
        (["--devices", "7"], "leaves 7/2 for fsdp"),
        (["--devices", "48"], "dim embed of 64 is not divided by fsdp=24 x expert=2 = 48 shards"),
        (["--ici", "fsdp=-1,tensor=2"], "has no axis 'tensor'"),
        (["--logical", str(tmp_path / "none.json")], "there is no such file"),
        (["--logical", str(out)], "a logical file .* is wanted, this is a named one"),
        (["--rules", str(tmp_path / "none.yml")], "there is no such rule file"),
    ):
        said = run("dump", *RULES, "--logical", LOGICAL, "-o", str(out), *extra, code=2)
        assert re.search(message, said), said
    assert out.read_bytes() == before
    assert "give --activations, or --logical" in run(
        "dump", *RULES, "--logical", LOGICAL, "--activations", LOGICAL, "-o", "-", code=2
    )
    assert "which tensors?" in run("dump", *RULES, "-o", "-", code=2)
    run("dump", *RULES, "--logical", LOGICAL, "-o", "/proc/none/x", code=2)


def test_strict_warns_on_stderr_and_maxtext_is_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "x")
    argv = ["rules", "dump", "--rules", "pure-fsdp", "--devices", "8", "--logical", LOGICAL, "-o", out]
    assert cli.main(argv) == 0
    err = capsys.readouterr().err
    assert "no rule is for the logical name 'norm'" in err
    assert "warnings more" in err
    assert cli.main([*argv, "--mode", "maxtext", "--ici", "tensor=4,fsdp=-1"]) == 0
    assert capsys.readouterr().err == ""
    assert cli.main([*argv, "--ici", "tensor=4,fsdp=-1"]) == 2
    assert cli.main([*argv, "--werror"]) == 2


def test_compare_says_what_differs_and_by_exit_code(run: Any, tmp_path: Path) -> None:
    a, b = GOLDENS / "ep-as-cp-8", tmp_path / "b"
    shutil.copytree(GOLDENS / "cp-as-ep-32-two-slices", b)
    shutil.copy(LOGICAL, b)
    same = run("compare", str(a), str(a))
    assert same.count("the same: ") == 3
    text = run("compare", str(a), str(b), code=1)
    assert "mesh of all entries (24 entries)" in text
    assert "partition_spec of decoder/layers/moe/wi (3 entries)" in text
    data = json.loads(run("compare", str(a), str(b), "--json", code=1))
    assert data["same"] is False
    assert [c["kind"] for c in data["comparisons"]] == ["logical", "named", "activations"]
    assert [c["same"] for c in data["comparisons"]] == [True, False, False]
    named = str(a / "named_shardings.json")
    for unusable in ([str(tmp_path), str(a)], [str(a), named], [LOGICAL, named], [str(a)]):
        run("compare", *unusable, code=2)
    (tmp_path / "logical_shardings.json").write_bytes((a / "logical_shardings.json").read_bytes())
    assert "there is no such file" in run("compare", str(a), str(tmp_path), code=2)


def test_compare_with_the_rules_finds_a_stale_golden(run: Any) -> None:
    golden = str(GOLDENS / "ep-as-cp-8")
    assert run("compare", golden, *RULES).count("the same: ") == 2
    assert run("compare", f"{golden}/named_shardings.json", *RULES).count("the same: ") == 1
    assert "partition_spec of decoder/layers/moe/wi (3 entries)" in run(
        "compare", golden, "--rules", "pure-fsdp", "--devices", "8", code=1
    )
    assert "with --rules and --devices" in run("compare", golden, "--rules", "pure-fsdp", code=2)
    assert "compare takes A and B" in run("compare", golden, golden, *RULES, code=2)


def test_explain_by_name_pattern_or_logical_names(run: Any) -> None:
    assert "the same" not in run("explain", "decoder/layers/moe/wi", *RULES, "--logical", LOGICAL)
    text = run("explain", "layers/moe/wi", *RULES, "--logical", LOGICAL)
    assert "dim 0 exp = 16: sharded over expert into 2: rule [exp, [expert]] (ready/ep-as-cp.yml:" in text
    assert "the same: decoder/layers/moe/wi (mu), decoder/layers/moe/wi (nu)" in text
    assert run("explain", "moe", *RULES, "--logical", LOGICAL).count("\n  the same:") == 2
    assert "dim 1 -: stays whole" in run("explain", "--rules", "default", "--names", "embed,-,mlp")
    text = run("explain", "--rules", "default", "--names", "embed,mlp")
    assert "fsdp_transpose already serves 'mlp' on dim 1" in text
    assert "did you mean " in run("explain", "decoder/layer/moe", *RULES, "--logical", LOGICAL, code=2)
    text = run("explain", "mo/wi", *RULES, "--logical", LOGICAL, code=2)  # far from any whole name
    assert "did you mean moe/wi" in text
    run("explain", *RULES, code=2)
    run("explain", "x", "--names", "a", *RULES, code=2)


def test_check_reports_everything_and_by_exit_code(run: Any, tmp_path: Path) -> None:
    assert "0 errors, 0 warnings, 0 notes" in run("check", "--rules", "default")
    before = str(MAXTEXT / "rules/default.yml")
    assert "0 errors, 1 warning, 0 notes" in run("check", "--rules", before)  # name-split-off
    assert "2 warnings" in run("check", *RULES, "--logical", LOGICAL)
    run("check", *RULES, "--logical", LOGICAL, "--werror", code=1)
    path = tmp_path / "bad.yml"
    path.write_text(
        "mesh_axes: [fsdp, fsdp]\nlogical_axis_rules:\n- [a]\n- [embed, [gone]]\ndata_sharding: [fsdp]\n"
    )
    text = run("check", "--rules", str(path), "--devices", "7", "--logical", LOGICAL, code=1)
    for code in ("mesh-axis-repeated", "rules-form", "axis-absent-weight", "data-sharding-flat"):
        assert f"[{code}]" in text
    data = json.loads(run("check", "--rules", str(path), "--json", code=1))
    assert {f["line"] for f in data["findings"] if f["severity"] == "error"} >= {1, 3, 4, 5}
    activations = str(GOLDENS / "ep-as-cp-8" / "input_shardings.json")
    assert "activation_kv_head_dim" in run("check", "--rules", "pure-fsdp", "--activations", activations)
    for command in ("check", "dump", "explain"):
        more = {"dump": ["-o", "-"], "explain": ["moe/wi"]}.get(command, [])
        argv = [
            command,
            *more,
            "--rules",
            "default",
            "--devices",
            "16",
            "--dcn",
            "data=4",
            "--logical",
            LOGICAL,
        ]
        assert "--slices" in run(*argv, code=1 if command == "check" else 2)
    assert "give devices too" in run("check", "--rules", "default", "--ici", "fsdp=4", code=2)
    assert "give --devices too" in run(
        "explain", "--names", "a", "--rules", "default", "--ici", "fsdp=4", code=2
    )
    path.write_text("a: [")
    run("check", "--rules", str(path), code=2)


def test_a_checkpoint_s_header_is_enough(run: Any, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path = tmp_path / "m.safetensors"
    save_file(
        {"l.0.up_proj.weight": np.zeros((64, 32), np.float32), "l.0.odd": np.zeros((3, 3), np.float32)}, path
    )
    named = json.loads(
        run("dump", "--rules", "default", "--devices", "8", "--checkpoint", str(path), "-o", "-")
    )
    assert named["l.0.up_proj.weight"]["shape"] == [64, 32]
    assert named["l.0.odd"]["partition_spec"] == [None, None]
    assert "tensor-unmatched" in run(
        "check", "--rules", "default", "--checkpoint", str(path), "--devices", "8"
    )
    assert "into 2: rule" in run(
        "explain", "up_proj", "--rules", "default", "--devices", "2", "--checkpoint", str(path)
    )


# ---- size


@pytest.mark.full_only
@pytest.mark.quiet
@pytest.mark.time_limit(60)
def test_a_hundred_thousand_parameters_on_sixteen_thousand_devices_take_less_than_two_seconds() -> None:
    rules = load_rules("default")
    names: list[tuple[str | None, ...]] = [
        ("embed", None, "mlp"), ("exp", "layers", "embed_moe", "mlp_moe"), ("embed", "q_heads", "kv"), ("norm",),
        ("vocab", "embed_vocab"),
    ]  # fmt: skip
    # Every shape is another one: the worst case, as no layout serves twice.
    tensors = {
        f"layers.{i}.w": (
            names[i % 5],
            tuple(16384 * (i + 1 if d == 0 else 1) for d in range(len(names[i % 5]))),
            "bf16",
        )
        for i in range(100_000)
    }
    best = 60.0
    for _ in range(4):  # the machine may be busy: one free moment is enough
        start = time.process_time()
        mesh = rules.mesh(16_384, ici={"fsdp": -1, "expert": 16, "tensor": 8})
        layouts = tensor_layouts(rules, mesh, tensors)
        best = min(best, time.process_time() - start)
        if best < 2.0:
            break
    assert best < 2.0
    assert len(layouts) == 100_000
    assert layouts["layers.1.w"].local_shape(16_383) == (2048, 16384, 128, 2048)


# ---- the examples


def test_every_example_of_the_help_and_every_line_of_the_readme_runs_as_written(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^ *lowshard rules (.+)$", f"{EXAMPLES}\n{readme}", re.MULTILINE)
    assert len(lines) >= len(COMMANDS)
    monkeypatch.chdir(tmp_path)
    shutil.copy(LOGICAL, "logical_shardings.json")
    shutil.copytree(GOLDENS / "ep-as-cp-8", "golden")
    Path("my.yml").write_text(ready_made_text("ep-as-cp"))
    for line in lines:
        run(*shlex.split(line.partition("#")[0]))
