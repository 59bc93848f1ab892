"""Blocks of memory, and pages of the host that are closed while a copy may run.

A copy into page-locked memory makes its pages unreadable, one from it makes them read-only, until the host knows that
the copy is done. Who touches them sooner is reported, with the line that does, and goes on.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import math
import mmap
import signal
import struct
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

from cupy.checker import OFF, locked, need, report, where

_MARGIN_BYTES = 256  # behind a block: what lies there is out of its bounds
_LIVES = 8  # of a block that are remembered
_NONE, _READ, _ALL = 0, mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
_libc = ctypes.CDLL(None)
serials = itertools.count(1)
"""Numbers everything that happens in the process: an operation may touch what lived when it was asked for."""


class Access(NamedTuple):
    """Bytes that an operation reads or writes, from `low` to `high`: gaps count as touched."""

    low: int
    high: int
    writes: bool

    def conflicts_with(self, other: Access) -> bool:
        return self.low < other.high and other.low < self.high and (self.writes or other.writes)


class Block:
    """Memory that is handed out whole, or a page-locked part of the host, which has no arena."""

    def __init__(self, begin: int, capacity: int, arena: Any = None, raw: Any = None) -> None:
        self.begin, self.end, self.arena, self._raw = begin, begin + capacity, arena, raw
        self.lives: deque[list[float]] = deque(maxlen=_LIVES)  # when they began and ended, and their bytes
        self.records: list[tuple[Access, Any]] = []  # what touched it, and the operations
        bisect.insort(blocks, self, key=_begin)


blocks: list[Block] = []  # by their addresses
_begin = attrgetter("begin")


def block_at(address: int) -> Block | None:
    with locked():
        index = bisect.bisect_right(blocks, address, key=_begin)
        return blocks[index - 1] if index and address < blocks[index - 1].end + _MARGIN_BYTES else None


def block_of(access: Access, name: str, place: str, serial: int, made: float = math.inf) -> Block:
    """Return the block of an access that was asked for at some time, by a CUDA graph that was made at another."""
    block: Any = block_at(access.low)
    verb = "writes" if access.writes else "reads"
    what = f"{name} {verb} {access.high - access.low} bytes at {access.low:#x}"
    need(block is not None, f"{what}, which is no memory of the device", place)
    sizes = [size for born, died, size in block.lives if born < min(serial, made) and serial < died]
    if len(block.lives) == _LIVES and serial < block.lives[0][0]:  # it was long ago
        sizes = [block.end - block.begin]
    need(bool(sizes), f"{what}, which was freed before", place)
    is_inside = access.high <= block.begin + sizes[0]
    need(is_inside, f"{what}, out of bounds: at offset {access.low - block.begin} of {sizes[0]} bytes", place)
    return block  # type: ignore[no-any-return]


# ---- page-locked memory

_under_way: list[SimpleNamespace] = []  # copies of which the host does not know that they are done


def locked_at(address: int, size: int = 1) -> Block | None:
    block = block_at(address)
    return block if block is not None and block.arena is None and address + size <= block.end else None


def lock(address: int, size: int, flags: int = 0) -> None:
    with locked():
        Block(address, size).lives.append([next(serials), math.inf, size])


def unlock(address: int) -> None:
    with locked():
        block = locked_at(address)
        need(block is not None and block.begin == address, f"{address:#x} is not page-locked")
        for copy in [one for one in _under_way if one.block is block]:
            report(f"page-locked memory is let go of, at {where()}, while a copy of {copy.place} may run")
            _end(copy)
        del blocks[bisect.bisect_left(blocks, address, key=_begin)]


def copy_bytes(to: int, source: int, size: int, locked: Block | None) -> None:
    """Copy as the device does, which no closed page stops."""
    if locked is not None:
        _set(locked.begin, locked.end, _ALL)
    ctypes.memmove(to, source, size)
    if locked is not None:
        _protect(locked)


def close(block: Block, host: int, size: int, is_written: bool, is_done: Callable[[], bool]) -> None:
    """Close pages until the host knows that a copy is done."""
    with locked():
        copy = SimpleNamespace(low=host, high=host + size, is_written=is_written, is_done=is_done)
        copy.block, copy.place = block, where()
        _under_way.append(copy)
        _protect(block)


def settle() -> None:
    """Open the memory of copies that the host knows to be done."""
    for copy in [copy for copy in _under_way if copy.is_done()]:
        _end(copy)


def _end(copy: SimpleNamespace) -> None:
    _under_way.remove(copy)
    _protect(copy.block)


def _protect(block: Block) -> None:
    """Let the host use memory as the copies under way have it."""
    _set(block.begin, block.end, _ALL)
    copies = [copy for copy in _under_way if copy.block is block]
    for copy in sorted(copies, key=lambda one: one.is_written):  # unreadable is stricter than read-only
        _set(copy.low, copy.high, _NONE if copy.is_written else _READ)


def _set(low: int, high: int, mode: int) -> None:
    first = low - low % mmap.PAGESIZE
    _libc.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(high - first), mode)


def _on_fault(number: int, info: int, context: int) -> None:
    """Take the fault of a thread that touches a closed page: report it if it lies in a copy, and open the page."""
    address = ctypes.c_void_p.from_address(info + 16).value or 0  # siginfo_t.si_addr
    with locked():
        pages = [(copy.low // mmap.PAGESIZE, (copy.high - 1) // mmap.PAGESIZE) for copy in _under_way]
        if not any(first <= address // mmap.PAGESIZE <= last for first, last in pages):
            _libc.sigaction(number, _before, None)  # it is not ours, and comes again
            return
        for copy in [one for one in _under_way if one.low <= address < one.high]:
            what = f"the host {'reads' if copy.is_written else 'writes'} page-locked memory, at {where()}"
            report(f"race: {what}, before it knows that a copy is done, which began at {copy.place}")
            _end(copy)
        _set(address, address + 1, _ALL)


# `struct sigaction` of glibc: the handler, a mask, flags, what restores.
_before = ctypes.create_string_buffer(152)
_handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(_on_fault)
if not OFF:
    _flags = 4 | 0x40000000  # SA_SIGINFO, SA_NODEFER
    _action = struct.pack("P128xi4xP", ctypes.cast(_handler, ctypes.c_void_p).value, _flags, 0)
    _libc.sigaction(signal.SIGSEGV, _action, _before)
