"""The side channel on real ranks: each way to fail, in rank 0 and another, seen by ranks that poll, wait and compute.

All jobs run once, a few at a time, and each test looks at what one of them has left: its records, its output, and
the ranks' notes.
"""

from __future__ import annotations

import io
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

import lowshard
from lowshard.comm.abort import FailureRecord
from lowshard.launch.job import JobResult, python_command, run_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(110)]

HERE = Path(__file__).resolve().parent
PACKAGE_PARENT = Path(lowshard.__file__).resolve().parents[1]
LIMIT_S = 2.0
AT_ONCE_S = 1.0  # milliseconds, where no other job has the cores
AT_A_TIME = 3

# How the victim fails, which rank that is, what the ranks do meanwhile; in some jobs there is no Numba.
JOBS: dict[str, tuple[str, int, str, bool]] = {
    "quiet": ("", -1, "quiet,quiet,quiet", True),
    # Rank 0 has ended its program before, and still passes on what happens.
    "raise in 1": ("raise", 1, "leave,victim,poll,sleep", False),
    "exit in 1": ("exit", 1, "poll,victim,poll", False),
    "time out in 1": ("time out", 1, "barrier,victim,poll", False),
    "SIGKILL in 0": ("SIGKILL", 0, "victim,poll,barrier", True),
    "SIGKILL in 1": ("SIGKILL", 1, "poll,victim,poll", False),
}
FAILED_IN = [name for name in JOBS if name != "quiet"]
CUT_SHORT = [name for name in FAILED_IN if {"sleep", "barrier"} & set(JOBS[name][2].split(","))]
CAUSES = {
    "raise": "rank {} failed: ValueError: boom",
    "exit": "rank {} ended its program: sys.exit(3)",
    "time out": "rank {} timed out: all_reduce#4 was not done after 30 s",
    "SIGKILL": "rank {} died (its connection closed); it was last in all_reduce#4 float64[16384]",
}
CODES = {"raise": 1, "exit": 3, "time out": 71, "SIGKILL": 70}


@dataclass(frozen=True)
class Done:
    """A job that has ended.

    Attributes:
        result: as the launcher saw it.
        text: all output.
        folder: of the ranks' notes.
    """

    result: JobResult
    text: str
    folder: Path

    def note(self, name: str) -> dict[int, str]:
        """Return what the ranks noted under a name."""
        return {int(path.name.split("-")[1]): path.read_text() for path in self.folder.glob(f"{name}-*")}

    def record(self, rank: int) -> FailureRecord | None:
        """Return the record of a rank, if it left one."""
        return next((record for record in self.result.failures if record.rank == rank), None)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """All jobs, after their end."""
    notes = tmp_path_factory.mktemp("notes")

    def run(name: str) -> Done:
        how, victim, roles, numba = JOBS[name]
        folder = notes / name
        folder.mkdir()
        out = io.StringIO()
        added = {"LOWSHARD_HEARTBEAT_S": str(LIMIT_S), "PYTHONPATH": str(PACKAGE_PARENT)}
        if not numba:
            # Code that was compiled before is not found either.
            added |= {"LOWSHARD_TEST_WITHOUT_NUMBA": "1", "LOWSHARD_SHIPPED_CODE": "off"}
            added["NUMBA_CACHE_DIR"] = str(notes / "empty")
        result = run_ranks(
            python_command(str(HERE / "run_watch.py"), [how, str(victim), roles, str(folder)]),
            len(roles.split(",")),
            timeout_s=60.0,
            env={**os.environ, **added},
            stdout=out,
            stderr=out,
            grace_s=4.0,  # so that it is the ranks themselves that end the job
        )
        return Done(result, out.getvalue(), folder)

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return dict(zip(JOBS, pool.map(run, JOBS), strict=True))


def test_ranks_that_hold_the_interpreter_and_ranks_that_end_early_raise_no_alarm(
    done: dict[str, Done],
) -> None:
    job = done["quiet"]
    assert job.result.exit_code == 0, job.text
    assert sorted(job.note("ended")) == [0, 1, 2]
    assert "silent" not in job.text


@pytest.mark.parametrize("name", FAILED_IN)
def test_the_job_ends_with_the_first_cause_and_names_the_rank(done: dict[str, Done], name: str) -> None:
    job, (how, victim, _, _) = done[name], JOBS[name]
    assert job.result.exit_code == CODES[how], job.text
    assert f"rank {victim} " in job.result.message, job.text
    assert job.result.failed_rank == victim
    assert not job.record(victim).consequence  # type: ignore[union-attr]


@pytest.mark.parametrize("name", FAILED_IN)
def test_ranks_that_look_learn_of_it_in_time_and_in_the_same_words(done: dict[str, Done], name: str) -> None:
    job, (how, victim, roles, _) = done[name], JOBS[name]
    learned = job.note("learned")
    assert sorted(learned) == [rank for rank, role in enumerate(roles.split(",")) if role == "poll"], job.text
    failed_s = float(job.note("failed")[victim])
    for text in learned.values():
        when, error, cause = text.split(" ", 2)
        assert float(when) - failed_s < AT_ONCE_S
        assert error == "PeerFailed"
        assert cause == CAUSES[how].format(victim)


@pytest.mark.parametrize("name", CUT_SHORT)
def test_ranks_that_cannot_look_are_ended_and_say_why(done: dict[str, Done], name: str) -> None:
    job, (how, victim, roles, _) = done[name], JOBS[name]
    code = 71 if how == "time out" else 70
    where = r"this rank was in all_reduce#4 float64\[16384\] \(run_watch\.py:\d+\)"
    told = rf"{re.escape(CAUSES[how].format(victim))}; {where} .*: it ends with exit code {code}"
    for rank, role in enumerate(roles.split(",")):
        if role not in ("sleep", "barrier"):
            continue
        assert re.search(rf"^\[{rank}\] rank {rank} \| {told}$", job.text, re.MULTILINE), job.text
        record = job.record(rank)
        assert record is not None
        assert (record.exit_code, record.consequence, record.kind) == (code, True, "exit")
        assert re.fullmatch(told, record.message)


def test_rank_0_passes_failures_on_after_its_own_end(done: dict[str, Done]) -> None:
    job = done["raise in 1"]
    assert sorted(job.note("ended")) == [0]
    assert sorted(job.note("learned")) == [2]
    record = job.record(0)  # of mpiexec's sweep, or of its forced end
    assert record is None or record.consequence


def test_after_a_time_out_every_rank_shows_where_it_is(done: dict[str, Done]) -> None:
    text = done["time out in 1"].text
    for rank in range(3):
        assert f"rank {rank} | time-out report: this rank is in all_reduce#4" in text
    assert re.search(r"rank 0 \|   File .*run_watch\.py\", line \d+ in main", text)
