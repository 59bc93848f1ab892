"""`cupy.RawModule` and `cupy.RawKernel`: lowshard's kernels, run by their host build, each access checked.

A launch is one operation. Its loads and stores are compared with the memory that is alive, with each other (threads of
a launch are not ordered), and with earlier operations.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy import _memory, _streams
from cupy._memory import Access
from cupy._streams import Work
from cupy.checker import OFF, count, need, report, where

_ROOM = 1 << 21  # accesses of a launch that are compared
_THREADS = 256
_LANES = 32
_FLUSHED = ("quantize",)
"""Kernels run as CuPy compiles them: fp32 subnormals count as zero there."""


class RawModule:
    """A .cu file of lowshard's."""

    def __init__(self, *, code: str, options: tuple[str, ...] = (), **others: Any) -> None:
        need('#include "' not in code, "an include of a file of one's own is left in the source")
        self._code, self.options = code, options

    def compile(self, log_stream: Any = None) -> None:
        """Compile it: the host build has been made whole."""

    def get_function(self, name: str) -> Kernel:
        """Return a kernel: by its name, whatever the module was compiled for."""
        return Kernel(name)


class RawKernel:
    """A kernel that keeps its stream busy for some nanoseconds: `spin` of the tests, `hold` of the benchmarks."""

    def __init__(self, code: str, name: str, options: tuple[str, ...] = (), **others: Any) -> None:
        need(name in ("spin", "hold"), f"the checker runs no kernel {name} of a test's own")
        self._name = name

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], **options: Any
    ) -> None:
        """Start it on the current stream."""
        from cupy.cuda import get_current_stream

        def make() -> Work:
            ends_s: list[float] = []

            def ready() -> bool:
                if not ends_s:
                    ends_s.append(time.monotonic() + int(args[0]) * 1e-9)
                return time.monotonic() >= ends_s[0]

            return Work(list, ready)

        _streams.put(get_current_stream().ptr, f"kernel {self._name}", make)


class Kernel:
    """A kernel of lowshard's."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], **options: Any
    ) -> None:
        """Start it on the current stream."""
        from cupy.cuda import get_current_stream

        name, place = self._name, where()
        if not OFF:
            need({type(arg) for arg in args} <= {int}, f"kernel {name}: CuPy passes only int as 64 bits")
            need(
                all(-(1 << 63) <= arg < 1 << 64 for arg in args),
                f"kernel {name}: an argument of more than 64 bits",
            )
            is_right = 0 < grid[0] < 1 << 31 and len(grid) == 1 and tuple(block) == (_THREADS,)
            need(is_right, f"kernel {name}: a grid of {grid} and blocks of {block}")
        _streams.put(
            get_current_stream().ptr,
            f"kernel {name}",
            lambda: Work(list if OFF else lambda: _run(name, grid[0], args, place)),
            "launches",
        )


@functools.cache
def _library() -> ctypes.CDLL:
    import sys

    tests = str(Path(__file__).resolve().parents[3])
    if tests not in sys.path:
        sys.path.append(tests)
    from support.cuda_host import host_library

    return host_library()[0]


@functools.cache
def _room() -> npt.NDArray[np.uint64]:
    return np.empty((_ROOM, 5), np.uint64)


def _run(name: str, ctas: int, args: Sequence[int], place: str) -> list[Access]:
    """Run a kernel to its end and return what it has touched. The lock is held: one launch at a time."""
    library, words = _library(), (ctypes.c_uint64 * len(args))(*(arg & (1 << 64) - 1 for arg in args))
    need(hasattr(library, name), f"there is no kernel {name}", place)
    library.lowshard_trace(ctypes.c_void_p(_room().ctypes.data), ctypes.c_size_t(_ROOM))
    error = library.lowshard_run(
        getattr(library, name), words, len(args), ctas, _THREADS, 0, ctas, (ctypes.c_uint64 * 1)(), 0,
        int(name.startswith(_FLUSHED)),
    )  # fmt: skip
    found = library.lowshard_trace(None, ctypes.c_size_t(0))
    need(not error, f"kernel {name}: {(error or b'').decode()}", place)
    rows = _room()[: min(found, _ROOM)].astype(np.int64)
    count("launches_seen_in_part", found > _ROOM)
    loads, stores = (rows[rows[:, 4] == kind] for kind in (0, 1))
    _compare_threads(name, loads, stores, place)
    return [*_joined(loads, False), *_joined(stores, True)]


def _joined(rows: npt.NDArray[np.int64], writes: bool) -> list[Access]:
    """Return the accesses of a launch, an `Access` for each block."""
    if not len(rows):
        return []
    order = np.argsort(rows[:, 0], kind="stable")
    begins, ends = rows[order, 0], np.maximum.accumulate(rows[order, 0] + rows[order, 1])
    cut = np.flatnonzero(begins[1:] > ends[:-1]) + 1
    begins, ends = begins[np.r_[0, cut]], ends[np.r_[cut - 1, len(ends) - 1]]
    found = []
    while len(begins):
        block = _memory.block_at(int(begins[0]))
        end = ends[0] if block is None else block.begin + block.capacity
        inside = max(1, int(np.searchsorted(begins, end)))
        pieces = (begins[:inside], ends[:inside]) if inside > 1 else None
        found.append(Access(int(begins[0]), int(ends[inside - 1]), writes, pieces))
        begins, ends = begins[inside:], ends[inside:]
    return found


def _compare_threads(
    name: str, loads: npt.NDArray[np.int64], stores: npt.NDArray[np.int64], place: str
) -> None:
    """Report bytes that two threads of a launch touch, one of them writing."""
    if not len(stores):
        return
    stores = stores[np.argsort(stores[:, 0], kind="stable")]
    begins, ends, owners = _sides(stores)
    last = np.maximum.accumulate(ends)
    widest = np.maximum.accumulate(
        np.where(ends == last, np.arange(len(ends)), 0)
    )  # whose end is the last so far
    twice = (begins[1:] < last[:-1]) & (owners[1:] != owners[widest[:-1]])
    if twice.any():
        at = int(begins[1:][twice][0])
        report(f"race: two threads of kernel {name} write byte {at:#x}, at {place}")
    if not len(loads):
        return
    load_begins, load_ends, load_owners = _sides(loads)
    behind = np.searchsorted(begins, load_begins, side="right")
    for near in (np.maximum(behind - 1, 0), np.minimum(behind, len(begins) - 1)):
        both = (begins[near] < load_ends) & (load_begins < ends[near]) & (load_owners != owners[near])
        if both.any():
            at = int(load_begins[both][0])
            report(f"race: a thread of kernel {name} reads byte {at:#x} and another writes it, at {place}")
            return


def _sides(rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], ...]:
    """Return first addresses, ends and threads of accesses."""
    return rows[:, 0], rows[:, 0] + rows[:, 1], rows[:, 2] * _LANES + rows[:, 3]
