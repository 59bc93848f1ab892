"""What a process listens on, by the kernel's own tables of sockets."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import sys
from pathlib import Path
from typing import NamedTuple

_LISTENING = "0A"


class Port(NamedTuple):
    """An address and a port that a process listens on by TCP."""

    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int


def ports_of(pid: int) -> list[Port]:
    """Return what a process listens on; [] for one that has ended."""
    inodes, found = set(), []
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                kind, _, inode = os.readlink(link).partition(":")
                inodes |= {inode.strip("[]")} if kind == "socket" else set()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
                if state == _LISTENING and inode in inodes:
                    digits, _, port = local.partition(":")
                    found.append(Port(_address(digits), int(port, 16)))
    return found


def public_ports(pid: int) -> list[Port]:
    """Return what of it others than this host reach."""
    return [port for port in ports_of(pid) if not port.address.is_loopback]


def _address(digits: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an address of the tables: hexadecimal words in this machine's byte order."""
    words = [int(digits[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(digits), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return getattr(address, "ipv4_mapped", None) or address
