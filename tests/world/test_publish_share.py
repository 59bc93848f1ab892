"""Subscribers of one host that take versions from each other, and from the publisher where that goes wrong."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.reshard_cases import local_part, random_layout

import lowshard as ls
from lowshard import comm as lc
from lowshard.errors import CommError, MismatchError, PeerFailed, TimedOut
from lowshard.reshard import Publisher, Subscriber, version_fetch, version_shelf
from lowshard.reshard.version_shelf import Held

SHAPE = (96, 40)
TOKEN = bytes(32)


def _one() -> dict[str, ls.Layout]:
    return {"w": ls.Layout(ls.DeviceMesh((1,), ("x",)), SHAPE, "float32", (ls.Replicated(),))}


def _values(version: int) -> np.ndarray:
    return np.random.default_rng(version).standard_normal(SHAPE, dtype=np.float32)


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process maps another's memory, as if the publisher were on another host."""
    monkeypatch.setenv("LOWSHARD_CROSS_MEMORY", "off")


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with Publisher(_one(), {"w": _values(0)}, address="tcp://127.0.0.1:0", token=TOKEN) as made:
        made.publish(0)
        yield made


def _subscriber(publisher: Publisher, **options: Any) -> Subscriber:
    options = {"share": True, **options}
    return Subscriber(
        _one(), {"w": np.zeros(SHAPE, np.float32)}, address=publisher.address, token=TOKEN, **options
    )


def _has(subscriber: Subscriber, version: int) -> bool:
    return subscriber.version == version and subscriber.weights["w"].tobytes() == _values(version).tobytes()


def _near(subscriber: Subscriber) -> int:
    return subscriber.report()["near_bytes"]


SIZE = _values(0).nbytes


def test_who_comes_late_takes_it_from_who_is_there(publisher: Publisher) -> None:
    with _subscriber(publisher) as first:
        first.pull(5)
        assert _near(first) == 0
        with _subscriber(publisher) as second, _subscriber(publisher) as third:
            for late in (second, third):
                late.pull(5)
                assert _has(late, 0)
                assert late.report() == {
                    "dense_bytes": SIZE, "received_bytes": SIZE, "changed_elems": SIZE // 4, "near_bytes": SIZE,
                }  # fmt: skip


def test_a_subscriber_that_nothing_refers_to_leaves_no_door_open(publisher: Publisher) -> None:
    before = set(threading.enumerate())

    def doors() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "lowshard-publisher" and t not in before]

    subscriber = _subscriber(publisher)
    subscriber.pull(5)
    assert len(doors()) == 1
    with pytest.warns(ResourceWarning, match="unclosed"):  # of its connection
        del subscriber
    gc.collect()
    assert doors() == []


@pytest.mark.parametrize("who", ["giver", "taker"])
def test_nothing_is_shared_unless_both_are_asked_to(publisher: Publisher, who: str) -> None:
    with (
        _subscriber(publisher, share=who == "taker") as first,
        _subscriber(publisher, share=who == "giver") as second,
    ):
        first.pull(5)
        second.pull(5)
        assert _has(second, 0)
        assert _near(second) == 0


def test_share_is_true_or_false_of_any_kind(publisher: Publisher) -> None:
    with pytest.raises(CommError, match="share is True or False"):
        _subscriber(publisher, share=np.ones(2))
    with _subscriber(publisher, share=np.True_) as first, _subscriber(publisher, share=1) as second:
        first.pull(5)
        second.pull(5)
        assert _near(second) == SIZE


@pytest.mark.parametrize("name", [b"text", 3, None, Path("a")])
def test_a_name_is_text(publisher: Publisher, name: Any) -> None:
    with pytest.raises(CommError, match="name of a Subscriber is text"):
        _subscriber(publisher, name=name)


