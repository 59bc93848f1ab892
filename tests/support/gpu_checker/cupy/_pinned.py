"""Page-locked memory of the host: what touches it while a copy of the device may still run is found by its pages.

A copy into it makes its pages unreadable, one from it makes them read-only, until the host knows that the copy is done.
Who touches them sooner is reported, with the line that does, and goes on.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
from typing import NamedTuple

from cupy import _memory, _streams
from cupy._memory import Access, Block, Life, serials
from cupy._streams import CUDARuntimeError
from cupy.checker import LOCK, OFF, count, need, report, where

TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3
_COUNT = {
    TO_DEVICE: "host_to_device_copies",
    TO_HOST: "device_to_host_copies",
    ON_DEVICE: "device_to_device_copies",
}
_PAGE = mmap.PAGESIZE
_NONE, _READ, _ALL = 0, mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
_SIGINFO, _NODEFER = 4, 0x40000000  # of sigaction


class _Copy(NamedTuple):
    """A copy of which the host does not know that it is done."""

    low: int
    high: int
    is_written: bool
    clock: dict[_streams.Stream, int]
    place: str


_locked: dict[int, Block] = {}
_under_way: list[_Copy] = []
_libc = ctypes.CDLL(None, use_errno=True)


def lock(address: int, size: int) -> None:
    """Page-lock memory of the host."""
    _streams.refuse_in_capture()
    with LOCK:
        if any(
            block.begin < address + size and address < block.begin + block.capacity
            for block in _locked.values()
        ):
            raise CUDARuntimeError(712)
        _locked[address] = Block(address, size)
        _locked[address].lives.append(Life(next(serials), size))
        _memory.add(_locked[address])


def unlock(address: int) -> None:
    """Undo `lock`."""
    with LOCK:
        block = _locked.pop(address, None)
        if block is None:
            raise CUDARuntimeError(713)
        for copy in list(_under_way):
            if block.begin <= copy.low < block.begin + block.capacity:
                report(
                    f"page-locked memory is let go of while a copy may run, at {where()}; it began at {copy.place}"
                )
                _under_way.remove(copy)
                _protect(copy.low, copy.high)
        _memory.remove(block)


def is_locked(address: int, size: int = 1) -> bool:
    """Say whether memory of the host is page-locked."""
    with LOCK:
        ranges = [(block.begin, block.begin + block.capacity) for block in _locked.values()]
    return any(begin <= address and address + size <= end for begin, end in ranges)


def copy_async(to: int, source: int, size: int, kind: int, ptr: int) -> None:
    """Queue a copy of `size` bytes on a stream; `kind` is CUDA's number of the direction."""
    count(_COUNT[kind])
    count("pcie_bytes", size * (kind != ON_DEVICE))
    sides = {TO_DEVICE: (False, True), TO_HOST: (True, False), ON_DEVICE: (True, True)}[kind]
    has = (_memory.is_device(source), _memory.is_device(to))
    need(OFF or has == sides, f"{_COUNT[kind]}: the memory is not where kind {kind} has it")
    host = {TO_DEVICE: source, TO_HOST: to, ON_DEVICE: 0}[kind]
    is_pageable = bool(host) and not OFF and not is_locked(host, size)
    if is_pageable:
        report(f"an asynchronous copy of pageable memory, which CUDA makes wait, at {where()}")

    def run() -> list[Access]:
        if host:
            _set(host, host + size, _ALL)
        ctypes.memmove(to, source, size)
        if host:
            _protect(host, host + size)
        touched = Access(source, source + size, False), Access(to, to + size, True)
        return [one for one in touched if not (is_pageable and one.low == host)]

    _streams.put(ptr, f"a copy ({_COUNT[kind].removesuffix('_copies')})", lambda: _streams.Work(run))
    if OFF or not host:
        return
    with LOCK:
        stream = _streams.stream_at(ptr)
        if is_pageable:
            _streams.wait_for_stream(ptr)
        elif stream.capture is None:
            copy = _Copy(host, host + size, kind == TO_HOST, {stream: stream.count}, where())
            _under_way.append(copy)
            _protect(copy.low, copy.high)


def _settle() -> None:
    """Open the memory of copies that the host knows to be done."""
    over = [
        copy
        for copy in _under_way
        if all(
            _streams.known.get(stream, 0) >= index or stream.is_over for stream, index in copy.clock.items()
        )
    ]
    for copy in over:
        _under_way.remove(copy)
    for copy in over:
        _protect(copy.low, copy.high)


_streams.host_saw_more.append(_settle)


def _set(low: int, high: int, what: int) -> None:
    """Say what may be done with the pages of some memory, if it is page-locked: then they hold nothing else."""
    if is_locked(low, high - low):
        first = low - low % _PAGE
        _libc.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(-(-high // _PAGE) * _PAGE - first), what)


def _protect(low: int, high: int) -> None:
    """Set pages as the copies under way ask for."""
    _set(low, high, _ALL)
    first, end = low - low % _PAGE, -(-high // _PAGE) * _PAGE
    for copy in sorted(_under_way, key=lambda one: one.is_written):  # unreadable is stricter than read-only
        if copy.low < end and first < copy.high:
            _set(max(copy.low, first), min(copy.high, end), _NONE if copy.is_written else _READ)


class _Action(ctypes.Structure):
    """`struct sigaction` of glibc."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def _on_fault(number: int, info: int, context: int) -> None:
    """Take the fault of a thread that touches a closed page: report it if it lies in a copy, and open the page."""
    address = ctypes.c_void_p.from_address(info + 16).value or 0  # siginfo_t.si_addr
    page = address - address % _PAGE
    with LOCK:
        near = [copy for copy in _under_way if copy.low < page + _PAGE and page < copy.high]
        if not near:
            _libc.sigaction(number, ctypes.byref(_before), None)  # it is not ours, and comes again
            return
        _set(max(page, near[0].low), min(page + _PAGE, near[0].high), _ALL)
        for copy in near:
            if copy.low <= address < copy.high:
                verb = "reads" if copy.is_written else "writes"
                report(
                    f"race: the host {verb} page-locked memory, at {where()}, before it knows that a copy is done, "
                    f"which began at {copy.place}"
                )
                _under_way.remove(copy)
        for copy in near:
            if copy not in _under_way:
                _protect(copy.low, copy.high)


_before = _Action()
_handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(_on_fault)
if not OFF:
    _action = _Action(ctypes.cast(_handler, ctypes.c_void_p), flags=_SIGINFO | _NODEFER)
    _libc.sigaction(signal.SIGSEGV, ctypes.byref(_action), ctypes.byref(_before))
