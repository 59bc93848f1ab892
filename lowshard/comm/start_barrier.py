"""Whether all ranks have come to where a communicator is made, and which have not.

A barrier of MPI's keeps them together, but it has no deadline and never says who is missing. So a rank that has waited
for a while sends word to rank 0; and when the time of one is over, rank 0 tells all that came whose word is lacking.
Where nobody is late no word is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lowshard.comm.mpi import load_mpi, world_ranks
from lowshard.comm.wait_guard import names_of
from lowshard.errors import TimedOut

__all__ = ["await_all"]

_TAG = 32766  # not the highest that every MPI has (MPI 4.1, section 9.1.2): `lowshard.comm.progress` probes for that
_HERE, _WHO = 1, 2  # words to rank 0: this rank has come; its time is over, and it asks who has not
_PATIENCE_S = 1.0  # before a word is sent
_ON_THE_WAY_S = 0.2  # for a word, or an answer, to arrive
_ANSWER_S = 3.0  # for rank 0 to hear the words of those that came last, and to answer
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 0.01


def await_all(mpi_comm: Any, timeout_s: float) -> None:
    """Return once all ranks have come to make a communicator.

    Collective: all ranks of `mpi_comm` call this. Where a rank is more than a second late, messages with a tag of their
    own go over it; all of them are received before this returns.
    """
    rank, size = mpi_comm.Get_rank(), mpi_comm.Get_size()
    if size == 1:
        return
    patience_s = min(_PATIENCE_S, timeout_s / 2)
    end_s = time.monotonic() + timeout_s
    barrier = mpi_comm.Ibarrier()
    heard, words = np.zeros(size, np.int64), list[Any]()
    if not _within(patience_s, barrier.Test):
        if rank == 0:
            missing = _wait_as_hub(mpi_comm, barrier, heard, end_s, patience_s)
        else:
            missing = _wait_for_hub(mpi_comm, barrier, words, end_s)
        if missing:
            ranks = world_ranks(load_mpi(), mpi_comm)
            raise TimedOut(
                f"{names_of(missing)} did not come within {timeout_s:g} s to make a communicator; every rank of the "
                "MPI communicator calls from_mpi (or from_nccl), or none does"
            ).about(ranks[rank] for rank in missing)
    sent = np.zeros(size, np.int64)
    if not _within(timeout_s, mpi_comm.Iallgather(np.array([len(words)], np.int64), sent).Test):
        raise TimedOut(
            f"rank {rank} came too late to make a communicator: others had given up waiting for it"
        )
    if rank == 0:
        for source in np.repeat(np.arange(size), sent - heard).tolist():
            mpi_comm.Recv(np.zeros(1, np.int64), source, _TAG)
    for word in words:
        word.Wait()


def _within(limit_s: float, test: Callable[[], Any]) -> bool:
    """Ask again and again; say whether the answer was yes before the time was over."""
    end_s = time.monotonic() + limit_s
    for now_s in _turns():
        if test():
            return True
        if now_s > end_s:
            break
    return False


def _turns() -> Iterator[float]:
    """Yield the time in seconds, with pauses between, each longer than the one before."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield time.monotonic()
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)


def _wait_as_hub(
    mpi_comm: Any, barrier: Any, heard: np.ndarray, end_s: float, patience_s: float
) -> list[int]:
    """Wait on rank 0 and count each rank's words; return those that are missing when the time of one is over."""
    settle_s = patience_s + _ON_THE_WAY_S  # who came right before the end sends word later
    last_s = end_s + settle_s
    for now_s in _turns():
        if barrier.Test():
            return []
        for source, word in _received(mpi_comm):
            heard[source] += 1
            if word == _WHO:
                last_s = min(last_s, now_s + settle_s)
        if now_s > last_s:
            break
    there = (heard > 0).astype(np.int64)
    there[0] = 1
    missing = _missing(there)
    if missing:  # else the last one came just now, and the others see it by the barrier
        answers = [mpi_comm.Isend(there, other, _TAG) for other in np.flatnonzero(heard).tolist()]
        _within(_ON_THE_WAY_S, lambda: all([answer.Test() for answer in answers]))
    return missing


def _received(mpi_comm: Any) -> Iterator[tuple[int, int]]:
    """Yield who has sent a word, and which, as long as one is there."""
    word, status = np.zeros(1, np.int64), load_mpi().Status()
    while mpi_comm.Iprobe(tag=_TAG, status=status):
        mpi_comm.Recv(word, status.Get_source(), _TAG)
        yield status.Get_source(), int(word[0])


def _wait_for_hub(mpi_comm: Any, barrier: Any, words: list[Any], end_s: float) -> list[int]:
    """Wait on another rank and send words; return the ranks that are missing, 0 alone where it does not answer."""
    there = np.zeros(mpi_comm.Get_size(), np.int64)
    words.append(mpi_comm.Isend(np.array([_HERE], np.int64), 0, _TAG))
    for now_s in _turns():
        if mpi_comm.Iprobe(0, _TAG):
            mpi_comm.Recv(there, 0, _TAG)
            return _missing(there)
        if barrier.Test():
            return []
        if now_s > end_s:
            if len(words) > 1:
                return [0]
            words.append(mpi_comm.Isend(np.array([_WHO], np.int64), 0, _TAG))
            end_s = now_s + _ANSWER_S
    return []


def _missing(there: np.ndarray) -> list[int]:
    return [int(rank) for rank in np.flatnonzero(there == 0)]
