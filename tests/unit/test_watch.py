"""The side channel among ranks that are threads of one process: who is told what, in which words, when it ends."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import io
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowshard import settings
from lowshard.comm import abort, heartbeat, heartbeat_memory, rendezvous
from lowshard.comm import watch as watch_module
from lowshard.comm import watch_setup as meeting_module
from lowshard.comm.call import Activity
from lowshard.comm.watch import Watch, time_out_report
from lowshard.errors import CommError, PeerFailed, TimedOut

pytestmark = pytest.mark.time_limit(60)

LIMIT_S = 1.0
SOON_S = 5.0  # for what takes milliseconds on a machine with nothing else to do


class Call:
    """A call as the communicators describe it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.encoded = text.encode()


CALL = Call("all_reduce float64[16384]")


class Request:
    """A collective of `Meeting` under way."""

    def __init__(self, done: Callable[[], bool]) -> None:
        self.Test = done


class Meeting:
    """What a watch needs of an mpi4py communicator, for ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.rows: dict[tuple[int, int], np.ndarray[Any, Any]] = {}

    def seat(self, rank: int) -> Seat:
        return Seat(self, rank)


class Seat:
    """One rank's end of it."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.turn = meeting, rank, 0

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.meeting.size

    def _exchange(
        self, mine: np.ndarray[Any, Any], take: Callable[[list[np.ndarray[Any, Any]]], None]
    ) -> Request:
        turn, self.turn = self.turn, self.turn + 1
        rows = self.meeting.rows
        with self.meeting.lock:
            rows[turn, self.rank] = mine.copy()

        def done() -> bool:
            found = [rows[turn, rank] for rank in range(self.meeting.size) if (turn, rank) in rows]
            if len(found) == self.meeting.size:
                take(found)
            return len(found) == self.meeting.size

        return Request(done)

    def Ibcast(self, buffer: np.ndarray[Any, Any], root: int) -> Request:
        def take(rows: list[np.ndarray[Any, Any]]) -> None:
            buffer[...] = rows[root]

        return self._exchange(buffer, take)

    def Ibarrier(self) -> Request:
        return self._exchange(np.zeros(1), lambda rows: None)

    def Iallgather(self, mine: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> Request:
        def take(rows: list[np.ndarray[Any, Any]]) -> None:
            out[...] = rows

        return self._exchange(mine, take)


def start(size: int, **settings: Any) -> list[Watch]:
    """Start the watches of so many ranks; if that fails, all ranks must have failed alike."""
    meeting = Meeting(size)

    def one(rank: int) -> Watch | Exception:
        try:
            return Watch.start(meeting.seat(rank), Activity(), **{"heartbeat_limit_s": LIMIT_S, **settings})
        except CommError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        made = list(pool.map(one, range(size)))
    errors = [one for one in made if isinstance(one, Exception)]
    if errors:
        assert len({(type(error), str(error)) for error in errors}) == 1
        assert len(errors) == size
        raise errors[0]
    return [one for one in made if isinstance(one, Watch)]


def until(true: Callable[[], Any], limit_s: float = SOON_S) -> bool:
    end_s = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.002)
    return True


def die(watch: Watch) -> None:
    """End a rank's threads without a farewell, as a killed process would."""
    if not watch._words[heartbeat.OVER]:  # else its threads may have closed the descriptor
        watch._words[heartbeat.OVER] = 1
        with contextlib.suppress(OSError):  # they have closed it between these lines
            os.eventfd_write(watch._wake, 1)


def mute(watch: Watch) -> None:
    """Keep a rank from sending, as if it were frozen."""
    for link in range(len(watch._sockets)):
        watch._words[heartbeat.link_word(link) + heartbeat._MUTE] = 1


def own_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("lowshard-watch"))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No rank of these tests may end the process, and none may stay."""
    monkeypatch.setenv(settings.ON_FAILURE.name, "raise")
    before = open_files()
    yield
    for watch in list(watch_module._watches):
        die(watch)
    assert until(lambda: not own_threads()), own_threads()
    assert until(lambda: open_files() <= before)
    assert not abort._watches


@pytest.fixture(params=["compiled", "plain"])
def _loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of the loop: compiled by Numba, and plain Python."""
    if request.param == "plain":
        monkeypatch.setattr(heartbeat, "compiled_loop", lambda: heartbeat.loop)
    else:
        pytest.importorskip("numba", reason="numba is not there to be imported")
        assert heartbeat.compiled_loop() is not heartbeat.loop


