"""Measures the values of a `Calibration` on this machine: two ways side by side, size by size, in a second or two.

Times are CPU times of this process's threads, the least of a few rounds, so that other programs matter little. What
memory in caches costs depends on which cores share one: pairs of cores are added up.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from time import thread_time_ns
from typing import Any

import numpy as np

from lowshard.calibration import NEVER, Calibration
from lowshard.kernels.engine import HostEngine, host_engine
from lowshard.kernels.runs import RunTable, whole_array_runs

Block = np.ndarray[Any, np.dtype[np.uint8]]
Costs = tuple[float, float]
"""Of the way below a threshold and of the one from it on, in one unit."""

KIB, MIB = 1 << 10, 1 << 20
_RESULTS = (1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB)
_SHARED = (256 * KIB, 1 * MIB)  # below, the threads wake each other for longer than they copy
_HANDED = (16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, 1 * MIB)
_OUTSIDE_BYTES = 64 * MIB
"""What is gone through before it is used again, so that no cache has it still."""
_ROUNDS, _PAIR_ROUNDS = 4, 4
_CLEARLY = 1.1
"""A default stays unless the best threshold costs so much less."""
_LINE_BYTES = 64

STEPS = _ROUNDS * len(_RESULTS) + _PAIR_ROUNDS + _ROUNDS
"""How often `measure` tells that it has come further."""


def measure(tell: Callable[[], object] = lambda: None) -> Calibration:
    """Return what this machine's values are; what cannot be measured here has its default.

    Args:
        tell: is called STEPS times on the way.
    """
    defaults = Calibration()
    warm, cold = _results(tell)
    either = {size: (warm[size][0] + cold[size][0], warm[size][1] + cold[size][1]) for size in warm}
    found = {
        # Never above the default: what is packed, box by box, is colder than any buffer here.
        "stream_from_bytes": min(
            best_threshold(either, defaults.stream_from_bytes), defaults.stream_from_bytes
        ),
        "last_cache_bytes": min(2 * _RESULTS[-1], best_threshold(warm, defaults.last_cache_bytes)),
        "share_past_from_bytes": best_threshold(_shared(tell), defaults.share_past_from_bytes),
        "pipes_from_bytes": best_threshold(_handed(tell), defaults.pipes_from_bytes),
    }
    return replace(defaults, **found)


def best_threshold(costs: dict[int, Costs], default: int) -> int:
    """Return the size from which on the second way is taken, or NEVER, so that the least is lost over all sizes.

    Args:
        costs: by size, of the first way and of the second.
        default: stays where it is as good or nearly so, or where there are no costs.
    """

    def lost(threshold: int) -> float:
        return sum(pair[size >= threshold] / min(pair) for size, pair in costs.items())

    best = min((*costs, NEVER), key=lost)
    return best if lost(default) > _CLEARLY * lost(best) else default


# ---- results that are written and read


def _results(tell: Callable[[], object]) -> tuple[dict[int, Costs], dict[int, Costs]]:
    """Return what it costs to write a result through caches and past them, and to read it then.

    First for results in the same place each time, then for such in memory that no cache has.
    """
    engine = host_engine()
    sources, targets = _block(_OUTSIDE_BYTES), _block(_OUTSIDE_BYTES)
    warm: dict[int, Costs] = {}
    cold: dict[int, Costs] = {}
    for _ in range(_ROUNDS):
        for size in _RESULTS:
            for costs, places in ((warm, 1), (cold, _OUTSIDE_BYTES // size)):
                pair = tuple(_result(engine, sources, targets, size, places, past) for past in (False, True))
                _keep_least(costs, size, pair)
            tell()
    return warm, cold


def _result(engine: HostEngine, sources: Block, targets: Block, size: int, places: int, past: bool) -> float:
    runs, turns = _whole(size), max(2, 8 * MIB // size)
    took_ns = 0
    for turn in range(-1, turns):
        at = turn % places * size
        source, target = sources[at : at + size], targets[at : at + size]
        begin_ns = thread_time_ns()
        engine.copy(source, target, runs, past)
        np.add.reduce(target.view(np.uint64))
        took_ns += thread_time_ns() - begin_ns if turn >= 0 else 0
    return took_ns / turns


# ---- memory that one core writes and another reads


def _shared(tell: Callable[[], object]) -> dict[int, Costs]:
    """Return what it costs one core to write and another to read, through caches and past them, over pairs of cores."""
    cores = sorted(os.sched_getaffinity(0))
    others = sorted({cores[1], cores[len(cores) // 2], cores[-1]}) if len(cores) > 1 else []
    costs: dict[int, Costs] = {}
    for _ in range(_PAIR_ROUNDS):
        for size in _SHARED if others else ():
            sums = [sum(_pair(size, past, cores[0], other) for other in others) for past in (False, True)]
            before = costs.get(size, (0.0, 0.0))
            # Added up, not the least: virtual cores wander between real ones, and what is shared changes.
            costs[size] = before[0] + sums[0], before[1] + sums[1]
        tell()
    return costs


def _pair(size: int, past: bool, writes_on: int, reads_on: int) -> float:
    """Return the CPU time of a turn, in which one thread fills a slot and another copies it out."""
    engine, runs, slots = host_engine(), _whole(size), 8
    source, into, shared = _block(size), _block(size), [_block(size) for _ in range(slots)]
    turns = max(slots, min(24, 4 * MIB // size))
    full, empty = threading.Semaphore(0), threading.Semaphore(0)
    took_ns: list[list[int]] = [[], []]

    def work(
        core: int, mine: list[int], wait: Callable[[], object], go_on: Callable[[], object], fills: bool
    ) -> None:
        with suppress(OSError):
            os.sched_setaffinity(0, {core})  # of this thread alone
        for turn in range(-slots, turns):
            slot = shared[turn % slots]
            if not fills:
                wait()
            begin_ns = thread_time_ns()
            if fills:
                engine.copy(source, slot, runs, past)
            else:
                engine.copy(slot, into, runs, False)
            mine += [thread_time_ns() - begin_ns] if turn >= 0 else []
            go_on()
            if fills:
                wait()

    threads = [
        threading.Thread(target=work, args=(writes_on, took_ns[0], empty.acquire, full.release, True)),
        threading.Thread(target=work, args=(reads_on, took_ns[1], full.acquire, empty.release, False)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return float(sum(np.median(mine) for mine in took_ns))


# ---- private memory that is read from afar, or handed on


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _handed(tell: Callable[[], object]) -> dict[int, Costs]:
    """Return what it costs to read small pages by process_vm_readv, and to hand them on through a pipe."""
    costs: dict[int, Costs] = {}
    try:
        with closing(_Ways(_HANDED[-1])) as ways:
            for _ in range(_ROUNDS):
                for size in _HANDED:
                    _keep_least(
                        costs, size, (_timed(partial(ways.read, size)), _timed(partial(ways.hand_on, size)))
                    )
                tell()
    except (OSError, AttributeError):  # the system has no such call, or bars it
        return {}
    return costs


def _timed(run: Callable[[], object]) -> float:
    run()
    begin_ns = thread_time_ns()
    for _ in range(_TIMES):
        run()
    return (thread_time_ns() - begin_ns) / _TIMES


_TIMES = 8


class _Ways:
    """This process reads its own memory as another's would be.

    Raises:
        OSError, AttributeError: the system does not let it.
    """

    def __init__(self, most_bytes: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._readv, self._splice = libc.process_vm_readv, libc.vmsplice
        self._readv.restype = self._splice.restype = ctypes.c_ssize_t
        self._readv.argtypes = (ctypes.c_int, *((ctypes.c_void_p, ctypes.c_ulong) * 2), ctypes.c_ulong)
        self._splice.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_uint)
        self._from, self._to = (_small_pages(most_bytes) for _ in range(2))
        self._out, self._into = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.fcntl(self._into, fcntl.F_SETPIPE_SZ, most_bytes)

    def close(self) -> None:
        os.close(self._out)
        os.close(self._into)

    def read(self, size: int) -> None:
        here, there = _Vector(_address(self._to), size), _Vector(_address(self._from), size)
        got = self._readv(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if got != size:
            raise OSError(ctypes.get_errno(), "process_vm_readv")

    def hand_on(self, size: int) -> None:
        given = got = 0
        into = self._to.data
        while got < size:
            if given < size:
                part = _Vector(_address(self._from) + given, size - given)
                given += max(0, self._splice(self._into, ctypes.byref(part), 1, 0))
            if given == got:
                raise OSError(ctypes.get_errno(), "vmsplice")
            got += os.readv(self._out, [into[got:given]])


def _small_pages(size: int) -> Block:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    block: Block = np.frombuffer(memory, np.uint8)
    block[...] = 1
    return block


# ---- helpers


def _keep_least(costs: dict[int, Costs], size: int, pair: Sequence[float]) -> None:
    before = costs.get(size, (float("inf"), float("inf")))
    costs[size] = min(before[0], pair[0]), min(before[1], pair[1])


def _whole(size: int) -> RunTable:
    return whole_array_runs((size,), (1,), (1,), 1, 1)


def _block(size: int) -> Block:
    """Return memory on a cache line whose pages are there."""
    whole: Block = np.ones(size + _LINE_BYTES, np.uint8)
    return whole[-_address(whole) % _LINE_BYTES :][:size]


def _address(block: Block) -> int:
    return int(block.__array_interface__["data"][0])
