"""Object files on disk: those that came with the package, and those that were compiled on this machine.

A file begins with a digest of what its code is for (a level's key, the function's name) and of the code: what is spoilt
is not used, nor a file that somebody could have changed who could not change lowshard itself or this user's files.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import stat
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lowshard.compiled.level import Level, host_levels, target_key
from lowshard.settings import SHIPPED_CODE, cache_root, numba_cache_dir

_LOCK_WAIT_S, _LOCKS = 120.0, 16
_DIGEST_BYTES, _MOST_BYTES = 32, 64 << 20
_said: list[str] = []


def cache_folder() -> Path:
    """Return where compiled code is kept: `$NUMBA_CACHE_DIR/lowshard`, else compiled/ in lowshard's cache folder."""
    named = numba_cache_dir()
    return named / "lowshard" if named else cache_root() / "compiled"


def package_folder() -> Path:
    """Return where code that came with the package lies, a folder a level."""
    return Path(__file__).with_name("objects")


def package_level() -> Level | None:
    """Return the best of this processor's levels for which code came with the package and may be used, or None."""
    levels = () if SHIPPED_CODE.choice() == "off" else host_levels()
    return next((level for level in levels if (package_folder() / level.name).is_dir()), None)


def read_kept(name: str) -> bytes | None:
    """Return a function's code that was compiled on this machine, None where there is none that may be used."""
    return _read(cache_folder() / (key := target_key()) / f"{name}.o", key, name)


def read_package(name: str, level: Level) -> bytes | None:
    """Return a function's code that came with the package for a level, None where none came or of other source."""
    return _read(package_folder() / level.name / f"{name}.o", level.key, name)


def has_kept() -> bool:
    """Say whether any code was compiled on this machine."""
    return any((cache_folder() / target_key()).glob("*.o"))


def keep(name: str, code: bytes) -> bool:
    """Keep a function's code, and say whether that was possible; why it was not is said once, on stderr."""
    key = target_key()
    folder = cache_folder() / key
    part = folder / f"{name}.{secrets.token_hex(8)}.part"
    try:
        for made in (folder.parent, folder):  # a mode is the last one's alone
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(_digest(key, name, code) + code)
        part.rename(folder / f"{name}.o")
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        _say(str(error.strerror))
        return False
    return True


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Let one process compile a function; after a time, or where there are no locks, go on without."""
    path = cache_folder() / target_key() / f"lock{zlib.crc32(name.encode()) % _LOCKS}"
    try:
        for made in (path.parents[1], path.parent):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
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


def _read(path: Path, key: str, name: str) -> bytes | None:
    try:
        with open(path, "rb", opener=lambda at, flags: os.open(at, flags | os.O_NONBLOCK)) as file:
            found, package = os.fstat(file.fileno()), os.stat(__file__)
            writers = stat.S_IWGRP | stat.S_IWOTH
            if (
                found.st_uid not in (0, os.geteuid(), package.st_uid)
                or found.st_mode & writers & ~package.st_mode
                or not stat.S_ISREG(found.st_mode)
            ):
                return None
            content = file.read(_MOST_BYTES)
    except OSError:
        return None
    seal, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if seal == _digest(key, name, code) else None


def _digest(key: str, name: str, code: bytes) -> bytes:
    return hashlib.sha256(f"{key} {name} {len(code)}\n".encode() + code).digest()


def _say(error: str) -> None:
    if _said:
        return
    _said.append(error)
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed, or full
        sys.stderr.write(
            f"lowshard: compiled code cannot be kept in {cache_folder()} ({error}): each process compiles what it "
            "needs in memory; NUMBA_CACHE_DIR names another folder\n"
        )
