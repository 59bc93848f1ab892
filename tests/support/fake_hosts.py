"""Several hosts on this machine, for tests of jobs over hosts: `lowshard run --hosts A,B --ssh STAND_IN`.

Each fake host is a network namespace with an address of its own. A stand-in for ssh starts programs there with a
hostname, a /dev/shm and System V memory of their own and with an empty environment; so MPI and lowshard take it for
another machine. Cores, files and process ids are this machine's. The hosts hang on a bridge in a namespace of its own,
where no firewall rule of this machine applies; this machine is plugged in too.

Everything made carries the maker's pid in its name, and the maker holds a lock that the kernel lets go of when it
dies: the next start removes what a killed process has left.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowshard.launch import Host, Spread, spread_over

ENVIRONMENT = {
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
}
"""For jobs on fake hosts, which share this machine's cores; Open MPI sees hosts that are not full."""

_IP_LIMIT_S = 20.0
_KILL_LIMIT_S = 5.0
_RUN = Path("/run")
_SERIALS = "0123456789abcdefghijklmnopqrstuvwxyz"  # one process may have several sets at a time
_SUBNETS = ("10.77", "10.205", "172.29", "192.168")  # /24 each, the first that nobody uses
_NAMES = re.compile(r"^(?:lowshard-(\d+)-([0-9a-z])(?:-\w+)?|lsh(\d+)([0-9a-z]))$")

# What ssh does: skip options, take the host, join the rest to one shell command, pass no environment. NCCL looks at the
# machine, not at its name: it is told which host it is on.
_SHELL = """\
#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
case "$host" in
%(cases)s
*) echo "no fake host $host" >&2; exit 255 ;;
esac
exec ip netns exec "$name" unshare --uts --ipc --mount sh -c '
echo "$1" > /proc/sys/kernel/hostname && mount -t tmpfs -o mode=1777 tmpfs /dev/shm %(hide)s || exit 255
name=$1
shift
exec env -i HOME="${HOME:-/}" USER="${USER:-root}" PATH="$PATH" NCCL_HOSTID="$name" sh -c "$*"
' sh "$name" "$@"
"""


@dataclass(frozen=True)
class FakeHost:
    """One fake host.

    Attributes:
        name: its hostname, also that of its network namespace.
        address: its IPv4 address.
        switch: the network namespace of the bridge.
        port: the bridge's end of its cable.
        shell: path of the stand-in for ssh: `SHELL ADDRESS COMMAND`.
        iface: network interface by which it, and this machine, are plugged in.
        here_address: this machine's address as the fake hosts see it.
    """

    name: str
    address: str
    switch: str
    port: str
    shell: str
    iface: str
    here_address: str

    def command(self, *words: str) -> list[str]:
        """Return the command that runs a shell command on this host."""
        return [self.shell, self.address, *words]


