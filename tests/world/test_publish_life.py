"""How publishers end: by an exception, by Ctrl-C, late, in a child, beside a successor; wrong calls of one rank."""

from __future__ import annotations

import contextlib
import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lowshard as ls
from lowshard import comm as lc
from lowshard.errors import (
    BufferMismatchError,
    CommError,
    LowshardError,
    MismatchError,
    PlanError,
    StreamError,
)
from lowshard.reshard import Publisher, Subscriber
from lowshard.reshard import publisher as publisher_module
from lowshard.reshard.version_server import Newest

ONE = ls.Layout(ls.DeviceMesh((1,), ("x",)), (1000,), "float32", (ls.Replicated(),))
HALVES = ls.Layout(ls.DeviceMesh((2,), ("x",)), (1000,), "float32", (ls.Sharded(0),))


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep tokens apart; no thread of a publisher goes on after a test, and no file of one is left."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = set(threading.enumerate())
    yield
    end_s = time.monotonic() + 10
    while left := [t for t in threading.enumerate() if t.name.startswith("lowshard-") and t not in before]:
        assert time.monotonic() < end_s, left
        time.sleep(0.01)
    assert not (tmp_path / "p").exists()
    assert list(tmp_path.rglob("*.token")) == []


def _publisher(address: str, array: np.ndarray, **more: Any) -> Publisher:
    return Publisher({"w": ONE}, {"w": array}, address=address, **more)


def _subscriber(address: str) -> Subscriber:
    return Subscriber({"w": ONE}, {"w": np.zeros(1000, np.float32)}, address=address)


def _half(comm: Any, address: str) -> Publisher:
    return Publisher({"w": HALVES}, {"w": np.zeros(500, np.float32)}, comm, address=address)


# ---- exceptions


@pytest.mark.parametrize(
    ("rank", "others", "kind"),
    [(0, "publish", "tcp"), (1, "publish", "unix"), (0, "leave", "unix"), (1, "leave", "tcp")],
)
def test_what_one_rank_raises_in_the_block_is_what_comes_out_of_it(
    tmp_path: Path, rank: int, others: str, kind: str
) -> None:
    address = f"unix:{tmp_path}/p" if kind == "unix" else "tcp://127.0.0.1:0"
    came: dict[int, BaseException] = {}

    def job(comm: Any) -> None:
        try:
            with _half(comm, address) as publisher:
                publisher.publish(1)
                if comm.rank == rank:
                    raise RuntimeError("mine")
                if others == "publish":
                    publisher.publish(2)
        except BaseException as error:
            came[comm.rank] = error
            raise

    with pytest.raises(RuntimeError, match="mine"):
        lc.run_loopback(2, job, timeout_s=20)
    assert type(came.pop(rank)) is RuntimeError
    assert all(isinstance(error, LowshardError) for error in came.values())
    assert others == "leave" or came


