"""The main job as users start it: on ranks of its own, inside the user's MPI, and with everything that goes wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import mode

from lowshard.demo.source import cached_minilm, synthetic
from lowshard.launch.mpiexec import find_mpi, rank_environment

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(240)]


def demo(*args: object, cwd: Path, timeout_s: float = 200, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lowshard", "demo", *map(str, args)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "140", "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def checked(ran: subprocess.CompletedProcess[str], folder: Path) -> dict[str, Any]:
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads((folder / "demo.json").read_text())
    assert report["ok"] is True
    assert all(row["ok"] for row in report["rows"])
    measured = {f["label"]: f for f in report["accuracy"]}
    assert measured["fp32 weights"]["measured"] <= 1e-5
    assert measured["bf16 weights"]["measured"] >= 0.999
    assert measured["MXFP8 weights"]["measured"] >= 0.99
    return dict(report)


@pytest.mark.parametrize(("ranks", "tp"), [(4, 2), (3, 3), (1, 1)] if mode.full() else [(4, 2)])
def test_the_demo_runs_on_ranks_it_starts_and_checks_itself(tmp_path: Path, ranks: int, tp: int) -> None:
    ran = demo("--synthetic", "-n", ranks, "--tp", tp, "-o", tmp_path / "out", cwd=tmp_path)
    report = checked(ran, tmp_path / "out")
    assert report["world_size"] == ranks
    phases = {row["phase"]: row for row in report["rows"]}
    assert "0 differ from the file" in phases["verify every element"]["check"]
    for version in (1, 2, 3):
        check = phases[f"refit {version} of 3 to MXFP8"]["check"]
        assert check.startswith(f"version {version}: ")
        assert check.endswith(" codes and scales, 0 wrong")
    # Each rank read its share alone: the largest share of an uneven cut is a little over 1/n.
    read = phases["read the training layout"]["moved_bytes_per_rank"]
    assert read < report["checkpoint_bytes"] / ranks * 1.1 + 4096
    for shown in ("move to the serving layout", "moved a rank", "every check holds"):
        assert shown in ran.stdout
    assert (tmp_path / "out" / "demo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.full_only  # .ci/run has it
def test_the_demo_runs_inside_the_users_own_mpi_and_json_goes_to_stdout_alone(tmp_path: Path) -> None:
    mpi = find_mpi()
    out = tmp_path / "out"
    options = ["--synthetic", "--json", "--no-picture", "-o", str(out)]
    program = [sys.executable, "-m", "lowshard", "demo", *options]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ran = subprocess.run(
        mpi.command(2, program),
        cwd=tmp_path,
        env=rank_environment(mpi, 2, env),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert checked(ran, out)["world_size"] == 2
    assert json.loads(ran.stdout) == json.loads((out / "demo.json").read_text())  # rank 0 alone reports
    assert not (out / "demo.png").exists()


@pytest.mark.full_only
@pytest.mark.one_mpi
@pytest.mark.weights
def test_the_demo_holds_its_bounds_on_the_real_checkpoint(tmp_path: Path) -> None:
    if cached_minilm() is None:
        pytest.skip("all-MiniLM-L6-v2 is not in the cache; `lowshard demo` fetches it")
    report = checked(demo("-o", tmp_path / "out", "--no-picture", cwd=tmp_path), tmp_path / "out")
    assert "MiniLM" in report["checkpoint"]
    rows = {row["phase"]: row for row in report["rows"]}
    assert rows["verify every element"]["ok"]


@pytest.mark.one_mpi
@pytest.mark.full_only  # .ci/run has it
def test_a_failed_check_is_exit_code_1_and_named(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    made = synthetic(tmp_path, seed=1)
    weights = load_file(made.checkpoint)
    name = next(n for n in weights if n.endswith("layer.0.output.dense.weight"))
    weights[name] = np.full_like(weights[name], np.nan)
    save_file(weights, made.checkpoint)
    ran = demo("--checkpoint", made.checkpoint, "-n", 1, "--no-picture", "-o", tmp_path / "out", cwd=tmp_path)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "FAILED" in ran.stdout
    report = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert report["ok"] is False
    # NaN moves bit for bit; it is the embeddings that fail
    assert [row["ok"] for row in report["rows"]] == [
        not row["phase"].startswith("encode") for row in report["rows"]
    ]


BAD: dict[str, tuple[Any, str]] = {
    "none": (None, "is not there"),
    "half": (lambda data: data[: len(data) // 2], "truncated|ends|short|bytes"),
    "dtype": (lambda data: data.replace(b'"F32"', b'"F33"', 1), "F33"),
    "tail": (lambda data: data + b"tail", "after|trailing|bytes"),
}  # fmt: skip


@pytest.mark.one_mpi
@pytest.mark.parametrize("name", mode.sample(list(BAD), 3, "bad checkpoints of the demo"))
def test_a_bad_checkpoint_is_a_clear_error_and_exit_code_2(tmp_path: Path, name: str) -> None:
    damage, text = BAD[name]
    file = tmp_path / "bad.safetensors"
    if damage is not None:
        file.write_bytes(bytes(damage(bytearray(synthetic(tmp_path, seed=1).checkpoint.read_bytes()))))
    ran = demo("--checkpoint", file, "-o", tmp_path / "out", cwd=tmp_path)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert str(file) in ran.stderr
    assert re.search(text, ran.stderr), ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "out").exists(), "a failed run leaves no half-written result"


@pytest.mark.one_mpi
def test_a_world_that_does_not_fit_the_mesh_is_exit_code_2(tmp_path: Path) -> None:
    ran = demo("--synthetic", "-n", 4, "--tp", 3, cwd=tmp_path)
    assert ran.returncode == 2
    assert "tp=3 does not divide 4" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_ctrl_c_ends_the_ranks_and_leaves_nothing(tmp_path: Path) -> None:
    import signal
    import time

    scratch = tmp_path / "tmp"
    scratch.mkdir()
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    started = subprocess.Popen(
        [sys.executable, "-m", "lowshard", "demo", "--synthetic", "-n", "12", "-o", str(tmp_path / "out")],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert started.stderr is not None
        for line in started.stderr:  # wait until the ranks work
            if "running on 12 ranks" in line:
                break
        started.send_signal(signal.SIGINT)
        begun = time.monotonic()
        started.communicate(timeout=30)
    finally:
        started.kill()
    assert started.returncode == 130
    assert time.monotonic() - begun < 10
    assert not (tmp_path / "out").exists()
    assert list(scratch.iterdir()) == []
