"""Cases of the communicator contract: groups, traffic counters, barrier, refusals, the end."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from support.comm_kit import (
    Canvas,
    case,
    compared_before,
    get,
    memory_of_a_node,
    operands,
    put,
    reducible,
    refused,
    same,
    told,
)

from lowshard.comm import Communicator
from lowshard.errors import BufferMismatchError, CommError, DTypeError, LowshardError
from lowshard.selftest.fold_cases import plain_fold

Array = Any


def world_ranks(comm: Communicator, group: Communicator) -> list[int]:
    """Return the ranks in `comm` of the members of `group`, by a collective of the group."""
    recv = put(comm, np.zeros(group.size, np.int64))
    group.all_gather(put(comm, np.array([comm.rank])), recv)
    return [int(r) for r in get(recv)]


def check_group(comm: Communicator, group: Communicator, members: list[int]) -> None:
    """Demand that `group` has these members in this order and that its collectives stay inside it."""
    assert group.size == len(members)
    assert group.rank == members.index(comm.rank)
    assert group.xp is comm.xp
    assert group.transport == comm.transport
    assert world_ranks(comm, group) == members
    buf = put(comm, np.array([float(comm.rank), 1.0]))
    group.all_reduce(buf, buf)
    same(buf, np.array([float(sum(members)), float(len(members))]))
    root = put(comm, np.array([comm.rank]))
    group.broadcast(root, group.size - 1)
    same(root, np.array([members[-1]]))
    group.barrier()


# ---- groups


@case()
def split_groups_ranks_by_color(comm: Communicator, rng: np.random.Generator) -> None:
    for colors in (2, 3, comm.size):
        with told(colors=colors):
            group = comm.split(comm.rank % colors)
            assert group is not None
            check_group(comm, group, [r for r in range(comm.size) if r % colors == comm.rank % colors])
            group.close()
    check_group(comm, comm, list(range(comm.size)))


@case()
def split_orders_by_key_then_by_rank(comm: Communicator, rng: np.random.Generator) -> None:
    n = comm.size
    backwards = comm.split(0, key=n - comm.rank)
    assert backwards is not None
    check_group(comm, backwards, list(range(n))[::-1])
    halves = comm.split(0, key=comm.rank % 2)
    assert halves is not None
    check_group(comm, halves, [*range(0, n, 2), *range(1, n, 2)])
    shuffle = [int(k) for k in rng.permutation(n)]
    mixed = comm.split(7, key=10 * shuffle[comm.rank])
    assert mixed is not None
    check_group(comm, mixed, sorted(range(n), key=lambda r: shuffle[r]))
    # Reductions in a fixed order follow the ranks of the group, not those of its parent.
    terms = rng.standard_normal((n, 900)).astype(np.float32)
    buf = put(comm, terms[comm.rank])
    backwards.all_reduce(buf, buf, "sum", "rank")
    same(buf, plain_fold(np.ascontiguousarray(terms[::-1]), "sum", "rank"))
    for group in (backwards, halves, mixed):
        group.close()


@case()
def split_leaves_out_ranks_without_color(comm: Communicator, rng: np.random.Generator) -> None:
    group = comm.split(None if comm.rank == 0 else 5)
    assert (group is None) == (comm.rank == 0)
    if group is not None:
        check_group(comm, group, list(range(1, comm.size)))
        group.close()
    assert comm.split(None) is None
    comm.barrier()


# Threads that share a GPU and do not meet on the host: split() waits for all work of the GPU, also the others'.
@case(lambda way: way.compares or way.transport != "nccl")
def groups_of_groups_work_beside_their_parents(comm: Communicator, rng: np.random.Generator) -> None:
    half = comm.split(comm.rank // 2)
    assert half is not None
    alone = half.split(half.rank, key=-half.rank)
    assert alone is not None
    assert (alone.rank, alone.size) == (0, 1)
    # Ranks of one pair are busy in their group while others use the parent.
    for step in range(5):
        buf = put(comm, np.array([comm.rank + step]))
        half.all_reduce(buf, buf)
        members = [r for r in range(comm.size) if r // 2 == comm.rank // 2]
        same(buf, np.array([sum(members) + step * len(members)]))
        comm.all_reduce(buf, buf, "max")
        alone.all_reduce(buf, buf)
        top = max(sum(r for r in range(comm.size) if r // 2 == p // 2) for p in range(comm.size))
        assert int(get(buf)[0]) >= top
    alone.close()
    half.close()
    comm.barrier()


@case(memory_of_a_node)
def groups_that_nobody_holds_are_let_go(comm: Communicator, rng: np.random.Generator) -> None:
    memory: Any = comm._transport.shared.memory  # type: ignore[attr-defined]
    was_on = gc.isenabled()
    gc.disable()
    try:
        made = []
        for step in range(40):
            group = comm.split(0)
            assert group is not None
            mine, all_of_them = put(comm, np.full(9, step)), put(comm, np.zeros(9 * comm.size, np.int64))
            group.all_gather(mine, all_of_them)
            same(all_of_them, np.full(9 * comm.size, step))
            made.append(weakref.ref(group))
            del group
            comm.barrier()
        assert sum(group() is not None for group in made) < 20
        if comm.rank == 0:  # of those let go by the others too
            memory._take_back()
            assert len(memory._lent) < 30
    finally:
        if was_on:
            gc.enable()
    comm.barrier()


@case()
def messages_of_a_group_do_not_reach_its_parent(comm: Communicator, rng: np.random.Generator) -> None:
    group = comm.split(0)
    assert group is not None
    if comm.size > 1 and comm.transport != "nccl":  # there the order of calls must be one order
        if comm.rank == 0:
            comm.send(put(comm, np.array([1])), 1)
            group.send(put(comm, np.array([2])), 1)
        elif comm.rank == 1:
            first, second = put(comm, np.array([0])), put(comm, np.array([0]))
            group.recv(first, 0)
            comm.recv(second, 0)
            same(first, np.array([2]))
            same(second, np.array([1]))
    comm.barrier()
    group.close()


# ---- traffic


@case()
def traffic_counts_calls_and_bytes_exactly(comm: Communicator, rng: np.random.Generator) -> None:
    n, rank = comm.size, comm.rank
    others = n - 1
    group = comm.split(0)  # one of our own, so that nothing else is counted
    assert group is not None
    assert not group.traffic.calls
    assert (group.traffic.sent_bytes, group.traffic.received_bytes) == (0, 0)

    def buf(elems: int, dtype: str = "float32") -> Array:
        return put(comm, np.zeros(elems, dtype))

    counts = [3 * i for i in range(n)]
    to = [(rank + 2 * j) % 4 for j in range(n)]
    come = [(i + 2 * rank) % 4 for i in range(n)]
    own, mine = counts[rank], to[rank]
    at_root = rank == n - 1
    part = 1000 // n + (rank < 1000 % n)
    starts_to = [sum(to[:j]) for j in range(n)]
    starts_come = [sum(come[:j]) for j in range(n)]
    starts = [sum(counts[:j]) for j in range(n)]
    big, small = buf(1000), buf(5 * n)
    root = n - 1
    # name, call, bytes sent, bytes received
    table: list[tuple[str, Callable[[], object], int, int]] = [
        ("all_gather", lambda: group.all_gather(buf(5), small), 20 * others, 20 * others),
        (
            "all_gather_v",
            lambda: group.all_gather_v(buf(own), buf(sum(counts)), counts, starts),
            4 * own * others,
            4 * (sum(counts) - own),
        ),
        ("all_to_all", lambda: group.all_to_all(small, buf(5 * n)), 20 * others, 20 * others),
        (
            "all_to_all_v",
            lambda: group.all_to_all_v(buf(sum(to)), to, starts_to, buf(sum(come)), come, starts_come),
            4 * (sum(to) - mine),
            4 * (sum(come) - mine),
        ),
        (
            "broadcast",
            lambda: group.broadcast(buf(9, "int8"), root),
            9 * others if at_root else 0,
            0 if at_root else 9,
        ),
        (
            "gather",
            lambda: group.gather(buf(5), small if at_root else None, root),
            0 if at_root else 20,
            20 * others if at_root else 0,
        ),
        (
            "scatter",
            lambda: group.scatter(small if at_root else None, buf(5), root),
            20 * others if at_root else 0,
            0 if at_root else 20,
        ),
        # A reduction counts as a reduce-scatter and the gather that follows it.
        (
            "all_reduce",
            lambda: group.all_reduce(big, big),
            4 * (1000 - part + part * others),
            4 * (1000 - part + part * others),
        ),
        ("reduce_scatter", lambda: group.reduce_scatter(small, buf(5)), 20 * others, 20 * others),
        (
            "reduce",
            lambda: group.reduce(big, big if at_root else None, "sum", root),
            4 * (1000 - part + (0 if at_root else part)),
            4 * (part * others + (1000 - part if at_root else 0)),
        ),
        ("barrier", lambda: group.barrier(), 0, 0),
    ]
    for name, call, sent, received in table:
        with told(call=name):
            group.traffic.clear()
            call()
            call()
            assert dict(group.traffic.calls) == {name: 2}
            assert group.traffic.sent_bytes == 2 * sent
            assert group.traffic.received_bytes == 2 * received
    group.traffic.clear()
    if rank < n // 2 * 2:
        if rank % 2:
            group.recv(buf(7, "int16"), rank - 1)
            assert (group.traffic.sent_bytes, group.traffic.received_bytes) == (0, 14)
        else:
            group.send(buf(7, "int16"), rank + 1)
            assert (group.traffic.sent_bytes, group.traffic.received_bytes) == (14, 0)
        assert dict(group.traffic.calls) == {"recv" if rank % 2 else "send": 1}
    group.close()


@case()
def traffic_does_not_depend_on_order_or_place(comm: Communicator, rng: np.random.Generator) -> None:
    seen = set()
    for elems in (64, 4000):
        for order in ("fast", "tree", "rank"):
            for in_place in (False, True):
                send = put(comm, np.ones(elems, np.float32))
                comm.traffic.clear()
                comm.all_reduce(
                    send, send if in_place else put(comm, np.zeros(elems, np.float32)), "sum", order
                )
                seen.add((elems, comm.traffic.sent_bytes, comm.traffic.received_bytes))
    assert len(seen) == 2


# ---- barrier


@case()
def nobody_leaves_a_barrier_before_all_have_come(comm: Communicator, rng: np.random.Generator) -> None:
    for late in range(comm.size):
        if comm.rank == late:
            time.sleep(0.02)
        came = time.monotonic()  # one clock for all processes of the machine
        comm.barrier()
        left = time.monotonic()
        times = put(comm, np.zeros((comm.size, 2)))
        comm.all_gather(put(comm, np.array([came, left])), times)
        assert get(times)[:, 0].max() <= get(times)[:, 1].min()


# ---- refusals


@case(lambda way: way.compares, compared_before)
def wrong_calls_are_refused_before_anything_moves(comm: Communicator, rng: np.random.Generator) -> None:
    n, rank = comm.size, comm.rank
    good, wide = put(comm, np.zeros(4)), put(comm, np.zeros(4 * n))
    ones, starts = [1] * n, list(range(n))
    other = (rank + 1) % n
    columns = put(comm, np.zeros((4, 6)))[:, ::2]
    cases: list[tuple[str, type[LowshardError], Callable[[], object]]] = [
        ("contiguous", BufferMismatchError, lambda: comm.all_gather(columns, wide)),
        ("contiguous", BufferMismatchError, lambda: comm.all_reduce(columns, columns)),
        ("contiguous", BufferMismatchError, lambda: comm.broadcast(columns.T)),
        ("one dtype", BufferMismatchError, lambda: comm.all_gather(good, wide.astype(np.float32))),
        ("one dtype", BufferMismatchError, lambda: comm.all_reduce(good, good.astype(np.int64))),
        ("size x send", BufferMismatchError, lambda: comm.all_gather(good, wide[1:])),
        ("size x recv", BufferMismatchError, lambda: comm.reduce_scatter(wide, good[1:])),
        ("as many", BufferMismatchError, lambda: comm.all_reduce(good, good[1:])),
        ("as many", BufferMismatchError, lambda: comm.all_to_all(wide, wide[n:])),
        ("array", BufferMismatchError, lambda: comm.all_reduce([1.0], good[:1])),
        ("array", BufferMismatchError, lambda: comm.broadcast(None)),
        ("array", BufferMismatchError, lambda: comm.send(3.0, other) if n > 1 else comm.broadcast(3.0)),
        ("lowshard carries", DTypeError, lambda: comm.broadcast(good.astype(np.complex64))),
        (
            "one entry a rank",
            BufferMismatchError,
            lambda: comm.all_gather_v(good, wide, [4] * (n + 1), starts),
        ),
        ("own recv_counts", BufferMismatchError, lambda: comm.all_gather_v(good, wide, ones, starts)),
        (
            "leaves a buffer",
            BufferMismatchError,
            lambda: comm.all_to_all_v(wide, ones, [4 * n] * n, wide, ones, starts),
        ),
        (
            "leaves a buffer",
            BufferMismatchError,
            lambda: comm.all_to_all_v(wide, ones, starts, wide, [-1] * n, starts),
        ),
        (
            "leaves a buffer",
            BufferMismatchError,
            lambda: comm.all_to_all_v(wide, ones, [-1] * n, wide, ones, starts),
        ),
        *(
            [
                (
                    "do not overlap",
                    BufferMismatchError,
                    lambda: comm.all_gather_v(good, wide, [4] * n, [0] * n),
                ),
                (
                    "do not overlap",
                    BufferMismatchError,
                    lambda: comm.all_to_all_v(wide, ones, starts, wide, ones, [1] * n),
                ),
            ]
            if n > 1
            else []
        ),
        (
            "itself",
            BufferMismatchError,
            lambda: comm.all_to_all_v(wide, ones, starts, wide, [2] * n, [2 * i for i in starts]),
        ),
        ("root", CommError, lambda: comm.broadcast(good, n)),
        ("root", CommError, lambda: comm.gather(good, wide, -1)),
        ("root", CommError, lambda: comm.scatter(wide, good, n)),
        ("root", CommError, lambda: comm.reduce(good, good, "sum", n)),
        ("another rank", CommError, lambda: comm.send(good, rank)),
        ("another rank", CommError, lambda: comm.recv(good, n)),
        ("another rank", CommError, lambda: comm.recv(good, -1)),
        ("op is one of", CommError, lambda: comm.all_reduce(good, good, "median")),  # type: ignore[arg-type]
        ("order is one of", CommError, lambda: comm.all_reduce(good, good, "sum", "ring")),  # type: ignore[arg-type]
        ("color", CommError, lambda: comm.split(-2)),
    ]
    if n > 1:
        odd = put(comm, np.zeros(n + 1))
        cases.append(("divide by size", BufferMismatchError, lambda: comm.all_to_all(odd, odd.copy())))
    if comm.xp is np:
        fixed = np.zeros(4)
        fixed.flags.writeable = False
        foreign = np.zeros(4, np.dtype(np.float64).newbyteorder())
        cases += [
            ("read-only", BufferMismatchError, lambda: comm.all_reduce(good, fixed)),
            ("read-only", BufferMismatchError, lambda: comm.recv(fixed, other)),
            ("a mask", BufferMismatchError, lambda: comm.all_reduce(np.ma.masked_array(good), wide[:4])),
            ("a mask", BufferMismatchError, lambda: comm.recv(np.ma.masked_array(good), other)),
            ("byte order", BufferMismatchError, lambda: comm.broadcast(foreign)),
            ("byte order", BufferMismatchError, lambda: comm.all_reduce(foreign, foreign)),
        ]
    cases += (
        []
        if rank
        else [  # only the root's own buffers are looked at
            ("root .* passes recv", BufferMismatchError, lambda: comm.gather(good, None)),
            ("root .* passes send", BufferMismatchError, lambda: comm.scatter(None, good)),
            ("root's recv holds", BufferMismatchError, lambda: comm.gather(good, wide[1:])),
            ("root's send holds", BufferMismatchError, lambda: comm.scatter(wide[1:], good)),
            ("root's recv holds", BufferMismatchError, lambda: comm.reduce(good, good[1:])),
        ]
    )
    before = comm.traffic.sent_bytes, comm.traffic.received_bytes, dict(comm.traffic.calls)
    for text, cls, call in cases:
        with told(expected=text):
            refused(call, cls, text)
    assert before == (comm.traffic.sent_bytes, comm.traffic.received_bytes, dict(comm.traffic.calls))
    buf = put(comm, np.array([1.0]))
    comm.all_reduce(buf, buf)  # the communicator is as good as before
    same(buf, np.array([float(n)]))


@case()
def a_closed_communicator_refuses_and_closes_again(comm: Communicator, rng: np.random.Generator) -> None:
    with comm.split(0) as group:  # type: ignore[union-attr]
        assert "closed" not in repr(group)
        assert f"rank {group.rank} of {group.size}" in repr(group)
        group.barrier()
    group.close()
    assert "closed" in repr(group)
    buf = put(comm, np.zeros(group.size))
    for call in (
        lambda: group.all_reduce(buf, buf),
        lambda: group.all_gather(buf[:1], buf),
        lambda: group.broadcast(buf),
        lambda: group.send(buf, 0),
        lambda: group.barrier(),
        lambda: group.split(0),
    ):
        refused(call, CommError, "closed")
    comm.barrier()


@case()
def unused_parts_of_buffers_stay_as_they_were(comm: Communicator, rng: np.random.Generator) -> None:
    for row in reducible(comm, "max"):
        with told(dtype=row):
            terms = operands(rng, comm.size, 50, row, "max")
            recv = Canvas(comm, 50, row.numpy)
            comm.all_reduce(put(comm, terms[comm.rank]), recv.buf, "max")
            recv.check_canaries()
            one = Canvas(comm, 1, row.numpy)
            comm.reduce_scatter(put(comm, terms[comm.rank, :1].repeat(comm.size)), one.buf, "max", "tree")
            one.check_canaries()
