"""What a subscriber goes through while it waits: no publisher yet, one that stops, Ctrl-C, ranks that need longer."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lowshard as ls
from lowshard import comm as lc
from lowshard.errors import CommError, PeerFailed, PlanError, TimedOut
from lowshard.kernels import MXFP8Tensor
from lowshard.reshard import MXFP8ReshardTransform, Publisher, Subscriber, version_fetch
from lowshard.reshard.publication_address import write_token
from lowshard.reshard.version_wire import Connection, ConnectionLost
from lowshard.tiling import Tiling

TOKEN = bytes(32)


def _layout(ranks: int, split: bool = False) -> dict[str, ls.Layout]:
    mesh = ls.DeviceMesh((ranks,), ("x",))
    return {"w": ls.Layout(mesh, (12,), "float32", (ls.Sharded(0) if split else ls.Replicated(),))}


def _values(value: float, elems: int = 12) -> np.ndarray:
    return np.full(elems, value, np.float32)


def _in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_the_publisher_that_comes_after_a_killed_one_is_found_by_the_pull_that_waits(tmp_path: Path) -> None:
    """The killed one has left its token, which the subscriber reads first; the next one's is another."""
    folder = tmp_path / "p"
    write_token(folder / "token", TOKEN)
    with Subscriber(_layout(1), {"w": _values(0)}, address=f"unix:{folder}") as subscriber:
        work = subscriber.pull(4.0, wait=False)
        time.sleep(0.05)
        with Publisher(_layout(1), {"w": _values(3)}, address=f"unix:{folder}") as publisher:
            publisher.publish(7)
            assert work.wait() == 7


def test_ranks_that_wait_for_a_publisher_meet_and_the_next_pull_works(tmp_path: Path) -> None:
    """Longer than the communicator's deadline: each pull says that nobody answers, on all ranks, and nothing breaks."""
    where: dict[str, Any] = {"address": f"unix:{tmp_path}/p", "token": TOKEN}
    late, done = threading.Event(), threading.Event()

    def publish() -> None:
        late.wait(60)
        time.sleep(2.5)
        with Publisher(_layout(1), {"w": _values(3)}, **where) as publisher:
            publisher.publish(7)
            done.wait(60)

    def subscribe(comm: Any) -> list[Any]:
        out: list[Any] = []
        with Subscriber(_layout(2, True), {"w": _values(0, 6)}, comm, **where) as subscriber:
            for limit_s in (None, 0.2):
                with pytest.raises(TimedOut, match="no publisher answers") as caught:
                    subscriber.pull(limit_s)
                out.append(str(caught.value))
            late.set()
            out.append(subscriber.pull(30.0))
            out.append(float(subscriber.weights["w"].sum()))
        return out

    thread = _in_thread(publish)
    try:
        one, other = lc.run_loopback(2, subscribe, timeout_s=1.5)
    finally:
        late.set()
        done.set()
        thread.join()
    assert one == other
    assert one[2:] == [7, 18.0]


def test_a_rank_that_takes_longer_than_the_deadline_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that has begun to arrive is given the time it needs."""
    where: dict[str, Any] = {"address": f"unix:{tmp_path}/p", "token": TOKEN}
    real = version_fetch.Source.fetch

    def slow(source: version_fetch.Source, wanted: Any) -> Any:
        if wanted.target["w"].array.size == 7:
            time.sleep(2.5)
        return real(source, wanted)

    monkeypatch.setattr(version_fetch.Source, "fetch", slow)
    tiling = Tiling.from_pieces((12,), "float32", [[((0, 7),)], [((7, 12),)]])

    def subscribe(comm: Any) -> tuple[int, float]:
        out = {"w": _values(0, 7 if comm.rank == 0 else 5)}
        with Subscriber({"w": tiling}, out, comm, **where) as subscriber:
            return subscriber.pull(5), float(subscriber.weights["w"].sum())

    with Publisher(_layout(1), {"w": _values(2)}, **where) as publisher:
        publisher.publish(1)
        assert lc.run_loopback(2, subscribe, timeout_s=1) == [(1, 14.0), (1, 10.0)]


def test_ctrl_c_on_one_rank_before_the_vote_decides_nothing_of_the_next_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That rank asked for the decision on the version before, and switched to one that had not come."""
    where: dict[str, Any] = {"address": f"unix:{tmp_path}/p", "token": TOKEN}
    real, fetch = Subscriber._fetch, version_fetch.Source.fetch
    interrupts, fails = [True], threading.Event()

    def interrupted(subscriber: Subscriber, offer: Any) -> Any:
        found = real(subscriber, offer)
        if interrupts and subscriber._comm.rank == 1:
            interrupts.clear()
            raise KeyboardInterrupt
        return found

    def lost(source: version_fetch.Source, wanted: Any) -> Any:
        if fails.is_set():
            raise ConnectionLost("it broke off")
        return fetch(source, wanted)

    monkeypatch.setattr(Subscriber, "_fetch", interrupted)
    monkeypatch.setattr(version_fetch.Source, "fetch", lost)

    def subscribe(comm: Any) -> list[Any]:
        with Subscriber(_layout(2, True), {"w": _values(0, 6)}, comm, **where) as subscriber:
            if comm.rank:
                with pytest.raises(KeyboardInterrupt):
                    subscriber.pull(5)
            else:
                assert subscriber.pull(5) == 1
                publisher.publish(2)
                fails.set()
            comm.barrier()
            with pytest.raises(PeerFailed, match="version 2 did not arrive"):
                subscriber.pull(5)
            found = [subscriber.version]
            comm.barrier()
            fails.clear()
            comm.barrier()
            return [*found, subscriber.pull(5), float(subscriber.weights["w"][0])]

    with Publisher(_layout(1), {"w": _values(2)}, **where) as publisher:
        publisher.publish(1)
        assert lc.run_loopback(2, subscribe, timeout_s=10) == [[1, 2, 2.0], [None, 2, 2.0]]


