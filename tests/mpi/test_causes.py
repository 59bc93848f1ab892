"""A rank leaves, fails in a thread or never comes, in each phase: its exit code and its number are told, no other.

It is a race of the rank, its keeper, the other ranks and mpiexec, so that a full run tries each ten times under each
MPI. A default run tries each way and each phase once, in pairs that rotate with the seed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from support import mode
from support.starting import Finished, start_ranks

from lowshard.launch.leftover import stray_files, sweep_files
from lowshard.launch.mpiexec import find_mpi, rank_environment

pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(110)]

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(Path(__file__).resolve().parent / "run_cause.py")
RANKS = 3
AT_A_TIME = 2
PATIENCE_S = 3.0  # the ranks' own deadline of a wait
LIMIT_S = 100.0  # the first of them may compile
BLIND_LIMITS_S = (8.0, 40.0)  # the launcher's, where nobody but it can end the job; more where it began late
INSIDE_S = 2.0  # for the fault to happen, once all ranks are there
RUNS = 10 if mode.full() else 1

PHASES = ["from_mpi", "barrier", "split", "all_reduce", "save", "refit", "refit beside", "FSDP", "MPI"]
FAULTS = {
    "thread": ["thread"],
    "exits": ["os._exit(0)"],
    "leaves": ["return", "sys.exit(0)"],
    "never": ["never"],
}
TOLD = {
    "thread": (1, r"ValueError: boom in a thread"),
    "exits": (
        70,
        r"it left with exit code 0 \(os\._exit, or an exit in a library\) while other ranks still ran",
    ),
    "leaves": (70, r"it left with exit code 0 \(its program came to its end\) while other ranks still ran"),
    "never": (71, r"rank \d waited for it in vain: lowshard\.errors\.TimedOut: rank {} did not come "),
}
CASES = [(fault, phase) for fault in FAULTS for phase in PHASES]
if not mode.full():
    turned = mode.rng("causes").permutation(PHASES).tolist()
    CASES = list(zip(FAULTS, turned, strict=False))
Case = tuple[str, str]


def run(case: Case, again: int, folder: Path) -> tuple[int, Finished]:
    """Runs the job of a case, with another victim each time; returns the victim, and how the job ended."""
    fault, phase = case
    victim, hows = (2, 0)[again % 2], FAULTS[fault]
    for limit_s in BLIND_LIMITS_S if is_blind(case) else (LIMIT_S,):
        notes = folder / f"{limit_s:g}"
        notes.mkdir(parents=True)
        done = start_ranks(
            PROGRAM,
            RANKS,
            [hows[again // 2 % len(hows)], phase, str(victim), str(notes)],
            limit_s,
            env={"LOWSHARD_TIMEOUT_S": str(PATIENCE_S)},
            prefix_output=True,
            may_time_out=True,
        )
        came_s = sorted(note.stat().st_mtime for note in notes.glob("came-*"))
        if len(came_s) == RANKS and came_s[-1] + INSIDE_S < time.time():
            break
    return victim, done


def is_blind(case: Case) -> bool:
    """Says whether all the others are inside MPI, where they learn of nothing, and no process has ended."""
    return case in (("leaves", "MPI"), ("never", "MPI"))


@pytest.fixture(scope="module")
def jobs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Case, list[Future[tuple[int, Finished]]]]]:
    """The jobs of all cases that pytest has selected, running a few at a time."""
    folder = tmp_path_factory.mktemp("cases")
    selected = mode.selected(request, "case")
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        yield {
            case: [pool.submit(run, case, again, folder / f"{number}-{again}") for again in range(RUNS)]
            for number, case in enumerate(CASES)
            if case in selected
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_the_rank_that_left_is_named_with_the_exit_code_of_what_it_did(
    case: Case, jobs: dict[Case, list[Future[tuple[int, Finished]]]]
) -> None:
    fault, _ = case
    for future in jobs[case]:
        victim, done = future.result()
        last = done.stderr.strip().splitlines()[-1]
        assert "not reached" not in done.stdout
        code, told = TOLD[fault]
        pattern = rf"lowshard run: rank {victim} failed first: {told.format(victim)}"
        if is_blind(case):
            code, pattern = 71, rf"lowshard run: the 3 ranks were still running .*[;,] rank {victim} "
            pattern += r"was in run_cause\.py:\d+" if fault == "never" else "had left with exit code 0"
        assert done.returncode == code, done.text
        assert re.match(pattern, last), done.text
        if fault == "thread":
            last_told = done.stderr.rpartition("--- rank ")[2]
            assert last_told.startswith(f"{victim}\nTraceback"), done.text


def test_who_waits_is_told_once_with_call_and_line(tmp_path: Path) -> None:
    patience = {"LOWSHARD_HEARTBEAT_S": "1.5", "LOWSHARD_TIMEOUT_S": "6"}
    args = ["never", "barrier", "2", str(tmp_path)]
    done = start_ranks(PROGRAM, RANKS, args, LIMIT_S, env=patience, prefix_output=True)
    told = [line for line in done.stderr.splitlines() if "no progress" in line]
    assert len(told) == 1, done.text
    waiting = (
        r"\[0\] rank 0 \| no progress for 1\.5 s: ranks 0, 1 waiting in barrier#2 \(run_cause\.py:\d+\); "
    )
    absent = r"rank 2 in no collective \(run_cause\.py:\d+\), the last was barrier#1"
    assert re.fullmatch(waiting + absent, told[0]), done.text


def test_plain_mpiexec_ends_the_job_and_the_others_name_the_rank_that_left(tmp_path: Path) -> None:
    mpi = find_mpi()
    command = mpi.command(RANKS, [sys.executable, PROGRAM, "return", "barrier", "1", str(tmp_path)])
    env = rank_environment(mpi, RANKS, {**os.environ, "PYTHONPATH": str(ROOT)})
    before = stray_files()
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    finally:
        sweep_files(before)  # a plain mpiexec does not
    assert done.returncode != 0
    assert re.search(r"rank [02] \| .*PeerFailed: rank 1 has ended its program", done.stdout + done.stderr), (
        done
    )
