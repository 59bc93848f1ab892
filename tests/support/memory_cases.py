"""Cases of the communicator contract: where buffers lie. Memory of `empty`, private memory, both, odd addresses."""

from __future__ import annotations

import weakref
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from support import mode
from support.comm_kit import (
    LONG,
    SHORT,
    Canvas,
    carried,
    case,
    check,
    every_call,
    get,
    lend,
    memory_of_a_node,
    numpy_arrays,
    operands,
    put,
    random_bits,
    refused,
    same,
    told,
)

from lowshard import dtypes
from lowshard.comm import Communicator
from lowshard.errors import BufferMismatchError, DTypeError
from lowshard.selftest.fold_cases import plain_fold

Array = Any


def mixtures(comm: Communicator) -> dict[str, bool]:
    """Return the ways to spread kinds of memory over ranks, with what falls to this rank."""
    return {"all": True, "rank 0 alone": comm.rank == 0, "all but rank 0": comm.rank != 0}


def segments() -> int:
    """Return how many files of shared memory this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:lowshard")


def overlap(a: Array, b: Array) -> bool:
    """Return whether two arrays share memory."""
    if isinstance(a, np.ndarray):
        return bool(np.may_share_memory(a, b))
    first, second = int(a.data.ptr), int(b.data.ptr)
    return first < second + b.nbytes and second < first + a.nbytes


@case()
def empty_gives_arrays_of_any_shape_and_dtype(comm: Communicator, rng: np.random.Generator) -> None:
    alive = []
    for row in carried(comm):
        for shape in (5, (), (0,), (3, 0, 2), (2, 3), [4, 1], np.int64(3)):
            with told(dtype=row, shape=shape):
                dims = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(shape)
                for dtype in (row.numpy, row.name):
                    buf = comm.empty(shape, dtype)  # type: ignore[arg-type]
                    assert isinstance(buf, comm.xp.ndarray)
                    assert buf.dtype == row.numpy
                    assert buf.shape == dims
                    assert buf.flags.c_contiguous
                    data = random_bits(rng, dims, row)
                    buf[...] = put(comm, data)
                    alive.append((buf, data))
    for buf, data in alive:  # none lies over another
        same(buf, data)
    assert comm.empty(3).dtype == np.float32
    refused(lambda: comm.empty(3, np.complex64), DTypeError, "complex64")
    comm.barrier()


@case()
def empty_refuses_what_cannot_be_and_goes_on(comm: Communicator, rng: np.random.Generator) -> None:
    for shape in (-1, (3, -2), True, (2, True), {2, 3}, {2: 3}, b"ab", "3", 2.0, (2, 1 << 62)):
        with told(shape=shape):
            refused(lambda shape=shape: comm.empty(shape), BufferMismatchError, "0 or more")  # type: ignore[misc,arg-type]
    if comm.xp is np:
        for size_bytes in (1 << 60, 1 << 61):
            with told(size_bytes=size_bytes):
                try:
                    comm.empty(size_bytes, np.uint8)
                except MemoryError:
                    continue
                raise AssertionError("it was given out")
    data = rng.standard_normal((comm.size, LONG))
    recv = lend(comm, np.zeros(data.shape))
    comm.all_gather(lend(comm, data[comm.rank]), recv)
    same(recv, data)


@case()
def memory_of_arrays_that_are_gone_is_given_out_again(comm: Communicator, rng: np.random.Generator) -> None:
    kept = comm.empty(1000, np.int64)
    part = kept[10:20]
    part[...] = put(comm, np.arange(10))
    del kept  # the part keeps all of it
    before = segments()
    for turn in range(60):
        large = comm.empty(8 << 20, np.uint8)  # 480 MiB in all, of which few pages are touched
        small = [comm.empty(100 + turn, np.int64) for _ in range(4)]
        assert not any(overlap(buf, part) for buf in (large, *small))
        assert not any(overlap(large, buf) for buf in small)
        large[:: 1 << 20] = 0xFF
        for buf in small:
            buf[...] = -1
        if turn % 10 == 0:
            total = put(comm, np.zeros(100, np.int64))
            comm.all_reduce(small[0][:100], total)
            same(total, np.full(100, -comm.size))
        del large, small, buf
    assert segments() <= before + comm.size  # all ranks may have made one for the first of the large arrays
    same(part, np.arange(10))


@case()
def collectives_work_from_and_into_empty_memory(comm: Communicator, rng: np.random.Generator) -> None:
    for name, lent in mixtures(comm).items():
        for elems, in_place in ((SHORT, False), (SHORT, True), (LONG, name == "all")):
            calls = every_call(comm, rng, elems=elems, lent=lent, in_place=in_place)
            for call in calls:
                with told(call=call.name, memory=name, elems=elems, in_place=in_place):
                    getattr(comm, call.name)(*call.args)
                    check(call)


@case()
def each_rank_says_for_itself_whether_it_works_in_place(comm: Communicator, rng: np.random.Generator) -> None:
    for who in {0, comm.size - 1}:
        # Open MPI takes another algorithm for the longest, unless it is told of in-place buffers.
        for elems, lent in ((SHORT, False), (LONG, False), (LONG, True), (75_001, False)):
            calls = every_call(comm, rng, elems=elems, lent=lent, in_place=comm.rank == who)
            for call in calls:
                with told(call=call.name, in_place=f"rank {who}", lent=lent, elems=elems):
                    getattr(comm, call.name)(*call.args)
                    check(call)


@case()
def arrays_of_empty_outlive_their_communicator(comm: Communicator, rng: np.random.Generator) -> None:
    data = rng.standard_normal((comm.size, 9000))
    group = comm.split(0)
    assert group is not None
    buf, recv = lend(group, data[comm.rank]), lend(group, np.zeros(data.shape))
    group.close()
    del group
    others = [lend(comm, np.full(9000, -1.0)) for _ in range(5)]
    same(buf, data[comm.rank])
    comm.all_gather(buf, recv)
    same(recv, data)
    for other in others:
        same(other, np.full(9000, -1.0))


@case()
def buffers_may_lie_behind_the_first_segment(comm: Communicator, rng: np.random.Generator) -> None:
    """Segments are of 64 MiB at first and of 256 MiB after; of what is asked for here few pages are touched."""
    for size_bytes in (70 << 20, 300 << 20):
        with told(size_bytes=size_bytes):
            far = comm.empty(size_bytes, np.uint8).view(np.float32)
            elems = LONG
            data = rng.integers(-99, 99, (comm.size, elems)).astype(np.float32)
            for buf in (far[:elems], far[-elems:]):
                buf[...] = put(comm, data[comm.rank])
                recv = Canvas(comm, elems, data.dtype)
                comm.all_reduce(buf, recv.buf)
                recv.check(data.sum(0))
                whole = put(comm, np.zeros(data.shape, data.dtype))
                comm.all_gather(buf, whole)
                same(whole, data)
                comm.all_reduce(buf, buf)
                same(buf, data.sum(0))
    if mode.full():
        whole = comm.empty(20 << 20)
        whole[...] = comm.rank + 1
        comm.all_reduce(whole, whole, order="tree")
        assert bool((whole == comm.size * (comm.size + 1) // 2).all())


@case(numpy_arrays)
def buffers_may_lie_at_any_address(comm: Communicator, rng: np.random.Generator) -> None:

    def at(data: np.ndarray, shift: int) -> np.ndarray:
        room = np.zeros(data.nbytes + 64, np.uint8)
        buf = np.frombuffer(room, data.dtype, data.size, shift)
        buf[...] = data
        return buf

    size, shift = comm.size, 2 * comm.rank + 1
    for name in ("float16", "bfloat16", "float32", "float64", "int64"):
        row = dtypes.get(name)
        for elems in (40, LONG):
            with told(dtype=name, elems=elems):
                terms = operands(rng, size, elems, row, "sum")
                send, recv = at(terms[comm.rank], shift), at(np.zeros_like(terms[0]), shift + 2)
                comm.all_reduce(send, recv, "sum", "tree")
                same(recv, plain_fold(terms, "sum", "tree"))
                whole = at(np.zeros(size * elems, row.numpy), 3)
                comm.all_gather(send, whole)
                same(whole, terms.reshape(-1))
                back = at(np.zeros(elems, row.numpy), 5)
                comm.reduce_scatter(whole, back, "max", "rank")
                same(back, terms[comm.rank])
                counts, starts = [elems] * size, [elems * i for i in range(size)]
                comm.all_to_all_v(send, counts, [0] * size, whole, counts, starts)
                same(whole, terms.reshape(-1))


@case()
def what_comes_later_does_not_reach_results_of_before(comm: Communicator, rng: np.random.Generator) -> None:
    """Ranks write their operands anew as soon as a call is over, and go on with other buffers in the same memory."""
    elems = LONG
    late = np.random.default_rng(comm.rank)
    results = []
    for turn in range(12):
        data = rng.integers(-9, 9, (comm.size, elems)).astype(np.float32)
        buf = (lend if turn % 2 else put)(comm, data[comm.rank])
        recv = put(comm, np.zeros(elems, np.float32))
        comm.all_reduce(buf, recv)
        buf[...] = np.nan  # which nobody may see
        if late.random() < 0.3:
            np.linalg.norm(late.standard_normal((80, 80)))
        results.append((recv, data.sum(0)))
        del buf
    for recv, expected in results:
        assert get(recv).tobytes() == expected.tobytes()


@case(lambda way: way.transport not in ("nccl", "staged"))
def calls_that_are_over_hold_no_buffers(comm: Communicator, rng: np.random.Generator) -> None:
    held: list[tuple[str, weakref.ref[Any]]] = []

    def watch(name: str, *buffers: Any) -> None:
        for buf in buffers:
            while isinstance(buf, np.ndarray) and isinstance(buf.base, np.ndarray):
                buf = buf.base
            if isinstance(buf, np.ndarray):
                held.append((name, weakref.ref(buf)))

    for elems in (SHORT, LONG):
        for call in every_call(comm, rng, elems=elems):
            getattr(comm, call.name)(*call.args)
            watch(call.name, *call.args)
        for call in every_call(comm, rng, elems=elems):
            work = getattr(comm.start, call.name)(*call.args)
            work.wait()
            watch(f"start.{call.name}", *call.args)
        del call, work
        buf = put(comm, np.ones(elems))
        if comm.size > 1:
            other = put(comm, np.ones(elems))
            with comm.grouped():
                comm.send(buf, (comm.rank + 1) % comm.size)
                comm.recv(other, (comm.rank - 1) % comm.size)
            works = [comm.start.send(buf, (comm.rank + 1) % comm.size)]
            works.append(comm.start.recv(other, (comm.rank - 1) % comm.size))
            for work in works:
                work.wait()
            watch("messages", other)
            del other, works, work
        del buf
    comm.barrier()
    alive = {name for name, buf in held if buf() is not None}
    assert not alive, f"buffers are held after {sorted(alive)}"


@case(memory_of_a_node)
def results_are_right_whatever_memory_ranks_map(comm: Communicator, rng: np.random.Generator) -> None:
    """Of a slot's size and past the caches; in mapped memory each rank writes its part of a sum to all results."""
    one, others = (comm.empty, np.empty) if comm.rank == 0 else (np.empty, comm.empty)
    kinds = (
        (np.empty, np.empty),
        (comm.empty, comm.empty),
        (np.empty, comm.empty),
        (one, others),
        (comm.empty, one),
    )
    for part_elems, (send_kind, recv_kind) in product((20_000, 1 << 20), kinds):
        elems = comm.size * part_elems + 13
        terms = operands(rng, comm.size, elems, dtypes.get("float32"), "sum")
        total, mine = plain_fold(terms, "sum", "tree"), terms[comm.rank]
        for _ in range(2):  # segments that are new to others are not mapped at the first time
            send, recv = send_kind(elems, np.float32), recv_kind(elems, np.float32)
            send[...], recv[...] = mine, -1
            comm.all_reduce(send, recv, order="tree")
            same(recv, total)
            comm.all_reduce(send, send, order="tree")
            same(send, total)
        send[...], recv[...] = mine, -1
        comm.reduce(send, recv, root=comm.size - 1, order="tree")
        same(recv, total if comm.rank == comm.size - 1 else np.full_like(recv, -1))
        part = recv_kind(part_elems, np.float32)
        comm.reduce_scatter(send[13:], part, order="tree")
        same(part, plain_fold(terms[:, 13:], "sum", "tree").reshape(comm.size, -1)[comm.rank])
        whole = recv_kind((comm.size, elems), np.float32)
        comm.all_gather(send, whole)
        same(whole, terms)
