"""Cases of the communicator contract: reductions, against the plain fold of the selftest."""

from __future__ import annotations

import numpy as np
from support import mode
from support.comm_kit import (
    Canvas,
    carried,
    case,
    check_reduced,
    get,
    operands,
    put,
    reducible,
    refused,
    same,
    told,
)

from lowshard import dtypes
from lowshard.comm import Communicator
from lowshard.errors import DTypeError
from lowshard.selftest.fold_cases import OPS, ORDERS, plain_fold


def some(comm: Communicator, op: str, few: int = 4) -> list[dtypes.DType]:
    """Return dtypes: others for each operation and each way of moving bytes; all that there are in a full run."""
    return mode.sample(reducible(comm, op), few, f"dtypes {op} {comm.transport} {comm.size}")


def lengths(comm: Communicator, row: dtypes.DType, op: str) -> list[int]:
    """Element counts: the smallest ones, and some on both sides of the change from one message to two."""
    short = mode.sample(sorted({0, 1, comm.size - 1, 37}), 2, f"lengths {row} {op}")
    long = 4096 // row.itemsize_bytes + 13
    return [*short, long] + ([70001] if mode.full() else [])


@case()
def all_reduce_is_the_reduction_of_all_operands(comm: Communicator, rng: np.random.Generator) -> None:
    for op in OPS:
        for row in some(comm, op):
            for n in lengths(comm, row, op):
                terms = operands(rng, comm.size, n, row, op)
                for order in ORDERS:
                    # Every rank chooses for itself whether it works in place.
                    in_place = bool((rng.integers(1 << comm.size) >> comm.rank) & 1)
                    with told(op=op, dtype=row, n=n, order=order, in_place=in_place):
                        recv, send = Canvas(comm, n, row.numpy), put(comm, terms[comm.rank])
                        if in_place:
                            recv.buf[...] = send
                        comm.all_reduce(recv.buf if in_place else send, recv.buf, op, order)
                        check_reduced(recv.buf, terms, op, order)
                        recv.check_canaries()
                        same(send, terms[comm.rank])


@case()
def all_ranks_get_the_same_bits_from_all_reduce(comm: Communicator, rng: np.random.Generator) -> None:
    for row in reducible(comm, "sum"):
        for order in ORDERS:
            with told(dtype=row, order=order):
                terms = operands(rng, comm.size, 700, row, "sum")
                buf = put(comm, terms[comm.rank])
                comm.all_reduce(buf, buf, "sum", order)
                everyones = put(comm, np.zeros((comm.size, 700), row.numpy))
                comm.all_gather(buf, everyones)
                for theirs in get(everyones):
                    same(buf, theirs)


@case()
def reduce_scatter_gives_rank_i_part_i_of_the_reduction(comm: Communicator, rng: np.random.Generator) -> None:
    for op in OPS:
        for row in some(comm, op):
            for n in mode.sample((0, 1, 37, 700), 3, f"parts {row} {op}"):
                terms = operands(rng, comm.size, n * comm.size, row, op)
                part = slice(n * comm.rank, n * (comm.rank + 1))
                for order in ORDERS:
                    in_place = bool((rng.integers(1 << comm.size) >> comm.rank) & 1)
                    with told(op=op, dtype=row, n=n, order=order, in_place=in_place):
                        send = put(comm, terms[comm.rank])
                        if in_place:
                            comm.reduce_scatter(send, send[part], op, order)
                            check_reduced(send[part], terms[:, part], op, order)
                            continue
                        recv = Canvas(comm, n, row.numpy)
                        comm.reduce_scatter(send, recv.buf, op, order)
                        check_reduced(recv.buf, terms[:, part], op, order)
                        recv.check_canaries()
                        same(send, terms[comm.rank])


@case()
def reduce_gives_the_root_the_reduction(comm: Communicator, rng: np.random.Generator) -> None:
    for op in OPS:
        for i, row in enumerate(some(comm, op)):
            for n in lengths(comm, row, op):
                terms = operands(rng, comm.size, n, row, op)
                order = ORDERS[(i + n) % 3]
                for root in range(comm.size) if i == 0 else [i % comm.size]:
                    for in_place in (False, True):
                        with told(op=op, dtype=row, n=n, order=order, root=root, in_place=in_place):
                            send = put(comm, terms[comm.rank])
                            if comm.rank != root:
                                comm.reduce(send, None, op, root, order)
                                same(send, terms[comm.rank])
                                continue
                            recv = Canvas(comm, n, row.numpy)
                            if in_place:
                                recv.buf[...] = send
                            comm.reduce(recv.buf if in_place else send, recv.buf, op, root, order)
                            check_reduced(recv.buf, terms, op, order)
                            recv.check_canaries()


