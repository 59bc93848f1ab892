"""Where publishers and subscribers meet: an address, and a token that only they know.

`unix:/folder`: one host; the folder is its user's alone, holds the doors' sockets, the token and a lock, and is made
where it is missing. `tcp://host:port`: any hosts; port 0 is one that is free. The token is in a file of mode 0600: in
the folder, or for TCP below the cache folder, from where it is brought to other hosts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from lowshard.argument import brief, instance
from lowshard.argument import path as check_path
from lowshard.comm.door import TOKEN_BYTES, Door
from lowshard.errors import CommError
from lowshard.settings import cache_root

_RULE = "an address is 'unix:/folder' on one host, or 'tcp://host:port'"
_LEAST_TOKEN_BYTES = 16
_MOST_TOKEN_BYTES = 4096
_BACKLOG = 1024


@dataclass(frozen=True)
class Address:
    """A parsed address.

    Attributes:
        folder: of `unix:`, else None.
        host: of `tcp://`, else "".
        port: the same, else 0.
    """

    folder: Path | None = None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: object) -> Address:
        """Return what an address says.

        Raises:
            CommError: it is not an address.
        """
        text = instance(text, str, _RULE, CommError)
        scheme, _, rest = text.partition(":")
        if scheme == "unix" and rest.startswith("/"):
            return cls(folder=Path(rest))
        host, _, port = rest.removeprefix("//").rpartition(":")
        if scheme == "tcp" and rest.startswith("//") and host and port.isdecimal() and int(port) < 1 << 16:
            return cls(host=host.strip("[]"), port=int(port))
        raise CommError(f"{_RULE}, got {brief(text)}")

    def __str__(self) -> str:
        if self.folder is not None:
            return f"unix:{self.folder}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    @property
    def door(self) -> str:
        """Where the door of rank 0 is."""
        return f"{self}/door" if self.folder is not None else str(self)

    @property
    def token_file(self) -> Path:
        """Where the token is kept, if the publisher made it."""
        if self.folder is not None:
            return self.folder / "token"
        return cache_root() / "publishers" / f"{self.host.replace(':', '_')}_{self.port}.token"


def tcp_door(hosts: tuple[str, ...], port: int, token: bytes) -> Door:
    """Return a door at addresses of this host.

    Raises:
        OSError: one of them cannot be listened on.
    """
    made: list[socket.socket] = []
    try:
        for host in hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            made.append(socket.create_server((host, port), family=family, backlog=_BACKLOG))
            port = made[0].getsockname()[1]
    except OSError:
        for one in made:
            one.close()
        raise
    door = Door(made, [str(Address(host=host, port=port)) for host in hosts], None)
    door.token = token
    return door


def folder_door(folder: Path, token: bytes) -> Door:
    """Return a door in a folder, which is made where it is missing.

    Raises:
        OSError: it is there and not this user's alone, or its file system takes no sockets.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    door = Door.in_folder(folder)
    door.token = token
    return door


class FolderLock:
    """Holds a publisher's folder for this process, and what lies in it; `release` removes it."""

    def __init__(self, folder: Path) -> None:
        """Take the folder over, without what a publisher that was killed has left there.

        Raises:
            CommError: another publisher has it, or it is not this user's alone.
        """
        self._folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            about = folder.stat(follow_symlinks=False)
            if about.st_uid != os.geteuid() or about.st_mode & 0o077:
                raise PermissionError(
                    "it must be a folder of this user that nobody else may enter (mode 0700)"
                )
            self._fd = self._locked()
        except OSError as error:
            raise CommError(f"no publisher can be at unix:{folder}: {error.strerror or error}") from error
        self._sweep()

    def release(self) -> None:
        """Let go of the folder and remove what is in it; the folder too, where nothing else is in it."""
        if self._fd < 0:
            return
        self._sweep()
        (self._folder / "lock").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._folder.rmdir()
        os.close(self._fd)
        self._fd = -1

    def _locked(self) -> int:
        path = self._folder / "lock"
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(fd), os.stat(path)):
                        return fd
            except BlockingIOError:
                os.close(fd)
                raise OSError(
                    None, "another publisher is there; close it, or give this one a folder of its own"
                ) from None
            os.close(fd)  # who let go removed it meanwhile

    def _sweep(self) -> None:
        for name in ("door", "token"):
            (self._folder / name).unlink(missing_ok=True)
        for rank in self._folder.glob("rank-*"):
            shutil.rmtree(rank, ignore_errors=True)


def checked_token(token: object) -> bytes:
    """Return a token given by the user, or raise CommError."""
    token = instance(token, bytes, "a token is bytes", CommError)
    if not _LEAST_TOKEN_BYTES <= len(token) <= _MOST_TOKEN_BYTES:
        raise CommError(f"a token has {_LEAST_TOKEN_BYTES} to {_MOST_TOKEN_BYTES} bytes, got {len(token)}")
    return token


def new_token() -> bytes:
    """Return a token that nobody knows yet."""
    return secrets.token_bytes(TOKEN_BYTES)


def write_token(path: Path, token: bytes) -> None:
    """Write a token where this user alone may read it.

    Raises:
        CommError: it cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(token.hex().encode())
    except OSError as error:
        raise CommError(f"the token cannot be kept in {path}: {error.strerror or error}") from error


def read_token(path: object) -> bytes:
    """Return the token that a publisher wrote.

    Raises:
        CommError: it is not there, others may read it, or it is not a token.
    """
    path = check_path(path, "token_file is the path of a publisher's token", CommError)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            about = os.fstat(fd)
            if about.st_uid != os.geteuid() or about.st_mode & 0o077:
                raise PermissionError("it must be this user's, and nobody else's to read (mode 0600)")
            text = file.read(2 * _MOST_TOKEN_BYTES + 1)
        return checked_token(bytes.fromhex(text.decode("ascii")))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise CommError(
            f"there is no token in {path}: {why}; pass token=, or token_file= with the publisher's `token_file`"
        ) from error
