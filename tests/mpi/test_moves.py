"""Random pairs of layouts on real MPI ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import mode
from support.starting import start_ranks

RUNNER = Path(__file__).with_name("run_moves.py")


@pytest.mark.full_only  # on threads: tests/world/test_redistribute.py
@pytest.mark.mpi
@pytest.mark.time_limit(300)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_any_pair_of_layouts_gives_the_bytes_of_slicing_over_mpi(ranks: int) -> None:
    count = 1000
    ran = start_ranks(RUNNER, ranks, [str(count), str(mode.seed() % 2**31)], timeout_s=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{count} moves right on {ranks} ranks" in ran.stdout
