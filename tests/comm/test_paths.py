"""The contract on the other ways that ranks of one machine may take, and ranks that do not call."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support import barred, mode
from support.case_table import CASES, LIMIT_S, cases_of_jobs, check_case, some_cases
from support.starting import start_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(LIMIT_S + 30)]

HERE = Path(__file__).parent
F = TypeVar("F")
ABSENT_LIMIT_S = 60.0

NEW = ("memory", "start", "message", "check", "bit", "repeat")


def of(*modules: str) -> tuple[str, ...]:
    """Return the cases of some modules of the table; all of them in a full run."""
    chosen = {f"support.{module}_cases" for module in modules}
    return tuple(name for name, case in CASES.items() if mode.full() or case.__module__ in chosen)


WAYS = ["mpi", "full", "off", "barred", "own core"]
TURNS = WAYS if mode.full() else ["mpi", *mode.sample(WAYS[1:], 1, "ways through memory")]


def in_turn(way: str) -> Callable[[F], F]:
    """Leave a way to --full whose turn it is not; which ones have it rotates with the seed."""
    return (lambda function: function) if way in TURNS else pytest.mark.full_only


BY_MPI = some_cases(10, "mpi moves")


@in_turn("mpi")
@pytest.mark.parametrize(("name", "size"), cases_of_jobs([3], names=BY_MPI, LOWSHARD_CPU_PATH="mpi"))
def test_the_contract_holds_where_mpi_moves_everything(name: str, size: int) -> None:
    check_case(name, size, "cpu", BY_MPI, LOWSHARD_CPU_PATH="mpi")


FULLY_COMPARED = of("check", "group")


@in_turn("full")
@pytest.mark.parametrize(("name", "size"), cases_of_jobs([4] if mode.full() else [3], names=FULLY_COMPARED))
def test_the_contract_holds_where_ranks_compare_whole_texts(name: str, size: int) -> None:
    check_case(name, size, "cpu", FULLY_COMPARED, LOWSHARD_CHECK="full")


UNCOMPARED = of("memory", "repeat")


@in_turn("off")
@pytest.mark.parametrize(("name", "size"), cases_of_jobs([2], names=UNCOMPARED, LOWSHARD_CHECK="off"))
def test_the_contract_holds_where_ranks_compare_nothing(name: str, size: int) -> None:
    check_case(name, size, "cpu", UNCOMPARED, LOWSHARD_CHECK="off")


WITHOUT_ACROSS = of("memory", "shared", "start", "check", "repeat")


@in_turn("barred")
@pytest.mark.skipif(bool(barred.why_not()), reason=barred.why_not())
@pytest.mark.parametrize(("name", "size"), cases_of_jobs([3], names=WITHOUT_ACROSS))
def test_the_contract_holds_where_no_rank_may_read_anothers_memory(name: str, size: int) -> None:
    # Neither MPI looks whether it may.
    env = {"OMPI_MCA_smsc": "^cma", "MPIR_CVAR_CH4_CMA_ENABLE": "0", "LOWSHARD_TESTS_BARRED": "1"}
    check_case(name, size, "cpu", WITHOUT_ACROSS, **env)


@pytest.mark.full_only  # as without the right to, and it has it
@pytest.mark.parametrize(("name", "size"), cases_of_jobs([4]))
def test_the_contract_holds_where_memory_across_is_switched_off(name: str, size: int) -> None:
    check_case(name, size, "cpu", LOWSHARD_CROSS_MEMORY="off")


OF_ITS_OWN_CORE = of("memory", "bit", "repeat", "reduction")


@in_turn("own core")
@pytest.mark.parametrize(
    ("name", "size"), cases_of_jobs(mode.sample([3, 4], 1, "ranks with a core"), names=OF_ITS_OWN_CORE)
)
def test_the_contract_holds_where_each_rank_has_a_core(name: str, size: int) -> None:
    check_case(name, size, "cpu", OF_ITS_OWN_CORE, LOWSHARD_TESTS_CORES="64")


# ---- a rank that does not call


@pytest.mark.full_only
@pytest.mark.parametrize("path", mode.sample(["window", "mpi"], 1, "absent"))
def test_a_rank_that_stays_away_is_missed_in_time_on_every_call(path: str) -> None:
    env = {
        "LOWSHARD_CPU_PATH": path,
        "LOWSHARD_ON_FAILURE": "raise",
    }  # which ends a job after the first time-out
    ended = start_ranks(HERE / "run_absent.py", 3, ["late"], ABSENT_LIMIT_S, env=env)
    found = {name: rows for name, rows in map(json.loads, ended.stdout.splitlines())}
    assert len(found) == 12, ended.text
    for cls, text, took_s, _ in found.pop("many small sends"):
        assert cls in ("TimedOut", "PeerFailed", ""), text  # MPI may have room for all of them
        assert took_s < 1.5, f"sends waited for {took_s} s, the time that the other rank was asleep"
    for name, rows in found.items():
        assert len(rows) == 2
        assert "TimedOut" in [cls for cls, *_ in rows], f"{name}: {rows}"
        for cls, text, took_s, later in rows:
            assert cls in ("TimedOut", "PeerFailed"), f"{name}: {text}"  # told of the other one's first
            # MPI's own collectives do not say who is missing.
            named = path == "window" or name in ("recv", "large send", "grouped")
            assert ("rank 1 did not come" if named else "some rank did not come") in text, f"{name}: {text}"
            assert 0.3 <= took_s < 3.0, f"{name} took {took_s} s"
            assert later in ("TimedOut", "PeerFailed", "CommError"), f"after {name} a barrier gave {later!r}"


@pytest.mark.parametrize("path", mode.sample(["window", "mpi"], 1, "ended"))
def test_a_rank_that_has_ended_its_program_is_missed_long_before_the_deadline(path: str) -> None:
    ended = start_ranks(HERE / "run_absent.py", 3, ["gone"], ABSENT_LIMIT_S, env={"LOWSHARD_CPU_PATH": path})
    assert ended.returncode in (70, 71), ended.text
    ((_, ((cls, text, took_s, _),)),) = map(json.loads, ended.stdout.splitlines())
    assert cls in ("PeerFailed", "TimedOut")
    assert "rank 1" in text
    assert took_s < 15.0, f"it took {took_s} s of 20"


# Ranks that come late to make a communicator, by how much, and the others' deadline.
MISSED = [("1", "60", "2"), ("0", "60", "2"), ("1,2", "60", "3"), ("0,3", "60", "1")]
COME = [("2", "2.5", "20"), ("0", "2.5", "20"), ("1,3", "1.5", "2")]


@pytest.mark.parametrize(("late", "late_s", "timeout_s"), MISSED if mode.full() else MISSED[:1])
def test_ranks_that_do_not_come_to_make_a_communicator_are_missed_by_name(
    late: str, late_s: str, timeout_s: str
) -> None:
    rows = made(late, late_s, timeout_s)
    names = f"rank {late}" if len(late) == 1 else f"ranks {late.replace(',', ', ')}"
    if late == "0,3":
        names = "rank 0"  # who would tell of rank 3
    assert [row[0] for row in rows] == [rank for rank in range(4) if str(rank) not in late.split(",")]
    for _, name, text, took_s, _ in rows:
        assert name == "TimedOut"
        assert text.startswith(f"{names} did not come within {timeout_s} s to make a communicator"), text
        assert took_s < float(timeout_s) + 6.0


@pytest.mark.full_only
@pytest.mark.parametrize(("late", "late_s", "timeout_s"), COME)
def test_ranks_that_come_late_to_make_a_communicator_are_waited_for(
    late: str, late_s: str, timeout_s: str
) -> None:
    rows = made(late, late_s, timeout_s)
    assert [(row[0], row[1], row[4]) for row in rows] == [(rank, "", False) for rank in range(4)], rows


def made(*late: str) -> list[list[Any]]:
    """Return how each rank that was there ended, by rank."""
    ended = start_ranks(HERE / "run_absent.py", 4, ["making", *late], ABSENT_LIMIT_S, prefix_output=True)
    return sorted(json.loads(line.partition("] ")[2]) for line in ended.stdout.splitlines())


def test_the_table_has_the_cases_that_the_paths_choose_from() -> None:
    assert all(f"support.{module}_cases" in sys.modules for module in NEW)
    assert len(of(*NEW)) > 50
