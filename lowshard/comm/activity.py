"""What this rank is doing: the collective it is in, those before it, and the line of the program that asked.

Entering and leaving a collective must cost next to nothing, so only bytes and numbers are kept there and every text
is made when somebody wants to read it. What a rank is in also lies in a small buffer that a thread outside the
interpreter sends to the other ranks with each heartbeat: a frozen rank cannot be asked any more.
"""

from __future__ import annotations

import os
import site
import struct
import sys
import sysconfig
import threading
from collections import deque
from pathlib import Path
from time import monotonic_ns
from types import FrameType
from typing import Protocol, TextIO

__all__ = ["CALL_BYTES", "INSIDE_AT", "SEQUENCE_AT", "TEXT_BYTES", "Activity", "NamedCall", "read_text"]

TEXT_BYTES = 128
"""Bytes of the buffer."""
CALL_BYTES = 112
"""Bytes of it, from the first, that hold the call's text, padded with zeros."""
SEQUENCE_AT = 112
"""Where in it the call's number lies, an int64."""
INSIDE_AT = 120
"""Where in it a byte tells whether the rank is in the call (1) or out of it again (0)."""

_RING_CALLS = 64
_PACKAGE = Path(__file__).resolve().parents[1]
# In a checkout three folders lie beside the package, not in it.
_OURS = tuple(
    f"{folder}{os.sep}"
    for folder in (_PACKAGE, *(_PACKAGE.parent / name for name in ("kernels", "launch", "bench")))
)
_STDLIB = tuple(
    {str(Path(sysconfig.get_path(name)).resolve()) + os.sep for name in ("stdlib", "platstdlib")}
    | {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")}
)
_INSTALLED = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")}
    | {path + os.sep for path in site.getsitepackages()}
)


class NamedCall(Protocol):
    """What is known of a call before it is made: made once, passed each time."""

    @property
    def text(self) -> str:
        """The call in words, its name first: "all_reduce float64[16384]"."""

    @property
    def encoded(self) -> bytes:
        """The text in UTF-8; what is over CALL_BYTES is cut off."""


class Activity:
    """The collectives of one rank, as its communicators enter and leave them; safe to read from any thread.

    Attributes:
        text: what the rank is in or was last in, for the heartbeat: TEXT_BYTES, of a fixed form.
    """

    def __init__(self) -> None:
        self.text = bytearray(TEXT_BYTES)
        self._ring: deque[tuple[int, NamedCall, int]] = deque(maxlen=_RING_CALLS)
        self._append = self._ring.append
        self._pack = struct.Struct(f"={CALL_BYTES}sqB").pack_into

    def enter(self, call: NamedCall, sequence: int) -> None:
        """Note that this rank goes into a collective; `sequence` is its number on its communicator."""
        self._append((sequence, call, monotonic_ns()))
        self._pack(self.text, 0, call.encoded, sequence, 1)

    def leave(self) -> None:
        """Note that this rank has come out of it, whatever the end."""
        self.text[INSIDE_AT] = 0

    @property
    def now(self) -> tuple[int, NamedCall, int] | None:
        """The call that the rank is in, as (sequence, call, start in ns of the monotonic clock), or None."""
        return self._ring[-1] if self.text[INSIDE_AT] and self._ring else None

    def where(self) -> str:
        """Return what this rank is in and from which line of the program.

        "all_reduce#4 float64[16384] (train.py:31)", or "no collective (train.py:40); the last was all_reduce#4
        float64[16384]".
        """
        now = self.now
        line = user_line()
        beside = f" ({line})" if line else ""
        if now is not None:
            return _name(now) + beside
        entries = self._entries()
        last = f"; the last was {_name(entries[-1])}" if entries else ""
        return f"no collective{beside}{last}"

    def ring(self) -> list[str]:
        """Return the last 64 collectives as lines of text, oldest first."""
        now_ns = monotonic_ns()
        current = self.now
        lines = []
        for entry in self._entries():
            state = "in it now" if entry is current else "done"
            lines.append(f"{_name(entry)}: {state}, began {(now_ns - entry[2]) / 1e9:.3f} s ago")
        return lines

    def dump_ring(self, file: TextIO) -> None:
        """Print the last 64 collectives, a line each, oldest first."""
        lines = self.ring() or ["none"]
        file.write("".join(f"{line}\n" for line in ["last collectives, oldest first:", *lines]))

    def _entries(self) -> list[tuple[int, NamedCall, int]]:
        while True:
            try:
                return list(self._ring)
            except RuntimeError:  # another thread has added one meanwhile
                continue


def read_text(data: bytes) -> str:
    """Return what the TEXT_BYTES of a rank's activity say, with "(done)" where it is out of it again; "" if nothing."""
    name, space, rest = data[:CALL_BYTES].split(b"\0")[0].decode(errors="replace").partition(" ")
    if not name:
        return ""
    number = int.from_bytes(data[SEQUENCE_AT : SEQUENCE_AT + 8], sys.byteorder)
    return f"{name}#{number}{space}{rest}" + ("" if data[INSIDE_AT] else " (done)")


def user_line() -> str:
    """Return file and line where the main thread is in the user's program ("train.py:31"), or "" if nowhere.

    That is the innermost frame outside lowshard and the standard library; installed packages count only where
    there is nothing else.
    """
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    installed = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_OURS, "<frozen")):
            line = f"{os.path.basename(file)}:{frame.f_lineno}"
            if file.startswith(_INSTALLED):  # which lies in the standard library's folder
                installed = installed or line
            elif not file.startswith(_STDLIB):
                return line
        frame = frame.f_back
    return installed


def _name(entry: tuple[int, NamedCall, int]) -> str:
    """Return a call's text with its number after its name."""
    sequence, call, _ = entry
    name, space, rest = call.text.partition(" ")
    return f"{name}#{sequence}{space}{rest}"
