"""How a side channel begins: over MPI the ranks agree on where to connect, and on whether all of them could.

Nothing watches the ranks yet, so every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowshard.comm.interface import interface_addresses, is_loopback, network_name
from lowshard.comm.rendezvous import Offer, Rendezvous, connect, reaches
from lowshard.comm.start_barrier import within
from lowshard.errors import CommError, TimedOut
from lowshard.settings import HEARTBEAT_S, INTERFACE, MOST_S

__all__ = ["all_say", "cut", "meet"]


_SHORTEST_LIMIT_S = 1.0
_SHARE_S = 30.0  # beyond the time to connect, for a rank that is slow
_MEETING_BYTES = 8192
_ROW_BYTES = 1536
_HOSTS = 16  # addresses that a rank tells of its host


def meet(
    mpi_comm: Any, heartbeat_limit_s: float | None, problem: str, timeout_s: float, connect_limit_s: float
) -> tuple[dict[int, socket.socket], float]:
    """Connect all ranks with rank 0.

    Collective: all ranks of `mpi_comm` call this.

    Args:
        mpi_comm: an mpi4py communicator of at least two ranks.
        heartbeat_limit_s: rank 0's counts for all; None for what the environment says there.
        problem: why this rank cannot take part, or "".
        timeout_s: how long to wait for the ranks that are late to this call.
        connect_limit_s: how long to try to connect.

    Returns:
        The connections by rank (on rank 0 to all others, elsewhere to rank 0), and the heartbeat limit in seconds.

    Raises:
        CommError: some rank reaches no address of rank 0, or has a problem; the same on all ranks.
        TimedOut: not all ranks came.
    """
    rank, size = mpi_comm.Get_rank(), mpi_comm.Get_size()
    links = dict[int, socket.socket]()
    with contextlib.ExitStack() as stack:
        meeting, rendezvous = _call_meeting(rank, size, heartbeat_limit_s, stack)
        meeting = _broadcast(mpi_comm, meeting, timeout_s)
        _raise_for(meeting)
        # A rank may be late to this call, but not to what follows.
        texts = _share(mpi_comm, _seat_text(_offer_of(meeting)), timeout_s)
        seats = [_Seat(is_near, network, tuple(hosts)) for is_near, network, hosts in map(json.loads, texts)]
        if not (meeting["final"] or all(seat.is_near for seat in seats)):
            again: dict[str, Any] = {}
            if rendezvous is not None:
                again, rendezvous = _call_from_afar(rendezvous.offer, seats, stack)
            meeting = {**meeting, **_broadcast(mpi_comm, again, timeout_s)}
            _raise_for(meeting)
        offer = _offer_of(meeting)
        try:
            if rendezvous is None:
                links[0] = connect(offer, rank, connect_limit_s)
            else:
                links = rendezvous.accept(range(1, size), connect_limit_s + 1.0)
        except CommError as error:
            problem = problem or str(error)
        with _closed_on_error(links):
            missing = sorted(set(range(1, size)) - set(links))
            if rendezvous is not None and missing:
                problem = (
                    problem or f"rank 0 on {offer.host} waited in vain for a connection of ranks {missing}"
                )
            # A rank that could not connect knows best why: rank 0 only saw that it did not come.
            problems = _share(mpi_comm, problem, connect_limit_s + _SHARE_S)
            for said in (*problems[1:], problems[0]):
                if said:
                    raise CommError(f"no side channel: {said}")
    return links, meeting["limit_s"]


@dataclass(frozen=True)
class _Seat:
    """Where a rank is.

    Attributes:
        is_near: whether it reaches a door that is near rank 0.
        network: `network_name` there.
        hosts: addresses of its host, without loopback; () where it is near.
    """

    is_near: bool
    network: str
    hosts: tuple[str, ...]


def _seat_text(offer: Offer) -> str:
    """Return this process's seat as text, seen from rank 0's offer."""
    is_near, hosts = reaches(offer), list[str]()
    if not is_near:
        with contextlib.suppress(OSError):
            own = [address for addresses in interface_addresses().values() for address in addresses]
            hosts = [address for address in own if not is_loopback(address)][:_HOSTS]
    return json.dumps([is_near, network_name(), hosts])


def all_say(mpi_comm: Any, yes: bool, timeout_s: float) -> bool:
    """Return, on all ranks alike, whether all of them say yes.

    Collective: all ranks of `mpi_comm` call this.

    Raises:
        TimedOut: not all ranks came.
    """
    if mpi_comm.Get_size() == 1:
        return yes
    noes = np.array([not yes], np.int64)
    total = np.zeros(1, np.int64)
    _finish(mpi_comm.Iallreduce(noes, total), timeout_s)
    return not total[0]


def _call_meeting(
    rank: int, size: int, limit_s: float | None, stack: contextlib.ExitStack
) -> tuple[dict[str, Any], Rendezvous | None]:
    """Return, on rank 0, what all ranks must know, and the rendezvous, closed by the stack; elsewhere nothing."""
    if rank != 0:
        return {}, None
    try:
        limit = _heartbeat_limit_s(limit_s)
        rendezvous = Rendezvous.nearby(size)
    except CommError as error:
        return {"problem": str(error)}, None
    stack.callback(rendezvous.close)
    final = INTERFACE.is_set()
    return {
        "problem": "",
        "limit_s": limit,
        "final": final,
        "offer": dataclasses.asdict(rendezvous.offer),
    }, rendezvous


def _call_from_afar(
    near: Offer, seats: Sequence[_Seat], stack: contextlib.ExitStack
) -> tuple[dict[str, Any], Rendezvous | None]:
    """Return what all ranks must know where some are far from rank 0, and the rendezvous, closed by the stack."""
    far = [seat for seat in seats if not seat.is_near]
    hosts = dict.fromkeys(host for seat in far for host in seat.hosts)
    try:
        rendezvous = Rendezvous.towards(hosts, any(seat.network == near.network for seat in seats[1:]))
    except CommError as error:
        return {"problem": str(error)}, None
    stack.callback(rendezvous.close)
    return {"offer": dataclasses.asdict(rendezvous.offer)}, rendezvous


def _offer_of(meeting: dict[str, Any]) -> Offer:
    return Offer(**{**meeting["offer"], "addresses": tuple(meeting["offer"]["addresses"])})


def _raise_for(meeting: dict[str, Any]) -> None:
    if meeting["problem"]:
        raise CommError(f"no side channel: {meeting['problem']}")


@contextlib.contextmanager
def _closed_on_error(links: dict[int, socket.socket]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for connection in links.values():
            connection.close()
        raise


def _heartbeat_limit_s(given_s: float | None) -> float:
    limit_s = HEARTBEAT_S.seconds() if given_s is None else given_s
    if not _SHORTEST_LIMIT_S <= limit_s < math.inf:
        raise CommError(
            f"{HEARTBEAT_S.name} (heartbeat_limit_s) is {_SHORTEST_LIMIT_S:g} or more, got {limit_s:g}: "
            f"{HEARTBEAT_S.meaning}"
        )
    return min(limit_s, MOST_S)


def _broadcast(mpi_comm: Any, value: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Return rank 0's value on every rank."""
    buffer = np.zeros(_MEETING_BYTES, np.uint8)
    if value:
        data = json.dumps(value).encode()
        buffer[: len(data)] = np.frombuffer(data, np.uint8)
    _finish(mpi_comm.Ibcast(buffer, 0), timeout_s)
    received: dict[str, Any] = json.loads(buffer.tobytes().rstrip(b"\0"))
    return received


def _share(mpi_comm: Any, text: str, timeout_s: float) -> list[str]:
    """Return every rank's text on every rank."""
    mine = np.zeros(_ROW_BYTES, np.uint8)
    data = cut(text, _ROW_BYTES)
    mine[: len(data)] = np.frombuffer(data, np.uint8)
    rows = np.zeros((mpi_comm.Get_size(), _ROW_BYTES), np.uint8)
    _finish(mpi_comm.Iallgather(mine, rows), timeout_s)
    return [row.tobytes().rstrip(b"\0").decode() for row in rows]


def _finish(request: Any, timeout_s: float) -> None:
    """Wait for an MPI request with a deadline: a rank may be dead already, and nobody watches yet."""
    if not within(timeout_s, request.Test):
        raise TimedOut(f"no side channel: not all ranks came to make it within {timeout_s:g} s")


def cut(text: str, size: int) -> bytes:
    """Return a text as at most so many bytes, without half a character and without a line's end."""
    return " ".join(text.splitlines()).encode()[:size].decode(errors="ignore").encode()
