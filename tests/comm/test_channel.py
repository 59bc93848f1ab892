"""The failure channel by itself: what a hub hears, what it tells, what a rank makes of it."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pytest

from lowshard import settings
from lowshard.comm.call import Activity
from lowshard.comm.failure import MESSAGE, Channel, Hub, Watch, Wire
from lowshard.errors import PeerFailed, TimedOut

SOON_S = 5.0
RANKS = (4, 5, 6)  # of the job


@dataclass
class Group:
    """Three ranks in one process: the hub is rank 4's."""

    channels: list[Channel]
    watches: list[Watch]

    def wait(self, what: str = "flag", ranks: tuple[int, ...] = (0, 1, 2)) -> None:
        end_s = time.monotonic() + SOON_S
        while not all(self.seen(what, rank) for rank in ranks):
            assert time.monotonic() < end_s, f"no {what}"
            time.sleep(0.001)

    def seen(self, what: str, rank: int) -> bool:
        return bool(self.channels[rank].flag[0]) if what == "flag" else int(what) in self.channels[rank].gone


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.setenv(settings.ON_FAILURE.name, "raise")  # these ranks are this process
    hub = Hub(RANKS, None)
    pairs = [socket.socketpair() for _ in RANKS]
    for rank, (_, theirs) in zip(RANKS, pairs, strict=True):
        hub.add(rank, theirs)
    channels = [
        Channel(mine, rank, RANKS, hub if rank == RANKS[0] else None)
        for rank, (mine, _) in zip(RANKS, pairs, strict=True)
    ]
    yield Group(channels, [Watch(channel, RANKS, Activity()) for channel in channels])
    for channel in channels:
        channel.leave()
    for channel in channels:
        channel._threads[0].join(SOON_S)


def die(channel: Channel) -> None:
    """Closes a rank's connection, as the kernel does at its end."""
    channel._socket.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_connection_that_closes_is_a_death_and_all_are_told_in_the_same_words(
    group: Group, victim: int
) -> None:
    die(group.channels[victim])
    others = tuple(rank for rank in range(3) if rank != victim)
    group.wait(ranks=others)
    for rank in others:
        error = group.watches[rank].error("barrier#3")
        assert type(error) is PeerFailed
        assert error.ranks == (RANKS[victim],)
        assert str(error) == f"rank {RANKS[victim]} died: its connection closed; this rank was in barrier#3"


def test_the_end_of_the_hub_is_the_death_of_its_rank(group: Group) -> None:
    die(group.channels[2])  # as seen from there
    group.wait(ranks=(2,))
    assert group.channels[2].error("x").ranks == (RANKS[0],)


@pytest.mark.parametrize("teller", range(3))
def test_a_time_out_is_forgotten_by_those_too_that_have_not_listened_yet(group: Group, teller: int) -> None:
    for channel in {*group.channels} - {group.channels[teller]}:
        take = channel._take
        channel._take = lambda message, take=take: (time.sleep(0.2), take(message))  # type: ignore[method-assign]
    group.channels[teller].tell("timed out", "rank 6 did not come")
    [channel.renew() for channel in group.channels]
    time.sleep(0.5)
    assert not any(channel.flag[0] for channel in group.channels)


def test_the_first_failure_stands(group: Group) -> None:
    group.channels[1].tell("failed", "ValueError: a\n  b")
    group.channels[2].tell("failed", "KeyError: c")
    group.wait()
    assert {channel.cause for channel in group.channels} == {"rank 5 failed: ValueError: a b"}


def test_who_only_waited_names_the_one_that_left(group: Group) -> None:
    group.channels[1].tell("left", "while rank 5 waited for it", about=6)
    group.wait()
    assert [channel.error("x").ranks for channel in group.channels] == [(6,)] * 3


def test_a_time_out_is_the_tellers_own_and_is_over_when_all_have_come_again(
    group: Group, capfd: pytest.CaptureFixture[str]
) -> None:
    for again in range(2):
        group.watches[1].tell("timed out", f"nobody came {again}")
        group.wait()
        assert [type(watch.error("x")) for watch in group.watches] == [PeerFailed, TimedOut, PeerFailed]
        assert f"nobody came {again}" in group.channels[0].cause
        for channel in group.channels:
            channel.renew()
            assert not channel.flag[0]
    assert "rank 6 | time-out report: this rank is in" in capfd.readouterr().err
    group.channels[1].tell("failed", "x")
    group.wait()
    with pytest.raises(PeerFailed, match="rank 5 failed"):
        group.channels[0].renew()


def test_a_rank_that_has_left_is_missed_after_a_second(group: Group) -> None:
    group.channels[1].leave()
    group.wait("5")
    watch = group.watches[2]
    gone = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int64 * 3).from_address(watch.gone_address))
    assert [bool(at) for at in gone] == [False, True, False]
    watch.check_gone([0, 1], "barrier#1")
    assert not watch.flag[0]
    time.sleep(1.1)
    watch.check_gone([0], "barrier#1")
    with pytest.raises(PeerFailed, match="rank 5 has ended its program") as caught:
        watch.check_gone([1], "barrier#1")
    assert caught.value.ranks == (5,)
    late = Watch(group.channels[2], RANKS, Activity())
    with pytest.raises(PeerFailed):
        late.check_gone([1], "x")


def test_a_forked_child_neither_keeps_a_connection_nor_speaks(group: Group) -> None:
    pid = os.fork()
    if pid == 0:
        group.channels[1].tell("failed", "of the child")
        time.sleep(2 * SOON_S)
        os._exit(0)
    try:
        die(group.channels[1])
        group.wait(ranks=(0, 2))
        assert "died" in group.channels[0].cause
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    "noise", [b"\xff" * 100_000, b"m\0\0\0\x05[1,2]", b"m\0\0\0\x02{}", b"x\0\0\0\1y", b"m\0\0\0\xffabc"]
)
def test_noise_ends_its_own_connection_at_worst(noise: bytes) -> None:
    hub = Hub((0, 1), None)
    with ExitStack() as stack:
        stack.callback(hub.close)
        (mine, theirs), (other, others) = socket.socketpair(), socket.socketpair()
        for one in (mine, other):
            stack.callback(one.close)
        hub.add(0, theirs)
        hub.add(1, others)
        mine.sendall(noise)
        hub.turn(0.1)
        Wire(other).send(MESSAGE, json.dumps({"do": "bye"}).encode())
        hub.turn(0.1)
        assert 1 in hub.gone


def test_a_group_that_cannot_all_connect_leaves_nothing_that_is_waited_for(group: Group) -> None:
    for channel in group.channels:
        channel.drop()
    threads = [thread for channel in group.channels for thread in channel._threads]
    for thread in threads:
        thread.join(SOON_S)
    assert not any(thread.is_alive() for thread in threads)
