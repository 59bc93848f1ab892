"""Starts the launcher's command line from a test, and sees what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENDS_WITHIN_S = 5.0  # from the failure of one rank to the end of the launcher
STAYS_S = 20.0  # of what another test's job leaves for its launcher to sweep
LIMIT_S = 40.0  # for a launcher that hangs; a job that should end takes about a second
MARK = "LOWSHARD_TEST_MARK"


@dataclass(frozen=True)
class Ended:
    """How a launcher ended."""

    code: int
    out: str
    err: str
    ended_s: float


@dataclass
class Launcher:
    """Starts `python -m lowshard` with a temporary directory and a mark of its own."""

    folder: Path
    mark: str
    before: frozenset[Path]

    def __post_init__(self) -> None:
        self.tmp = self.folder / "tmp"
        self.tmp.mkdir()

    def script(self, text: str, name: str = "prog.py") -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def start(self, *args: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "lowshard", *args],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(self.tmp), MARK: self.mark, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, started: subprocess.Popen[str]) -> Ended:
        try:
            out, err = started.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            started.terminate()
            out, err = started.communicate(timeout=LIMIT_S)
            pytest.fail(f"no end within {LIMIT_S} s\n{out}\n{err}")
        return Ended(started.returncode, out, err, time.time())

    def run(self, *args: str, **env: str) -> Ended:
        return self.finish(self.start("run", *args, **env))

    def marked(self, n: int, folder: Path | None = None) -> list[int]:
        """Waits until n ranks have left their pids as files named by their ranks in a folder; returns the pids."""
        paths = [(folder or self.folder) / str(rank) for rank in range(n)]
        assert wait_until(lambda: all(path.exists() for path in paths), LIMIT_S)
        return [int(path.read_text()) for path in paths]

    def living(self) -> list[str]:
        """Returns the command lines of the processes that this test started."""
        mark = f"{MARK}={self.mark}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found

    def check_nothing_left(self) -> None:
        assert self.living() == []
        assert list(self.tmp.iterdir()) == []
        # Another MPI job on this machine may come and go meanwhile, one of another test above all, which sweeps at its
        # end: what counts is what stays.
        assert wait_until(lambda: not sweepable(self.before), STAYS_S), sweepable(self.before)


# What MPI libraries put into /dev/shm, and leave there when a rank is killed.
_MPI_FILES = re.compile(r"(mpich_shm_|sm_segment\.|osc_(sm|rdma)\.|lowshard-job-)")


def stray_files() -> frozenset[Path]:
    """Returns what MPI libraries and jobs of ours have in /dev/shm, and in /tmp what Hydra's proxy forgets there."""
    found = [path for path in Path("/dev/shm").iterdir() if _MPI_FILES.match(path.name)]
    return frozenset([*found, *Path("/tmp").glob("hydra_hwloc_xmlfile_*")])


@contextlib.contextmanager
def own_files() -> Iterator[None]:
    """Removes what a plain mpiexec leaves of a job whose ranks are killed."""
    before = stray_files()
    try:
        yield
    finally:
        for path in sweepable(before):
            if not path.is_dir():
                path.unlink(missing_ok=True)


def sweepable(before: frozenset[Path]) -> list[Path]:
    """Returns new files that no process has open, and new folders of jobs that are over."""
    new = stray_files() - before
    used: set[str] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            used.update(re.findall(r"/dev/shm/\S+", (folder / "maps").read_text()))
            jobs = re.findall(rb"LOWSHARD_JOB_DIR=[^\0]*/([^\0/]+)", (folder / "environ").read_bytes())
            used.update(f"/dev/shm/{job.decode()}" for job in jobs)
    return [path for path in new if path.parent == Path("/dev/shm") and str(path) not in used]


def wait_until(done: Callable[[], bool], limit_s: float) -> bool:
    end_s = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.05)
    return True
