"""The CUDA sources compiled for the host: the engine of the GPU on NumPy arrays, with its alignment checked.

The folder beside it has what CUDA's words mean to a C++ compiler. The .cu files are those that are shipped.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
import threading
from collections.abc import Hashable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lowshard.kernels.cuda.cuda_engine import CudaEngine
from lowshard.kernels.cuda.cuda_module import FOLDER, SOURCES
from lowshard.settings import cache_root

SHIM = Path(__file__).with_name("cuda_host")


class HostFault(RuntimeError):
    """A kernel did what a GPU would fault on, or leave undefined."""


@cache
def host_library() -> tuple[ctypes.CDLL, str]:
    """Return all kernels as one library, compiled once and kept, and what the compiler said."""
    command = [
        "g++", "-O2", "-std=c++17", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wno-unknown-pragmas",
        "-U_FORTIFY_SOURCE",  # it takes a jump between fibers for a damaged stack
        "-include", str(SHIM / "cuda_host.hpp"), "-I", str(FOLDER), "-x", "c++",
        *(str(FOLDER / f"{name}.cu") for name in SOURCES), str(SHIM / "cuda_host.cpp"), "-o",
    ]  # fmt: skip
    made_from = hashlib.sha256("\0".join(command).encode())
    made_from.update(subprocess.run(["g++", "--version"], capture_output=True, check=True).stdout)
    for path in sorted((*FOLDER.glob("*.cu*"), *SHIM.iterdir())):
        made_from.update(path.read_bytes())
    kept = cache_root() / "tests" / f"cuda_host-{made_from.hexdigest()[:24]}.so"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="making-", dir=kept.parent), kept.name)
        done = subprocess.run([*command, made], capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        kept.with_suffix(".txt").write_text(done.stderr)
        made.rename(kept)
        made.parent.rmdir()
    library = ctypes.CDLL(str(kept))
    library.lowshard_run.restype, library.lowshard_trace.restype = ctypes.c_char_p, ctypes.c_size_t
    return library, kept.with_suffix(".txt").read_text()


class HostLauncher:
    """A `Launcher` whose device memory is NumPy arrays."""

    lock = threading.RLock()  # one launch at a time: the fibers are shared
    current_stream: Hashable = 0
    multiprocessors = 4
    most_ctas = 0  # of a grid, where that is set: every kernel loops over what is left
    only_ctas: tuple[int, int] | None = None  # the first of the CTAs to run, and the one behind the last

    def __init__(self) -> None:
        self.launches: list[tuple[str, int]] = []  # kernel and CTAs of each

    def to_device(self, words: Any) -> Any:
        """Return a copy on a 16-byte boundary."""
        raw = np.empty(words.nbytes + 16, np.uint8)
        copy = raw[-raw.ctypes.data % 16 :][: words.nbytes].view(np.int64)
        copy[...] = words
        return copy

    def keep_captured(self, words: Any) -> None:
        """Nothing is captured here."""

    def launch(self, kernel: str, ctas: int, threads: int, args: Sequence[int]) -> None:
        """Run a kernel to its end; a `HostFault` is what a GPU would fault on, or lanes that do not meet."""
        assert {type(word) for word in (ctas, *args)} == {int}  # CuPy gives other types other widths
        ctas = min(ctas, self.most_ctas or ctas)
        with self.lock:
            self.launches.append((kernel, ctas))
            error = run_on_host(kernel, ctas, threads, args, self.only_ctas or (0, ctas), flush=False)
        if error:
            raise HostFault(f"{kernel}: {error}")


def run_on_host(
    kernel: str, grid: int, threads: int, args: Sequence[int], ctas: tuple[int, int], flush: bool
) -> str:
    """Run CTAs of a grid, from the first to the one behind the last, and return what went wrong, "" if nothing.

    With `flush`, which needs x86, fp32 subnormals count as zero, as CuPy has kernels compiled.
    """
    library, _ = host_library()
    words = (ctypes.c_uint64 * len(args))(*(arg & (1 << 64) - 1 for arg in args))
    error = library.lowshard_run(getattr(library, kernel), words, len(args), grid, threads, *ctas, int(flush))
    return (error or b"").decode()


def host_cuda_engine() -> CudaEngine:
    """Return a CUDA engine that works on NumPy arrays."""
    return CudaEngine(HostLauncher())
