"""The directory of a job: what the launcher and the keepers on its machine share, and the names in it."""

from __future__ import annotations

import os
import signal
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
    "make_job_dir",
    "tie_output",
]

ALIVE_NAME = "alive"  # a FIFO that the launcher holds open: its end is the launcher's end
HOSTFILE_NAME = "hosts"
STREAM_NAMES = ("stdout", "stderr")  # stdout-RANK, stderr-RANK: a FIFO each
TMP_NAME = "tmp"  # mpiexec's TMPDIR
STACK_SIGNAL = signal.SIGUSR1  # makes a rank print the stacks of its threads


def make_job_dir(folder: Path, n: int) -> Iterator[tuple[int, int | None, int]]:
    """Fills an empty folder; yields the FIFOs that it opens: (fd, rank or None, 0 for stdout or 1 for stderr).

    Raises:
        LaunchError: this process may not open so many files.
    """
    make_failure_dir(folder)
    (folder / TMP_NAME).mkdir()
    names: list[tuple[str, int | None, int]] = [(ALIVE_NAME, None, 0)]
    names += [(f"{name}-{rank}", rank, i) for rank in range(n) for i, name in enumerate(STREAM_NAMES)]
    for name, rank, stream in names:
        os.mkfifo(folder / name, mode=0o600)
        flags = os.O_RDWR if rank is None else os.O_RDONLY
        try:
            fd = os.open(folder / name, flags | os.O_NONBLOCK)
        except OSError as error:
            raise LaunchError(
                f"the launcher holds 2 files open for each of the {n} ranks, and cannot open {name}: {error}; "
                f"raise the limit (ulimit -n) or start fewer ranks"
            ) from error
        yield fd, rank, stream


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
