"""What programs do with a communicator, on MPI ranks: the table of support.program_cases; and the end of a rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import mode
from support.case_table import LIMIT_S, cases_of_jobs, check_case
from support.program_cases import PROGRAMS
from support.starting import start_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(LIMIT_S + 30)]

EVERY = tuple(PROGRAMS)
SIZES = [1, 2, 3, 4, 8] if mode.full() else [4]
LONG = {"every_strategy_trains_as_one_process_does", "many_refits_leave_nothing_behind"}
SHORT = EVERY if mode.full() else tuple(name for name in EVERY if name not in LONG)
# Through MPI, through slots, and on two nodes of two ranks.
OTHER_WAYS = {
    "mpi": (3, {"LOWSHARD_CPU_PATH": "mpi"}),
    "slots": (4, {"LOWSHARD_CROSS_MEMORY": "off"}),
    "nodes": (4, {"LOWSHARD_NODE_SIZE": "2"}),
}


@pytest.mark.parametrize(("name", "size"), cases_of_jobs(SIZES, names=EVERY))
def test_programs_are_right_on_mpi_ranks(name: str, size: int) -> None:
    check_case(name, size, "cpu", EVERY)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        (name, way)
        for way in mode.sample([*OTHER_WAYS], 1, "ways of programs")
        for name, _ in cases_of_jobs([OTHER_WAYS[way][0]], names=SHORT, **OTHER_WAYS[way][1])
    ],
)
def test_programs_are_right_by_other_ways(name: str, way: str) -> None:
    size, env = OTHER_WAYS[way]
    check_case(name, size, "cpu", SHORT, **env)


@pytest.mark.full_only
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_may_end_while_a_thread_of_it_waits(size: int) -> None:
    ended = start_ranks(Path(__file__).with_name("run_ended.py"), size, timeout_s=90).ok()
    assert "MPI_" not in ended.text  # what MPI says of a call after its end
