"""The CUDA sources compiled for the host: the engine of the GPU on NumPy arrays, with every access checked.

The folder beside it has what CUDA's words mean to a C++ compiler. The .cu files are those that are shipped.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowshard.kernels.buffer import address_range
from lowshard.kernels.cuda.cuda_engine import CudaEngine
from lowshard.kernels.cuda.cuda_module import FOLDER, SOURCES
from lowshard.settings import cache_root

SHIM = Path(__file__).with_name("cuda_host")
COMPILER = "g++"
COMPILE_LIMIT_S = 300.0


class HostFault(RuntimeError):
    """A kernel did what a GPU would fault on, or leave undefined."""


@cache
def host_library() -> tuple[ctypes.CDLL, str]:
    """Return all kernels as one library, compiled once for its sources and kept, and what the compiler said."""
    command = [
        COMPILER, "-O2", "-std=c++17", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wno-unknown-pragmas",
        "-U_FORTIFY_SOURCE",  # it takes a jump between fibers for a damaged stack
        "-include", str(SHIM / "cuda_host.hpp"), "-I", str(FOLDER), "-x", "c++",
        *(str(FOLDER / f"{name}.cu") for name in SOURCES), str(SHIM / "cuda_host.cpp"), "-o",
    ]  # fmt: skip
    made_from = hashlib.sha256("\0".join(command).encode())
    made_from.update(subprocess.run([COMPILER, "--version"], capture_output=True, check=True).stdout)
    for path in sorted((*FOLDER.glob("*.cu*"), *SHIM.iterdir())):
        made_from.update(path.read_bytes())
    kept = cache_root() / "tests" / f"cuda_host-{made_from.hexdigest()[:24]}"
    if not (kept / "said.txt").exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="making-", dir=kept.parent))
        done = subprocess.run(
            [*command, str(folder / "kernels.so")], capture_output=True, text=True, timeout=COMPILE_LIMIT_S
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        (folder / "said.txt").write_text(done.stderr)
        with contextlib.suppress(OSError):  # another process was first
            folder.rename(kept)
        shutil.rmtree(folder, ignore_errors=True)
    library = ctypes.CDLL(str(kept / "kernels.so"))
    library.lowshard_run.restype = ctypes.c_char_p
    library.lowshard_trace.restype = ctypes.c_size_t
    return library, (kept / "said.txt").read_text()


class Access(NamedTuple):
    """A load or store of one lane; warps are numbered through the grid."""

    address: int
    size_bytes: int
    warp: int
    lane: int
    is_store: bool


class HostLauncher:
    """A `Launcher` whose device memory is NumPy arrays.

    Args:
        multiprocessors: of the GPU it stands for; the grid follows from it.
        most_ctas: runs no larger grid than this; every kernel loops over what is left.
        flush: fp32 subnormals are flushed to zero, as CuPy compiles kernels. Needs x86.

    Attributes:
        launches: kernel and CTAs of every launch so far.
        current_stream: any value; another one is another stream.
        only_ctas: (first, stop) of the CTAs to run, or None for all of a grid.
        ranges: addresses that kernels may touch beside the engine's tables; None: any.
    """

    # One launch at a time: the fibers are shared.
    _lock = threading.RLock()

    def __init__(self, multiprocessors: int = 4, flush: bool = False, most_ctas: int | None = None) -> None:
        self.most_ctas = most_ctas
        self.multiprocessors = multiprocessors
        self.flush = flush
        self.current_stream: Hashable = 0
        self.launches: list[tuple[str, int]] = []
        self.uploads = 0
        self.only_ctas: tuple[int, int] | None = None
        self.ranges: list[tuple[int, int]] | None = None
        self._tables: dict[int, weakref.ref[npt.NDArray[np.int64]]] = {}

    def to_device(self, words: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return a copy on a 16-byte boundary."""
        assert words.dtype == np.int64
        assert words.flags.c_contiguous
        raw = np.empty(words.nbytes + 16, np.uint8)
        skip = -raw.ctypes.data % 16
        copy = raw[skip : skip + words.nbytes].view(np.int64)
        copy[...] = words
        self.uploads += 1
        self._tables[copy.ctypes.data] = weakref.ref(copy)
        return copy

    def keep_captured(self, words: npt.NDArray[np.int64]) -> None:
        """Nothing is captured here."""

    def launch(self, kernel: str, ctas: int, threads: int, args: Sequence[int]) -> None:
        """Run a kernel to its end.

        Raises:
            HostFault: a misaligned or outside access, or lanes that do not meet in a shuffle.
        """
        library, _ = host_library()
        assert 0 < ctas < 1 << 31
        assert {type(word) for word in (ctas, *args)} == {int}  # CuPy gives other types other widths
        words = (ctypes.c_uint64 * len(args))(*(arg & (1 << 64) - 1 for arg in args))
        bounds: list[int] = []
        if self.ranges is not None:
            for low, high in (*self.ranges, *self._table_ranges(args)):
                bounds += (low, high)
        ctas = min(ctas, self.most_ctas or ctas)
        first, stop = self.only_ctas or (0, ctas)
        with self._lock:
            self.launches.append((kernel, ctas))
            error = library.lowshard_run(
                getattr(library, kernel), words, len(args), ctas, threads, first, stop,
                (ctypes.c_uint64 * max(1, len(bounds)))(*bounds), len(bounds) // 2, int(self.flush),
            )  # fmt: skip
        if error:
            raise HostFault(f"{kernel}: {error.decode()}")

    @contextmanager
    def traced(self, room: int = 1 << 20) -> Iterator[list[Access]]:
        """Give a list that holds every load and store of the launches within, in order, once the block is left."""
        library, _ = host_library()
        words = np.zeros((room, 5), np.uint64)
        found: list[Access] = []
        with self._lock:
            library.lowshard_trace(ctypes.c_void_p(words.ctypes.data), ctypes.c_size_t(room))
            try:
                yield found
            finally:
                count = library.lowshard_trace(None, ctypes.c_size_t(0))
        assert count <= room, f"{count} accesses; there is room for {room}"
        found += [Access(*row[:4], bool(row[4])) for row in words[:count].tolist()]

    def _table_ranges(self, args: Sequence[int]) -> list[tuple[int, int]]:
        live = [self._tables[arg]() for arg in args if arg in self._tables]
        return [(table.ctypes.data, table.ctypes.data + table.nbytes) for table in live if table is not None]


