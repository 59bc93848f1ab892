"""What differs between versions, over connections between a Publisher and a Subscriber: bytes, and what goes wrong."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.launching import wait_until

import lowshard as ls
from lowshard import dtypes
from lowshard.errors import CommError, KernelError, PeerFailed
from lowshard.kernels.change_encoding import Changes
from lowshard.kernels.changes import ChangeBoxes
from lowshard.reshard import Publisher, Subscriber, version_target


def _one(shape: tuple[int, ...], dtype: str = "float32") -> ls.Layout:
    return ls.Layout(ls.DeviceMesh((1,), ("x",)), shape, dtype, (ls.Replicated(),))


def _bits(values: np.ndarray) -> np.ndarray:
    return values.view(f"u{values.dtype.itemsize}")


@pytest.fixture
def over_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWSHARD_CROSS_MEMORY", "off")


@pytest.mark.usefixtures("over_connections")
@pytest.mark.parametrize("buffering", ["double", "in_place"])
def test_what_differs_comes_and_nothing_else(
    tmp_path: Path, rng: np.random.Generator, buffering: Any
) -> None:
    """Elements that differ in bits, also NaNs and zeros; all of them where that is less, or the base is gone."""
    address, size = f"unix:{tmp_path}/p", 200_000
    array = rng.standard_normal(size).astype(dtypes.get("bfloat16").numpy)
    out = np.zeros_like(array)
    layout = {"w": _one((size,), "bfloat16")}
    with Publisher(layout, {"w": array}, address=address) as publisher:
        publisher.publish(1)
        with Subscriber(layout, {"w": out}, address=address, buffering=buffering) as subscriber:

            def pulled() -> dict[str, int]:
                subscriber.pull(10)
                assert buffering == "double" or subscriber.weights["w"] is out
                assert subscriber.weights["w"].tobytes() == array.tobytes()
                return subscriber.report()

            assert pulled() == {"dense_bytes": 2 * size, "received_bytes": 2 * size, "changed_elems": size}
            for version in range(2, 6):
                at = rng.choice(size, size // 100, replace=False)
                _bits(array)[at] ^= rng.choice([1, 0x8000, 0x7FC1]).astype(np.uint16)
                publisher.publish(version)
                said = pulled()
                assert said["changed_elems"] == size // 100
                assert size // 100 * 3 <= said["received_bytes"] <= size // 100 * 4
            publisher.publish(6)
            assert pulled() == {"dense_bytes": 2 * size, "received_bytes": 0, "changed_elems": 0}
            _bits(array)[np.arange(size) % 4 > 0] ^= 1
            publisher.publish(7)
            assert pulled()["received_bytes"] == 2 * size
            end_s = time.monotonic() + 10
            server: Any = publisher._server
            while (publisher.members()[0].version != 7 or server.sending()) and time.monotonic() < end_s:
                time.sleep(0.001)  # until then the snapshot is kept
            publisher.publish(8)
            _bits(array)[5] ^= 1
            publisher.publish(9)  # over the snapshot that the subscriber has
            assert pulled()["received_bytes"] == 2 * size
            _bits(array)[7] ^= 1
            publisher.publish(10)
            assert 3 <= pulled()["received_bytes"] <= 6


@pytest.mark.usefixtures("over_connections")
def test_another_publisher_shares_no_version_with_the_last(tmp_path: Path) -> None:
    """Snapshots of both have the same numbers: what differs is told of the publisher's own ones."""
    address, layout = f"unix:{tmp_path}/p", {"w": _one((5000,))}
    out = np.zeros(5000, np.float32)
    with Subscriber(layout, {"w": out}, address=address) as subscriber:
        for life in range(3):
            array = np.full(5000, life, np.float32)
            with Publisher(layout, {"w": array}, address=address) as publisher:
                for version in (1, 2):
                    publisher.publish(version)
                    with contextlib.suppress(PeerFailed):
                        subscriber.pull(10)
                    if subscriber.version != version or subscriber.weights["w"][0] != array[0]:
                        subscriber.pull(10)
                    assert (subscriber.weights["w"] == array).all()
                    array[version] += 7


