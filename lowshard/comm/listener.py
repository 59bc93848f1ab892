"""Listeners that let in only who knows a token: of a job's ranks, its launcher, a publisher.

On one machine a listener is a Unix socket in a folder that nobody but its owner may enter; between machines it is a TCP
port on the addresses by which the machines reach each other. Both sides prove that they know the token, which is never
sent, in frames of fixed length; nothing else is read before that:

    listener   a nonce
    client     magic, purpose, rank, a nonce of its own, proof over both nonces
    listener   proof over both nonces

A listener holds a few connections that have proven nothing, drops the oldest for a new one, and gives each a few
seconds.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

__all__ = ["TOKEN_BYTES", "Client", "Listener", "connect", "tune"]

TOKEN_BYTES = 32
MOST_WAITING = 64
"""Connections at a time that have not shown that they know the token."""
WAIT_S = 5.0
"""How long a connection may take to be let in."""

_SOCKET_NAME = "listener"
_MAGIC = b"lowshard-hello-2"
_NONCE_BYTES = 16
_PROOF_BYTES = 32
_HEAD = struct.Struct(f"!{len(_MAGIC)}sBI{_NONCE_BYTES}s")  # magic, purpose, rank, nonce; a proof follows
_HELLO_BYTES = _HEAD.size + _PROOF_BYTES
_ACCEPTS = 64  # in one turn
_BACKLOG = 1024
_FULL_PAUSE_S = 0.005
_MOST_ROUND_S = 4.0  # that an address may take to answer, at first an eighth of it
_PAUSE_S = 0.1  # between two rounds over the addresses
_OTHER = "another program listens there, or one that was given another token"
_PEER_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


@dataclass(frozen=True)
class Client:
    """A connection whose other end knows the token.

    Attributes:
        connection: non-blocking.
        purpose: what it is for, a number below 256 that the two sides agree on.
        rank: whose it is.
    """

    connection: socket.socket
    purpose: int
    rank: int


@dataclass
class _Waiting:
    """A connection that has not been let in."""

    connection: socket.socket
    until_s: float
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(_NONCE_BYTES))
    said: bytes = b""


class Listener:
    """Lets in who knows the token. It is polled by its `fileno`; `admit` never waits.

    Attributes:
        addresses: where it is: one `unix:PATH`, or `tcp://HOST:PORT` for each address of this host.
        token: the secret, by default of 32 random bytes; it goes to the clients by a way that is private.
    """

    def __init__(
        self, listening: Sequence[socket.socket], addresses: Sequence[str], path: Path | None
    ) -> None:
        """Take over sockets that listen already; see `in_folder` and `on_network`."""
        self.addresses = tuple(addresses)
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._listening = tuple(listening)
        self._path = path
        self._waiting: dict[socket.socket, _Waiting] = {}  # in order of arrival
        self._selector = selectors.EpollSelector()
        for made in self._listening:
            made.setblocking(False)
            self._selector.register(made, selectors.EVENT_READ)

    @classmethod
    def in_folder(cls, folder: Path) -> Self:
        """Return a listener for processes of this user on this machine.

        Args:
            folder: a folder of this user that nobody else may enter (mode 0700); the socket is made in it.
        """
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with ExitStack() as stack:
            stack.enter_context(made)
            with _private(folder) as short_path:
                made.bind(f"{short_path}/{_SOCKET_NAME}")
            made.listen(_BACKLOG)
            stack.pop_all()
        return cls([made], [f"unix:{folder / _SOCKET_NAME}"], folder / _SOCKET_NAME)

    @classmethod
    def on_network(cls, hosts: Sequence[str]) -> Self:
        """Return a listener at addresses of this host (IPv4 and IPv6), a port for each."""
        made, addresses = list[socket.socket](), list[str]()
        with ExitStack() as stack:
            for host in hosts:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                one = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
                made.append(stack.enter_context(one))
                name = f"[{host}]" if ":" in host else host
                addresses.append(f"tcp://{name}:{one.getsockname()[1]}")
            stack.pop_all()
        return cls(made, addresses, None)

    def fileno(self) -> int:
        """Return the descriptor to poll: it is readable where `admit` has something to do."""
        return self._selector.fileno()

    def admit(self) -> list[Client]:
        """Return who has been let in since the last call, and turn away who has waited too long.

        To be called when the listener is readable, and every second or so besides.
        """
        clients: list[Client] = []
        for key, _ in self._selector.select(0):
            if key.data is None:
                self._accept(key.fileobj)  # type: ignore[arg-type]
            elif key.fileobj in self._waiting:
                clients += self._hear(key.data)
        now_s = time.monotonic()
        for late in [waiting for waiting in self._waiting.values() if now_s > waiting.until_s]:
            self._turn_away(late)
        return clients

    def close(self) -> None:
        """Let nobody in any more, and remove the socket; the clients' connections stay."""
        for waiting in list(self._waiting.values()):
            self._turn_away(waiting)
        self._selector.close()
        for made in self._listening:
            made.close()
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()

    def _accept(self, listening: socket.socket) -> None:
        """Take in those who connect, a bounded number of them, and send each its nonce."""
        for _ in range(_ACCEPTS):
            try:
                connection, _ = listening.accept()
            except BlockingIOError:
                return
            except OSError:  # it has gone already; or there are no files left, and others may close some
                time.sleep(_FULL_PAUSE_S)
                return
            connection.setblocking(False)
            waiting = _Waiting(connection, time.monotonic() + WAIT_S)
            if not _is_own_user(connection) or not _sent(connection, waiting.nonce):
                connection.close()
                continue
            if len(self._waiting) >= MOST_WAITING:
                self._turn_away(next(iter(self._waiting.values())))
            self._waiting[connection] = waiting
            self._selector.register(connection, selectors.EVENT_READ, waiting)

    def _hear(self, waiting: _Waiting) -> list[Client]:
        """Read what one has said, no more than a hello has; return it as a client if it knows the token."""
        try:
            came = waiting.connection.recv(_HELLO_BYTES - len(waiting.said))
        except BlockingIOError:
            return []
        except OSError:
            came = b""
        waiting.said += came
        if came and len(waiting.said) < _HELLO_BYTES:
            return []
        head, proof = waiting.said[: _HEAD.size], waiting.said[_HEAD.size :]
        said = head + waiting.nonce
        if not came or not hmac.compare_digest(proof, _proof(self.token, b"client", said)):
            self._turn_away(waiting)
            return []
        magic, purpose, rank, _ = _HEAD.unpack(head)
        if magic != _MAGIC or not _sent(waiting.connection, _proof(self.token, b"listener", said)):
            self._turn_away(waiting)
            return []
        self._forget(waiting)
        return [Client(waiting.connection, purpose, rank)]

    def _turn_away(self, waiting: _Waiting) -> None:
        self._forget(waiting)
        waiting.connection.close()

    def _forget(self, waiting: _Waiting) -> None:
        self._selector.unregister(waiting.connection)
        del self._waiting[waiting.connection]


