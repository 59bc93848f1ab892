"""Finds and ends what a job leaves behind: processes that outlive mpiexec, and files in /dev/shm.

Ranks leave mpiexec's process group (Hydra makes each a session of its own), and orphans lose their parent, so
neither says whose they are. The job directory's path in a process's environment does.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Collection, Iterator
from pathlib import Path

from lowshard.comm.abort import JOB_DIR_VARIABLE

__all__ = ["processes_of", "shm_entries", "signal_group", "signal_process", "sweep_shm"]

_PROC = Path("/proc")
_SHM = Path("/dev/shm")

# What MPI libraries and this package put into /dev/shm, and leave there when a rank is killed. Other names are
# left alone: a file that no process has open may still be in use, between two users.
_SHM_NAMES = re.compile(r"^(mpich_shm_|sm_segment\.|vader_segment\.|osc_|ucx_shm_|psm[23]?_shm|lowshard)")

# A process or a file that is gone, or another user's: neither is ours to end.
_NOT_OURS = (FileNotFoundError, ProcessLookupError, PermissionError)


def processes_of(job_dir: Path) -> list[int]:
    """Returns the pids of the living processes that were started in a job, on this host."""
    return [pid for pid in _pids() if pid != os.getpid() and _belongs(pid, job_dir)]


def signal_process(pid: int, number: int, job_dir: Path) -> None:
    """Signals a process of a job; does nothing if the pid is not, or no more, a process of that job."""
    try:
        handle = os.pidfd_open(pid)
    except _NOT_OURS:
        return
    try:
        if _belongs(pid, job_dir):  # looked up after the handle was taken: the handle cannot change its process
            signal.pidfd_send_signal(handle, number)
    except _NOT_OURS:
        return
    finally:
        os.close(handle)


def signal_group(pgid: int, number: int) -> None:
    """Signals a process group that may have ended already."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pgid, number)


def shm_entries() -> frozenset[str]:
    """Returns the names in /dev/shm that an MPI library or this package may have made."""
    if not _SHM.is_dir():
        return frozenset()
    return frozenset(name for name in os.listdir(_SHM) if _SHM_NAMES.match(name))


def sweep_shm(before: Collection[str]) -> list[str]:
    """Removes what an MPI job left in /dev/shm; returns the names.

    Only this user's files that were not there before and that no living process maps or has open: another
    MPI job on this host keeps one of the two on each of its files.
    """
    new = [name for name in sorted(shm_entries().difference(before)) if _is_own(_SHM / name)]
    if not new:
        return []
    used = _used_paths()
    removed = [name for name in new if str(_SHM / name) not in used]
    for name in removed:
        (_SHM / name).unlink(missing_ok=True)
    return removed


def _pids() -> Iterator[int]:
    """Yields the pids of all processes that this one can see."""
    for name in os.listdir(_PROC):
        if name.isdecimal():
            yield int(name)


def _belongs(pid: int, job_dir: Path) -> bool:
    """Says whether a living process was started with the job directory in its environment."""
    mark = os.fsencode(f"{JOB_DIR_VARIABLE}={job_dir}")
    try:
        return mark in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except _NOT_OURS:
        return False


def _is_own(path: Path) -> bool:
    """Says whether a file is there and is this user's."""
    try:
        return path.stat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def _used_paths() -> set[str]:
    """Returns the files in /dev/shm that a living process maps or has open."""
    used: set[str] = set()
    for pid in _pids():
        folder = _PROC / str(pid)
        try:
            for line in (folder / "maps").read_text(errors="replace").splitlines():
                if "/dev/shm/" in line:
                    used.add(line[line.index("/dev/shm/") :])
            for link in (folder / "fd").iterdir():
                with contextlib.suppress(*_NOT_OURS):
                    used.add(os.readlink(link))
        except _NOT_OURS:
            continue
    return used
