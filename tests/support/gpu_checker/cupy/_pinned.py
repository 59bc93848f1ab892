"""Page-locked memory of the host: what touches it while a copy of the device may still run is found by its pages.

A copy into it makes its pages unreadable, one from it makes them read-only, until the host knows that the copy is done.
Who touches them sooner is reported, with the line that does, and goes on.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
import struct
from types import SimpleNamespace

from cupy import cuda
from cupy.checker import LOCK, OFF, count, need, report, where
from cupy.cuda import Access, Block, block_at, blocks, stream_at

_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3
_NAMES = {_TO_DEVICE: "host_to_device", _TO_HOST: "device_to_host", _ON_DEVICE: "device_to_device"}
_NONE, _READ, _ALL = 0, mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
_libc = ctypes.CDLL(None)
_under_way: list[SimpleNamespace] = []  # copies of which the host does not know that they are done


def _locked_at(address: int, size: int = 1) -> Block | None:
    block = block_at(address)
    is_inside = block is not None and block.arena is None and address + size <= block.begin + block.capacity
    return block if is_inside else None


def lock(address: int, size: int, flags: int = 0) -> None:
    with LOCK:
        Block(address, size).begin_life(size)


def unlock(address: int) -> None:
    with LOCK:
        block = _locked_at(address)
        need(block is not None, f"{address:#x} is not page-locked")
        for copy in [one for one in _under_way if one.block is block]:
            report(f"page-locked memory is let go of, at {where()}, while a copy of {copy.place} may run")
            _end(copy)
        blocks[:] = [one for one in blocks if one is not block]


def copy_async(to: int, source: int, size: int, kind: int, ptr: int) -> None:
    count("pcie_bytes", size * (kind != _ON_DEVICE))
    has = [getattr(block_at(at), "arena", None) is not None for at in (source, to)]
    need(has == [kind != _TO_DEVICE, kind != _TO_HOST], f"the memory is not where kind {kind} has it")
    host = {_TO_DEVICE: source, _TO_HOST: to, _ON_DEVICE: 0}[kind]
    block = _locked_at(host, size)
    is_pageable = bool(host) and block is None
    if is_pageable:
        report(f"an asynchronous copy of pageable memory, which CUDA makes wait, at {where()}")

    def run() -> list[Access]:
        if block is not None:
            _set(host, host + size, _ALL)
        ctypes.memmove(to, source, size)
        if block is not None:
            _protect(block)
        touched = Access(source, source + size, False), Access(to, to + size, True)
        return [one for one in touched if not (is_pageable and one.low == host)]

    cuda.put(f"a copy ({_NAMES[kind]})", run, f"{_NAMES[kind]}_copies", ptr)
    if is_pageable:
        cuda.wait(stream_at, ptr)
    elif block is not None and not OFF and stream_at(ptr).capture is None:
        with LOCK:
            copy = SimpleNamespace(low=host, high=host + size, is_written=kind == _TO_HOST, place=where())
            copy.block, copy.clock = block, {ptr: stream_at(ptr).count}
            _under_way.append(copy)
            _protect(block)


def _settle() -> None:
    """Open the memory of copies that the host knows to be done."""
    for copy in [copy for copy in _under_way if cuda.is_known(copy.clock)]:
        _end(copy)


def _end(copy: SimpleNamespace) -> None:
    _under_way.remove(copy)
    _protect(copy.block)


def _protect(block: Block) -> None:
    """Let the host use memory as the copies under way have it."""
    _set(block.begin, block.begin + block.capacity, _ALL)
    copies = [copy for copy in _under_way if copy.block is block]
    for copy in sorted(copies, key=lambda one: one.is_written):  # unreadable is stricter than read-only
        _set(copy.low, copy.high, _NONE if copy.is_written else _READ)


def _set(low: int, high: int, mode: int) -> None:
    first = low - low % mmap.PAGESIZE
    _libc.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(high - first), mode)


def _on_fault(number: int, info: int, context: int) -> None:
    """Take the fault of a thread that touches a closed page: report it if it lies in a copy, and open the page."""
    address = ctypes.c_void_p.from_address(info + 16).value or 0  # siginfo_t.si_addr
    with LOCK:
        pages = [(copy.low // mmap.PAGESIZE, (copy.high - 1) // mmap.PAGESIZE) for copy in _under_way]
        if not any(first <= address // mmap.PAGESIZE <= last for first, last in pages):
            _libc.sigaction(number, _before, None)  # it is not ours, and comes again
            return
        for copy in [one for one in _under_way if one.low <= address < one.high]:
            what = f"the host {'reads' if copy.is_written else 'writes'} page-locked memory, at {where()}"
            report(f"race: {what}, before it knows that a copy is done, which began at {copy.place}")
            _end(copy)
        _set(address, address + 1, _ALL)


cuda.host_saw_more.append(_settle)
cuda.runtime.hostRegister, cuda.runtime.hostUnregister = lock, unlock
cuda.runtime.memcpyAsync = copy_async
# `struct sigaction` of glibc: the handler, a mask, flags, what restores.
_before = ctypes.create_string_buffer(152)
_handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(_on_fault)
if not OFF:
    _flags = 4 | 0x40000000  # SA_SIGINFO, SA_NODEFER
    _action = struct.pack("P128xi4xP", ctypes.cast(_handler, ctypes.c_void_p).value, _flags, 0)
    _libc.sigaction(signal.SIGSEGV, _action, _before)
