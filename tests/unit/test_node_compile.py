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

LIMIT_S = 100.0

# Combines with the functions of a few recipes, all of them in one process, and says what came of it and whence the
# code came. A barrier of one rank is a compiled call of the other kind.
WORK = """
import ctypes, json, sys
import numpy as np
from lowshard.comm.node import move
from lowshard.comm.node.combine import COMBINE, NARROW, WIDEN, recipe_of, source_digest
from lowshard.comm.node.meet import CONTEXT_WORDS, SIZE
from lowshard.compiled import compile_cached
from numba import types

def run(dtype, op):
    recipe = recipe_of(dtype, op)
    kept = [made for made in recipe.kept if made is not None]
    call = ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * 5)(int(recipe.words[COMBINE]))
    wide = "float32" if dtype.endswith("16") and "int" not in dtype else dtype
    a, b, c = np.array([3, 5], wide), np.array([4, 2], wide), np.zeros(2, wide)
    call(a.ctypes.data, b.ctypes.data, b.ctypes.data, 0, 0)  # nothing
    call(c.ctypes.data, a.ctypes.data, b.ctypes.data, 2, 0)
    return [c.tolist(), sum(made.cache_hits for made in kept), len(kept), [made.native_name for made in kept]]

result = {" ".join(pair): run(*pair) for pair in json.loads(sys.argv[1])}
barrier = move.barrier.py_func
barrier.__qualname__ = f"barrier_{source_digest()}"
context = np.zeros(CONTEXT_WORDS, np.int64)
context[SIZE] = 1
cards = np.zeros(64, np.int64)
context[2] = cards.ctypes.data
compiled = compile_cached(barrier, types.int64(types.int64, types.int64))
code = compiled(context.ctypes.data, 7)
result["barrier"] = [code, sum(compiled.stats.cache_hits.values()), 1, []]
print(json.dumps(result))
"""
PAIRS = [("float32", "max"), ("int16", "max"), ("float16", "max")]
VALUES = {"float32 max": [4.0, 5.0], "int16 max": [4, 5], "float16 max": [4.0, 5.0], "barrier": 0}


def start(cache: Path, pairs: list[tuple[str, str]] = PAIRS, **more: str) -> subprocess.Popen[str]:
    folder = str(Path(lowshard.__file__).resolve().parents[1])
    env = {**os.environ, "PYTHONPATH": folder, "NUMBA_CACHE_DIR": str(cache), **more}
    command = [sys.executable, "-W", "error", "-c", WORK, json.dumps(pairs)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    found: dict[str, Any] = json.loads(stdout)
    for name, (value, *_) in found.items():
        assert value == VALUES[name], name
    return found


def kept_files(cache: Path) -> dict[str, tuple[int, int]]:
    files = [path for path in cache.rglob("*") if path.suffix in (".nbi", ".nbc")]
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


@pytest.mark.time_limit(LIMIT_S + 20)
def test_of_processes_that_start_at_once_one_compiles_and_all_agree(tmp_path: Path) -> None:
    ended = [result_of(process) for process in [start(tmp_path), start(tmp_path)]]
    for name in VALUES:
        assert sum(found[name][1] for found in ended) >= ended[0][name][2], f"{name} was compiled twice"
    names = [native for _, _, _, natives in ended[0].values() for native in natives]
    assert names == [native for _, _, _, natives in ended[1].values() for native in natives]
    assert sum(names.count(native) > 1 for native in set(names)) == 2, (
        "fp16 takes fp32's combiner and divider"
    )

    before = kept_files(tmp_path)
    assert before
    again = result_of(start(tmp_path, PAIRS[::-1]))  # in another order, from the disk alone
    assert all(hits == made for _, hits, made, _ in again.values()), again
    assert kept_files(tmp_path) == before

    # Files that were cut off: the code is made anew, the results are right, and later processes find it again.
    broken = [next(tmp_path.rglob(f"*{name}*.nb{kind}")) for name, kind in (("int16", "c"), ("narrow", "i"))]
    for path in broken:
        path.write_bytes(path.read_bytes()[:50])
    result_of(start(tmp_path, PAIRS[1:]))
    assert all(not path.exists() or path.stat().st_size > 50 for path in broken)


def test_without_a_folder_for_it_code_is_compiled_in_memory(tmp_path: Path) -> None:
    place = tmp_path / "a file"
    place.write_text("no folder")
    found = result_of(start(place, PAIRS[1:2], NUMBA_CACHE_LOCATOR_CLASSES="UserProvidedCacheLocator"))
    assert found["int16 max"][1] == 0
    assert found["barrier"][1] == 0
