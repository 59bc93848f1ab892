"""Finishes a keeper's work on another host, should mpiexec kill the keeper: nobody else would.

When one rank fails, mpiexec kills the keepers of all others with SIGKILL, and often that of the failed rank before it
has passed the record on. The janitor is out of mpiexec's reach (a session of its own, no child of its children). It
waits for the keeper's end, and does then what the keeper could not: it sends the rank's record over the keeper's
connection, and removes what the rank has left behind.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Collection
from pathlib import Path

from lowshard.comm.abort import read_failures
from lowshard.launch.leftover import processes_of, signal_process, sweep_files
from lowshard.launch.uplink import failure_fields

__all__ = ["dismiss_janitor", "start_janitor"]

_SEND_LIMIT_S = 2.0
_KILL_LIMIT_S = 5.0
_DONE = b"."


def start_janitor(connection_fd: int, rank: int, folder: Path, files_before: Collection[Path]) -> int:
    """Starts a rank's janitor; returns the file descriptor whose end is the keeper's end.

    Args:
        connection_fd: the keeper's connection to the launcher.
        rank: the rank.
        folder: the rank's own folder; what the rank starts has its path in the environment.
        files_before: the shared files that are not this job's.
    """
    read_fd, write_fd = os.pipe()
    middle = os.fork()
    if middle:
        os.close(read_fd)
        os.waitpid(middle, 0)
        return write_fd
    if os.fork():
        os._exit(0)
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        _close_all_but(read_fd, connection_fd)
        if os.read(read_fd, 1) != _DONE:
            _clean(connection_fd, rank, folder, files_before)
    finally:
        os._exit(0)


def dismiss_janitor(fd: int) -> None:
    """Tells the janitor that nothing is left to do."""
    os.write(fd, _DONE)
    os.close(fd)


def _clean(connection_fd: int, rank: int, folder: Path, files_before: Collection[Path]) -> None:
    """Does what the keeper did not get to."""
    end_s = time.monotonic() + _KILL_LIMIT_S
    while (left := processes_of(folder)) and time.monotonic() < end_s:  # the rank itself went with the keeper
        for pid in left:
            signal_process(pid, signal.SIGKILL, folder)
        time.sleep(0.01)
    # The keeper may have been in the middle of a line: start a new one.
    lines = [b""]
    lines += [
        json.dumps({"failure": failure_fields(record)}).encode()
        for record in read_failures(folder)
        if record.rank == rank
    ]
    _send(connection_fd, b"\n".join([*lines, json.dumps({"ended": True}).encode(), b""]))
    sweep_files(files_before)
    shutil.rmtree(folder, ignore_errors=True)


def _send(fd: int, data: bytes) -> None:
    """Sends all of it while the launcher takes it."""
    end_s = time.monotonic() + _SEND_LIMIT_S
    while data and time.monotonic() < end_s:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:
            return


def _close_all_but(*kept: int) -> None:
    """Closes every other file: mpiexec waits for the end of the ranks' output, the launcher for its connections'."""
    start = 0
    for fd in sorted(kept):
        os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, os.sysconf("SC_OPEN_MAX"))
