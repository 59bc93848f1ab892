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

from cupy import _device
from cupy._device import Access, Block
from cupy.checker import LOCK, OFF, count, need, report, where

_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3
_NAMES = {_TO_DEVICE: "host_to_device", _TO_HOST: "device_to_host", _ON_DEVICE: "device_to_device"}
_PAGE = mmap.PAGESIZE
_NONE, _READ, _ALL = 0, mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
_libc = ctypes.CDLL(None)


_under_way: list[SimpleNamespace] = []  # copies of which the host does not know that they are done


def is_locked(address: int, size: int = 1) -> bool:
    block = _device.block_at(address)
    return block is not None and block.arena is None and address + size <= block.begin + block.capacity


def lock(address: int, size: int, flags: int = 0) -> None:
    with LOCK:
        _device.refuse_in_capture()
        Block(address, size).begin_life(size)


def unlock(address: int) -> None:
    with LOCK:
        need(is_locked(address) and address in _device.blocks, f"{address:#x} is not page-locked")
        high = address + _device.blocks[address].capacity
        for copy in [one for one in _under_way if address <= one.low < high]:
            report(f"page-locked memory is let go of, at {where()}, while a copy of {copy.place} may run")
            _under_way.remove(copy)
        _protect(address, high)
        _device.begins_of_blocks.remove(address)
        del _device.blocks[address]


def copy_async(to: int, source: int, size: int, kind: int, ptr: int) -> None:
    count("pcie_bytes", size * (kind != _ON_DEVICE))
    has = [getattr(_device.block_at(at), "arena", None) is not None for at in (source, to)]
    need(OFF or has == [kind != _TO_DEVICE, kind != _TO_HOST], f"the memory is not where kind {kind} has it")
    host = {_TO_DEVICE: source, _TO_HOST: to, _ON_DEVICE: 0}[kind]
    is_pageable = bool(host) and not OFF and not is_locked(host, size)
    if is_pageable:
        report(f"an asynchronous copy of pageable memory, which CUDA makes wait, at {where()}")

    def run() -> list[Access]:
        _protect(host, host + size, is_open=True)
        ctypes.memmove(to, source, size)
        _protect(host, host + size)
        touched = Access(source, source + size, False), Access(to, to + size, True)
        return [one for one in touched if not (is_pageable and one.low == host)]

    _device.put(f"a copy ({_NAMES[kind]})", run, f"{_NAMES[kind]}_copies", ptr)
    if is_pageable:
        _device.wait("streamSynchronize", ptr)
    elif host and not OFF and _device.stream_at(ptr).capture is None:
        with LOCK:
            copy = SimpleNamespace(low=host, high=host + size, is_written=kind == _TO_HOST, place=where())
            copy.clock = {_device.stream_at(ptr): _device.stream_at(ptr).count}
            _under_way.append(copy)
            _protect(host, host + size)


def _settle() -> None:
    """Open the memory of copies that the host knows to be done."""
    for copy in [copy for copy in _under_way if _device.is_known(copy.clock)]:
        _under_way.remove(copy)
        _protect(copy.low, copy.high)


_device.host_saw_more.append(_settle)


def _protect(low: int, high: int, is_open: bool = False) -> None:
    """Set pages as the copies under way ask for, or so that all may use them."""
    first, end = low - low % _PAGE, -(-high // _PAGE) * _PAGE
    parts = [(first, end, _ALL)]
    near = [copy for copy in _under_way if copy.low < end and first < copy.high and not is_open]
    for copy in sorted(near, key=lambda one: one.is_written):  # unreadable is stricter than read-only
        parts += [(max(copy.low, first), min(copy.high, end), _NONE if copy.is_written else _READ)]
    for begin, stop, what in parts:
        begin -= begin % _PAGE
        if is_locked(max(begin, low)):  # then its pages hold nothing else
            _libc.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(-(-stop // _PAGE) * _PAGE - begin), what)


def _on_fault(number: int, info: int, context: int) -> None:
    """Take the fault of a thread that touches a closed page: report it if it lies in a copy, and open the page."""
    address = ctypes.c_void_p.from_address(info + 16).value or 0  # siginfo_t.si_addr
    page = address - address % _PAGE
    with LOCK:
        near = [copy for copy in _under_way if copy.low < page + _PAGE and page < copy.high]
        if not near:
            _libc.sigaction(number, _before, None)  # it is not ours, and comes again
            return
        for copy in [one for one in near if one.low <= address < one.high]:
            what = f"the host {'reads' if copy.is_written else 'writes'} page-locked memory, at {where()}"
            report(f"race: {what}, before it knows that a copy is done, which began at {copy.place}")
            _under_way.remove(copy)
            _protect(copy.low, copy.high)
        _protect(max(page, near[0].low), min(page + _PAGE, near[0].high), is_open=True)


# `struct sigaction` of glibc: the handler, a mask, flags, what restores.
_before = ctypes.create_string_buffer(152)
_handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(_on_fault)
if not OFF:
    _flags = 4 | 0x40000000  # SA_SIGINFO, SA_NODEFER
    _action = struct.pack("P128xi4xP", ctypes.cast(_handler, ctypes.c_void_p).value, _flags, 0)
    _libc.sigaction(signal.SIGSEGV, _action, _before)
