"""Code that is compiled once for a machine and kept on disk: one process compiles, the others load what it made.

Numba compiles; what is kept is an object file, which llvmlite alone puts into memory. So a process that finds its code
on disk imports no Numba: that would take half a second and 45 MB of each rank.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lowshard.compiled.native import Native, link

_LOCK_WAIT_S = 120.0
_FORM = 1
"""Counts up when objects are made or called in another way."""
_SUM_BYTES = 32


@dataclass(frozen=True)
class Signature:
    """What a compiled function takes and returns.

    Attributes:
        args: of each argument its kind: "int64", "bool", or a C-contiguous array such as "float32[1]" of one dim.
        result: "int64", "uint64" or "void".
    """

    args: tuple[str, ...]
    result: str = "int64"


INT = "int64"

origins: dict[str, str] = {}
"""Of each function that this process has: "disk", "compiled" and kept, or "memory" where nothing could be kept."""


def load_compiled(
    name: str, make: Callable[[], Any], signature: Signature, error_model: str = "python"
) -> Callable[..., Any]:
    """Return a compiled function to be called from Python; the GIL is released meanwhile.

    Args:
        name: of this function alone, with a digest of all source that it is made from: see `digest_of`.
        make: returns the Python function; called only where it must be compiled.
        signature: what it takes.
        error_model: with "numpy" a division by zero gives Inf or NaN, without which loops that divide are not
            vectorised.

    Raises:
        ImportError: it is not on disk, and Numba is missing.
    """
    call = load_native(name, make, signature, error_model).call
    if not any("[" in kind for kind in signature.args):
        return call

    def with_arrays(*args: Any) -> Any:
        flat: list[Any] = []
        for value, kind in zip(args, signature.args, strict=True):
            if "[" in kind:
                flat.append(value.__array_interface__["data"][0])  # a third of the time of value.ctypes.data
                flat.extend(value.shape)
            else:
                flat.append(value)
        return call(*flat)

    return with_arrays


def load_native(
    name: str, make: Callable[[], Any], signature: Signature, error_model: str = "python"
) -> Native:
    """Return a compiled function with its address, for calls as C makes them; otherwise as `load_compiled`.

    Where no cache folder can be written the function is compiled in memory.
    """
    folder = _machine_folder()
    path = folder / f"{name}.o"
    code, origin = _kept(path), "disk"
    if code is None:
        with _one_at_a_time(folder):
            code = _kept(path)
            if code is None:
                from lowshard.compiled.compiler import compile_object

                code = compile_object(name, make(), signature, error_model)
                origin = "compiled" if _keep(path, code) else "memory"
    origins[name] = origin
    return link(code, name)


def numba_fault() -> str | None:
    """Return why functions cannot be compiled here, None if they can or if this machine's are on disk."""
    if importlib.util.find_spec("llvmlite") is None or importlib.util.find_spec("numba") is None:
        return "Numba is not installed"
    if any(_machine_folder().glob("*.o")):
        return None
    try:
        import numba  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


def digest_of(paths: Iterable[Path]) -> str:
    """Return a digest of source files that compiled code is made from, to be part of the function's name."""
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def cache_folder() -> Path:
    """Return where compiled code is kept: `$NUMBA_CACHE_DIR/lowshard`, else compiled/ in lowshard's cache folder."""
    named = os.environ.get("NUMBA_CACHE_DIR", "")
    if named:
        return Path(named) / "lowshard"
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path("~/.cache").expanduser()) / "lowshard" / "compiled"


@cache
def _machine_folder() -> Path:
    """Return the folder of code for this machine's CPU, made by these versions with these settings."""
    import llvmlite
    import llvmlite.binding as llvm
    import numpy as np

    spec = importlib.util.find_spec("numba")
    places = list(spec.submodule_search_locations or ()) if spec else []
    settings = {k: v for k, v in os.environ.items() if k.startswith("NUMBA_") and k != "NUMBA_CACHE_DIR"}
    facts = (
        _FORM,
        sys.implementation.cache_tag,
        digest_of(path for place in places if (path := Path(place) / "_version.py").is_file()),
        digest_of(Path(__file__).with_name(name) for name in ("compiler.py", "native.py")),
        llvmlite.__version__,
        np.__version__,
        llvm.get_process_triple(),
        llvm.get_host_cpu_name(),
        llvm.get_host_cpu_features().flatten(),
        sorted(settings.items()),
    )
    return cache_folder() / hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _kept(path: Path) -> bytes | None:
    """Return the code in a file, None where there is no such file or it is broken."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    code = content[_SUM_BYTES:]
    return code if hashlib.sha256(code).digest() == content[:_SUM_BYTES] else None


def _keep(path: Path, code: bytes) -> bool:
    """Write code to a file, whole or not at all."""
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        Path(temporary).replace(path)
    except OSError:  # no folder, no room, no right to write
        with suppress(OSError):
            Path(temporary).unlink()
        return False
    return True


@contextmanager
def _one_at_a_time(folder: Path) -> Any:
    """Hold a lock in the cache folder; after a time, or where locks do not work, go on without it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
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