@case()
def fixed_orders_give_the_references_bits_where_orders_differ(
    comm: Communicator, rng: np.random.Generator
) -> None:
    """The operands are such that the two orders, and a wrong one, can be told apart."""
    for name in ("float32", "float64"):
        terms = operands(rng, comm.size, 4000, dtypes.get(name), "sum")
        tree, rank = plain_fold(terms, "sum", "tree"), plain_fold(terms, "sum", "rank")
        if comm.size >= 4:
            assert (tree != rank).mean() > 0.05, "the operands do not tell the orders apart"
        if comm.size >= 3:
            assert (plain_fold(terms[::-1], "sum", "rank") != rank).mean() > 0.05
        for order, expected in (("tree", tree), ("rank", rank)):
            for n in (4000, 200):  # two messages, one message
                with told(dtype=name, order=order, n=n):
                    buf = put(comm, terms[comm.rank, :n])
                    comm.all_reduce(buf, buf, "sum", order)
                    same(buf, expected[:n])
                    part = n // comm.size
                    own = slice(part * comm.rank, part * (comm.rank + 1))
                    recv = put(comm, np.zeros(part, terms.dtype))
                    comm.reduce_scatter(put(comm, terms[comm.rank, : part * comm.size]), recv, "sum", order)
                    same(recv, expected[own])
                    root = comm.size - 1
                    whole = put(comm, np.zeros(n, terms.dtype)) if comm.rank == root else None
                    comm.reduce(put(comm, terms[comm.rank, :n]), whole, "sum", root, order)
                    if whole is not None:
                        same(whole, expected[:n])


