"""Moves mpiexec's listening sockets to loopback where all ranks are on this machine.

Open MPI's and MPICH's mpiexec listen on all addresses, for daemons on other hosts that there are none of, and have no
setting for it. Whoever started a process may reach its sockets (`pidfd_getfd`): each one that listens on another
address than loopback is shut down, bound to loopback with the same port, and made to listen again. The process is
stopped for that moment, a fraction of a millisecond, so that it never sees the socket closed.

Where the kernel does not allow it (before Linux 5.6, or forbidden in a container), the sockets stay as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["LOOPBACK_INTERFACE", "move_to_loopback"]

LOOPBACK_INTERFACE = "lo"

_PIDFD_GETFD = 438  # the system call's number, the same on every processor
_LISTENING = "0A"  # a state in /proc/net/tcp
_STOP_LIMIT_S = 0.5
_PAUSE_S = 0.0002


def move_to_loopback(pid: int) -> bool:
    """Moves what a child process listens on to loopback.

    Returns:
        Whether there is nothing left that other hosts could reach.
    """
    public = _public_fds(pid)
    if not public:
        return True
    with contextlib.suppress(OSError):  # it has ended, or the kernel does not allow it
        process_fd = os.pidfd_open(pid)
        try:
            with _stopped(pid):
                return all([_move(process_fd, fd) for fd in public])
        finally:
            os.close(process_fd)
    return False


def _public_fds(pid: int) -> list[int]:
    """Returns the descriptors of a process that listen on another address than loopback."""
    inodes: dict[str, int] = {}
    found = []
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                kind, _, inode = os.readlink(link).partition(":")
                if kind == "socket":
                    inodes[inode.strip("[]")] = int(link.name)
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
                if state == _LISTENING and inode in inodes and not _address(local).is_loopback:
                    found.append(inodes[inode])
    return found


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Returns the address of an entry of /proc/net/tcp: hexadecimal words in this machine's byte order, and a port."""
    digits = text.partition(":")[0]
    words = [int(digits[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(digits), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return getattr(address, "ipv4_mapped", None) or address


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    """Stops a child process for the length of a block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        end_s = time.monotonic() + _STOP_LIMIT_S
        while time.monotonic() < end_s:
            if os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                break
            time.sleep(_PAUSE_S)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _move(process_fd: int, fd: int) -> bool:
    """Moves a listening socket of a process to loopback; returns whether that was done."""
    own_fd: int = ctypes.CDLL(None).syscall(_PIDFD_GETFD, process_fd, fd, 0)
    if own_fd < 0:
        return False
    with socket.socket(fileno=own_fd) as public:
        host, port, *rest = public.getsockname()
        public.shutdown(socket.SHUT_RDWR)
        # Without ::1, which a host may lack, a socket for both families takes the IPv4 address in IPv6's form.
        hosts = ("::1", "::ffff:127.0.0.1") if public.family == socket.AF_INET6 else ("127.0.0.1",)
        for there in (*hosts, host):
            with contextlib.suppress(OSError):
                public.bind((there, port, *rest))
                public.listen(socket.SOMAXCONN)
                return bool(there != host)
    return False
