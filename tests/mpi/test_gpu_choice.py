"""GPU arrays over MPI ranks without a GPU: what is chosen and refused, and the case table on staged communicators."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.comm_cases import Way, cases_for
from support.starting import start_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.one_mpi]

RUNNER = Path(__file__).parent / "run_gpu_choice.py"


def test_ranks_choose_how_gpu_arrays_are_moved_alike() -> None:
    ended = start_ranks(RUNNER, 2, timeout_s=60).ok()
    assert len(ended.stdout.split()) == 9, ended.text


# Over shared memory, where ranks read each other's slots; over MPI; over both.
PATHS = {
    "memory": (2, {}),
    "mpi": (2, {"LOWSHARD_CPU_PATH": "mpi"}),
    "nodes": (4, {"LOWSHARD_NODE_SIZE": "2"}),
}


@pytest.mark.full_only
@pytest.mark.parametrize("path", PATHS)
def test_the_contract_holds_on_staged_ranks(path: str) -> None:
    size, env = PATHS[path]
    ended = start_ranks(RUNNER, size, ["cases"], timeout_s=600, env=env).ok()
    assert ended.stdout.split() == cases_for(Way(size, "staged")), ended.text
