"""Passes the output of many ranks on to one stdout and one stderr, line by line."""

from __future__ import annotations

import os
import selectors
import time
from typing import TextIO

__all__ = ["Output"]

_READ_BYTES = 1 << 16
_LINE_BYTES = 1 << 20
"""What is kept of a line whose end has not come."""
_MOST_LEFT_BYTES = 16 << 20
"""More than the kernel holds of what has ended; what has escaped the job may write for ever."""


class Output:
    """Reads the pipes of all ranks; each line goes out whole, with its rank in front.

    Of a line of more than 1 MiB each MiB goes out as a line; without prefixes as it is.
    mpiexec's own output is kept back until it is known whether it says anything that we do not say better.

    Attributes:
        error: what keeps output from being written, if anything does: `lowshard run ... | head`, or a full disk.
        from_mpiexec: what mpiexec itself has said so far.
        from_afar: the connections of ranks on other hosts that have not ended yet.
        stacks: by rank, what has come on its stderr since it was asked for its stacks.
    """

    def __init__(self, files: tuple[TextIO, TextIO], prefix: bool) -> None:
        self.error: OSError | ValueError | None = None
        self.from_mpiexec = b""
        self.from_afar: set[int] = set()
        self.stacks: dict[int, bytes] = {}
        self._keeps_stacks = False
        self._files = files
        self._broken: set[int] = set()
        self._prefix = prefix
        self._selector = selectors.DefaultSelector()
        self._source: dict[int, tuple[int, int | None]] = {}
        self._partial: dict[int, bytearray] = {}

    def add(self, fd: int, stream: int, rank: int | None, from_afar: bool = False) -> None:
        """Watches a pipe: stream 0 for stdout, 1 for stderr; rank None for mpiexec's own.

        One from afar is a connection, which this object closes.
        """
        if from_afar:
            self.from_afar.add(fd)
        os.set_blocking(fd, False)
        self._selector.register(fd, selectors.EVENT_READ)
        self._source[fd] = (stream, rank)
        self._partial[fd] = bytearray()

    def keep_stacks(self) -> None:
        """Keeps what ranks write to stderr from now on: they have been asked for their stacks."""
        self._keeps_stacks = True

    def pump(self, wait_s: float) -> bool:
        """Passes on what is there, waiting a while for the first of it; returns whether anything came."""
        if not self._selector.get_map():
            time.sleep(wait_s)
        came = False
        for key, _ in self._selector.select(wait_s):
            try:
                data = os.read(key.fd, _READ_BYTES)
            except OSError:  # a connection to a host that was cut off
                data = b""
            came = came or bool(data)
            if not data:  # every writer has closed it
                self._selector.unregister(key.fd)
            self._pass_on(key.fd, data)
            if not data and key.fd in self.from_afar:
                self.from_afar.remove(key.fd)
                os.close(key.fd)
        if not came and not self._prefix:  # a prompt or a progress bar: no more of the line is coming for now
            for fd, rest in self._partial.items():
                self._write(self._source[fd][0], bytes(rest))
                rest.clear()
        return came

    def close(self) -> None:
        """Passes on what is left; to be called when no process of the job lives."""
        for _ in range(_MOST_LEFT_BYTES // _READ_BYTES):
            if not self.pump(0):
                break
        for key in list(self._selector.get_map().values()):
            self._pass_on(key.fd, b"")
        self._selector.close()
        while self.from_afar:
            os.close(self.from_afar.pop())

    def _pass_on(self, fd: int, data: bytes) -> None:
        """Sends on the whole lines; empty data means that the pipe has ended."""
        stream, rank = self._source[fd]
        if rank is None:
            self.from_mpiexec += data
            return
        if self._keeps_stacks and stream == 1:
            self.stacks[rank] = self.stacks.get(rank, b"") + data
        partial = self._partial[fd]
        end = data.rfind(b"\n") + 1
        is_whole = not data or len(partial) + len(data) > _LINE_BYTES
        if not end and not is_whole:
            partial += data
            return
        end = end or len(data)
        text = bytes(partial) + data[:end]
        partial[:] = data[end:]
        if self._prefix and text:
            mark = b"[%d] " % rank
            text = mark + text.removesuffix(b"\n").replace(b"\n", b"\n" + mark) + b"\n"
        self._write(stream, text)

    def say(self, text: str) -> None:
        """Writes the launcher's own words to stderr, if anybody is left to read them."""
        encoding = getattr(self._files[1], "encoding", None) or "utf-8"
        self._write(1, text.encode(encoding, "backslashreplace"))

    def _write(self, stream: int, data: bytes) -> None:
        """Writes to a file, in bytes where it takes them; whoever has read enough of one reads no more of the other."""
        if not data or stream in self._broken or isinstance(self.error, BrokenPipeError):
            return
        file = self._files[stream]
        try:
            file.flush()
            buffer = getattr(file, "buffer", None)
            if buffer is None:
                file.write(data.decode(errors="replace"))
            else:
                buffer.write(data)
            file.flush()
        except (OSError, ValueError) as error:  # ValueError: a file that is closed
            self.error = self.error or error
            self._broken.add(stream)
