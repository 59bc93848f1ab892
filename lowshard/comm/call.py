"""A collective call as all ranks of a communicator must make it, and the record of what this rank is doing.

The record has the collective that the rank is in, those before it, and the line of the program that asked. Entering
and leaving a collective must cost next to nothing, so only bytes and numbers are kept there and every text is made
when somebody wants to read it. Compiled calls write them too. What a rank is in also lies in a small buffer that a
thread outside the interpreter sends to the other ranks with each heartbeat: a frozen rank cannot be asked any more.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import os
import re
import site
import struct
import sys
import sysconfig
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from time import monotonic_ns
from types import FrameType
from typing import Any, Literal, Protocol, TextIO

Check = Literal["off", "hash", "full"]
ENCODED_BYTES = 96
"""Of a call's text, in the record."""

TEXT_BYTES = 192
"""Bytes of the buffer."""
CALL_BYTES = 112
"""Bytes of it, from the first, that hold the call's text, padded with zeros."""
SEQUENCE_AT = 112
"""Where in it the call's number lies, an int64."""
INSIDE_AT = 120
"""Where in it a byte tells whether the rank is in the call (1) or out of it again (0)."""
WAITED_AT = 128
"""Where in it the time lies that the rank had been in the call when `note_wait` was called last, an int64 in ns."""
PLACE_AT = 136
"""Where in it the line of the program then begins, padded with zeros."""

NO_BUFFER = -1
"""Elements of a buffer that a call does not have."""

RING_CALLS = 64
"""Calls that are kept."""
RING_WORDS = 3
"""Of each: its name's number, its own number on its communicator, when it began (monotonic clock, in ns)."""
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

_ROW = re.compile(rb'^  File "(.*)", line (\d+) in (.*)', re.MULTILINE)
_ESCAPED = re.compile(r"\\(x|u|U000)([0-9a-f]{2,5})")


class NamedCall(Protocol):
    """What is known of a call before it is made: made once, passed each time."""

    @property
    def text(self) -> str:
        """The call in words, its name first: "all_reduce float64[16384]"."""

    @property
    def encoded(self) -> bytes:
        """The text in UTF-8; what is over CALL_BYTES is cut off."""


@dataclass(frozen=True)
class Name:
    """A call's name without the call, which keeps buffers and a communicator alive."""

    text: str
    encoded: bytes


@dataclass(eq=False)
class Call:
    """One kind of call on one communicator, made once and kept: repeated calls only look it up.

    Attributes:
        name: of the collective.
        text: what was asked for, without what may differ between ranks: "all_reduce float32[1024] sum".
        signature: a hash of the text and the group, positive, below 2^62.
        elems: of the buffers that are sent and written; NO_BUFFER where there is none.
        sent_bytes: of this rank, for the counters.
        received_bytes: the same.
        reached_bytes: of them, those that came by memory; see `Traffic.reached_bytes`.
        run: does it, from the buffers that the public method was given.
        uses: calls that the counters have not added up yet.
        spans: of an exchange: counts and displacements sent, then received.
        prepared: what a transport keeps of it: its row, or its spans made ready.
        record: what the record of calls keeps of it.
    """

    name: str
    text: str
    signature: int
    elems: tuple[int, int] = (NO_BUFFER, NO_BUFFER)
    sent_bytes: int = 0
    received_bytes: int = 0
    reached_bytes: int = 0
    run: Callable[..., Any] = field(default=lambda *buffers: None, repr=False)
    uses: int = 0
    spans: tuple[Sequence[int], ...] = ()
    prepared: Any = field(default=None, repr=False)
    record: Name = field(init=False)

    def __post_init__(self) -> None:
        self.record = Name(self.text, self.text.encode()[:ENCODED_BYTES])