@pytest.mark.usefixtures("_loop")
@pytest.mark.parametrize("teller", [0, 2])
def test_all_ranks_learn_of_the_first_failure_in_the_same_words(teller: int) -> None:
    watches = start(4)
    assert [watch.flag[0] for watch in watches] == [0] * 4
    assert watches[1].cause == ""
    assert watches[1].failed_rank is None
    begun = time.monotonic()
    watches[teller].tell("failed", "ValueError: böom\nand more")
    watches[3].tell("exit", "sys.exit(3)")  # too late: the first one stands
    assert until(lambda: all(watch.flag[0] for watch in watches))
    assert time.monotonic() - begun < LIMIT_S, "told, not noticed by its silence"
    assert {watch.cause for watch in watches} == {f"rank {teller} failed: ValueError: böom and more"}
    assert {watch.failed_rank for watch in watches} == {teller}
    die(watches[3])
    assert until(lambda: not watches[3]._threads[1].is_alive())
    time.sleep(0.1)
    assert watches[0].cause == watches[1].cause == watches[2].cause
    assert watches[0].failed_rank == teller
    error = watches[1].error("all_reduce#4 float64[16384] (train.py:31)")
    assert isinstance(error, PeerFailed)
    assert str(error) == (
        f"rank {teller} failed: ValueError: böom and more; "
        "this rank was in all_reduce#4 float64[16384] (train.py:31)"
    )


def test_a_time_out_is_one_on_its_own_rank_and_a_failed_peer_on_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = io.StringIO()  # capfd loses what is written while it reads
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr(abort, "world_rank", lambda rank: rank)  # whether or not MPI is loaded here
    watches = start(3)
    watches[1].tell("timed out", "barrier#7 was not done after 30 s")
    assert until(lambda: all(watch.flag[0] for watch in watches))
    mine, theirs = watches[1].error("barrier#7"), watches[2].error("barrier#7")
    assert isinstance(mine, TimedOut)
    assert str(mine) == "rank 1 timed out: barrier#7 was not done after 30 s"
    assert isinstance(theirs, PeerFailed)
    assert str(theirs) == "rank 1 timed out: barrier#7 was not done after 30 s; this rank was in barrier#7"
    reports = [f"rank {rank} | time-out report" for rank in range(3)]
    assert until(lambda: all(report in said.getvalue() for report in reports)), said.getvalue()


@pytest.mark.parametrize(("_loop", "dead"), [("compiled", 1), ("plain", 0)], indirect=["_loop"])
@pytest.mark.usefixtures("_loop")
def test_a_closed_connection_is_a_death_that_all_survivors_hear_of(dead: int) -> None:
    watches = start(3)
    watches[dead]._activity.enter(CALL, 41)
    time.sleep(2.5 * heartbeat.BEAT_NS / 1e9)  # so that a heartbeat has told it
    die(watches[dead])
    survivors = [watch for watch in watches if watch is not watches[dead]]
    assert until(lambda: all(watch.flag[0] for watch in survivors))
    told = f"rank {dead} died (its connection closed); it was last in all_reduce#41 float64[16384]"
    assert {watch.cause for watch in survivors} == {told}


@pytest.mark.parametrize(("_loop", "frozen"), [("compiled", 0), ("plain", 2)], indirect=["_loop"])
@pytest.mark.usefixtures("_loop")
def test_a_silent_rank_is_noticed_at_the_limit_and_not_before(frozen: int) -> None:
    watches = start(3)
    watches[frozen]._activity.enter(CALL, 5)
    watches[frozen]._activity.leave()
    time.sleep(2.5 * heartbeat.BEAT_NS / 1e9)
    begun = time.monotonic()
    mute(watches[frozen])
    survivors = [watch for watch in watches if watch is not watches[frozen]]
    assert until(lambda: all(watch.flag[0] for watch in survivors))
    assert time.monotonic() - begun > LIMIT_S - heartbeat.BEAT_NS / 1e9
    for watch in survivors:
        assert watch.failed_rank == frozen
        match = re.fullmatch(
            rf"rank {frozen} has been silent for (\d+\.\d) s: it is frozen or its host is cut off; "
            r"it was last in all_reduce#5 float64\[16384\] \(done\)",
            watch.cause,
        )
        assert match, watch.cause
        assert LIMIT_S <= float(match[1]) < LIMIT_S + SOON_S


def test_a_rank_that_stood_still_itself_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every loop here is plain Python: none gets on while one thread holds the interpreter.
    monkeypatch.setattr(heartbeat, "compiled_loop", lambda: heartbeat.loop)
    watches = start(3)
    ctypes.PyDLL(None).usleep(int(1.5 * LIMIT_S * 1e6))
    time.sleep(3 * heartbeat.BEAT_NS / 1e9)
    assert [watch.cause for watch in watches] == [""] * 3


def test_a_farewell_is_no_failure_and_the_hub_stays_until_the_last_one() -> None:
    watches = start(3)
    watches[0].close()
    assert until(lambda: watches[1].left(0) and watches[2].left(0))
    watches[2].close()
    assert not any(thread.is_alive() for thread in watches[2]._threads)
    assert until(lambda: watches[1].left(2))
    assert watches[1].gone == {0, 2}
    assert not watches[1].left(1)
    assert len(own_threads()) == 4  # of ranks 0 and 1
    watches[1].check_gone([0, 2], "barrier#3")  # what they sent may still be on its way
    time.sleep(1.1)
    watches[1].check_gone([1], "barrier#3")
    with pytest.raises(PeerFailed, match=r"rank 2 has ended its program .* waits for it in barrier#3"):
        watches[1].check_gone([1, 2], "barrier#3")
    assert [watch.flag[0] for watch in watches] == [0] * 3
    watches[1].close()
    assert until(lambda: not own_threads())