@case(lambda way: way.size & (way.size - 1) == 0)
def a_tree_of_trees_is_the_tree_at_powers_of_two(comm: Communicator, rng: np.random.Generator) -> None:
    terms = operands(rng, comm.size, 1500, dtypes.get("float32"), "sum")
    expected = plain_fold(terms, "sum", "tree")
    inner = 1
    while inner <= comm.size:
        with told(inner=inner):
            near = comm.split(comm.rank // inner)
            far = comm.split(comm.rank % inner)
            assert near is not None
            assert far is not None
            buf = put(comm, terms[comm.rank])
            near.all_reduce(buf, buf, "sum", "tree")
            far.all_reduce(buf, buf, "sum", "tree")
            same(buf, expected)
            near.close()
            far.close()
        inner *= 2


@case()
def narrow_floats_accumulate_in_float32_and_round_once(comm: Communicator, rng: np.random.Generator) -> None:
    # In bf16 256 + 1 is 256 again, in fp16 2048 + 1 is 2048, in e4m3 16 + 1 is 16: a narrow sum stays there.
    start = {"bfloat16": 256.0, "float16": 2048.0, "float8_e4m3fn": 16.0, "float8_e5m2": 8.0}
    for row in carried(comm):
        if row.kind != "float" or row.bits >= 32:
            continue
        for order in ORDERS:
            for n in (3, 5000):
                with told(dtype=row, order=order, n=n):
                    terms = np.ones((comm.size, n), row.numpy)
                    terms[0] = row.numpy.type(start[row.name])
                    exact = np.full(n, start[row.name] + comm.size - 1, np.float32).astype(row.numpy)
                    if comm.size >= 4:
                        assert exact[0] != terms[0, 0], "a narrow sum would pass too"
                    buf = put(comm, terms[comm.rank])
                    comm.all_reduce(buf, buf, "sum", order)
                    same(buf, exact)


@case()
def avg_of_integers_is_the_floor(comm: Communicator, rng: np.random.Generator) -> None:
    for row in carried(comm):
        if row.kind not in ("int", "uint"):
            continue
        # Sums that leave 8 bits: an average that summed in its own width would be wrong.
        low, high = (-127, 128) if row.kind == "int" else (0, 256)
        terms = rng.integers(low, high, (comm.size, 200)).astype(row.numpy)
        expected = np.array([int(sum(map(int, c))) // comm.size for c in terms.T], row.numpy)
        if row.kind == "int" and comm.size > 1:
            cut_off = np.array([int(sum(map(int, c)) / comm.size) for c in terms.T], row.numpy)
            assert (cut_off != expected).any(), "floor and truncation cannot be told apart"
        for order in ORDERS:
            with told(dtype=row, order=order):
                recv = put(comm, np.zeros(200, row.numpy))
                comm.all_reduce(put(comm, terms[comm.rank]), recv, "avg", order)
                same(recv, expected)


@case()
def avg_of_floats_divides_the_finished_sum_once(comm: Communicator, rng: np.random.Generator) -> None:
    terms = operands(rng, comm.size, 3000, dtypes.get("float32"), "avg")
    for order in ("tree", "rank"):
        buf = put(comm, terms[comm.rank])
        comm.all_reduce(buf, buf, "avg", order)
        same(buf, plain_fold(terms, "sum", order) / np.float32(comm.size))


@case()
def bools_reduce_as_logic(comm: Communicator, rng: np.random.Generator) -> None:
    terms = rng.random((comm.size, 300)) < np.linspace(0, 1, 300)
    rules = {"sum": terms.any(0), "max": terms.any(0), "prod": terms.all(0), "min": terms.all(0)}
    for op, expected in rules.items():
        for order in ORDERS:
            with told(op=op, order=order):
                buf = put(comm, terms[comm.rank])
                comm.all_reduce(buf, buf, op, order)
                same(buf, expected)


@case()
def what_has_no_meaning_is_refused(comm: Communicator, rng: np.random.Generator) -> None:
    flags = put(comm, np.ones(comm.size, np.bool_))
    scales = [r for r in carried(comm) if r.kind == "scale"]
    wrong = [(flags, "avg")] + [(put(comm, np.ones(comm.size, r.numpy)), op) for r in scales for op in OPS]
    for buf, op in wrong:
        with told(dtype=buf.dtype, op=op):
            for call in (
                lambda buf=buf, op=op: comm.all_reduce(buf, buf, op),
                lambda buf=buf, op=op: comm.reduce_scatter(buf, buf[:1], op),
                lambda buf=buf, op=op: comm.reduce(buf, buf if comm.rank == 0 else None, op),
            ):
                refused(call, DTypeError, str(buf.dtype), op)


@case()
def reductions_take_0d_and_any_shape(comm: Communicator, rng: np.random.Generator) -> None:
    terms = operands(rng, comm.size, 6, dtypes.get("float64"), "sum")
    for order in ORDERS:
        scalar = put(comm, terms[comm.rank, 0].reshape(()))
        comm.all_reduce(scalar, scalar, "max", order)
        same(scalar, terms[:, 0].max().reshape(()))
    grid = put(comm, terms[comm.rank].reshape(2, 3))
    recv = put(comm, np.zeros((3, 1, 2)))
    comm.all_reduce(grid, recv, "sum", "tree")
    same(recv.reshape(-1), plain_fold(terms, "sum", "tree"))
    one = put(comm, np.zeros(()))
    many = operands(rng, comm.size, comm.size, dtypes.get("float64"), "sum")
    comm.reduce_scatter(put(comm, many[comm.rank]), one, "sum", "rank")
    same(one.reshape(1), plain_fold(many, "sum", "rank")[comm.rank : comm.rank + 1])


@case()
def large_reductions_are_exact_where_values_allow(comm: Communicator, rng: np.random.Generator) -> None:
    elems = (400_000 if mode.full() else 80_000) // comm.size * comm.size
    terms = rng.integers(-1000, 1000, (comm.size, elems)).astype(np.float32)
    total, each = terms.sum(0, dtype=np.float64).astype(np.float32), elems // comm.size
    for order in ORDERS:
        buf = put(comm, terms[comm.rank])
        comm.all_reduce(buf, buf, "sum", order)
        same(buf, total)
        part = put(comm, np.zeros(each, np.float32))
        comm.reduce_scatter(put(comm, terms[comm.rank]), part, "sum", order)
        same(part, total[each * comm.rank : each * (comm.rank + 1)])
