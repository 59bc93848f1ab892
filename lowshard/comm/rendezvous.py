"""How the ranks find rank 0 by TCP: its addresses, a listener that lets in the job's ranks alone, proofs on both sides.

Rank 0 offers every address of its host. From another host some of them lead to a wrong process (each host has a
127.0.0.1, and often the same bridge address), so both sides prove that they know the job's token before anything
else is said; the token itself travels over MPI.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import resource
import secrets
import selectors
import socket
import struct
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lowshard.errors import CommError

__all__ = ["INTERFACE_VARIABLE", "Listener", "Offer", "connect", "interface_addresses", "tune"]

INTERFACE_VARIABLE = "LOWSHARD_INTERFACE"

_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40
_LINK_LOCAL = "20"  # scope of an address, in /proc/net/if_inet6
_MAGIC = b"lowshard-watch-1"
_NONCE_BYTES = 16
_HELLO = struct.Struct(f"!{len(_MAGIC)}sI{_NONCE_BYTES}s")
_PROOF_BYTES = 32
_WELCOME = b"\x01"
_ROUNDS_S = (0.5, 1.0, 2.0, 4.0)  # how long an address may take, round by round; the last one stays
_PAUSE_S = 0.1
_FULL_PAUSE_S = 0.001
_OTHER_FILES = 768  # that the program may want


@dataclass(frozen=True)
class Offer:
    """Where rank 0 listens.

    Attributes:
        host: its host's name, for people.
        network: tells hosts and network namespaces apart: loopback reaches rank 0 from within one alone.
        addresses: of its host.
        port: the same for all addresses.
        token: what the ranks of this job know, in hexadecimal digits.
    """

    host: str
    network: str
    addresses: tuple[str, ...]
    port: int
    token: str


def interface_addresses() -> dict[str, list[str]]:
    """Return the IPv4 and IPv6 addresses of this host by interface, without IPv6's link-local ones."""
    found: dict[str, list[str]] = {}
    size = 64 * _IFREQ_BYTES
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        while True:
            rows = array("B", bytes(size))
            request = struct.pack("iL", size, rows.buffer_info()[0])
            used: int = struct.unpack("iL", fcntl.ioctl(asked, _SIOCGIFCONF, request))[0]
            if used < size:
                break
            size *= 4
    for at in range(0, used, _IFREQ_BYTES):
        row = rows[at : at + _IFREQ_BYTES].tobytes()
        name = row[:16].split(b"\0")[0].decode()
        found.setdefault(name.split(":")[0], []).append(socket.inet_ntoa(row[20:24]))
    with contextlib.suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope != _LINK_LOCAL:
                found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def network_name() -> str:
    """Return a text that two processes share if loopback leads from one to the other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def tune(connection: socket.socket, limit_s: float) -> None:
    """Set what the side channel needs of a connection: no delays, and an end to what nobody acknowledges."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * limit_s))


class Listener:
    """Rank 0's side: listens on all addresses of the host, or on those of one interface."""

    def __init__(self, ranks: int) -> None:
        """Listen.

        Args:
            ranks: number of ranks that will come.

        Raises:
            CommError: LOWSHARD_INTERFACE names no interface of this host, or nothing can be listened on.
        """
        _allow_files(ranks)
        known = interface_addresses()
        wanted = os.environ.get(INTERFACE_VARIABLE)
        try:
            self._sockets, addresses = _listen(known, wanted, ranks)
        except OSError as error:
            raise CommError(f"the side channel of rank 0 cannot listen: {error}") from error
        token = secrets.token_hex(32)
        port: int = self._sockets[0].getsockname()[1]
        self.offer = Offer(socket.gethostname(), network_name(), tuple(addresses), port, token)

    def accept(self, ranks: Iterable[int], limit_s: float) -> dict[int, socket.socket]:
        """Return a connection to each of these ranks; those that have not come in time are missing.

        Who does not prove to be one of the ranks is turned away.
        """
        missing, came = set(ranks), dict[int, socket.socket]()
        end_s = time.monotonic() + limit_s
        with selectors.DefaultSelector() as waiting:
            for listening in self._sockets:
                waiting.register(listening, selectors.EVENT_READ)
            while missing and (left_s := end_s - time.monotonic()) > 0:
                for key, _ in waiting.select(left_s):
                    if key.data is None:
                        self._let_in(key.fileobj, waiting)  # type: ignore[arg-type]
                        continue
                    guest: _Guest = key.data
                    rank = guest.go_on()
                    if rank is None and guest.open:
                        continue
                    waiting.unregister(guest.connection)
                    if rank is None or rank not in missing | set(came):
                        guest.connection.close()
                        continue
                    if rank in came:  # it had given that connection up
                        came[rank].close()
                    came[rank] = guest.connection
                    missing.discard(rank)
            for key in list(waiting.get_map().values()):
                if key.data is not None:
                    key.data.connection.close()
        return came

    def close(self) -> None:
        """Let nobody in any more."""
        for listening in self._sockets:
            listening.close()

    def _let_in(self, listening: socket.socket, waiting: selectors.BaseSelector) -> None:
        try:
            connection, _ = listening.accept()
        except OSError:  # it has gone already, or there are too many open files
            time.sleep(_FULL_PAUSE_S)
            return
        connection.setblocking(False)
        waiting.register(connection, selectors.EVENT_READ, _Guest(connection, self.offer.token))