@pytest.mark.usefixtures("_loop")
def test_the_hub_still_tells_of_failures_after_its_own_farewell() -> None:
    watches = start(3)
    watches[0].close()
    watches[2].tell("failed", "KeyError: 'x'")
    assert until(lambda: bool(watches[1].flag[0]))
    assert watches[1].cause == "rank 2 failed: KeyError: 'x'"


def test_many_starts_and_ends_take_no_more_files() -> None:
    counts = []
    for _ in range(12):
        for watch in reversed(start(3)):
            watch.close()
        assert until(lambda: not own_threads())
        counts.append(open_files())
    assert len(set(counts)) == 1


def test_after_the_end_nothing_is_told() -> None:
    watches = start(2)
    watches[1].close()
    watches[1].close()
    watches[1].tell("failed", "too late")
    assert watches[1].flag[0] == 0
    watches[0].close()


def test_a_world_of_one_has_no_threads_and_no_sockets() -> None:
    before = open_files()
    [watch] = start(1)
    assert own_threads() == []
    assert open_files() == before
    watch.tell("failed", "ValueError: alone")
    watch.close()
    assert watch.flag.tolist() == [0]
    assert not watch.left(0)


def test_an_interface_that_is_named_is_the_only_one_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.INTERFACE.name, "lo")
    made = rendezvous.Rendezvous.nearby(2)
    try:
        [address] = made.offer.addresses
        assert address.startswith("tcp://127.0.0.1:")
        assert {s.getsockname()[0] for s in made._door._listening} == {"127.0.0.1"}
    finally:
        made.close()
    for watch in start(2):
        watch.close()


def test_one_rank_without_a_connection_fails_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(offer: rendezvous.Offer, rank: int, limit_s: float) -> Any:
        if rank == 2:  # as on a host that only nobody's port leads from
            offer = dataclasses.replace(offer, addresses=("tcp://127.0.0.1:1",))
        return rendezvous.connect(offer, rank, limit_s)

    monkeypatch.setattr(meeting_module, "connect", connect)
    with pytest.raises(
        CommError, match=r"rank 2 on .* reaches none .* \(tcp://127.0.0.1:1: connection refused\)"
    ):
        start(4, connect_limit_s=0.3)


def test_a_rank_that_does_not_come_is_a_time_out() -> None:
    seat = Meeting(2).seat(0)
    with pytest.raises(TimedOut, match=r"within 0\.2 s"):
        Watch.start(seat, Activity(), timeout_s=0.2)


def test_the_report_of_a_time_out_has_calls_others_and_stacks() -> None:
    watches = start(2)
    watches[1]._activity.enter(CALL, 2)
    own = watches[0]._activity
    for sequence in range(3):
        own.enter(Call("barrier"), sequence)
        own.leave()
    own.enter(CALL, 3)
    assert until(lambda: "all_reduce#2" in watches[0].others()[0])
    lines = time_out_report(own, watches[0]).splitlines()
    assert all(line.startswith("rank 0 | ") for line in lines)
    text = "\n".join(line.removeprefix("rank 0 | ") for line in lines)
    assert "time-out report: this rank is in all_reduce#3 float64[16384] (test_watch.py:" in text
    assert re.search(r"barrier#2: done, began .*\nall_reduce#3 float64\[16384\]: in it now, began ", text)
    assert re.search(r"rank 1: last in all_reduce#2 float64\[16384\], heard 0\.\d s ago", text)
    assert "test_the_report_of_a_time_out_has_calls_others_and_stacks" in text
    own.leave()


def test_the_record_that_needs_no_interpreter_is_the_one_that_the_interpreter_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(settings.JOB_DIR.name, str(tmp_path))
    abort.make_failure_dir(tmp_path)
    own = np.zeros(128, np.uint8)
    words, memory = heartbeat.make_memory(3, 4, 0, 0, own.ctypes.data, abort.forced_end_parts(3))
    message = 'rank 1 failed: ValueError: "a\\b" – c'
    data = message.encode()
    memory[heartbeat_memory.LINE_AT : heartbeat_memory.LINE_AT + len(data)] = np.frombuffer(data, np.uint8)
    heartbeat.write_record(words, memory, 71, heartbeat_memory.LINE_AT, heartbeat_memory.LINE_AT + len(data))
    [record] = abort.read_failures(tmp_path)
    assert abs(record.time_s - time.time()) < 60
    assert record == abort.FailureRecord(
        3, record.time_s, "exit", 71, "rank 1 failed: ValueError: .a.b. ... c", consequence=True
    )
    (tmp_path / "failures" / "3.json").unlink()
    abort.leave_forced_end(3, 71, message)
    [same] = abort.read_failures(tmp_path)
    assert same == dataclasses.replace(record, time_s=same.time_s, message=message)
    (tmp_path / "failures").joinpath(f".3-{os.getpid()}-forced").unlink()
    heartbeat.write_record(words, memory, 70, heartbeat_memory.LINE_AT, heartbeat_memory.LINE_AT + len(data))
    assert abort.read_failures(tmp_path) == (same,)  # the first one stands
