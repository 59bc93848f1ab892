"""The GPU checker finds each fault at a random place of a program that is right elsewhere, and none without one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import mode
from support.checked_gpu import checked_gpu, checker_env
from support.gpu import needs_compiler
from support.planted_faults import FAULTS, RANK_FAULTS, Rank, RankStep, Rig, Step

from lowshard.comm.nccl_bindings import Binding

PLACES = 20


@pytest.fixture
def cupy() -> Iterator[Any]:
    with checked_gpu() as module:
        yield module


@needs_compiler
@pytest.mark.parametrize("step", FAULTS, ids=lambda step: step.__name__)
def test_a_planted_fault_is_found(step: Step, cupy: Any) -> None:
    def run(wrong: int) -> None:
        rig = Rig(cupy)
        try:
            for place in range(PLACES):
                step(rig, place != wrong)
        except cupy.checker.Misuse:
            assert wrong >= 0
        finally:
            rig.runtime.hostUnregister(rig.slot.ctypes.data)

    _expect(cupy, run, FAULTS[step], f"gpu checker {step.__name__}")


def _expect(cupy: Any, run: Callable[[int], None], pattern: str, name: str) -> None:
    run(-1)
    assert cupy.checker.reports() == []
    counts = cupy.checker.counts()
    assert counts["allocations"] or counts["host_waits"] or counts["collectives"]
    run(int(mode.rng(name).integers(PLACES)))
    assert any(pytest.importorskip("re").search(pattern, text) for text in cupy.checker.reports()), (
        cupy.checker.reports()
    )


@pytest.mark.parametrize("step", RANK_FAULTS, ids=lambda step: step.__name__)
def test_a_fault_planted_in_calls_of_nccl_is_found(step: RankStep, cupy: Any) -> None:
    def run(wrong: int) -> None:
        unique = cupy.cuda.nccl.get_unique_id()
        threads = [threading.Thread(target=_work, args=(cupy, unique, n, step, wrong)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()

    _expect(cupy, run, RANK_FAULTS[step], f"gpu checker {step.__name__}")


def _work(cupy: Any, unique: bytes, number: int, step: RankStep, wrong: int) -> None:
    rank = Rank(cupy, unique, number)
    try:
        for place in range(PLACES):
            step(rank, place != wrong)
            rank.stream.synchronize()
    except cupy.checker.Misuse:
        assert wrong >= 0
    if wrong < 0:
        rank.comm.destroy()
    elif not rank.comm._ended:
        rank.comm.abort()


# ---- processes

PROGRAM = """
import cupy, numpy as np
from lowshard.kernels import BoxTable, pack
one, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
with one:
    x = cupy.asarray(np.ones((64, 128), np.float32))
    packed = pack(x, BoxTable((64, 128), (((0, 64), (0, 64)),)))
with other:
    packed += 1
one.synchronize()
other.synchronize()
print(float(packed.sum()))
"""


@needs_compiler
@pytest.mark.parametrize("way", ["on", "off"])
def test_a_process_writes_its_reports_and_counts(way: str, tmp_path: Path) -> None:
    report, counts = tmp_path / "report", tmp_path / "counts"
    env = {**os.environ, **checker_env(report, counts, LOWSHARD_CHECKER=way)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(counts.read_text())
    assert (found["launches"], found["uploads"]) == (1, 2)  # the second: the table of the kernel
    if way == "off":
        assert not report.exists()
        return
    assert found["waits"]
    (line,) = report.read_text().splitlines()
    assert re.match(r"gpu checker: race: cupy's add on .*<string>:9.*kernel copy_16", line)
    assert line in done.stderr
    assert float(done.stdout) == 2 * 64 * 64


def test_the_checker_is_there_only_while_it_is_asked_for() -> None:
    before = sys.modules.get("cupy")
    with checked_gpu() as cupy:
        assert Binding.load().xp is cupy
    assert sys.modules.get("cupy") is before
