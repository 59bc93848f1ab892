"""Bytes from memory to memory over bare sockets: what `lowshard bench publish` is compared with.

As many sockets as a subscriber has streams, a thread for each on both sides, no checksum, nothing between socket and
memory. The side that receives says when: a byte over each socket.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

HOT_BYTES = 128 << 10
"""What is sent and received again and again where `hot`: as iperf does, it stays in a cache."""
_WAIT_S = 60
"""How long bytes may stay away."""
_TIMEVAL = struct.pack("ll", _WAIT_S, 0)


def listening(host: str) -> tuple[socket.socket, int]:
    """Return a socket that listens at an address, and its port."""
    made = socket.create_server((host, 0))
    return made, int(made.getsockname()[1])


def accepted(listens: socket.socket, count: int) -> list[socket.socket]:
    """Return so many connections, in the order in which they were made."""
    listens.settimeout(_WAIT_S)
    return [_tuned(listens.accept()[0]) for _ in range(count)]


def connected(host: str, port: int, count: int) -> list[socket.socket]:
    """Return so many connections to a socket that listens."""
    return [_tuned(socket.create_connection((host, port), _WAIT_S)) for _ in range(count)]


def send(sockets: Sequence[socket.socket], memory: np.ndarray, hot: bool) -> None:
    """Send memory, a part over each socket, once the other side asks for it."""

    def part(one: socket.socket, data: memoryview) -> None:
        _receive(one, memoryview(bytearray(1)))
        for piece in _pieces(data, hot):
            one.sendall(piece)

    _each(sockets, memory, part)


def receive(sockets: Sequence[socket.socket], memory: np.ndarray, hot: bool) -> float:
    """Fill memory with what the other side sends; return the seconds that took."""

    def part(one: socket.socket, data: memoryview) -> None:
        one.sendall(b"x")
        for piece in _pieces(data, hot):
            _receive(one, piece)

    begin_s = time.perf_counter()
    _each(sockets, memory, part)
    return time.perf_counter() - begin_s


def _tuned(made: socket.socket) -> socket.socket:
    made.settimeout(None)  # Python's own limits have the socket polled before each call
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def _pieces(data: memoryview, hot: bool) -> list[memoryview]:
    """Return all of the memory at once; or where `hot` its begin, as often as there are so many bytes."""
    if not hot:
        return [data]
    size = len(data)
    return [data[: min(HOT_BYTES, size - at)] for at in range(0, size, HOT_BYTES)]


def _receive(one: socket.socket, data: memoryview) -> None:
    got = 0
    while got < len(data):
        count = one.recv_into(data[got:], 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("the other side has gone")
        got += count


def _each(
    sockets: Sequence[socket.socket], memory: np.ndarray, part: Callable[[socket.socket, memoryview], None]
) -> None:
    """Do parts of the memory at the same time, each in a thread."""
    shares = np.array_split(memory, len(sockets))
    failed: list[OSError] = []

    def run(one: socket.socket, data: memoryview) -> None:
        try:
            part(one, data)
        except OSError as error:
            failed.append(error)

    threads = [
        threading.Thread(target=run, args=(one, share.data), daemon=True)
        for one, share in zip(sockets, shares, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
