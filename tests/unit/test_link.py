"""The link between launcher and keepers: who may sign in, what is told, who is judged silent, stopped or gone."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from lowshard import settings
from lowshard.comm.abort import FailureRecord
from lowshard.comm.interface import boot_id
from lowshard.errors import InternalError, LaunchError
from lowshard.launch.host import Host, Spread
from lowshard.launch.link import Link
from lowshard.launch.uplink import LinkAddress, Uplink, failure_fields, read_message

pytestmark = pytest.mark.time_limit(30)

LIMIT_S = 1.2  # a rank silent for longer has failed; silence of 1 s makes it a suspect


def _is(done: Callable[[], object]) -> bool:
    try:
        return bool(done())
    except KeyError:  # a peer that is not known yet
        return False


def wait_for(done: Callable[[], object], limit_s: float = 10.0) -> None:
    end_s = time.monotonic() + limit_s
    while not _is(done):
        assert time.monotonic() < end_s, "not in time"
        time.sleep(0.01)


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    """A link that judges nobody within the time of a test, unless the test makes ranks older (`age`)."""
    made = Link(3, {settings.HEARTBEAT_S.name: "60", "LOWSHARD_START_S": "60"}, tmp_path)
    made.start()
    yield made
    made.close()


@pytest.fixture
def quick_link(tmp_path: Path) -> Iterator[Link]:
    """A link that judges after LIMIT_S."""
    made = Link(3, {settings.HEARTBEAT_S.name: str(LIMIT_S), "LOWSHARD_START_S": "60"}, tmp_path)
    made.start()
    yield made
    made.close()


def age(link: Link, rank: int, seconds: float) -> None:
    """Makes it so much longer since a rank was heard of."""
    wait_for(lambda: link._state.peers[rank].keeper_pid)  # its first words would make it young again
    with link._lock:
        peer = link._state.peers[rank]
        peer.heard_s -= seconds
        peer.heard_at_s -= seconds


opened: list[Uplink] = []


@pytest.fixture(autouse=True)
def closed_uplinks() -> Iterator[None]:
    """Closes what a test that fails leaves open."""
    yield
    while opened:
        opened.pop().close()


def sign_in(link: Link, rank: int) -> Uplink:
    opened.append(Uplink(LinkAddress.parse(str(link.address)), rank, LIMIT_S, start_s=5.0))
    return opened[-1]


@contextlib.contextmanager
def beating(*uplinks: Uplink) -> Iterator[None]:
    """Keeps ranks alive for as long as the block runs."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.1):
            for uplink in uplinks:
                uplink.send(stopped_at_s=0.0)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_failure_arrives_whole(link: Link) -> None:
    record = FailureRecord(1, time.time(), "exception", 1, "ValueError: ü", "Traceback\n…", "ValueError")
    uplink = sign_in(link, 1)
    uplink.send(failure=asdict(record))
    uplink.send(ended=True, status=1)
    wait_for(link.failures)
    assert link.failures() == [record]
    uplink.close()
    time.sleep(0.2)
    assert link.failures() == [record]
    assert link.suspects(time.time()) == []


def test_whoever_does_not_know_the_token_is_sent_away(link: Link) -> None:
    address = link.address
    stranger = LinkAddress("0" * 64, address.boot, address.addresses)
    with pytest.raises(LaunchError, match="rank 0"):
        Uplink(stranger, 0, LIMIT_S, start_s=0.1)
    assert link.failures() == []
    assert not link._state.peers


def test_a_rank_that_there_is_not_is_sent_away(link: Link) -> None:
    uplink = sign_in(link, 3)
    wait_for(lambda: uplink.receive() or uplink.lost)
    assert not link._state.peers


def test_an_address_that_does_not_answer_is_passed_over(link: Link) -> None:
    address = link.address
    several = LinkAddress(address.token, address.boot, ("unix:/no/such/door", *address.addresses))
    uplink = Uplink(several, 0, LIMIT_S, start_s=5.0)
    uplink.close()
    with pytest.raises(LaunchError, match="unix:/no/such/door"):
        Uplink(LinkAddress(address.token, "", ("unix:/no/such/door",)), 0, LIMIT_S, start_s=0.1)


