"""Cases of the communicator contract: calls that were made before, and what has changed since."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import numpy as np
from support.check_cases import check_mismatch, go_on, untouched
from support.comm_kit import (
    LONG,
    SHORT,
    Canvas,
    case,
    check,
    compared,
    compared_before,
    equal_everywhere,
    every_call,
    lend,
    numpy_arrays,
    others,
    outcome,
    put,
    refused,
    same,
    told,
)
from support.message_cases import neighbours
from support.mismatch import mismatches

from lowshard.comm import Communicator
from lowshard.errors import BufferMismatchError, CommError

Array = Any

TIMES = 3


def is_one_node(comm: Communicator) -> bool:
    """Say whether the ranks move everything through the memory of one machine, and large arrays in their own ways."""
    return comm.transport == "mpi" and comm.reach.whole


def huge_bytes(comm: Communicator) -> int:
    """Return a size that takes several turns of everything that the ranks of a node do in turns."""
    return 1_200_000 if is_one_node(comm) else 60_000


@case()
def calls_that_are_repeated_are_as_right_as_the_first(comm: Communicator, rng: np.random.Generator) -> None:
    for elems in (SHORT, LONG, huge_bytes(comm) // 4 // comm.size):
        for lent, in_place in (
            (False, False),
            (False, True),
            (True, False),
            (comm.rank == 0, comm.rank == 0),
        ):
            for turn in range(TIMES):
                for call in every_call(comm, rng, elems=elems, lent=lent, in_place=in_place):
                    with told(call=call.name, turn=turn, elems=elems, lent=lent, in_place=in_place):
                        getattr(comm, call.name)(*call.args)
                        check(call)


@case()
def calls_are_right_at_the_sizes_where_ways_change(comm: Communicator, rng: np.random.Generator) -> None:
    for size_bytes in (16 << 10, 32 << 10, 64 << 10):
        for elems in {size_bytes // 4 + more for more in (-1, 0, 1)} | {size_bytes // 4 // comm.size}:
            for call in every_call(comm, rng, elems=elems):
                with told(call=call.name, elems=elems):
                    getattr(comm, call.name)(*call.args)
                    check(call)


@case()
def repeated_sums_have_the_bits_of_the_first(comm: Communicator, rng: np.random.Generator) -> None:
    """Large enough to go in turns, in dtypes that are summed in a wider one, divided and not."""
    for dtype, op in (
        ("float32", "sum"),
        ("float32", "avg"),
        ("float64", "max"),
        ("float16", "avg"),
        ("int16", "sum"),
    ):
        for elems in (SHORT, huge_bytes(comm) // np.dtype(dtype).itemsize + 1):
            terms = (100 * rng.standard_normal((comm.size, elems))).astype(dtype)
            first: list[Array] = []
            for lent in (False, False, True, comm.rank == 0):
                send = (lend if lent else put)(comm, terms[comm.rank])
                recv = Canvas(comm, elems, np.dtype(dtype))
                comm.all_reduce(send, recv.buf, op, "tree")
                reduced = Canvas(comm, elems, np.dtype(dtype))
                comm.reduce(send, reduced.buf if comm.rank == 0 else None, op, 0, "tree")
                with told(dtype=dtype, op=op, elems=elems, lent=lent):
                    first = first or [recv.buf.copy()]
                    expected = first[0] if comm.xp is np else first[0].get()
                    recv.check(expected)
                    if comm.rank == 0:
                        reduced.check(expected)
                    assert equal_everywhere(comm, expected.tobytes().hex()[:4000])


@case(lambda way: way.size <= 4, numpy_arrays)
def sums_of_many_bytes_from_and_into_empty_memory_have_the_bits_of_others(
    comm: Communicator, rng: np.random.Generator
) -> None:
    """Large enough for ranks to write each other's results; in place and divided too."""
    shift = 0 if is_one_node(comm) else 8
    for elems, op, in_place in ((13 << 18 >> shift) + 3, "sum", False), ((8 << 20 >> shift) + 5, "avg", True):
        data = (100 * rng.standard_normal(elems)).astype(np.float32) + comm.rank
        expected = np.empty_like(data)
        comm.all_reduce(data, expected, op, "tree")
        send = lend(comm, data)
        recv = send if in_place else lend(comm, np.zeros(elems + 2, np.float32))[1:-1]
        for _ in range(2):  # at first other ranks' memory may not be mapped
            send[...] = data
            comm.all_reduce(send, recv, op, "tree")
            with told(elems=elems, op=op):
                assert np.array_equal(recv, expected)


