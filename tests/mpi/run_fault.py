"""What each rank of the fault matrix runs: some ranks fail in the way and at the place named, the others wait for them.

Arguments: how the victims fail; where; their ranks, comma-separated; a folder for the ranks' notes.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np

from lowshard.comm import Communicator, from_mpi
from lowshard.errors import CommError
from lowshard.launch import find_rank

LONG_S = 90.0
COME_S = 50.0  # for the others to come to the place
INSIDE_S = 0.2  # from their notes to their being inside
ROUNDS = 5
WORDS = 1 << 18  # float32: 1 MiB


class Notes:
    """Files by which the ranks tell each other, and the test, how far they are."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank

    def write(self, name: str, text: str = "") -> None:
        draft = self._folder / f"draft-{self._rank}"
        draft.write_text(text)
        draft.rename(self._folder / f"{name}-{self._rank}")

    def wait_for_all(self, name: str, n: int) -> None:
        end_s = time.monotonic() + COME_S
        while not all((self._folder / f"{name}-{rank}").exists() for rank in range(n)):
            if time.monotonic() > end_s:
                raise RuntimeError(f"not all ranks have noted {name!r} within {COME_S} s")
            time.sleep(0.005)


def fail(how: str, notes: Notes) -> NoReturn:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    notes.write("failed", str(time.time()))
    if how == "raise":
        raise ValueError("boom")
    if how == "exit":
        sys.exit(3)
    if how == "SIGSEGV":
        ctypes.string_at(0)
    if how != "cut off":  # the test does it
        os.kill(os.getpid(), getattr(signal, how))
    time.sleep(LONG_S)
    os._exit(99)


def call_of(where: str, comm: Communicator) -> Callable[[], object]:
    """Returns the collective of a place, on buffers of its own."""
    n = comm.size
    send, recv = np.ones(WORDS, np.float32), np.empty(WORDS, np.float32)
    counts = [WORDS // n] * n
    starts = [rank * (WORDS // n) for rank in range(n)]
    return {
        "all_reduce": lambda: comm.all_reduce(send, recv),
        "all_to_all_v": lambda: comm.all_to_all_v(send, counts, starts, recv, counts, starts),
        "barrier": lambda: comm.barrier(),
        "split": lambda: comm.split(0),
        "idle": lambda: time.sleep(LONG_S),
    }[where]


def main(how: str, where: str, victims: set[int], folder: Path) -> None:
    launched = find_rank(os.environ)
    assert launched is not None
    rank, n = launched.rank, launched.size
    notes = Notes(folder, rank)

    def come_to(place: str) -> None:
        if place == where:
            notes.write("came")
            if rank in victims:
                notes.wait_for_all("came", n)
                time.sleep(INSIDE_S)
                fail(how, notes)

    notes.write("pid", str(os.getpid()))
    come_to("before MPI")
    from mpi4py import MPI

    come_to("start-up")
    comm = from_mpi(MPI.COMM_WORLD, "cpu")
    loops = where.endswith(" loop")
    call = call_of(where.removesuffix(" loop"), comm)
    try:  # a victim that loops may fail while others still are in the last call that it took part in
        if where != "idle":
            for _ in range(ROUNDS if loops else 1):
                call()
        if loops and rank in victims:
            fail(how, notes)
        come_to(where)
        call()
        while loops:
            call()
    except CommError as error:
        notes.write("said", f"{type(error).__name__}: {error}")
        raise
    print("not reached", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], {int(word) for word in sys.argv[3].split(",")}, Path(sys.argv[4]))
