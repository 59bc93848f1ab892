"""Checkpoints on real MPI ranks: right at every number of ranks, as fast as a plain read, in bounded memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.starting import start_ranks

RUNNER = Path(__file__).with_name("run_weights.py")
pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(200)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_saved_and_loaded_by_every_strategy(ranks: int, tmp_path: Path) -> None:
    ran = start_ranks(RUNNER, ranks, ["values", str(tmp_path)], timeout_s=150)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"all right on {ranks} ranks" in ran.stdout


def test_loading_takes_little_more_than_a_plain_read_and_little_more_than_the_shards(tmp_path: Path) -> None:
    ran = start_ranks(RUNNER, 4, ["measure", str(tmp_path)], timeout_s=150)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = {(r["form"], r["strategy"]): r for r in json.loads(ran.stdout.strip().splitlines()[-1])}
    assert all(row["over_shards_mb"] <= 64 for row in rows.values()), rows
    assert rows["plain", "own-slice"]["best"] <= 1.3, rows  # the quietest of five: others share the machine