def connect(
    addresses: Sequence[str], token: bytes | Callable[[], bytes], purpose: int, rank: int, limit_s: float
) -> socket.socket:
    """Return a connection to a listener, tried at one address after the other, again and again until the limit.

    Args:
        addresses: of the listener.
        token: its token; or what returns it, called before each try, where another listener may take its place.
        purpose: what the connection is for.
        rank: whose it is.
        limit_s: how long to try; each address is tried once at least.

    Returns:
        A connection that blocks, without a time limit.
    """
    said: dict[str, str] = {}
    end_s = time.monotonic() + limit_s
    round_s = _MOST_ROUND_S / 16
    while addresses and (not said or time.monotonic() < end_s):
        round_s = min(2 * round_s, _MOST_ROUND_S)
        for address in addresses:
            try:
                left_s = max(0.05, end_s - time.monotonic())
                secret = token if isinstance(token, bytes) else token()
                return _connected(address, secret, purpose, rank, min(round_s, left_s))
            except OSError as error:
                said[address] = (error.strerror or str(error)).lower()
        time.sleep(min(_PAUSE_S, max(0.0, end_s - time.monotonic())))
    raise ConnectionError(
        "; ".join(f"{address}: {why}" for address, why in said.items()) or "no address was offered"
    )


def tune(connection: socket.socket, unconfirmed_s: float) -> None:
    """Set what a TCP connection needs: no delays, and an end to one that nobody confirms for so long.

    One over which nothing is said is asked for a sign of life: where a host is gone without a word, it ends too.
    """
    if connection.family == socket.AF_UNIX:
        return
    third_s = max(1, int(unconfirmed_s / 3))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * unconfirmed_s))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, third_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, third_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)


