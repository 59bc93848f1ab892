"""Where object files are kept: a folder that only this user can write to, a file a function.

A file begins with a digest of what its code is for (the machine's key, the function's name) and of the code. Whoever
could forge it could run code as this user without it: what it keeps out is files that are cut, spoiled or another's.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lowshard import private_dir

_LOCK_WAIT_S = 120.0
_DIGEST_BYTES = 32
_LOCKS = 16


def unsealed(key: str, name: str, content: bytes) -> bytes | None:
    """Return the code of a file's content, None where it is not whole or for another function or key."""
    code = content[_DIGEST_BYTES:]
    return code if _digest(key, name, code) == content[:_DIGEST_BYTES] else None


def _digest(key: str, name: str, code: bytes) -> bytes:
    return hashlib.sha256(f"{key} {name} {len(code)}\n".encode() + code).digest()


class ObjectStore:
    """The object files of one machine."""

    _has_said = False
    """Of this process, whatever the store."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key

    def read(self, name: str) -> bytes | None:
        """Return a function's code, None where there is none that may be used."""
        try:
            with self._opened() as inside:
                content = private_dir.read_file(f"{name}.o", inside)
        except OSError:
            return None
        return unsealed(self.key, name, content)

    def write(self, name: str, code: bytes) -> bool:
        """Keep a function's code, and say whether that was possible; why it was not is said once, on stderr."""
        try:
            with self._opened(make=True) as inside:
                private_dir.write_file(f"{name}.o", inside, _digest(self.key, name, code) + code)
        except OSError as error:
            self._say(error)
            return False
        return True

    def has_any(self) -> bool:
        """Say whether there is code of this machine."""
        try:
            with self._opened() as inside:
                return any(name.endswith(".o") for name in os.listdir(inside))
        except OSError:
            return False

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Let one process compile a function; after a time, or where there are no locks, go on without."""
        try:
            with self._opened(make=True) as inside:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                lock = os.open(f"lock{zlib.crc32(name.encode()) % _LOCKS}", flags, 0o600, dir_fd=inside)
        except OSError:
            yield
            return
        try:
            deadline_s = time.monotonic() + _LOCK_WAIT_S
            while time.monotonic() < deadline_s:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.02)
                except OSError:  # no locks on this file system
                    break
            yield
        finally:
            os.close(lock)

    @contextmanager
    def _opened(self, make: bool = False) -> Iterator[int]:
        """Open the machine's folder."""
        if make:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
        outer = private_dir.open_folder(self.folder, make=make)
        try:
            inner = private_dir.open_folder(self.key, outer, make=make)
        finally:
            os.close(outer)
        try:
            yield inner
        finally:
            os.close(inner)

    def _say(self, error: OSError) -> None:
        if ObjectStore._has_said:
            return
        ObjectStore._has_said = True
        text = (
            f"lowshard: compiled code is neither kept in {self.folder} nor loaded from it ({error}): each process "
            "compiles what it needs in memory; NUMBA_CACHE_DIR names another folder\n"
        )
        with suppress(OSError, ValueError, AttributeError):  # stderr is closed, or full
            sys.stderr.write(text)
