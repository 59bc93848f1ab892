"""The CUDA sources compiled for the host: the engine of the GPU on NumPy arrays, with every access checked.

The folder beside it has what CUDA's words mean to a C++ compiler. The .cu files are those that are shipped.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from lowshard.kernels.buffer import address_range
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
    """A `Launcher` whose device memory is NumPy arrays.

    Attributes:
        multiprocessors: of the GPU it stands for; the grid follows from it.
        flush: fp32 subnormals are flushed to zero, as CuPy compiles kernels. Needs x86.
        most_ctas: it runs no larger grid than this; every kernel loops over what is left. 0: any.
        only_ctas: the first of the CTAs to run, and the one behind the last; None: all of a grid.
        ranges: addresses that kernels may touch beside the engine's tables; None: any.
    """

    lock = threading.RLock()  # one launch at a time: the fibers are shared
    current_stream: Hashable = 0
    only_ctas: tuple[int, int] | None = None
    ranges: list[tuple[int, int]] | None = None

    def __init__(self, multiprocessors: int, flush: bool, most_ctas: int) -> None:
        self.multiprocessors, self.flush, self.most_ctas = multiprocessors, flush, most_ctas
        self.launches: list[tuple[str, int]] = []  # kernel and CTAs of each
        self._tables: WeakValueDictionary[int, Any] = WeakValueDictionary()

    def to_device(self, words: Any) -> Any:
        """Return a copy on a 16-byte boundary."""
        raw = np.empty(words.nbytes + 16, np.uint8)
        copy = raw[-raw.ctypes.data % 16 :][: words.nbytes].view(np.int64)
        copy[...] = words
        self._tables[copy.ctypes.data] = copy
        return copy

    def keep_captured(self, words: Any) -> None:
        """Nothing is captured here."""

    def launch(self, kernel: str, ctas: int, threads: int, args: Sequence[int]) -> None:
        """Run a kernel to its end; a `HostFault` is what a GPU would fault on, or lanes that do not meet."""
        library, _ = host_library()
        assert {type(word) for word in (ctas, *args)} == {int}  # CuPy gives other types other widths
        words = (ctypes.c_uint64 * len(args))(*(arg & (1 << 64) - 1 for arg in args))
        tables = [address_range(self._tables[arg]) for arg in args if arg in self._tables]
        bounds = [] if self.ranges is None else [end for span in (*self.ranges, *tables) for end in span]
        ctas = min(ctas, self.most_ctas or ctas)
        with self.lock:
            self.launches.append((kernel, ctas))
            error = library.lowshard_run(
                getattr(library, kernel), words, len(args), ctas, threads, *(self.only_ctas or (0, ctas)),
                (ctypes.c_uint64 * max(1, len(bounds)))(*bounds), len(bounds) // 2, int(self.flush),
            )  # fmt: skip
        if error:
            raise HostFault(f"{kernel}: {error.decode()}")

    def traced(self, call: Callable[[], object]) -> npt.NDArray[np.int64]:
        """Return loads and stores of a call in order: address, bytes, warp of the grid, lane, 0 at loads."""
        library, words = host_library()[0], np.zeros((1 << 20, 5), np.int64)
        with self.lock:
            library.lowshard_trace(ctypes.c_void_p(words.ctypes.data), ctypes.c_size_t(len(words)))
            call()
            return words[: library.lowshard_trace(None, ctypes.c_size_t(0))]


class HostCudaEngine(CudaEngine):
    """The CUDA engine on NumPy arrays; a kernel may touch the arrays of its call and nothing else."""

    def __init__(self, launcher: HostLauncher) -> None:
        super().__init__(launcher)
        self.launcher = launcher

    def _contiguous(self, array: Any) -> Any:
        found = super()._contiguous(array)
        assert self.launcher.ranges is not None
        self.launcher.ranges.append(address_range(found))
        return found


def _guarded(name: str) -> Any:
    def method(self: HostCudaEngine, *args: Any) -> Any:
        parts = [part for arg in args for part in (arg if isinstance(arg, (list, tuple)) else [arg])]
        spans = [address_range(part) for part in parts if isinstance(part, np.ndarray)]
        with self.launcher.lock, patch.object(self.launcher, "ranges", spans):
            return getattr(CudaEngine, name)(self, *args)

    return method


for _name in vars(CudaEngine).keys() - {"name", "word_bytes"}:
    if not _name.startswith("_"):
        setattr(HostCudaEngine, _name, _guarded(_name))


def host_cuda_engine(multiprocessors: int = 4, flush: bool = False, most_ctas: int = 0) -> HostCudaEngine:
    """Return a CUDA engine that works on NumPy arrays; the arguments are `HostLauncher`'s."""
    return HostCudaEngine(HostLauncher(multiprocessors, flush, most_ctas))
