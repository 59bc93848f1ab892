"""How ranks find rank 0: its addresses, who is let in, who is turned away, on which side the proof fails."""

from __future__ import annotations

import dataclasses
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from lowshard.comm.rendezvous import INTERFACE_VARIABLE, Listener, connect, interface_addresses, tune
from lowshard.errors import CommError

pytestmark = pytest.mark.time_limit(30)

Came = dict[int, socket.socket]


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener(4)
    yield made
    made.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def accept(
    listener: Listener, pool: ThreadPoolExecutor, ranks: list[int], limit_s: float = 5.0
) -> Future[Came]:
    return pool.submit(listener.accept, ranks, limit_s)


def knock(listener: Listener) -> socket.socket:
    return socket.create_connection(("127.0.0.1", listener.offer.port), timeout=5.0)


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


def test_ranks_are_let_in_by_each_address_of_the_host(listener: Listener, pool: ThreadPoolExecutor) -> None:
    offer = listener.offer
    assert "127.0.0.1" in offer.addresses
    ranks = list(range(1, len(offer.addresses) + 1))
    coming = accept(listener, pool, ranks)
    mine = [
        connect(dataclasses.replace(offer, addresses=(address,)), rank, 5.0)
        for rank, address in zip(ranks, offer.addresses, strict=True)
    ]
    came = coming.result()
    assert sorted(came) == ranks
    for rank, connection in zip(ranks, mine, strict=True):
        tune(connection, 2.0)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 4000
        assert came[rank].getpeername()[1] == connection.getsockname()[1]
    close_all(*came.values(), *mine)


def test_strangers_are_turned_away_and_hold_nobody_up(listener: Listener, pool: ThreadPoolExecutor) -> None:
    offer = listener.offer
    silent, rude, early = knock(listener), knock(listener), knock(listener)
    rude.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1:80\r\n\r\n")
    close_all(early)
    coming = accept(listener, pool, [1, 2])
    with pytest.raises(CommError, match="another program listens there"):
        connect(dataclasses.replace(offer, token="00" * 32), 1, 0.3)
    # What a rank that knows the magic words but no token would send.
    liar = knock(listener)
    liar.sendall(struct.pack("!16sI16s", b"lowshard-watch-1", 2, bytes(16)))
    assert len(liar.recv(48, socket.MSG_WAITALL)) == 48
    liar.sendall(bytes(32))
    assert liar.recv(1) == b""
    mine = [connect(offer, rank, 5.0) for rank in (2, 1)]
    came = coming.result()
    assert {rank: c.getpeername()[1] for rank, c in came.items()} == {
        rank: c.getsockname()[1] for rank, c in zip((2, 1), mine, strict=True)
    }
    rude.settimeout(5.0)
    with pytest.raises(
        (ConnectionResetError, AssertionError)
    ):  # closed, with or without what it had sent read
        assert rude.recv(1)
    close_all(silent, rude, liar, *came.values(), *mine)


def test_a_rank_that_comes_again_and_one_that_is_not_expected(
    listener: Listener, pool: ThreadPoolExecutor
) -> None:
    coming = accept(listener, pool, [1, 2])
    first, second = connect(listener.offer, 1, 5.0), connect(listener.offer, 1, 5.0)
    seventh = connect(listener.offer, 7, 5.0)
    other = connect(listener.offer, 2, 5.0)
    came = coming.result()
    assert came[1].getpeername()[1] == second.getsockname()[1]
    assert first.recv(1) == b""
    assert seventh.recv(1) == b""
    assert sorted(came) == [1, 2]
    close_all(first, second, seventh, other, *came.values())


def test_a_rank_that_does_not_come_is_missing(listener: Listener, pool: ThreadPoolExecutor) -> None:
    coming = accept(listener, pool, [1, 2], 0.5)
    mine = connect(listener.offer, 2, 5.0)
    came = coming.result()
    assert sorted(came) == [2]
    close_all(mine, *came.values())


def test_another_program_at_an_address_is_passed_by(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    """As 127.0.0.1 is on another host: whoever listens there at that port knows no token."""
    monkeypatch.setenv(INTERFACE_VARIABLE, "lo")  # so that the other address is free
    listener = Listener(2)
    impostor = socket.create_server(("127.0.0.2", listener.offer.port))
    impostor.settimeout(5.0)

    def answer() -> None:
        visitor, _ = impostor.accept()
        with visitor:
            visitor.recv(64)
            visitor.sendall(bytes(48) + b"\x01")  # nonce, no proof, welcome
            time.sleep(0.2)

    thread = threading.Thread(target=answer)
    thread.start()
    coming = accept(listener, pool, [1])
    offer = dataclasses.replace(listener.offer, addresses=("127.0.0.2", "127.0.0.1"))
    mine = connect(offer, 1, 5.0)
    assert mine.getpeername()[0] == "127.0.0.1"
    thread.join()
    listener.close()
    close_all(impostor, mine, *coming.result().values())


def test_the_error_names_every_address_that_was_tried(listener: Listener) -> None:
    offer = dataclasses.replace(listener.offer, host="head", addresses=("127.0.0.1", "::1"), port=1)
    with pytest.raises(CommError) as caught:
        connect(offer, 3, 0.3)
    text = str(caught.value)
    assert f"rank 3 on {socket.gethostname()} reaches none of the addresses of head, port 1" in text
    assert "127.0.0.1: connection refused" in text
    assert "; ::1: " in text
    assert "LOWSHARD_INTERFACE" in text


def test_from_another_host_loopback_is_not_tried(listener: Listener) -> None:
    with pytest.raises(CommError, match="no address was offered"):
        connect(
            dataclasses.replace(listener.offer, network="elsewhere", addresses=("127.0.0.1", "::1")), 1, 5.0
        )


def test_a_host_without_ipv6_is_listened_on(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    listener = Listener(2)
    assert not [address for address in listener.offer.addresses if ":" in address]
    coming = accept(listener, pool, [1])
    mine = connect(listener.offer, 1, 5.0)
    listener.close()
    close_all(mine, *coming.result().values())


def test_the_limit_of_open_files_is_raised_for_many_ranks() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 2000:
        pytest.skip(f"this process may open no more than {before[1]} files")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, before[1]))
        Listener(400).close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1000
        Listener(4).close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
