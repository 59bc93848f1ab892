"""What a job's end means: the first cause, the exit code, the text."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lowshard.comm.abort import FailureRecord
from lowshard.errors import TimedOut

__all__ = ["JobResult", "failure_text", "first_cause", "judge", "one_each"]

_MPI_ERROR = "mpi4py.MPI.Exception"
_HINTS: dict[int | None, str] = {
    signal.SIGKILL: "; if nobody killed it, the kernel did for want of memory: see dmesg, start fewer ranks",
    signal.SIGBUS: "; /dev/shm may be full: see df /dev/shm",
}


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    Attributes:
        exit_code: 0, or the code of the first cause: an uncaught exception 1 (a lowshard error its own), a
            nonzero `sys.exit` its number, death by a signal 70, a lost host or a stopped rank 70, the time limit
            71, Ctrl-C 130.
        cause: "done", "exception", "exit", "signal", "stopped", "lost", "timeout", "interrupt" or "mpiexec".
        failed_rank: the rank that failed first, if a rank did.
        message: one line that says what happened; "" if all went well.
        seconds: wall-clock time from the start of mpiexec to the end of the last process.
        failures: the records of all ranks that failed, in order of time.
    """

    exit_code: int
    cause: str
    failed_rank: int | None
    message: str
    seconds: float
    failures: tuple[FailureRecord, ...] = ()


def first_cause(failures: Sequence[FailureRecord]) -> FailureRecord | None:
    """Returns the failure that brought the job down: the earliest that is not the consequence of another."""
    died = any(record.kind in ("signal", "lost", "stopped") and not record.consequence for record in failures)

    def order(record: FailureRecord) -> tuple[int, float, int]:
        ended_by_launcher = record.consequence and record.kind != "exception"
        mpi_noticed_a_death = died and record.error == _MPI_ERROR
        level = 3 if ended_by_launcher else 2 if record.consequence else 1 if mpi_noticed_a_death else 0
        return level, record.time_s, record.rank

    return min(failures, key=order, default=None)


def one_each(records: Iterable[FailureRecord]) -> tuple[FailureRecord, ...]:
    """Returns one record a rank, in order of time: the first that is no consequence, else the first."""
    chosen: dict[int, FailureRecord] = {}
    for record in sorted(records, key=lambda record: (record.consequence, record.time_s)):
        chosen.setdefault(record.rank, record)
    return tuple(sorted(chosen.values(), key=lambda record: record.time_s))


def judge(
    failures: tuple[FailureRecord, ...],
    n: int,
    seconds: float,
    *,
    status: int,
    ended_by: int | None = None,
    limit_s: float | None = None,
) -> JobResult:
    """Finds the first cause.

    Args:
        failures: records of the ranks that failed, one each.
        n: number of ranks.
        seconds: how long the job took.
        status: exit status of mpiexec.
        ended_by: the signal that made the launcher end the job, if one did.
        limit_s: the time limit, if it has passed.
    """
    result = JobResult(0, "done", None, "", seconds, failures)
    if ended_by is not None:
        message = f"ended by {signal.Signals(ended_by).name}; all ranks have been ended"
        return replace(result, exit_code=128 + ended_by, cause="interrupt", message=message)
    if limit_s is not None:
        message = (
            f"the {n} ranks were still running after the limit of {limit_s:g} s and have been ended; where each "
            f"Python rank was stands above; raise the limit if the job is only slow"
        )
        return replace(result, exit_code=TimedOut.exit_code, cause="timeout", message=message)
    first = first_cause(failures)
    if first is not None:
        message = f"rank {first.rank} failed first: {first.message}{_HINTS.get(first.signal, '')}"
        return replace(
            result, exit_code=first.exit_code, cause=first.kind, failed_rank=first.rank, message=message
        )
    if status:
        message = f"no rank reported a failure, but mpiexec ended with status {status}; its words are above"
        code = status if 0 < status < 128 else 1  # an MPI_Abort that mpiexec alone has seen: its number
        return replace(result, exit_code=code, cause="mpiexec", message=message)
    return result


def failure_text(result: JobResult) -> str:
    """Returns why a job failed, for people: the tracebacks, the first failing rank's last; "" if it did not."""
    if result.cause == "done":
        return ""
    who: dict[str, list[int]] = {}
    for record in result.failures:
        if record.traceback:
            who.setdefault(record.traceback, []).append(record.rank)
    parts = []
    for text, ranks in sorted(who.items(), key=lambda item: result.failed_rank in item[1]):
        name = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"
        parts.append(f"--- {name}\n{text.rstrip()}\n")
    return "".join(parts) + f"lowshard run: {result.message} (exit code {result.exit_code})\n"