def _guarded(name: str) -> Callable[..., None]:
    plain = getattr(CudaEngine, name)

    @wraps(plain)
    def method(self: HostCudaEngine, *args: Any) -> None:
        arrays = [arg for arg in args if isinstance(arg, np.ndarray)]
        for arg in args:
            if isinstance(arg, (list, tuple)):
                arrays += [part for part in arg if isinstance(part, np.ndarray)]
        with self.launcher._lock:
            outer = self.launcher.ranges
            self.launcher.ranges = [address_range(array) for array in arrays]
            try:
                plain(self, *args)
            finally:
                self.launcher.ranges = outer

    return method


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


for _name in (
    "copy",
    "quantize",
    "quantize_swizzled",
    "dequantize",
    "cast",
    "sum_into",
    "swizzle",
    "unswizzle",
    "adamw",
    "sgd",
    "fold",
    "differ",
    "gather",
    "scatter",
    "checksum",
):
    setattr(HostCudaEngine, _name, _guarded(_name))


def host_cuda_engine(
    multiprocessors: int = 4, flush: bool = False, most_ctas: int | None = None
) -> HostCudaEngine:
    """Return a CUDA engine that works on NumPy arrays; the arguments are `HostLauncher`'s."""
    return HostCudaEngine(HostLauncher(multiprocessors, flush, most_ctas))
