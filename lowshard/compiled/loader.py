"""Code that is compiled once for a machine and kept on disk: one process compiles, the others load what it made.

Numba compiles; llvmlite alone loads what is kept: to import Numba would take half a second and 45 MB of each rank.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lowshard.compiled import store
from lowshard.compiled.level import chosen
from lowshard.compiled.native import Native, Signature, link
from lowshard.settings import is_later_rank

origins: dict[str, str] = {}
"""Of each function that this process has: "disk", "shipped" with the package, "compiled" and kept, or "memory" where
nothing could be kept."""
quiet: list[str] = []
"""Not empty: compiling is not told of, any more or at all."""


def load_compiled(
    name: str, make: Callable[[], Any], signature: Signature, error_model: str = "python"
) -> Callable[..., Any]:
    """Return a compiled function to be called from Python; the GIL is released meanwhile."""
    call = load_native(name, make, signature, error_model).call
    return _WithArrays(call, signature) if any("[" in kind for kind in signature.args) else call


def load_native(
    name: str, make: Callable[[], Any], signature: Signature, error_model: str = "python"
) -> Native:
    """Return a compiled function with its address, for calls as C makes them; otherwise as `load_compiled`."""
    code, origin = store.read_kept(name), "disk"
    if code is None and not chosen and (level := store.package_level()) is not None:
        code, origin = store.read_package(name, level), "shipped"
    if code is None:
        with store.locked(name):
            code, origin = store.read_kept(name), "disk"
            if code is None:
                say_compiling(name)
                from lowshard.compiled.compiler import compile_object

                code, may_be_kept = compile_object(name, make, signature, error_model)
                origin = "compiled" if may_be_kept and store.keep(name, code) else "memory"
    origins[name] = origin
    return link(code, name)


class _WithArrays:
    """A compiled function that takes arrays: what is called takes their addresses and extents."""

    def __init__(self, call: Callable[..., Any], signature: Signature) -> None:
        self.native, self._is_array = call, ["[" in kind for kind in signature.args]

    def __call__(self, *args: Any) -> Any:
        return self.native(*self.flat(args))

    def flat(self, args: Sequence[Any]) -> list[Any]:
        """Return the arguments as the function is called with them."""
        flat: list[Any] = []
        for value, is_array in zip(args, self._is_array, strict=True):
            # The address: a third of the time of value.ctypes.data.
            flat += [value.__array_interface__["data"][0], *value.shape] if is_array else [value]
        return flat


def prepared(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Return a call of a compiled function whose arrays are looked at now, once; whoever calls it keeps them."""
    if not isinstance(function, _WithArrays):
        return partial(function, *args)
    return partial(function.native, *function.flat(args))


def numba_fault() -> str | None:
    """Return why functions cannot be compiled here, None if they can or if this machine's are on disk."""
    if importlib.util.find_spec("llvmlite") is None or importlib.util.find_spec("numba") is None:
        return "Numba is not installed"
    with suppress(ImportError):
        if store.package_level() is None and not store.has_kept():
            import numba  # noqa: F401
        return None
    return "Numba cannot be imported"


def digest_of(paths: Iterable[Path]) -> str:
    """Return a digest of source files that compiled code is made from, to be part of the function's name."""
    parts = sorted(hashlib.sha256(path.read_bytes()).digest() for path in paths)
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def say_compiling(name: str) -> None:
    """Say on stderr, once a process and on rank 0 alone, that code is being compiled and how not to wait for it."""
    if not quiet and not is_later_rank():
        quiet.append(name)
        with suppress(OSError, ValueError, AttributeError):  # stderr is closed, or full
            sys.stderr.write(
                f"lowshard: compiling for this processor, once ({name.rpartition('_')[0]} first; up to a minute of a "
                f"free core in all; kept in {store.cache_folder()}). `lowshard warmup` does it beforehand\n"
            )
