"""Finds and ends what a job leaves behind: processes that outlive mpiexec.

Ranks leave mpiexec's process group (Hydra makes each a session of its own), and orphans lose their parent, so
neither says whose they are. The job directory's path in a process's environment does. What its MPI library puts into
/dev/shm lies in a folder with the job's own name (`supervisor.shared_folder`), where the library can be told.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from lowshard.settings import JOB_DIR

__all__ = ["processes_of", "signal_group", "signal_process"]

_PROC = Path("/proc")

_NOT_OURS = (FileNotFoundError, ProcessLookupError, PermissionError)  # or not any more


def processes_of(job_dir: str) -> list[int]:
    """Returns the pids of the living processes that were started in a job, on this host."""
    pids = [int(name) for name in os.listdir(_PROC) if name.isdecimal()]
    return [pid for pid in pids if pid != os.getpid() and _belongs(pid, job_dir)]


def signal_process(pid: int, number: int, job_dir: str) -> None:
    """Signals a process of a job; does nothing if the pid is not, or no more, a process of that job."""
    try:
        handle = os.pidfd_open(pid)
    except _NOT_OURS:
        return
    try:
        if _belongs(pid, job_dir):  # looked up with the handle held: it keeps to its process
            signal.pidfd_send_signal(handle, number)
    except _NOT_OURS:
        return
    finally:
        os.close(handle)


def signal_group(pgid: int, number: int) -> None:
    """Signals a process group that may have ended already."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pgid, number)


def _belongs(pid: int, job_dir: str) -> bool:
    """Says whether a living process was started with the job directory in its environment."""
    mark = os.fsencode(f"{JOB_DIR.name}={job_dir}")
    try:
        return mark in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except _NOT_OURS:
        return False
