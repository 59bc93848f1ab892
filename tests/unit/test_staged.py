"""The staged communicator over a stand-in for the GPU: the case table, pieces, slots, streams, messages."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from support import mode
from support.case_table import some_cases
from support.comm_cases import Way, cases_for, run_case
from support.comm_kit import operands, put, refused, same
from support.device_stand_in import DEFAULT_STREAM
from support.nccl_stand_in import Host, run_staged

from lowshard import comm as lc
from lowshard import dtypes
from lowshard.comm import Communicator
from lowshard.comm.nccl_wait import InThread
from lowshard.comm.pinned import Round, Slots
from lowshard.comm.staged import staged_communicator
from lowshard.errors import BufferMismatchError, CommError, TimedOut


@pytest.mark.parametrize(
    ("name", "size"),
    [
        (name, size)
        for size in ([1, 2, 3, 4] if mode.full() else mode.sample([2, 3], 1, "staged"))
        for name in cases_for(Way(size, "staged"), some_cases(20, "staged"))
    ],
)
def test_the_contract_holds_over_staged_loopback(name: str, size: int) -> None:
    # Buffers of most cases take several pieces at size 2, and one at size 3.
    slot_bytes = {1: 1 << 20, 2: 3000, 3: 1 << 20, 4: 20_000}[size]
    run_staged(size, lambda comm: run_case(name, comm), slot_bytes)


def staged(comm: Communicator) -> tuple[Communicator, Host]:
    """Return a communicator of a test with the device behind it."""
    assert comm.transport == "staged"
    host = comm._transport._binding.select.__self__  # type: ignore[attr-defined]
    assert isinstance(host, Host)
    return comm, host


def copies(host: Host, call: Any) -> Counter[str]:
    """Return how often memory is copied by a call, by direction."""
    start = len(host.log)
    call()
    return Counter(entry[0] for entry in host.log[start:] if entry[0] in ("fetch", "store"))


# ---- pieces: every collective, at lengths around the size of a piece


def lengths(width: int, slot_bytes: int) -> list[int]:
    piece = slot_bytes // (width * 8)
    return [0, 1, piece - 1, piece, piece + 1, 2 * piece, 3 * piece + 2]


def test_every_collective_is_exact_at_lengths_around_a_piece() -> None:
    n, slot_bytes = 3, 480

    def data(rank: int, elems: int, salt: int) -> np.ndarray:
        return np.random.default_rng([rank, elems, salt]).integers(0, 1 << 40, elems)

    def check(comm: Communicator) -> None:
        me = comm.rank
        for width in (1, n, n + 1, 2 * n):
            for k in lengths(width, slot_bytes):
                everyone = [data(r, k, 1) for r in range(n)]
                recv = np.zeros(n * k, np.int64)
                comm.all_gather(everyone[me], recv)
                same(recv, np.concatenate(everyone))
                wide = [data(r, n * k, 2) for r in range(n)]
                recv[...] = 0
                comm.all_to_all(wide[me], recv)
                same(recv, np.concatenate([w[k * me : k * (me + 1)] for w in wide]))
                part = np.zeros(k, np.int64)
                comm.reduce_scatter(wide[me], part, "max", "tree")
                same(part, np.maximum.reduce(wide)[k * me : k * (me + 1)])
                comm.all_reduce(everyone[me], part)
                same(part, np.sum(everyone, axis=0))
                for root in (0, n - 1):
                    buf = everyone[me].copy()
                    comm.broadcast(buf, root)
                    same(buf, everyone[root])
                    comm.gather(everyone[me], recv if me == root else None, root)
                    if me == root:
                        same(recv, np.concatenate(everyone))
                    comm.scatter(wide[me] if me == root else None, part, root)
                    same(part, wide[root][k * me : k * (me + 1)])
                    comm.reduce(everyone[me], part if me == root else None, "min", root)
                    if me == root:
                        same(part, np.minimum.reduce(everyone))
                if me == 0:
                    comm.send(everyone[0], 1)
                elif me == 1:
                    comm.recv(buf, 0)
                    same(buf, everyone[0])

    run_staged(n, check, slot_bytes)


def test_uneven_counts_take_as_many_rounds_as_the_longest_part_of_any_pair() -> None:
    def check(comm: Communicator) -> None:
        # Rank 2 neither sends nor receives much, but takes part in every round.
        counts = [[0, 100, 1], [3, 0, 0], [0, 2, 0]]
        to, come = counts[comm.rank], [line[comm.rank] for line in counts]
        send = np.arange(sum(to)) + 1000 * comm.rank
        recv = np.zeros(sum(come), np.int64)
        starts, places = np.cumsum([0, *to[:-1]]), np.cumsum([0, *come[:-1]])
        comm.all_to_all_v(send, to, list(starts), recv, come, list(places))
        expected = []
        for peer, line in enumerate(counts):
            first = 1000 * peer + sum(line[: comm.rank])
            expected.append(np.arange(first, first + line[comm.rank]))
        same(recv, np.concatenate(expected).astype(np.int64))
        parts = [50, 0, 7]
        whole = np.zeros(57, np.int64)
        comm.all_gather_v(np.arange(parts[comm.rank]) + 100 * comm.rank, whole, parts, [7, 0, 0])
        same(whole, np.concatenate([np.arange(200, 207), np.arange(50)]))

    run_staged(3, check, slot_bytes=256)


def test_a_part_that_overlaps_the_result_is_sent_as_it_was() -> None:
    def check(comm: Communicator) -> None:
        board = np.arange(60) + 100 * comm.rank
        whole = np.concatenate([np.arange(5, 35) + 100 * r for r in range(2)])
        comm.all_gather(board[5:35], board)
        same(board, whole)

    run_staged(2, check, slot_bytes=64)


@pytest.mark.parametrize("order", ["tree", "rank", "fast"])
def test_sums_have_the_bits_of_the_hosts_communicator(order: Any, rng: np.random.Generator) -> None:
    rows = [dtypes.get(name) for name in ("float32", "float16", "bfloat16", "float64", "int32")]
    terms = {row.name: operands(rng, 3, 700, row, "sum") for row in rows}

    def reduce(comm: Communicator) -> list[bytes]:
        results = []
        for row in rows:
            for op in ("sum", "avg", "min"):
                out = put(comm, terms[row.name][comm.rank])
                comm.all_reduce(out, out, op, order)  # type: ignore[arg-type]
                results.append(out.tobytes())
        return results

    assert run_staged(3, reduce, slot_bytes=1000) == lc.run_loopback(3, reduce)


def test_neighbouring_parts_are_copied_at_once() -> None:
    def check(comm: Communicator) -> None:
        _, host = staged(comm)
        send, recv = np.zeros(4), np.zeros(12)
        assert copies(host, lambda: comm.all_gather(send, recv)) == {"fetch": 1, "store": 1}
        assert copies(host, lambda: comm.all_gather(recv[4 * comm.rank :][:4], recv))["store"] == 1 + (
            comm.rank == 1
        )
        assert copies(host, lambda: comm.all_reduce(recv, recv)) == {"fetch": 1, "store": 1}
        assert copies(host, lambda: comm.broadcast(recv, 1)) == {"fetch" if comm.rank == 1 else "store": 1}
        assert copies(host, lambda: comm.reduce(recv, recv if comm.rank == 0 else None)) == (
            {"fetch": 1, "store": 1} if comm.rank == 0 else {"fetch": 1}
        )
        assert not copies(host, comm.barrier)

    run_staged(3, check)


# ---- memory and streams


def test_page_locked_memory_is_made_on_first_use_and_bounded() -> None:
    def check(comm: Communicator) -> None:
        _, host = staged(comm)
        comm.barrier()
        assert not host.locked
        buf = np.zeros(10)
        comm.all_reduce(buf, buf)
        comm.all_reduce(buf, buf)
        assert host.locked_bytes == [4096, 4096]
        large = np.zeros(100_000)
        for _ in range(2):
            comm.all_reduce(large, large)
        assert host.locked_bytes == [4096, 4096, 1 << 16, 1 << 16]
        assert [m.nbytes for m in host.locked] == [1 << 16, 1 << 16]
        comm.close()
        assert not host.locked

    run_staged(2, check, slot_bytes=1 << 16)


def test_only_the_callers_stream_is_waited_for() -> None:
    def check(comm: Communicator) -> None:
        _, host = staged(comm)
        mine, other = host.new_stream(), host.new_stream()
        ran: list[str] = []
        other.push(lambda: ran.append("other"))
        host.default.push(lambda: ran.append("default"))
        buf = np.full(10, comm.rank + 1.0)
        with mine:
            mine.push(lambda: ran.append("mine"))
            comm.all_reduce(buf, buf)
        assert ran == ["mine"]
        same(buf, np.full(10, 3.0))
        assert {entry[1] for entry in host.log if entry[0] in ("fetch", "store")} == {mine.ptr}

    run_staged(2, check)


def test_a_slot_that_another_stream_still_reads_is_waited_for() -> None:
    def check(comm: Communicator) -> None:
        _, host = staged(comm)
        streams = [host.new_stream() for _ in range(3)]
        bufs = [np.full(300, float(i + comm.rank)) for i in range(12)]
        for i, buf in enumerate(bufs):
            with streams[i % 3]:
                comm.broadcast(buf, i % 2) if i % 3 else comm.all_reduce(buf, buf)
        for i, buf in enumerate(bufs):
            same(buf, np.full(300, float(i + i % 2 if i % 3 else 2 * i + 1)))

    run_staged(2, check, slot_bytes=512)  # run_staged looks at every slot's copies


def test_the_host_works_on_one_slot_while_the_device_fills_the_other() -> None:
    host = Host()
    slots = Slots(host.binding(with_nccl=False), lambda n: np.empty(n, np.uint8), 10.0)
    device = np.arange(40, dtype=np.uint8)
    at = host.pointer(device)
    seen: list[list[int]] = []
    fetched: list[int] = []

    def work(slot: np.ndarray) -> None:
        seen.append(slot.tolist())
        fetched.append(sum(entry[0] == "fetch" for entry in host.log))
        slot += 100

    rounds = [Round(10, ((at + 10 * i, 0, 10),), work, ((at + 10 * i, 0, 10),)) for i in range(4)]
    slots.run(rounds, "test")
    assert seen == np.arange(40).reshape(4, 10).tolist()
    assert fetched == [2, 3, 4, 4]
    assert host.default.queue, "the last copies back are not waited for"
    same(device, np.arange(100, 140, dtype=np.uint8))
    slots.close()
    assert not host.default.queue


def test_a_round_that_fails_leaves_slots_that_can_be_used_again() -> None:
    host = Host()
    slots = Slots(host.binding(with_nccl=False), lambda n: np.empty(n, np.uint8), 10.0)
    device = np.zeros(20, np.uint8)
    at = host.pointer(device)

    def fail(slot: np.ndarray) -> None:
        raise CommError("the peer is gone")

    def fill(slot: np.ndarray) -> None:
        slot[...] = 3

    rounds = [Round(10, ((at + 10 * i, 0, 10),), fail, ()) for i in range(2)]
    with pytest.raises(CommError, match="gone"):
        slots.run(rounds, "test")
    slots.run([Round(10, (), fill, ((at + 10 * i, 0, 10),)) for i in range(2)], "test")
    host.synchronize()
    same(device, np.full(20, 3, np.uint8))


def test_a_stream_that_does_not_get_there_in_time_is_an_error() -> None:
    (beside,) = lc.loopback(1, timeout_s=0.05)
    host = Host()
    comm = staged_communicator(beside, host.binding(with_nccl=False))
    host.default.asked = lambda up_to: False  # type: ignore[method-assign]
    refused(lambda: comm.all_reduce(np.zeros(3), np.zeros(3)), TimedOut, "all_reduce: the copy of buffers")


# ---- life


def test_it_has_a_name_a_control_and_no_need_of_nccl() -> None:
    def check(comm: Communicator) -> None:
        assert comm.transport == "staged"
        assert comm.control.transport == "loopback"
        assert comm.timeout_s == comm.control.timeout_s
        far = np.zeros(4)
        _, host = staged(comm)
        comm.broadcast(np.zeros(4))  # known from now on
        host.device_of = lambda array: 3 if np.shares_memory(array, far) else 0
        refused(lambda: comm.broadcast(far), BufferMismatchError, "device 0", "device 3")
        with comm.split(0) as group:  # type: ignore[union-attr]
            assert group.transport == "staged"
            assert group.control is not comm.control
        refused(group.control.barrier, CommError, "closed")

    run_staged(2, check)


def test_leaving_a_with_block_by_an_error_leaves_the_hosts_so_too() -> None:
    (beside,) = lc.loopback(1)
    comm = staged_communicator(beside, Host().binding(with_nccl=False))
    with pytest.raises(ZeroDivisionError), comm:
        raise ZeroDivisionError
    assert beside._transport.failed
    assert beside._transport.closed


# ---- messages and started calls


def test_messages_of_another_length_are_refused_also_where_they_take_several_pieces() -> None:
    piece = 8

    def check(comm: Communicator) -> None:
        for sent, expected in (
            (3, 4),
            (piece, piece + 1),
            (2 * piece, piece),
            (3 * piece, 2 * piece),
            (0, 1),
        ):
            group = comm.split(0)
            assert group is not None
            buf = np.zeros(sent if comm.rank == 0 else expected)
            if comm.rank == 0:
                group.send(buf, 1)
            else:
                refused(lambda g=group, b=buf: g.recv(b, 0), BufferMismatchError, "elements")
            comm.barrier()

    run_staged(2, check, slot_bytes=8 * piece)


def test_started_calls_run_in_order_on_a_stream_of_their_own() -> None:
    def check(comm: Communicator) -> None:
        _, host = staged(comm)
        bufs = [np.full(50 + i, comm.rank + 1.0) for i in range(4)]
        user = host.new_stream()
        ran: list[str] = []
        with user:
            user.push(lambda: ran.append("before"))
            works = [comm.start.all_reduce(buf, buf) for buf in bufs]
        for work, buf in zip(works, bufs, strict=True):
            assert work.wait() is None
            same(buf, np.full(len(buf), 3.0))
        assert ran == ["before"]
        used = {entry[1] for entry in host.log if entry[0] in ("fetch", "store")}
        assert len(used) == 1
        assert not used & {DEFAULT_STREAM, user.ptr}
        # The callers' stream waits for each call; the side stream did for the caller's.
        waits = [entry[1] for entry in host.log if entry[0] == "wait"]
        assert waits.count(DEFAULT_STREAM) == 4
        assert all(device == 0 for _, device in host.selected)
        assert host.selected
        same(comm.start.all_reduce(bufs[0], shared=True).wait(timeout_s=20.0), np.full(50, 6.0))

    run_staged(2, check, slot_bytes=256)


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "send_recv", "grouped"])
def test_the_next_call_follows_on_the_device_what_was_started(name: str) -> None:
    def check(comm: Communicator) -> None:
        _, host = staged(comm)
        peer, send, total, back = 1 - comm.rank, np.full(50, 1.0), np.zeros(50), np.zeros(100)
        work = comm.start.all_reduce(send, total)
        if name == "send_recv":
            comm.send_recv(total, peer, back[:50], peer)
        elif name == "grouped":
            with comm.grouped():
                comm.send(total, peer)
                comm.recv(back[:50], peer)
        else:
            getattr(comm, name)(total, back[:50] if name == "all_to_all" else back)
        same(back[:50], np.full(50, 2.0))
        # Of what the caller's stream is given the first thing is to wait for the last of the started call.
        (side,) = {entry[1] for entry in host.log if entry[0] == "store"} - {DEFAULT_STREAM}
        last = [entry[2] for entry in host.log if entry[:2] == ("record", side)][-1]
        mine = [entry for entry in host.log if entry[1] == DEFAULT_STREAM]
        assert mine[0][0] == "record", "what the side stream waits for"
        assert mine[1] == ("wait", DEFAULT_STREAM, last)
        work.wait()

    run_staged(2, check, slot_bytes=256)


def test_a_thread_whose_current_device_is_another_one_stages_on_the_communicators() -> None:
    host = Host(device=1)
    host.select(1)
    comm = staged_communicator(lc.loopback(1)[0], host.binding(with_nccl=False), device=1)
    buf, started = np.arange(3.0), np.arange(3.0)

    def work() -> int:
        comm.all_reduce(buf, buf)
        comm.start.all_reduce(started, started).wait()
        return host.current

    thread = InThread(work)
    thread._thread.join(10.0)
    assert thread.result() == 0, "the thread's own device is put back"


def test_started_messages_wait_for_one_rank_only() -> None:
    def check(comm: Communicator) -> None:
        ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        send, recv = np.full(300, float(comm.rank)), np.zeros(300)
        came = comm.start.recv(recv, behind)
        total = np.ones(3)
        comm.all_reduce(total, total)  # the message is not in turn with it
        sent = comm.start.send(send, ahead)
        came.wait(timeout_s=20.0)
        sent.wait(timeout_s=20.0)
        assert came.done()
        same(recv, np.full(300, float(behind)))
        same(total, np.full(3, 3.0))

    run_staged(3, check, slot_bytes=256)
    for thread in threading.enumerate():
        if thread.name in ("lowshard send", "lowshard recv"):
            thread.join(5.0)
            assert not thread.is_alive()
