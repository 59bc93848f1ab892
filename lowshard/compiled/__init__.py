"""Code that Numba compiles once for a machine: kept on disk as object files, loaded without Numba."""

from lowshard.compiled.cache import (
    INT,
    Signature,
    cache_folder,
    digest_of,
    load_compiled,
    load_native,
    numba_fault,
    origins,
)

__all__ = [
    "INT",
    "Signature",
    "cache_folder",
    "digest_of",
    "load_compiled",
    "load_native",
    "numba_fault",
    "origins",
]
