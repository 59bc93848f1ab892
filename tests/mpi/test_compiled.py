"""Compiled code is one for all jobs of a machine, however many ranks they have and whoever starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.starting import start_ranks

from lowshard.launch.mpiexec import find_mpi, rank_environment

pytestmark = pytest.mark.mpi

SCRIPT = Path(__file__).parent / "run_compiled.py"
ROOT = SCRIPT.parents[2]


@pytest.mark.time_limit(180)
def test_jobs_of_every_size_and_plain_mpiexec_share_one_folder(tmp_path: Path) -> None:
    said = [
        start_ranks(SCRIPT, n, [], 50, env={"NUMBA_CACHE_DIR": str(tmp_path)}).ok().stdout for n in (1, 2, 4)
    ]
    assert said[0].startswith("['compiled']")
    assert [text.partition("]")[0].count("disk") for text in said] == [0, 2, 4]
    assert len({text.partition("]")[2] for text in said}) > 1, (
        "all had as many threads: this test shows nothing"
    )
    mpi = find_mpi()
    env = rank_environment(mpi, 2, {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path)})
    del env["NUMBA_NUM_THREADS"]  # a plain mpiexec sets none
    plain = subprocess.run(
        mpi.command(2, [sys.executable, str(SCRIPT)]),
        env=env,
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    assert plain.stdout == "['disk', 'disk'] {None}\n"
    assert len(list((tmp_path / "lowshard").iterdir())) == 1
