"""What only a communicator over several hosts does; every rank checks, rank 0 prints the names of what held.

Usage: run_hosts.py HOST_SIZE: ranks lie on hosts of so many ranks, the last maybe smaller, because they are told so.
"""

from __future__ import annotations

import os
import sys
import warnings

import numpy as np
from mpi4py import MPI
from support.comm_kit import refused

from lowshard import comm as lc
from lowshard.comm.mpi import MPITransport
from lowshard.comm.node.node_transport import NodeTransport
from lowshard.errors import CommError

WORLD = MPI.COMM_WORLD
N, RANK = WORLD.size, WORLD.rank
HOST_SIZE = int(sys.argv[1])
HOME, PLACE = divmod(RANK, HOST_SIZE)
LOCAL = list(range(HOME * HOST_SIZE, min(N, (HOME + 1) * HOST_SIZE)))


def ranks_of_a_host_reach_each_others_memory() -> None:
    with lc.from_mpi(WORLD, "cpu") as comm:
        reach = comm.reach
        assert list(reach.peers) == LOCAL
        assert comm.node_size == (HOST_SIZE if N % HOST_SIZE == 0 else None)
        lent = comm.empty(10, np.int64)
        lent[...] = RANK
        assert reach.maps(lent)
        with comm.turn("reach"):
            told = reach.publish([lent, None], note=RANK)
            assert told.notes == {rank: rank for rank in LOCAL}
            for rank in LOCAL:
                seen = told.view(rank)
                assert seen is not None
                assert seen.view(np.int64).tolist() == [rank] * 10
            reach.barrier()


def groups_take_the_way_that_their_ranks_allow() -> None:
    with lc.from_mpi(WORLD, "cpu") as comm:
        inside = comm.split(HOME, -RANK)
        across = comm.split(PLACE)
        most = comm.split(int(RANK == 0))  # so that hosts differ in size
        assert most is not None
        again = most.split(0, -RANK)
        for group, members in (
            (inside, LOCAL[::-1]),
            (across, [r for r in range(N) if r % HOST_SIZE == PLACE]),
            (most, [0] if RANK == 0 else list(range(1, N))),
            (again, [0] if RANK == 0 else list(range(N - 1, 0, -1))),
        ):
            assert group is not None
            hosts = {rank // HOST_SIZE for rank in members}
            assert type(group._transport) is (NodeTransport if len(hosts) == 1 else MPITransport)
            assert {members[peer] for peer in group.reach.peers} == set(members) & set(LOCAL)
            check_group(group, members)
        assert comm.split(None if RANK else 3) is None or RANK == 0


def check_group(group: lc.Communicator, members: list[int]) -> None:
    """Demand that collectives and messages of a group stay in it."""
    assert (group.rank, group.size) == (members.index(RANK), len(members))
    seen = np.zeros((len(members), 5000), np.int64)
    group.all_gather(np.full(5000, RANK), seen)
    assert seen[:, 0].tolist() == seen[:, -1].tolist() == members
    total = np.zeros(5000, np.int64)
    group.all_reduce(np.full(5000, RANK), total)
    assert set(total) == {sum(members)}
    for elems in (1, 5000):
        got, right, left = np.zeros(elems, np.int64), group.rank + 1, group.rank - 1
        if group.size > 1:
            group.send_recv(np.full(elems, RANK), right % group.size, got, left % group.size)
            assert set(got) == {members[left]}


def a_group_of_one_host_outlives_its_parent() -> None:
    comm = lc.from_mpi(WORLD, "cpu")
    group, wide = comm.split(HOME), comm.split(0, -RANK)
    assert group is not None
    assert wide is not None
    comm.close()
    check_group(group, LOCAL)
    check_group(wide, list(range(N))[::-1])
    wide.close()
    check_group(group, LOCAL)
    group.close()


def what_a_communicator_has_of_mpi_it_gives_back() -> None:
    with lc.from_mpi(WORLD, "cpu") as comm:
        group = comm.split(0)
        assert group is not None
        group.close()
        assert group._transport.mailbox.mpi_comm == MPI.COMM_NULL
    refused(comm.barrier, CommError, "closed")
    with lc.from_mpi(WORLD, "cpu") as comm:
        pass
    assert comm._transport.mailbox.mpi_comm == MPI.COMM_NULL
    assert comm._transport.node.closed


CHECKS = [
    ranks_of_a_host_reach_each_others_memory,
    groups_take_the_way_that_their_ranks_allow,
    a_group_of_one_host_outlives_its_parent,
    what_a_communicator_has_of_mpi_it_gives_back,
]

if __name__ == "__main__":
    warnings.simplefilter("error")
    os.environ["LOWSHARD_NODE_SIZE"] = str(HOST_SIZE)
    for check in CHECKS:
        check()
        WORLD.Barrier()
        if RANK == 0:
            print(check.__name__, flush=True)
