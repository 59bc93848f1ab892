"""Lists of hosts and hostfiles: what they say, what is refused, who gets how many ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowshard.errors import LaunchError
from lowshard.launch.host import Host, assign, parse_hosts, read_hostfile, spread_over


def placed(hosts: str, n: int) -> str:
    return " ".join(f"{host.name}:{host.slots}" for host in assign(parse_hosts(hosts), n))


@pytest.mark.parametrize(
    ("hosts", "n", "expected"),
    [
        ("a:2,b:2", 4, "a:2 b:2"),
        ("a:2,b:2", 3, "a:2 b:1"),
        ("a:2,b:2", 2, "a:2"),
        ("b:1,a:1", 2, "b:1 a:1"),
        ("a,b", 4, "a:2 b:2"),
        ("a,b,c", 5, "a:2 b:2 c:1"),
        ("a,b,c", 2, "a:1 b:1"),
        ("a:3,b", 5, "a:3 b:2"),
        ("a,b:2,c", 5, "a:2 b:2 c:1"),
        ("a:3,b", 3, "a:3"),
        ("a, a, b", 3, "a:2 b:1"),
        ("10.0.0.1:2,[fe80::1]:1", 3, "10.0.0.1:2 [fe80::1]:1"),
        ("node-1.cluster:1", 1, "node-1.cluster:1"),
    ],
)
def test_ranks_go_to_the_hosts_in_order_block_by_block(hosts: str, n: int, expected: str) -> None:
    assert placed(hosts, n) == expected


def test_more_ranks_than_slots_are_refused_with_what_to_write() -> None:
    with pytest.raises(LaunchError, match=r"-n 5 is more than the 4 of a:2,b:2; raise.*host:3"):
        assign(parse_hosts("a:2,b:2"), 5)


@pytest.mark.parametrize(
    "text",
    ["", ",", "a:0", "a:-1", "a:x", "a:", ":2", "a b", "a;reboot", "-o:2", "fe80::x", "a:" + "9" * 5000],
)
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="host"):
        parse_hosts(text)


@pytest.mark.parametrize("name", ["", "a b", "a\n", "a slots=9", "-oProxyCommand=x", "a;b", "ä"])
def test_a_host_has_the_name_of_one(name: str) -> None:
    with pytest.raises(LaunchError, match="a host's name is a name or an address"):
        Host(name, 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a slots=4\nb slots=2 max_slots=8\n", (Host("a", 4), Host("b", 2))),
        ("a max-slots=3 # the rest is for others\n", (Host("a", 3),)),
        ("a:4\nb:2 binding=user:0,1\n", (Host("a", 4), Host("b", 2))),
        ("# comment\n\n  a  \nb # another\n", (Host("a"), Host("b"))),
        ("a\na\nb:2\nb:1\n", (Host("a", 2), Host("b", 3))),
        ("a slots=1\nb:2", (Host("a", 1), Host("b", 2))),
    ],
)
def test_a_hostfile_may_have_either_syntax(tmp_path: Path, text: str, expected: tuple[Host, ...]) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    assert read_hostfile(path) == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a\nb slots=x\n", "line 2: 'b slots=x'"),
        ("a slots=0", "line 1"),
        ("a 4", "line 1: 'a 4'"),
        ("a slots=" + "9" * 5000, "line 1"),
        ("a slots", "line 1"),
        ("a:x", "line 1"),
        ("# none\n", "names no host"),
    ],
)
def test_a_wrong_line_of_a_hostfile_is_named(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(LaunchError, match=told):
        read_hostfile(path)


def test_a_hostfile_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="none is not a valid hostfile: it cannot be read"):
        read_hostfile(tmp_path / "none")


@pytest.mark.parametrize("family", ["openmpi", "mpich"])
def test_the_hostfile_written_for_an_mpi_reads_back_the_same(tmp_path: Path, family: str) -> None:
    spread = spread_over(parse_hosts("a:2,10.0.0.7:3"), 5)
    path = tmp_path / "hosts"
    path.write_text(spread.hostfile(family))
    assert read_hostfile(path) == spread.hosts
    assert ("slots=" in path.read_text()) == (family == "openmpi")
