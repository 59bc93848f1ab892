"""What only the communicator over several nodes does; every rank checks, rank 0 prints the names of what held.

Usage: run_hierarchy.py NODE_SIZE: the ranks lie on two nodes of so many ranks, the last maybe smaller, because they are
told so.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI
from support import mode
from support.comm_kit import check_reduced, operands, outcome, random_bits, refused, same

from lowshard import comm as lc
from lowshard import dtypes
from lowshard.comm import hierarchy
from lowshard.comm.hierarchy import HierarchicalTransport
from lowshard.comm.mpi import MPITransport
from lowshard.comm.node.node_rendezvous import STAMP
from lowshard.comm.node.node_transport import NodeTransport
from lowshard.errors import CommError, MismatchError, TimedOut

WORLD = MPI.COMM_WORLD
N, RANK = WORLD.size, WORLD.rank
NODE_SIZE = int(sys.argv[1])
HOME, PLACE = divmod(RANK, NODE_SIZE)
LOCAL = list(range(HOME * NODE_SIZE, min(N, (HOME + 1) * NODE_SIZE)))

SHARED_DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int8", "uint64", "bool")


@contextmanager
def made(**env: str) -> Iterator[lc.Communicator]:
    """Make a communicator over all ranks, in an environment with these variables."""
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        comm = lc.from_mpi(WORLD, "cpu")
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    assert isinstance(comm._transport, HierarchicalTransport)
    with comm:
        yield comm


def ranks_of_a_node_are_told_from_the_others() -> None:
    with made() as comm:
        assert comm._transport.seating.nodes == tuple(
            tuple(range(start, min(N, start + NODE_SIZE))) for start in range(0, N, NODE_SIZE)
        )
        assert (comm._transport.node.size, comm._transport.node.rank) == (len(LOCAL), PLACE)
        assert (comm._transport.flat.size, comm._transport.flat.rank) == (N, RANK)
        assert comm._transport._memory.arena.where(comm.empty(10).ctypes.data, 40)[0] >= 0


def all_collectives_work_however_ranks_are_numbered() -> None:
    rng = mode.rng("numbered")
    with made() as comm:
        for keys in (list(range(N, 0, -1)), [r % NODE_SIZE for r in range(N)], list(rng.permutation(N))):
            group = comm.split(0, int(keys[RANK]))
            assert isinstance(group._transport, HierarchicalTransport)
            for elems in (1, 333):
                check_collectives(group, rng, elems)
            group.close()


def check_collectives(comm: lc.Communicator, rng: np.random.Generator, elems: int) -> None:
    rank, n = comm.rank, comm.size
    row = dtypes.get("int32")
    parts = random_bits(rng, (n, elems), row)
    whole = np.zeros((n, elems), np.int32)
    comm.all_gather(parts[rank], whole)
    same(whole, parts)
    counts = [(elems + i) % 5 * i for i in range(n)]  # rank 0's is 0
    displs = [1000 * i for i in range(n)][::-1]
    scattered = np.zeros(1000 * n, np.int32)
    source = random_bits(rng, (n, 5 * n), row)
    comm.all_gather_v(source[rank, : counts[rank]], scattered, counts, displs)
    expected = np.zeros(1000 * n, np.int32)
    for i, (count, displ) in enumerate(zip(counts, displs, strict=True)):
        expected[displ : displ + count] = source[i, :count]
    same(scattered, expected)
    for root in range(n):
        buf = parts[rank].copy()
        comm.broadcast(buf, root)
        same(buf, parts[root])
    for dtype, op in (
        ("int64", "sum"),
        ("bfloat16", "sum"),
        ("int8", "avg"),
        ("float32", "avg"),
        ("bool", "max"),
    ):
        terms = operands(rng, n, elems * n, dtypes.get(dtype), op)
        for order in ("fast", "tree"):
            result = np.zeros(elems * n, terms.dtype)
            comm.all_reduce(terms[rank], result, op, order)  # type: ignore[arg-type]
            check_reduced(result, terms, op, order)
            part = np.zeros(elems, terms.dtype)
            comm.reduce_scatter(terms[rank], part, op, order)  # type: ignore[arg-type]
            check_reduced(part, np.ascontiguousarray(terms.reshape(n, n, elems)[:, rank]), op, order)
            root = elems % n
            result[...] = 0
            comm.reduce(terms[rank], result if rank == root else None, op, root, order)  # type: ignore[arg-type]
            if rank == root:
                check_reduced(result, terms, op, order)


def shared_results_are_one_array_a_node() -> None:
    rng = mode.rng("shared")
    with made() as comm:
        held: list[tuple[np.ndarray, np.ndarray]] = []
        for elems in (1, 3001):
            for name in SHARED_DTYPES:
                row = dtypes.get(name)
                parts = random_bits(rng, (N, 3, elems), row)
                gathered = comm.all_gather(parts[RANK], shared=True)
                assert gathered is not None
                same(gathered, parts.reshape(3 * N, elems))
                held.append((gathered, parts.reshape(3 * N, elems)))
                root = elems % N
                sent = comm.broadcast(parts[root] if root == RANK else None, root, shared=True)
                assert sent is not None
                same(sent, parts[root])
                held.append((sent, parts[root]))
                for op in ("sum", "max") if name == "bool" else ("sum", "avg", "max"):
                    terms = operands(rng, N, elems, row, op)
                    for order in ("fast", "tree"):
                        result = comm.all_reduce(terms[RANK], op=op, order=order, shared=True)  # type: ignore[arg-type]
                        assert result is not None
                        check_reduced(result, terms, op, order)
                        held.append((result, result.copy()))
        for result, expected in held:  # all of them at once: none lies where another does
            same(result, expected)
        for result, _ in held[:: len(held) // 7]:
            assert not result.flags.writeable
            comm.barrier()
            if comm._transport.node.rank == 0:
                ctypes.c_uint8.from_address(result.ctypes.data).value = 1 - HOME  # valid in every dtype
            comm.barrier()
            assert result.reshape(-1)[:1].view(np.uint8)[0] == 1 - HOME
            comm.barrier()


def groups_take_the_way_that_their_ranks_allow() -> None:
    with made() as comm:
        inside = comm.split(HOME, -RANK)
        assert isinstance(inside._transport, NodeTransport)
        across = comm.split(PLACE)
        # With a smaller last node some have nobody there.
        assert type(across._transport) is (MPITransport if PLACE < N - NODE_SIZE else NodeTransport)
        assert across is not None
        # All but one rank, so that nodes differ in size; that rank makes a group of its own.
        most = comm.split(int(RANK == 0))
        assert most is not None
        wanted = NodeTransport if RANK == 0 else MPITransport if N == 3 else HierarchicalTransport
        assert type(most._transport) is wanted
        again = most.split(0, -RANK)
        assert type(again._transport) is wanted
        assert again is not None
        for group, members in (
            (inside, LOCAL[::-1]),
            (across, [r for r in range(N) if r % NODE_SIZE == PLACE]),
            (most, [0] if RANK == 0 else list(range(1, N))),
            (again, [0] if RANK == 0 else list(range(N - 1, 0, -1))),
        ):
            assert (group.rank, group.size) == (members.index(RANK), len(members))
            check_group(group, members)
        assert comm.split(None if RANK else 3) is None or RANK == 0


def check_group(group: lc.Communicator, members: list[int]) -> None:
    """Demand that collectives and messages of a group stay in it."""
    seen = np.zeros((len(members), 500), np.int64)
    group.all_gather(np.full(500, RANK), seen)
    assert seen[:, 0].tolist() == seen[:, -1].tolist() == members
    total = np.zeros(500, np.int64)
    group.all_reduce(np.full(500, RANK), total)
    assert set(total) == {sum(members)}
    if group.size > 1:
        got, right, left = np.zeros(1, np.int64), group.rank + 1, group.rank - 1
        with group.grouped():
            group.send(np.array([RANK]), right % group.size)
            group.recv(got, left % group.size)
        assert got[0] == members[left]


def a_group_on_one_node_outlives_its_parent() -> None:
    comm = lc.from_mpi(WORLD, "cpu")
    group = comm.split(HOME)
    wide = comm.split(0, -RANK)
    assert group is not None
    assert wide is not None
    comm.close()
    check_group(group, LOCAL)
    check_group(wide, list(range(N))[::-1])
    wide.close()
    check_group(group, LOCAL)
    group.close()


def what_a_communicator_has_of_mpi_it_gives_back() -> None:
    with made() as comm:
        pass
    assert comm._transport.flat.mpi_comm == MPI.COMM_NULL
    refused(comm.barrier, CommError, "closed")
    assert comm._transport.node.closed
    with made() as comm:
        group = comm.split(0)
        assert isinstance(group._transport, HierarchicalTransport)
        part = group.split(HOME)
        with group:
            pass
        assert group._transport.flat.mpi_comm == MPI.COMM_NULL
        assert part is not None
        check_group(part, LOCAL)  # whose messages do not need it
        check_group(comm, list(range(N)))


def different_calls_are_a_mismatch_before_any_part_begins() -> None:
    buf = np.ones(5000)
    for check in ("hash", "full"):
        with made(LOWSHARD_CHECK=check) as comm:
            for odd in (0, N - 1):
                op: Any = "max" if odd == RANK else "sum"
                text = f"{odd} asked for all_reduce float64.5000. max"
                refused(lambda comm=comm, op=op: comm.all_reduce(buf, buf, op), MismatchError, text)
            assert comm._transport.node.context.words[STAMP] == 0, "ranks of a node have met"
            buf[...] = 1
            comm.all_reduce(buf, buf)
            assert set(buf) == {float(N)}


def a_rank_that_does_not_come_is_named_as_all_know_it() -> None:
    late = N - 1
    os.environ["LOWSHARD_ON_FAILURE"] = "raise"  # which would end the job
    comm = lc.from_mpi(WORLD, "cpu", timeout_s=2.0)
    comm._transport.check = "off"
    if late != RANK:
        buf = np.ones(500)
        name, text = outcome(lambda: comm.all_reduce(buf, buf))
        assert name == TimedOut.__name__
        assert "all_reduce#1 float64[500]" in text
        # Its node waits for it inside; others wait for their contacts there, who wait for it.
        theirs = [late] if late // NODE_SIZE == HOME else range(NODE_SIZE, N)
        assert any(f"rank {rank} did not come" in text for rank in theirs), text
    WORLD.Barrier()
    comm._transport.failed = True  # nothing waits for the ranks that gave up
    comm.close()


CHECKS: list[Callable[[], Any]] = [
    ranks_of_a_node_are_told_from_the_others,
    all_collectives_work_however_ranks_are_numbered,
    shared_results_are_one_array_a_node,
    groups_take_the_way_that_their_ranks_allow,
    a_group_on_one_node_outlives_its_parent,
    what_a_communicator_has_of_mpi_it_gives_back,
    different_calls_are_a_mismatch_before_any_part_begins,
    a_rank_that_does_not_come_is_named_as_all_know_it,  # last: the ranks are not in step afterwards
]

if __name__ == "__main__":
    warnings.simplefilter("error")
    os.environ["LOWSHARD_NODE_SIZE"] = str(NODE_SIZE)
    hierarchy.WINDOW_BYTES, hierarchy.PIECE_BYTES = 1, 5000
    for check in CHECKS:
        check()
        WORLD.Barrier()
        if RANK == 0:
            print(check.__name__, flush=True)
