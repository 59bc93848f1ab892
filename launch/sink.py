"""Where one stream of a job's output goes, written so that the launcher never waits in the write itself.

A reader may stop reading for as long as it likes. Only between two writes does the launcher wait for it, and there it
looks whether the job is to end.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import stat
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

__all__ = ["Sink"]

_TICK_MS = 50


class Sink:
    """A text file, written to in bytes where it takes bytes.

    Attributes:
        error: what the file has raised. From then on all that comes is dropped.
        is_cut: whether a reader was given up that took no more. From then on all that comes is dropped.
    """

    def __init__(self, file: TextIO, wait_until: Callable[[], float]) -> None:
        """Writes nothing yet.

        Args:
            file: what to write to.
            wait_until: says, each time that a write waits for its reader, until when it may (`time.monotonic`).
        """
        self.error: OSError | ValueError | None = None
        self.is_cut = False
        self._file = file
        self._wait_until = wait_until

    def write(self, data: bytes) -> None:
        """Writes all of it, if the file takes it."""
        if not data or self.error is not None or self.is_cut:
            return
        try:
            self._file.flush()
            fd = _fd_below(self._file)
            if fd is not None:
                self._write_to(fd, data)
                return
            buffer = getattr(self._file, "buffer", None)
            if buffer is None:
                self._file.write(data.decode(errors="replace"))
            else:
                buffer.write(data)
            self._file.flush()
        except (OSError, ValueError) as error:  # ValueError: a file that is closed
            self.error = error

    def write_text(self, text: str) -> None:
        """Writes the launcher's own words."""
        has_bytes = getattr(self._file, "buffer", None) is not None
        encoding = getattr(self._file, "encoding", None) if has_bytes else None
        self.write(text.encode(encoding or "utf-8", "backslashreplace"))

    def _write_to(self, fd: int, data: bytes) -> None:
        """Writes to a file of the system."""
        left = memoryview(data)
        with _writing_end(fd) as (end, most):
            room = select.poll()
            room.register(end, select.POLLOUT)
            while left:
                while not room.poll(0):
                    if time.monotonic() > self._wait_until():
                        self.is_cut = True
                        return
                    room.poll(_TICK_MS)
                with contextlib.suppress(BlockingIOError):  # another writer has taken the room
                    left = left[os.write(end, left[:most]) :]


def _fd_below(file: TextIO) -> int | None:
    """Returns the descriptor that a file's bytes go to as they are; None where something else is between."""
    buffer = getattr(file, "buffer", None)
    raw = buffer.raw if type(buffer) is io.BufferedWriter else buffer
    return raw.fileno() if isinstance(file, io.TextIOWrapper) and isinstance(raw, io.FileIO) else None


@contextlib.contextmanager
def _writing_end(fd: int) -> Iterator[tuple[int, int]]:
    """Yields a descriptor of the same file, and how many bytes it takes without a wait once it has room.

    A pipe or a terminal is opened anew, in non-blocking mode. Set on the descriptor itself, that mode would hold for
    all processes that share it.
    """
    mode = os.fstat(fd).st_mode
    end, most = fd, sys.maxsize if stat.S_ISREG(mode) else select.PIPE_BUF
    if stat.S_ISFIFO(mode) or os.isatty(fd):
        with contextlib.suppress(OSError):  # another user's, or no reader is left
            end = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            most = sys.maxsize
    try:
        yield end, most
    finally:
        if end != fd:
            os.close(end)
