"""A process that may not touch another one's memory, as in many containers: the kernel refuses two system calls."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
import sys

_CALLS = {"x86_64": (310, 311), "aarch64": (270, 271)}  # process_vm_readv, process_vm_writev
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # of the filter's instructions
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000


def why_not() -> str:
    """Return why this machine has no such filter, or ""."""
    if sys.platform != "linux" or platform.machine() not in _CALLS:
        return f"no system call numbers are known for {sys.platform} on {platform.machine()}"
    return ""


def bar() -> None:
    """Refuse both calls, with EPERM, from now on, in this process and its children.

    Raises:
        OSError: the kernel takes no filter.
    """
    refuse = _REFUSE | errno.EPERM
    calls = _CALLS[platform.machine()]
    program = [(_LOAD, 0, 0, 0), (_EQUAL, 1, 0, calls[0]), (_EQUAL, 0, 1, calls[1]), (_RETURN, 0, 0, refuse)]
    program.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, *args in ((_NO_NEW_PRIVILEGES, 1, 0), (_SECCOMP, _FILTER, header)):
        if libc.prctl(option, *args, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
