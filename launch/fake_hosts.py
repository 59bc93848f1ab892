"""Several hosts on this machine, to try multi-host jobs without a cluster: `lowshard run --fake-hosts 2`.

Each fake host is a network namespace with an address of its own. A remote-shell stand-in starts programs there
with a hostname, a /dev/shm and System V memory of their own and with an empty environment, as ssh would; so MPI
and lowshard take it for another machine. Cores, files and process ids are this machine's. The hosts hang on a
bridge in a namespace of its own, where no firewall rule of this machine applies; this machine is plugged in too.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowshard.argument import instance, items, truth, whole
from lowshard.argument import path as check_path
from lowshard.errors import LaunchError
from lowshard.launch.host import Host, Spread, assign

__all__ = ["FakeHost", "cut", "fake_hosts", "fake_spread", "mend", "sweep", "why_not"]

_MOST_HOSTS = 100
_IP_LIMIT_S = 20.0
_KILL_LIMIT_S = 5.0
_ENDING_S = 5.0
"""How long what ran on hosts of a dead owner may take to end, and to clean up after its ranks, before it is killed."""
_RUN = Path("/run")
_SERIALS = "0123456789abcdefghijklmnopqrstuvwxyz"  # one process may have several sets at a time
_SUBNETS = ("10.77", "10.205", "172.29", "192.168")  # /24 each, the first that nobody uses
_NAMES = re.compile(r"^(?:lowshard-(\d+)-([0-9a-z])(?:-\w+)?|lsh(\d+)([0-9a-z]))$")

# What ssh does: skip options, take the host, join the rest to one shell command, pass no environment.
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
shift
exec env -i HOME="${HOME:-/}" USER="${USER:-root}" PATH="$PATH" LOWSHARD_FAKE_HOST=1 sh -c "$*"
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
        shell: path of the remote-shell stand-in: `SHELL ADDRESS COMMAND`.
        here: network interface by which this machine is plugged in.
        here_address: this machine's address as the fake hosts see it.
    """

    name: str
    address: str
    switch: str
    port: str
    shell: str
    here: str
    here_address: str

    def command(self, *words: str) -> list[str]:
        """Returns the command that runs a shell command on this host."""
        return [self.shell, self.address, *words]


@functools.lru_cache(maxsize=1)
def why_not() -> str | None:
    """Says why there can be no fake hosts here, or None: one is made, tried and removed. Cheap after the first call."""
    if sys.platform != "linux":
        return f"fake hosts need Linux's network namespaces; this is {sys.platform}"
    if os.geteuid() != 0:
        return "fake hosts need root: making network namespaces is not allowed to others (try sudo)"
    for program, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("mount", "mount")):
        if shutil.which(program) is None:
            return f"fake hosts need the program {program!r} (package {package}), which is not on the PATH"
    try:
        with fake_hosts(1, check=False) as (host,):
            tried = subprocess.run(
                host.command("echo", "alive"),
                capture_output=True,
                text=True,
                timeout=_IP_LIMIT_S,
                check=False,
            )
    except (LaunchError, OSError, subprocess.TimeoutExpired) as error:
        return f"fake hosts cannot be made here: {error}"
    if tried.stdout.strip() != "alive":
        return f"a fake host runs no program here: {tried.stderr.strip() or tried.returncode}"
    return None


@contextlib.contextmanager
def fake_hosts(k: int, *, hide: Path | None = None, check: bool = True) -> Iterator[list[FakeHost]]:
    """Makes k fake hosts; at the end of the block ends every process on them and removes them.

    Removes first what processes that were killed have left. Several processes may have fake hosts at a time.

    Args:
        k: number of hosts, 1 to 100.
        hide: a folder whose files the hosts shall not see: they have an empty one of their own there.
        check: false leaves out the question whether it is allowed here.

    Raises:
        LaunchError: k is out of range, or it is not allowed here (`why_not` says why).
    """
    k = whole(k, f"the number of fake hosts must be 1 to {_MOST_HOSTS}", LaunchError, 1, _MOST_HOSTS)
    hide = None if hide is None else check_path(hide, "hide is the path of a folder, or None", LaunchError)
    reason = why_not() if truth(check, "check is True or False", LaunchError) else None
    if reason is not None:
        raise LaunchError(reason)
    sweep()
    with contextlib.ExitStack() as stack:
        serial = _lock_serial(stack)
        label = f"{os.getpid()}-{serial}"
        subnet = _lock_subnet(stack)
        stack.callback(_uninterrupted, _remove, label)
        yield _make(k, label, subnet, hide)


def fake_spread(hosts: Sequence[FakeHost], n: int) -> Spread:
    """Returns the spread of n ranks over fake hosts, block by block, as evenly as it goes."""
    rule = "hosts are one FakeHost or more, as fake_hosts gives them"
    hosts = [instance(host, FakeHost, rule, LaunchError) for host in items(hosts, rule, LaunchError)]
    if not hosts:
        raise LaunchError(f"{rule}, got none")
    first = hosts[0]
    return Spread(
        assign([Host(host.address) for host in hosts], n),
        shell=first.shell,
        iface=first.here,
        remote_iface="eth0",
        addresses=(first.here_address,),
        one_machine=True,
    )


def cut(host: FakeHost) -> None:
    """Cuts a host off from all others: its packets go nowhere, without an error to anybody."""
    _ip("-n", host.switch, "link", "set", host.port, "down")


def mend(host: FakeHost) -> None:
    """Connects a host again that was cut off."""
    _ip("-n", host.switch, "link", "set", host.port, "up")


