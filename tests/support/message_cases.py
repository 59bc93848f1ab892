"""Cases of the communicator contract: sends and recvs that are grouped."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from support.comm_kit import Canvas, by_the_host, case, get, lend, others, put, refused, same, told

from lowshard.comm import Communicator
from lowshard.errors import BufferMismatchError, CommError

Array = Any

LARGE = 30_000  # so many that a send waits for its receiver


def neighbours(comm: Communicator) -> tuple[int, int]:
    """Return the rank behind and the rank before this one on the ring; a ring of one has none."""
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def both_still_work(comm: Communicator) -> None:
    """Demand that messages and collectives go on as if nothing had been."""
    after, before = neighbours(comm)
    buf = put(comm, np.zeros(3, np.int64))
    with comm.grouped():
        comm.recv(buf, before)
        comm.send(put(comm, np.full(3, comm.rank)), after)
    same(buf, np.full(3, before))
    total = put(comm, np.array([1.0]))
    comm.all_reduce(total, total)
    same(total, np.array([float(comm.size)]))


@case(others)
def a_ring_of_large_messages_both_ways_is_one_group(comm: Communicator, rng: np.random.Generator) -> None:
    after, before = neighbours(comm)
    for elems in (LARGE, 40, 0):
        for make in (put, lend):
            data = rng.standard_normal((2, comm.size, elems)).astype(np.float32)
            left, right = Canvas(comm, elems, data.dtype), Canvas(comm, elems, data.dtype)
            with told(elems=elems, memory=make.__name__):
                with comm.grouped():  # all ranks send first: without a group they would wait for each other
                    comm.send(make(comm, data[0, comm.rank]), after)
                    if comm.size > 2:
                        comm.send(make(comm, data[1, comm.rank]), before)
                    comm.recv(left.buf, before)
                    if comm.size > 2:
                        comm.recv(right.buf, after)
                left.check(data[0, before])
                if comm.size > 2:
                    right.check(data[1, after])


@case(others)
def what_is_sent_may_be_received_over(comm: Communicator, rng: np.random.Generator) -> None:
    after, before = neighbours(comm)
    for elems in (3, LARGE, 1 << 18):
        data = rng.standard_normal((comm.size, elems)).astype(np.float32)
        for shift in (0, 1, -2):
            for grouped in (False, True):
                with told(elems=elems, shift=shift, grouped=grouped):
                    room = put(comm, np.zeros(elems + 2, np.float32))
                    mine, theirs = (room[at : at + elems] for at in (max(0, -shift), max(0, shift)))
                    mine[...] = put(comm, data[comm.rank])
                    if grouped:
                        with comm.grouped():
                            comm.send(mine, after)
                            comm.recv(theirs, before)
                    else:
                        comm.send_recv(mine, after, theirs, before)
                    same(theirs, data[before])


@case(others)
def a_group_exchanges_with_all_at_once_and_keeps_the_order_of_each_pair(
    comm: Communicator, rng: np.random.Generator
) -> None:
    own = np.random.default_rng(comm.rank)
    lengths = (5, 3000, 1)
    data = [rng.integers(-99, 99, (comm.size, comm.size, n)) for n in lengths]
    peers = [peer for peer in range(comm.size) if peer != comm.rank]
    bufs = {(peer, i): put(comm, np.zeros(n, np.int64)) for peer in peers for i, n in enumerate(lengths)}
    for _ in range(3):
        with comm.grouped():
            for i in range(len(lengths)):
                for peer in own.permutation(peers):
                    comm.recv(bufs[int(peer), i], int(peer))
                for peer in own.permutation(peers):
                    comm.send(put(comm, data[i][comm.rank, int(peer)]), int(peer))
        for (peer, i), buf in bufs.items():
            same(buf, data[i][peer, comm.rank])
            buf[...] = 0


@case(others)
def nothing_moves_before_the_end_of_a_group(comm: Communicator, rng: np.random.Generator) -> None:
    after, before = neighbours(comm)
    for elems in (4, LARGE):
        send, recv = put(comm, np.full(elems, 1.0)), Canvas(comm, elems, np.dtype(np.float64))
        with comm.grouped():
            comm.recv(recv.buf, before)
            comm.send(send, after)
            time.sleep(0.01)
            recv.check(Canvas.blank(elems, np.dtype(np.float64)))
            send[...] = comm.rank  # what is sent is what is there at the end
        recv.check(np.full(elems, float(before)))


@case(others)
def groups_count_as_their_messages_do(comm: Communicator, rng: np.random.Generator) -> None:
    after, before = neighbours(comm)
    comm.traffic.clear()
    with comm.grouped():
        comm.send(put(comm, np.zeros(3)), after)
        comm.recv(put(comm, np.zeros(3)), before)
    with comm.grouped():
        pass
    assert dict(comm.traffic.calls) == {"send": 1, "recv": 1}
    assert (comm.traffic.sent_bytes, comm.traffic.received_bytes) == (24, 24)


@case(others)
def groups_do_not_nest_and_hold_no_collectives(comm: Communicator, rng: np.random.Generator) -> None:
    after, before = neighbours(comm)
    buf, wide = put(comm, np.zeros(4)), put(comm, np.zeros(4 * comm.size))
    recv = put(comm, np.zeros(2))
    with comm.grouped():
        comm.send(put(comm, np.full(2, float(comm.rank))), after)
        refused(lambda: comm.grouped().__enter__(), CommError, "nest")
        for call in (
            lambda: comm.all_reduce(buf, buf),
            lambda: comm.all_gather(buf, wide),
            lambda: comm.broadcast(buf),
            lambda: comm.barrier(),
            lambda: comm.split(0),
            lambda: comm.start.all_reduce(buf, buf).wait(),
            lambda: comm.start.barrier().wait(),
        ):
            refused(call, CommError, r"grouped\(\)", "send and recv")
        comm.recv(recv, before)
    same(recv, np.full(2, float(before)))
    same(buf, np.zeros(4))
    both_still_work(comm)


@case(others)
def a_group_that_ends_by_an_error_has_moved_nothing(comm: Communicator, rng: np.random.Generator) -> None:
    after, before = neighbours(comm)
    recv = Canvas(comm, 5, np.dtype(np.int64))

    def fails(text: str) -> None:
        with comm.grouped():
            comm.send(put(comm, np.zeros(5, np.int64)), after)
            comm.recv(recv.buf, before)
            if text == "own":
                raise ZeroDivisionError("of the program")
            if text == "peer":
                comm.send(recv.buf, comm.size)
            elif text == "buffer":
                comm.recv(None, before)
            elif text == "nest":
                with comm.grouped():
                    pass
            else:
                comm.barrier()

    for text, cls, pattern in (
        ("own", ZeroDivisionError, "of the program"),
        ("peer", CommError, "another rank"),
        ("buffer", BufferMismatchError, "array"),
        ("nest", CommError, "nest"),
        ("collective", CommError, "send and recv"),
    ):
        with told(error=text):
            refused(lambda text=text: fails(text), cls, pattern)  # type: ignore[misc]
            recv.check(Canvas.blank(5, np.dtype(np.int64)))
            both_still_work(comm)


@case(others)
def a_group_does_not_disturb_what_was_started_before_it(comm: Communicator, rng: np.random.Generator) -> None:
    after, before = neighbours(comm)
    data = rng.integers(-9, 9, (comm.size, 500))
    totals = [put(comm, data[comm.rank]) for _ in range(5)]
    for turn in range(4):
        if comm.rank == turn % comm.size:
            time.sleep(0.005)
        works = [comm.start.all_reduce(total, total, "max") for total in totals]
        recv = put(comm, np.zeros(5))
        with comm.grouped():
            comm.send(put(comm, np.full(5, float(comm.rank))), after)
            time.sleep(0.005)  # in which started calls may begin
            comm.recv(recv, before)
        for work in works:
            work.wait(20.0)
        same(recv, np.full(5, float(before)))
        for total in totals:
            same(total, data.max(0))


@case(by_the_host, others)
def a_refused_message_tells_its_sender(comm: Communicator, rng: np.random.Generator) -> None:
    for elems in (3, 1000, LARGE, 1 << 18):
        buf, longer = put(comm, np.full(elems, 5.0)), put(comm, np.zeros(elems + 1))
        if comm.rank == 0:
            comm.send(buf, 1)  # returns, though it is refused
            comm.send(buf, 1)
        elif comm.rank == 1:
            refused(lambda longer=longer: comm.recv(longer, 0), BufferMismatchError, "expect")  # type: ignore[misc]
            comm.recv(longer[1:], 0)
            same(longer[1:], np.full(elems, 5.0))


@case(by_the_host, others)
def a_message_of_another_length_in_a_group_is_refused_and_leaves_nothing_behind(
    comm: Communicator, rng: np.random.Generator
) -> None:
    after, before = neighbours(comm)
    # Through host memory a long message goes in pieces, which a recv of another length does not tell from messages.
    sizes = (2, 4) if comm.transport == "staged" else (2, 4, 50_000)
    for sent in sizes:
        first, second = Canvas(comm, 3, np.dtype(np.int64)), Canvas(comm, 3, np.dtype(np.int64))

        def exchange(sent: int = sent, first: Canvas = first, second: Canvas = second) -> None:
            with comm.grouped():
                comm.recv(first.buf, before)
                comm.recv(second.buf, before)
                comm.send(put(comm, np.full(sent, comm.rank)), after)
                comm.send(put(comm, np.full(3, comm.rank + 50)), after)

        with told(sent=sent):
            refused(exchange, BufferMismatchError, f"rank {before}")
            first.check(Canvas.blank(3, np.dtype(np.int64)))
            comm.barrier()
            both_still_work(comm)
            second.check_canaries()
            arrived = [before + 50] * 3
            assert get(second.buf).tolist() in (arrived, Canvas.blank(3, np.dtype(np.int64)).tolist())


@case(others)
def groups_of_a_part_of_the_ranks_leave_the_others_alone(
    comm: Communicator, rng: np.random.Generator
) -> None:
    data = rng.standard_normal((comm.size, LARGE)).astype(np.float32)
    pair = comm.rank // 2 * 2
    peer = pair + 1 - comm.rank % 2
    recv = put(comm, np.zeros(LARGE, np.float32))
    if peer < comm.size:
        with comm.grouped():
            comm.send(put(comm, data[comm.rank]), peer)
            comm.recv(recv, peer)
        same(recv, data[peer])
    group = comm.split(comm.rank % 2)
    assert group is not None
    if group.size > 1:
        after, before = neighbours(group)
        with group.grouped():
            group.recv(recv, before)
            group.send(put(comm, data[comm.rank]), after)
        same(recv, data[(comm.rank - 2) % comm.size if group.rank else comm.rank + 2 * (group.size - 1)])
    group.close()
