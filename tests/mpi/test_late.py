"""Calls on NCCL that are compared late, over MPI ranks without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import mode
from support.starting import start_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.one_mpi]

RUNNER = Path(__file__).parent / "run_late.py"
PATHS = {
    "memory": (2, {}),
    "mpi": (3, {"LOWSHARD_CPU_PATH": "mpi"}),
    "nodes": (4, {"LOWSHARD_NODE_SIZE": "2"}),
}


@pytest.mark.parametrize("path", mode.sample(list(PATHS), 1, "late"))
@pytest.mark.full_only
def test_calls_are_compared_late_over_mpi(path: str) -> None:
    size, env = PATHS[path]
    ended = start_ranks(RUNNER, size, timeout_s=80, env=env).ok()
    assert len(ended.stdout.split()) == 3, ended.text


@pytest.mark.full_only
def test_a_program_may_end_with_calls_that_are_not_compared() -> None:
    for _ in range(6 if mode.full() else 1):  # without care for its threads, every third such end was a crash
        start_ranks(RUNNER, 2, ["exit"], timeout_s=80).ok()