def test_who_had_no_port_at_first_gives_what_it_serves_as_soon_as_it_has_one(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_port(*_: object) -> None:
        raise OSError("no port")

    with _subscriber(publisher) as first:
        with monkeypatch.context() as without:
            without.setattr(version_shelf, "tcp_door", no_port)
            first.pull(5)
        first._disconnect()  # as a cut line does: the publisher's table comes again
        with pytest.raises(TimedOut):
            first.pull(0.2)
        with _subscriber(publisher) as second:
            second.pull(5)
            assert _has(second, 0)
            assert _near(second) == SIZE


def test_ranks_that_disagree_on_sharing_hear_of_it(tmp_path: Path) -> None:
    def subscribe(comm: Any) -> None:
        layout = {"w": ls.Layout(ls.DeviceMesh((2,), ("x",)), SHAPE, "float32", (ls.Replicated(),))}
        with pytest.raises(MismatchError):
            Subscriber(
                layout, {"w": np.zeros(SHAPE, np.float32)}, comm,
                address=f"unix:{tmp_path}/p", token=TOKEN, share=comm.rank == 0,
            )  # fmt: skip

    lc.run_loopback(2, subscribe)


def test_other_layouts_are_not_shared_and_wait_for_nobody(publisher: Publisher) -> None:
    with _subscriber(publisher) as first:
        first.pull(5)
        mesh = ls.DeviceMesh((1,), ("x",))
        other = {"w": ls.Layout(mesh, SHAPE, "float32", (ls.Sharded(0),))}
        out = {"w": np.zeros(SHAPE, np.float32)}
        with Subscriber(other, out, address=publisher.address, token=TOKEN, share=True) as second:
            second.pull(5)
            assert _has(second, 0)
            assert _near(second) == 0


def test_nobody_shares_where_the_publisher_is_on_this_host(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWSHARD_CROSS_MEMORY", "auto")
    with _subscriber(publisher) as first, _subscriber(publisher) as second:
        first.pull(5)
        second.pull(5)
        assert _has(second, 0)
        assert second.report()["received_bytes"] == 0


def test_those_that_begin_together_get_it_to_the_host_once(publisher: Publisher) -> None:
    many = [_subscriber(publisher) for _ in range(5)]
    threads = [threading.Thread(target=one.pull, args=(20,)) for one in many]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(_has(one, 0) for one in many)
    assert sorted(map(_near, many)) == [0, SIZE, SIZE, SIZE, SIZE]
    for one in many:
        one.close()


def test_changes_come_from_the_publisher(publisher: Publisher) -> None:
    with _subscriber(publisher) as first, _subscriber(publisher) as second:
        first.pull(5)
        second.pull(5)
        publisher._arrays["w"][...] = _values(1)
        publisher._arrays["w"][1:] = _values(0)[1:]
        publisher.publish(1)
        first.pull(5)
        second.pull(5)
        assert _near(second) == 0
        assert second.report()["received_bytes"] < SIZE // 4
        assert second.weights["w"].tobytes() == publisher._arrays["w"].tobytes()


def test_who_has_missed_versions_takes_the_newest_from_the_other(publisher: Publisher) -> None:
    with _subscriber(publisher) as first, _subscriber(publisher) as second:
        second.pull(5)
        for version in (1, 2, 3):
            publisher._arrays["w"][...] = _values(version)
            publisher.publish(version)
            first.pull(5)
        second.pull(5)
        assert _has(second, 3)
        assert _near(second) == SIZE


def test_without_deltas_all_but_one_take_each_version_from_another(publisher: Publisher) -> None:
    with _subscriber(publisher, delta="off") as first, _subscriber(publisher, delta="off") as second:
        for version in range(3):
            publisher._arrays["w"][...] = _values(version)
            if version:
                publisher.publish(version)
            for one, near in ((first, 0), (second, SIZE)):
                one.pull(5)
                assert _has(one, version)
                assert _near(one) == near


@pytest.mark.parametrize("case", range(8))
def test_any_layout_gets_to_any_other(rng: np.random.Generator, tmp_path: Path, case: int) -> None:
    """The publisher's, to that of two subscribers, which are the same; of one to three ranks."""
    ranks = rng.integers(1, 4, 2).tolist()
    shapes = [tuple(rng.integers(1, 14, int(rng.integers(0, 4))).tolist()) for _ in range(3)]
    whole = [rng.integers(0, 120, shape).astype(np.int32) for shape in shapes]
    jobs = [
        {f"w{i}": random_layout(rng, shape, "int32", 0, size) for i, shape in enumerate(shapes)}
        for size in ranks
    ]
    ranks.append(ranks[1])
    jobs.append(jobs[1])
    turn = [threading.Event() for _ in range(3)]
    reports: list[dict[str, int]] = []

    def publish(comm: Any) -> None:
        arrays = {
            n: local_part(x, comm.rank, whole[int(n[1:])]) for n, x in jobs[0].items() if comm.rank in x
        }
        with Publisher(jobs[0], arrays, comm, address=f"unix:{tmp_path}/p", token=TOKEN) as publisher:
            publisher.publish(7)
            turn[0].set()
            assert turn[2].wait(60)

    def subscribe(comm: Any, at: int) -> None:
        out = {n: np.zeros(x.local_shape(comm.rank), np.int32) for n, x in jobs[at].items() if comm.rank in x}
        address = f"unix:{tmp_path}/p"
        with Subscriber(jobs[at], out, comm, address=address, token=TOKEN, share=True) as subscriber:
            assert subscriber.pull(20) == 7
            for name, array in subscriber.weights.items():
                expected = local_part(jobs[at][name], comm.rank, whole[int(name[1:])])
                assert array.tobytes() == expected.tobytes(), name
            if at == 2:
                reports.append(subscriber.report())
            comm.barrier()
            turn[at].set()
            assert turn[2].wait(60)

    threads = [
        threading.Thread(target=lc.run_loopback, args=(ranks[0], publish)),
        threading.Thread(target=lc.run_loopback, args=(ranks[1], lambda comm: subscribe(comm, 1))),
        threading.Thread(target=lc.run_loopback, args=(ranks[2], lambda comm: subscribe(comm, 2))),
    ]
    for at, thread in enumerate(threads):
        thread.start()
        if at < 2:
            assert turn[at].wait(60)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(reports) == ranks[2]
    assert all(one["near_bytes"] == one["received_bytes"] == one["dense_bytes"] for one in reports)


@pytest.mark.parametrize("how", ["closes", "is written to", "stalls", "sends nonsense"])
def test_where_the_other_fails_amid_it_the_publisher_gives_it(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(version_fetch, "NEAR_S", 0.3)
    runs, met = Held.runs, []

    with _subscriber(publisher) as first, _subscriber(publisher) as second:
        first.pull(5)

        def fails(self: Held, *args: Any) -> Any:
            met.append(how)
            if how == "closes":
                first._shelf._server._lines.copy().pop().stop()
            elif how == "stalls":
                time.sleep(1.5)
            for data, crc in runs(self, *args):
                if how == "is written to":
                    first._shelf.put(0, 0)
                    first._shelf.put(1, 0)
                yield (data, crc + 1) if how == "sends nonsense" else (data, crc)

        monkeypatch.setattr(Held, "runs", fails)
        begun_s = time.monotonic()
        second.pull(5)
        assert met
        assert _has(second, 0)
        assert second.report()["received_bytes"] == SIZE
        assert _near(second) == 0
        assert time.monotonic() - begun_s < 1.5


def test_where_the_other_has_gone_the_publisher_gives_it(publisher: Publisher) -> None:
    with _subscriber(publisher) as first, _subscriber(publisher) as second:
        first.pull(5)
        first._shelf.close()
        second.pull(5)
        assert _has(second, 0)
        assert _near(second) == 0
        first._shelf = None


def test_who_is_first_and_goes_amid_it_holds_nobody_up(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one takes it from the publisher at once; one whose time is over does not wait for who stalls either."""
    with _subscriber(publisher) as first, _subscriber(publisher) as second, _subscriber(publisher) as third:
        waits, goes = threading.Event(), threading.Event()

        def stalls(wanted: Any) -> Any:
            waits.set()
            assert goes.wait(20)
            raise version_fetch.Lost("it has gone")

        first._offered(time.monotonic() + 5, 5)
        monkeypatch.setattr(first._source, "fetch", stalls)

        def loses() -> None:
            with pytest.raises(PeerFailed):
                first.pull(5)

        taking = threading.Thread(target=loses)
        taking.start()
        assert waits.wait(5)
        begun_s = time.monotonic()
        third.pull(0.3)
        assert _has(third, 0)
        assert time.monotonic() - begun_s < 1.5
        third.close()
        late = threading.Thread(target=second.pull, args=(15,))
        late.start()
        late.join(0.7)
        assert late.is_alive()
        goes.set()
        late.join(2)
        assert not late.is_alive()
        taking.join(5)
        assert _has(second, 0)


def test_another_publisher_shares_nothing_with_the_last(tmp_path: Path) -> None:
    where = {"address": f"unix:{tmp_path}/p", "token": TOKEN}
    out = [{"w": np.zeros(SHAPE, np.float32)} for _ in range(2)]
    with (
        Subscriber(_one(), out[0], share=True, **where) as first,
        Subscriber(_one(), out[1], share=True, **where) as second,
    ):
        with Publisher(_one(), {"w": _values(0)}, **where) as publisher:
            publisher.publish(0)
            first.pull(5)
        with Publisher(_one(), {"w": _values(1)}, **where) as publisher:
            publisher.publish(1)
            second.pull(5)
            assert _has(second, 1)
            assert _near(second) == 0
            with pytest.raises(PeerFailed):  # the one that it was in touch with has gone
                first.pull(5)
            assert _has(first, 0)
            first.pull(5)
            assert _has(first, 1)
            assert _near(first) == SIZE


def test_a_stranger_without_the_token_gets_nothing_from_a_subscriber(publisher: Publisher) -> None:
    from lowshard.comm.door import enter
    from lowshard.reshard.version_wire import CONTROL, DATA, Line, Lost, Request, read_answer

    with _subscriber(publisher) as first:
        first.pull(5)
        addresses = first._shelf.addresses
        assert all(address.startswith("tcp://127.0.0.1:") for address in addresses)
        with pytest.raises(ConnectionError):
            enter(addresses, bytes(31) + b"x", DATA, 0, 0.3)
        for ask in ("map", "changes", "want"):  # nor does one who knows it get anything but versions
            line = Line(enter(addresses, TOKEN, DATA, 0, 2))
            line.say(Request(ask, first._source.mark, number=1, since=1))
            with pytest.raises(Lost):
                line.hear(read_answer, time.monotonic() + 2)
            line.close()
        line = Line(enter(addresses, TOKEN, CONTROL, 0, 2))
        with pytest.raises(Lost):
            line.hear(read_answer, time.monotonic() + 2)
        line.close()
