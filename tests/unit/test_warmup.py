"""`lowshard warmup`: everything is compiled, and nothing a second time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="Numba is not installed")

from lowshard.warmup.compile_all import compile_group

ROOT = Path(__file__).resolve().parents[2]
LOADS = re.compile(r"load_(?:compiled|native)\(")


def test_the_list_names_every_module_that_has_compiled_code() -> None:
    told = (ROOT / "lowshard" / "warmup" / "function_list.py").read_text()
    for folder in ("lowshard", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            if LOADS.search(path.read_text()) and "compiled" not in path.parts:
                assert re.search(rf"\b{path.stem}\b", told), path


def test_a_group_that_fails_is_told() -> None:
    assert compile_group("no group", None)[2] == "no group: KeyError: 'no group'"


@pytest.mark.full_only
@pytest.mark.time_limit(900)
def test_what_warmup_has_compiled_is_not_compiled_again(tmp_path: Path) -> None:
    def warmed() -> str:
        return subprocess.run(
            [sys.executable, "-m", "lowshard", "warmup"],
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "LOWSHARD_SHIPPED_CODE": "off"},
            capture_output=True, text=True, timeout=400, check=True,
        ).stdout  # fmt: skip

    made = re.match(r"0 functions came compiled, (\d+) are in \S+, (\d+) of them compiled now", warmed())
    assert made
    assert made[1] == made[2]
    assert 100 < int(made[1]) < 130
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.o")}
    assert len(kept) == int(made[1])
    assert f"{made[1]} are in {tmp_path}/lowshard, 0 of them compiled now" in warmed()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.o")} == kept
