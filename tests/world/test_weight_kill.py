"""SIGKILL at any moment of a save leaves the old checkpoint or the new one, whole; the next save clears up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import mode

RUNNER = Path(__file__).resolve().parents[1] / "support" / "run_killed_saves.py"


@pytest.mark.parametrize("form", ["sharded", "merged"])
def test_a_kill_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    target = folder if form == "sharded" else folder / "m.safetensors"
    kills = 200 if mode.full() else 50
    command = [sys.executable, str(RUNNER), str(target), form, str(kills), str(mode.seed() % 2**31)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = json.loads(ran.stdout)
    assert told["kills"] >= kills
    assert all(told["by_phase"][phase] for phase in ("starting", "data", "index", "published")), told
    assert told["outcomes"]["old"] >= 10
    assert told["outcomes"]["new"] >= 5
    assert len(told["left"]) == (3 if form == "sharded" else 1), told