LIES = [
    b"[" * 5000, b"7", b"\xff\0", b'{"host": {}, "pid": []}', b'{"failure": {}}', b'{"stopped_at_s": NaN}',
    b'{"failure": {"rank": 0, "time_s": 1.0, "kind": "exit", "exit_code": "x", "message": "m"}}',
]  # fmt: skip


@pytest.mark.parametrize("line", LIES, ids=range(len(LIES)))
def test_what_no_keeper_would_say_is_passed_over(link: Link, line: bytes) -> None:
    uplink = sign_in(link, 0)
    uplink._socket.sendall(line + b"\n")
    uplink.send(failure=asdict(FailureRecord(0, 1.0, "exit", 3, "sys.exit(3)")))
    wait_for(lambda: link.failures() or link.check())
    assert [(record.exit_code, record.message) for record in link.failures()] == [(3, "sys.exit(3)")]
    with pytest.raises(LaunchError, match="is not a valid message of a keeper"):
        read_message.text(line.decode(errors="replace"))


def test_a_keeper_speaks_of_its_own_rank_alone(link: Link) -> None:
    uplink = sign_in(link, 1)
    uplink.send(failure=failure_fields(FailureRecord(1 << 40, 1.0, "exit", 3, "no file '\udcff'")))
    wait_for(link.failures)
    assert [(record.rank, record.message) for record in link.failures()] == [(1, r"no file '\udcff'")]


def test_a_message_without_end_ends_its_connection(link: Link) -> None:
    uplink = sign_in(link, 0)
    uplink._socket.settimeout(5.0)
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        uplink._socket.sendall(bytes(1 << 23))
    wait_for(link.first_killed)
    link.check()


def test_one_silent_rank_is_lost_one_that_speaks_or_has_said_goodbye_is_not(link: Link) -> None:
    silent, alive, gone = (sign_in(link, rank) for rank in (2, 0, 1))
    gone.send(ended=True, status=0)
    gone.close()
    wait_for(lambda: 1 in link._state.peers and link._state.peers[1].ended)
    age(link, 1, 120.0)
    age(link, 2, 50.0)
    with beating(alive):
        time.sleep(0.3)
        assert link.failures() == []
        age(link, 2, 10.5)
        wait_for(link.failures)
        time.sleep(0.2)
    (lost,) = link.failures()
    assert (lost.rank, lost.kind, lost.exit_code, lost.consequence) == (2, "lost", 70, False)
    assert lost.message.startswith(f"its keeper on {socket.gethostname()} has not been heard of for 6")
    assert lost.time_s == link._state.peers[2].heard_at_s  # from then on it was lost
    assert link.first_killed() == []
    for uplink in (silent, alive):
        uplink.close()


def test_a_silent_host_is_named_with_all_its_ranks_and_the_lowest_counts(link: Link) -> None:
    with contextlib.closing(sign_in(link, 2)), contextlib.closing(sign_in(link, 1)):
        age(link, 1, 50.0)  # not over the limit, but as silent as the other
        age(link, 2, 60.5)
        wait_for(link.failures)
        lost = link.failures()
    assert {record.rank for record in lost} == {1, 2}
    assert len({record.time_s for record in lost}) == 1
    assert all(
        f"host {socket.gethostname()} (ranks 1, 2) has not been heard" in record.message for record in lost
    )


def test_the_link_judges_by_itself(quick_link: Link) -> None:
    with contextlib.closing(sign_in(quick_link, 1)):
        wait_for(quick_link.failures)
        assert f"host {socket.gethostname()} (rank 1) has" in quick_link.failures()[0].message


def test_silence_counts_no_more_once_the_job_is_being_ended(link: Link) -> None:
    with contextlib.closing(sign_in(link, 0)):
        link.expect_ends()
        age(link, 0, 120.0)
        time.sleep(0.4)
        assert link.failures() == []


def test_a_keeper_that_goes_without_a_word_is_a_suspect_first_and_a_failure_later(link: Link) -> None:
    first, second = sign_in(link, 1), sign_in(link, 0)
    first.close()
    wait_for(link.first_killed)
    second.close()
    wait_for(lambda: len(link.suspects(time.time())) == 2)
    assert link.suspects(time.time() - 60.0) == []  # ended with the job that somebody's complaint has ended
    assert [record.rank for record in link.first_killed()] == [1]
    assert link.failures() == []
    age(link, 1, 1.6)
    wait_for(link.failures)
    assert f"(process {os.getpid()}) was killed" in link.failures()[0].message


