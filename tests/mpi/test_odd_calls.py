"""Odd calls over MPI ranks: on one node, through MPI, and on two nodes; what is said of their ways."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import mode
from support.starting import start_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(100)]

SCRIPT = Path(__file__).parent / "run_odd_calls.py"


WAYS: list[tuple[int, dict[str, str], list[str], str]] = [
    (2, {}, ["shared memory"], "since they are processes of one node; private arrays are read across"),
    (2, {"LOWSHARD_CROSS_MEMORY": "off"}, ["shared memory"], "through slots (LOWSHARD_CROSS_MEMORY=off)"),
    (3, {"LOWSHARD_CPU_PATH": "mpi"}, ["MPI messages"], "since LOWSHARD_CPU_PATH=mpi says so"),
    (4, {"LOWSHARD_NODE_SIZE": "2"}, ["MPI messages", "shared memory"], "since they are on different nodes"),
]


@pytest.mark.parametrize(("ranks", "env", "ways", "why"), mode.sample(WAYS, 1, "odd calls"))
@pytest.mark.full_only
def test_odd_calls_are_right_or_refused_on_all_ranks(
    ranks: int, env: dict[str, str], ways: list[str], why: str
) -> None:
    ended = start_ranks(SCRIPT, ranks, timeout_s=90, env=env).ok()
    assert "MPI_" not in ended.text  # what MPI says of a call after its end
    said = ended.stdout
    assert said.splitlines()[0] == str(ways)
    assert why in said