def test_a_program_that_ends_without_closing_its_publisher_leaves_no_file(tmp_path: Path) -> None:
    program = (
        "import numpy as np, lowshard as ls\n"
        "from lowshard.reshard import Publisher\n"
        "one = ls.Layout(ls.DeviceMesh((1,), ('x',)), (4,), 'float32', (ls.Replicated(),))\n"
        f"p = Publisher({{'w': one}}, {{'w': np.zeros(4, 'float32')}}, address='unix:{tmp_path}/p')\n"
        "p.publish(1)\n"
        "assert p.token_file.exists()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
    assert not (tmp_path / "p").exists()


def test_a_rank_that_publishes_while_another_closes_hears_of_it(tmp_path: Path) -> None:
    def job(comm: Any) -> None:
        publisher = _half(comm, f"unix:{tmp_path}/p")
        with pytest.raises(MismatchError):
            publisher.publish(1) if comm.rank else publisher.close(1)
        publisher.__exit__(RuntimeError, RuntimeError("over"), None)

    lc.run_loopback(2, job, timeout_s=20)


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_between_the_agreement_and_the_offer_mixes_no_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """The ranks' numbers of snapshots were apart from then on: one gave the new version, another the one before."""
    interrupts = [False]

    class Step(lc.collective_step):
        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            if interrupts[0] and self._comm is not None and self._comm.rank == rank and self.digest == b"":
                interrupts[0] = False
                raise KeyboardInterrupt

    monkeypatch.setattr(publisher_module, "collective_step", Step)
    found: list[list[float]] = []

    def job(comm: Any) -> None:
        array = np.zeros(500, np.float32)
        address = f"unix:{tmp_path}/p"
        with Publisher({"w": HALVES}, {"w": array}, comm, address=address) as publisher:
            for version in range(1, 5):
                array[...] = version
                interrupts[0] = version == 2
                comm.barrier()
                with contextlib.suppress(KeyboardInterrupt):
                    publisher.publish(version)
                comm.barrier()
                if version != 2 and comm.rank == 0:
                    with _subscriber(address) as subscriber:
                        subscriber.pull(5)
                        found.append(np.unique(subscriber.weights["w"]).tolist())
                comm.barrier()

    lc.run_loopback(2, job, timeout_s=20)
    assert found == [[1.0], [3.0], [4.0]]


# ---- waiting for members


def test_close_waits_for_members_longer_than_ranks_wait_for_each_other(tmp_path: Path) -> None:
    address, is_out, has_one = f"unix:{tmp_path}/p", threading.Event(), threading.Event()
    pulled: list[int] = []

    def job(comm: Any) -> None:
        publisher = _half(comm, address)
        publisher.publish(1)
        is_out.set()
        assert has_one.wait(20)
        publisher.publish(2)
        publisher.close(30)

    def serve() -> None:
        assert is_out.wait(20)
        with _subscriber(address) as subscriber:
            pulled.append(subscriber.pull(10))
            has_one.set()
            time.sleep(2.6)
            pulled.append(subscriber.pull(10))

    server = threading.Thread(target=serve)
    server.start()
    lc.run_loopback(2, job, timeout_s=2)
    server.join(20)
    assert pulled == [1, 2]


# ---- a publisher that is left while it works


def test_ctrl_c_amid_close_lets_go_of_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.zeros(1000, np.float32)
    publisher = _publisher(f"unix:{tmp_path}/p", array)
    publisher.publish(1)
    interrupted = lambda *given: signal.raise_signal(signal.SIGINT)  # noqa: E731
    monkeypatch.setattr(Newest, "wait_until_all_have_it", interrupted)
    with pytest.raises(KeyboardInterrupt):
        publisher.close()
    monkeypatch.undo()
    with pytest.raises(CommError, match="closed"):
        publisher.publish(2)
    _publisher(publisher.address, array).close()  # the address is free


# ---- memory


@pytest.mark.parametrize("way", ["auto", "off"])
@pytest.mark.parametrize("ends", ["closed", "by an exception"])
def test_memory_is_given_back_though_the_publisher_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, ends: str
) -> None:
    monkeypatch.setenv("LOWSHARD_CROSS_MEMORY", way)
    array = np.zeros(1000, np.float32)
    publisher = _publisher(f"unix:{tmp_path}/p", array)
    with _subscriber(publisher.address) as subscriber:
        for version in (1, 2):
            publisher.publish(version)
            subscriber.pull(10)
        kept: list[Callable[[], Any]] = [weakref.ref(one) for one in publisher._store._snapshots]
        kept.append(weakref.ref(array))
        del array
        if ends == "closed":
            publisher.close()
        else:
            publisher.__exit__(RuntimeError, RuntimeError("mine"), None)
        end_s = time.monotonic() + 10
        while any(one() is not None for one in kept):  # threads that answer end by themselves
            assert time.monotonic() < end_s
            time.sleep(0.01)
            gc.collect()
        assert len(kept) == 3
        assert (subscriber.weights["w"] == 0).all()


# ---- wrong calls of one rank


def test_wrong_arguments_of_one_rank_are_raised_on_all(tmp_path: Path) -> None:
    def job(comm: Any) -> None:
        for wrong in (0, 1):
            with _half(comm, f"unix:{tmp_path}/p") as publisher:
                is_wrong = comm.rank == wrong
                with pytest.raises(StreamError, match=f"rank {wrong}"):
                    publisher.publish(1, **({"stream": 4711} if is_wrong else {}))
                with pytest.raises(PlanError, match=f"rank {wrong}: a version"):
                    publisher.publish("x" if is_wrong else 1)  # type: ignore[arg-type]
                assert publisher.version is None
                publisher.publish(1)
                with pytest.raises(CommError, match=f"rank {wrong}: timeout_s"):
                    publisher.close(-1 if is_wrong else 1)
                with pytest.raises(CommError, match="closed"):
                    publisher.publish(2)
            comm.barrier()

    lc.run_loopback(2, job, timeout_s=10)


def test_one_memory_behind_two_names_is_for_what_one_source_feeds(tmp_path: Path) -> None:
    """An output layer that the publisher lacks is fed from its embedding; one that it has is another tensor."""
    embedding, output = "embedding.word_embeddings.weight", "output_layer.weight"
    layout = ls.Layout(ls.DeviceMesh((1,), ("d",)), (4,), "float32", (ls.Replicated(),))
    mine = {name: np.full(4, i, np.float32) for i, name in enumerate((embedding, output))}
    memory, address = np.zeros(4, np.float32), f"unix:{tmp_path}/p"
    wanted, out = dict.fromkeys(mine, layout), dict.fromkeys(mine, memory)
    with Subscriber(wanted, out, address=address) as subscriber:
        with Publisher(wanted, mine, address=address) as publisher:
            publisher.publish(1)
            with pytest.raises(BufferMismatchError, match=f"{embedding} and {output} share memory"):
                subscriber.pull(5)
            assert subscriber.version is None
        with Publisher({embedding: layout}, {embedding: mine[embedding]}, address=address) as publisher:
            for version in (1, 2):
                mine[embedding][...] = version
                publisher.publish(version)
                subscriber.pull(5)
                assert subscriber.weights[embedding].tolist() == [version] * 4
                assert np.shares_memory(*subscriber.weights.values())
