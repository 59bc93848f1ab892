"""Finds and ends what a job leaves behind: processes that outlive mpiexec, files in /dev/shm and /tmp.

Ranks leave mpiexec's process group (Hydra makes each a session of its own), and orphans lose their parent, so
neither says whose they are. The job directory's path in a process's environment does.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from lowshard.settings import JOB_DIR

__all__ = ["processes_of", "signal_group", "signal_process", "stray_files", "sweep_files"]

_PROC = Path("/proc")
_SHM = Path("/dev/shm")
_TMP = Path("/tmp")  # whatever TMPDIR says: Hydra has it built in

# What MPI libraries put into /dev/shm, and leave there when a rank is killed. Other names are left alone: a file that
# no process has open may still be in use, between two users, or be what the job was run for.
_SHM_NAMES = re.compile(r"^(mpich_shm_|sm_segment\.|vader_segment\.|osc_(sm|rdma)\.|ucx_shm_|psm[23]?_shm)")

# Hydra's proxy writes one for its ranks to read as they start, and forgets it when it is killed.
_HYDRA_NAMES = re.compile(r"^hydra_hwloc_xmlfile_")
_HYDRA_PROXY = "hydra_pmi_proxy"

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
        if _belongs(
            pid, job_dir
        ):  # looked up after the handle was taken: the handle cannot change its process
            signal.pidfd_send_signal(handle, number)
    except _NOT_OURS:
        return
    finally:
        os.close(handle)


def signal_group(pgid: int, number: int) -> None:
    """Signals a process group that may have ended already."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pgid, number)


def stray_files() -> frozenset[Path]:
    """Returns the files outside the job directory that an MPI library may have made."""
    found = [path for path in _listing(_SHM) if _SHM_NAMES.match(path.name)]
    found += [path for path in _listing(_TMP) if _HYDRA_NAMES.match(path.name)]
    return frozenset(found)


def sweep_files(before: Collection[Path]) -> list[Path]:
    """Removes what a job left in /dev/shm and /tmp; returns the paths.

    Only this user's files that were not there before and that no living process can want: another MPI job on
    this host maps or has open each of its own in /dev/shm, and has a living proxy for its own in /tmp.
    """
    new = sorted(path for path in stray_files().difference(before) if _is_own(path))
    if not new:
        return []
    used = _used_paths()
    proxy_lives = any(_runs(pid, _HYDRA_PROXY) for pid in _pids())
    removed = [path for path in new if (not proxy_lives if path.parent == _TMP else str(path) not in used)]
    for path in removed:
        path.unlink(missing_ok=True)
    return removed


def _listing(folder: Path) -> list[Path]:
    """Returns the entries of a folder that may not be there."""
    return list(folder.iterdir()) if folder.is_dir() else []


def _pids() -> Iterator[int]:
    """Yields the pids of all processes that this one can see."""
    for name in os.listdir(_PROC):
        if name.isdecimal():
            yield int(name)


def _runs(pid: int, name: str) -> bool:
    """Says whether a process runs a program of this name (at most 15 characters); not so a zombie."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")  # 4711 (name) S ...
    except _NOT_OURS:
        return False
    head, _, tail = text.rpartition(")")
    return head.partition("(")[2] == name and tail.split()[0] != "Z"


def _belongs(pid: int, job_dir: Path) -> bool:
    """Says whether a living process was started with the job directory in its environment."""
    mark = os.fsencode(f"{JOB_DIR.name}={job_dir}")
    try:
        return mark in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except _NOT_OURS:
        return False


def _is_own(path: Path) -> bool:
    """Says whether a regular file is there and is this user's; a link may be a stranger's, to whatever file."""
    try:
        about = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()


def _used_paths() -> set[str]:
    """Returns the files in /dev/shm that a living process maps or has open."""
    used: set[str] = set()
    for pid in _pids():
        folder = _PROC / str(pid)
        try:
            maps = (folder / "maps").read_text(errors="replace")
            if not maps:  # it is ending: its memory is gone, its files will be in a moment
                continue
            used.update(line[line.index("/dev/shm/") :] for line in maps.splitlines() if "/dev/shm/" in line)
            for link in (folder / "fd").iterdir():
                with contextlib.suppress(*_NOT_OURS):
                    used.add(os.readlink(link))
        except _NOT_OURS:
            continue
    return used