def test_ctrl_c_amid_a_pull_leaves_no_answer_for_the_next(tmp_path: Path) -> None:
    where: dict[str, Any] = {"address": f"unix:{tmp_path}/p", "token": TOKEN}
    mine = _values(1)
    with (
        Publisher(_layout(1), {"w": mine}, **where) as publisher,
        Subscriber(_layout(1), {"w": _values(0)}, **where) as subscriber,
    ):
        publisher.publish(1)
        assert subscriber.pull(5) == 1
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            subscriber.pull(5)
        for version in (2, 3, 4):
            publisher.publish(version)
            assert subscriber.pull(5) == version
            with pytest.raises(TimedOut):
                subscriber.pull(0.05)


def test_a_plan_that_one_rank_refuses_is_made_anew_by_all(tmp_path: Path) -> None:
    """Columns of 48 end within an MX block for one rank of three alone; the next pull says the same."""
    where: dict[str, Any] = {"address": f"unix:{tmp_path}/p", "token": TOKEN}
    have, want = (
        {"w": ls.Layout(ls.DeviceMesh((n,), ("x",)), (4, 96), "bfloat16", (ls.Sharded(1),))} for n in (2, 3)
    )
    ready, done = threading.Event(), threading.Event()

    def publish(comm: Any) -> None:
        with Publisher(have, {"w": np.ones((4, 48), ml_dtypes.bfloat16)}, comm, **where) as publisher:
            publisher.publish(1)
            ready.set()
            done.wait(60)

    def subscribe(comm: Any) -> list[str]:
        room = MXFP8Tensor(np.zeros((4, 32), np.uint8), np.zeros((4, 1), np.uint8))
        how = MXFP8ReshardTransform(["w"], {"w": room}, misaligned="refuse")
        found = []
        with Subscriber(want, {}, comm, transform=how, **where) as subscriber:
            for _ in range(2):
                with pytest.raises(PlanError, match="multiples of 32") as caught:
                    subscriber.pull(10)
                found.append(str(caught.value))
        return found

    thread = _in_thread(lambda: lc.run_loopback(2, publish))
    try:
        assert ready.wait(60)
        said = lc.run_loopback(3, subscribe, timeout_s=10)
    finally:
        done.set()
        thread.join()
    assert said[0] == said[1] == said[2]
    assert said[0][0] == said[0][1]


def test_a_block_that_ends_by_an_error_ends_the_pull_in_the_background(tmp_path: Path) -> None:
    """Who has left takes no version later, and is no member."""
    where: dict[str, Any] = {"address": f"unix:{tmp_path}/p", "token": TOKEN}
    out = _values(0)
    subscriber = Subscriber(_layout(1), {"w": out}, **where)
    work = subscriber.pull(20, wait=False)
    with pytest.raises(RuntimeError, match="mine"), subscriber:
        raise RuntimeError("mine")
    with Publisher(_layout(1), {"w": _values(1)}, **where) as publisher:
        publisher.publish(1)
        with pytest.raises(CommError, match="closed"):
            work.wait(20)
        assert subscriber.version is None
        begun = time.monotonic()
        publisher.close(20)
        assert time.monotonic() - begun < 10


def test_a_tcp_connection_that_says_nothing_is_asked_for_a_sign_of_life() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        line = Connection(socket.create_connection(door.getsockname()))
        try:
            asked = line.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle_s, step_s, count = (
                line.socket.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
        finally:
            line.close()
    assert asked
    assert idle_s + step_s * count <= 30
