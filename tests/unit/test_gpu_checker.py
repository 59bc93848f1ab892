"""The GPU checker finds each fault at a random place of a program that is right elsewhere, and none without one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import mode
from support.checked_gpu import checked_gpu, checker_env
from support.planted_faults import FAULTS, RANK_FAULTS, compiled, names_of, names_of_rank

PLACES = 20
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")


@pytest.fixture
def cupy() -> Iterator[Any]:
    before = sys.modules.get("cupy")
    with checked_gpu() as module:
        yield module
    assert sys.modules.get("cupy") is before


def work(cupy: Any, names: dict[str, Any], text: str, wrong: int) -> None:
    """Run a program many times over, at one place with its fault; none where that is -1."""
    programs = compiled(text, False), compiled(text, True)
    try:
        for place in range(PLACES):
            names["wrong"] = place == wrong
            exec(programs[place != wrong], names)
            names["settle"]()
    except cupy.checker.Misuse:
        assert wrong >= 0


def expect(cupy: Any, run: Callable[[int], None], pattern: str, name: str) -> None:
    run(-1)
    assert cupy.checker.reports() == []
    assert {"allocations", "host_waits"} <= set(cupy.checker.counts())
    run(int(mode.rng(f"gpu checker {name}").integers(PLACES)))
    found = cupy.checker.reports()
    assert any(re.search(pattern, text) for text in found), found


@needs_compiler
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, cupy: Any) -> None:
    pattern, text = FAULTS[name]

    def run(wrong: int) -> None:
        names = names_of(cupy)
        cupy.cuda.runtime.hostRegister(names["slot"].ctypes.data, names["slot"].nbytes, 0)
        work(cupy, names, text, wrong)
        cupy.cuda.runtime.hostUnregister(names["slot"].ctypes.data)

    expect(cupy, run, pattern, name)


@pytest.mark.parametrize("name", RANK_FAULTS)
def test_a_fault_planted_in_calls_of_nccl_is_found(name: str, cupy: Any) -> None:
    pattern, text = RANK_FAULTS[name]

    def rank(unique: bytes, number: int, wrong: int) -> None:
        names = names_of_rank(cupy, unique, number)
        work(cupy, names, text, wrong)
        if not names["comm"].ended:
            names["comm"].destroy() if wrong < 0 else names["comm"].abort()

    def run(wrong: int) -> None:
        unique = cupy.cuda.nccl.get_unique_id()
        with ThreadPoolExecutor(2) as pool:
            for _ in pool.map(lambda number: rank(unique, number, wrong), range(2)):
                pass

    expect(cupy, run, pattern, name)


PROGRAM = """
import cupy, numpy as np
from lowshard.kernels import BoxTable, pack
one, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
with one:
    x = cupy.asarray(np.ones((64, 128), np.float32))
    packed = pack(x, BoxTable((64, 128), (((0, 64), (0, 64)),)))
with other:
    packed += 1
cupy.cuda.Device().synchronize()
print(float(packed.sum()))
"""


@needs_compiler
@pytest.mark.parametrize("way", ["on", "off"])
def test_a_process_writes_its_reports_and_counts(way: str, tmp_path: Path) -> None:
    report, counts = tmp_path / "report", tmp_path / "counts"
    env = {**os.environ, **checker_env(report, counts, LOWSHARD_CHECKER=way)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(counts.read_text())
    assert (found["launches"], found["uploads"]) == (1, 2)  # the second: the table of the kernel
    assert report.exists() == bool(found["host_waits"]) == (way == "on")
    if way == "on":
        (line,) = report.read_text().splitlines()
        assert re.match(r"gpu checker: race: cupy's add on .*<string>:9.*kernel copy_16", line)
        assert line in done.stderr
        assert float(done.stdout) == 2 * 64 * 64
