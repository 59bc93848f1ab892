"""On several nodes: bytes between nodes are what is needed there, and ranks of one node exchange through memory."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from support import fake_hosts, mode
from support.starting import start_ranks

from lowshard.launch import python_command, run_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(130)]

HERE = Path(__file__).parent
SCRIPT = HERE / "run_transfer.py"
REASON = fake_hosts.why_not()
CHECKS = [
    "execute_goes_by_memory_within_a_node",
    "terms_are_folded_within_and_between_nodes",
    "reshards_go_by_memory_within_a_node",
    "loads_go_by_memory_within_a_node",
]


@pytest.mark.parametrize("cross", mode.sample(["auto", "off"], 1, "exchange through memory"))
def test_ranks_of_a_node_exchange_through_memory(tmp_path: Path, cross: str) -> None:
    env = {"LOWSHARD_NODE_SIZE": "2", "LOWSHARD_CROSS_MEMORY": cross}
    assert start_ranks(SCRIPT, 4, [str(tmp_path)], 100, env=env).ok().stdout.split() == CHECKS


@pytest.mark.full_only  # hosts that are only pretended are in the default tier
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_and_so_do_those_of_two_hosts(tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    path = os.pathsep.join(map(str, (HERE.parent, HERE.parents[1])))
    env = {**os.environ, **fake_hosts.ENVIRONMENT, "PYTHONPATH": path}
    command = python_command(str(SCRIPT), [str(tmp_path)])
    with fake_hosts.fake_hosts(2) as hosts:
        result = run_ranks(
            command, 4, timeout_s=100, env=env, stdout=out, stderr=err, spread=fake_hosts.spread(hosts, 4)
        )
    assert result.exit_code == 0, f"{result.message}\n{out.getvalue()}\n{err.getvalue()}"
    assert [line.removeprefix("[0] ") for line in out.getvalue().splitlines()] == CHECKS
