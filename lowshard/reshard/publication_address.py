"""The address of a publisher, and the token that its subscribers authenticate with.

`unix:/folder`: one host; the folder belongs to one user, holds the listeners' sockets, the token and a lock, and is
created if missing. `tcp://host:port`: any hosts; port 0 picks a free one. The token is in a file of mode 0600: in the
folder, or for TCP below the cache folder, from where the user copies it to other hosts.

A publisher removes its own files and those of a killed one, never files that another publisher has made since.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import socket
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowshard.argument import brief, instance
from lowshard.argument import path as check_path
from lowshard.comm.listener import TOKEN_BYTES, Listener
from lowshard.errors import CommError, LowshardError
from lowshard.settings import cache_root

_RULE = (
    "an address is 'unix:/folder' on one host, the folder's whole path from / on, or 'tcp://host:port', "
    "a port of 0 to 65535"
)
_BRING_TOKEN = "pass token=, or token_file= with the publisher's `token_file`"
_LEAST_TOKEN_BYTES = 16
_MOST_TOKEN_BYTES = 4096
_BACKLOG = 1024
_LOCK = "lock"
_NAMES = re.compile("lock|listener|token|rank-[0-9]+")
"""Names of a publisher's files; others in the folder are never touched."""
_TRIES = 100
"""How often a folder is created again because a closing publisher has removed it."""


@dataclass(frozen=True)
class Address:
    """A parsed address."""

    folder: Path | None = None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: object) -> Address:
        """Return the parsed address."""
        text = instance(text, str, _RULE, CommError)
        scheme, _, rest = text.partition(":")
        if scheme == "unix" and rest.startswith("/") and _is_path(rest):
            return cls(folder=Path(rest))
        named, _, port = rest.removeprefix("//").rpartition(":")
        host = named.strip("[]")
        is_port = re.fullmatch("[0-9]{1,5}", port) and int(port) < 1 << 16
        if scheme == "tcp" and rest.startswith("//") and _is_host(host) and is_port:
            return cls(host=host, port=int(port))
        raise CommError(f"{_RULE}, got {brief(text)}")

    def __str__(self) -> str:
        if self.folder is not None:
            return f"unix:{self.folder}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    @property
    def listener(self) -> str:
        """Address of rank 0's listener."""
        return f"{self}/listener" if self.folder is not None else str(self)

    @property
    def token_file(self) -> Path:
        """Path of the token, if the publisher made it."""
        if self.folder is not None:
            return self.folder / "token"
        return cache_root() / "publishers" / f"{self.host.replace(':', '_')}_{self.port}.token"

    @property
    def no_token(self) -> str:
        """What a subscriber should do if there is no token in `token_file`."""
        if self.folder is not None:
            return "start the publisher, which makes it, or correct the address"
        return f"start the publisher; on another host than its own {_BRING_TOKEN}"


def _is_path(text: str) -> bool:
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def _is_host(text: str) -> bool:
    try:
        return bool(text) and b"\0" not in text.encode("idna")
    except UnicodeError:
        return False


class PublisherListener(Listener):
    """A listener that removes only its own socket file, and nothing in a forked child."""

    def __init__(
        self, listening: Sequence[socket.socket], addresses: Sequence[str], path: Path | None
    ) -> None:
        super().__init__(listening, addresses, path)
        self._pid = os.getpid()
        self._own = None if path is None else _about(path)

    def close(self) -> None:
        """Stop listening; remove the socket file if it is this listener's."""
        if os.getpid() != self._pid:  # a forked child has copies of what its parent still uses
            self._selector.close()
            for one in self._listening:
                one.close()
            return
        path, self._path = self._path, None
        if path is not None and _is_same(self._own, _about(path)):
            with contextlib.suppress(OSError):
                path.unlink()
        super().close()


def tcp_listener(hosts: tuple[str, ...], port: int, token: bytes) -> Listener:
    """Return a listener on addresses of this host."""
    made: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        for host in hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            server = socket.create_server((host, port), family=family, backlog=_BACKLOG)
            made.append(stack.enter_context(server))
            port = made[0].getsockname()[1]
        stack.pop_all()
    listener = PublisherListener(made, [str(Address(host=host, port=port)) for host in hosts], None)
    listener.token = token
    return listener


def folder_listener(folder: Path, token: bytes) -> Listener:
    """Return a listener in a folder, which is created if missing."""
    folder.mkdir(mode=0o700, exist_ok=True)
    listener = PublisherListener.in_folder(folder)
    listener.token = token
    return listener


