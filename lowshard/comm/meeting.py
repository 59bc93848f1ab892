"""How a side channel begins: over MPI the ranks agree on where to connect, and on whether all of them could.

Nothing watches the ranks yet, so every wait has a deadline.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
from typing import Any

import numpy as np

from lowshard.comm.arrival import within
from lowshard.comm.rendezvous import Listener, Offer, connect
from lowshard.errors import CommError, TimedOut

__all__ = ["HEARTBEAT_VARIABLE", "all_say", "cut", "meet"]

HEARTBEAT_VARIABLE = "LOWSHARD_HEARTBEAT_S"

_LIMIT_S = 10.0
_SHORTEST_LIMIT_S = 1.0
_SHARE_S = 30.0  # beyond the time to connect, for a rank that is slow
_MEETING_BYTES = 8192
_ROW_BYTES = 1536
_ADDRESSES = 64


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
    meeting, listener = _call_meeting(rank, size, heartbeat_limit_s)
    try:
        meeting = _broadcast(mpi_comm, meeting, timeout_s)
        if meeting["problem"]:
            raise CommError(f"no side channel: {meeting['problem']}")
        _finish(mpi_comm.Ibarrier(), timeout_s)  # a rank may be late to the call, but not to connect
        offer = Offer(**{**meeting["offer"], "addresses": tuple(meeting["offer"]["addresses"])})
        try:
            if listener is None:
                links[0] = connect(offer, rank, connect_limit_s)
            else:
                links = listener.accept(range(1, size), connect_limit_s + 1.0)
        except CommError as error:
            problem = problem or str(error)
        missing = sorted(set(range(1, size)) - set(links))
        if listener is not None and missing:
            problem = problem or f"rank 0 on {offer.host} waited in vain for a connection of ranks {missing}"
        # A rank that could not connect knows best why: rank 0 only saw that it did not come.
        problems = _share(mpi_comm, problem, connect_limit_s + _SHARE_S)
        for said in (*problems[1:], problems[0]):
            if said:
                raise CommError(f"no side channel: {said}")
    except BaseException:
        for connection in links.values():
            connection.close()
        raise
    finally:
        if listener is not None:
            listener.close()
    return links, meeting["limit_s"]


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


def _call_meeting(rank: int, size: int, limit_s: float | None) -> tuple[dict[str, Any], Listener | None]:
    """Return, on rank 0, what all ranks must know, and the listener; elsewhere nothing."""
    if rank != 0:
        return {}, None
    meeting: dict[str, Any] = {"problem": ""}
    try:
        meeting["limit_s"] = _heartbeat_limit_s(limit_s)
        listener = Listener(size)
    except CommError as error:
        return {"problem": str(error)}, None
    offer = dataclasses.asdict(listener.offer)
    meeting["offer"] = {**offer, "addresses": offer["addresses"][:_ADDRESSES]}
    return meeting, listener


def _heartbeat_limit_s(given_s: float | None) -> float:
    text = os.environ.get(HEARTBEAT_VARIABLE, str(_LIMIT_S)) if given_s is None else str(given_s)
    try:
        limit_s = float(text)
    except ValueError:
        limit_s = math.nan
    if not _SHORTEST_LIMIT_S <= limit_s < math.inf:
        raise CommError(
            f"{HEARTBEAT_VARIABLE} (heartbeat_limit_s) is the silence in seconds after which a rank has failed, "
            f"{_SHORTEST_LIMIT_S:g} or more; got {text!r}"
        )
    return limit_s


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
