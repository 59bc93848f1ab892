"""The step `suite`: the gpu tests of the checkout, where there is one, and pytest."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import lowshard
from lowshard.selftest.setting import Setting
from lowshard.selftest.tally import Tally


def run(setting: Setting, tally: Tally) -> None:
    """Run pytest on tests/gpu; a test that fails is a finding."""
    root = Path(lowshard.__file__).resolve().parents[1]
    if not (root / "tests" / "gpu").is_dir():
        tally.data["skipped"] = f"there is no tests/gpu beside {root / 'lowshard'}: this is no checkout"
        return
    if importlib.util.find_spec("pytest") is None:
        tally.data["skipped"] = "pytest is not installed: pip install 'lowshard[test]'"
        return
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "--seed", "1", "tests/gpu"]
    ran = subprocess.run(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    print(ran.stdout, flush=True)
    lines = ran.stdout.strip().splitlines() or [""]
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            tally.fail(line)
    tally.summary = lines[-2] if lines[-1].startswith("default mode") and len(lines) > 1 else lines[-1]
    tally.true("pytest tests/gpu", ran.returncode == 0, f"exit code {ran.returncode}: {tally.summary}")