@case(lambda way: way.size <= 4, numpy_arrays)
def parts_of_many_bytes_are_gathered_whole(comm: Communicator, rng: np.random.Generator) -> None:
    """Large enough for ranks to copy their own part by turns with the others', and past the caches."""
    shift = 0 if is_one_node(comm) else 8
    for elems in ((1 << 20 >> shift) + 3, (2 << 20 >> shift) + 300_001):
        parts = [np.arange(rank, rank + elems, dtype=np.float32) for rank in range(comm.size)]
        expected = np.concatenate(parts)
        for lent, in_place in ((False, False), (True, False), (False, comm.rank == 0), (True, True)):
            made = lend if lent else put
            recv = made(comm, np.zeros(elems * comm.size + 2, np.float32))
            whole = recv[1:-1]
            send = whole[elems * comm.rank : elems * (comm.rank + 1)]
            if in_place:
                send[...] = parts[comm.rank]
            else:
                send = made(comm, parts[comm.rank])
            comm.all_gather(send, whole)
            with told(elems=elems, lent=lent, in_place=in_place):
                assert np.array_equal(whole, expected)
                assert recv[0] == recv[-1] == 0


@case(numpy_arrays)
def what_has_changed_since_a_call_was_made_counts(comm: Communicator, rng: np.random.Generator) -> None:
    for elems in (6 * comm.size, LONG * comm.size):
        n = elems // comm.size
        send, recv = put(comm, np.arange(elems, dtype=np.float32)), put(comm, np.zeros(elems, np.float32))
        total = np.arange(elems, dtype=np.float32) * comm.size

        def call(send: Array = send, recv: Array = recv) -> None:
            comm.all_reduce(send, recv)

        for _ in range(TIMES):
            call()
        same(recv, total)
        with told(elems=elems):
            recv[...] = 0
            recv.flags.writeable = False
            refused(call, BufferMismatchError, "writ")
            recv.flags.writeable = True
            send.flags.writeable = False  # which matters to nobody
            call()
            same(recv, total)

            wide = put(comm, np.zeros(2 * elems, np.float32))
            refused(lambda: call(recv=wide), BufferMismatchError)  # noqa: B023  called at once
            refused(lambda: call(recv=wide[::2]), BufferMismatchError, "contiguous")  # noqa: B023
            refused(lambda: call(recv=wide[:elems].view(np.int32)), BufferMismatchError)  # noqa: B023
            for odd in (list(recv), None):
                name, _ = outcome(lambda: call(recv=odd))  # noqa: B023
                assert name in ("BufferMismatchError", "DTypeError"), name
            call(recv=wide[:elems])  # a view of the right size
            same(wide[:elems], total)
            call(send.reshape(comm.size, n), recv.reshape(n, comm.size))

            # A buffer that lies over the other, one element on.
            wide[: elems + 1] = np.arange(-1, elems)
            call(wide[1 : elems + 1], wide[:elems])
            same(wide[:elems], total)

            # The same objects under another dtype.
            send.flags.writeable = True
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", DeprecationWarning
                )  # NumPy 2.5's, of what users do all the same
                send.dtype = recv.dtype = np.dtype(np.int32)
            send[...] = np.arange(elems)
            call()
            same(recv, np.arange(elems, dtype=np.int32) * comm.size)
    comm_closed_is_closed(comm)


