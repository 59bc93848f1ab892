"""Publisher and Subscriber over threads: any layouts, through memory and over connections; restarts, wrong calls."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import mode
from support.launching import wait_until
from support.reshard_cases import local_part, random_layout

import lowshard as ls
from lowshard import comm as lc
from lowshard import dtypes
from lowshard.comm.listener import connect
from lowshard.errors import (
    BufferMismatchError,
    CommError,
    LowshardError,
    MismatchError,
    PeerFailed,
    PlanError,
    TimedOut,
)
from lowshard.reshard import Publisher, Subscriber
from lowshard.reshard.version_wire import (
    CONTROL,
    DATA,
    Connection,
    ConnectionLost,
    Greeting,
    read_answer,
    read_table,
)

DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int64", "float16")


def _one(shape: tuple[int, ...], dtype: str = "float32") -> ls.Layout:
    return ls.Layout(ls.DeviceMesh((1,), ("x",)), shape, dtype, (ls.Replicated(),))


def _in_threads(*jobs: Callable[[], Any]) -> None:
    """Run jobs at the same time; raise what one of them raises."""
    errors: list[BaseException] = []

    def run(job: Callable[[], Any]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("way", ["memory", "connection"])
def test_any_layout_gets_to_any_other(
    rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setenv("LOWSHARD_CROSS_MEMORY", "auto" if way == "memory" else "off")
    for case in range(100 if mode.full() else 6):
        _check_case(rng, f"unix:{tmp_path}/p{case}")


def _check_case(rng: np.random.Generator, address: str) -> None:
    """Publish three versions of random tensors from one number of ranks to another."""
    have, want = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    src, dst, whole = {}, {}, {}
    for i in range(int(rng.integers(1, 4))):
        shape = tuple(rng.integers(0, 14, int(rng.integers(0, 4))).tolist())
        dtype = str(rng.choice(DTYPES))
        src[f"w{i}"] = random_layout(rng, shape, dtype, 0, have)
        dst[f"w{i}"] = random_layout(rng, shape, dtype, 0, want)
        whole[f"w{i}"] = [
            np.asarray(rng.integers(0, 120, shape)).reshape(shape).astype(dtypes.get(dtype).numpy)
            for _ in range(3)
        ]
        if i % 2:  # versions that differ in a few elements, or in none
            for version in (1, 2):
                whole[f"w{i}"][version] = changed = whole[f"w{i}"][version - 1].copy()
                some = rng.random(shape) < rng.choice([0.0, 0.02, 0.3])
                changed[some] = rng.integers(0, 120, int(np.sum(some))).astype(changed.dtype)
    ready, done = threading.Event(), threading.Barrier(have + want, timeout=30)

    def publish(comm: Any) -> None:
        arrays = {n: local_part(x, comm.rank, whole[n][0]) for n, x in src.items() if comm.rank in x}
        with Publisher(src, arrays, comm, address=address) as publisher:
            for version in range(3):
                for name, array in arrays.items():
                    array[...] = local_part(src[name], comm.rank, whole[name][version])
                publisher.publish(version)
                for array in arrays.values():  # a snapshot was taken
                    array[...] = np.zeros((), array.dtype)
                ready.set()
                done.wait()

    def subscribe(comm: Any) -> None:
        out = {
            n: np.zeros(x.local_shape(comm.rank), dtypes.get(x.dtype).numpy)
            for n, x in dst.items()
            if comm.rank in x
        }
        with Subscriber(dst, out, comm, address=address) as subscriber:
            for version in range(3):
                assert subscriber.pull(20) == version == subscriber.version
                for name, array in subscriber.weights.items():
                    expected = local_part(dst[name], comm.rank, whole[name][version])
                    assert array.tobytes() == expected.tobytes(), (name, version)
                done.wait()

    _in_threads(
        lambda: lc.run_loopback(have, publish), lambda: ready.wait(30) and lc.run_loopback(want, subscribe)
    )


def test_pieces_larger_than_a_buffer_come_over_a_connection(
    rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWSHARD_CROSS_MEMORY", "off")
    whole = rng.integers(0, 1 << 30, (1500, 3000)).astype(np.int32)
    mesh = ls.DeviceMesh((2,), ("tp",))
    src = ls.Layout(mesh, whole.shape, "int32", (ls.Sharded(1),))
    arrays = [np.ascontiguousarray(whole[:, :1500]), np.ascontiguousarray(whole[:, 1500:])]
    seen = threading.Event()

    def publish(comm: Any) -> None:
        with Publisher({"w": src}, {"w": arrays[comm.rank]}, comm, address=f"unix:{tmp_path}/p") as publisher:
            publisher.publish(7)
            assert seen.wait(30)

    def subscribe() -> None:
        out = {"w": np.zeros(whole.shape, np.int32)}
        with Subscriber({"w": _one(whole.shape, "int32")}, out, address=f"unix:{tmp_path}/p") as subscriber:
            assert subscriber.pull(30) == 7
            assert (subscriber.weights["w"] == whole).all()
        seen.set()

    _in_threads(lambda: lc.run_loopback(2, publish), subscribe)


def _publisher(address: str, array: np.ndarray, **more: Any) -> Publisher:
    return Publisher({"w": _one(array.shape, array.dtype.name)}, {"w": array}, address=address, **more)


def _subscriber(address: str, array: np.ndarray, **more: Any) -> Subscriber:
    return Subscriber(
        {"w": _one(array.shape, array.dtype.name)}, {"w": array.copy()}, address=address, **more
    )


def test_who_comes_late_gets_the_newest_and_members_are_shown(tmp_path: Path) -> None:
    address, array = f"unix:{tmp_path}/p", np.zeros(1000, np.float32)
    with _publisher(address, array) as publisher:
        for version in range(5):
            array[...] = version
            publisher.publish(version)
        with _subscriber(address, array, name="late") as late:
            assert late.pull(10) == 4
            assert (late.weights["w"] == 4).all()
            with pytest.raises(TimedOut, match="no version newer than 4"):
                late.pull(0.2)
            assert late.version == 4
            (member,) = publisher.members()
            assert (member.name, member.version, member.pid) == ("late", 4, os.getpid())
        assert wait_until(lambda: publisher.members() == (), 5)
    assert not (tmp_path / "p").exists()


def test_a_lease_ends_at_the_publishers_deadline_unless_bytes_flow(tmp_path: Path) -> None:
    """Of a member that was stopped after an offer, or takes bytes slowly."""
    address, array = f"unix:{tmp_path}/p", np.zeros(1 << 20, np.float32)
    with _publisher(address, array, comm=lc.loopback(1, 0.5)[0]) as publisher:
        publisher.publish(1)
        store, token = publisher._store, bytes.fromhex((tmp_path / "p" / "token").read_text())
        with _slow(address, tmp_path / "p" / "token") as number:
            with contextlib.closing(Connection(connect([f"{address}/listener"], token, DATA, 0, 5))) as line:
                mark = publisher._server._publisher_id
                line.send_message({"ask": "boxes", "boxes": [["w", [[[0, array.size]]]]]})
                line.send_message({"ask": "read", "publisher_id": mark, "number": number})
                assert line.receive_message(read_answer, time.monotonic() + 5).state == "here"
                time.sleep(0.6)
                for version in (2, 3, 4):
                    publisher.publish(version)
                assert store.find(number) is not None
            assert wait_until(lambda: not publisher._server.sending(), 5)
            for version in (5, 6, 7):
                publisher.publish(version)
            assert (store.find(number), store.kept, len(publisher.members())) == (None, 2, 1)


def test_the_loop_of_the_docs_over_members_ends_on_every_rank(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[2] / "examples" / "publish.py").read_text()
    loop = re.search(r"^( *)while \[member.*\n\1 +.*$", text, re.MULTILINE)
    assert loop is not None
    address, array = f"unix:{tmp_path}/p", np.zeros((4, 2), np.float32)
    halves = ls.Layout(ls.DeviceMesh((2,), ("x",)), array.shape, "float32", (ls.Sharded(0),))

    def train(comm: lc.Communicator) -> None:
        with Publisher({"w": halves}, {"w": array[:2] + 1}, comm, address=address) as publisher:
            publisher.publish(3, wait=False)
            exec(textwrap.dedent(loop[0]), {"publisher": publisher, "version": 3, "time": time})
            (member,) = publisher.members()
            assert (member.name, member.version) == ("server", 3)
        with pytest.raises(CommError, match="closed"):
            publisher.members()

    with _subscriber(address, array, name="server") as subscriber:
        _in_threads(lambda: lc.run_loopback(2, train, 30), lambda: subscriber.pull(10))


def test_a_restarted_publisher_begins_anew_and_nothing_is_mixed(tmp_path: Path) -> None:
    address, array = f"unix:{tmp_path}/p", np.zeros(1000, np.float32)
    with _subscriber(address, array) as subscriber:
        with pytest.raises(TimedOut, match=r"no publisher answers .*; start the publisher"):
            subscriber.pull(0.1)
        with _publisher(address, array) as first:
            with pytest.raises(TimedOut, match="no version was offered"):
                subscriber.pull(0.1)
            array[...] = 9
            first.publish(9)
            assert subscriber.pull(10) == 9
        with pytest.raises((PeerFailed, TimedOut)):
            subscriber.pull(0.1)
        assert (subscriber.weights["w"] == 9).all()
        with _publisher(address, array) as second:
            array[...] = 2
            second.publish(2)  # its own numbers
            assert subscriber.pull(10) == 2
            assert (subscriber.weights["w"] == 2).all()


def test_close_lets_members_in_touch_have_the_last_version(tmp_path: Path) -> None:
    address, array = f"unix:{tmp_path}/p", np.zeros(1000, np.float32)
    publisher, subscriber = _publisher(address, array), _subscriber(address, array)
    publisher.publish(1)
    assert subscriber.pull(10) == 1
    publisher.publish(2)
    pulled: list[int] = []
    _in_threads(lambda: publisher.close(20), lambda: (time.sleep(0.3), pulled.append(subscriber.pull(10))))
    assert pulled == [2]
    publisher.close()
    subscriber.close()


def test_close_waits_no_longer_than_it_is_told(tmp_path: Path) -> None:
    address, array = f"unix:{tmp_path}/p", np.zeros(10, np.float32)
    publisher, subscriber = _publisher(address, array), _subscriber(address, array)
    publisher.publish(1)
    subscriber.pull(10)
    publisher.publish(2)
    begin_s = time.monotonic()
    publisher.close(0.2)
    assert time.monotonic() - begin_s < 5
    subscriber.close()


def test_publish_without_waiting(tmp_path: Path) -> None:
    address, array = f"unix:{tmp_path}/p", np.zeros(1 << 20, np.float32)
    with _publisher(address, array) as publisher, _subscriber(address, array) as subscriber:
        array[...] = 1
        work = publisher.publish(1, wait=False)
        assert work is not None
        work.wait(30)
        array[...] = 5
        assert subscriber.pull(10) == 1
        assert (subscriber.weights["w"] == 1).all()
        wrong = publisher.publish(1, wait=False)
        assert wrong is not None
        with pytest.raises(PlanError, match="versions rise"):
            wrong.wait(30)
        publisher.publish(2)  # what was told is not told again
        assert subscriber.pull(10) == 2


@pytest.mark.time_limit(30)
def test_what_went_wrong_in_the_background_is_raised_on_all_ranks_though_one_has_heard_of_it(
    tmp_path: Path,
) -> None:
    layout = ls.Layout(ls.DeviceMesh((2,), ("x",)), (10,), "float32", (ls.Sharded(0),))

    def publish(comm: Any) -> None:
        with Publisher(
            {"w": layout}, {"w": np.zeros(5, np.float32)}, comm, address=f"unix:{tmp_path}/p"
        ) as made:
            made.publish(3)
            wrong = made.publish(2, wait=False)
            assert wrong is not None
            if comm.rank == 0:
                with pytest.raises(PlanError, match="version 3 is out"):
                    wrong.wait(10)
            with pytest.raises(PlanError, match="version 3 is out"):
                made.publish(4)
            assert made.version == 3
            made.publish(4)
            made.publish(4, wait=False)
        # Closing tells of it where nobody has waited.

    with pytest.raises(PlanError, match="version 4 is out"):
        lc.run_loopback(2, publish, timeout_s=20)
    assert not (tmp_path / "p" / "token").exists()


def test_pull_without_waiting(tmp_path: Path) -> None:
    """The thread that waits for a version is another one; what is served stays until it switches."""
    address, array = f"unix:{tmp_path}/p", np.zeros(1 << 20, np.float32)
    with _publisher(address, array) as publisher, _subscriber(address, array) as subscriber:
        work = subscriber.pull(10, wait=False)
        assert not work.done()
        assert subscriber.version is None
        for version in range(1, 6):
            array[...] = version
            publisher.publish(version)
            assert work.wait(10) == version == subscriber.version
            work = subscriber.pull(10, wait=False)
            held = subscriber.weights["w"]
            assert (held == version).all()
        array[...] = 7
        publisher.publish(7)
        assert work.wait(10) == 7
        late = subscriber.pull(0.05, wait=False)
        with pytest.raises(TimedOut, match="no version newer than 7"):
            late.wait(10)
        late = subscriber.pull(0.05, wait=False)
        with pytest.raises(TimedOut, match="no version newer than 7"):
            subscriber.pull(5)  # tells of the one before, which nobody has heard of
        publisher.publish(8)
        assert subscriber.pull(5) == 8
        subscriber.pull(0.05, wait=False)  # nobody asks: closing tells of it
        with pytest.raises(TimedOut):
            subscriber.close()


@contextlib.contextmanager
def _slow(address: str, token_file: Path) -> Iterator[int]:
    """Be a member that has asked for the newest version and does not read it: give the number of its snapshot."""
    token = bytes.fromhex(token_file.read_text())
    with contextlib.closing(Connection(connect([f"{address}/listener"], token, CONTROL, 0, 5))) as line:
        line.send_message(Greeting("slow", "here", 1, 1))
        mark = line.receive_message(read_table, time.monotonic() + 5).publisher_id
        line.send_message({"ask": "want", "publisher_id": mark})
        yield line.receive_message(read_answer, time.monotonic() + 5).number


def test_snapshots_are_bounded_and_one_that_is_read_is_not_written_to(tmp_path: Path) -> None:
    address, array = f"unix:{tmp_path}/p", np.zeros(1000, np.float32)
    with _publisher(address, array) as publisher:
        publisher.publish(1)
        store = publisher._store
        with _slow(address, tmp_path / "p" / "token") as number:
            for version in range(2, 40):
                array[...] = version
                publisher.publish(version)
            assert store.kept == 3
            held = store.find(number)
            assert held is not None
            assert (store.places["w"].view(held.bytes) == 0).all()
        assert wait_until(lambda: not publisher.members(), 5)
        for version in range(40, 44):
            publisher.publish(version)
        assert store.kept == 2


@pytest.mark.parametrize("buffering", ["double", "in_place"])
def test_a_snapshot_that_was_taken_back_while_it_was_read_is_not_switched_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffering: str
) -> None:
    """The worst moment of a reader that the publisher takes for dead: its snapshot is written over under its hands."""
    from lowshard.reshard import version_target as module

    address, array = f"unix:{tmp_path}/p", np.ones(1000, np.float32)
    with (
        _publisher(address, array) as publisher,
        _subscriber(address, array, buffering=buffering) as subscriber,
    ):
        publisher.publish(1)
        assert subscriber.pull(10) == 1
        publisher.publish(2)
        array[...] = 3
        real, store = module.copy_bits, publisher._store

        def copy_and_lose(source: Any, target: Any) -> None:
            real(source, target)
            store.fill({"w": array * 50}, 99, {publisher._number - 1})

        monkeypatch.setattr(module, "copy_bits", copy_and_lose)
        with pytest.raises(PeerFailed, match="took its snapshot back"):
            subscriber.pull(10)
        assert (subscriber.version, subscriber.torn) == (1, buffering == "in_place")
        assert subscriber.torn or float(subscriber.weights["w"][0]) == 1.0
        monkeypatch.setattr(module, "copy_bits", real)
        publisher.publish(3)
        assert subscriber.pull(10) == 3
        assert not subscriber.torn
        assert (subscriber.weights["w"] == 3).all()


def test_who_lies_or_goes_amid_a_frame_harms_nobody(tmp_path: Path) -> None:
    address, array = f"unix:{tmp_path}/p", np.arange(1000, dtype=np.float32)
    with _publisher(address, array) as publisher, _subscriber(address, array) as good:
        publisher.publish(1)
        token = bytes.fromhex((tmp_path / "p" / "token").read_text())
        for kind, lie in itertools.product((CONTROL, DATA, 7), (b"x" * 50, (1 << 62).to_bytes(8, "big"))):
            line = Connection(connect([f"{address}/listener"], token, kind, 3, 5))
            with contextlib.suppress(ConnectionLost):  # it may have hung up
                line.send(memoryview(lie))
            line.close()
        for boxes in ([[[0, 5000]]], [[[-1, 3]]], [[[5, 2]]], [[]], [], [[[0, 2]], [[0, 2], [0, 2]]]):
            with contextlib.closing(Connection(connect([f"{address}/listener"], token, DATA, 0, 5))) as line:
                line.send_message({"ask": "boxes", "boxes": [["w", boxes]]})
                with pytest.raises(ConnectionLost):
                    line.receive_message(read_answer, time.monotonic() + 5)
        assert good.pull(10) == 1
        assert (good.weights["w"] == array).all()
        publisher.publish(2)
        assert good.pull(10) == 2


def test_a_stranger_without_the_token_gets_nowhere(tmp_path: Path) -> None:
    address, array = f"unix:{tmp_path}/p", np.zeros(10, np.float32)
    with _publisher(address, array) as publisher:
        publisher.publish(1)
        with (
            _subscriber(address, array, token=b"another token!!!") as stranger,
            pytest.raises(TimedOut, match=r"no publisher answers .* another token"),
        ):
            stranger.pull(0.5)
        assert publisher.members() == ()


def test_tcp_keeps_its_token_apart_and_takes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    array = np.full(10, 3, np.float32)
    with _publisher("tcp://127.0.0.1:0", array) as publisher:
        assert publisher.token_file is not None
        assert publisher.token_file.stat().st_mode & 0o777 == 0o600
        publisher.publish(1)
        with _subscriber(publisher.address, array) as subscriber:  # finds the file below the cache folder
            assert subscriber.pull(10) == 1
    assert not publisher.token_file.exists()
    secret = b"a secret of sixteen bytes or more"
    with _publisher("tcp://127.0.0.1:0", array, token=secret) as publisher:
        assert publisher.token_file is None
        publisher.publish(4)
        with _subscriber(publisher.address, array, token=secret) as subscriber:
            assert subscriber.pull(10) == 4


def test_a_folder_is_taken_over_from_a_dead_publisher_but_not_from_a_living_one(tmp_path: Path) -> None:
    address, array = f"unix:{tmp_path}/p", np.zeros(10, np.float32)
    with _publisher(address, array), pytest.raises(CommError, match="another publisher is there"):
        _publisher(address, array)
    folder = tmp_path / "p"
    folder.mkdir(mode=0o700)
    (folder / "token").touch(mode=0o600)
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(folder / "listener"))
    dead.close()
    (folder / "rank-1").mkdir()
    with _publisher(address, array) as publisher, _subscriber(address, array) as subscriber:
        publisher.publish(1)
        assert subscriber.pull(10) == 1
    assert not folder.exists()


@pytest.mark.parametrize("kind", ["open", "link", "file"])
def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path, kind: str) -> None:
    folder, array = tmp_path / "p", np.zeros(10, np.float32)
    if kind == "open":
        folder.mkdir(mode=0o755)
        folder.chmod(0o755)
    elif kind == "link":
        (tmp_path / "other").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "other")
    else:
        folder.write_text("")
    with pytest.raises(CommError, match="no publisher can be at"):
        _publisher(f"unix:{folder}", array)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: {"address": "http://x"},
        lambda a: {"token": b"short"},
        lambda a: {"arrays": {"w": a[:5]}},
        lambda a: {"arrays": {"w": a.astype(np.int32)}},
        lambda a: {"layouts": {"w": "text"}},
        lambda a: {
            "layouts": {"w": ls.Layout(ls.DeviceMesh((2,), ("x",)), (10,), "float32", (ls.Partial("sum"),))}
        },
    ],
)
def test_wrong_arguments_are_errors_of_lowshard_on_both_sides(tmp_path: Path, change: Any) -> None:
    array = np.zeros(10, np.float32)
    given: dict[str, Any] = {
        "layouts": {"w": _one((10,))}, "arrays": {"w": array}, "address": f"unix:{tmp_path}/p", **change(array),
    }  # fmt: skip
    layouts, arrays = given.pop("layouts"), given.pop("arrays")
    for kind in (Publisher, Subscriber):
        with pytest.raises(LowshardError):
            kind(layouts, arrays, **given)
    assert not (tmp_path / "p").exists()
    array.flags.writeable = False
    with pytest.raises(BufferMismatchError, match="read-only"):
        Subscriber({"w": _one((10,))}, {"w": array}, address=f"unix:{tmp_path}/p")


def test_ranks_that_disagree_hear_of_it(tmp_path: Path) -> None:
    layout = ls.Layout(ls.DeviceMesh((2,), ("x",)), (10,), "float32", (ls.Replicated(),))

    def apart(comm: Any) -> None:
        array = np.zeros(10, np.float32)
        with pytest.raises(MismatchError):
            Publisher({"w": layout}, {"w": array}, comm, address=f"unix:{tmp_path}/p{comm.rank}")
        with pytest.raises(BufferMismatchError):
            Publisher({"w": layout}, {"w": array[comm.rank :]}, comm, address=f"unix:{tmp_path}/p")
        with Publisher({"w": layout}, {"w": array}, comm, address=f"unix:{tmp_path}/q") as publisher:
            with pytest.raises(MismatchError):
                publisher.publish(comm.rank)
            publisher.publish(3)

    lc.run_loopback(2, apart)
