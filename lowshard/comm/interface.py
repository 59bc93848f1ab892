"""This host's network addresses, and which of them other hosts can reach."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from array import array
from collections.abc import Iterable
from pathlib import Path

__all__ = ["addresses_towards", "boot_id", "interface_addresses", "is_loopback", "network_name"]

_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40
_LINK_LOCAL = "20"  # scope of an address, in /proc/net/if_inet6
_ANY_PORT = 9  # nothing is sent


def interface_addresses() -> dict[str, list[str]]:
    """Return the IPv4 and IPv6 addresses of this host by interface, without IPv6's link-local ones."""
    found: dict[str, list[str]] = {}
    size = 64 * _IFREQ_BYTES
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        while True:
            rows = array("B", bytes(size))
            request = struct.pack("iL", size, rows.buffer_info()[0])
            used: int = struct.unpack("iL", fcntl.ioctl(asked, _SIOCGIFCONF, request))[0]
            if used < size:
                break
            size *= 4
    for at in range(0, used, _IFREQ_BYTES):
        row = rows[at : at + _IFREQ_BYTES].tobytes()
        name = row[:16].split(b"\0")[0].decode()
        found.setdefault(name.split(":")[0], []).append(socket.inet_ntoa(row[20:24]))
    with contextlib.suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope != _LINK_LOCAL:
                found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def is_loopback(address: str) -> bool:
    """Say whether an address leads to this host alone."""
    return address == "::1" or address.startswith("127.")


def addresses_towards(hosts: Iterable[str]) -> tuple[str, ...]:
    """Return the addresses of this host from which packets to other hosts go, without loopback; nothing is sent.

    Args:
        hosts: names or addresses. This host's own lead nowhere: bridges of containers often have the same address
            on every host.

    Returns:
        The addresses, each once. Where no way to any of the hosts is known: all addresses of this host.
    """
    own = [address for addresses in interface_addresses().values() for address in addresses]
    found: list[str] = []
    for host in hosts:
        with contextlib.suppress(OSError):
            family, kind, _, _, where = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
            if str(where[0]) in own:
                continue
            with socket.socket(family, kind) as probe:
                probe.connect(where)
                found.append(str(probe.getsockname()[0]).partition("%")[0])
    usable = [address for address in dict.fromkeys(found or own) if not is_loopback(address)]
    return tuple(usable) or ("127.0.0.1",)


def boot_id() -> str:
    """Return what tells this machine, since it was started, from all others; "" where the kernel does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def network_name() -> str:
    """Return a text that two processes share if they are on one machine and loopback leads from one to the other."""
    try:
        return f"{boot_id() or socket.gethostname()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()
