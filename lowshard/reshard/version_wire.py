"""Messages between a publisher and its subscribers: a length and JSON, over an authenticated connection.

Control, to rank 0 of the publisher: greeting -> table; then, again and again, want -> offer, done.
Data, to each rank that is fetched from: map -> where a snapshot lies; or boxes, then read, or changes since another
snapshot -> bytes and their CRC-32. A delta comes tensor by tensor: a header, then encoded changes
(`kernels.change_encoding`), or all of the tensor's boxes where that is less.
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
from lowshard.comm.listener import tune
from lowshard.errors import CommError
from lowshard.reading import Reader, reader

CONTROL, DATA = 41, 42
"""Purposes of connections."""
STALLED_S = 30.0
"""A connection is given up if a message makes no progress for so long."""
WAKE_BYTES = 512 << 10
"""A receiving thread is woken once so many bytes have arrived, not for each packet."""
WANT_S = 1.0
"""Longest time that a publisher delays its answer to a subscriber that wants a newer version."""
_LENGTH = struct.Struct("!Q")
_MOST_FRAME_BYTES = 64 << 20
_UNCONFIRMED_S = 10.0
_MOST_VALUES = 1 << 25
"""Most values in a message: a table of tensors in many tiles, or a request for their boxes, has some millions."""


@dataclass(frozen=True)
class Greeting:
    """Identifies a subscriber."""

    name: str
    host: str
    pid: int
    ranks: int


@dataclass(frozen=True)
class Endpoint:
    """Where a rank of a publisher is reached."""

    addresses: tuple[str, ...]
    network: str
    pid: int


@dataclass(frozen=True)
class Table:
    """A publisher's tensors by name, and its ranks."""

    publisher_id: str
    layouts: Mapping[str, Any]
    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True)
class Request:
    """A subscriber's request; the fields that apply depend on `ask`."""

    ask: str  # "want", "done", "map", "boxes", "read" or "changes"
    publisher_id: str = ""  # of the publisher that is meant; its ranks refuse another's
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
    """A publisher's answer."""

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
"""Header of a tensor's delta: units of the encoding or WHOLE, bytes of gaps and of lengths, elements that differ."""
WHOLE = -1


class ConnectionLost(Exception):
    """The other end has closed the connection or does not answer."""


class Connection:
    """An authenticated connection; one thread at each end uses it."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._limits_s: dict[int, float] = {}
        self._pid = os.getpid()
        sock.setblocking(True)
        tune(sock, _UNCONFIRMED_S)

    def send_message(self, message: Any) -> None:
        """Send a message."""
        text = text_of(message).encode()
        self.send(memoryview(_LENGTH.pack(len(text)) + text))

    def receive_message(self, read: Reader[Any], until_s: float | None = None) -> Any:
        """Receive the next message, parsed by its reader."""
        head = bytearray(_LENGTH.size)
        limit_s = 0.0 if until_s is None else max(0.001, until_s - time.monotonic())
        self._limit(socket.SO_RCVTIMEO, limit_s)
        self._received(memoryview(head)[:1])
        self.receive(memoryview(head)[1:])
        (size,) = _LENGTH.unpack(head)
        if size > _MOST_FRAME_BYTES:
            raise ConnectionLost(f"a message has at most {_MOST_FRAME_BYTES} bytes, {size} were announced")
        text = bytearray(size)
        self.receive(memoryview(text))
        try:
            return read.text(text.decode(), "what came")
        except (CommError, UnicodeDecodeError) as error:
            raise ConnectionLost(str(error)) from error

    def send(self, data: memoryview) -> None:
        """Send bytes."""
        self._limit(socket.SO_SNDTIMEO, STALLED_S)
        with _lost():
            while data:  # sendall would count the limit over all of it
                data = data[self.socket.send(data) :]

    def receive(self, data: memoryview) -> None:
        """Fill memory with the next bytes."""
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
        """Have a waiting thread woken once so many bytes are there."""
        with _lost():
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)

    def _received(self, data: memoryview) -> int:
        """Return how many bytes came: as many as fit, or those that came in time."""
        with _lost():
            count = self.socket.recv_into(data, 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionLost("it has closed the connection")
        return count

    def _limit(self, option: int, limit_s: float) -> None:
        """Set the socket's time limit in seconds; 0 for none."""
        if self._limits_s.get(option) != limit_s:
            timeval = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1_000_000))
            with _lost():
                self.socket.setsockopt(socket.SOL_SOCKET, option, timeval)
            self._limits_s[option] = limit_s

    def is_quiet(self) -> bool:
        """Return whether the other end is connected and has sent nothing."""
        try:
            self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def stop(self) -> None:
        """Shut the connection down; both ends notice. Any thread may call this."""
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, by the thread that uses it."""
        self.stop()
        self.socket.close()


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    """Turn OSError into ConnectionLost."""
    try:
        yield
    except (TimeoutError, BlockingIOError) as error:
        raise ConnectionLost("nothing moved in time") from error
    except OSError as error:
        raise ConnectionLost((error.strerror or str(error)).lower()) from error


def text_of(message: Any) -> str:
    """Return a message as JSON."""
    return json.dumps(message, default=_plain)


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not sent")
