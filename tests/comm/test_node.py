"""The memory of a node: beside MPI over several hosts, and given back."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import mode
from support.starting import start_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(150)]

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("size", "host_size", "reads"), mode.sample([(3, 2, "auto"), (4, 2, "auto"), (5, 3, "off")], 1, "hosts")
)
def test_what_only_a_communicator_over_several_hosts_does(size: int, host_size: int, reads: str) -> None:
    env = {"LOWSHARD_CROSS_MEMORY": reads}
    ended = start_ranks(HERE / "run_hosts.py", size, [str(host_size)], timeout_s=100, env=env).ok()
    assert len(ended.stdout.split()) == 4, ended.text


@pytest.mark.parametrize("host_size", mode.sample(["", "2"], 1, "made and closed"))
def test_groups_that_are_made_and_closed_leave_nothing(host_size: str) -> None:
    times = 2000 if mode.full() else 400
    env = {"LOWSHARD_NODE_SIZE": host_size}
    ended = start_ranks(HERE / "run_made.py", 3, [str(times)], timeout_s=120, env=env).ok()
    rows = [[int(word) for word in line.split()] for line in ended.stdout.splitlines()]
    assert len(rows) == 3
    for descriptors, threads, shared_kib, resident_kib in rows:
        assert (descriptors, threads) == (0, 0), ended.text
        assert shared_kib < 1024, ended.text
        assert resident_kib < 4096, ended.text


@pytest.mark.parametrize("copies", ["cma", "none"])
def test_a_wait_in_shared_memory_lets_started_messages_go_on(copies: str) -> None:
    env = {} if copies == "cma" else {"OMPI_MCA_smsc": "^cma", "MPIR_CVAR_CH4_CMA_ENABLE": "0"}
    ended = start_ranks(HERE / "run_started.py", 2, timeout_s=60, env=env).ok()
    assert ended.stdout.count("done") == 2, ended.text
