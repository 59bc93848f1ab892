"""Connections between a Publisher and a Subscriber: all at once, and what becomes of the others when one fails."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lowshard as ls
from lowshard import comm as lc
from lowshard.errors import LowshardError, PeerFailed, TimedOut
from lowshard.reshard import Publisher, Subscriber, version_server, version_store, version_wire
from lowshard.reshard.version_server import VersionServer

pytestmark = pytest.mark.time_limit(60)
ROOT = Path(__file__).resolve().parents[2]
ROWS, COLUMNS = 301, 40
ENDS_WITHIN_S = 10.0
"""Far below STALLED_S, which is how long a connection that nobody ends waits for bytes."""


@pytest.fixture(autouse=True)
def over_connections(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Map no memory, and leave no thread of a fetch behind."""
    monkeypatch.setenv("LOWSHARD_CROSS_MEMORY", "off")
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    yield
    assert fetching() == []


def fetching() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "lowshard fetch"]


def _one(shape: tuple[int, ...], dtype: str = "float32") -> ls.Layout:
    return ls.Layout(ls.DeviceMesh((1,), ("x",)), shape, dtype, (ls.Replicated(),))


def _rows(ranks: int, rows: int = ROWS) -> ls.Layout:
    return ls.Layout(ls.DeviceMesh((ranks,), ("x",)), (rows, COLUMNS), "float32", (ls.Sharded(0),))


class Sent:
    """What the publisher's ranks do with each connection, in order of their begin; put in the place of what sends.

    Args:
        act: called with the place of the connection, before the first bytes of a version go out over it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
        self._lines: list[Any] = []
        lock, send = threading.Lock(), VersionServer._send_whole

        def acted(server: VersionServer, line: Any, *args: Any) -> int:
            with lock:
                if line not in self._lines:
                    self._lines.append(line)
                place = self._lines.index(line)
            act(place)
            return send(server, line, *args)

        monkeypatch.setattr(VersionServer, "_send_whole", acted)

    @property
    def count(self) -> int:
        """Over how many connections a version has begun to go out."""
        return len(self._lines)


def _pair(array: np.ndarray, **more: Any) -> tuple[Publisher, Subscriber]:
    layout, token = {"w": _one(array.shape, array.dtype.name)}, b"of this test, and of nothing else"
    publisher = Publisher(layout, {"w": array}, address="tcp://127.0.0.1:0", token=token)
    out = {"w": np.zeros_like(array)}
    return publisher, Subscriber(layout, out, address=publisher.address, token=token, **more)


class Four:
    """A publisher of four ranks, each a thread with some rows of an array, and a subscriber of all of it."""

    def __init__(self, array: np.ndarray, folder: Path) -> None:
        self._meet, self._version = threading.Barrier(5, timeout=30), 0
        self._array, self._address = array, f"unix:{folder}/p"
        self._thread = threading.Thread(target=lambda: lc.run_loopback(4, self._run))

    def _run(self, comm: Any) -> None:
        part = np.array_split(self._array, 4)[comm.rank]  # a view
        with Publisher({"w": _rows(4)}, {"w": part}, comm, address=self._address) as publisher:
            while True:
                self._meet.wait()
                if not self._version:
                    return
                publisher.publish(self._version)
                self._meet.wait()

    def publish(self, version: int) -> None:
        self._version = version
        self._meet.wait()
        if version:
            self._meet.wait()

    def __enter__(self) -> tuple[Four, Subscriber]:
        self._thread.start()
        out = {"w": np.zeros_like(self._array)}
        self._subscriber = Subscriber({"w": _one(self._array.shape)}, out, address=self._address)
        return self, self._subscriber

    def __exit__(self, *_: object) -> None:
        self._subscriber.close()
        self.publish(0)
        self._thread.join(40)


def test_all_ranks_send_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection's first byte goes out before the last one has begun: in turns this would never end."""
    whole = np.random.default_rng(1).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    together = threading.Barrier(4, timeout=20)
    sent = Sent(monkeypatch, lambda place: together.wait() and None)
    with Four(whole, tmp_path) as (publisher, subscriber):
        publisher.publish(1)
        assert subscriber.pull(20) == 1
        assert subscriber.weights["w"].tobytes() == whole.tobytes()
        assert sent.count == 4
        assert subscriber.report() == {
            "dense_bytes": whole.nbytes, "received_bytes": whole.nbytes, "changed_elems": whole.size,
        }  # fmt: skip


