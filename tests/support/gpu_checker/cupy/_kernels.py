"""`cupy.RawModule` and `cupy.RawKernel`: lowshard's kernels, run by their host build, each access checked.

A launch is one operation. Its loads and stores are compared with the memory that is alive, with each other (threads of
a launch are not ordered), and with earlier operations.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cupy import _memory
from cupy._memory import Access
from cupy._streams import Work, put
from cupy.checker import OFF, count, need, report, where

_ROOM = 1 << 21  # accesses of a launch that are compared
_THREADS, _LANES = 256, 32
_FLUSHED = "quantize"
"""Kernels that run as CuPy compiles them: fp32 subnormals count as zero there."""
_LOAD, _ADD = 0, 2
_partly_seen: set[tuple[Any, ...]] = set()
"""Launches with more accesses than there is room for, which are not looked at again."""


class RawModule:
    """A .cu file of lowshard's: the host build has been made whole, whatever the module is compiled for."""

    def __init__(self, *, code: str, options: tuple[str, ...] = ()) -> None:
        need('#include "' not in code, "an include of a file of one's own is left in the source")

    def compile(self) -> None:
        pass

    def get_function(self, name: str) -> Any:
        def launch(grid: Sequence[int], block: Sequence[int], args: Sequence[Any]) -> None:
            place = where()
            is_right = 0 < grid[0] < 1 << 31 and len(grid) == 1 and tuple(block) == (_THREADS,)
            need(is_right, f"kernel {name}: a grid of {grid} and blocks of {block}")
            is_right = all(type(arg) is int and -(1 << 63) <= arg < 1 << 64 for arg in args)
            need(is_right, f"kernel {name}: an argument that CuPy does not pass as 64 bits")
            put(f"kernel {name}", list if OFF else lambda: _run(name, grid[0], args, place), "launches")

        return launch


class RawKernel:
    """A kernel that keeps its stream busy for some nanoseconds: `spin` of the tests, `hold` of the benchmarks."""

    def __init__(self, code: str, name: str) -> None:
        need(name in ("spin", "hold"), f"the checker runs no kernel {name} of a test's own")

    def __call__(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any]) -> None:
        def make() -> Work:
            ends_s: list[float] = []

            def ready() -> bool:
                ends_s.append(time.monotonic() + int(args[0]) * 1e-9)
                return time.monotonic() >= ends_s[0]

            return Work(list, ready)

        put("a kernel that takes its time", list, make=make)


@functools.cache
def _host_build() -> tuple[ctypes.CDLL, np.ndarray[Any, Any]]:
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    from support.cuda_host import host_library

    return host_library()[0], np.empty((_ROOM, 5), np.uint64)


def _run(name: str, ctas: int, args: Sequence[int], place: str) -> list[Access]:
    """Run a kernel to its end and return what it has touched. The lock is held: one launch at a time."""
    library, room = _host_build()
    words = (ctypes.c_uint64 * len(args))(*(arg & (1 << 64) - 1 for arg in args))
    need(hasattr(library, name), f"there is no kernel {name}", place)
    launch, at = (name, ctas, *args), None if (name, ctas, *args) in _partly_seen else room.ctypes.data
    library.lowshard_trace(ctypes.c_void_p(at), ctypes.c_size_t(_ROOM))
    error = library.lowshard_run(
        getattr(library, name), words, len(args), ctas, _THREADS, 0, ctas, (ctypes.c_uint64 * 1)(), 0,
        int(name.startswith(_FLUSHED)),
    )  # fmt: skip
    found = library.lowshard_trace(None, ctypes.c_size_t(0))
    need(not error, f"kernel {name}: {(error or b'').decode()}", place)
    if found > _ROOM or at is None:
        count("launches_seen_in_part")
        _partly_seen.add(launch)
    rows = room[: min(found, _ROOM)].astype(np.int64)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    threads = np.where(rows[:, 4] == _ADD, -1, rows[:, 2] * _LANES + rows[:, 3])  # adds do not race with adds
    sides = np.stack([rows[:, 0], rows[:, 0] + rows[:, 1], threads])
    stores, loads = sides[:, rows[:, 4] != _LOAD], sides[:, rows[:, 4] == _LOAD]
    _compare_threads(name, place, stores, loads)
    return [*_joined(loads, False), *_joined(stores, True)]


def _compare_threads(name: str, place: str, stores: Any, loads: Any) -> None:
    """Report bytes that two threads of a launch touch, one of them writing: of first addresses, ends and threads."""
    (begins, ends, threads), (load_begins, load_ends, load_threads) = stores, loads
    if not len(begins):
        return
    last = np.maximum.accumulate(ends)
    # Of each: the one before, or itself, whose end is the last so far.
    widest = np.maximum.accumulate(np.where(ends == last, np.arange(len(ends)), 0))
    twice = (begins[1:] < last[:-1]) & (threads[1:] != threads[widest[:-1]])
    if twice.any():
        report(f"race: two threads of kernel {name} write byte {begins[1:][twice][0]:#x}, at {place}")
    behind = np.searchsorted(begins, load_begins, side="right")
    for near in (np.maximum(behind - 1, 0), np.minimum(behind, len(begins) - 1)):
        both = (begins[near] < load_ends) & (load_begins < ends[near]) & (load_threads != threads[near])
        if both.any():
            byte = load_begins[both][0]
            report(f"race: a thread of kernel {name} reads byte {byte:#x} and another writes it, at {place}")


def _joined(sides: Any, writes: bool) -> list[Access]:
    """Return the accesses of a launch, an `Access` for each block."""
    (begins, ends, _), found = sides, list[Access]()
    if len(begins):
        ends = np.maximum.accumulate(ends)
        cut = np.flatnonzero(begins[1:] > ends[:-1]) + 1
        begins, ends = begins[np.r_[0, cut]], ends[np.r_[cut - 1, len(ends) - 1]]
    while len(begins):
        block = _memory.block_at(int(begins[0]))
        end = ends[0] if block is None else block.begin + block.capacity
        inside = max(1, int(np.searchsorted(begins, end)))
        pieces = (begins[:inside], ends[:inside]) if inside > 1 else None
        found.append(Access(int(begins[0]), int(ends[inside - 1]), writes, pieces))
        begins, ends = begins[inside:], ends[inside:]
    return found
