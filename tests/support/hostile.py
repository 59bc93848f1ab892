"""A process without the token that knocks at a door in every way that does harm: run as a module, or by `attack`."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

KINDS = ("random", "deep", "huge", "slow", "half-open", "flood", "mixed")
"""Random bytes; `[` repeated, as JSON that breaks a parser; a megabyte; a byte at a time; nothing, and gone at once;
nothing, as many at a time as the process may open; all of these."""

_ROOT = Path(__file__).resolve().parents[2]
_SLOW_AT_ONCE = 200
_LIMIT_S = 200.0


@contextlib.contextmanager
def attack(
    address: str, kind: str, count: int, seed: int, user: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start so many greetings of a kind to an address from another process; each counts that found somebody.

    The address is `unix:PATH` or `tcp://HOST:PORT`.
    """
    words = [sys.executable, "-m", "tests.support.hostile", address, kind, str(count), str(seed)]
    before = [] if user is None else ["setpriv", f"--reuid={user}", "--clear-groups"]
    with subprocess.Popen([*before, *words], cwd=_ROOT, stdout=subprocess.PIPE, text=True) as attacker:
        try:
            yield attacker
        finally:
            if attacker.poll() is None:
                attacker.kill()


def tried(attacker: subprocess.Popen[str]) -> int:
    """Return how many greetings an attacker has made, once it has ended."""
    assert attacker.wait() == 0
    assert attacker.stdout is not None
    return int(attacker.stdout.read())


@contextlib.contextmanager
def attack_in_place(address: str, count: int) -> Iterator[None]:
    """Knock so many times from a forked child, which may open more files than this process, and say nothing."""
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if not child:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (count + 100,) * 2)
            held = []
            for _ in range(count):
                with contextlib.suppress(OSError):
                    held.append(_knock(address))
            os.write(write_fd, b".")
            time.sleep(60)
        finally:
            os._exit(0)
    os.close(write_fd)
    try:
        assert os.read(read_fd, 1) == b"."
        yield
    finally:
        os.close(read_fd)
        os.kill(child, 9)
        os.waitpid(child, 0)


def main(address: str, kind: str, count: int, seed: int) -> None:
    """Make so many greetings of a kind."""
    chosen = random.Random(seed)
    held: list[socket.socket] = []
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    made = 0
    end_s = time.monotonic() + _LIMIT_S
    while made < count and time.monotonic() < end_s:
        this = KINDS[made % (len(KINDS) - 1)] if kind == "mixed" else kind
        with contextlib.suppress(OSError):  # turned away: that is what a door is for
            stranger = _knock(address)
            made += 1
            if this in ("slow", "flood"):
                held.append(stranger)
                if this == "slow":
                    stranger.send(b"l")
            else:
                with stranger:
                    _speak(stranger, this, chosen)
        if this == "slow" or len(held) > hard - 100:
            while len(held) > _SLOW_AT_ONCE:
                held.pop(0).close()
            for stranger in held[-5:]:
                with contextlib.suppress(OSError):
                    stranger.send(b"o")
    print(made)


def _knock(address: str) -> socket.socket:
    scheme, _, where = address.partition(":")
    if scheme == "unix":
        stranger = socket.socket(socket.AF_UNIX)
        try:
            folder_fd = os.open(Path(where).parent, os.O_PATH)  # the path of a socket has 107 bytes at most
            try:
                stranger.connect(f"/proc/self/fd/{folder_fd}/{Path(where).name}")
            finally:
                os.close(folder_fd)
        except OSError:
            stranger.close()
            raise
        return stranger
    host, _, port = where.removeprefix("//").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def _speak(stranger: socket.socket, kind: str, chosen: random.Random) -> None:
    stranger.settimeout(0.01)  # an answer may take longer: then it goes without
    if kind == "random":
        stranger.sendall(chosen.randbytes(chosen.randrange(1, 300)))
    elif kind == "deep":
        stranger.sendall(b"[" * 4094 + b"\n")
    elif kind == "huge":
        stranger.sendall(bytes(1 << 20))
    if kind != "half-open":
        stranger.recv(100)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
