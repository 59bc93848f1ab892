"""Communicators over ranks on two hosts, which are network namespaces of this machine."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from support import fake_hosts, mode
from support.comm_cases import Way, cases_for

from lowshard.launch import python_command, run_ranks

REASON = fake_hosts.why_not()
LIMIT_S = 100.0 * (8 if mode.full() else 1)
pytestmark = [
    pytest.mark.mpi,
    pytest.mark.time_limit(LIMIT_S + 30.0),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

HERE = Path(__file__).parent
# What moves most; the others run on hosts that are only pretended (test_comm_mpi.py).
FEW = ["large_buffers_arrive_whole", "large_reductions_are_exact_where_values_allow"]


def start(script: str, *args: str) -> str:
    """Runs a script on 4 ranks, 2 a host, and returns what rank 0 prints."""
    out, err = io.StringIO(), io.StringIO()
    path = os.pathsep.join(map(str, (HERE.parent, HERE.parents[1])))
    env = {**os.environ, **fake_hosts.ENVIRONMENT, "PYTHONPATH": path}
    with fake_hosts.fake_hosts(2) as hosts:
        result = run_ranks(
            python_command(str(HERE / script), list(args)),
            4,
            timeout_s=LIMIT_S,
            env=env,
            stdout=out,
            stderr=err,
            spread=fake_hosts.spread(hosts, 4),
        )
    assert result.exit_code == 0, f"{result.message}\n{out.getvalue()}\n{err.getvalue()}"
    lines = [line.removeprefix("[0] ") for line in out.getvalue().splitlines() if line.startswith("[0] ")]
    return "\n".join(lines)


@pytest.mark.full_only
def test_a_rank_that_ends_lets_its_last_message_go() -> None:
    assert start("run_end.py") == "this rank ends"


def test_the_contract_holds_on_two_hosts() -> None:
    names = cases_for(Way(4, "mpi")) if mode.full() else FEW
    rows = [json.loads(line) for line in start("run_cases.py", "cpu", *names).splitlines()]
    assert [row["case"] for row in rows] == names
    for row in rows:
        assert not row["errors"], row
