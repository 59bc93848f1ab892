"""A collective call as all ranks of a communicator must make it: its text, its signature, how it runs here."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from lowshard.comm.activity import Name

Check = Literal["off", "hash", "full"]
ENCODED_BYTES = 96

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
# In a checkout these lie beside the package, not in it.
_OWN_FOLDERS = tuple(
    {
        _PACKAGE,
        *(
            str(Path(__file__).resolve().parents[2] / name) + os.sep
            for name in ("kernels", "launch", "bench")
        ),
    }
)


@dataclass(eq=False)
class Call:
    """One kind of call on one communicator, made once and kept: repeated calls only look it up.

    Attributes:
        name: of the collective.
        text: what was asked for, without what may differ between ranks: "all_reduce float32[1024] sum".
        signature: a hash of the text and the group, positive, below 2^62.
        recv_elems: elements of the buffer written.
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
    recv_elems: int = 0
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


def source_place() -> tuple[str, int]:
    """Return file and line of the caller outside this package, for `place_text`; cheap enough for every call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


@lru_cache(256)
def _is_own(file: str) -> bool:
    return file.startswith(_OWN_FOLDERS)


def place_text(place: tuple[str, int] | str) -> str:
    """Return a place in the program as text, such as train.py:31."""
    if isinstance(place, str):
        return place
    return f"{os.path.basename(place[0])}:{place[1]}" if place[0] else "?"


def source_line() -> str:
    """Return file and line of the caller outside this package, such as train.py:31."""
    return place_text(source_place())
