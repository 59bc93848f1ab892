"""Passes the output of many ranks on to one stdout and one stderr, line by line."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import TextIO

__all__ = ["Output"]

_READ_BYTES = 1 << 16
_LINE_BYTES = 1 << 20
"""What is kept of a line whose end has not come."""


class Output:
    """Takes what ranks print; each line goes out whole, with its rank in front.

    Of a line of more than 1 MiB each MiB goes out as a line; without prefixes as it is.
    mpiexec's own output is kept back until it is known whether it says anything that we do not say better.

    Attributes:
        error: what keeps output from being written, if anything does: `lowshard run ... | head`, or a full disk.
        from_mpiexec: what mpiexec itself has said so far.
        stacks: by rank, what has come on its stderr since it was asked for its stacks.
    """

    def __init__(self, files: tuple[TextIO, TextIO], prefix: bool) -> None:
        self.error: OSError | ValueError | None = None
        self.from_mpiexec = b""
        self.stacks: dict[int, bytes] = {}
        self._keeps_stacks = False
        self._files = files
        self._broken: set[int] = set()
        self._prefix = prefix
        self._partial: dict[tuple[int, int], bytearray] = {}
        self._is_quiet = True

    def keep_stacks(self) -> None:
        """Keeps what ranks write to stderr from now on: they have been asked for their stacks."""
        self._keeps_stacks = True

    def add(self, rank: int, stream: int, data: bytes) -> None:
        """Sends on the whole lines of what a rank has printed: stream 0 for stdout, 1 for stderr."""
        if self._keeps_stacks and stream == 1:
            self.stacks[rank] = self.stacks.get(rank, b"") + data
        self._is_quiet = False
        partial = self._partial.setdefault((rank, stream), bytearray())
        end = data.rfind(b"\n") + 1
        if not end and len(partial) + len(data) <= _LINE_BYTES:
            partial += data
            return
        end = end or len(data)
        text = bytes(partial) + data[:end]
        partial[:] = data[end:]
        self._put(rank, stream, text)

    def settle(self, is_over: bool = False) -> None:
        """Sends on what is no whole line, at the end; without prefixes where no more of it comes for now."""
        if is_over or (self._is_quiet and not self._prefix):
            for (rank, stream), rest in self._partial.items():
                self._put(rank, stream, bytes(rest))
                rest.clear()
        self._is_quiet = True

    def take_mpiexec(self, fds: Iterable[int]) -> None:
        """Takes what mpiexec has said on its pipes, which do not block."""
        for fd in fds:
            with contextlib.suppress(BlockingIOError):
                while data := os.read(fd, _READ_BYTES):
                    self.from_mpiexec += data

    def say(self, text: str) -> None:
        """Writes the launcher's own words to stderr, if anybody is left to read them."""
        encoding = getattr(self._files[1], "encoding", None) or "utf-8"
        self._write(1, text.encode(encoding, "backslashreplace"))

    def _put(self, rank: int, stream: int, text: bytes) -> None:
        if self._prefix and text:
            mark = b"[%d] " % rank
            text = mark + text.removesuffix(b"\n").replace(b"\n", b"\n" + mark) + b"\n"
        self._write(stream, text)

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
