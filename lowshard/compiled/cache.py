"""Code that is compiled once for a machine and kept on disk: one process compiles, the others load what it made.

Numba compiles; what is kept is an object file, which llvmlite alone puts into memory. So a process that finds its code
on disk imports no Numba: that would take half a second and 45 MB of each rank.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from lowshard.compiled.elf import symbols_of
from lowshard.compiled.native import Native, link, python_symbol
from lowshard.compiled.shipped import Level, level_in_use, level_of_code, read_shipped
from lowshard.compiled.signature import Signature
from lowshard.compiled.store import ObjectStore
from lowshard.settings import NUMBA_CODE_SETTINGS, cache_root, environment, is_later_rank, numba_cache_dir

_FORM = 2
"""Counts up when objects are made, kept or called in another way."""


origins: dict[str, str] = {}
"""Of each function that this process has: "disk", "shipped" with the package, "compiled" and kept, or "memory" where
nothing could be kept."""
_made_for: list[Level] = []
"""A level that this process compiles for, in place of this processor's."""


def load_compiled(
    name: str, make: Callable[[], Any], signature: Signature, error_model: str = "python"
) -> Callable[..., Any]:
    """Return a compiled function to be called from Python; the GIL is released meanwhile."""
    call = load_native(name, make, signature, error_model).call
    return _WithArrays(call, signature) if any("[" in kind for kind in signature.args) else call


class _WithArrays:
    """A compiled function that takes arrays: what is called takes their addresses and extents."""

    def __init__(self, call: Callable[..., Any], signature: Signature) -> None:
        self.native = call
        self._is_array = ["[" in kind for kind in signature.args]

    def __call__(self, *args: Any) -> Any:
        return self.native(*self.flat(args))

    def flat(self, args: Sequence[Any]) -> list[Any]:
        """Return the arguments as the function is called with them."""
        flat: list[Any] = []
        for value, is_array in zip(args, self._is_array, strict=True):
            if is_array:
                flat.append(value.__array_interface__["data"][0])  # a third of the time of value.ctypes.data
                flat.extend(value.shape)
            else:
                flat.append(value)
        return flat


def prepared(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Return a call of a compiled function whose arrays are looked at now, once; whoever calls it keeps them."""
    if isinstance(function, _WithArrays):
        return partial(function.native, *function.flat(args))
    return partial(function, *args)


def load_native(
    name: str, make: Callable[[], Any], signature: Signature, error_model: str = "python"
) -> Native:
    """Return a compiled function with its address, for calls as C makes them; otherwise as `load_compiled`."""
    store = _store()
    code, origin = _whole(store.read(name), name), "disk"
    if code is None and not _made_for:
        code, origin = _whole(read_shipped(name), name), "shipped"
    if code is None:
        with _said_when_long(name), store.locked(name):
            code, origin = _whole(store.read(name), name), "disk"
            if code is None:
                from lowshard.compiled.compiler import compile_object

                code, may_be_kept = compile_object(name, make, signature, error_model, level_made_for())
                origin = "compiled" if may_be_kept and store.write(name, code) else "memory"
    origins[name] = origin
    return link(code, name)


@contextmanager
def _said_when_long(name: str) -> Iterator[None]:
    """Say on stderr, once a process and on rank 0 alone, what takes so long where 2 s go by with compiling in all."""
    if _said or is_later_rank():
        yield
        return
    begin_s = time.monotonic()

    def say() -> None:
        _said.append(name)
        what, took_s = name.rpartition("_")[0], sum(_spent_s) + time.monotonic() - begin_s
        text = (
            f"lowshard: compiling for this processor, once ({what}; {took_s:.0f} s so far, up to a minute of a free "
            f"core in all; kept in {cache_folder()}). `lowshard warmup` does it beforehand\n"
        )
        with suppress(OSError, ValueError, AttributeError):  # stderr is closed, or full
            sys.stderr.write(text)

    timer = threading.Timer(max(0.0, SILENT_S - sum(_spent_s)), say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        _spent_s.append(time.monotonic() - begin_s)


SILENT_S = 2.0
"""Compiling that takes longer, in all of a process, is told of."""
_spent_s: list[float] = []
_said: list[str] = []


def _whole(code: bytes | None, name: str) -> bytes | None:
    """Return the code of a function if it is a whole object file that has this function, else None."""
    try:
        functions = frozenset() if code is None else symbols_of(code).functions
    except ValueError:
        return None
    return code if {name, python_symbol(name)} <= functions else None


def numba_fault() -> str | None:
    """Return why functions cannot be compiled here, None if they can or if this machine's are on disk."""
    if importlib.util.find_spec("llvmlite") is None or importlib.util.find_spec("numba") is None:
        return "Numba is not installed"
    if _store().has_any() or level_in_use() is not None:
        return None
    try:
        import numba  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


def digest_of(paths: Iterable[Path]) -> str:
    """Return a digest of source files that compiled code is made from, to be part of the function's name."""
    parts = sorted(hashlib.sha256(path.read_bytes()).digest() for path in paths)
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def compile_for(level: Level) -> Path:
    """Have this process compile all that it loads for a level, and return the folder that keeps it."""
    _made_for[:] = [level]
    _store.cache_clear()
    store = _store()
    return store.folder / store.key


def cache_folder() -> Path:
    """Return where compiled code is kept: `$NUMBA_CACHE_DIR/lowshard`, else compiled/ in lowshard's cache folder."""
    named = numba_cache_dir()
    return named / "lowshard" if named else cache_root() / "compiled"


def level_made_for() -> Level | None:
    """Return the level that this process compiles for, None for this very processor."""
    return _made_for[0] if _made_for else level_of_code()


@cache
def _store() -> ObjectStore:
    """Return the store of code for this processor's level, else for the very processor, these versions and settings."""
    level = level_made_for()
    if level is not None:
        return ObjectStore(cache_folder(), level.key)
    import llvmlite
    import llvmlite.binding as llvm
    import numpy as np

    spec = importlib.util.find_spec("numba")
    places = list(spec.submodule_search_locations or ()) if spec else []
    facts = (
        _FORM,
        sys.implementation.cache_tag,
        digest_of(path for place in places if (path := Path(place) / "_version.py").is_file()),
        digest_of(Path(__file__).with_name(name) for name in ("compiler.py", "emitted.py", "native.py")),
        llvmlite.__version__,
        np.__version__,
        llvm.get_process_triple(),
        llvm.get_host_cpu_name(),
        llvm.get_host_cpu_features().flatten(),
        [environment().get(name) for name in NUMBA_CODE_SETTINGS],
    )
    return ObjectStore(cache_folder(), hashlib.sha256(repr(facts).encode()).hexdigest()[:16])
