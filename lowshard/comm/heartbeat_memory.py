"""What the side channel's loop is made of: its memory, system calls, frames and texts.

Everything here and in `lowshard.comm.heartbeat` is written so that it runs in two ways: compiled by Numba, where
a thread needs no interpreter and goes on while the main thread holds it, or as ordinary Python where Numba is
missing. So there are two flat arrays and numbers, nothing else: `words` (int64) and `memory` (uint8), with a
fixed place for each thing; richer types would take Numba most of a minute to compile. The system calls below are
those of ordinary Python; `compiled_twin` puts the C library's own in their place.

A frame has 8 bytes in front: kind, a further number, length of what follows (2 bytes), a rank (4 bytes).
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from itertools import accumulate
from types import FunctionType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int64]
Memory = NDArray[np.uint8]

HEADER_BYTES = 8
MESSAGE_BYTES = 1024
"""The longest text of a failure."""
RECORD_BYTES = 10_000
"""Room for the launcher's record of a forced end, with two paths in it."""
EVENTS = 64
"""Events taken in at a time."""
INBOX_BYTES = 4096

BEAT, TELL, FAILURE, GONE, BYE = 1, 2, 3, 4, 5
"""Kinds of frames: a heartbeat; a failure, told to the hub; the same, to all; that a rank has left; its farewell."""

# ---- places in `words`; `lowshard.comm.heartbeat` has the others
WORDS_ADDRESS, MEMORY_ADDRESS, EPOLL_FD, CLOCK, CLOCK_REST = range(5)
"""Of the two arrays; what the loop waits on; room for a time."""

# ---- places in `memory`
_AREAS = {
    "failure": MESSAGE_BYTES, "outbox": MESSAGE_BYTES, "frame": HEADER_BYTES + MESSAGE_BYTES, "line": 2048,
    "events": 16 * EVENTS, "phrases": 512, "record": RECORD_BYTES, "text": 4096,
}  # fmt: skip
(FAILURE_AT, OUTBOX_AT, FRAME_AT, LINE_AT, EVENTS_AT, PHRASES_AT, RECORD_AT, TEXT_AT, LINKS_AT) = (
    0, *accumulate(_AREAS.values()),
)  # fmt: skip
_EVENT_BYTES = 12 if platform.machine() in ("x86_64", "AMD64", "i386", "i686") else 16  # packed on x86 alone
_EVENT_FD_AT = _EVENT_BYTES - 8
_MSG_DONTWAIT, _MSG_NOSIGNAL = 0x40, 0x4000
_CLOCK_REALTIME, _CLOCK_MONOTONIC = 0, 1
_EAGAIN, _ECONNRESET = 11, 104
_EPOLL_CTL_DEL, _POLLOUT, _SHUT_RDWR = 2, 4, 2

CLOSED, LOST = -1, -2
"""A connection that the other process has closed, by its end at the latest; one that the network has lost."""


def _declared(name: str, kinds: str) -> Any:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype, *function.argtypes = (
        {"i": ctypes.c_int, "l": ctypes.c_ssize_t, "p": ctypes.c_size_t}[kind] for kind in kinds
    )
    return function


_CALLS = {
    "send": "lipli", "recv": "lipli", "read": "lipl", "write": "lipl", "creat": "ipi", "link": "ipp",
    "poll": "ipli", "shutdown": "iii", "epoll_wait": "iipii", "epoll_ctl": "iiiip", "clock_gettime": "iip",
    "memmove": "pppl", "close": "ii",
}  # fmt: skip
c_send, c_recv, c_read, c_write, c_creat, c_link, c_poll, c_shutdown, c_epoll_wait, c_epoll_ctl, c_clock_gettime, \
    c_memmove, c_close = (_declared(name, kinds) for name, kinds in _CALLS.items())  # fmt: skip


def last_errno() -> int:
    """Return the error number of this thread's last system call."""
    return ctypes.get_errno()


def fence() -> None:
    """Order the writes before it before those after it, for other threads; ordinary Python does so anyhow."""


def exit_now(code: int) -> None:
    """End the process at once."""
    os._exit(code)


# ---- from here on: what Numba can compile


def now_ns(words: Words) -> int:
    """Return the monotonic clock in ns."""
    c_clock_gettime(_CLOCK_MONOTONIC, words[WORDS_ADDRESS] + 8 * CLOCK)
    return words[CLOCK] * 1_000_000_000 + words[CLOCK_REST]  # type: ignore[no-any-return]


def number_at(memory: Memory, at: int, size: int) -> int:
    """Return the number in so many bytes, the low ones first."""
    number: Any = 0
    for i in range(size - 1, -1, -1):  # np.int64: Numba makes a float of a signed and an unsigned number
        number = number * 256 + np.int64(memory[at + i])
    return number  # type: ignore[no-any-return]


