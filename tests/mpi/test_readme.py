"""The README's program runs as the README says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.starting import start_ranks

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.mpi
def test_the_program_in_the_readme_runs(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    program = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    script = tmp_path / "sums.py"
    script.write_text(program)
    ran = start_ranks(script, 4, [], timeout_s=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "rank 3 holds ((502, 1003), (0, 517))" in ran.stdout
    assert ran.stdout.count("moves ") == 1
