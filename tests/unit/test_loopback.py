"""What another process listens on is moved to loopback: the same ports, and it goes on accepting there."""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from support.listening import public_doors

from lowshard.comm.interface import interface_addresses, is_loopback
from lowshard.launch import loopback_sockets
from lowshard.launch.loopback_sockets import move_to_loopback

pytestmark = pytest.mark.time_limit(60)

# Listens at the addresses in its arguments, says at which ports, then what comes in.
_LISTENER = """
import select, socket, sys
made = []
for host in sys.argv[1:]:
    one = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.append(one)
print(*[one.getsockname()[1] for one in made], flush=True)
while True:
    for one in select.select(made, [], [])[0]:
        with one.accept()[0] as came:
            came.sendall(one.getsockname()[0].encode())
"""


@contextlib.contextmanager
def listener(*hosts: str) -> Iterator[tuple[int, list[int]]]:
    """Yield the pid of a process that listens at these addresses, and the ports."""
    words = [sys.executable, "-c", _LISTENER, *hosts]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as started:
        try:
            assert started.stdout is not None
            yield started.pid, [int(word) for word in started.stdout.readline().split()]
        finally:
            started.kill()


def said_at(host: str, port: int) -> str:
    with socket.create_connection((host, port), timeout=10) as mine:
        return mine.recv(100).decode()


def test_all_that_others_could_reach_is_moved_and_goes_on_working() -> None:
    own = [address for addresses in interface_addresses().values() for address in addresses]
    public = [address for address in own if not is_loopback(address) and ":" not in address][:1]
    with listener("0.0.0.0", "127.0.0.1", *public) as (pid, ports):
        assert said_at((*public, "127.0.0.1")[0], ports[0]) == "0.0.0.0"
        assert move_to_loopback(pid)
        for port in ports:
            assert said_at("127.0.0.1", port) == "127.0.0.1"
            for host in public:
                with pytest.raises(ConnectionRefusedError):
                    said_at(host, port)
        assert public_doors(pid) == []
        assert move_to_loopback(pid)


@pytest.mark.skipif("::1" not in interface_addresses().get("lo", []), reason="this machine has no IPv6")
def test_ipv6_is_moved_to_its_own_loopback() -> None:
    with listener("::") as (pid, [port]):
        assert said_at("::1", port) == "::"
        assert move_to_loopback(pid)
        assert said_at("::1", port) == "::1"
        assert public_doors(pid) == []


# Listens as MPICH's mpiexec does, without SO_REUSEADDR, and answers on each connection as long as that lasts.
_KEEPER = """
import select, socket, sys
door = socket.socket()
door.bind(("0.0.0.0", 0))
door.listen()
print(door.getsockname()[1], flush=True)
if sys.argv[1] == "late":
    sys.stdin.readline()
known = [door]
while True:
    for one in select.select(known, [], [])[0]:
        if one is door:
            known.append(door.accept()[0])
        elif (words := one.recv(100)):
            one.sendall(words)
        else:
            known.remove(one)
"""


@pytest.mark.parametrize("when", ["accepted", "late"])
def test_a_connection_that_is_there_outlives_the_move(when: str) -> None:
    words = [sys.executable, "-c", _KEEPER, when]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdin is not None
            assert started.stdout is not None
            port = int(started.stdout.readline())
            with socket.create_connection(("127.0.0.1", port), timeout=10) as first:
                first.sendall(b"one")
                if when == "accepted":
                    assert first.recv(10) == b"one"
                assert move_to_loopback(started.pid)
                assert move_to_loopback(started.pid)  # as the launcher does, until a rank was heard
                if when == "late":
                    started.stdin.write("\n")
                    started.stdin.flush()
                    assert first.recv(10) == b"one"
                first.sendall(b"two")
                assert first.recv(10) == b"two"
                with socket.create_connection(("127.0.0.1", port), timeout=10) as second:
                    second.sendall(b"three")
                    assert second.recv(10) == b"three"
            assert started.poll() is None
        finally:
            started.kill()


def test_who_connects_during_the_move_gets_in() -> None:
    for _ in range(20):
        with listener("0.0.0.0") as (pid, [port]):
            with ThreadPoolExecutor(8) as callers:
                answers = [callers.submit(said_at, "127.0.0.1", port) for _ in range(8)]
                assert move_to_loopback(pid)
            assert all(answer.result() in ("0.0.0.0", "127.0.0.1") for answer in answers)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_while_a_socket_is_closed_nobody_takes_its_port_and_who_connects_waits(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers: list[Future[str]] = []
    rivals: list[int | None] = []

    class Watched(socket.socket):
        def shutdown(self, how: int) -> None:
            super().shutdown(how)
            with socket.socket(self.family) as rival:
                try:
                    rival.bind((host, port))
                except OSError as error:
                    rivals.append(error.errno)
                else:
                    rivals.append(None)
            callers.append(pool.submit(said_at, "127.0.0.1" if host == "0.0.0.0" else "::1", port))
            time.sleep(0.2)  # it asks now

    taken = loopback_sockets._taken
    monkeypatch.setattr(loopback_sockets, "_taken", lambda *at: Watched(fileno=taken(*at).detach()))
    with ThreadPoolExecutor(1) as pool, listener(host) as (pid, [port]):
        assert move_to_loopback(pid)
        assert [one.result() for one in callers] == ["127.0.0.1" if host == "0.0.0.0" else "::1"]
        assert rivals == [errno.EADDRINUSE]


# Starts a process as the launcher starts mpiexec, stops it as it does, and dies at that moment.
_DYING_LAUNCHER = """
import os, signal, subprocess, sys
from lowshard.launch.loopback_sockets import _stopped
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0)
with _stopped(child.pid) as stopped:
    print(child.pid, stopped, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_launcher_that_dies_while_mpiexec_is_stopped_leaves_nothing_stopped_behind() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _DYING_LAUNCHER], stdout=subprocess.PIPE, text=True, timeout=30
    )
    assert ran.returncode == -signal.SIGKILL
    pid, stopped = ran.stdout.split()
    assert stopped == "True"
    end_s = time.monotonic() + 10
    while is_there(pid) and time.monotonic() < end_s:  # the kernel wakes it, and tells it to hang up
        time.sleep(0.01)
    assert not is_there(pid)


def is_there(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_where_the_kernel_refuses_the_socket_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback_sockets, "_PIDFD_GETFD", 10_000)  # a system call that there is not
    with listener("0.0.0.0") as (pid, [port]):
        assert not move_to_loopback(pid)
        assert said_at("127.0.0.1", port) == "0.0.0.0"


def test_a_process_that_is_gone_is_no_error() -> None:
    with subprocess.Popen(["true"]) as done:
        done.wait()
    assert move_to_loopback(done.pid)
