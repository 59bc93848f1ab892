"""Code that Numba compiles once for a machine: kept on disk as object files, loaded without Numba."""

from lowshard.compiled.cache import (
    cache_folder,
    digest_of,
    load_compiled,
    load_native,
    numba_fault,
    origins,
    prepared,
)
from lowshard.compiled.signature import INT, Signature

__all__ = [
    "INT",
    "Signature",
    "cache_folder",
    "digest_of",
    "load_compiled",
    "load_native",
    "numba_fault",
    "origins",
    "prepared",
]