@functools.lru_cache(maxsize=1)
def why_not() -> str | None:
    """Say why there can be no fake hosts here, or None: one is made, tried and removed. Cheap after the first call."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "fake hosts need Linux's network namespaces, and root"
    for program in ("ip", "unshare", "mount"):
        if shutil.which(program) is None:
            return f"fake hosts need the program {program!r}, which is not on the PATH"
    try:
        with fake_hosts(1) as (host,):
            tried = subprocess.run(
                host.command("echo", "alive"),
                capture_output=True,
                text=True,
                timeout=_IP_LIMIT_S,
                check=False,
            )
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        return f"fake hosts cannot be made here: {error}"
    if tried.stdout.strip() != "alive":
        return f"a fake host runs no program here: {tried.stderr.strip() or tried.returncode}"
    return None


@contextlib.contextmanager
def fake_hosts(k: int, *, hide: Path | None = None) -> Iterator[list[FakeHost]]:
    """Make k fake hosts; at the end of the block end every process on them and remove them.

    Removes first what processes that were killed have left. Several processes may have fake hosts at a time.

    Args:
        k: number of hosts.
        hide: a folder whose files the hosts shall not see: they have an empty one of their own there.
    """
    for label in sorted(_labels()):
        lock = _locked(f"lowshard-fake-{label}")
        if lock is not None:  # its owner is dead
            with lock:
                _remove(label)
    with contextlib.ExitStack() as stack:
        label = f"{os.getpid()}-{_lock_serial(stack)}"
        subnet = _lock_subnet(stack)
        stack.callback(_remove, label)
        yield _make(k, label, subnet, hide)


def spread(hosts: Sequence[FakeHost], n: int) -> Spread:
    """Return the spread of n ranks over fake hosts, block by block, as evenly as it goes."""
    listed = [Host(host.address) for host in hosts]
    return spread_over(listed, n, shell=hosts[0].shell, iface=hosts[0].iface)


def options(hosts: Sequence[FakeHost]) -> list[str]:
    """Return the options of `lowshard run` that name fake hosts."""
    names = ",".join(host.address for host in hosts)
    return ["--hosts", names, "--ssh", hosts[0].shell, "--iface", hosts[0].iface]


def cut(host: FakeHost) -> None:
    """Cut a host off from all others: its packets go nowhere, without an error to anybody."""
    _ip("-n", host.switch, "link", "set", host.port, "down")


def mend(host: FakeHost) -> None:
    """Connect a host again that was cut off."""
    _ip("-n", host.switch, "link", "set", host.port, "up")


def _make(k: int, label: str, subnet: str, hide: Path | None) -> list[FakeHost]:
    """Make the namespaces, the cables, and the stand-in for ssh."""
    switch, iface = f"lowshard-{label}-switch", f"lsh{label.replace('-', '')}"
    folder = _RUN / f"lowshard-{label}"
    shell = folder / "shell"
    hosts = [
        FakeHost(
            f"lowshard-{label}-{i}",
            f"{subnet}.{11 + i}",
            switch,
            f"port{i}",
            str(shell),
            iface,
            f"{subnet}.1",
        )
        for i in range(k)
    ]
    for name in (switch, *(host.name for host in hosts)):
        try:
            _ip("netns", "add", name)
        except RuntimeError:  # two processes made the first namespace of this machine at the same moment
            _ip_quietly("netns", "del", name)
            _ip("netns", "add", name)
    _ip_batch(["link add bridge0 type bridge", "link set bridge0 up"], switch)
    cables = [("here", f"{subnet}.1", None), *((host.port, host.address, host.name) for host in hosts)]
    for port, address, place in cables:
        there = [] if place is None else ["-n", place]
        _ip(*there, "link", "add", iface, "type", "veth", "peer", "name", port, "netns", switch)
        _ip_batch([f"link set {port} master bridge0 up"], switch)
        lines = [f"addr add {address}/24 dev {iface}", f"link set {iface} up"]
        _ip_batch(lines if place is None else [*lines, "link set lo up"], place)
    folder.mkdir()
    cases = "\n".join(f"{host.address} | {host.name}) name={host.name} ;;" for host in hosts)
    hidden = "" if hide is None else f'&& mount -t tmpfs tmpfs "{hide}"'
    shell.write_text(_SHELL % {"cases": cases, "hide": hidden}, encoding="utf-8")
    shell.chmod(0o755)
    return hosts


def _remove(label: str) -> None:
    """End the processes on the hosts of a label, and remove all that carries it; what is gone is no error."""
    iface = f"lsh{label.replace('-', '')}"
    namespaces = [name for name in _namespaces() if name.startswith(f"lowshard-{label}-")]
    end_s = time.monotonic() + _KILL_LIMIT_S
    while left := [found for name in namespaces for found in _ip_quietly("netns", "pids", name).split()]:
        for found in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(found), signal.SIGKILL)
        if time.monotonic() > end_s:
            break
        time.sleep(0.01)
    # Cables by name: a namespace may outlive its name for as long as a socket in it is half open.
    _ip_quietly("link", "del", iface)
    for name in namespaces:
        if not name.endswith("-switch"):
            _ip_quietly("-n", name, "link", "del", iface)
        _ip_quietly("netns", "del", name)
    shutil.rmtree(_RUN / f"lowshard-{label}", ignore_errors=True)


def _labels() -> set[str]:
    """Return the labels of all fake hosts on this machine, of living and dead owners."""
    found = [*_namespaces(), *os.listdir("/sys/class/net")]
    found += [name for name in os.listdir(_RUN) if name.startswith("lowshard-")]
    matches = [match for name in found if (match := _NAMES.match(name))]
    return {"-".join(part for part in match.groups() if part) for match in matches}


def _namespaces() -> list[str]:
    folder = _RUN / "netns"
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def _lock_serial(stack: contextlib.ExitStack) -> str:
    """Return a serial that this process does not use yet, locked until the end of the stack."""
    for serial in _SERIALS:
        lock = _locked(f"lowshard-fake-{os.getpid()}-{serial}")
        if lock is not None:
            stack.enter_context(lock)
            return serial
    raise RuntimeError(f"one process has at most {len(_SERIALS)} sets of fake hosts at a time")


def _lock_subnet(stack: contextlib.ExitStack) -> str:
    """Return the first three numbers of a /24 that neither this machine nor other fake hosts use, locked."""
    taken = [
        ipaddress.ip_network(route["dst"], strict=False)
        for route in json.loads(_ip("-4", "-j", "route", "show", "table", "all", "type", "unicast") or "[]")
        if route.get("dst", "default") != "default"
    ]
    start = os.getpid() % 256
    for prefix, third in itertools.product(_SUBNETS, [(start + i) % 256 for i in range(256)]):
        subnet = ipaddress.ip_network(f"{prefix}.{third}.0/24")
        if any(subnet.overlaps(other) for other in taken):
            continue
        lock = _locked(f"lowshard-subnet-{prefix}.{third}")
        if lock is not None:
            stack.enter_context(lock)
            return f"{prefix}.{third}"
    raise RuntimeError("fake hosts need a private /24 network, but this machine's routes leave none free")


def _locked(name: str) -> socket.socket | None:
    """Take a lock that ends with this process: a socket's name in this network namespace; None if it is taken."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0{name}")
    except OSError:
        lock.close()
        return None
    return lock


def _ip_batch(lines: Sequence[str], namespace: str | None = None) -> None:
    """Run several `ip` commands in one process."""
    _ip(*([] if namespace is None else ["-n", namespace]), "-batch", "-", text="\n".join(lines) + "\n")


def _ip_quietly(*args: str) -> str:
    """Run `ip`; its failure means that there is nothing (more) to do."""
    try:
        return _ip(*args)
    except RuntimeError:
        return ""


def _ip(*args: str, text: str = "") -> str:
    """Run `ip` and return its output."""
    try:
        done = subprocess.run(
            ["ip", *args], input=text, capture_output=True, text=True, timeout=_IP_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"ip {' '.join(args)}: {error}") from error
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(args)}: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout
