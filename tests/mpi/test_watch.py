"""The side channel on real ranks: each way to fail, in rank 0 and another, seen by ranks that poll, wait and compute.

All jobs run once, a few at a time, and each test looks at what one of them has left: its records, its output, and
the ranks' notes.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import mode

import lowshard
from lowshard.comm.abort import FailureRecord
from lowshard.launch.job import JobResult, python_command, run_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(110)]

HERE = Path(__file__).resolve().parent
PACKAGE_PARENT = Path(lowshard.__file__).resolve().parents[1]
LIMIT_S = 2.0
AT_ONCE_S = 1.0  # milliseconds, where no other job has the cores
LATE_S = 1.5  # a limit may be noticed that much later
AT_A_TIME = 3

# How the victim fails, which rank that is, what the ranks do meanwhile; in some jobs there is no Numba.
JOBS: dict[str, tuple[str, int, str, bool]] = {
    "quiet": ("", -1, "quiet,quiet,quiet", True),
    "raise in 0": ("raise", 0, "victim,poll,barrier", False),
    # Rank 0 has ended its program before, and still passes on what happens.
    "raise in 1": ("raise", 1, "leave,victim,poll,sleep", False),
    "exit in 0": ("exit", 0, "victim,poll,barrier", False),
    "exit in 1": ("exit", 1, "poll,victim,poll", False),
    "time out in 1": ("time out", 1, "barrier,victim,poll", False),
    "SIGKILL in 0": ("SIGKILL", 0, "victim,poll,poll", False),
    "SIGKILL in 1": ("SIGKILL", 1, "hold,victim,poll", True),
    "SIGSTOP in 0": ("SIGSTOP", 0, "victim,stay,barrier", False),
    "SIGSTOP in 1": ("SIGSTOP", 1, "hold,victim,stay", True),
}
# By default rank 0 or another one exits, is killed, and another one raises, is stopped; a full run has both.
CHOSEN = {
    *JOBS.keys() - {f"{how} in {rank}" for how in ("exit", "SIGKILL", "raise", "SIGSTOP") for rank in (0, 1)},
    *(name for how in ("exit", "SIGKILL") for name in mode.sample([f"{how} in 0", f"{how} in 1"], 1, how)),
    *(["raise in 0", "SIGSTOP in 0"] if mode.full() else []),
    *("raise in 1", "SIGSTOP in 1"),
}
JOBS = {name: job for name, job in JOBS.items() if name in CHOSEN}
FAILED_IN = [name for name in JOBS if name != "quiet"]
CUT_SHORT = [name for name in FAILED_IN if {"sleep", "barrier", "hold"} & set(JOBS[name][2].split(","))]
CAUSES = {
    "raise": "rank {} failed: ValueError: boom",
    "exit": "rank {} ended its program: sys.exit(3)",
    "time out": "rank {} timed out: all_reduce#4 was not done after 30 s",
    "SIGKILL": "rank {} died (its connection closed); it was last in all_reduce#4 float64[16384]",
    "SIGSTOP": "rank {} has been silent for N s: it is frozen or its host is cut off; "
    "it was last in all_reduce#4 float64[16384]",
}
CODES = {"raise": 1, "exit": 3, "time out": 71, "SIGKILL": 70, "SIGSTOP": 70}


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


def without_seconds(text: str) -> str:
    return re.sub(r"for \d+\.\d s:", "for N s:", text)


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
    if how != "SIGSTOP":  # which leaves no record
        assert job.result.failed_rank == victim
        assert not job.record(victim).consequence  # type: ignore[union-attr]


@pytest.mark.parametrize("name", FAILED_IN)
def test_ranks_that_look_learn_of_it_in_time_and_in_the_same_words(done: dict[str, Done], name: str) -> None:
    job, (how, victim, roles, _) = done[name], JOBS[name]
    learned = job.note("learned")
    assert sorted(learned) == [
        rank for rank, role in enumerate(roles.split(",")) if role in ("poll", "stay")
    ], job.text
    failed_s = float(job.note("failed")[victim])
    for text in learned.values():
        when, error, cause = text.split(" ", 2)
        after_s = float(when) - failed_s
        if how == "SIGSTOP":  # a heartbeat may have come just before
            assert LIMIT_S - 0.3 < after_s < LIMIT_S + LATE_S
        else:
            assert after_s < AT_ONCE_S
        assert error == "PeerFailed"
        assert without_seconds(cause) == CAUSES[how].format(victim)


@pytest.mark.parametrize("name", CUT_SHORT)
def test_ranks_that_cannot_look_are_ended_and_say_why(done: dict[str, Done], name: str) -> None:
    job, (how, victim, roles, _) = done[name], JOBS[name]
    code = 71 if how == "time out" else 70
    cause = re.escape(CAUSES[how].format(victim)).replace("N\\ s", r"\d\.\d\ s")
    for rank, role in enumerate(roles.split(",")):
        where = r"this rank was in all_reduce#4 float64\[16384\]"
        if role == "hold" and how == "SIGSTOP":  # in other jobs the first cause's abort comes before
            told = rf"{cause}; {where}, where it holds the interpreter: it is ended now with exit code {code}"
        elif role in ("sleep", "barrier"):
            where += r" \(run_watch\.py:\d+\)"
            told = rf"{cause}; {where} and did not end within 0\.3 s: it ends with exit code {code}"
        else:
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


# ---- hosts apart: network namespaces stand for them, and files for MPI


class Hosts:
    """Two network namespaces with a cable between them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = [f"lsw{os.getpid()}{side}" for side in "ab"]
        self.cables = [f"lsw{os.getpid()}v{side}" for side in "ab"]
        self.ranks: list[subprocess.Popen[str]] = []

    def make(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.cables[0], "type", "veth", "peer", "name", self.cables[1])
        for number, (name, cable) in enumerate(zip(self.names, self.cables, strict=True), start=1):
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "address", "add", f"10.98.76.{number}/24", "dev", cable)
            ip("-n", name, "link", "set", "lo", "up")

    def plug(self, state: str) -> None:
        for name, cable in zip(self.names, self.cables, strict=True):
            ip("-n", name, "link", "set", cable, state)

    def start(self, places: list[int], name: str) -> Path:
        """Start a rank in each of these places; return the folder of their notes."""
        folder = self.folder / name
        folder.mkdir()
        for rank, place in enumerate(places):
            script = [
                sys.executable,
                str(HERE / "run_watch_apart.py"),
                str(rank),
                str(len(places)),
                str(folder),
            ]
            self.ranks.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", self.names[place], *script],
                    env={
                        **os.environ,
                        "PYTHONPATH": str(PACKAGE_PARENT),
                        "LOWSHARD_HEARTBEAT_S": str(LIMIT_S),
                        "LOWSHARD_ON_FAILURE": "raise",
                    },
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return folder

    def notes(self, folder: Path, name: str) -> dict[int, str]:
        """Return all ranks' notes of a name, once they are there."""
        end_s = time.monotonic() + 20.0
        paths = [folder / f"{name}-{rank}" for rank in range(3)]
        while not all(path.exists() for path in paths):
            if time.monotonic() > end_s or any(rank.poll() for rank in self.ranks):
                self.end()
                pytest.fail(
                    f"no {name} of all ranks: {[rank.stderr.read() for rank in self.ranks if rank.stderr]}"
                )
            time.sleep(0.01)
        return {rank: path.read_text() for rank, path in enumerate(paths)}

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()

    def remove(self) -> None:
        self.end()
        for rank in self.ranks:
            assert rank.stderr is not None
            rank.stderr.close()
        for name, cable in zip(self.names, self.cables, strict=True):
            # By name: a namespace lingers while a half-open connection of it does.
            subprocess.run(["ip", "-n", name, "link", "delete", cable], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    try:
        try:
            made.make()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', '') or error}")
        yield made
    finally:
        made.remove()


@pytest.mark.full_only
def test_hosts_that_are_apart_and_a_host_that_is_cut_off(hosts: Hosts) -> None:
    apart = hosts.start([0, 0, 1], "apart")
    refused = hosts.notes(apart, "refused")
    assert len(set(refused.values())) == 1
    assert re.search(
        r"rank 2 on .* reaches none of the addresses of .*\(tcp://10\.98\.76\.1:\d+: network is unreachable\)",
        refused[0],
    )
    hosts.plug("up")
    joined = hosts.start([0, 0, 1], "joined")
    hosts.notes(joined, "started")
    time.sleep(0.3)
    hosts.plug("down")
    cut_s = time.time()
    learned = hosts.notes(joined, "learned")
    (joined / "over").touch()
    for rank, silent in ((0, 2), (1, 2), (2, 0)):
        when, cause = learned[rank].split(" ", 1)
        assert LIMIT_S - 0.4 < float(when) - cut_s < LIMIT_S + LATE_S
        told = f"rank {silent} has been silent for N s: it is frozen or its host is cut off"
        assert without_seconds(cause) == told
