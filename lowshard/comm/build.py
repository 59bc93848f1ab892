"""From an mpi4py communicator to ours: which ranks share a node, what they share, and the way they take."""

from __future__ import annotations

import os
import warnings
from functools import cache
from typing import Any

from lowshard.comm.activity import Activity
from lowshard.comm.lookout import Lookout
from lowshard.comm.mailbox import Mailbox
from lowshard.comm.mpi import MPICommunicator, load_mpi
from lowshard.comm.protocol import Communicator
from lowshard.comm.transport import default_timeout_s
from lowshard.errors import CommError

PATH_VARIABLE = "LOWSHARD_CPU_PATH"
WATCH_VARIABLE = "LOWSHARD_WATCH"
_PATHS = ("auto", "window", "mpi")

# By the ranks of the world, in order: a process makes what it shares with a group once.
_memories: dict[tuple[int, ...], Any] = {}


@cache
def activity() -> Activity:
    """Return the record of what this process is in."""
    return Activity()


def build_host(mpi_comm: Any, timeout_s: float | None = None) -> Communicator:
    """Return a communicator over host memory for the ranks of an mpi4py communicator, which it duplicates.

    Collective: all ranks of `mpi_comm` call this. The ranks of one node share memory; LOWSHARD_CPU_PATH=mpi leaves
    everything to MPI, and =window insists on shared memory.

    Raises:
        CommError: LOWSHARD_CPU_PATH says something else, or shared memory is insisted on and cannot be had.
    """
    mpi = load_mpi()
    own = mpi_comm.Dup()
    seconds = default_timeout_s() if timeout_s is None else timeout_s
    lookout = Lookout(_watch(mpi, own), activity())
    node = own.Split_type(mpi.COMM_TYPE_SHARED)
    wish, problem = os.environ.get(PATH_VARIABLE, "auto"), why_no_window()
    rows = own.allgather((wish, problem, node.Get_size()))
    wishes = {row[0] for row in rows}
    if not wishes <= set(_PATHS) or len(wishes) > 1:
        raise CommError(
            f"{PATH_VARIABLE} is one of {', '.join(_PATHS)} and equal on all ranks, got {', '.join(sorted(wishes))}"
        )
    problems = [f"rank {rank}: {row[1]}" for rank, row in enumerate(rows) if row[1]]
    alone = all(row[2] == own.Get_size() for row in rows)
    if not problems and alone and wish != "mpi":
        try:
            return _node_communicator(mpi, own, node, lookout, seconds)
        except CommError as error:  # on all ranks alike
            problems = [str(error)]
    if problems and wish == "window":
        raise CommError(f"{PATH_VARIABLE}=window, but the ranks cannot share memory: {problems[0]}")
    if problems and wish == "auto" and own.Get_rank() == 0:
        warnings.warn(
            f"collectives go through MPI, since the ranks cannot share memory: {problems[0]}", RuntimeWarning,
            stacklevel=3,
        )  # fmt: skip
    return MPICommunicator(own, owned=True, lookout=lookout, timeout_s=seconds, activity=lookout.activity)


def why_no_window() -> str:
    """Return what keeps this process from sharing memory with others of its node, or ""."""
    if not hasattr(os, "memfd_create"):
        return "the system has no anonymous files (memfd_create)"
    try:
        import numba  # noqa: F401
    except ImportError as error:
        return f"Numba cannot be imported ({error}): pip install numba"
    return ""


def world_ranks(mpi: Any, mpi_comm: Any) -> tuple[int, ...]:
    """Return the ranks of the world that are in a communicator, in its order."""
    group, world = mpi_comm.Get_group(), mpi.COMM_WORLD.Get_group()
    ranks = tuple(mpi.Group.Translate_ranks(group, None, world))
    group.Free()
    world.Free()
    return ranks


def _watch(mpi: Any, own: Any) -> Any:
    """Return the side channel of a group, or None where LOWSHARD_WATCH=off says that there is to be none."""
    if os.environ.get(WATCH_VARIABLE, "on") == "off":
        return None
    from lowshard.comm.watch import Watch

    return Watch.start(own, activity())


def _node_communicator(mpi: Any, own: Any, node: Any, lookout: Lookout, timeout_s: float) -> Communicator:
    from lowshard.comm.node.communicator import NodeCommunicator, Place, lend_group
    from lowshard.comm.node.memory import NodeMemory

    ranks = world_ranks(mpi, own)
    memory = _memories.get(ranks)
    if memory is None:
        memory = NodeMemory(own.Get_rank(), node.allgather)
        _memories[ranks] = memory
    mine = None
    if own.Get_rank() == 0:
        block = lend_group(memory, own.Get_size())
        mine = (block.segment, block.offset)
    at = memory.address(0, *node.bcast(mine, 0))
    node.Free()
    members = tuple(range(own.Get_size()))
    mailbox = Mailbox(mpi, own, members, own.Get_rank(), lookout, timeout_s)
    return NodeCommunicator(
        Place(memory, members, at), own.Get_rank(), mailbox, group="0", timeout_s=timeout_s,
        activity=lookout.activity,
    )  # fmt: skip