class FolderLock:
    """Locks a publisher's folder for this process; `release` removes what is in it."""

    def __init__(self, folder: Path) -> None:
        """Lock the folder and remove what a killed publisher has left."""
        self._folder, self._pid = folder, os.getpid()
        self._fd = -1
        try:
            self._fd = _locked(folder)
            self._refuse_others()
            self._sweep()
        except OSError as error:
            self._close()
            raise CommError(f"no publisher can be at unix:{folder}: {error.strerror or error}") from error

    def release(self) -> None:
        """Remove the publisher's files, and the folder if it is empty then; unlock it."""
        try:
            if self._fd >= 0 and os.getpid() == self._pid and _is_lock_of(self._folder, self._fd):
                with contextlib.suppress(OSError):
                    self._sweep()
                    (self._folder / _LOCK).unlink(missing_ok=True)
                    self._folder.rmdir()
        finally:
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _refuse_others(self) -> None:
        """Raise OSError if a file that no publisher made has a publisher's file name."""
        ours = (path for path in self._folder.iterdir() if _NAMES.fullmatch(path.name))
        other = next((path for path in ours if not _is_made_here(path)), None)
        if other is None:
            return
        if other.name != _LOCK:
            (self._folder / _LOCK).unlink(missing_ok=True)
        raise OSError(
            None,
            f"a publisher makes {other.name!r} in its folder, and there is one that no publisher has made; give this "
            "publisher a folder of its own",
        )

    def _sweep(self) -> None:
        """Remove publishers' files, except the lock."""
        for path in list(self._folder.iterdir()):
            if path.name == _LOCK or not _is_made_here(path):
                continue
            if path.name.startswith("rank-"):
                (path / "listener").unlink(missing_ok=True)
                path.rmdir()
            else:
                path.unlink(missing_ok=True)


def _locked(folder: Path) -> int:
    """Return the locked descriptor of a folder's lock file; both are created if missing."""
    for left in reversed(range(_TRIES)):  # who closes at this moment removes both, at any step of this
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            about = folder.stat(follow_symlinks=False)
            if about.st_uid != os.geteuid() or about.st_mode & 0o077:
                raise PermissionError(
                    "it must be a folder of this user that nobody else may enter (mode 0700)"
                )
            fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except (FileNotFoundError, FileExistsError):
            if not left:
                raise
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_lock_of(folder, fd):
                return fd
        except BlockingIOError:
            os.close(fd)
            break
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    raise OSError(None, "another publisher is there; close it, or give this one a folder of its own")


def _is_lock_of(folder: Path, fd: int) -> bool:
    """Return whether a descriptor is that of the lock file now in a folder."""
    return _is_same(os.fstat(fd), _about(folder / _LOCK))


def _is_made_here(path: Path) -> bool:
    """Return whether a path is a publisher's file, or does not exist any more."""
    about = _about(path)
    if about is None:
        return True
    if path.name == "listener":
        return stat.S_ISSOCK(about.st_mode)
    if path.name == _LOCK:
        return stat.S_ISREG(about.st_mode) and not about.st_size
    if path.name == "token":
        return stat.S_ISREG(about.st_mode) and not about.st_mode & 0o077 and _is_hex(path, about.st_size)
    if not _NAMES.fullmatch(path.name) or not stat.S_ISDIR(about.st_mode):
        return False
    return all(inner.name == "listener" and _is_made_here(inner) for inner in _listed(path))


def _listed(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError):
        yield from folder.iterdir()


def _is_hex(path: Path, size_bytes: int) -> bool:
    """Return whether a file holds a token as publishers write it, or the beginning of one."""
    try:
        return size_bytes <= 2 * _MOST_TOKEN_BYTES and set(path.read_bytes()) <= set(b"0123456789abcdef")
    except FileNotFoundError:
        return True


def _about(path: Path) -> os.stat_result | None:
    """Return the status of a path, None if it does not exist."""
    try:
        return path.stat(follow_symlinks=False)
    except OSError:
        return None


def _is_same(own: os.stat_result | None, found: os.stat_result | None) -> bool:
    """Return whether two are the same file; the first is open, so its inode is not reused."""
    return own is not None and found is not None and os.path.samestat(own, found)


def checked_token(token: object) -> bytes:
    """Return a user's token, or raise CommError."""
    token = instance(token, bytes, "a token is bytes", CommError)
    if not _LEAST_TOKEN_BYTES <= len(token) <= _MOST_TOKEN_BYTES:
        raise CommError(f"a token has {_LEAST_TOKEN_BYTES} to {_MOST_TOKEN_BYTES} bytes, got {len(token)}")
    return token


def new_token() -> bytes:
    """Return a new random token."""
    return secrets.token_bytes(TOKEN_BYTES)


def write_token(path: Path, token: bytes) -> None:
    """Write a token to a file that only this user may read."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(token.hex().encode())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CommError(
            f"the token cannot be kept in {path}: {error.strerror or error}; make room there, or pass token="
        ) from error


def remove_token(path: Path, token: bytes) -> None:
    """Remove a token file if it still holds this token."""
    with contextlib.suppress(LowshardError, OSError):
        if read_token(path) == token:
            path.unlink()


def read_token(path: object, missing: str = _BRING_TOKEN) -> bytes:
    """Return the token that a publisher wrote."""
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
        advice = missing if isinstance(error, FileNotFoundError) else _BRING_TOKEN
        raise CommError(f"there is no token in {path}: {why}; {advice}") from error
