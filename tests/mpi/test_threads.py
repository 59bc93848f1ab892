"""A communicator is for one thread at a time, whatever it goes over."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support.starting import start_ranks
from support.thread_cases import check_threads

from lowshard.comm import run_loopback

SCRIPT = Path(__file__).parent / "run_threads.py"


@pytest.mark.mpi
@pytest.mark.time_limit(100)
@pytest.mark.parametrize("env", [{}, {"LOWSHARD_CPU_PATH": "mpi"}, {"LOWSHARD_NODE_SIZE": "2"}], ids=str)
def test_two_threads_at_once_are_an_error_on_mpi_ranks(env: dict[str, str]) -> None:
    assert start_ranks(SCRIPT, 4, [], 90, env=env).ok().stdout == "right\n"


@pytest.mark.time_limit(60)
def test_two_threads_at_once_are_an_error_on_loopback() -> None:
    meeting = threading.Barrier(3)
    run_loopback(3, lambda comm: check_threads(comm, meeting.wait), 50)
