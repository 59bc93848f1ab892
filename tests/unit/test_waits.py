"""Who waits for long is told once: in which call, from which line, and where the others are."""

from __future__ import annotations

import threading
import time

from lowshard.comm.call import Activity, Name, user_line
from lowshard.comm.waits import Waits

BARRIER = Name("barrier", b"barrier")


def inside(text: str, sequence: int) -> Activity:
    activity = Activity()
    activity.enter(Name(text, text.encode()), sequence)
    return activity


def texts(activities: dict[int, Activity]) -> dict[int, bytes]:
    for activity in activities.values():
        activity.note_wait()
    return {rank: activity.text.tobytes() for rank, activity in activities.items()}


def test_a_line_is_told_beside_more_threads_than_a_dump_shows() -> None:
    over = threading.Event()
    others = [threading.Thread(target=over.wait) for _ in range(101)]
    for thread in others:
        thread.start()
    try:
        assert user_line().startswith("test_waits.py:")
    finally:
        over.set()
        for thread in others:
            thread.join()


def test_a_barrier_with_one_late_rank_is_told_once_with_call_and_line() -> None:
    late = inside("all_reduce float64[4]", 6)
    late.leave()
    ranks = {0: inside("barrier", 7), 1: inside("barrier", 7), 2: late}
    waits = Waits(20_000_000)
    assert waits.look(texts(ranks)) == ""
    time.sleep(0.03)
    assert waits.look(texts(ranks)) == ""  # what was noted may be of the call before
    told = waits.look(texts(ranks))
    head, first, second = told.replace(": ranks", "; ranks").split("; ")
    assert head == "no progress for 0.02 s"
    assert first.startswith("ranks 0, 1 waiting in barrier#7 (test_waits.py:")
    assert second.startswith("rank 2 in no collective (test_waits.py:")
    assert second.endswith(", the last was all_reduce#6 float64[4]")
    assert waits.look(texts(ranks)) == ""
    ranks[0].leave()
    ranks[1].leave()
    assert waits.look(texts(ranks)) == ""
    ranks[0].enter(BARRIER, 8)
    time.sleep(0.06)
    waits.look(texts(ranks))
    told = waits.look(texts(ranks))
    assert told.startswith("no progress for 0.04 s: rank 0 waiting in barrier#8")


def test_a_ring_of_receivers_is_told_and_a_call_that_all_are_in_is_not() -> None:
    ring = {rank: inside(f"recv float32[4] from rank {(rank + 1) % 3}", 0) for rank in range(3)}
    at_work = {rank: inside("all_gather float32[1000000]", 3) for rank in range(3)}
    time.sleep(0.03)
    for ranks, told in ((ring, True), (at_work, False)):
        waits = Waits(20_000_000)
        waits.look(texts(ranks))
        text = waits.look(texts(ranks))
        assert bool(text) == told
        for rank in range(3 if told else 0):
            assert (
                f"rank {rank} waiting in recv#0 float32[4] from rank {(rank + 1) % 3} (test_waits.py:" in text
            )