def signature_of(text: str, group: str) -> int:
    """Return a hash of a call in a group: the same in every process, positive, never 0."""
    digest = hashlib.blake2b(f"{group}|{text}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 2) | 1


class Activity:
    """The collectives of one rank, as its communicators enter and leave them; safe to read from any thread.

    Attributes:
        text: what the rank is in or was last in, for the heartbeat: TEXT_BYTES, of a fixed form.
        text_address: of it.
        ring_address: of RING_CALLS x RING_WORDS int64, taken in turn.
        count_address: of an int64, the calls so far: the next goes to that place of the ring, modulo its length.
    """

    def __init__(self) -> None:
        words = array("q", bytes(TEXT_BYTES + 8 * (1 + RING_CALLS * RING_WORDS)))
        self.text_address = words.buffer_info()[0]
        self.count_address = self.text_address + TEXT_BYTES
        self.ring_address = self.count_address + 8
        self._count = memoryview(words)[TEXT_BYTES // 8 :]
        self.text = memoryview(words).cast("B")[:TEXT_BYTES]
        self._ring = self._count[1:]
        # Names of calls that come through here lie beside the ring; those of compiled calls have numbers above.
        self._beside: list[NamedCall | None] = [None] * RING_CALLS
        self._named: dict[int, NamedCall] = {}
        self._next = RING_CALLS
        self._forgotten: set[int] = set()
        self._pack = struct.Struct(f"={CALL_BYTES}sqB").pack_into
        self._pack_wait = struct.Struct(f"=q{TEXT_BYTES - PLACE_AT}s").pack_into
        self._pack_ring = struct.Struct("=qqq").pack_into
        self._ring_bytes = self._ring.cast("B")

    def enter(self, call: NamedCall, sequence: int) -> None:
        """Note that this rank goes into a collective; `sequence` is its number on its communicator."""
        count = self._count[0]
        place = count % RING_CALLS
        self._beside[place] = call
        self._pack_ring(self._ring_bytes, 8 * RING_WORDS * place, place, sequence, monotonic_ns())
        self._count[0] = count + 1
        self._pack(self.text, 0, call.encoded, sequence, 1)

    def name(self, call: NamedCall) -> int:
        """Return a number that stands for a call in the ring, for compiled calls, until `forget`."""
        self._next += 1
        self._named[self._next] = call
        return self._next

    def forget(self, numbers: Iterable[int]) -> None:
        """Take back numbers; the ring knows those it has for as long as it has them."""
        self._forgotten.update(numbers)
        in_ring = set(self._ring[::RING_WORDS])
        for number in self._forgotten - in_ring:
            self._named.pop(number, None)
        self._forgotten &= in_ring

    def leave(self) -> None:
        """Note that this rank has come out of it, whatever the end."""
        self.text[INSIDE_AT] = 0

    def note_wait(self) -> None:
        """Note beside the call how long this rank has been in it, and the line of the program; not at each call."""
        now = self.now
        waited_ns = 0 if now is None else monotonic_ns() - now[2]
        self._pack_wait(self.text, WAITED_AT, waited_ns, user_line().encode()[-(TEXT_BYTES - PLACE_AT) :])

    @property
    def now(self) -> tuple[int, NamedCall, int] | None:
        """The call that the rank is in, as (sequence, call, start in ns of the monotonic clock), or None."""
        count = self._count[0]
        return self._entry(count - 1) if self.text[INSIDE_AT] and count else None

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
            state = "in it now" if entry == current else "done"
            lines.append(f"{_name(entry)}: {state}, began {(now_ns - entry[2]) / 1e9:.3f} s ago")
        return lines

    def dump_ring(self, file: TextIO) -> None:
        """Print the last 64 collectives, a line each, oldest first."""
        lines = self.ring() or ["none"]
        file.write("".join(f"{line}\n" for line in ["last collectives, oldest first:", *lines]))

    def _entries(self) -> list[tuple[int, NamedCall, int]]:
        count = self._count[0]
        entries = [(i, self._entry(i)) for i in range(max(0, count - RING_CALLS), count)]
        # Another thread may have gone on meanwhile, and be writing the next.
        first = self._count[0] - RING_CALLS + (self._count[0] > count)
        return [entry for i, entry in entries if i >= first and entry is not None]

    def _entry(self, index: int) -> tuple[int, NamedCall, int] | None:
        at = index % RING_CALLS
        name, sequence, began_ns = self._ring[RING_WORDS * at : RING_WORDS * (at + 1)]
        call = self._beside[name] if name < RING_CALLS else self._named.get(name)
        return None if call is None else (sequence, call, began_ns)


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
    return innermost_line(row[:2] for row in stack_of(threading.main_thread().ident or 0))


def stack_of(thread: int) -> list[tuple[str, int, str]]:
    """Return file, line and function of a thread's innermost 100 frames, innermost first.

    faulthandler reads it in one go. Python's frame objects are no way to look at another thread: garbage may be
    collected while one is made, the thread runs on meanwhile, and whatever lies on its stack then is taken for a frame
    (Python 3.11).
    """
    with open(os.memfd_create("lowshard-stack", os.MFD_CLOEXEC), "w+b") as file:
        faulthandler.dump_traceback(file.fileno(), all_threads=thread != threading.get_ident())
        file.seek(0)
        dump = file.read()
    found = re.search(rb"^(?:Stack|Thread 0x0*%x) .*\n((?:  File .*\n)*)" % thread, dump, re.MULTILINE)
    rows = _ROW.findall(found[1]) if found else []
    # It writes ASCII, and other characters as Python's literals have them.
    return [(_plain(file), int(line), _plain(name)) for file, line, name in rows]


def _plain(text: bytes) -> str:
    return _ESCAPED.sub(lambda code: chr(int(code[2], 16)), text.decode())


def innermost_line(places: Iterable[tuple[str, int]]) -> str:
    """Return the first file and line of a stack, innermost first, that is the user's, as `user_line` does."""
    installed = ""
    for file, number in places:
        if not file.startswith((*_OURS, "<frozen")):
            line = f"{os.path.basename(file)}:{number}"
            if file.startswith(_INSTALLED):  # which lies in the standard library's folder
                installed = installed or line
            elif not file.startswith(_STDLIB):
                return line
    return installed


def _name(entry: tuple[int, NamedCall, int]) -> str:
    """Return a call's text with its number after its name."""
    sequence, call, _ = entry
    name, space, rest = call.text.partition(" ")
    return f"{name}#{sequence}{space}{rest}"


class _Started(threading.local):
    """What a thread of this package knows of the program that gave it its work.

    Attributes:
        place: where the program gave it what it runs, as `source_place`; "" in the program's own threads.
    """

    place: tuple[str, int] | str = ""


started = _Started()


def source_place() -> tuple[str, int] | str:
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


def place_text(place: tuple[str, int] | str) -> str:
    """Return a place in the program as text, such as train.py:31."""
    if isinstance(place, str):
        return place
    return f"{os.path.basename(place[0])}:{place[1]}" if place[0] else "?"


def source_line() -> str:
    """Return file and line of the caller outside this package, such as train.py:31."""
    return place_text(source_place())
