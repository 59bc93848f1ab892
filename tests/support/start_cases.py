"""Cases of the communicator contract: calls that are started and not waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.comm_kit import (
    LONG,
    SHORT,
    by_the_host,
    case,
    check,
    every_call,
    get,
    lend,
    numpy_arrays,
    operands,
    others,
    put,
    refused,
    same,
    told,
)

from lowshard import dtypes
from lowshard.comm import Communicator
from lowshard.comm.work import Work
from lowshard.errors import BufferMismatchError, CommError, TimedOut
from lowshard.selftest.fold_cases import plain_fold

Array = Any

LIMIT_S = 20.0


def beside(comm: Communicator) -> Communicator:
    """Return another communicator over the same ranks, by which ranks meet while the first is busy."""
    other = comm.split(0)
    assert other is not None
    return other


def compute(until: Callable[[], bool]) -> None:
    """Compute with NumPy alone until something is so."""
    end_s = time.monotonic() + LIMIT_S
    a = np.eye(60) * 0.999
    while not until():
        assert time.monotonic() < end_s, "what was started has not gone on"
        a = a @ a


# ---- every call


@case()
def every_collective_may_be_started(comm: Communicator, rng: np.random.Generator) -> None:
    for elems in (SHORT, LONG):
        for lent, in_place in ((False, True), (True, False)):
            for call in every_call(comm, rng, elems=elems, lent=lent, in_place=in_place):
                with told(call=call.name, elems=elems, lent=lent):
                    work = getattr(comm.start, call.name)(*call.args)
                    assert work.wait() is None
                    check(call)
                    assert work.wait(LIMIT_S) is None  # again is allowed
                    assert work.done()
    work = comm.start.barrier()
    work.wait(LIMIT_S)
    assert work.done()


@case()
def many_calls_may_be_in_flight_and_run_in_order(comm: Communicator, rng: np.random.Generator) -> None:
    calls = []
    for elems in (SHORT, LONG, 1, 500):
        calls += every_call(comm, rng, elems=elems, lent=comm.rank % 2 == 0)
    works = [getattr(comm.start, call.name)(*call.args) for call in calls]
    for i in rng.permutation(len(calls)):
        with told(call=calls[i].name, number=int(i)):
            works[i].wait()
            check(calls[i])
    # Each of these works on what the one before it has made.
    a, b = put(comm, np.ones(1000)), put(comm, np.zeros(1000))
    works = []
    for _ in range(4):
        works += [comm.start.all_reduce(a, b), comm.start.all_reduce(b, a, "max")]
    comm.barrier()  # waits for what was started before it
    assert all(work.done() for work in works) or comm.transport == "nccl"
    for work in works:
        work.wait(LIMIT_S)
    same(a, np.full(1000, float(comm.size) ** 4))


@case()
def a_call_reads_what_one_that_was_started_writes(comm: Communicator, rng: np.random.Generator) -> None:
    is_small = comm.xp is np or hasattr(comm.xp, "checker")  # which sees what is not ordered at any size
    each = 20_000 if is_small else (16 << 20) // comm.size  # 64 MB on a GPU
    data = rng.integers(-9, 9, (comm.size, comm.size * each)).astype(np.float32)
    part, whole = put(comm, np.zeros(each, np.float32)), put(comm, np.zeros(comm.size * each, np.float32))
    send = put(comm, data[comm.rank])
    for _ in range(3):
        work = comm.start.reduce_scatter(send, part, order="tree")
        comm.all_gather(part, whole)  # nobody waits for it on the host
        same(whole, data.sum(0))
        part[...] = 0
        work.wait()


@case()
def a_call_that_waits_comes_after_those_that_were_started(
    comm: Communicator, rng: np.random.Generator
) -> None:
    data = rng.integers(-9, 9, (comm.size, 2000))
    total, whole = put(comm, np.zeros(2000, np.int64)), put(comm, np.zeros(data.size, np.int64))
    work = comm.start.all_reduce(put(comm, data[comm.rank]), total)
    comm.all_gather(total, whole)
    same(whole, np.tile(data.sum(0), comm.size))
    work.wait()
    group = comm.split(comm.rank % 2)
    assert group is not None
    works = [comm.start.all_reduce(total, total), group.start.all_reduce(whole, whole, "max")]
    again = comm.split(0)  # after what was started on comm
    assert again is not None
    again.barrier()
    for work in works:
        work.wait(LIMIT_S)
    same(total, data.sum(0) * comm.size)
    for made in (again, group):
        made.close()


@case()
def a_work_holds_its_buffers(comm: Communicator, rng: np.random.Generator) -> None:
    data = rng.integers(-9, 9, (comm.size, LONG))
    works, results = [], []
    for turn in range(6):
        recv = put(comm, np.zeros(data.shape[1], np.int64))
        make = lend if turn % 2 else put
        works.append(comm.start.all_reduce(make(comm, data[comm.rank] + turn), recv))
        np.zeros(data.shape[1], np.int64).fill(-1)  # which would take the memory of a buffer that is not held
        results.append(recv)
    for turn, (work, recv) in enumerate(zip(works, results, strict=True)):
        work.wait()
        same(recv, data.sum(0) + turn * comm.size)
    comm.start.barrier()  # nobody waits for it
    comm.barrier()


# ---- pending and done


@case(others, by_the_host)
def done_is_false_until_all_ranks_have_come(comm: Communicator, rng: np.random.Generator) -> None:
    other = beside(comm)
    for late in {0, comm.size - 1}:
        send, recv = put(comm, np.full(9, float(comm.rank))), put(comm, np.zeros(9))
        work = None if comm.rank == late else comm.start.all_reduce(send, recv)
        other.barrier()
        time.sleep(0.01)
        assert work is None or not work.done()
        same(recv, np.zeros(9))
        other.barrier()
        work = work or comm.start.all_reduce(send, recv)
        work.wait()
        assert work.done()
        same(recv, np.full(9, sum(map(float, range(comm.size)))))
    other.close()


@case(others, by_the_host)
def what_was_started_goes_on_while_the_caller_computes(comm: Communicator, rng: np.random.Generator) -> None:
    other = beside(comm)
    elems = LONG
    for make in (put, lend):
        send, recv = make(comm, np.ones(elems)), make(comm, np.zeros(elems))
        last = get(recv)[-1:] if isinstance(recv, np.ndarray) else None
        if comm.rank == 0:
            work = comm.start.all_reduce(send, recv)
            assert not work.done()
            other.barrier()
            if last is None:
                work.wait()
            else:  # no call of ours from here on: the result comes by itself
                compute(lambda last=last: last[0] == comm.size)  # type: ignore[misc]
                compute(work.done)
        else:
            other.barrier()
            time.sleep(0.005)
            comm.all_reduce(send, recv)
        same(recv, np.full(elems, float(comm.size)))
    other.close()


@case(numpy_arrays, by_the_host)
def a_message_that_was_started_arrives_while_the_caller_computes(
    comm: Communicator, rng: np.random.Generator
) -> None:
    other = beside(comm)
    elems = 100_000  # more than goes without the receiver
    buf = put(comm, np.zeros(elems))
    if comm.size > 1 and comm.rank == 0:
        work = comm.start.recv(buf, 1)
        assert not work.done()
        other.barrier()
        compute(lambda: buf[-1] == 7.0)
        work.wait()
        same(buf, np.full(elems, 7.0))
    else:
        other.barrier()
        if comm.rank == 1:
            comm.send(put(comm, np.full(elems, 7.0)), 0)
    other.close()


# ---- the time of a wait, errors


@case(others, by_the_host)
def a_wait_that_is_too_short_may_be_made_again(comm: Communicator, rng: np.random.Generator) -> None:
    other = beside(comm)
    recv, buf = put(comm, np.zeros(5)), put(comm, np.zeros(5))
    late = comm.size - 1
    works: list[Work] = []
    if comm.rank != late:
        works.append(comm.start.all_reduce(put(comm, np.ones(5)), recv))
    if comm.rank == 0:
        works.append(comm.start.recv(buf, late))
    for work in works:
        for time_s in (0.0, 0.03):
            begun_s = time.monotonic()
            refused(lambda work=work, time_s=time_s: work.wait(time_s), TimedOut, "within")  # type: ignore[misc]
            assert time_s <= time.monotonic() - begun_s < 5.0
            assert not work.done()
    other.barrier()
    if comm.rank == late:
        works.append(comm.start.all_reduce(put(comm, np.ones(5)), recv))
        comm.start.send(put(comm, np.full(5, 8.0)), 0)
    for work in works:
        work.wait(LIMIT_S)
        work.wait(0.0)  # what is done is not waited for
    same(recv, np.full(5, float(comm.size)))
    if comm.rank == 0:
        same(buf, np.full(5, 8.0))
    other.close()


@case()
def errors_are_raised_by_wait(comm: Communicator, rng: np.random.Generator) -> None:
    good, short = put(comm, np.zeros(4)), put(comm, np.zeros(3))
    peer = (comm.rank + 1) % comm.size
    for text, cls, start in (
        ("as many", BufferMismatchError, lambda: comm.start.all_reduce(good, short)),
        ("size x send", BufferMismatchError, lambda: comm.start.all_gather(good, short)),
        ("root", CommError, lambda: comm.start.broadcast(good, comm.size)),
        ("op is one of", CommError, lambda: comm.start.all_reduce(good, good, "mean")),  # type: ignore[arg-type]
        ("another rank", CommError, lambda: comm.start.send(good, comm.rank)),
        ("another rank", CommError, lambda: comm.start.recv(good, comm.size)),
        ("array", BufferMismatchError, lambda: comm.start.recv([1.0], peer)),
    ):
        with told(expected=text):
            work = start()  # type: ignore[no-untyped-call]
            refused(work.wait, cls, text)
            refused(work.wait, cls, text)
            assert work.done()
    # What was started behind a call that is refused runs all the same.
    first = comm.start.all_reduce(good, short)
    buf = put(comm, np.ones(4))
    second = comm.start.all_reduce(buf, buf)
    second.wait()
    same(buf, np.full(4, float(comm.size)))
    refused(first.wait, BufferMismatchError, "as many")
    comm.barrier()


# ---- messages


@case(others)
def large_messages_both_ways_are_waited_for_in_any_order(
    comm: Communicator, rng: np.random.Generator
) -> None:
    own = np.random.default_rng(comm.rank)
    data = rng.integers(-99, 99, (comm.size, comm.size, 20_000)).astype(np.int32)
    box = getattr(comm.control._transport, "mailbox", SimpleNamespace(_improbe=None))
    found = box._improbe  # slowed, so that other threads find messages of other ranks, of other lengths
    for turn in range(2):
        works: list[Work] = []
        bufs: dict[int, Array] = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(box, "_improbe", lambda *at: (it := found(*at)) and (time.sleep(0.005), it)[1])
            for step in range(1, comm.size):
                dst, src = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
                bufs[src] = put(comm, np.zeros(20_000 - src, np.int32))
                sent = put(comm, data[comm.rank, dst][comm.rank :])
                calls = [(comm.start.recv, bufs[src], src), (comm.start.send, sent, dst)]
                works += [start(buf, peer) for start, buf, peer in calls[:: 1 - 2 * turn]]
            for i in own.permutation(len(works)):
                works[i].wait()
        for src, buf in bufs.items():
            same(buf, data[src, comm.rank][src:])


@case(others, by_the_host)
def a_recv_may_be_started_long_before_its_send(comm: Communicator, rng: np.random.Generator) -> None:
    for elems in (3, 50_000):
        data = rng.standard_normal((comm.size, elems))
        src, dst = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        buf, total = put(comm, np.zeros(elems)), put(comm, np.array([1.0]))
        work = comm.start.recv(buf, src)
        comm.barrier()
        comm.all_reduce(total, total)
        assert not work.done()
        same(total, np.array([float(comm.size)]))
        comm.barrier()
        comm.send(put(comm, data[comm.rank]), dst)
        work.wait()
        same(buf, data[src])


@case()
def started_messages_of_one_pair_stay_in_order(comm: Communicator, rng: np.random.Generator) -> None:
    if comm.size == 1 or comm.rank > 1:
        return
    lengths = (5, 100_000, 1, 40_000, 0, *(7,) * 150)  # more short ones than wait for a receiver anywhere
    for late in (0, 1):
        data = [rng.standard_normal(n) for n in lengths]
        if comm.rank == late:
            time.sleep(0.1)
        if comm.rank == 0:
            sent = [put(comm, message) for message in data]
            works = [comm.start.send(buf, 1) for buf in sent[:-1]]
            comm.send(sent[-1], 1)
            for work, buf in zip(works, sent, strict=False):
                work.wait(LIMIT_S)
                buf[...] = 0  # it is ours again, received or not
            continue
        bufs = [put(comm, np.zeros(message.size)) for message in data]
        works = [comm.start.recv(buf, 0) for buf in bufs[:-1]]
        comm.recv(bufs[-1], 0)  # after those that were started
        same(bufs[-1], data[-1])
        for work, buf, message in zip(works[::-1], bufs[-2::-1], data[-2::-1], strict=True):
            work.wait()
            same(buf, message)


# ---- several communicators, the end


@case(by_the_host)
def calls_of_several_communicators_are_in_flight_at_once(
    comm: Communicator, rng: np.random.Generator
) -> None:
    groups = [beside(comm) for _ in range(3)]
    terms = operands(rng, comm.size, 3000, dtypes.get("float32"), "sum")
    expected = plain_fold(terms, "sum", "tree")
    bufs = [put(comm, terms[comm.rank]) for _ in groups]
    # Each rank starts them in an order of its own.
    order = [int(i) for i in np.random.default_rng(comm.rank).permutation(len(groups))]
    works = {i: groups[i].start.all_reduce(bufs[i], bufs[i], "sum", "tree") for i in order}
    for i in order[::-1]:
        works[i].wait()
    for buf in bufs:
        same(buf, expected)
    for group in groups:
        group.close()


@case(others)
def close_waits_for_messages_that_were_started(comm: Communicator, rng: np.random.Generator) -> None:
    src, dst = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for elems in (3, 50_000):
        group, buf = beside(comm), put(comm, np.zeros(elems))
        if comm.rank == comm.size - 1:
            time.sleep(0.01)
        works = [
            group.start.recv(buf, src),
            group.start.send(put(comm, np.full(elems, 1.0 + comm.rank)), dst),
        ]
        group.close()
        for work in works:
            work.wait(LIMIT_S)
        same(buf, np.full(elems, 1.0 + src))


@case()
def close_waits_for_what_was_started(comm: Communicator, rng: np.random.Generator) -> None:
    for _ in range(3):
        group = beside(comm)
        bufs = [put(comm, np.full(4000, 1.0)) for _ in range(4)]
        if comm.rank == comm.size - 1:
            time.sleep(0.01)
        works = [group.start.all_reduce(buf, buf) for buf in bufs]
        group.close()
        refused(group.start.barrier().wait, CommError, "closed")
        for work, buf in zip(works, bufs, strict=True):
            work.wait(LIMIT_S)
            same(buf, np.full(4000, float(comm.size)))


@case()
def close_raises_what_nobody_waited_for(comm: Communicator, rng: np.random.Generator) -> None:
    buf = put(comm, np.zeros(4))
    group = beside(comm)
    first = group.start.all_reduce(buf, buf, "median")  # type: ignore[arg-type]
    second = group.start.all_reduce(buf, buf, "middle")  # type: ignore[arg-type]
    refused(group.close, CommError, "op is one of", "median")
    group.close()  # it is closed, and has told
    refused(first.wait, CommError, "median")
    refused(second.wait, CommError, "middle")

    group = beside(comm)
    refused(group.start.all_reduce(buf, buf, "median").wait, CommError, "median")  # type: ignore[arg-type]
    group.close()  # what somebody was told of is not told again

    group = beside(comm)
    group.start.send(buf, comm.rank)
    refused(group.close, CommError, "dst is another rank")


@case(by_the_host, others)
def close_raises_that_a_message_has_another_length(comm: Communicator, rng: np.random.Generator) -> None:
    src, dst = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for elems in (3, 50_000):
        group = beside(comm)
        works = [
            group.start.send(put(comm, np.zeros(elems)), dst),
            group.start.recv(put(comm, np.zeros(elems + 1)), src),
        ]
        refused(group.close, BufferMismatchError, "this rank expects")
        works[0].wait(LIMIT_S)
        refused(works[1].wait, BufferMismatchError, "this rank expects")