def comm_closed_is_closed(comm: Communicator) -> None:
    """Demand that a closed communicator refuses the calls it knows."""
    group = comm.split(0)
    assert group is not None
    buf = put(comm, np.zeros(6 * comm.size))
    for _ in range(TIMES):
        group.all_reduce(buf, buf)
        group.barrier()
    group.close()
    refused(lambda: group.all_reduce(buf, buf), CommError, "closed")
    refused(group.barrier, CommError, "closed")


@case(compared, compared_before)
def calls_known_on_all_ranks_are_compared_all_the_same(comm: Communicator, rng: np.random.Generator) -> None:
    with untouched(comm) as board:
        count = len(mismatches(board))
    for i in range(count):
        odd = i % comm.size
        with untouched(comm) as board:
            entry = mismatches(board)[i]
            ends = [outcome(entry.other if comm.rank == odd else entry.one) for _ in range(TIMES)]
            with told(mismatch=entry.name, odd=odd):
                for one in ends:
                    check_mismatch(comm, entry, odd, one)
    # What both sides have made for themselves before, with success, does not go together for that.
    buf = put(comm, np.ones(5))
    sums = put(comm, np.zeros(5))
    for _ in range(TIMES):
        comm.all_reduce(buf, sums, "sum")
        comm.all_reduce(buf, sums, "max")
        comm.barrier()
    for _ in range(TIMES):
        name, text = outcome(
            (lambda: comm.all_reduce(buf, sums, "sum"))
            if comm.rank
            else (lambda: comm.all_reduce(buf, sums, "max"))
        )
        assert name == "MismatchError", text
        assert "rank 0 asked for all_reduce float64[5] max" in text, text
        name, text = outcome(
            (lambda: comm.barrier()) if comm.rank else (lambda: comm.all_reduce(buf, sums, "max"))
        )
        assert name == "MismatchError", text
        assert "asked for barrier at repeat_cases.py:" in text, text
        go_on(comm)


@case()
def calls_of_many_sizes_are_all_counted_and_numbered(comm: Communicator, rng: np.random.Generator) -> None:
    group = comm.split(0)
    assert group is not None
    sizes = [int(n) for n in rng.permutation(400)[:300]]
    group.barrier()
    for _ in range(2):
        for turn in range(TIMES):
            for n in sizes[: 300 if turn == 0 else 20]:
                buf = put(comm, np.full(n, 1.0))
                group.all_reduce(buf, buf)
                same(buf, np.full(n, float(comm.size)))
        # 340 calls a round, told while they go on
        calls = group.traffic.calls["all_reduce"]
        assert calls % 340 == 0, calls
    assert group.traffic.calls == {"all_reduce": 680, "barrier": 1}
    lines = group._transport.activity.lines()
    if comm.transport != "nccl":
        assert len(lines) == 64
        assert lines[-1].startswith("all_reduce#681 float64["), lines[-1]
    group.close()


@case()
def groups_with_known_calls_are_let_go(comm: Communicator, rng: np.random.Generator) -> None:
    gone = []
    for _ in range(3):
        group = comm.split(0)
        assert group is not None
        buf = put(comm, np.ones(5))
        for _ in range(TIMES):
            group.all_reduce(buf, buf)
            group.barrier()
        gone.append(weakref.ref(group))
        del group
    for _ in range(70):  # the record of calls keeps the last 64
        comm.barrier()
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


