"""Where the ranks find rank 0: a door in a private folder on one machine, at its network addresses from others.

The folder is made for the meeting and removed after it. A rank that is killed meanwhile leaves it behind: in the
job's directory, which the launcher removes, or without a launcher in the temporary folder, where the next meeting does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lowshard.comm.door import TOKEN_BYTES, Door, enter, is_private
from lowshard.comm.interface import addresses_towards, interface_addresses, is_loopback, network_name
from lowshard.errors import CommError
from lowshard.settings import INTERFACE, JOB_DIR

__all__ = ["Offer", "Rendezvous", "connect", "reaches"]


_PURPOSE = 1
_FOLDER_PREFIX = "lowshard-door-"
_STALE_S = 60.0  # a folder that is older, and that nobody holds, has lost its process
_TURN_S = 0.1
_OTHER_FILES = 768  # that the program may want


@dataclass(frozen=True)
class Offer:
    """Where rank 0 is to be found.

    Attributes:
        host: its host's name, for people.
        network: tells machines and network namespaces apart (`network_name`).
        addresses: of its door.
        token: what the ranks of this job know, in hexadecimal digits.
    """

    host: str
    network: str
    addresses: tuple[str, ...]
    token: str


class Rendezvous:
    """Rank 0's side: lets in the ranks of its job."""

    def __init__(self, door: Door, folder: Path | None = None, folder_fd: int = -1) -> None:
        """Take over a door, and the folder that was made for it; see `nearby` and `towards`."""
        self._door = door
        self._folder, self._folder_fd = folder, folder_fd
        self.offer = Offer(socket.gethostname(), network_name(), door.addresses, door.token.hex())

    @classmethod
    def nearby(cls, ranks: int) -> Self:
        """Return one that processes of this machine reach: by a Unix socket, by loopback where there can be none.

        LOWSHARD_INTERFACE names a network interface of this host to use instead.

        Args:
            ranks: number of ranks that will come.

        Raises:
            CommError: LOWSHARD_INTERFACE names no interface of this host, or nothing can be listened on.
        """
        _allow_files(ranks)
        if INTERFACE.is_set():
            named = INTERFACE.text()
            known = interface_addresses()
            if named not in known:
                raise CommError(
                    f"{INTERFACE.name} names a network interface of rank 0's host with an address, one of "
                    f"{', '.join(sorted(known))}; got {named!r}"
                )
            return cls._at(known[named][:1])  # of several, IPv4 comes first
        for parent in _parents():
            with contextlib.suppress(OSError):  # no sockets on this file system, or no room
                return cls._in(parent)
        return cls._at(["127.0.0.1"])

    @classmethod
    def towards(cls, hosts: Iterable[str], with_loopback: bool) -> Self:
        """Return one that other hosts reach, at the addresses from which packets to them go.

        Args:
            hosts: names or addresses of those hosts.
            with_loopback: whether some ranks reach this host's loopback.

        Raises:
            CommError: nothing can be listened on.
        """
        return cls._at([*(["127.0.0.1"] if with_loopback else []), *addresses_towards(hosts)])

    @classmethod
    def _at(cls, hosts: Iterable[str]) -> Self:
        try:
            return cls(Door.on_network(tuple(dict.fromkeys(hosts))))
        except OSError as error:
            raise CommError(f"the side channel of rank 0 cannot listen: {error}") from error

    @classmethod
    def _in(cls, parent: Path) -> Self:
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=parent))
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            made = cls(Door.in_folder(folder), folder, fd)
            stack.pop_all()
        return made

    def accept(self, ranks: Iterable[int], limit_s: float) -> dict[int, socket.socket]:
        """Return a connection to each of these ranks; those that have not come in time are missing."""
        missing, came = set(ranks), dict[int, socket.socket]()
        end_s = time.monotonic() + limit_s
        knocks = select.poll()
        knocks.register(self._door.fileno(), select.POLLIN)
        while missing and (left_s := end_s - time.monotonic()) > 0:
            knocks.poll(1000 * min(left_s, _TURN_S))
            for guest in self._door.admit():
                if guest.purpose != _PURPOSE or guest.rank not in missing | set(came):
                    guest.connection.close()
                    continue
                if guest.rank in came:  # it had given that connection up
                    came[guest.rank].close()
                came[guest.rank] = guest.connection
                missing.discard(guest.rank)
        return came

    def close(self) -> None:
        """Let nobody in any more, and remove the folder."""
        self._door.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._folder_fd)
            self._folder = None


def reaches(offer: Offer) -> bool:
    """Say whether this process can be expected to reach a rendezvous that is `nearby` rank 0."""
    if offer.network != network_name():
        return False  # containers may share their files, but not their network
    scheme, _, path = offer.addresses[0].partition(":")
    return scheme != "unix" or is_private(Path(path).parent)


def connect(offer: Offer, rank: int, limit_s: float) -> socket.socket:
    """Return a connection to rank 0, tried at one address after the other, again and again until the limit.

    Raises:
        CommError: none of the addresses leads to it; the text names them all.
    """
    same_network = offer.network == network_name()
    addresses = [address for address in offer.addresses if same_network or not _is_near(address)]
    token = bytes.fromhex(offer.token)
    assert len(token) == TOKEN_BYTES
    try:
        return enter(addresses, token, _PURPOSE, rank, limit_s)
    except ConnectionError as error:
        raise CommError(
            f"every rank needs a connection to rank 0, but rank {rank} on {socket.gethostname()} reaches none of the "
            f"addresses of {offer.host} ({error}); let such connections through, or set {INTERFACE.name} to the "
            f"interface of {offer.host} that leads to all hosts"
        ) from None


def _is_near(address: str) -> bool:
    """Say whether an address leads to its own machine alone."""
    scheme, _, where = address.partition(":")
    return scheme == "unix" or is_loopback(where.removeprefix("//").rpartition(":")[0].strip("[]"))


def _parents() -> list[Path]:
    """Return the folders to make the door's own one in, the best first; removes what killed processes left there."""
    found = [Path(tempfile.gettempdir())]
    _sweep(found[0])
    job_dir = JOB_DIR.text()
    return [*([Path(job_dir)] if job_dir else []), *found]


def _sweep(parent: Path) -> None:
    """Remove the folders of this user's processes that were killed at a door."""
    for folder in parent.glob(f"{_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            about = folder.lstat()
            if about.st_uid != os.geteuid() or time.time() - about.st_mtime < _STALE_S:
                continue
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(fd)


def _allow_files(ranks: int) -> None:
    """Raise this process's limit of open files, if it can be, to hold a connection of each rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ranks + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
