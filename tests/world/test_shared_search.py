"""Members that want the same boxes share a search; the text is theirs though its base has gone meanwhile."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lowshard as ls
from lowshard.kernels.change_boxes import ScratchBuffer
from lowshard.kernels.change_encoding import Changes
from lowshard.kernels.changes import ChangeBoxes
from lowshard.reshard import Publisher, Subscriber
from lowshard.reshard.tensor_layout import as_tensor_layout
from lowshard.reshard.version_server import NO_DELTA, SharedSearch
from lowshard.reshard.version_store import Memory, VersionStore
from lowshard.transfer.device_copies import DeviceCopies

ELEMS = 40_000
_LAYOUT = ls.Layout(ls.DeviceMesh((1,), ("x",)), (ELEMS,), "float32", (ls.Replicated(),))
_ALL = ChangeBoxes([((0, ELEMS),)], 4)


class _Counted:
    """`ChangeBoxes.find`, counted; it can be held up until as many callers as wanted are there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = itertools.count()
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()
        find = ChangeBoxes.find

        def counted(boxes: ChangeBoxes, *args: Any, **settings: Any) -> Changes:
            next(self.calls)
            self.begun.set()
            assert self.may_go_on.wait(10)
            return find(boxes, *args, **settings)

        monkeypatch.setattr(ChangeBoxes, "find", counted)

    def count(self) -> int:
        """Return how many calls there were since it was asked last."""
        found = next(self.calls)
        self.calls = itertools.count()
        return found


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> _Counted:
    return _Counted(monkeypatch)


class _Two:
    """Snapshots 1 and 2 of one tensor, which differ in some elements; found from several threads."""

    def __init__(self, changed: int) -> None:
        self.store = VersionStore({"w": as_tensor_layout(_LAYOUT)}, 0, b"a" * 16, DeviceCopies((), 1.0))
        self.array = np.zeros(ELEMS, np.float32)
        self.store.fill({"w": self.array}, 1, ())
        self.array[: 2 * changed : 2] = 1.0
        self.store.fill({"w": self.array}, 2, (1,))
        self.shared = SharedSearch()

    def memory(self, number: int) -> Memory:
        found = self.store.find(number)
        assert found is not None
        return found

    def find(self, boxes: ChangeBoxes = _ALL, number: int = 2, since: int = 1) -> Changes:
        new, old = self.memory(2), self.memory(1)
        return self.shared.find(new, number, old, since, self.store.places["w"], boxes, ScratchBuffer())

    def find_at_once(self, searches: _Counted, count: int) -> list[Changes]:
        """Find in so many threads, of which the first is held up until all are there."""
        found: list[Changes] = []
        searches.begun.clear()
        searches.may_go_on.clear()
        threads = [threading.Thread(target=lambda: found.append(self.find())) for _ in range(count)]
        threads[0].start()
        assert searches.begun.wait(10)
        for thread in threads[1:]:
            thread.start()
        searches.may_go_on.set()
        for thread in threads:
            thread.join(10)
        assert len(found) == count
        return found


def test_members_of_one_layout_are_told_what_one_search_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, searches: _Counted, rng: np.random.Generator
) -> None:
    monkeypatch.setenv("LOWSHARD_CROSS_MEMORY", "off")
    address, half = f"unix:{tmp_path}/p", ELEMS // 2
    array = rng.standard_normal(ELEMS).astype(np.float32)
    parts = {"x": ls.Layout(ls.DeviceMesh((1,), ("x",)), (ELEMS,), "float32", (ls.Replicated(),))}
    with Publisher(parts, {"x": array}, address=address) as publisher:
        publisher.publish(1)
        members = [Subscriber(parts, {"x": np.zeros_like(array)}, address=address) for _ in range(3)]
        for member in members:
            member.pull(10)
        for version in range(2, 6):
            array[rng.choice(ELEMS, 50, replace=False)] += 1.0
            array[half] = version
            publisher.publish(version)
            for member in members:
                assert member.pull(10) == version
                assert member.weights["x"].tobytes() == array.tobytes()
                assert 0 < member.report()["received_bytes"] < 1000
            assert searches.count() == 1
        for member in members:
            member.close()


def test_who_comes_while_it_is_searched_waits_for_that(searches: _Counted) -> None:
    two = _Two(10)
    found = two.find_at_once(searches, 4)
    assert searches.count() == 1
    assert all(one is found[0] and one.units == 10 for one in found)


def test_other_boxes_another_base_and_another_snapshot_are_searched_for_themselves(
    searches: _Counted,
) -> None:
    two = _Two(10)
    half = ChangeBoxes([((0, 10),)], 4)
    assert (two.find().units, two.find(half).units) == (10, 5)
    assert two.find(ChangeBoxes([((0, ELEMS),)], 4, 8)).changed_elems == 10
    assert searches.count() == 3
    assert two.find(since=7) is NO_DELTA  # what was base is there no more
    assert two.find(since=7) is NO_DELTA
    assert two.find(number=1) is NO_DELTA  # an older one, whose place was taken
    assert searches.count() == 3
    assert two.find().units == 10
    assert searches.count() == 0


def test_what_was_found_is_told_though_the_base_goes_and_not_what_was_found_in_one_that_went(
    searches: _Counted,
) -> None:
    two = _Two(10)
    found = two.find()
    old, new = two.memory(1), two.memory(2)
    old.set_number(0)
    place = two.store.places["w"]
    assert two.shared.find(new, 2, old, 1, place, _ALL, ScratchBuffer()) is found
    fresh = SharedSearch()
    assert fresh.find(new, 2, old, 1, place, _ALL, ScratchBuffer()) is NO_DELTA
    old.set_number(1)
    assert fresh.find(new, 2, old, 1, place, _ALL, ScratchBuffer()).units == 10
    new.set_number(0)
    assert SharedSearch().find(new, 2, old, 1, place, _ALL, ScratchBuffer()) is NO_DELTA
