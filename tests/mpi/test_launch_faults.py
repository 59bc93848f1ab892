"""Ranks that freeze, keepers that die or freeze, in each phase of a job on this host; whose fault it is said to be."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from support import mode
from support.launching import ENDS_WITHIN_S, Launcher, wait_until

from lowshard import cli

pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(60)]

BEAT_S = 1.0  # the limit of silence in these tests

# Each rank leaves its pid, then waits for its end: before MPI is loaded, or in a barrier that rank 0 never enters.
WAITING = """
import os, sys, time
from pathlib import Path

phase, folder = sys.argv[1:]
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "-1")))


def sign():
    draft = Path(folder) / f"draft{rank}"
    draft.write_text(str(os.getpid()))
    draft.rename(Path(folder) / str(rank))


if phase == "start":
    sign()
    time.sleep(60)
from mpi4py import MPI

world = MPI.COMM_WORLD
world.Barrier()
sign()
if phase == "idle" or world.rank == 0:
    time.sleep(60)
world.Barrier()
"""

STOPPED = r"has been stopped \(SIGSTOP\) for 1\.\d s"
UNHEARD = r"its keeper on \S+ has not been heard of for 1\.\d s"
KILLED = r"its keeper on \S+ \(process {}\) was killed"

# Phase, who gets which signal, what is told of it.
FAULTS = [
    ("start", "rank", "SIGSTOP", STOPPED),
    ("mpi", "rank", "SIGSTOP", STOPPED),
    ("mpi", "keeper", "SIGSTOP", UNHEARD),
    ("start", "keeper", "SIGKILL", KILLED),
]
if mode.full():
    FAULTS += [
        ("idle", "rank", "SIGSTOP", STOPPED),
        ("start", "keeper", "SIGSTOP", UNHEARD),
        ("idle", "keeper", "SIGKILL", KILLED),
        ("mpi", "keeper", "SIGKILL", KILLED),
    ]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_what_mpi_does_not_notice_ends_the_job_in_every_phase_and_names_the_rank(launcher: Launcher) -> None:
    script = launcher.script(WAITING)
    jobs = []  # all at once: most of their time they wait
    for number, (phase, *_) in enumerate(FAULTS):
        folder = launcher.folder / f"job{number}"
        folder.mkdir()
        started = launcher.start(
            "run", "-n", "2", script, phase, str(folder), LOWSHARD_HEARTBEAT_S=str(BEAT_S)
        )
        jobs.append((folder, started))
    told = []
    for (folder, started), (phase, who, name, text) in zip(jobs, FAULTS, strict=True):
        pid = launcher.marked(2, folder)[1]
        if who == "keeper":
            pid = parent_of(pid)
        os.kill(pid, getattr(signal, name))
        told.append((started, f"{phase} {who} {name}", text.format(pid), time.time()))
    for started, case, text, sent_s in told:
        done = launcher.finish(started)
        assert done.code == 70, f"{case}\n{done.err}"
        last = done.err.strip().splitlines()[-1]
        assert re.match(rf"lowshard run: rank 1 failed first: {text}", last), f"{case}\n{done.err}"
        assert done.ended_s - sent_s < BEAT_S + ENDS_WITHIN_S + 2.0 * len(jobs), case


def test_an_abort_by_the_program_itself_has_its_number_as_the_exit_code(launcher: Launcher) -> None:
    script = launcher.script(
        "import time\n"
        "from mpi4py import MPI\n"
        "MPI.COMM_WORLD.Barrier()\n"
        "if MPI.COMM_WORLD.rank == 1:\n"
        "    MPI.COMM_WORLD.Abort(7)\n"
        "time.sleep(60)\n"
    )
    done = launcher.run("-n", "2", script)
    assert done.code == 7, done.err


def test_a_host_that_never_starts_its_ranks_is_given_up(launcher: Launcher) -> None:
    shell = launcher.folder / "shell"
    shell.write_text("#!/bin/sh\nexec sleep 60\n")
    shell.chmod(0o755)
    done = launcher.run(
        "-n", "2", "--hosts", "192.0.2.99", "--ssh", str(shell), launcher.script("pass"), LOWSHARD_START_S="1"
    )
    assert done.code == 70, done.err
    last = done.err.strip().splitlines()[-1]
    assert "rank 0 failed first: nothing was heard of it within 1 s of the start (LOWSHARD_START_S)" in last
    assert wait_until(lambda: not launcher.living(), ENDS_WITHIN_S)


def test_this_host_may_be_named_like_any_other(launcher: Launcher) -> None:
    script = launcher.script(
        "import os\nfrom mpi4py import MPI\nprint(MPI.COMM_WORLD.size, os.environ['MY_OWN'])\n"
    )
    hostfile = launcher.folder / "hosts"
    hostfile.write_text("localhost slots=2 # this one\n")
    done = launcher.run("-n", "2", "--hostfile", str(hostfile), script, MY_OWN="x")
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == ["[0] 2 x", "[1] 2 x"]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["-n", "3", "--hosts", "a:1,b:1", __file__], "-n 3 is more than the 2"),
        (["-n", "1", "--hosts", "a b", __file__], "is not a host"),
        (
            ["-n", "1", "--hostfile", "/no/such/file", __file__],
            "/no/such/file is not a valid hostfile",
        ),
    ],
)
def test_hosts_that_cannot_be_are_wrong_usage(
    args: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", *args]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert "Traceback" not in err


def test_a_limit_that_is_no_number_is_wrong_usage(launcher: Launcher) -> None:
    done = launcher.run("-n", "1", launcher.script("pass"), LOWSHARD_HEARTBEAT_S="soon")
    assert done.code == 2
    assert "LOWSHARD_HEARTBEAT_S is a positive number of seconds, got 'soon'" in done.err
