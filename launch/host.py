"""Which hosts a job runs on: the `--hosts` list, hostfiles in the syntax of Open MPI and of Hydra, who gets how many.

Both launchers are given the same thing: a list of hosts with exactly the ranks that each is to run. So a job is
laid out alike under either, block by block: the first ranks on the first host.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lowshard.argument import brief, choice, instance, items, whole
from lowshard.comm.world import count_in
from lowshard.errors import LaunchError
from lowshard.reading import read_text

__all__ = ["Host", "Spread", "assign", "parse_hosts", "read_hostfile", "spread_over"]

_SLOT_KEYS = ("slots", "max_slots", "max-slots")
_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\]")


@dataclass(frozen=True)
class Host:
    """One host of a list.

    Attributes:
        name: its name or address, as the remote shell takes it.
        slots: ranks it may run; None where the list does not say.
    """

    name: str
    slots: int | None = None

    def __post_init__(self) -> None:
        instance(self.name, str, "a host's name is text", LaunchError)
        if not _NAME.fullmatch(self.name):
            raise LaunchError(
                f"a host's name is a name or an address, in brackets one of IPv6; got {brief(self.name)}"
            )
        if self.slots is not None:
            whole(self.slots, f"host {self.name} runs 1 rank or more, or None", LaunchError, 1)


@dataclass(frozen=True)
class Spread:
    """A job's hosts and how they are reached.

    Attributes:
        hosts: the hosts in the order of the ranks; `slots` is the number of ranks on each.
        shell: remote shell to use in place of ssh; "" for the MPI launcher's own choice.
        iface: network interface by which this machine and the hosts reach each other; "" for MPI's own choice.
    """

    hosts: tuple[Host, ...]
    shell: str = ""
    iface: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", _checked(self.hosts))
        for what in ("shell", "iface"):
            instance(getattr(self, what), str, f"{what} is text", LaunchError)

    @property
    def most_ranks(self) -> int:
        """The largest number of ranks of a host."""
        return max(host.slots or 0 for host in self.hosts)

    def hostfile(self, family: str) -> str:
        """Returns the hosts in the syntax of a family's hostfile: "openmpi" or "mpich"."""
        choice(family, ("openmpi", "mpich"), "a hostfile is of the family 'openmpi' or 'mpich'", LaunchError)
        line = "{} slots={}\n" if family == "openmpi" else "{}:{}\n"
        return "".join(line.format(host.name, host.slots) for host in self.hosts)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Reads a list as on a command line: `a:2,b:2`, or `a,b`.

    Raises:
        LaunchError: an entry is not a host.
    """
    instance(text, str, "hosts are listed as text, such as a:2,b:2", LaunchError)
    entries = [entry.strip() for entry in text.split(",")]
    if not any(entries):
        raise LaunchError("--hosts needs at least one host; write: --hosts a:2,b:2")
    return _merged([_with_colon(entry, f"--hosts {text}") for entry in entries if entry])


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Reads a hostfile, each line in Open MPI's syntax (`host slots=4`) or Hydra's (`host:4`); # starts a comment.

    A host on several lines gets the sum of their slots.

    Raises:
        LaunchError: the file cannot be read, or a line is neither.
    """
    hosts: list[Host] = []
    for number, line in enumerate(read_text(path, "hostfile", LaunchError).splitlines(), start=1):
        where = f"{path}, line {number}"
        first, *rest = line.partition("#")[0].split() or [""]
        if not first:
            continue
        host = _with_colon(first, where)
        slots = host.slots
        for word in rest:
            key, equals, value = word.partition("=")
            if not equals or not value or not key:
                raise _bad_entry(line.strip(), where)
            if key in _SLOT_KEYS:  # other settings (binding=...) say nothing about where ranks go
                count = count_in(value)
                if not count:
                    raise _bad_entry(line.strip(), where)
                slots = count if key == "slots" or slots is None else slots
        hosts.append(Host(host.name, slots))
    if not hosts:
        raise LaunchError(f"the hostfile {path} names no host; write one line for each: host slots=4")
    return _merged(hosts)


def assign(hosts: Sequence[Host], n: int) -> tuple[Host, ...]:
    """Returns the hosts that run n ranks, `slots` on each: full slots in order; those without a number share the rest.

    Raises:
        LaunchError: n ranks are more than the hosts have slots.
    """
    hosts = _checked(hosts)
    n = whole(n, "a job has at least 1 rank", LaunchError, 1)
    given = sum(host.slots for host in hosts if host.slots is not None)
    open_hosts = sum(host.slots is None for host in hosts)
    if n > given and not open_hosts:
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise LaunchError(
            f"a job's ranks must fit the hosts' slots, but -n {n} is more than the {given} of {listed}; raise a "
            f"slot number (host:{n - given + (hosts[0].slots or 0)}, say), add a host, or leave the numbers away"
        )
    base, more = divmod(max(0, n - given), open_hosts) if open_hosts else (0, 0)
    placed: list[Host] = []
    left = n
    for host in hosts:
        if host.slots is None:
            ranks = base + (more > 0)
            more = max(0, more - 1)
        else:
            ranks = host.slots
        ranks = min(ranks, left)
        left -= ranks
        if ranks:
            placed.append(Host(host.name, ranks))
    return tuple(placed)


def spread_over(hosts: Sequence[Host], n: int, *, shell: str = "", iface: str = "") -> Spread:
    """Returns the spread of n ranks over listed hosts.

    Raises:
        LaunchError: n ranks are more than the hosts have slots.
    """
    return Spread(assign(hosts, n), shell=shell, iface=iface)


def _checked(hosts: object) -> tuple[Host, ...]:
    rule = "hosts are one Host or more, as parse_hosts and read_hostfile return them"
    found = tuple(instance(host, Host, rule, LaunchError) for host in items(hosts, rule, LaunchError))
    if not found:
        raise LaunchError(f"{rule}, got none")
    return found


def _with_colon(entry: str, where: str) -> Host:
    """Reads `host` or `host:4`; an IPv6 address stands in brackets."""
    name, colon, slots = entry.rpartition(":") if not entry.endswith("]") else (entry, "", "")
    count = count_in(slots) if colon else None
    if not colon:
        name = entry
    elif not count:
        raise _bad_entry(entry, where)
    if not _NAME.fullmatch(name):
        raise _bad_entry(entry, where)
    return Host(name, count)


def _merged(hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Joins the entries of one host, in the order of its first; one without a number counts one rank each time."""
    found: dict[str, list[int | None]] = {}
    for host in hosts:
        found.setdefault(host.name, []).append(host.slots)
    return tuple(
        Host(name, slots[0] if len(slots) == 1 else sum(1 if s is None else s for s in slots))
        for name, slots in found.items()
    )


def _bad_entry(entry: str, where: str) -> LaunchError:
    return LaunchError(
        f"{where}: {brief(entry)} is not a host; write a name or address, and how many ranks it may run: host:4 "
        f"(in a hostfile also: host slots=4)"
    )
