"""The directory of a job: what the launcher and the keepers on its machine share, and the names in it."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lowshard.comm.abort import make_failure_dir
from lowshard.errors import LaunchError

__all__ = [
    "ALIVE_NAME",
    "HOSTFILE_NAME",
    "STACK_SIGNAL",
    "STREAM_NAMES",
    "TMP_NAME",
    "job_folder",
    "make_job_dir",
    "tie_output",
]

ALIVE_NAME = "alive"  # a FIFO that the launcher holds open: its end is the launcher's end
HOSTFILE_NAME = "hosts"
STREAM_NAMES = ("stdout", "stderr")  # stdout-RANK, stderr-RANK: a FIFO each
TMP_NAME = "tmp"  # mpiexec's TMPDIR
STACK_SIGNAL = signal.SIGUSR1  # makes a rank print the stacks of its threads


@contextlib.contextmanager
def job_folder() -> Iterator[str]:
    """Yields the path of a new private folder, which is removed in the end.

    Raises:
        LaunchError: it cannot be made.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="lowshard-job-", ignore_cleanup_errors=True)
    except OSError as error:
        raise _no_room(error) from error
    with folder as path:
        yield path


def make_job_dir(folder: Path, n: int) -> Iterator[tuple[int, int | None, int]]:
    """Fills an empty folder; yields the FIFOs that it opens: (fd, rank or None, 0 for stdout or 1 for stderr).

    Raises:
        LaunchError: there is no room for them, or this process may not open so many files.
    """
    try:
        make_failure_dir(folder)
        (folder / TMP_NAME).mkdir()
    except OSError as error:
        raise _no_room(error) from error
    names: list[tuple[str, int | None, int]] = [(ALIVE_NAME, None, 0)]
    names += [(f"{name}-{rank}", rank, i) for rank in range(n) for i, name in enumerate(STREAM_NAMES)]
    for name, rank, stream in names:
        flags = os.O_RDWR if rank is None else os.O_RDONLY
        try:
            os.mkfifo(folder / name, mode=0o600)
            fd = os.open(folder / name, flags | os.O_NONBLOCK)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise _no_room(error) from error
            raise LaunchError(
                f"the launcher holds 2 files open for each of the {n} ranks, and cannot open {name}: {error}; "
                f"raise the limit (ulimit -n) or start fewer ranks"
            ) from error
        yield fd, rank, stream


def _no_room(error: OSError) -> LaunchError:
    return LaunchError(f"a job needs a folder for its pipes: {error}; write TMPDIR=FOLDER before the command")


def tie_output(folder: Path, rank: int) -> None:
    """Ties this process's stdout and stderr to the launcher's FIFOs for a rank.

    mpiexec's own forwarding cuts and joins lines of different ranks.
    """
    for target_fd, name in enumerate(STREAM_NAMES, start=1):
        path = folder / f"{name}-{rank}"
        if not path.exists():
            continue
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # fails at once if the launcher has gone
        os.set_blocking(fd, True)
        os.dup2(fd, target_fd)
        os.close(fd)
