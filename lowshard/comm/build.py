"""From an mpi4py communicator to ours: which ranks share a node, what they share, and the way they take."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from lowshard import settings
from lowshard._version import __version__
from lowshard.argument import brief
from lowshard.comm.call import Activity
from lowshard.comm.caller import end_with_mpi
from lowshard.comm.communicator import Communicator
from lowshard.comm.failure import Watch, channels, launcher_channel, meet
from lowshard.comm.messages import Mailbox
from lowshard.comm.mpi import MPITransport, load_mpi, world_ranks
from lowshard.comm.progress import stop
from lowshard.comm.start_barrier import await_all
from lowshard.comm.wait_guard import Lookout
from lowshard.comm.world import world_mismatch
from lowshard.compiled import numba_fault
from lowshard.errors import CommError, LaunchError, LowshardError

if TYPE_CHECKING:
    from lowshard.comm.node.node_transport import NodeTransport

# By the ranks of the world, in order: a process makes what it shares with a group once, and keeps it to its end.
_memories: dict[tuple[int, ...], Any] = {}
_watches: dict[tuple[int, ...], Watch] = {}


_EQUAL = (settings.CPU_PATH, settings.NODE_SIZE, settings.CHECK)
"""What all ranks go by alike."""


@cache
def activity() -> Activity:
    """Return the record of what this process is in."""
    return Activity()


@cache
def _heed_finalize(mpi: Any) -> None:
    """Have `MPI.Finalize()` end all communicators over MPI first: MPI forgets what is noted of COMM_SELF then."""

    def end(*noted: Any) -> None:
        stop()
        end_with_mpi()
        for channel in channels():
            channel.leave()

    mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=end), True)


def build_host(mpi_comm: Any, timeout_s: float | None = None, fault: str = "") -> Communicator:
    """Return a communicator over host memory for the ranks of an mpi4py communicator, which it duplicates.

    Collective: all ranks of `mpi_comm` call this. Ranks of a node share memory, and those of several nodes exchange
    messages between these; LOWSHARD_CPU_PATH=mpi leaves everything to MPI, and =window insists on shared memory.
    LOWSHARD_NODE_SIZE=k, for trials on one machine, takes each k ranks of a node, in rank order, for a node.
    """
    mpi = load_mpi()
    if not mpi.Is_initialized() or mpi.Is_finalized():
        raise CommError(
            "a communicator over MPI is made between MPI.Init(), which mpi4py calls, and MPI.Finalize()"
        )
    _heed_finalize(mpi)
    split_world = world_mismatch(settings.environment(), mpi.COMM_WORLD.Get_size())
    if split_world is not None:
        raise LaunchError(split_world)
    if not isinstance(mpi_comm, mpi.Intracomm) or mpi_comm == mpi.COMM_NULL:
        raise CommError(f"mpi_comm is a communicator of mpi4py, as MPI.COMM_WORLD is; got {brief(mpi_comm)}")
    try:
        seconds = settings.TIMEOUT_S.seconds() if timeout_s is None else timeout_s
    except LowshardError as error:  # the others are told where all have come
        fault, seconds = fault or str(error), settings.TIMEOUT_S.seconds({})
    await_all(mpi_comm, seconds)
    own = mpi_comm.Dup()
    wish, size = settings.CPU_PATH.text(), settings.NODE_SIZE.text()
    said = [setting.text() for setting in _EQUAL]
    rows = own.allgather((*said, __version__, why_no_window(), fault or _choice_fault()))
    wrong = _first_wrong(rows)
    if wrong:
        own.Free()
        raise CommError(wrong)
    lookout = Lookout(_watch(mpi, own), activity())
    problems = [f"rank {rank}: {row[-2]}" for rank, row in enumerate(rows) if row[-2]]
    node = own.Split_type(mpi.COMM_TYPE_SHARED)
    if size:
        whole, node = node, node.Split(node.Get_rank() // int(size))
        whole.Free()
    homes = own.allgather(node.bcast(own.Get_rank(), 0))
    alone, memory, at = len(set(homes)) == 1, None, 0
    if not problems and wish != "mpi" and (alone or len(set(homes)) < len(homes)):
        memory, at, problems = _meeting_place(mpi, own, node)
        memory = None if problems else memory
    else:
        node.Free()
    if problems and wish == "window":
        own.Free()
        raise CommError(f"{settings.CPU_PATH.name}=window, but the ranks cannot share memory: {problems[0]}")
    if problems and wish == "auto" and own.Get_rank() == 0:
        warnings.warn(
            f"collectives go through MPI, since the ranks cannot share memory: {problems[0]}", RuntimeWarning,
            stacklevel=3,
        )  # fmt: skip
    if memory is not None and alone:
        mailbox = Mailbox(mpi, own, range(own.Get_size()), own.Get_rank(), lookout, seconds)
        return Communicator(_node_transport(memory, at, mailbox, "0"))
    flat = MPITransport(own, owned=True, lookout=lookout, timeout_s=seconds, activity=lookout.activity)
    if memory is not None:
        local = [rank for rank, home in enumerate(homes) if home == homes[flat.rank]]
        flat.mailbox.reserve(3, inner=True)
        mailbox = flat.mailbox.part(local, local.index(flat.rank), 2)
        flat.share_node(_node_transport(memory, at, mailbox, "0/node"), homes)
    elif problems and wish != "mpi":
        flat.why = f"they cannot share memory: {problems[0]}"
    else:
        flat.why = (
            f"{settings.CPU_PATH.name}=mpi says so" if wish == "mpi" else "no node has several of the ranks"
        )
    return Communicator(flat)


def _choice_fault() -> str:
    """Return what is wrong with a setting that only this rank goes by, or ""."""
    try:
        for setting in (
            settings.CROSS_MEMORY, settings.HUGE_PAGES, settings.KERNELS, settings.SHIPPED_CODE,
        ):  # fmt: skip
            setting.choice()
    except LowshardError as error:
        return str(error)
    return ""


def why_no_window() -> str:
    """Return what keeps this process from sharing memory with others of its node, or ""."""
    if not hasattr(os, "memfd_create"):
        return "the system has no anonymous files (memfd_create)"
    fault = numba_fault()
    return f"Numba cannot be imported ({fault}): pip install numba" if fault else ""


def _watch(mpi: Any, own: Any) -> Watch | None:
    """Return the failure channel as a group sees it; None for a group of one.

    Collective: all ranks of `own` call this. All communicators over the same ranks have one, however many are made
    and closed.
    """
    ranks = world_ranks(mpi, own)
    if len(ranks) == 1:
        return None
    if ranks not in _watches:
        channel = launcher_channel(mpi.COMM_WORLD.Get_rank())
        if not all(own.allgather(channel is not None)):
            channel = meet(own, ranks)
        assert channel is not None
        _watches[ranks] = Watch(channel, ranks, activity())
    _watches[ranks].channel.renew()
    return _watches[ranks]


def _first_wrong(rows: Sequence[tuple[str, ...]]) -> str:
    """Return what is wrong with a rank's arguments or with what the ranks' environments say, or "".

    Ranks with different values would wait for each other in different places.
    """
    for rank, (*_, fault) in enumerate(rows):
        if fault:
            return f"rank {rank}: {fault}"
    sizes = {"", *(size for _, size, *_ in rows if size.isdecimal() and int(size) > 0)}
    for column, setting in enumerate(_EQUAL):
        values, known = {row[column] for row in rows}, set(setting.values.split("|"))
        rule = f"one of {', '.join(setting.values.split('|'))}"
        if setting is settings.NODE_SIZE:
            known, rule = sizes, "a positive number of ranks"
        if not values <= known or len(values) > 1:
            said = ", ".join(map(repr, sorted(values)))
            return f"{setting.name} is {rule} and equal on all ranks, got {said}"
    versions = [row[len(_EQUAL)] for row in rows]
    for rank, version in enumerate(versions):
        if version != versions[0]:
            return (
                f"rank 0 runs lowshard {versions[0]}, rank {rank} lowshard {version}, and they may not understand each "
                "other; install one version on all hosts"
            )
    return ""


def _meeting_place(mpi: Any, own: Any, node: Any) -> tuple[Any, int, list[str]]:
    """Return what the processes of this node share, a block there that all of them use, and what is in the way.

    Collective: all ranks of `own` call this; what is in the way is the same on all of them. `node` is freed.
    """
    from lowshard.comm.node.node_group import lend_group
    from lowshard.comm.node.node_memory import NodeMemory
    from lowshard.comm.node.node_transport import Lent

    ranks, problem, at = world_ranks(mpi, node), "", 0
    memory = _memories.get(ranks)
    try:
        if memory is None:
            memory = NodeMemory(node.Get_rank(), node.allgather)
            _memories[ranks] = memory
        lend = partial(lend_group, memory, node.Get_size()) if node.Get_rank() == 0 else None
        lent = Lent(memory, lend)
        at = memory.address(0, *lent.checked([node.bcast(lent.facts, 0)])[0])
    except CommError as error:  # on all ranks of the node alike
        problem = str(error)
    node.Free()
    return memory, at, [said for said in own.allgather(problem) if said]


def _node_transport(memory: Any, at: int, mailbox: Mailbox, group: str) -> NodeTransport:
    """Return the transport of all of a mailbox's ranks, which are all processes of a node, in its order."""
    from lowshard.comm.node.node_transport import NodeTransport

    return NodeTransport(
        memory, range(len(mailbox.ranks)), at, mailbox.rank, mailbox, group=group,
        timeout_s=mailbox.timeout_s, activity=mailbox.lookout.activity,
    )  # fmt: skip
