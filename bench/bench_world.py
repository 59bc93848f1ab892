"""Puts a measurement on ranks: those it starts itself, those of the MPI job it is part of, or threads.

What runs there is an entry: a function that every rank calls with its `Rank` and the same plain data, and that gives
plain data back on rank 0. On ranks of its own the entry runs in child processes, and its result comes in a file.
What is measured may be wrong or slow; ranks wait and swap facts by mpi4py's own calls, threads by Python's barrier.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

import lowshard
from lowshard.bench.turn_timing import Combine, HostComm, RankClock
from lowshard.errors import CommError, LowshardError, PeerFailed, TimedOut
from lowshard.settings import environment

Entry = Callable[["Rank", Any], Any]

DEFAULT_RANKS = 2
_NO_LIMIT_S = 7 * 86400.0
_THREADS_WAIT_S = 600.0
_LEADER_FIRST_S = 0.3
_QUIET_S = 2.0


class Progress:
    """Tells what goes on, on stderr, when nothing has been shown for two seconds."""

    def __init__(self, bench: str, on: bool = True, now: Callable[[], float] = time.perf_counter) -> None:
        self._bench, self._on, self._now = bench, on, now
        self._last_s = now()

    def __call__(self, what: str) -> None:
        """Say what goes on, perhaps."""
        if self._on and self._now() - self._last_s >= _QUIET_S:
            self.shown()
            print(f"lowshard bench {self._bench}: {what}", file=sys.stderr, flush=True)

    def shown(self) -> None:
        """Note that the user has just seen something."""
        self._last_s = self._now()


class MpiHostComm:
    """Ranks of an mpi4py communicator, which it duplicates."""

    def __init__(self, mpi_comm: Any) -> None:
        self._comm = mpi_comm.Dup()
        self.rank, self.size = int(mpi_comm.Get_rank()), int(mpi_comm.Get_size())

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self._comm.Barrier()

    def exchange(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order."""
        return list(self._comm.allgather(value))


class ThreadHostComm:
    """One thread's end of a barrier and a list that all threads have."""

    def __init__(self, barrier: threading.Barrier, slots: list[Any], rank: int) -> None:
        self._barrier, self._slots = barrier, slots
        self.rank, self.size = rank, len(slots)

    def barrier(self) -> None:
        """Return once every rank has called it; raise PeerFailed once one has left."""
        try:
            self._barrier.wait(_THREADS_WAIT_S)
        except threading.BrokenBarrierError as error:
            raise PeerFailed("another rank of the measurement failed") from error

    def exchange(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order."""
        self._slots[self.rank] = value
        self.barrier()
        seen = list(self._slots)
        self.barrier()
        return seen

    def leave(self) -> None:
        """End every other rank's waits; called by a rank that fails."""
        self._barrier.abort()


class Rank:
    """One rank of a measurement: an MPI process, or a thread with its loopback communicator."""

    def __init__(self, host: HostComm, mpi_comm: Any = None, thread_comm: Any = None) -> None:
        self.host, self.mpi_comm, self._thread_comm = host, mpi_comm, thread_comm
        self.rivals = None if mpi_comm is None else mpi_comm.Dup()
        """mpi4py's own communicator for what it is compared with."""
        self._cores = fillable(host.exchange((socket.gethostname(), sorted(os.sched_getaffinity(0)))))

    @contextmanager
    def open(self, transport: str) -> Iterator[Any]:
        """Give a communicator over a transport and close it after. Collective: all ranks call this."""
        if self._thread_comm is None:
            with open_transport(self.mpi_comm, transport) as comm:
                yield comm
            return
        if transport != "loopback":
            raise LowshardError(f"threads are joined by --transport loopback, not by {transport}")
        yield self._thread_comm  # stays open

    def clock(self, comm: Any = None, combine: Combine = "span", **more: Any) -> RankClock:
        """Return the clock of all ranks; with a communicator it watches how much of the CPU they get. Collective."""
        # Threads sleep while they wait, and so does who waits for a GPU: their CPU time says nothing.
        watched = comm is not None and self._thread_comm is None and comm.xp is np
        return RankClock(self.host, combine, cores=self._cores if watched else None, **more)


def open_transport(mpi_comm: Any, transport: str) -> Any:
    """Return a communicator over MPI ranks. Collective: all ranks call this."""
    from lowshard import comm as lc

    if transport == "loopback":
        raise LowshardError("--transport loopback runs on threads of one process, not on MPI ranks")
    if transport in ("auto", "mpi"):
        return lc.from_mpi(mpi_comm, "auto" if transport == "auto" else "cpu")
    from lowshard.comm.nccl_over_mpi import build_over_mpi

    return build_over_mpi(lc.from_mpi(mpi_comm, "cpu"), mpi_comm, transport)  # type: ignore[arg-type]


def fillable(places: Sequence[tuple[str, Sequence[int]]]) -> int:
    """Return the cores that ranks fill at most: on each host no more than ranks, or than cores they may use."""
    total = 0
    for host in {host for host, _ in places}:
        theirs = [cores for name, cores in places if name == host]
        total += min(len(theirs), len({core for cores in theirs for core in cores}))
    return total


# ---- starting ranks


@dataclass(frozen=True)
class Outcome:
    """What came of an entry."""

    exit_code: int
    data: Any = None
    leads: bool = True
    finish: Callable[[int], int] = int
    """Makes rank 0's exit code that of every rank of the job."""


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
    entry: Entry,
    request: Any,
    ranks: int | None,
    transport: str = "auto",
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
) -> Outcome:
    """Run an entry on ranks; `env` is that of ranks which this starts."""
    size = job_size()
    if size is not None:
        if ranks not in (None, size):
            raise LowshardError(f"--ranks is the size of the MPI job inside one: {size}; got {ranks}")
        return _in_the_job(entry, request, timeout_s)
    number = DEFAULT_RANKS if ranks is None else ranks
    if transport == "loopback":
        return _on_threads(entry, request, number, timeout_s)
    return _on_own_ranks(entry, request, number, timeout_s, env)