def _allow_files(ranks: int) -> None:
    """Raise this process's limit of open files, if it can be, to hold a connection of each rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ranks + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _listen(
    known: dict[str, list[str]], wanted: str | None, ranks: int
) -> tuple[list[socket.socket], list[str]]:
    """Return listening sockets, all on one port, and the addresses that lead to them."""
    if wanted is not None:
        if wanted not in known:
            raise CommError(
                f"{INTERFACE_VARIABLE} names a network interface of rank 0's host with an address, one of "
                f"{', '.join(sorted(known))}; got {wanted!r}"
            )
        address = known[wanted][0]  # of several, IPv4 comes first
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return [_listening(family, address, ranks)], [address]
    everything = [address for addresses in known.values() for address in addresses]
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            both = socket.create_server(
                ("::", 0), family=socket.AF_INET6, backlog=ranks + 64, dualstack_ipv6=True
            )
            both.setblocking(False)
            return [both], everything
    return [_listening(socket.AF_INET, "", ranks)], [address for address in everything if ":" not in address]


def _listening(family: socket.AddressFamily, address: str, ranks: int) -> socket.socket:
    made = socket.create_server((address, 0), family=family, backlog=ranks + 64)
    made.setblocking(False)
    return made


@dataclass
class _Guest:
    """A connection that has yet to prove that it comes from a rank of this job."""

    connection: socket.socket
    token: str
    open: bool = True
    _nonce: bytes = field(default_factory=lambda: secrets.token_bytes(_NONCE_BYTES))
    _came: bytes = b""
    _rank: int | None = None

    def go_on(self) -> int | None:
        """Read what has come; return the rank once it is proven. `open` is false where there is no hope left."""
        wanted = _HELLO.size if self._rank is None else _PROOF_BYTES
        try:
            got = self.connection.recv(wanted - len(self._came))
            self._came += got
            self.open = bool(got)
            if len(self._came) < wanted:
                return None
            return self._answer()
        except BlockingIOError:
            return None
        except OSError:
            self.open = False
            return None

    def _answer(self) -> int | None:
        came, self._came = self._came, b""
        if self._rank is None:
            magic, rank, nonce = _HELLO.unpack(came)
            if magic != _MAGIC:
                self.open = False
                return None
            self._rank = rank
            self.connection.send(self._nonce + _proof(self.token, b"hub", rank, nonce))
            return None
        if not hmac.compare_digest(came, _proof(self.token, b"rank", self._rank, self._nonce)):
            self.open = False
            return None
        self.connection.send(_WELCOME)
        return self._rank


def _proof(token: str, side: bytes, rank: int, nonce: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(token), side + struct.pack("!I", rank) + nonce, "sha256")


def connect(offer: Offer, rank: int, limit_s: float) -> socket.socket:
    """Return a connection to rank 0, tried at one address after the other, again and again until the limit.

    Raises:
        CommError: none of the addresses leads to it; the text names them all.
    """
    same_network = offer.network == network_name()
    loopback = [address for address in offer.addresses if address == "::1" or address.startswith("127.")]
    others = [address for address in offer.addresses if address not in loopback]
    addresses = [*loopback, *others] if same_network else others
    said: dict[str, str] = {}
    end_s = time.monotonic() + limit_s
    turn = 0
    while addresses and time.monotonic() < end_s:
        round_s = _ROUNDS_S[min(turn, len(_ROUNDS_S) - 1)]
        for address in addresses:
            try:
                return _connected(offer, address, rank, min(round_s, max(0.05, end_s - time.monotonic())))
            except OSError as error:
                said[address] = (error.strerror or str(error)).lower()
        turn += 1
        time.sleep(_PAUSE_S)
    tried = "; ".join(f"{address}: {why}" for address, why in said.items()) or "no address was offered"
    raise CommError(
        f"every rank needs a TCP connection to rank 0, but rank {rank} on {socket.gethostname()} reaches none of "
        f"the addresses of {offer.host}, port {offer.port} ({tried}); let such connections through, or set "
        f"{INTERFACE_VARIABLE} to the interface of {offer.host} that leads to all hosts"
    )


def _connected(offer: Offer, address: str, rank: int, limit_s: float) -> socket.socket:
    """Return a connection to rank 0 at an address, with both sides proven.

    Raises:
        OSError: there is none, or somebody else is there.
    """
    connection = socket.create_connection((address, offer.port), timeout=limit_s)
    try:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(_HELLO.pack(_MAGIC, rank, nonce))
        theirs = _read(connection, _NONCE_BYTES)
        if not hmac.compare_digest(_read(connection, _PROOF_BYTES), _proof(offer.token, b"hub", rank, nonce)):
            raise OSError("another program listens there")
        connection.sendall(_proof(offer.token, b"rank", rank, theirs))
        _read(connection, len(_WELCOME))
    except BaseException:
        connection.close()
        raise
    return connection


def _read(connection: socket.socket, size: int) -> bytes:
    came = b""
    while len(came) < size:
        got = connection.recv(size - len(came))
        if not got:
            raise OSError("another program listens there")
        came += got
    return came
