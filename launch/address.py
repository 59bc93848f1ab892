"""The addresses by which a job's hosts can reach this machine, and the port there."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

from lowshard.launch.host import Spread

__all__ = ["listen", "own_addresses"]

_SIOCGIFADDR = 0x8915


def own_addresses(spread: Spread | None) -> tuple[str, ...]:
    """Returns this machine's addresses, those that look towards the hosts of a job first."""
    found: list[str] = []
    for host in spread.hosts if spread else ():
        found += _address_towards(host.name.strip("[]"))
    for _, name in socket.if_nameindex():
        found += _address_of(name)
    first = _address_of(spread.iface) if spread and spread.iface else []
    usable = [
        address for address in dict.fromkeys((*first, *found)) if not address.startswith(("127.", "::1"))
    ]
    return tuple(usable) or ("127.0.0.1",)


def _address_towards(host: str) -> list[str]:
    """Returns the address of this machine from which packets to a host go; sends none."""
    with contextlib.suppress(OSError):
        family, kind, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return [str(probe.getsockname()[0]).partition("%")[0]]
    return []


def _address_of(interface: str) -> list[str]:
    """Returns the first IPv4 address of a network interface of this machine."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        return [socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])]
    return []


def listen(everywhere: bool) -> socket.socket:
    """Opens a port on this host's own address, or on all."""
    if not everywhere:
        server = socket.create_server(("127.0.0.1", 0), backlog=1024)
    elif socket.has_dualstack_ipv6():
        server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    else:
        server = socket.create_server(("", 0), backlog=1024)
    server.setblocking(False)
    return server