def _proof(token: bytes, side: bytes, what: bytes) -> bytes:
    return hmac.digest(token, side + what, "sha256")


def _sent(connection: socket.socket, frame: bytes) -> bool:
    """Send a frame to a connection that has room for it; return whether it went out."""
    try:
        return connection.send(frame) == len(frame)
    except OSError:
        return False


def _is_own_user(connection: socket.socket) -> bool:
    """Say whether the other end is a process of this user; over TCP nobody knows."""
    if connection.family != socket.AF_UNIX:
        return True
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    uid: int = _PEER_CREDENTIALS.unpack(data)[1]
    return uid == os.geteuid()


@contextmanager
def _private(folder: Path) -> Iterator[str]:
    """Give a short path to a folder that is checked to be this user's alone: a socket's path has 107 bytes at most."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        about = os.fstat(fd)
        if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
            raise PermissionError(
                f"a listener's folder must be its user's alone (mode 0700), but {folder} is of user {about.st_uid} "
                f"with mode {stat.S_IMODE(about.st_mode):04o}"
            )
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _connected(address: str, token: bytes, purpose: int, rank: int, limit_s: float) -> socket.socket:
    """Return a connection to the listener at an address, with both sides proven."""
    end_s = time.monotonic() + limit_s
    with ExitStack() as stack:
        connection = stack.enter_context(_opened(address, limit_s))
        theirs = _read(connection, _NONCE_BYTES, end_s)
        head = _HEAD.pack(_MAGIC, purpose, rank, secrets.token_bytes(_NONCE_BYTES))
        connection.sendall(head + _proof(token, b"client", head + theirs))
        if not hmac.compare_digest(
            _read(connection, _PROOF_BYTES, end_s), _proof(token, b"listener", head + theirs)
        ):
            raise ConnectionError(_OTHER)
        connection.settimeout(None)
        stack.pop_all()
    return connection


def _opened(address: str, limit_s: float) -> socket.socket:
    """Return a connection to whatever listens at an address; it waits so long at most."""
    scheme, _, where = address.partition(":")
    if scheme == "tcp":
        host, _, port = where.removeprefix("//").rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), timeout=limit_s)
    path = Path(where)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with ExitStack() as stack:
        stack.enter_context(connection)
        # The kernel waits for room in the queue of a listener only where the socket itself blocks.
        seconds = int(limit_s)
        limit = struct.pack("ll", seconds, max(1, int((limit_s - seconds) * 1e6)))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        with _private(path.parent) as short_path:
            connection.connect(f"{short_path}/{path.name}")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 0))
        connection.settimeout(limit_s)
        stack.pop_all()
    return connection


def _read(connection: socket.socket, size: int, end_s: float) -> bytes:
    came = b""
    while len(came) < size:
        connection.settimeout(max(0.001, end_s - time.monotonic()))
        got = connection.recv(size - len(came))
        if not got:
            raise ConnectionError(_OTHER)
        came += got
    return came
