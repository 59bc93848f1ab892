"""Code that is compiled once for a machine and kept on disk: one process compiles, the others load what it made.

Numba compiles; what is kept is an object file, which llvmlite alone puts into memory. So a process that finds its code
on disk imports no Numba: that would take half a second and 45 MB of each rank.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from lowshard.compiled.elf import symbols_of
from lowshard.compiled.native import Native, link, python_symbol
from lowshard.compiled.signature import Signature
from lowshard.compiled.store import ObjectStore
from lowshard.settings import cache_root, environment, numba_cache_dir

_FORM = 2
"""Counts up when objects are made, kept or called in another way."""
_NUMBA_SETTINGS = (
    "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX",  # the processor that is compiled for
    "NUMBA_OPT", "NUMBA_LOOP_VECTORIZE", "NUMBA_SLP_VECTORIZE",  # what LLVM makes of it
    "NUMBA_LLVM_REFPRUNE_PASS", "NUMBA_LLVM_REFPRUNE_FLAGS",
    "NUMBA_DISABLE_INTEL_SVML",  # which functions are called
    "NUMBA_BOUNDSCHECK", "NUMBA_DEBUGINFO", "NUMBA_EXTEND_VARIABLE_LIFETIMES",  # what else the code does
    "NUMBA_DEBUG_JIT", "NUMBA_DEBUG_NRT",
)  # fmt: skip
"""Numba's settings that change the code of functions such as these. The others do not: above all NUMBA_NUM_THREADS,
which differs between jobs of one machine."""


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

    Where code can be kept in no folder that only this user can write to, the function is compiled in memory, and that
    is said once.
    """
    store = _store()
    code, origin = _whole(store.read(name), name), "disk"
    if code is None:
        with store.locked():
            code = _whole(store.read(name), name)
            if code is None:
                from lowshard.compiled.compiler import compile_object

                code = compile_object(name, make(), signature, error_model)
                origin = "compiled" if store.write(name, code) else "memory"
    origins[name] = origin
    return link(code, name)


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
    if _store().has_any():
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
    named = numba_cache_dir()
    return named / "lowshard" if named else cache_root() / "compiled"


@cache
def _store() -> ObjectStore:
    """Return the store of code for this machine's CPU, made by these versions with these settings."""
    import llvmlite
    import llvmlite.binding as llvm
    import numpy as np

    spec = importlib.util.find_spec("numba")
    places = list(spec.submodule_search_locations or ()) if spec else []
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
        [environment().get(name) for name in _NUMBA_SETTINGS],
    )
    return ObjectStore(cache_folder(), hashlib.sha256(repr(facts).encode()).hexdigest()[:16])