@case(others)
def steps_of_a_ring_send_and_receive_at_once(comm: Communicator, rng: np.random.Generator) -> None:
    after, before = neighbours(comm)
    calls = 0
    comm.traffic.clear()
    for turn in range(TIMES):
        for n in (0, 1, 300, 20_000, huge_bytes(comm) // 8):
            data = rng.standard_normal((comm.size, n))
            for lent in (False, True, comm.rank == 0):
                send, recv = (
                    (lend if lent else put)(comm, data[comm.rank]),
                    Canvas(comm, n, np.dtype(float), lent),
                )
                with told(turn=turn, n=n, lent=lent):
                    comm.send_recv(send, after, recv.buf, before)
                    recv.check(data[before])
                calls += 1
    if comm.size > 1:
        assert comm.traffic.calls["send_recv"] == calls
        assert comm.traffic.calls["send"] == 0
    # In a group, and beside what was started before.
    ones, got, more = (
        put(comm, np.full(9, comm.rank)),
        put(comm, np.zeros(9, int)),
        put(comm, np.zeros(9, int)),
    )
    works = [comm.start.send(ones, after), comm.start.recv(more, before)]
    with comm.grouped():
        comm.send_recv(ones, after, got, before)
    for work in works:
        work.wait()
    same(got, np.full(9, before))
    same(more, np.full(9, before))


@case(others)
def a_step_of_a_ring_refuses_what_does_not_fit(comm: Communicator, rng: np.random.Generator) -> None:
    after, before = neighbours(comm)
    five, recv = put(comm, np.arange(5.0)), Canvas(comm, 5, np.dtype(float))
    refused(lambda: comm.send_recv(five, comm.size, recv.buf, before), CommError, "dst")
    refused(lambda: comm.send_recv(five, after, recv.buf, comm.rank), CommError, "src")
    for _ in range(TIMES):
        comm.send_recv(five, after, recv.buf, before)
        recv.check(np.arange(5.0))
    if comm.transport in ("nccl", "staged") or comm.xp is not np:
        return
    # Rank 0 sends more than the next one expects; only that one is told, and all go on.
    for n in (6, 30_000):
        name, text = outcome(
            lambda n=n: comm.send_recv(  # type: ignore[misc]
                put(comm, np.zeros(n)) if comm.rank == 0 else five, after, recv.buf, before
            )
        )
        assert name == ("BufferMismatchError" if comm.rank == 1 else ""), text
        assert (
            comm.rank != 1 or f"rank 0 sent {8 * n} bytes" in text or f"rank 0 gave {n} elements" in text
        ), text
        comm.barrier()
        comm.send_recv(five, after, recv.buf, before)
        recv.check(np.arange(5.0))


@case(others)
def repeated_messages_of_any_length_arrive_in_order(comm: Communicator, rng: np.random.Generator) -> None:
    after, before = neighbours(comm)
    lengths = [0, 1, 2048, 2049, 5000, 65_535, 65_536, 65_537, 300_000, huge_bytes(comm)]
    for lent in (False, True, comm.rank == 0):
        for turn in range(TIMES):
            data = [rng.integers(0, 250, (comm.size, n)).astype(np.uint8) for n in lengths]
            for content in data:
                send = (lend if lent else put)(comm, content[comm.rank])
                recv = Canvas(comm, content.shape[1], np.dtype(np.uint8), lent)
                with told(lent=lent, turn=turn, size=content.shape[1]):
                    if comm.transport == "nccl":  # where messages of one stream do not pass each other
                        with comm.grouped():
                            comm.send(send, after)
                            comm.recv(recv.buf, before)
                    elif comm.rank % 2 == 0 and comm.rank != comm.size - 1:
                        comm.send(send, after)
                        comm.recv(recv.buf, before)
                    else:
                        work = comm.start.send(send, after)
                        comm.recv(recv.buf, before)
                        work.wait()
                    recv.check(content[before])
    # More short ones than there is room for, while the receiver takes its time.
    if comm.rank == 0:
        for i in range(200):
            comm.send(put(comm, np.full(3, i)), 1)
    elif comm.rank == 1:
        for i in range(200):
            buf = put(comm, np.zeros(3, np.int64))
            comm.recv(buf, 0)
            same(buf, np.full(3, i))
