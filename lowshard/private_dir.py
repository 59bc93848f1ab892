"""Private folders and files: of this user, not writable by others, for code and data that are trusted.

Everything is opened first, without following a link and without waiting for a writer, and then checked by its
descriptor, so that nothing can be put in its place meanwhile. Folders above may be shared: who may rename there can
replace a folder by another, but by none that this user owns.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

__all__ = ["open_folder", "read_file", "write_file"]

_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_BYTES = 64 << 20


def open_folder(name: str | Path, inside: int | None = None, *, make: bool = False) -> int:
    """Return a descriptor of a folder."""
    if make:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=inside)
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _OPEN, dir_fd=inside)
    try:
        _require_own(name, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_file(name: str | Path, inside: int | None = None) -> bytes:
    """Return the content of a regular file; arguments as for `open_folder`."""
    descriptor = os.open(name, os.O_RDONLY | _OPEN, dir_fd=inside)
    try:
        found = os.fstat(descriptor)
        _require_own(name, found)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
            raise PermissionError(f"{name} is not a regular file of at most {_MOST_BYTES >> 20} MiB")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(_MOST_BYTES)
    finally:
        os.close(descriptor)


def write_file(name: str, inside: int, content: bytes) -> None:
    """Write a file into an open folder, whole or not at all, for this user alone; what has its name is replaced."""
    part = f"{name}.{secrets.token_hex(8)}.part"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=inside)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.rename(part, name, src_dir_fd=inside, dst_dir_fd=inside)
    except BaseException:
        with suppress(OSError):
            os.unlink(part, dir_fd=inside)
        raise


def _require_own(name: str | Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{name} belongs to user {found.st_uid}, not to user {os.geteuid()}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{name} may be written to by others: chmod go-w")