def _on_threads(entry: Entry, request: Any, ranks: int, timeout_s: float | None) -> Outcome:
    from lowshard import comm as lc

    barrier, slots = threading.Barrier(ranks), [None] * ranks

    def work(comm: Any) -> Any:
        host = ThreadHostComm(barrier, slots, comm.rank)
        try:
            return entry(Rank(host, thread_comm=comm), request)
        except BaseException:
            host.leave()
            raise

    return Outcome(0, lc.run_loopback(ranks, work, timeout_s or _NO_LIMIT_S)[0])


def _on_own_ranks(
    entry: Entry, request: Any, ranks: int, timeout_s: float | None, env: Mapping[str, str] | None
) -> Outcome:
    from lowshard.launch.job import python_command, run_ranks

    with tempfile.TemporaryDirectory(prefix="lowshard-bench-") as folder:
        asked, found = Path(folder) / "request.json", Path(folder) / "result.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        command = python_command(
            "lowshard.bench.bench_world", [f"{entry.__module__}:{entry.__name__}", str(asked), str(found)], module=True
        )  # fmt: skip
        given = None if env is None else {**environment(), **env}
        result = run_ranks(command, ranks, timeout_s=timeout_s, prefix_output=False, env=given)
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
    world = load_mpi().COMM_WORLD
    rank = Rank(MpiHostComm(world), world)
    data = entry(rank, json.loads(asked.read_text(encoding="utf-8")))
    if rank.host.rank == 0:
        found.write_text(json.dumps(data), encoding="utf-8")
    rank.host.barrier()


def _in_the_job(entry: Entry, request: Any, timeout_s: float | None) -> Outcome:
    from lowshard.comm.abort import end_job, install_abort_hook
    from lowshard.comm.mpi import load_mpi
    from lowshard.launch.environment import find_rank

    world = load_mpi().COMM_WORLD
    launched = find_rank(environment())
    number = int(world.Get_rank())
    if launched is not None and (launched.rank, launched.size) != (number, int(world.Get_size())):
        raise CommError(
            f"the launcher calls this process rank {launched.rank} of {launched.size}, MPI calls it rank {number} of "
            f"{world.Get_size()}: mpiexec belongs to another MPI than mpi4py; see `lowshard doctor`"
        )
    install_abort_hook()
    with _Deadline(timeout_s, number) as deadline:
        try:
            rank = Rank(MpiHostComm(world), world)
            data = entry(rank, request)
        except LowshardError as error:
            if deadline.is_over:  # the timer has told the others, and this rank has heard itself
                end_job(TimedOut.exit_code)
            # The other ranks may wait for this one, so it cannot just leave. Most errors are everybody's: rank 0
            # says them, and ends the job before the others repeat them.
            time.sleep(_LEADER_FIRST_S if number else 0.0)
            print(f"lowshard: error: rank {number}: {error}", file=sys.stderr, flush=True)
            end_job(error.exit_code)
    return Outcome(
        0, data if number == 0 else None, number == 0, lambda code: int(rank.host.exchange(code)[0])
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


# ---- rivals of other libraries


def ask_rival(
    python: str, module: str, request: Any, timeout_s: float, env: Mapping[str, str] | None = None
) -> list[Any]:
    """Run `python -m MODULE REQUEST`, and return the JSON objects that it prints, one a line.

    Raises:
        TimedOut: it takes too long.
        LowshardError: it fails.
    """
    # Another interpreter finds this package, and is no rank of a job.
    launchers = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_")
    kept = {k: v for k, v in environment().items() if not k.startswith(launchers)}
    kept |= {"PYTHONPATH": str(Path(lowshard.__file__).resolve().parents[1]), **(env or {})}
    try:
        ran = subprocess.run(
            [python, "-m", module, json.dumps(request)],
            capture_output=True, text=True, timeout=timeout_s, env=kept, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise TimedOut(f"{module} did not end within {timeout_s:g} s") from error
    if ran.returncode:
        raise LowshardError(f"{module} failed: {(ran.stderr.strip().splitlines() or ['no message'])[-1]}")
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


def has_package(python: str, package: str) -> bool:
    """Say whether an interpreter has a package."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        ran = subprocess.run([python, "-c", code], capture_output=True, timeout=60, check=False)
    except OSError:
        return False
    return ran.returncode == 0


if __name__ == "__main__":
    from lowshard.bench import bench_world

    bench_world.run_as_child(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
