"""What a rank is in: the text for people, the last 64 calls."""

from __future__ import annotations

import ctypes
import io
import re
import runpy
import time
from pathlib import Path

import pytest

from lowshard.comm.call import (
    RING_CALLS,
    RING_WORDS,
    Activity,
    Call,
    Name,
    user_line,
)


def call(text: str) -> Name:
    return Call(text.split(" ")[0], text, 1).record


SUM = call("all_reduce float64[16384] sum")
BARRIER = call("barrier")


@pytest.fixture
def activity() -> Activity:
    return Activity()


def test_where_a_rank_is_before_in_and_after_a_call(activity: Activity) -> None:
    assert re.fullmatch(r"no collective \(test_watch_activity\.py:\d+\)", activity.where())
    assert activity.now is None
    activity.enter(SUM, 4)
    assert re.fullmatch(
        r"all_reduce#4 float64\[16384\] sum \(test_watch_activity\.py:\d+\)", activity.where()
    )
    assert activity.now is not None
    assert activity.now[:2] == (4, SUM)
    activity.leave()
    assert re.fullmatch(
        r"no collective \(test_watch_activity\.py:\d+\); the last was all_reduce#4 float64\[16384\] sum",
        activity.where(),
    )


def test_the_line_is_the_main_threads_in_the_program_not_in_the_library(tmp_path: Path) -> None:
    """Through runpy, the standard library and lowshard, as under `lowshard run`."""
    script = tmp_path / "train.py"
    script.write_text(
        "import threading, time\n"
        "from lowshard.comm.call import user_line\n"
        "found = []\n"
        "def step():\n"
        "    thread = threading.Thread(target=lambda: (time.sleep(0.2), found.append(user_line())))\n"
        "    thread.start()\n"
        "    thread.join()  # line 7\n"
        "step()\n"
    )
    assert runpy.run_path(str(script))["found"] == ["train.py:7"]
    assert re.fullmatch(r"test_watch_activity\.py:\d+", user_line())


def test_the_ring_keeps_the_last_64_calls(activity: Activity) -> None:
    for sequence in range(70):
        activity.enter(BARRIER, sequence)
        activity.leave()
    activity.enter(SUM, 70)
    lines = activity.ring()
    assert len(lines) == 64
    assert re.fullmatch(r"barrier#7: done, began \d+\.\d{3} s ago", lines[0])
    assert re.fullmatch(r"all_reduce#70 float64\[16384\] sum: in it now, began \d+\.\d{3} s ago", lines[-1])
    out = io.StringIO()
    activity.dump_ring(out)
    assert out.getvalue().splitlines()[0] == "last collectives, oldest first:"
    assert len(out.getvalue().splitlines()) == 65
    assert Activity().ring() == []


def test_numbers_stand_for_calls_until_they_are_forgotten_and_out_of_the_ring(activity: Activity) -> None:
    class Once:
        text, encoded = "all_reduce float32[3] sum", b"all_reduce float32[3] sum"

    ring = (ctypes.c_int64 * (RING_CALLS * RING_WORDS)).from_address(activity.ring_address)
    count = ctypes.c_int64.from_address(activity.count_address)
    numbers = [activity.name(Once()) for _ in range(3)]
    assert len(set(numbers)) == 3
    for sequence, number in enumerate(numbers):  # as compiled code does
        ring[RING_WORDS * count.value : RING_WORDS * (count.value + 1)] = [
            number,
            sequence,
            time.monotonic_ns(),
        ]
        count.value += 1
    activity.forget(numbers[:2])
    assert [line.split(":")[0] for line in activity.ring()] == [
        f"all_reduce#{sequence} float32[3] sum" for sequence in range(3)
    ]
    for sequence in range(RING_CALLS):
        activity.enter(BARRIER, sequence)
    activity.forget([])
    assert set(activity._named) == {numbers[2]}
    assert all(line.startswith("barrier#") for line in activity.ring())