def test_where_one_connection_breaks_off_the_others_end_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst moment: the others wait for bytes, and would for half a minute."""
    array, over = np.ones((ROWS, COLUMNS), np.float32), threading.Event()

    def act(place: int) -> None:
        if place == 1:
            end_s = time.monotonic() + 10
            while sent.count < 4 and time.monotonic() < end_s:
                time.sleep(0.001)
            raise RuntimeError("this thread ends amid a version")
        over.wait(50)

    with Four(array, tmp_path) as (publisher, subscriber):
        publisher.publish(1)
        subscriber.pull(10)
        array[...] = 2
        publisher.publish(2)
        with monkeypatch.context() as patched:
            sent = Sent(patched, act)
            begin_s = time.monotonic()
            with pytest.raises(
                PeerFailed, match=r"version 2 did not arrive: rank . of the publisher: .*closed"
            ):
                subscriber.pull(10)
            assert time.monotonic() - begin_s < ENDS_WITHIN_S
            assert fetching() == []
            assert (subscriber.version, float(subscriber.weights["w"].max())) == (1, 1.0)
            over.set()
        assert subscriber.pull(10) == 2
        assert (subscriber.weights["w"] == 2).all()


def test_a_connection_that_stalls_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array, over = np.ones((ROWS, COLUMNS), np.float32), threading.Event()
    monkeypatch.setattr(version_wire, "STALLED_S", 0.5)
    with Four(array, tmp_path) as (publisher, subscriber):
        publisher.publish(1)
        with monkeypatch.context() as patched:
            Sent(patched, lambda place: over.wait(50) and None if place == 2 else None)
            begin_s = time.monotonic()
            with pytest.raises(PeerFailed, match="nothing moved in time"):
                subscriber.pull(10)
            assert 0.4 < time.monotonic() - begin_s < ENDS_WITHIN_S
            assert fetching() == []
            assert subscriber.version is None
            over.set()
        assert subscriber.pull(10) == 1
        assert (subscriber.weights["w"] == 1).all()


@pytest.mark.parametrize("delta", ["auto", "off"])
def test_a_wrong_checksum_is_found(monkeypatch: pytest.MonkeyPatch, delta: str) -> None:
    array = np.ones((ROWS, COLUMNS), np.float32)
    publisher, subscriber = _pair(array, delta=delta)
    with publisher, subscriber:
        publisher.publish(1)
        subscriber.pull(10)
        array[::7, 3] = 2
        publisher.publish(2)
        once = iter([1])
        with monkeypatch.context() as patched:
            for module, name in (
                (version_server, "crc32"),
                (version_store, "crc32"),
                (version_store, "joined"),
            ):
                real = getattr(module, name)
                patched.setattr(module, name, lambda *args, real=real: real(*args) ^ next(once, 0))
            with pytest.raises(PeerFailed, match="another checksum"):
                subscriber.pull(10)
        assert (subscriber.version, float(subscriber.weights["w"].max())) == (1, 1.0)
        assert subscriber.pull(10) == 2
        assert (subscriber.weights["w"] == array).all()


def test_a_connection_of_one_rank_that_fails_is_the_error_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array, told = np.ones((ROWS, COLUMNS), np.float32), [""] * 2
    layout = _rows(2)

    def act(place: int) -> None:
        if place == 1:
            raise RuntimeError("this thread ends amid a version")

    with Publisher({"w": _one(array.shape)}, {"w": array}, address=f"unix:{tmp_path}/p") as publisher:
        publisher.publish(1)

        def pull(comm: Any) -> None:
            out = np.zeros(layout.local_shape(comm.rank), np.float32)
            with Subscriber({"w": layout}, {"w": out}, comm, address=f"unix:{tmp_path}/p") as subscriber:
                with pytest.raises(PeerFailed) as caught:
                    subscriber.pull(10)
                told[comm.rank] = str(caught.value)
                assert subscriber.version is None
                assert subscriber.pull(10) == 1
                assert (subscriber.weights["w"] == 1).all()

        Sent(monkeypatch, act)
        lc.run_loopback(2, pull)
    assert told[0] == told[1]
    assert "version 1 did not arrive" in told[0]


@pytest.mark.parametrize("buffering", ["double", "in_place"])
def test_a_snapshot_that_is_damaged_in_memory_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, buffering: str
) -> None:
    """The sums are those of what was published, not of what lies there when somebody asks. What is torn comes again."""
    monkeypatch.setattr(version_store, "PART_BYTES", 4096)
    array = np.ones((ROWS, COLUMNS), np.float32)
    publisher, subscriber = _pair(array, buffering=buffering)
    with publisher, subscriber:
        publisher.publish(1)
        assert subscriber.pull(10) == 1
        array[...] = 2
        publisher.publish(2)
        snapshot = publisher._store._snapshots[-1]
        snapshot.bytes[-20_000] ^= 1
        with pytest.raises(PeerFailed, match="another checksum"):
            subscriber.pull(10)
        assert (subscriber.version, subscriber.torn) == (1, buffering == "in_place")
        snapshot.bytes[-20_000] ^= 1
        assert subscriber.pull(10) == 2
        assert not subscriber.torn
        assert (subscriber.weights["w"] == 2).all()
        with pytest.raises(TimedOut, match="newer than 2"):
            subscriber.pull(0.1)


DIES = """
    import os, signal, sys, time
    import numpy as np
    import lowshard as ls
    from lowshard.reshard import Publisher
    from lowshard.reshard.version_server import VersionServer

    calls = []
    send = VersionServer._send_whole

    def dies(server, line, *args):
        calls.append(1)
        if len(calls) > 1:  # of the second version
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        return send(server, line, *args)

    VersionServer._send_whole = dies
    array = np.ones((301, 40), np.float32)
    layout = ls.Layout(ls.DeviceMesh((1,), ("x",)), array.shape, "float32", (ls.Replicated(),))
    with Publisher({"w": layout}, {"w": array}, address=sys.argv[1]) as publisher:
        publisher.publish(1)
        print("published", flush=True)
        sys.stdin.readline()
        array[...] = 2
        publisher.publish(2)
        print("published", flush=True)
        time.sleep(60)
"""


def test_a_publisher_that_is_killed_amid_a_version(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/p"
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DIES), address],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        try:
            assert process.stdout.readline() == "published\n"
            layout = {"w": _one((ROWS, COLUMNS))}
            out = {"w": np.zeros((ROWS, COLUMNS), np.float32)}
            subscriber = Subscriber(layout, out, address=address, delta="off")
            assert subscriber.pull(10) == 1
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.stdout.readline() == "published\n"
            begin_s = time.monotonic()
            with pytest.raises(PeerFailed, match="version 2 did not arrive"):
                subscriber.pull(10)
            assert time.monotonic() - begin_s < ENDS_WITHIN_S
            assert process.wait(10) == -signal.SIGKILL
            assert (subscriber.weights["w"] == 1).all()
            with contextlib.suppress(LowshardError):
                subscriber.pull(0.1)
            array = np.full((ROWS, COLUMNS), 5, np.float32)
            with Publisher(layout, {"w": array}, address=address) as publisher:
                publisher.publish(1)
                assert subscriber.pull(10) == 1
                assert (subscriber.weights["w"] == 5).all()
            subscriber.close()
        finally:
            process.kill()
