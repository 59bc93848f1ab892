"""Code that Numba compiles once for a machine: kept on disk as object files, loaded without Numba."""

from lowshard.compiled.loader import digest_of, load_compiled, load_native, numba_fault, origins, prepared
from lowshard.compiled.native import INT, Signature
from lowshard.compiled.store import cache_folder

__all__ = [
    "INT", "Signature", "cache_folder", "digest_of", "load_compiled", "load_native", "numba_fault", "origins",
    "prepared",
]  # fmt: skip
