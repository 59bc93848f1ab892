"""A call as all ranks of a communicator must make it, and the record of what this rank has called."""

from __future__ import annotations

import contextlib
import hashlib
import os
import site
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Literal, TextIO

Check = Literal["off", "hash", "full"]
Place = tuple[str, int] | str
"""File and line of the program, or a text that names them."""

RECORD_CALLS = 64
"""Calls that are kept."""
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


@dataclass(frozen=True, slots=True)
class Call:
    """One kind of call on one communicator, made once and kept with its plan.

    Attributes:
        name: of the collective.
        text: what was asked for, without what may differ between ranks: "all_reduce float32[1024] sum".
        signature: a hash of the text and the group, positive, below 2^62.
        sent_bytes: of this rank, for the counters.
        received_bytes: the same.
        reached_bytes: of them, those that came by memory; see `Traffic.reached_bytes`.
    """

    name: str
    text: str
    signature: int
    sent_bytes: int = 0
    received_bytes: int = 0
    reached_bytes: int = 0


def signature_of(text: str, group: str) -> int:
    """Return a hash of a call in a group: the same in every process, positive, never 0."""
    digest = hashlib.blake2b(f"{group}|{text}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 2) | 1


class Activity:
    """The last calls of one rank on all of its communicators; any thread may read it.

    Attributes:
        made: the last calls, the newest at the end: the call, its number on its communicator (0 for messages), and when
            it began, on the monotonic clock.
        depth: how many calls the rank is in: a compound one has others inside.
    """

    def __init__(self) -> None:
        self.made: deque[tuple[Call, int, float]] = deque(maxlen=RECORD_CALLS)
        self.depth = 0

    def enter(self, call: Call, number: int) -> None:
        """Note that this rank goes into a call."""
        self.made.append((call, number, monotonic()))
        self.depth += 1

    def leave(self) -> None:
        """Note that this rank has come out of it, whatever the end."""
        self.depth -= 1

    def where(self) -> str:
        """Return what this rank is in, such as "all_reduce#4 float64[16384] (train.py:31)", or what it was last in.

        The line is that of the thread which asks.
        """
        if not self.made:
            return "no collective"
        call, number, _ = self.made[-1]
        if not self.depth:
            return f"no collective; the last was {_numbered(call, number)}"
        line = source_line()
        return _numbered(call, number) + (f" ({line})" if line != "?" else "")

    def lines(self) -> list[str]:
        """Return the last calls as lines of text, oldest first."""
        now_s, made = monotonic(), list(self.made)
        last = len(made) - 1 if self.depth else -1
        return [
            f"{_numbered(call, number)}: {'in it now' if i == last else 'done'}, began {now_s - began_s:.3f} s ago"
            for i, (call, number, began_s) in enumerate(made)
        ]

    def dump_ring(self, file: TextIO) -> None:
        """Print the last calls, a line each, oldest first."""
        lines = self.lines() or ["none"]
        file.write("".join(f"{line}\n" for line in ["last collectives, oldest first:", *lines]))


def _numbered(call: Call, number: int) -> str:
    """Return a call's text with its number behind its name."""
    name, space, rest = call.text.partition(" ")
    return f"{name}#{number}{space}{rest}"


# ---- lines of the program


def innermost_line(places: Iterable[tuple[str, int]]) -> str:
    """Return the first file and line of a stack, innermost first, that is the user's ("train.py:31"), or "".

    That is outside lowshard and the standard library; installed packages count only where there is nothing else.
    """
    installed = ""
    for file, number in places:
        if not file.startswith((*_OURS, "<frozen")):
            line = f"{os.path.basename(file)}:{number}"
            if file.startswith(_INSTALLED):  # which lies in the standard library's folder
                installed = installed or line
            elif not file.startswith(_STDLIB):
                return line
    return installed


class _Started(threading.local):
    """What a thread of this package knows of the program that gave it its work."""

    place: Place = ""


started = _Started()


def source_place() -> Place:
    """Return file and line of the caller outside this package, for `place_text`; cheap enough for every call.

    In a thread of this package that is where the program started what it runs.
    """
    if started.place:
        return started.place
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


@lru_cache(256)
def _is_own(file: str) -> bool:
    return file.startswith(_OURS) or file == contextlib.__file__  # where a `with` block of this package ends


def place_text(place: Place) -> str:
    """Return a place in the program as text, such as train.py:31."""
    if isinstance(place, str):
        return place
    return f"{os.path.basename(place[0])}:{place[1]}" if place[0] else "?"


def source_line() -> str:
    """Return file and line of the caller outside this package, such as train.py:31."""
    return place_text(source_place())