def copy(words: Words, target: int, source: int, size: int) -> None:
    """Copy bytes within the memory."""
    c_memmove(words[MEMORY_ADDRESS] + target, words[MEMORY_ADDRESS] + source, size)


def put(memory: Memory, at: int, phrase: int) -> int:
    """Write the text that begins at `phrase` and ends with a 0; return where it ends, as all `put_` do."""
    while memory[phrase] != 0:
        memory[at] = memory[phrase]
        at += 1
        phrase += 1
    return at


def put_number(memory: Memory, at: int, value: int, digits: int) -> int:
    """Write a number that is not negative in decimal, with at least so many digits."""
    power = 1
    while value // power >= 10 or digits > 1:
        power *= 10
        digits -= 1
    while power > 0:
        memory[at] = 48 + value // power % 10
        power //= 10
        at += 1
    return at


def put_frame(words: Words, memory: Memory, kind: int, number: int, rank: int, body: int, size: int) -> None:
    """Write a frame, with a body of so many bytes of memory."""
    for i in range(4):
        memory[FRAME_AT + 4 + i] = (rank >> (8 * i)) & 255
    memory[FRAME_AT], memory[FRAME_AT + 1] = kind, number
    memory[FRAME_AT + 2], memory[FRAME_AT + 3] = size & 255, size >> 8
    copy(words, FRAME_AT + HEADER_BYTES, body, size)


def send_frame(words: Words, fd: int, size: int) -> bool:
    """Send the frame whole or not at all; return False where a part of it went out and nothing more may follow.

    A connection has room for a frame unless its other end has not read for minutes.
    """
    sent = c_send(fd, words[MEMORY_ADDRESS] + FRAME_AT, HEADER_BYTES + size, _MSG_DONTWAIT | _MSG_NOSIGNAL)
    return bool(sent < 0 or sent == HEADER_BYTES + size)


def receive(words: Words, fd: int, at: int, size: int) -> int:
    """Read up to so many bytes of what has come; return how many, or CLOSED, or LOST."""
    got = c_recv(fd, words[MEMORY_ADDRESS] + at, size, _MSG_DONTWAIT)
    if got > 0:
        return got  # type: ignore[no-any-return]
    if got == 0:
        return CLOSED
    error = last_errno()
    if error == _EAGAIN:
        return 0
    return CLOSED if error == _ECONNRESET else LOST


def wait_events(words: Words, wait_ms: int) -> int:
    """Wait for something to come; return how many descriptors have something."""
    return c_epoll_wait(words[EPOLL_FD], words[MEMORY_ADDRESS] + EVENTS_AT, EVENTS, wait_ms)  # type: ignore[no-any-return]


def event_fd(memory: Memory, i: int) -> int:
    """Return the descriptor of an event."""
    return number_at(memory, EVENTS_AT + i * _EVENT_BYTES + _EVENT_FD_AT, 4)


def hang_up(words: Words, fd: int) -> None:
    """End a connection for both sides and wait for it no more; the descriptor stays."""
    c_epoll_ctl(words[EPOLL_FD], _EPOLL_CTL_DEL, fd, 0)
    c_shutdown(fd, _SHUT_RDWR)


def compiled_twin(functions: tuple[Callable[..., Any], ...]) -> dict[str, Any]:
    """Return the names that compiled code sees: these functions and those of this module compiled, libc's calls.

    Raises:
        ImportError: Numba is missing.
    """
    from llvmlite import ir
    from numba import carray, njit, types
    from numba.extending import intrinsic

    kinds = {"i": types.int32, "l": types.intp, "p": types.intp}
    names: dict[str, Any] = dict(globals())
    for name, letters in _CALLS.items():
        result, *args = (kinds[letter] for letter in letters)
        names[f"c_{name}"] = types.ExternalFunction(name, result(*args))
    names["exit_now"] = types.ExternalFunction("_exit", types.void(types.int32))
    errno_at = types.ExternalFunction("__errno_location", types.CPointer(types.int32)())

    def compiled(function: Callable[..., Any]) -> Any:
        # Wrappers and checked divisions would double the time to compile.
        return njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy")(function)

    @intrinsic  # type: ignore[untyped-decorator]
    def fence(typing: Any) -> Any:
        def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            builder.fence("seq_cst")
            return context.get_dummy_value()

        return types.void(), emit

    names["last_errno"], names["fence"] = compiled(lambda: carray(errno_at(), 1)[0]), fence
    for function in (*_COMPILED, *functions):
        for name, value in function.__globals__.items():
            names.setdefault(name, value)
        names[function.__name__] = compiled(FunctionType(function.__code__, names, function.__name__))
    return names


_COMPILED: tuple[Any, ...] = (
    now_ns, number_at, copy, put, put_number, put_frame, send_frame, receive, wait_events, event_fd, hang_up,
)  # fmt: skip
