"""The step `suite`: the gpu tests of the checkout, where there is one, and pytest."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import lowshard
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.step_setting import Setting

_COUNTS = re.compile(r"\d+ (passed|failed|skipped|errors?)\b.* in ")


def run(setting: Setting, tally: Tally) -> None:
    """Run pytest on tests/gpu; a test that fails is a finding."""
    root = Path(lowshard.__file__).resolve().parents[1]
    if not (root / "tests" / "gpu").is_dir():
        tally.data["skipped"] = f"there is no tests/gpu beside {root / 'lowshard'}: this is not a checkout"
        return
    if importlib.util.find_spec("pytest") is None:
        tally.data["skipped"] = "pytest is not installed: pip install 'lowshard[test]'"
        return
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "--seed", "1", "tests/gpu"]
    lines = []
    with subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as ran:
        assert ran.stdout is not None
        for line in ran.stdout:  # into the log as it comes: the time may run out
            print(line, end="", flush=True)
            lines.append(line.strip())
            if line.startswith(("FAILED", "ERROR")):
                tally.fail(line.strip())
    tally.summary = next((line for line in reversed(lines) if _COUNTS.search(line)), "no count from pytest")
    if ran.returncode == 0 and " passed" not in tally.summary:
        tally.data["skipped"] = f"no gpu test can run here: {tally.summary}"
    tally.true("pytest tests/gpu", ran.returncode == 0, f"exit code {ran.returncode}: {tally.summary}")
