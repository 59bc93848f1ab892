"""Solved graphs on real MPI ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.starting import start_ranks

RUNNER = Path(__file__).with_name("run_graphs.py")


@pytest.mark.full_only  # tests/world/test_graph_run.py runs such graphs on threads
@pytest.mark.mpi
@pytest.mark.one_mpi
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_solved_graph_gives_the_unsharded_result_over_mpi(ranks: int) -> None:
    ran = start_ranks(RUNNER, ranks, [], timeout_s=100)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{6 if ranks % 2 else 12} graphs right on {ranks} ranks" in ran.stdout
