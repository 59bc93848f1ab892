"""A refit over two hosts, network namespaces of this machine, in which a rank is killed at each of its steps."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from support import fake_hosts, mode

from lowshard.launch import python_command, run_ranks

REASON = fake_hosts.why_not()
JOB_S = 60.0
pytestmark = [
    pytest.mark.mpi,
    pytest.mark.time_limit(150 if not mode.full() else 3600),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

HERE = Path(__file__).parent
RANKS = 6
HOSTS = ((0, 1, 2), (3, 4, 5))


def start(folder: Path, victim: int, step: int, delta: str) -> tuple[dict[str, Any], int, str]:
    """Run one job; return what its ranks noted, its exit code and what it said."""
    folder.mkdir()
    out, err = io.StringIO(), io.StringIO()
    path = os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parents[1])))
    env = {**os.environ, **fake_hosts.ENVIRONMENT, "PYTHONPATH": path}
    command = python_command(str(HERE / "run_refit_hosts.py"), [str(folder), str(victim), str(step), delta])
    with fake_hosts.fake_hosts(2) as hosts:
        spread = fake_hosts.spread(hosts, RANKS)
        result = run_ranks(command, RANKS, timeout_s=JOB_S, env=env, stdout=out, stderr=err, spread=spread)
    notes = {path.name: json.loads(path.read_text()) for path in folder.iterdir() if "draft" not in path.name}
    return notes, result.exit_code, f"{result.message}\n{out.getvalue()}\n{err.getvalue()}"


def check(notes: dict[str, Any], about: str) -> int:
    """Compare what the survivors noted; return on how many hosts two or more were compared.

    Open MPI itself ends some ranks of the other host, whose connection to the dead rank was reset: they note nothing.
    """
    left = {rank: notes[f"left-{rank}"] for rank in range(RANKS) if f"left-{rank}" in notes}
    for fields in left.values():
        assert not fields["torn"], about
        assert fields["version"] in (fields["done"], fields["trying"]), about
        assert fields["values"] in ([], [float(fields["version"])]), f"{about}: a mix of versions"
    compared = 0
    for host in HOSTS:
        versions = [left[rank]["version"] for rank in host if rank in left]
        assert len(set(versions)) <= 1, f"{about}: ranks {host} of one host are on versions {versions}"
        compared += len(versions) > 1
    return compared


@pytest.mark.full_only
@pytest.mark.parametrize("delta", ["off", "auto"])
def test_a_rank_killed_at_any_step_leaves_each_host_on_one_whole_version(tmp_path: Path, delta: str) -> None:
    tried = compared = 0
    for victim in mode.sample([0, 4], 1, "refit hosts victim"):
        notes, code, said = start(tmp_path / f"{victim}", victim, -1, delta)
        assert code == 0, said
        for host in HOSTS:  # however they ask, without a death too
            assert len({tuple(notes[f"told-{rank}"]["told"]) for rank in host}) == 1
        for step in mode.sample(range(notes["steps"]["count"]), 10, "refit hosts steps"):
            notes, code, said = start(tmp_path / f"{victim} {step}", victim, step, delta)
            assert code != 0, said
            compared += check(notes, f"rank {victim} killed at step {step}\n{said}")
            tried += 1
            if not mode.full() and tried >= 3 and compared >= 2:
                break
    print(f"{tried} steps tried, survivors of one host compared {compared} times")
    assert compared >= (tried / 2 if mode.full() else 2)  # how many survive a death is Open MPI's choice
