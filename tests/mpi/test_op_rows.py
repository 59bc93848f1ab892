"""Random rows of random ops on real MPI ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import mode
from support.starting import start_ranks

RUNNER = Path(__file__).with_name("run_op_rows.py")


@pytest.mark.full_only  # on threads: tests/world/test_op_rows.py
@pytest.mark.mpi
@pytest.mark.one_mpi
@pytest.mark.time_limit(300)
@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_ops_equal_whole_ones_over_mpi(ranks: int) -> None:
    count = 600
    ran = start_ranks(RUNNER, ranks, [str(count), str(mode.seed() % 2**31)], timeout_s=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{count} ops right on {ranks} ranks" in ran.stdout
