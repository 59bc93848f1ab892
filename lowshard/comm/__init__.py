"""Communicators over raw buffers: threads of one process, MPI on NumPy, NCCL on CuPy."""

from __future__ import annotations

from typing import Any, Literal

from lowshard.argument import choice, whole
from lowshard.comm.agreement import collective_step, share_text
from lowshard.comm.caller import Traffic
from lowshard.comm.check import deadline_s
from lowshard.comm.communicator import Communicator
from lowshard.comm.loopback import loopback, run_loopback
from lowshard.comm.work import Work
from lowshard.errors import CommError, LowshardError
from lowshard.settings import NCCL_REDUCE16

__all__ = [
    "Communicator",
    "Traffic",
    "Work",
    "collective_step",
    "from_mpi",
    "from_nccl",
    "loopback",
    "run_loopback",
    "share_text",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def from_mpi(
    mpi_comm: Any, device: Literal["auto", "cpu", "cuda"] = "auto", *, timeout_s: float | None = None, transport:
    Literal["auto", "nccl", "staged"] = "auto",
) -> Communicator:  # fmt: skip
    """Return a communicator over an mpi4py communicator, which it duplicates.

    Collective: all ranks of `mpi_comm` call this. On "cpu" buffers are NumPy arrays; ranks of one node move
    them through shared memory, else MPI does. On "cuda" buffers are CuPy arrays and NCCL moves them; MPI
    hands out the unique id. "auto" is "cuda" when every rank sees a GPU through CuPy, else "cpu".

    An uncaught exception on a rank then ends the whole job, with the rank's number and traceback. The failure
    channel stays open to the end of the process; later communicators over the same ranks use it too.

    Args:
        mpi_comm: the mpi4py communicator.
        device: where the buffers lie.
        timeout_s: deadline of each wait for other ranks, in seconds; LOWSHARD_TIMEOUT_S, else 600, by default.
        transport: what moves CuPy arrays: "nccl", "staged" (through host memory), or "auto": NCCL where it can be
            used, else staged with a warning (ranks outnumber GPUs, say).

    Raises:
        CommError: device, transport or timeout_s is not one of these, on every rank; with "nccl", ranks outnumber the
            GPUs of a node.
        DependencyError: CuPy or a GPU is missing where "cuda" was asked for; with "nccl", NCCL.
        MismatchError: ranks ask for different transports or loaded different versions of NCCL.
        TimedOut: a rank did not call this, which is named, or did not come to the connecting of NCCL. No call of MPI's
            can be taken back: use `mpi_comm` no more, but to end the job.
    """
    from lowshard.comm.abort import install_abort_hook
    from lowshard.comm.build import build_host

    fault = ""
    try:
        choice(device, ("auto", "cpu", "cuda"), "device is 'auto', 'cpu' or 'cuda'", CommError)
        choice(transport, ("auto", "nccl", "staged"), "transport is 'auto', 'nccl' or 'staged'", CommError)
        timeout_s = None if timeout_s is None else deadline_s(timeout_s)
    except CommError as error:  # the others are told where all have come
        fault, timeout_s = str(error), None
    install_abort_hook()
    host = build_host(mpi_comm, timeout_s, fault)
    if device == "cpu":
        return host
    from lowshard.comm.nccl_over_mpi import build_over_mpi, usable_on_all

    if device == "auto" and not usable_on_all(host):
        return host
    return build_over_mpi(host, mpi_comm, transport)


def from_nccl(
    nccl_communicator: Any, rank: int, size: int, control: Any = None, *, timeout_s: float | None = None
) -> Communicator:
    """Return a communicator over a `cupy.cuda.nccl.NcclCommunicator` that the caller owns.

    Collective: all ranks of the NCCL communicator call this. Nothing is put on it: NCCL connects two ranks inside the
    first call that needs it, and that call blocks the host until the other rank has come, whatever the deadline.

    Args:
        nccl_communicator: the NCCL communicator; `close()` leaves it alone.
        rank: this rank in it.
        size: its number of ranks.
        control: an mpi4py communicator over the same ranks in the same order, for checks on the
            host. Without it plan digests alone are compared, once, over NCCL: the host waits for the stream the first
            time that a plan is executed. What is wrong on one rank with a later use of it is raised there alone.
        timeout_s: deadline of the host's waits, as for `from_mpi`.

    Raises:
        CommError: rank, size and communicator do not agree, or timeout_s is not a number above 0; with control, on
            every rank.
        DependencyError: CuPy is missing.
    """
    from lowshard.comm.build import build_host
    from lowshard.comm.nccl import NCCLTransport

    fault = ""
    try:
        size = whole(size, "size is a number of ranks, 1 or more", CommError, 1)
        rank = whole(rank, f"rank is 0 to size - 1, of {size} ranks", CommError, 0, size - 1)
        timeout_s = None if timeout_s is None else deadline_s(timeout_s)
    except CommError as error:
        if control is None:
            raise
        fault, timeout_s = str(error), None
    host = None if control is None else build_host(control, timeout_s, fault)
    try:
        with collective_step(host, "from_nccl", NCCL_REDUCE16.text().encode()):
            if host is not None and (host.rank, host.size) != (rank, size):
                raise CommError(
                    f"control has rank {host.rank} of {host.size}, the NCCL communicator rank {rank} of {size}; "
                    "both list the same ranks in the same order"
                )
            beside = None if host is None else host._transport
            made = NCCLTransport(nccl_communicator, rank, size, beside, owned=False)
    except LowshardError:
        if host is not None:
            host.close()
        raise
    return Communicator(made, host)
