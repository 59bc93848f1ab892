"""Code that Numba compiles once for a machine and keeps on disk: one process compiles, the others read."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_LOCK_WAIT_S = 120.0


def compile_cached(
    function: Callable[..., Any], signature: Any, error_model: str = "python"
) -> Callable[..., Any]:
    """Compile a function for a signature, from Numba's cache on disk if it is there.

    With error_model="numpy" a division by zero gives Inf or NaN, without which loops that divide are not vectorised.

    One process of a machine compiles while the others wait, and read its result then. Where no cache
    folder can be written the function is compiled in memory.
    """
    from numba import njit

    try:
        lazy = njit(nogil=True, cache=True, error_model=error_model)(function)
    except RuntimeError:  # Numba finds no folder for its cache
        return njit([signature], nogil=True, error_model=error_model)(function)  # type: ignore[no-any-return]
    folder = Path(lazy.stats.cache_path)
    with _one_at_a_time(folder):
        try:
            lazy.compile(signature)
        except Exception:  # a full disk, a broken file: a fault of the kernel itself shows again here
            # What is kept of it may be broken for good; the next process is to find nothing.
            for kept in folder.glob(f"*{function.__qualname__}-*.nb[ci]"):
                with suppress(OSError):
                    kept.unlink()
            return njit([signature], nogil=True, error_model=error_model)(function)  # type: ignore[no-any-return]
    lazy.disable_compile()
    return lazy  # type: ignore[no-any-return]


def compile_callback(function: Callable[..., Any], signature: Any) -> Any:
    """Compile a function to be called by its address, as C calls; from Numba's cache on disk if it is there.

    The result has the `address`, which is good while it lives. Otherwise as `compile_cached`.
    """
    from numba import cfunc, njit

    def made(cache: bool) -> Any:
        return cfunc(signature, nopython=True, cache=cache)(function)

    try:
        folder = Path(njit(cache=True)(function).stats.cache_path)
    except RuntimeError:  # Numba finds no folder for its cache
        return made(False)
    with _one_at_a_time(folder):
        try:
            return made(True)
        except Exception:  # a full disk, a broken file
            for kept in folder.glob(f"*{function.__qualname__}-*.nb[ci]"):
                with suppress(OSError):
                    kept.unlink()
            return made(False)


def digest_of(paths: Iterable[Path]) -> str:
    """Return a digest of source files that compiled code is made from, to be part of the function's name.

    Numba looks at the time stamp of one file alone, and what a function calls may lie in others.
    """
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


@contextmanager
def _one_at_a_time(folder: Path) -> Any:
    """Hold a lock in the cache folder; after a time, or where locks do not work, go on without it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lowshard.lock", os.O_RDWR | os.O_CREAT, 0o666)
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
