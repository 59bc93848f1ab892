"""Compiled code of the node transport on disk: processes that compile at once, that find it, that find it broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lowshard

pytest.importorskip("numba")

pytestmark = (
    pytest.mark.full_only
)  # code is compiled for a minute; test_cpu_compile.py has the like of kernels

LIMIT_S = 100.0

# Combines with the functions of a few recipes, all of them in one process, and says what came of it and whence the
# code came. A barrier of one rank is a compiled call of the other kind.
WORK = """
import ctypes, json, sys
import numpy as np
from lowshard.comm.node.calls import load_calls
from lowshard.comm.node.combine import COMBINE, recipe_of
from lowshard.comm.node.meeting import CARDS, CONTEXT_WORDS, SIZE
from lowshard.compiled import origins

def run(dtype, op):
    recipe = recipe_of(dtype, op)
    kept = [made for made in recipe.kept if made is not None]
    call = ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * 5)(int(recipe.words[COMBINE]))
    wide = "float32" if dtype.endswith("16") and "int" not in dtype else dtype
    a, b, c = np.array([3, 5], wide), np.array([4, 2], wide), np.zeros(2, wide)
    call(a.ctypes.data, b.ctypes.data, b.ctypes.data, 0, 0)  # nothing
    call(c.ctypes.data, a.ctypes.data, b.ctypes.data, 2, 0)
    return c.tolist()

result = {" ".join(pair): run(*pair) for pair in json.loads(sys.argv[1])}
context = np.zeros(CONTEXT_WORDS, np.int64)
context[SIZE] = 1
cards = np.zeros(64, np.int64)
context[CARDS] = cards.ctypes.data
result["barrier"] = load_calls().barrier(context.ctypes.data, 7)
print(json.dumps([result, origins, "numba" in sys.modules]))
"""
PAIRS = [("float32", "max"), ("int16", "max"), ("float16", "max")]
VALUES: dict[str, Any] = {
    "float32 max": [4.0, 5.0],
    "int16 max": [4, 5],
    "float16 max": [4.0, 5.0],
    "barrier": 0,
}


def start(cache: Path, pairs: list[tuple[str, str]] = PAIRS, **more: str) -> subprocess.Popen[str]:
    folder = str(Path(lowshard.__file__).resolve().parents[1])
    env = {**os.environ, "PYTHONPATH": folder, "NUMBA_CACHE_DIR": str(cache)}
    env |= {"LOWSHARD_SHIPPED_CODE": "off", **more}
    command = [sys.executable, "-W", "error", "-c", WORK, json.dumps(pairs)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result_of(process: subprocess.Popen[str]) -> tuple[dict[str, str], bool]:
    """Return whence each function came, and whether Numba was imported."""
    try:
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    values, origins, numba = json.loads(stdout)
    assert values == {name: VALUES[name] for name in values}
    return origins, numba


def kept_files(cache: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in cache.rglob("*.o")}


@pytest.mark.time_limit(2 * LIMIT_S + 20)
def test_of_processes_that_start_at_once_one_compiles_and_all_agree(tmp_path: Path) -> None:
    (first, _), (second, _) = [result_of(process) for process in [start(tmp_path), start(tmp_path)]]
    assert first.keys() == second.keys()
    for name in first:
        assert sorted([first[name], second[name]]) == ["compiled", "disk"], name
    assert sum(name.startswith("combine_float32_max") for name in first) == 1, "fp16 takes fp32's combiner"

    before = kept_files(tmp_path)
    assert len(before) == len(first)
    again, numba = result_of(start(tmp_path, PAIRS[::-1]))  # in another order, from the disk alone
    assert set(again.values()) == {"disk"}
    assert not numba
    assert kept_files(tmp_path) == before

    # Files that were cut off: the code is made anew, the results are right, and later processes find it again.
    broken = [next(tmp_path.rglob(f"*{name}*.o")) for name in ("int16", "narrow")]
    for path in broken:
        path.write_bytes(path.read_bytes()[:50])
    made, _ = result_of(start(tmp_path, PAIRS[1:]))
    assert {name for name, origin in made.items() if origin == "compiled"} == {path.stem for path in broken}
    made, _ = result_of(start(tmp_path, PAIRS[1:]))
    assert set(made.values()) == {"disk"}


@pytest.mark.time_limit(LIMIT_S + 20)
def test_without_a_folder_for_it_code_is_compiled_in_memory(tmp_path: Path) -> None:
    place = tmp_path / "a file"
    place.write_text("no folder")
    origins, _ = result_of(start(place, PAIRS[1:2]))
    assert set(origins.values()) == {"memory"}