def sweep() -> list[str]:
    """Removes the fake hosts of processes that died without doing so; returns the labels (pid-serial) removed."""
    removed: list[str] = []
    for label in sorted(_labels()):
        lock = _locked(f"lowshard-fake-{label}")
        if lock is not None:
            with lock:
                _remove(label, _ENDING_S)
            removed.append(label)
    return removed


def _make(k: int, label: str, subnet: str, hide: Path | None) -> list[FakeHost]:
    """Makes the namespaces, the cables, and the remote-shell stand-in."""
    pid, serial = label.split("-")
    switch, here = f"lowshard-{label}-switch", f"lsh{pid}{serial}"
    folder = _RUN / f"lowshard-{label}"
    hosts = [
        FakeHost(
            f"lowshard-{label}-{i}",
            f"{subnet}.{11 + i}",
            switch,
            f"port{i}",
            str(folder / "shell"),
            here,
            f"{subnet}.1",
        )
        for i in range(k)
    ]
    names = [switch, *(host.name for host in hosts)]
    for name in names:
        try:
            _ip("netns", "add", name)
        except LaunchError:  # two processes made the first namespace of this machine at the same moment
            _ip_quietly("netns", "del", name)
            _ip("netns", "add", name)
    _ip_batch(["link add bridge0 type bridge", "link set bridge0 up"], switch)
    cables = [(here, "here", None), *(("eth0", host.port, host) for host in hosts)]
    for end, port, host in cables:
        place = [] if host is None else ["-n", host.name]
        _ip(*place, "link", "add", end, "type", "veth", "peer", "name", port, "netns", switch)
        _ip_batch([f"link set {port} master bridge0 up"], switch)
        address = f"{subnet}.1" if host is None else host.address
        lines = [f"addr add {address}/24 dev {end}", f"link set {end} up"]
        _ip_batch(lines if host is None else [*lines, "link set lo up"], None if host is None else host.name)
    folder.mkdir()
    shell = folder / "shell"
    cases = "\n".join(f"{host.address} | {host.name}) name={host.name} ;;" for host in hosts)
    hidden = "" if hide is None else f'&& mount -t tmpfs tmpfs "{hide}"'
    shell.write_text(_SHELL % {"cases": cases, "hide": hidden}, encoding="utf-8")
    shell.chmod(0o755)
    return hosts


def _remove(label: str, ending_s: float = 0.0) -> None:
    """Ends the processes on the hosts of a label, and removes all that carries it; what is gone is no error.

    Args:
        label: of the hosts.
        ending_s: how long the processes may take to end by themselves.
    """
    pid, serial = label.split("-")
    namespaces = [name for name in _namespaces() if name.startswith(f"lowshard-{label}-")]
    kill_s = time.monotonic() + ending_s
    end_s = kill_s + _KILL_LIMIT_S
    while left := [found for name in namespaces for found in _ip_quietly("netns", "pids", name).split()]:
        for found in left if time.monotonic() >= kill_s else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(found), signal.SIGKILL)
        if time.monotonic() > end_s:
            break
        time.sleep(0.01)
    # Cables by name: a namespace may outlive its name for as long as a socket in it is half open.
    _ip_quietly("link", "del", f"lsh{pid}{serial}")
    for name in namespaces:
        if not name.endswith("-switch"):
            _ip_quietly("-n", name, "link", "del", "eth0")
        _ip_quietly("netns", "del", name)
    shutil.rmtree(_RUN / f"lowshard-{label}", ignore_errors=True)


def _labels() -> set[str]:
    """Returns the labels of all fake hosts on this machine, of living and dead owners."""
    found = [*_namespaces(), *os.listdir("/sys/class/net")]
    found += [name for name in os.listdir(_RUN) if name.startswith("lowshard-")]
    labels = set()
    for name in found:
        match = _NAMES.match(name)
        if match:
            labels.add("-".join(part for part in match.groups() if part))
    return labels


def _namespaces() -> list[str]:
    folder = _RUN / "netns"
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def _lock_serial(stack: contextlib.ExitStack) -> str:
    """Returns a serial that this process does not use yet, locked until the end of the stack."""
    for serial in _SERIALS:
        lock = _locked(f"lowshard-fake-{os.getpid()}-{serial}")
        if lock is not None:
            stack.enter_context(lock)
            return serial
    raise LaunchError(f"one process has at most {len(_SERIALS)} sets of fake hosts at a time")


def _lock_subnet(stack: contextlib.ExitStack) -> str:
    """Returns the first three numbers of a /24 that neither this machine nor other fake hosts use, locked."""
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
    raise LaunchError("fake hosts need a private /24 network, but this machine's routes leave none free")


def _locked(name: str) -> socket.socket | None:
    """Takes a lock that ends with this process: a socket's name in this network namespace; None if it is taken."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0{name}")
    except OSError:
        lock.close()
        return None
    return lock


def _uninterrupted(function: Callable[..., object], *args: object) -> None:
    """Calls a function with the signals that end a process held back: half of a clean-up leaves more than none."""
    ending = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    try:
        function(*args)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ip_batch(lines: Sequence[str], namespace: str | None = None) -> None:
    """Runs several `ip` commands in one process."""
    _ip(*([] if namespace is None else ["-n", namespace]), "-batch", "-", text="\n".join(lines) + "\n")


def _ip_quietly(*args: str) -> str:
    """Runs `ip`; its failure means that there is nothing (more) to do."""
    try:
        return _ip(*args)
    except LaunchError:
        return ""


def _ip(*args: str, text: str = "") -> str:
    """Runs `ip` and returns its output."""
    try:
        done = subprocess.run(
            ["ip", *args], input=text, capture_output=True, text=True, timeout=_IP_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"ip {' '.join(args)}: {error}") from error
    if done.returncode:
        raise LaunchError(f"ip {' '.join(args)}: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout
