"""Listeners: who is let in, and that strangers of every kind neither get in nor hold a client up."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowshard.comm import listener as listener_module
from lowshard.comm.listener import MOST_WAITING, Client, Listener, connect, tune

pytestmark = pytest.mark.time_limit(300)

SOON_S = 10.0
_HEAD = struct.Struct("!16sBI16s")


class Served:
    """A listener, with a thread that lets clients in."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.clients: list[Client] = []
        self.most_waiting = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        knocks = select.poll()
        knocks.register(self.listener.fileno(), select.POLLIN)
        while not self._over.is_set():
            knocks.poll(50)
            self.clients += self.listener.admit()
            self.most_waiting = max(self.most_waiting, len(self.listener._waiting))

    def connect(self, rank: int = 0, limit_s: float = SOON_S) -> socket.socket:
        return connect(self.listener.addresses, self.listener.token, 0, rank, limit_s)

    def ranks(self, count: int) -> list[int]:
        """Return the ranks of so many clients, once they are there: a client may know it before this thread says so."""
        end_s = time.monotonic() + SOON_S
        while len(self.clients) < count and time.monotonic() < end_s:
            time.sleep(0.001)
        return [client.rank for client in self.clients]

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self.listener.close()
        for client in self.clients:
            client.connection.close()


@pytest.fixture(params=["unix", "tcp"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    made = Served(
        Listener.in_folder(tmp_path) if request.param == "unix" else Listener.on_network(["127.0.0.1"])
    )
    yield made
    made.close()


def heard(connection: socket.socket) -> bytes:
    """Return all that a listener says before it closes a connection."""
    connection.settimeout(SOON_S)
    return b"".join(iter(lambda: connection.recv(64), b""))


def knock(listener: Listener) -> socket.socket:
    return listener_module._opened(listener.addresses[0], SOON_S)


def test_a_client_is_let_in_with_its_purpose_and_rank(served: Served) -> None:
    with connect(served.listener.addresses, served.listener.token, 7, 1 << 31, SOON_S) as mine:
        assert served.ranks(1) == [1 << 31]
        [client] = served.clients
        assert client.purpose == 7
        client.connection.sendall(b"hello")
        assert mine.recv(5) == b"hello"


def test_whoever_has_another_token_stays_outside_and_is_told_why(served: Served) -> None:
    with pytest.raises(ConnectionError, match="another program listens there"):
        connect(served.listener.addresses, bytes(32), 0, 0, 0.2)
    assert not served.clients


def test_a_copy_of_what_a_client_said_opens_nothing(served: Served) -> None:
    """As somebody who listens on the network could send it: the nonce is another one."""
    with knock(served.listener) as first, knock(served.listener) as copy:
        nonce = first.recv(16, socket.MSG_WAITALL)
        head = _HEAD.pack(b"lowshard-hello-2", 0, 1, bytes(16))
        hello = head + listener_module._proof(served.listener.token, b"client", head + nonce)
        assert copy.recv(16, socket.MSG_WAITALL) != nonce
        copy.sendall(hello)
        assert copy.recv(1) == b""
        first.sendall(hello)
        assert len(first.recv(32, socket.MSG_WAITALL)) == 32
    assert served.ranks(1) == [1]


@pytest.mark.parametrize("impostor_says", ["no proof", "right length, no proof"])
def test_a_client_does_not_enter_the_impostor_says(impostor_says: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def answer() -> None:
            visitor, _ = impostor.accept()
            with visitor:
                visitor.recv(200)
                visitor.sendall(b"ok\n" if impostor_says == "no proof" else bytes(49))

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"tcp://127.0.0.1:{impostor.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=f"{address}: (another program listens there|timed out)"):
            connect([address], bytes(32), 0, 0, 0.3)
        thread.join()


def test_strangers_are_few_and_the_oldest_goes_first(served: Served) -> None:
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(knock(served.listener)) for _ in range(2 * MOST_WAITING)]
        with served.connect():
            for connection in strangers[:MOST_WAITING]:
                assert len(heard(connection)) == 16
            assert served.most_waiting <= MOST_WAITING


def test_a_stranger_has_a_few_seconds(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "WAIT_S", 0.3)
    with knock(served.listener) as slow:
        start_s = time.monotonic()
        assert len(heard(slow)) == 16
        assert time.monotonic() - start_s > 0.1


STRANGE = {
    "random": random.Random(1).randbytes(300), "deep": b"[" * 4094 + b"\n", "huge": bytes(1 << 20), "slow": b"l",
    "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("kind", STRANGE)
def test_no_stranger_gets_in_or_holds_a_client_up(served: Served, kind: str) -> None:
    with contextlib.ExitStack() as stack:
        for turn in range(50):
            stranger = stack.enter_context(knock(served.listener))
            with contextlib.suppress(OSError):  # turned away: that is what a listener is for
                stranger.send(STRANGE[kind])
            if turn % 10 == 0:
                served.connect(turn).close()
    assert served.ranks(5) == [0, 10, 20, 30, 40]


def test_a_folder_that_others_may_enter_is_refused_on_both_sides(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    with pytest.raises(PermissionError, match=r"user's alone \(mode 0700\), but .* mode 0750"):
        Listener.in_folder(tmp_path)
    tmp_path.chmod(0o700)
    with contextlib.closing(Listener.in_folder(tmp_path)) as listener:
        tmp_path.chmod(0o701)
        with pytest.raises(ConnectionError, match="user's alone"):
            connect(listener.addresses, listener.token, 0, 0, 0.1)


def test_a_long_path_is_no_hindrance_and_nothing_is_left(tmp_path: Path) -> None:
    folder = tmp_path.joinpath(*["x" * 100] * 3)
    folder.mkdir(parents=True, mode=0o700)
    made = Served(Listener.in_folder(folder))
    made.connect().close()
    made.close()
    assert not any(folder.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")
def test_another_user_does_not_even_reach_it(tmp_path: Path) -> None:
    """Nor would it if the folder were open: the kernel says whose a connection is."""
    with contextlib.ExitStack() as stack:
        made = Served(Listener.in_folder(tmp_path))
        stack.callback(made.close)
        program = (
            "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print(s.recv(1))"
        )
        path = made.listener.addresses[0].removeprefix("unix:")
        words = ["setpriv", "--reuid=65534", "--clear-groups", sys.executable, "-c", program, path]
        if subprocess.run([*words[:-2], "pass"], capture_output=True, timeout=30, check=False).returncode:
            pytest.skip(f"no other user can run {sys.executable}")
        shut = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
        assert "PermissionError" in shut.stderr
        for folder in (tmp_path, *tmp_path.parents):
            if folder.stat().st_mode & 0o777 == 0o700:
                stack.callback(folder.chmod, 0o700)
                folder.chmod(0o755)
        Path(path).chmod(0o777)
        met = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
        assert met.stdout == "b''\n" or "ConnectionResetError" in met.stderr
        assert not made.clients


def test_a_listener_has_several_addresses() -> None:
    made = Served(Listener.on_network(["127.0.0.1", "127.0.0.2"]))
    try:
        assert len(made.listener.addresses) == 2
        for rank, address in enumerate(made.listener.addresses):
            with connect([address], made.listener.token, 0, rank, SOON_S) as mine:
                tune(mine, 4.0)
                assert mine.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert mine.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 4000
        assert made.ranks(2) == [0, 1]
    finally:
        made.close()
