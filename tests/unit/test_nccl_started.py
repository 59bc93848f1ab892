"""Started NCCL calls: which stream they run on, what waits for what, when messages begin, what is kept alive."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from support.comm_kit import refused, same
from support.device_stand_in import DEFAULT_STREAM, StandInStream
from support.nccl_stand_in import Host, StandInCommunicator, World, alone, run_stand_in

from lowshard.comm import Communicator
from lowshard.comm.nccl import nccl_communicator
from lowshard.comm.nccl_wait import InThread
from lowshard.errors import BufferMismatchError, CommError, TimedOut


def test_a_started_call_follows_the_callers_stream_and_wait_makes_it_follow_the_call() -> None:
    comm, handle, host = alone()
    buf = np.arange(3.0)
    user = host.new_stream()
    with user:
        work = comm.start.all_reduce(buf, buf)
    (call,) = [c for c in handle.calls if c[0] == "allReduce"]
    side = call[-1]
    assert side not in (DEFAULT_STREAM, user.ptr)
    (_, _, ready), (_, _, waited), (_, _, done) = host.log
    assert [entry[:2] for entry in host.log] == [("record", user.ptr), ("wait", side), ("record", side)]
    assert ready is waited
    host.log.clear()
    work.wait()
    assert host.log == [("wait", DEFAULT_STREAM, done)]
    assert comm.traffic.calls == {"all_reduce": 1}
    # One stream for all started calls.
    comm.start.broadcast(buf).wait()
    assert [c[-1] for c in handle.calls if c[0] == "broadcast"] == [side]
    assert host.synchronized == 0


@pytest.mark.parametrize("name", ["all_gather", "barrier", "reduce_scatter"])
def test_the_next_call_follows_what_was_started_without_a_wait(name: str) -> None:
    comm, _, host = alone()
    buf, other = np.arange(3.0), np.zeros(3)
    host.stream.push(lambda: None)  # so that it is not over yet
    comm.start.reduce_scatter(buf, other, order="tree")
    (done,) = [entry[2] for entry in host.log if entry[0] == "record" and entry[1] != DEFAULT_STREAM]
    host.log.clear()
    getattr(comm, name)(*(() if name == "barrier" else (other, buf)))
    assert host.log[0] == ("wait", DEFAULT_STREAM, done)
    assert host.synchronized == 0 or name == "barrier"


def test_wait_blocks_the_host_only_with_a_time() -> None:
    comm, _, host = alone()
    buf, ran = np.arange(3.0), []
    host.stream.push(lambda: ran.append("before"))
    work = comm.start.broadcast(buf)
    work.wait()
    assert not work.done()
    assert not ran
    work.wait(timeout_s=5.0)
    assert ran == ["before"]
    assert work.done()


def test_a_started_call_that_is_not_done_in_a_given_time_goes_on_until_the_deadline() -> None:
    comm, handle, host = alone(timeout_s=0.2)
    buf = np.arange(3.0)
    work = comm.start.broadcast(buf)
    ask = host.streams[-1].asked
    host.streams[-1].asked = lambda up_to: False  # type: ignore[method-assign]
    for _ in range(2):
        refused(
            lambda: work.wait(timeout_s=0.03),
            TimedOut,
            "broadcast on rank 0 has not ended",
            "wait for it again",
        )
    assert not handle.ended
    host.streams[-1].asked = ask  # type: ignore[method-assign]
    work.wait(timeout_s=0.1)
    host.streams[-1].asked = lambda up_to: False  # type: ignore[method-assign]
    refused(lambda: work.wait(timeout_s=30.0), TimedOut, r"broadcast on rank 0 was not done after 0\.2")
    assert handle.ended == "abort"


def test_buffers_of_a_started_call_live_until_it_is_over() -> None:
    comm, _, host = alone()

    class Buffer(np.ndarray):
        pass

    buf = np.zeros(3).view(Buffer)
    alive = weakref.ref(buf)
    host.stream.push(lambda: None)
    comm.start.broadcast(buf)
    del buf
    gc.collect()
    comm.barrier()
    assert alive() is not None
    for stream in host.streams:
        stream.flush()
    comm.barrier()
    gc.collect()
    assert alive() is None


def test_calls_of_one_communicator_keep_their_order_whichever_stream_they_are_on() -> None:
    def check(comm: Communicator) -> None:
        assert comm.transport == "nccl"
        a, b, c = np.ones(4), np.ones(5), np.ones(6)
        first = comm.start.all_reduce(a, a)
        comm.all_reduce(b, b)
        second = comm.start.all_reduce(c, c)
        assert [x[3] for x in comm._transport._handle.calls if x[0] == "allReduce"] == [4, 5, 6]
        second.wait()
        first.wait()
        for buf, n in ((a, 4), (b, 5), (c, 6)):
            same(buf, np.full(n, 3.0))

    run_stand_in(3, check)


# ---- messages


def test_started_messages_begin_together_when_one_is_waited_for() -> None:
    def check(comm: Communicator) -> None:
        assert comm.transport == "nccl"
        ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        send, recv = np.full(4000, float(comm.rank)), np.zeros(4000)
        # In this order a send would wait for ever for a recv that is started behind a send.
        sent = comm.start.send(send, ahead)
        came = comm.start.recv(recv, behind)
        assert not [c for c in comm._transport._handle.calls if c[0] in ("send", "recv")]
        came.wait()
        sent.wait()
        same(recv, np.full(4000, float(behind)))
        assert [c[0] for c in comm._transport._handle.calls if c[0] in ("send", "recv")] == ["send", "recv"]
        assert comm._transport._binding.nccl.groups == 1
        assert comm.traffic.calls == {"send": 1, "recv": 1}
        assert (comm.traffic.sent_bytes, comm.traffic.received_bytes) == (32000, 32000)

    run_stand_in(3, check)


@pytest.mark.parametrize("how", ["done", "collective", "started", "message", "grouped", "close", "other"])
def test_started_messages_begin_with_the_next_call(how: str) -> None:
    def check(comm: Communicator) -> None:
        assert comm.transport == "nccl"
        other = comm.split(0)
        assert other.transport == "nccl"
        peer = 1 - comm.rank
        send, recv = np.full(9, float(comm.rank)), np.zeros(9)
        works = [comm.start.send(send, peer), comm.start.recv(recv, peer)]
        again = np.zeros(9)
        if how == "done":
            works[0].done()
        elif how == "collective":
            comm.barrier()
        elif how == "started":
            comm.start.broadcast(again)
        elif how == "message":
            (comm.send if comm.rank else comm.recv)(again, peer)
        elif how == "grouped":
            with comm.grouped():
                comm.send(send, peer)
                comm.recv(again, peer)
        elif how == "other":
            other.barrier()
        else:
            comm.close()
        names = [c[0] for c in comm._transport._handle.calls if c[0] in ("send", "recv")]
        assert names[:2] == ["send", "recv"], names
        same(recv, np.full(9, float(peer)))

    run_stand_in(2, check)


def test_wrong_messages_are_refused_by_wait_and_spoil_no_others() -> None:
    def check(comm: Communicator) -> None:
        peer = 1 - comm.rank
        send, recv = np.full(9, float(comm.rank)), np.zeros(9)
        sent = comm.start.send(send, peer)
        refused(comm.start.send(send, comm.rank).wait, CommError, "another rank")
        refused(comm.start.recv([1.0], peer).wait, BufferMismatchError, "array")
        came = comm.start.recv(recv, peer)
        sent.wait()
        came.wait()
        same(recv, np.full(9, float(peer)))

    run_stand_in(2, check)


def test_a_message_may_be_waited_for_in_another_thread() -> None:
    def check(comm: Communicator) -> None:
        peer = 1 - comm.rank
        recv = np.zeros(9)
        works = [comm.start.send(np.full(9, float(comm.rank)), peer), comm.start.recv(recv, peer)]
        InThread(lambda: [work.wait(timeout_s=20.0) for work in works])._thread.join(20.0)
        assert all(work.done() for work in works)
        same(recv, np.full(9, float(peer)))

    run_stand_in(2, check)


def test_a_message_follows_the_stream_it_was_started_on() -> None:
    def check(comm: Communicator) -> None:
        assert comm.transport == "nccl"
        peer = 1 - comm.rank
        user = comm._transport._binding.new_stream()
        assert isinstance(user, StandInStream)
        host = user._host
        host.log.clear()
        with user:
            work = (comm.start.send if comm.rank else comm.start.recv)(np.zeros(9), peer)
        assert [entry[:2] for entry in host.log] == [("record", user.ptr), ("wait", host.streams[-1].ptr)]
        work.wait()
        assert [c[-1] for c in comm._transport._handle.calls if c[0] in ("send", "recv")] == [
            host.streams[-1].ptr
        ]

    run_stand_in(2, check)


# ---- devices


@pytest.mark.parametrize("started", [False, True])
def test_a_thread_whose_current_device_is_another_one_launches_on_the_communicators(started: bool) -> None:
    """A new thread begins on device 0; the stand-in refuses streams, events and kernels of another current device."""
    host = Host(device=1)
    host.select(1)
    handle = StandInCommunicator(World(1), 0, host)
    comm = nccl_communicator(handle, 0, 1, binding=host.binding())
    buf = np.arange(3.0)

    def work() -> int:
        if started:
            comm.start.all_reduce(buf, buf).wait()
        else:
            comm.all_reduce(buf, buf)
        comm.broadcast(buf)
        comm.barrier()
        return host.current

    thread = InThread(work)
    thread._thread.join(10.0)
    assert thread.result() == 0, "the thread's own device is put back"
    assert [name for name, *_ in handle.calls if name == "allReduce"]
    part = comm.split(0)
    assert part is not None
    part.close()
    comm.close()
