"""Moves mpiexec's listening sockets to loopback where all ranks are on this machine.

Open MPI's and MPICH's mpiexec listen on all addresses, for daemons on other hosts that there are none of, and have no
setting for it. Whoever started a process may reach its sockets (`pidfd_getfd`). Each one that listens on another
address than loopback is bound to the device of loopback, which shuts others out at once, then closed, bound to the
loopback address with the same port, and made to listen again. The process is stopped for that moment, a fraction of a
millisecond, so that it never sees the socket closed. A socket of this process keeps the port meanwhile: nobody else can
take it, and who connects is not answered, so that the kernel tries again after the move.

Where a rank or a daemon of this host has connected already, closing would lose its connection, or its connection would
keep the port: such a socket keeps its address, on the device of loopback. Where the kernel does not allow it (before
Linux 5.6, or forbidden in a container), the sockets stay as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["LOOPBACK_INTERFACE", "move_to_loopback"]

LOOPBACK_INTERFACE = "lo"

_LIBC = ctypes.CDLL(None, use_errno=True)
_PIDFD_GETFD = 438  # the system call's number, the same on every processor
_ESTABLISHED, _SYN_RECEIVED, _LISTENING = "01", "03", "0A"  # states in the kernel's tables
_ATTACH_FILTER = 26  # a socket option
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # a packet filter of one instruction: return 0
_STOP_LIMIT_S = 0.5
_PAUSE_S = 0.0002


class _Entry(NamedTuple):
    """A line of the kernel's tables, as far as it matters: inode is 0 for what no process has accepted."""

    state: str
    inode: int


def move_to_loopback(pid: int) -> bool:
    """Moves what a child process listens on to loopback.

    Returns:
        Whether there is nothing left that other hosts could reach.
    """
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # an OSError: the kernel forbids it
        public = list(_public_sockets(pid, stack).values())
        is_closed = [_bind_to_device(one) for one in public]
        if not all(_is_in_use(pid, one) for one in public):
            with _stopped(pid) as stopped:
                is_closed = [
                    (stopped and _move(pid, one)) or closed
                    for one, closed in zip(public, is_closed, strict=True)
                ]
        return all(is_closed)
    return False


def _public_sockets(pid: int, stack: contextlib.ExitStack) -> dict[int, socket.socket]:
    """Returns the sockets by which a process listens on another address than loopback, by their descriptors there.

    The sockets themselves are asked: the kernel takes milliseconds to write its tables of them. The stack closes all
    of them.

    Raises:
        OSError: the kernel forbids it.
    """
    found = dict[int, socket.socket]()
    try:
        process_fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return found
    stack.callback(os.close, process_fd)
    with contextlib.suppress(FileNotFoundError):  # it has ended
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it has closed this one
                if not os.readlink(link).startswith("socket:"):
                    continue
                one = _taken(process_fd, int(link.name))
                if one is not None and _is_public(stack.enter_context(one)):
                    found[int(link.name)] = one
    return found


def _is_public(one: socket.socket) -> bool:
    """Returns whether a socket listens on another address than loopback."""
    if one.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    address = ipaddress.ip_address(one.getsockname()[0])
    return not (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _entries(pid: int, port: int) -> Iterator[_Entry]:
    """Yields the TCP sockets of a process's network that have a local port."""
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            if f":{port:04X} " not in line:  # there may be tens of thousands
                continue
            _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
            if local.endswith(f":{port:04X}"):
                yield _Entry(state, int(inode))


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[bool]:
    """Stops a child process for the length of a block; yields whether it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    try:
        end_s = time.monotonic() + _STOP_LIMIT_S
        has_stopped = False
        while not has_stopped and time.monotonic() < end_s:
            time.sleep(_PAUSE_S)
            has_stopped = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        yield has_stopped
    finally:
        os.kill(pid, signal.SIGCONT)


def _taken(process_fd: int, fd: int) -> socket.socket | None:
    """Returns a process's socket for use by this one; None where it is closed there.

    Raises:
        OSError: the kernel does not allow it.
    """
    own_fd: int = _LIBC.syscall(_PIDFD_GETFD, process_fd, fd, 0)
    if own_fd >= 0:
        return socket.socket(fileno=own_fd)
    number = ctypes.get_errno()
    if number in (errno.EBADF, errno.ESRCH):
        return None
    raise OSError(number, os.strerror(number))


def _bind_to_device(listening: socket.socket) -> bool:
    """Lets only this host in; returns whether that was done (before Linux 5.7 it is root's alone)."""
    with contextlib.suppress(OSError):
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, LOOPBACK_INTERFACE.encode() + b"\0")
        return True
    return False


def _is_in_use(pid: int, listening: socket.socket) -> bool:
    """Returns whether a connection would be lost by closing a listening socket, or would keep its port."""
    port = listening.getsockname()[1]
    there = [entry for entry in _entries(pid, port) if entry.state != _LISTENING]
    if listening.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR):
        there = [one for one in there if one.inode == 0 and one.state in (_ESTABLISHED, _SYN_RECEIVED)]
    return bool(there)


def _move(pid: int, listening: socket.socket) -> bool:
    """Moves a listening socket of a stopped process to loopback; returns whether that was done."""
    with contextlib.ExitStack() as stack:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # for the keeper to share the port
        stack.callback(listening.setsockopt, socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
        keeper = _keeper(listening)
        if keeper is None:
            return False
        stack.enter_context(keeper)
        if _is_in_use(pid, listening):
            return False
        listening.shutdown(socket.SHUT_RDWR)
        listening.bind(keeper.getsockname())
        listening.listen(socket.SOMAXCONN)
        return True


def _keeper(listening: socket.socket) -> socket.socket | None:
    """Returns a socket at the loopback address that keeps a listening socket's port and answers nobody."""
    _, port, *rest = listening.getsockname()
    program = ctypes.create_string_buffer(_DROP_ALL)
    # Without ::1, which a host may lack, a socket for both families takes the IPv4 address in IPv6's form.
    hosts = ("::1", "::ffff:127.0.0.1") if listening.family == socket.AF_INET6 else ("127.0.0.1",)
    for host in hosts:
        keeper = socket.socket(listening.family)
        try:
            keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            # As the other has it: else connections that are over, and wait for stray packets, keep this one out.
            keeper.setsockopt(
                socket.SOL_SOCKET,
                socket.SO_REUSEADDR,
                listening.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR),
            )
            keeper.setsockopt(
                socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program))
            )
            keeper.bind((host, port, *rest))
            keeper.listen(1)
            return keeper
        except OSError:
            keeper.close()
    return None
