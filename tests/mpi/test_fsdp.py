"""Sharded training on MPI ranks: what happens when a rank is killed; and its bench."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import fsdp_kit as kit
from support import mode
from support.starting import start_ranks

from lowshard import comm as lc

KILLED = Path(__file__).with_name("run_fsdp_killed.py")
PHASES = ["open forward", "open backward", "reduce", "join", "clip", "update", "resync", "save"]


@pytest.mark.mpi
@pytest.mark.time_limit(200)
@pytest.mark.parametrize(
    ("phase", "name"),
    mode.sample([(p, n) for p in PHASES for n in ("full", "hybrid2", "sgo")], 1, "fsdp killed"),
)
def test_a_killed_rank_is_told_of_and_the_last_save_goes_on(phase: str, name: str, tmp_path: Path) -> None:
    """Within five seconds; from the file two steps are as they would have been."""
    ran = start_ranks(
        KILLED, 4, [phase, str(tmp_path), name], timeout_s=120, env={"LOWSHARD_ON_FAILURE": "raise"}
    )
    assert ran.returncode == 70, ran.text
    for rank in (0, 2, 3):
        said = tmp_path / f"told{rank}"
        if said.exists():  # the launcher may end it first
            error, took_s = said.read_text().split()
            assert error == "PeerFailed", ran.text
            assert float(took_s) < 5, ran.text
    assert any((tmp_path / f"told{rank}").exists() for rank in (0, 2, 3)), ran.text
    plain, _ = kit.plain_run(4, 4)
    end = tmp_path / "end"
    lc.run_loopback(
        2, lambda c: kit.train(c, kit.STRATEGIES["full"], range(2, 4), 4, end, tmp_path / "saved"), 30
    )
    kit.check_file(end, plain)


@pytest.mark.full_only  # the bytes: tests/world/test_fsdp_rules.py
@pytest.mark.mpi
@pytest.mark.one_mpi
def test_the_bench_sends_what_the_formula_says(tmp_path: Path) -> None:
    """Small; exit code 1 would mean other bytes."""
    modes = mode.sample(["full", "sgo", "none", "hybrid"], 1, "fsdp bench")
    out = tmp_path / "bench.json"
    command = [sys.executable, "-m", "lowshard", "bench", "fsdp", "--ranks", "1,2", "--mode", ",".join(modes)]
    small = ["--width", "128", "--layers", "3", "--steps", "2", "--warmup", "1", "--json", str(out)]
    ran = subprocess.run([*command, *small], capture_output=True, text=True, timeout=110, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = [row["facts"] for row in json.loads(out.read_text())["rows"]]
    assert [(row["mode"], row["ranks"]) for row in rows] == [
        (name, ranks) for ranks in (1, 2) for name in modes if (name, ranks) != ("hybrid", 1)
    ]
    elems = 3 * (128 * 128 + 128)
    times_sent = {"full": 3, "hybrid": 3, "sgo": 2, "none": 2}
    for row in rows:
        expected_bytes = 0 if row["ranks"] == 1 else times_sent[row["mode"]] * 4 * elems
        assert row["sent_bytes"] == expected_bytes, row["mode"]


@pytest.mark.full_only
@pytest.mark.mpi
@pytest.mark.one_mpi
def test_a_bench_whose_ranks_fail_ends_with_their_exit_code() -> None:
    command = [sys.executable, "-m", "lowshard", "bench", "fsdp", "--ranks", "1", "--width", "100000000"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert ran.returncode == 1, ran.stderr  # 2 is wrong usage
    assert "there is no memory for the model's buffer" in ran.stderr
