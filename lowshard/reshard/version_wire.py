"""What a publisher and its subscribers say to each other: a length and JSON, over a connection let in by a door.

Control, to rank 0 of the publisher: greeting -> table; then, again and again, want -> offer, done.
Data, to each rank that has something: map -> where a snapshot lies; or boxes, then read, or changes since another
snapshot -> bytes and their CRC-32. What differs comes tensor by tensor: a head, then a text of changes
(`kernels.change_text`), or all of the tensor's boxes where that is less.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lowshard.box import Box
from lowshard.comm.door import tune
from lowshard.errors import CommError
from lowshard.reading import Reader, reader

CONTROL, DATA = 41, 42
"""Purposes of connections."""
STALLED_S = 30.0
"""A connection over which nothing moves for so long, amid a message, is given up."""
WAKE_BYTES = 512 << 10
"""While twice as much or more is to come, a thread that waits for it is woken once so much is there, and not for each
packet, which costs more."""
WANT_S = 1.0
"""How long a publisher keeps a subscriber that wants a newer version waiting for its answer, at most."""
_LENGTH = struct.Struct("!Q")
_MOST_FRAME_BYTES = 64 << 20
_UNCONFIRMED_S = 10.0
_MOST_VALUES = 1 << 25
"""Of a message: a table of tensors in many tiles, or a request for their boxes, has some millions."""


@dataclass(frozen=True)
class Greeting:
    """Who subscribes."""

    name: str
    host: str
    pid: int
    ranks: int


@dataclass(frozen=True)
class Station:
    """Where a rank of a publisher is reached."""

    addresses: tuple[str, ...]
    network: str
    pid: int


@dataclass(frozen=True)
class Table:
    """What a publisher has: tensors by name, and its ranks."""

    mark: str
    layouts: Mapping[str, Any]
    stations: tuple[Station, ...]


@dataclass(frozen=True)
class Request:
    """What a subscriber asks; of the fields those that belong to `ask` count."""

    ask: str  # "want", "done", "map", "boxes", "read" or "changes"
    mark: str = ""  # of the publisher that is meant; its ranks refuse another's
    newer_than: int | None = None  # want: the version that the subscriber has of this publisher
    wait_s: float = WANT_S  # want: how long to wait for one; WANT_S at most
    number: int = 0  # done, map, read, changes: of the snapshot
    since: int = 0  # changes: of the snapshot that the subscriber has
    version: int | None = None  # done: what the subscriber serves now
    # boxes: for each tensor its name and boxes of the rank's local array, in the order of the stream
    boxes: tuple[tuple[str, tuple[Box, ...]], ...] = ()
    blocks: tuple[int, ...] = ()  # boxes: elements of a unit of changes; 0: always whole; default 1


@dataclass(frozen=True)
class Answer:
    """What a publisher answers."""

    state: str  # "here", "none" (nothing newer yet), "gone" (no such snapshot) or "closed"
    version: int = 0  # here, to want
    number: int = 0  # here, to want: of its snapshot, which stays until done
    pid: int = 0  # here, to map: process, descriptor and bytes of the snapshot
    fd: int = 0
    size_bytes: int = 0


read_greeting: Reader[Greeting] = reader("greeting of a subscriber", CommError)(Greeting)
read_table: Reader[Table] = reader("table of a publisher", CommError, most_values=_MOST_VALUES)(Table)
read_request: Reader[Request] = reader("request of a subscriber", CommError, most_values=_MOST_VALUES)(
    Request
)
read_answer: Reader[Answer] = reader("answer of a publisher", CommError)(Answer)


CHANGES_HEAD = struct.Struct("!4q")
"""Ahead of what differs in a tensor: units of the text, or WHOLE where its boxes come; bytes of the text's two streams
of places; elements that differ."""
WHOLE = -1


class Lost(Exception):
    """The other end has gone, or says nothing any more."""


class Line:
    """A connection whose ends know each other; one thread at an end uses it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._limits_s: dict[int, float] = {}
        self._pid = os.getpid()
        connection.setblocking(True)
        tune(connection, _UNCONFIRMED_S)

    def say(self, message: Any) -> None:
        """Send a message."""
        text = text_of(message).encode()
        self.send(memoryview(_LENGTH.pack(len(text)) + text))

    def hear(self, read: Reader[Any], until_s: float | None = None) -> Any:
        """Return the next message, by its reader."""
        head = bytearray(_LENGTH.size)
        self._receive_first(memoryview(head)[:1], until_s)
        self.receive(memoryview(head)[1:])
        (size,) = _LENGTH.unpack(head)
        if size > _MOST_FRAME_BYTES:
            raise Lost(f"a message has at most {_MOST_FRAME_BYTES} bytes, {size} were announced")
        text = bytearray(size)
        self.receive(memoryview(text))
        try:
            return read.text(text.decode(), "what came")
        except (CommError, UnicodeDecodeError) as error:
            raise Lost(str(error)) from error

    def send(self, data: memoryview) -> None:
        """Send bytes."""
        self._limit(socket.SO_SNDTIMEO, STALLED_S)
        with _lost():
            while data:  # sendall would count the limit over all of it
                data = data[self.connection.send(data) :]

    def receive(self, data: memoryview) -> None:
        """Fill memory with what comes next."""
        self._limit(socket.SO_RCVTIMEO, STALLED_S)
        end = len(data) - WAKE_BYTES
        if end >= WAKE_BYTES:
            self._wake_at(WAKE_BYTES)
            self._fill(data[:end])
            self._wake_at(1)  # less than that may be left, and would wake nobody
            data = data[end:]
        self._fill(data)

    def _fill(self, data: memoryview) -> None:
        while data:
            data = data[self._received(data) :]

    def _wake_at(self, size_bytes: int) -> None:
        """Have a thread that waits for bytes woken once so many are there."""
        with _lost():
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)

    def _receive_first(self, data: memoryview, until_s: float | None) -> None:
        """Receive a byte that may take its time; `until_s` as `hear` has it."""
        limit_s = 0.0 if until_s is None else max(0.001, until_s - time.monotonic())
        self._limit(socket.SO_RCVTIMEO, limit_s)
        self._received(data)

    def _received(self, data: memoryview) -> int:
        """Return how many bytes came: as many as there is room for, or those of the time that they had."""
        with _lost():
            count = self.connection.recv_into(data, 0, socket.MSG_WAITALL)
        if not count:
            raise Lost("it has closed the connection")
        return count

    def _limit(self, option: int, limit_s: float) -> None:
        """Limit how long nothing may move, in seconds; 0 for ever."""
        if self._limits_s.get(option) != limit_s:
            timeval = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1_000_000))
            with _lost():
                self.connection.setsockopt(socket.SOL_SOCKET, option, timeval)
            self._limits_s[option] = limit_s

    def is_quiet(self) -> bool:
        """Say whether the other end is there and has said nothing."""
        try:
            self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def stop(self) -> None:
        """End the connection; whoever waits on either end hears of it. Any thread may call this."""
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, and give its descriptor back; by the thread that uses it."""
        self.stop()
        self.connection.close()


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    """Raise Lost for what a connection raises."""
    try:
        yield
    except OSError as error:
        raise Lost(_words(error)) from error


def _words(error: OSError) -> str:
    return (
        "nothing moved in time"
        if isinstance(error, (TimeoutError, BlockingIOError))
        else (error.strerror or str(error)).lower()
    )


def text_of(message: Any) -> str:
    """Return a message as its reader reads it."""
    return json.dumps(message, default=_plain)


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not sent")