@pytest.mark.usefixtures("over_connections")
@pytest.mark.parametrize(
    "worst", ["the base goes", "the base goes later", "a gap is wrong", "too long", "broken off"]
)
def test_changes_that_go_wrong_leave_the_old_version_or_come_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worst: str
) -> None:
    address, layout = f"unix:{tmp_path}/p", {"v": _one((5000,)), "w": _one((5000,))}
    arrays = {name: np.arange(5000, dtype=np.float32) for name in layout}
    out = {name: np.zeros_like(array) for name, array in arrays.items()}
    with Publisher(layout, arrays, address=address) as publisher:
        publisher.publish(1)
        with Subscriber(layout, out, address=address) as subscriber:
            subscriber.pull(10)
            before = {name: array.copy() for name, array in arrays.items()}
            for array in arrays.values():
                array[100:120] = -1.0
                array[4000] = -2.0
            publisher.publish(2)
            find = ChangeBoxes.find
            calls = itertools.count(1)

            def found(boxes: ChangeBoxes, *args: Any, **settings: Any) -> Changes:
                told = find(boxes, *args, **settings)
                turn = next(calls)
                if worst.startswith("the base goes"):
                    if turn == (2 if worst.endswith("later") else 1):
                        for memory in publisher._store._snapshots:
                            if memory.number == 1:
                                memory.set_number(0)
                                memory.bytes[4096:] = 77
                elif worst == "a gap is wrong":
                    assert told.encoded is not None
                    told.encoded[told.units * 4 : told.units * 4 + told.gaps_bytes] = 127
                elif worst == "too long":
                    return told._replace(units=1 << 40)
                elif turn == 1:
                    raise RuntimeError("this thread ends amid a stream")
                return told

            monkeypatch.setattr(ChangeBoxes, "find", found)
            monkeypatch.setattr(threading, "excepthook", lambda args: None)
            if worst.startswith("the base goes"):
                assert subscriber.pull(10) == 2
            else:
                with pytest.raises(CommError, match=r"version 2 (was not taken|did not arrive)"):
                    subscriber.pull(10)
                assert subscriber.version == 1
                assert all((subscriber.weights[n] == before[n]).all() for n in layout)
                assert subscriber.pull(10) == 2  # though what was found is as wrong as before
                assert worst == "broken off" or subscriber.report()["received_bytes"] == 2 * 4 * 5000
            assert all((subscriber.weights[n] == arrays[n]).all() for n in layout)


@pytest.mark.usefixtures("over_connections")
def test_the_set_that_is_a_version_behind_is_brought_up_and_not_copied(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the third version on; after a version that failed, was missed or changed a lot, what is served is copied."""
    address, names = f"unix:{tmp_path}/p", ("v", "w")
    layout = {name: _one((300, 100), "bfloat16") for name in names}
    arrays = {name: np.zeros((300, 100), dtypes.get("bfloat16").numpy) for name in names}
    copied: list[int] = []
    copy, write = version_target.ArrayTarget.copy, version_target.ArrayTarget.write

    def counted(target: Any, served: Any, boxes: ChangeBoxes) -> None:
        copied.append(id(target))
        copy(target, served, boxes)

    monkeypatch.setattr(version_target.ArrayTarget, "copy", counted)
    with Publisher(layout, arrays, address=address) as publisher:

        def publish(version: int, share: float = 0.01) -> None:
            for array in arrays.values():
                _bits(array)[rng.random(array.shape) < share] ^= 1
            publisher.publish(version)

        publish(0)
        with Subscriber(
            layout, {n: np.zeros_like(a) for n, a in arrays.items()}, address=address
        ) as subscriber:

            def pull(copies: int) -> None:
                copied.clear()
                subscriber.pull(10)
                assert all(subscriber.weights[n].tobytes() == a.tobytes() for n, a in arrays.items())
                assert len(copied) == copies
                assert wait_until(lambda: publisher.members()[0].version == subscriber.version, 10)

            pull(0)  # all of it
            for version in range(1, 9):
                publish(version)
                pull(2 if version == 1 else 0)
            publish(9)
            monkeypatch.setattr(version_target.ArrayTarget, "write", _raising)
            with pytest.raises(CommError):
                subscriber.pull(10)
            monkeypatch.setattr(version_target.ArrayTarget, "write", write)
            pull(0)  # all of it: what has changed could not be taken once
            publish(10)
            pull(2)  # the other set is a version behind, and nobody has told what came between
            publish(11, 0.6)
            pull(0)  # and comes whole
            publish(12)
            pull(2)
            publish(13)
            pull(0)
            publish(14)
            publish(15)
            pull(0)  # what differs between 13 and 15


def _raising(*_: object) -> None:
    raise KernelError("planted")
