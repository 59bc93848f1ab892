"""The README's program runs as the README says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.starting import start_ranks

from lowshard.checkpoint import Catalog
from lowshard.demo.llama import LlamaConfig
from lowshard.demo.smollm2 import generated

ROOT = Path(__file__).resolve().parents[2]


def program(heading: str) -> str:
    """Returns the first program under a heading of the README."""
    (section,) = re.findall(
        rf"^## {heading}$(.*?)(?=^## |\Z)",
        (ROOT / "README.md").read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    return str(re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0])


@pytest.mark.mpi
@pytest.mark.one_mpi
def test_the_program_in_the_readme_runs(tmp_path: Path) -> None:
    script = tmp_path / "sums.py"
    script.write_text(program("A program"))
    ran = start_ranks(script, 4, [], timeout_s=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "rank 3 holds ((502, 1003), (0, 517))" in ran.stdout
    assert ran.stdout.count("moves ") == 1


@pytest.mark.mpi
@pytest.mark.one_mpi
def test_the_program_on_weights_in_the_readme_runs(tmp_path: Path) -> None:
    script = tmp_path / "weights.py"
    script.write_text(program("Weights and checkpoints"))
    model = generated(tmp_path, LlamaConfig(50, 36, 2, 9, 3, 40), seed=0)
    ran = start_ranks(script, 4, [str(model.checkpoint), str(tmp_path / "sharded")], timeout_s=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    before, after = Catalog.open(model.checkpoint), Catalog.open(tmp_path / "sharded")
    assert {n: t.shape for n, t in after.tensors.items()} == {n: t.shape for n, t in before.tensors.items()}
    assert after.num_ranks == 4
