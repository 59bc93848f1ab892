"""How ranks find rank 0: where it listens, who is expected, what the errors name, and that no folder stays behind."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import resource
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from lowshard import settings
from lowshard.comm.interface import addresses_towards, interface_addresses, is_loopback, network_name
from lowshard.comm.rendezvous import Rendezvous, connect, reaches
from lowshard.errors import CommError

pytestmark = pytest.mark.time_limit(30)

Came = dict[int, socket.socket]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of this process."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture(params=["unix", "tcp"])
def met(request: pytest.FixtureRequest, folder: Path) -> Iterator[Rendezvous]:
    made = Rendezvous.nearby(4) if request.param == "unix" else Rendezvous.towards([], with_loopback=True)
    yield made
    made.close()
    assert not any(folder.iterdir())


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def accept(met: Rendezvous, pool: ThreadPoolExecutor, ranks: list[int], limit_s: float = 5.0) -> Future[Came]:
    return pool.submit(met.accept, ranks, limit_s)


def close_all(*connections: socket.socket) -> None:
    for connection in connections:
        connection.close()


def test_loopback_is_among_the_addresses_and_link_local_ones_are_not() -> None:
    found = interface_addresses()
    assert "127.0.0.1" in found["lo"]
    every = [address for addresses in found.values() for address in addresses]
    assert not [address for address in every if address.startswith("fe80:")]
    for address in every:
        socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)


def test_other_hosts_are_given_the_address_on_the_way_to_them_and_no_other() -> None:
    own = [address for addresses in interface_addresses().values() for address in addresses]
    usable = [address for address in own if not is_loopback(address)]
    assert set(addresses_towards([])) == set(usable or ["127.0.0.1"])
    towards = addresses_towards(["203.0.113.7", "203.0.113.9", *own])
    assert set(towards) <= set(usable or ["127.0.0.1"])
    assert towards == addresses_towards(["203.0.113.7"])


def test_on_one_machine_rank_0_listens_in_a_private_folder_alone(folder: Path) -> None:
    made = Rendezvous.nearby(2)
    [address] = made.offer.addresses
    assert Path(address.removeprefix("unix:")).parent.parent == folder
    assert reaches(made.offer)
    assert not reaches(dataclasses.replace(made.offer, network="elsewhere"))
    assert not reaches(dataclasses.replace(made.offer, addresses=("unix:/no/such/folder/door",)))
    made.close()
    assert not reaches(made.offer)
    assert not any(folder.iterdir())


def test_in_a_job_the_folder_lies_in_the_jobs_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    job_dir = tmp_path_factory.mktemp("job")
    monkeypatch.setenv(settings.JOB_DIR.name, str(job_dir))
    made = Rendezvous.nearby(2)
    assert made.offer.addresses[0].startswith(f"unix:{job_dir}/")
    made.close()
    monkeypatch.setenv(settings.JOB_DIR.name, "/no/such/folder")
    made = Rendezvous.nearby(2)
    assert made.offer.addresses[0].startswith(f"unix:{folder}/")
    made.close()


def test_where_no_socket_can_be_made_it_is_loopback(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/self")
    made = Rendezvous.nearby(2)
    assert made.offer.addresses[0].startswith("tcp://127.0.0.1:")
    assert reaches(made.offer)
    made.close()


def test_the_folder_of_a_killed_process_is_removed_and_no_other(folder: Path) -> None:
    held, stale, new = (folder / f"lowshard-door-{name}" for name in ("held", "stale", "new"))
    for one in (held, stale, new):
        one.mkdir()
    for one in (held, stale):
        os.utime(one, (time.time() - 100, time.time() - 100))
    fd = os.open(held, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    Rendezvous.nearby(2).close()
    assert sorted(path.name for path in folder.iterdir()) == ["lowshard-door-held", "lowshard-door-new"]
    os.close(fd)


def test_a_rank_that_comes_again_and_one_that_is_not_expected(
    met: Rendezvous, pool: ThreadPoolExecutor
) -> None:
    coming = accept(met, pool, [1, 2])
    first, second = connect(met.offer, 1, 5.0), connect(met.offer, 1, 5.0)
    seventh = connect(met.offer, 7, 5.0)
    other = connect(met.offer, 2, 5.0)
    came = coming.result()
    came[1].send(b"second")
    assert second.recv(6) == b"second"
    assert first.recv(1) == b""
    assert seventh.recv(1) == b""
    assert sorted(came) == [1, 2]
    close_all(first, second, seventh, other, *came.values())


def test_a_rank_that_does_not_come_is_missing(met: Rendezvous, pool: ThreadPoolExecutor) -> None:
    coming = accept(met, pool, [1, 2], 0.5)
    mine = connect(met.offer, 2, 5.0)
    came = coming.result()
    assert sorted(came) == [2]
    close_all(mine, *came.values())


def test_the_error_names_every_address_that_was_tried(met: Rendezvous) -> None:
    offer = dataclasses.replace(met.offer, host="head", addresses=("tcp://127.0.0.1:1", "tcp://[::1]:1"))
    with pytest.raises(CommError) as caught:
        connect(offer, 3, 0.3)
    text = str(caught.value)
    assert f"rank 3 on {socket.gethostname()} reaches none of the addresses of head (" in text
    assert "tcp://127.0.0.1:1: connection refused" in text
    assert "; tcp://[::1]:1: " in text
    assert settings.INTERFACE.name in text


def test_from_another_host_loopback_and_files_are_not_tried(met: Rendezvous) -> None:
    addresses = ("tcp://127.0.0.1:1", "tcp://[::1]:1", "unix:/tmp/door")
    assert met.offer.network == network_name()
    with pytest.raises(CommError, match="no address was offered"):
        connect(dataclasses.replace(met.offer, network="elsewhere", addresses=addresses), 1, 5.0)


def test_the_limit_of_open_files_is_raised_for_many_ranks(folder: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 2000:
        pytest.skip(f"this process may open no more than {before[1]} files")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, before[1]))
        Rendezvous.nearby(400).close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1000
        Rendezvous.nearby(4).close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