def test_ranks_that_never_come_are_named(tmp_path: Path) -> None:
    link = Link(3, {"LOWSHARD_START_S": "0.3"}, tmp_path)
    link.start()
    with contextlib.closing(link), contextlib.closing(sign_in(link, 1)):
        wait_for(lambda: len(link.failures()) == 2)
        assert {record.rank for record in link.failures()} == {0, 2}
        assert "within 0.3 s of the start (LOWSHARD_START_S)" in link.failures()[0].message


def test_output_comes_by_connections_of_its_own(link: Link) -> None:
    uplink = sign_in(link, 1)
    fds = [uplink.stream("stdout", 5.0), uplink.stream("stderr", 5.0)]
    for fd, text in zip(fds, (b"out", b"err"), strict=True):
        os.write(fd, text)
        os.close(fd)
    found: list[tuple[socket.socket, int, int]] = []
    wait_for(lambda: found.extend(link.streams()) or len(found) == 2)
    assert [(stream, rank) for _, stream, rank in found] == [(0, 1), (1, 1)]
    for (connection, _, _), text in zip(found, (b"out", b"err"), strict=True):
        connection.settimeout(5)
        assert connection.recv(10) == text
        assert connection.recv(10) == b""
        connection.close()
    assert link.streams() == []
    uplink.close()


def test_stacks_are_asked_of_those_that_can_show_them(link: Link) -> None:
    able, unable = sign_in(link, 0), sign_in(link, 1)
    able.send(takes_stack_signal=True)
    wait_for(lambda: link._state.peers[0].takes_stack_signal)
    link.ask_for_stacks()
    wait_for(lambda: able.receive() == [{"do": "stacks"}])
    assert unable.receive() == []
    able.close()
    unable.close()


def test_a_keeper_sees_the_end_of_the_launcher(link: Link) -> None:
    uplink = sign_in(link, 0)
    assert uplink.receive() == []
    assert not uplink.lost
    link.close()
    wait_for(lambda: uplink.receive() or uplink.lost)
    uplink.send(stopped_at_s=0.0)  # says nothing to nobody, and does not raise
    uplink.close()


def test_a_broken_link_says_so_and_still_tells_what_it_has_heard_and_closes(link: Link) -> None:
    record = FailureRecord(1, time.time(), "exit", 3, "")
    sign_in(link, 1).send(failure=asdict(record))
    wait_for(link.failures)
    link._judge = None  # type: ignore[assignment,method-assign]
    with pytest.raises(InternalError, match="the launcher's link to its ranks broke"):
        wait_for(link.check)
    assert link.failures() == [record]
    link.close(0.1)


@pytest.mark.parametrize(
    "addresses", [("unix:/tmp/a, b/door",), ("tcp://10.0.0.1:4711", "tcp://[fd00::2]:4711")]
)
def test_the_address_survives_the_way_through_the_environment(addresses: tuple[str, ...]) -> None:
    address = LinkAddress("0f" * 32, boot_id(), addresses)
    assert LinkAddress.parse(str(address)) == address


@pytest.mark.parametrize("text", ["", "0f" * 32 + ",b,http://a", "x" * 64 + ",b,unix:/a"])
def test_an_address_that_no_launcher_wrote_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match=settings.LINK.name):
        LinkAddress.parse(text)


@pytest.mark.parametrize("text", ["x", "0"])
def test_a_limit_must_be_a_positive_number(text: str) -> None:
    with pytest.raises(LaunchError, match=settings.HEARTBEAT_S.name):
        Link(3, {settings.HEARTBEAT_S.name: text}, None)


def test_on_one_host_the_door_is_in_the_private_folder(link: Link, tmp_path: Path) -> None:
    assert link.address.addresses == (f"unix:{tmp_path / 'door'}",)
    link.close()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "spread", [None, Spread((Host("203.0.113.7", 1),)), Spread((Host("a", 1),), iface="lo")]
)
def test_other_hosts_find_it_at_addresses_of_this_host_and_never_at_all_of_them(
    spread: Spread | None,
) -> None:
    with contextlib.closing(Link(1, {}, None, spread)) as link:
        for made in link._door._listening:
            assert made.getsockname()[0] not in ("0.0.0.0", "::")
        link.start()
        sign_in(link, 0)
        wait_for(lambda: 0 in link._state.peers)
