"""Puts a measurement on ranks: those it starts itself, those of the MPI job it is part of, or threads.

What runs there is an entry: a function that every rank calls with its `Seat` and the same plain data, and that gives
plain data back on rank 0. On ranks of its own the entry runs in child processes, and its result comes in a file.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lowshard.bench.bench_meeting import ThreadBoard, ThreadMeeting
from lowshard.bench.bench_seat import MpiSeat, Seat, ThreadSeat
from lowshard.errors import CommError, LowshardError, TimedOut
from lowshard.settings import environment

Entry = Callable[[Seat, Any], Any]

DEFAULT_RANKS = 2
_NO_LIMIT_S = 7 * 86400.0
_LEADER_FIRST_S = 0.3


@dataclass(frozen=True)
class Outcome:
    """What came of an entry."""

    exit_code: int
    data: Any = None
    leads: bool = True
    finish: Callable[[int], int] = int


def job_size() -> int | None:
    """Return the number of ranks of the MPI job that this process is part of; None outside of one."""
    from lowshard.launch.environment import find_rank

    launched = find_rank(environment())
    return launched.size if launched is not None and launched.size > 1 else None


def leads() -> bool:
    """Return whether this process is not a rank of a job, or its rank 0, by what its launcher says."""
    from lowshard.launch.environment import find_rank

    launched = find_rank(environment())
    return launched is None or launched.rank == 0


def run_entry(
    entry: Entry, request: Any, ranks: int | None, transport: str = "auto", timeout_s: float | None = None
) -> Outcome:
    """Run an entry on ranks."""
    size = job_size()
    if size is not None:
        if ranks not in (None, size):
            raise LowshardError(f"--ranks is the size of the MPI job inside one: {size}; got {ranks}")
        return _in_the_job(entry, request, timeout_s)
    count = DEFAULT_RANKS if ranks is None else ranks
    if transport == "loopback":
        return _on_threads(entry, request, count, timeout_s)
    return _on_own_ranks(entry, request, count, timeout_s)


def _on_threads(entry: Entry, request: Any, ranks: int, timeout_s: float | None) -> Outcome:
    from lowshard import comm as lc

    board = ThreadBoard(ranks)

    def work(comm: Any) -> Any:
        meeting = ThreadMeeting(board, comm.rank)
        try:
            return entry(ThreadSeat(comm, meeting), request)
        except BaseException:
            meeting.leave()
            raise

    return Outcome(0, lc.run_loopback(ranks, work, timeout_s or _NO_LIMIT_S)[0])


def _on_own_ranks(entry: Entry, request: Any, ranks: int, timeout_s: float | None) -> Outcome:
    from lowshard.launch.job import python_command, run_ranks

    with tempfile.TemporaryDirectory(prefix="lowshard-bench-") as folder:
        asked, found = Path(folder) / "request.json", Path(folder) / "result.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        command = python_command(
            "lowshard.bench.bench_rank",
            [f"{entry.__module__}:{entry.__name__}", str(asked), str(found)],
            module=True,
        )
        result = run_ranks(command, ranks, timeout_s=timeout_s, prefix_output=False)
        if result.exit_code:
            if result.exit_code == 128 + signal.SIGPIPE:
                # Else Python complains of the closed pipe at its own end.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return Outcome(result.exit_code)
        return Outcome(0, json.loads(found.read_text(encoding="utf-8")))


def run_as_child(name: str, asked: Path, found: Path) -> None:
    """Run an entry as one of the ranks that `run_entry` started; rank 0 writes the result."""
    from lowshard.comm.mpi import load_mpi

    module, _, function = name.partition(":")
    entry: Entry = getattr(importlib.import_module(module), function)
    seat = MpiSeat(load_mpi().COMM_WORLD)
    data = entry(seat, json.loads(asked.read_text(encoding="utf-8")))
    if seat.meeting.rank == 0:
        found.write_text(json.dumps(data), encoding="utf-8")
    seat.meeting.barrier()


def _in_the_job(entry: Entry, request: Any, timeout_s: float | None) -> Outcome:
    from lowshard.comm.abort import end_job, install_abort_hook
    from lowshard.comm.mpi import load_mpi
    from lowshard.launch.environment import find_rank

    world = load_mpi().COMM_WORLD
    launched = find_rank(environment())
    rank = int(world.Get_rank())
    if launched is not None and (launched.rank, launched.size) != (rank, int(world.Get_size())):
        raise CommError(
            f"the launcher calls this process rank {launched.rank} of {launched.size}, MPI calls it rank {rank} of "
            f"{world.Get_size()}: mpiexec belongs to another MPI than mpi4py; see `lowshard doctor`"
        )
    install_abort_hook()
    with _Deadline(timeout_s, rank) as deadline:
        try:
            seat = MpiSeat(world)
            data = entry(seat, request)
        except LowshardError as error:
            if deadline.is_over:  # the timer has told the others, and this rank has heard itself
                end_job(TimedOut.exit_code)
            # The other ranks may wait for this one, so it cannot just leave. Most errors are everybody's: rank 0
            # says them, and ends the job before the others repeat them.
            time.sleep(_LEADER_FIRST_S if rank else 0.0)
            print(f"lowshard: error: rank {rank}: {error}", file=sys.stderr, flush=True)
            end_job(error.exit_code)
    return Outcome(
        0, data if rank == 0 else None, rank == 0, lambda code: int(seat.meeting.exchange(code)[0])
    )


class _Deadline:
    """Ends the whole job, with this rank's stacks, when the block takes too long."""

    def __init__(self, limit_s: float | None, rank: int) -> None:
        self._limit_s, self._rank = limit_s, rank
        self._timer = None if limit_s is None else threading.Timer(limit_s, self._end)
        self.is_over = False

    def __enter__(self) -> Self:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        import faulthandler

        from lowshard.comm.abort import end_job

        self.is_over = True
        faulthandler.dump_traceback(all_threads=True)
        text = f"lowshard: error: rank {self._rank} was still running after {self._limit_s:g} s"
        print(text, file=sys.stderr, flush=True)
        end_job(TimedOut.exit_code)
