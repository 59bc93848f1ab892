"""Cases of the communicator contract: results that the ranks of a node share."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from support.comm_kit import (
    carried,
    case,
    check_reduced,
    compared_before,
    get,
    lend,
    long,
    memory_of_a_node,
    numpy_arrays,
    one_memory,
    operands,
    put,
    random_bits,
    reducible,
    refused,
    same,
    told,
)

from lowshard import dtypes
from lowshard.comm import Communicator
from lowshard.errors import BufferMismatchError, CommError

Array = Any

OPS = ("sum", "avg", "min", "max", "prod")
ORDERS = ("fast", "tree", "rank")


def shares_memory(comm: Communicator) -> bool:
    """Return whether ranks of this transport see one memory: threads, and processes of a node beside MPI."""
    return comm.transport == "loopback" or type(comm._transport).__name__ == "NodeTransport"


def whole(comm: Communicator, rng: np.random.Generator, elems: int) -> tuple[Array, np.ndarray]:
    """Return a shared result of some elements a rank, and what is in it."""
    parts = rng.integers(-99, 99, (comm.size, elems))
    return comm.all_gather(put(comm, parts[comm.rank]), shared=True), parts.reshape(-1)


# ---- values


@case()
def a_shared_all_gather_joins_parts_along_the_first_dim(comm: Communicator, rng: np.random.Generator) -> None:
    for row in carried(comm):
        for shape in ((37,), (2, 3), (0,), (3, 0, 2), (), (1,)):
            with told(dtype=row, shape=shape):
                parts = random_bits(rng, (comm.size, *shape), row)
                send = put(comm, parts[comm.rank])
                got = comm.all_gather(send, shared=True)
                same(got, parts.reshape(-1) if shape == () else np.concatenate(list(parts)))
                same(send, parts[comm.rank])
    parts = random_bits(rng, (comm.size, long(comm)), dtypes.get("float32"))
    for make in (put, lend):
        same(comm.all_gather(make(comm, parts[comm.rank]), shared=True), parts.reshape(-1))


@case()
def a_shared_all_reduce_takes_every_dtype_op_and_order(comm: Communicator, rng: np.random.Generator) -> None:
    for i, op in enumerate(OPS):
        for j, row in enumerate(reducible(comm, op)):
            order = ORDERS[(i + j) % 3]
            for n in (7 * comm.size + 1, 0) if j else (1, 37, comm.size - 1):
                with told(op=op, dtype=row, n=n, order=order):
                    terms = operands(rng, comm.size, n, row, op)
                    send = put(comm, terms[comm.rank])
                    got = comm.all_reduce(send, op=op, order=order, shared=True)  # type: ignore[arg-type]
                    check_reduced(got, terms, op, order)
                    same(send, terms[comm.rank])


@case()
def a_shared_all_reduce_is_as_good_when_it_is_long(comm: Communicator, rng: np.random.Generator) -> None:
    n = long(comm) + 1
    for name, op in (("float32", "sum"), ("bfloat16", "avg"), ("int64", "avg"), ("float8_e5m2", "max")):
        if name not in [row.name for row in carried(comm)]:
            continue
        terms = operands(rng, comm.size, n, dtypes.get(name), op)
        for make, order in ((put, "tree"), (lend, "rank")):
            with told(dtype=name, op=op, order=order, memory=make.__name__):
                got = comm.all_reduce(make(comm, terms[comm.rank]), op=op, order=order, shared=True)  # type: ignore[arg-type]
                check_reduced(got, terms, op, order)
    grid = rng.integers(-9, 9, (comm.size, 4, 1, 3))
    same(comm.all_reduce(put(comm, grid[comm.rank]), shared=True), grid.sum(0))
    same(comm.all_reduce(put(comm, grid[comm.rank, 0, 0, 0]), shared=True), grid.sum(0)[0, 0, 0].reshape(()))


@case()
def a_shared_broadcast_needs_an_array_at_the_root_alone(comm: Communicator, rng: np.random.Generator) -> None:
    for i, row in enumerate(carried(comm)):
        for shape in ((37,), (2, 3), (0, 4), ()):
            for root in range(comm.size) if i == 0 else [i % comm.size]:
                with told(dtype=row, shape=shape, root=root):
                    data = random_bits(rng, shape, row)
                    mine = put(comm, data) if comm.rank == root else None
                    same(comm.broadcast(mine, root, shared=True), data)
    data = random_bits(rng, (3, long(comm)), dtypes.get("int16"))
    for make in (put, lend):
        same(comm.broadcast(make(comm, data) if comm.rank == 0 else None, shared=True), data)


# ---- what they are


@case(numpy_arrays)
def shared_results_are_read_only(comm: Communicator, rng: np.random.Generator) -> None:
    data = rng.standard_normal((comm.size, 6))
    send = put(comm, data[comm.rank])
    for got in (
        comm.all_gather(send, shared=True),
        comm.all_reduce(send, shared=True),
        comm.all_reduce(send.reshape(2, 3), order="rank", shared=True),
        comm.broadcast(send if comm.rank == 0 else None, shared=True),
    ):
        assert got is not None
        assert not got.flags.writeable
        refused(lambda got=got: got.fill(0), ValueError, "read-only")  # type: ignore[misc]
        refused(lambda got=got: comm.all_reduce(got, got), BufferMismatchError, "read-only")  # type: ignore[misc]
        assert send.flags.writeable
        send[0] += 1  # which is no longer in a result
    same(got, data[0])


@case(one_memory)
def shared_results_are_one_memory_on_a_node(comm: Communicator, rng: np.random.Generator) -> None:
    for elems in (5, long(comm)):
        send = put(comm, np.zeros(elems, np.int64))
        for call in (
            lambda send=send: comm.all_gather(send, shared=True),
            lambda send=send: comm.all_reduce(send, shared=True),
            lambda send=send: comm.all_reduce(send, op="avg", shared=True),
            lambda send=send: comm.broadcast(send if comm.rank == 0 else None, shared=True),
        ):
            for writer in range(comm.size):
                got: Any = call()  # type: ignore[no-untyped-call]
                assert not got.any()
                comm.barrier()
                if comm.rank == writer:  # past the array, which is read-only
                    ctypes.c_int64.from_address(got.ctypes.data + 8 * (elems - 1)).value = 77 + writer
                comm.barrier()
                assert int(got[elems - 1]) == 77 + writer
                comm.barrier()


@case()
def shared_results_stay_while_later_calls_run(comm: Communicator, rng: np.random.Generator) -> None:
    """Each rank drops and keeps results as it likes; what one has dropped another may still look at."""
    own = np.random.default_rng(comm.rank)
    kept: list[tuple[Array, np.ndarray]] = []
    for turn in range(40):
        elems = int(rng.integers(0, 3000))
        kind = turn % 3
        if kind == 0:
            kept.append(whole(comm, rng, elems))
        elif kind == 1:
            terms = rng.integers(-99, 99, (comm.size, elems)).astype(np.float32)
            kept.append((comm.all_reduce(put(comm, terms[comm.rank]), shared=True), terms.sum(0)))
        else:
            data = rng.standard_normal(elems)
            root = turn % comm.size
            mine = put(comm, data) if comm.rank == root else None
            kept.append((comm.broadcast(mine, root, shared=True), data))
        while len(kept) > int(own.integers(1, 9)):
            got, expected = kept.pop(int(own.integers(len(kept))))
            assert get(got).tobytes() == expected.astype(got.dtype).tobytes()
            del got
    for got, expected in kept:
        assert get(got).tobytes() == expected.astype(got.dtype).tobytes()


@case()
def parts_of_a_shared_result_keep_it(comm: Communicator, rng: np.random.Generator) -> None:
    got, expected = whole(comm, rng, 400)
    part = got[3:50].reshape(47, 1)
    del got
    for _ in range(10):
        whole(comm, rng, 400)
    same(part, expected[3:50].reshape(47, 1))


@case(memory_of_a_node)
def the_memory_of_dropped_results_is_used_again(comm: Communicator, rng: np.random.Generator) -> None:
    seen: dict[str, set[int]] = {}
    for turn in range(12):
        send = put(comm, np.full(5000, turn, np.int32))
        for name, call in (
            ("all_gather", lambda send=send: comm.all_gather(send, shared=True)),
            ("all_reduce", lambda send=send: comm.all_reduce(send, shared=True)),
            ("broadcast", lambda send=send: comm.broadcast(send if comm.rank == 0 else None, shared=True)),
        ):
            got: Any = call()  # type: ignore[no-untyped-call]
            seen.setdefault(name, set()).add(int(got.ctypes.data))
            del got
            comm.barrier()  # all have dropped it
    for name, places in seen.items():
        assert len(places) <= 2, f"{name} has taken {len(places)} places for one result after the other"


@case()
def shared_results_outlive_their_communicator(comm: Communicator, rng: np.random.Generator) -> None:
    group = comm.split(0)
    assert group is not None
    kept = [whole(group, rng, 700) for _ in range(3)]
    group.close()
    del group
    again = comm.split(0, key=-comm.rank)
    assert again is not None
    for _ in range(5):
        whole(again, rng, 700)
    again.close()
    for got, expected in kept:
        same(got, expected)


@case()
def shared_results_may_be_sent(comm: Communicator, rng: np.random.Generator) -> None:
    """They lie in the memory of one of the ranks, where its peers see it at another address."""
    for elems in (5, long(comm)):
        with told(elems=elems):
            got, expected = whole(comm, rng, elems)
            total = put(comm, np.zeros(expected.size, np.int64))
            comm.all_reduce(got, total)
            same(total, expected * comm.size)
            comm.all_to_all(got, total)
            same(total, np.tile(expected.reshape(comm.size, elems)[comm.rank], comm.size))
            twice = comm.all_reduce(got, shared=True)
            same(comm.all_reduce(twice, shared=True), expected * comm.size**2)
            last = comm.size - 1
            buf = got if comm.rank == last else put(comm, np.zeros(expected.size, np.int64))
            comm.broadcast(buf, last)
            same(buf, expected)


@case()
def groups_share_among_their_own_ranks(comm: Communicator, rng: np.random.Generator) -> None:
    group = comm.split(comm.rank % 2, key=-comm.rank)
    assert group is not None
    members = [r for r in range(comm.size) if r % 2 == comm.rank % 2][::-1]
    data = rng.integers(-9, 9, (comm.size, 1000))
    for _ in range(3):
        total = group.all_reduce(put(comm, data[comm.rank]), shared=True)
        parts = group.all_gather(put(comm, data[comm.rank]), shared=True)
        one = group.broadcast(put(comm, data[comm.rank]) if group.rank == 0 else None, shared=True)
        same(total, data[members].sum(0))
        same(parts, data[members].reshape(-1))
        same(one, data[members[0]])
    group.close()
    same(total, data[members].sum(0))


# ---- what is refused


@case(compared_before)
def shared_calls_refuse_what_makes_no_sense(comm: Communicator, rng: np.random.Generator) -> None:
    buf, recv = put(comm, np.zeros(4)), put(comm, np.zeros(4 * comm.size))
    for text, cls, call in (
        ("pass no recv", BufferMismatchError, lambda: comm.all_gather(buf, recv, shared=True)),
        ("pass no recv", BufferMismatchError, lambda: comm.all_reduce(buf, buf, shared=True)),
        ("shared=True", BufferMismatchError, lambda: comm.all_gather(buf)),
        ("shared=True", BufferMismatchError, lambda: comm.all_reduce(buf)),
        ("array", BufferMismatchError, lambda: comm.broadcast(None, shared=True)),
        ("contiguous", BufferMismatchError, lambda: comm.all_gather(recv[::2], shared=True)),
        ("op is one of", CommError, lambda: comm.all_reduce(buf, op="mean", shared=True)),  # type: ignore[arg-type]
        ("order is one of", CommError, lambda: comm.all_reduce(buf, order="any", shared=True)),  # type: ignore[arg-type]
        ("root is a rank", CommError, lambda: comm.broadcast(buf, comm.size, shared=True)),
    ):
        if comm.size == 1 and text == "contiguous":
            continue
        if comm.rank and text == "array":
            continue  # the root alone knows
        with told(expected=text):
            refused(call, cls, text)
    got, expected = whole(comm, rng, 3)
    same(got, expected)
