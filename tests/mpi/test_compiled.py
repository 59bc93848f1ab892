"""Compiled code is one for all jobs of a machine, however many ranks they have and whoever starts them."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support.starting import start_ranks

from lowshard.launch.mpiexec import find_mpi, rank_environment

pytestmark = pytest.mark.mpi

SCRIPT = Path(__file__).parent / "run_compiled.py"
ROOT = SCRIPT.parents[2]


@pytest.mark.full_only
@pytest.mark.time_limit(180)
def test_jobs_of_every_size_and_plain_mpiexec_share_one_folder(tmp_path: Path) -> None:
    said = [
        start_ranks(SCRIPT, n, [], 50, env={"NUMBA_CACHE_DIR": str(tmp_path)}).ok().stdout for n in (1, 2)
    ]
    assert said[0].startswith("['compiled']")
    assert [text.partition("]")[0].count("disk") for text in said] == [0, 2]
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


@pytest.mark.time_limit(400)
def test_a_first_program_compiles_nothing_where_code_came_with_it_and_a_second_start_never_does(
    tmp_path: Path,
) -> None:
    """Four ranks, an exchange and a sum, from an empty cache; a checkout that has changed since compiles once."""
    came, spent_s = [], []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        job = start_ranks(
            SCRIPT.with_name("run_first.py"), 4, [], 180, env={"NUMBA_CACHE_DIR": str(tmp_path)}
        )
        origins = json.loads(job.ok().stdout)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        came.append(origins)
    compiled = [name for name, found in came[0].items() if set(found) - {"shipped"}]
    for name in compiled:
        assert sorted(came[0][name]) == ["compiled", "disk", "disk", "disk"], "each by one rank"
    assert len(list(tmp_path.rglob("*.o"))) == len(compiled)
    assert {origin for found in came[1].values() for origin in found} <= {"disk", "shipped"}
    if not compiled:
        assert spent_s[0] < 20  # of processor time, all ranks and the launcher
