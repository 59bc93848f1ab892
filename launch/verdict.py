"""What a job's end means: the first cause, the exit code, the text."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from lowshard.comm.abort import FailureRecord
from lowshard.comm.call import innermost_line
from lowshard.comm.wait_guard import names_of
from lowshard.errors import PeerFailed, TimedOut

__all__ = ["JobResult", "Leaver", "failure_text", "first_cause", "judge", "place_in", "unwritten"]

_MPI_ERROR = "mpi4py.MPI.Exception"
_FRAME = re.compile(r'File "(.+)", line (\d+) in ')
_MOST_PLACES = 8
_HINTS: dict[int | None, str] = {
    signal.SIGKILL: "; if nobody killed it, the kernel did for want of memory: see dmesg, start fewer ranks",
    signal.SIGBUS: "; /dev/shm may be full: see df /dev/shm",
}


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    Attributes:
        exit_code: 0, or the code of the first cause: an uncaught exception 1 (a lowshard error its own), a
            nonzero `sys.exit` its number, death by a signal 70, a lost host 70, the time limit
            71, Ctrl-C 130, output that cannot be written 1, or 141 where its reader has gone.
        cause: "done", "exception", "exit", "left" (with exit code 0, while others needed it), "signal",
            "lost", "timeout", "interrupt", "output" (it cannot be written) or "mpiexec".
        failed_rank: the rank that failed first, if a rank did: the one that others waited for in vain, not those.
        message: one line that says what happened; "" if all went well.
        seconds: wall-clock time from the start of mpiexec to the end of the last process.
        failures: the records of all ranks that failed, in order of time.
        is_bare: whether no more is known than an exit code: mpiexec's own words may say why.
    """

    exit_code: int
    cause: str
    failed_rank: int | None
    message: str
    seconds: float
    failures: tuple[FailureRecord, ...] = ()
    is_bare: bool = False


@dataclass(frozen=True)
class Leaver:
    """A rank that has left with exit code 0, as a rank does at the end of the job, or too early."""

    rank: int
    in_order: bool
    """Whether its program came to its end; else the process ended inside it (`os._exit`)."""


def first_cause(failures: Sequence[FailureRecord], leavers: Sequence[Leaver] = ()) -> FailureRecord | None:
    """Returns the failure that brought the job down: the earliest that is not the consequence of another.

    A rank that has left with exit code 0 leaves no record. It is the cause where the others' records name it, or where
    it left without MPI's finalize and all that happened to the others follows from that. Where the first record is a
    wait for a rank that never came, the rank that is returned is that one.
    """
    if not failures:
        return None
    abrupt = next((leaver.rank for leaver in leavers if not leaver.in_order), None)
    died = abrupt is not None or any(r.kind in ("signal", "lost") and not r.consequence for r in failures)

    def distance(record: FailureRecord) -> int:
        """Returns how far a failure is from the cause: 0 for one that may be it."""
        if record.consequence:
            return 2 if record.kind == "exception" else 3
        return 1 if died and record.error == _MPI_ERROR else 0

    first = min(failures, key=distance)
    if distance(first) == 0 and not first.about:
        return first
    named = _named(first, failures)
    if named is None and distance(first) > 0:
        named = abrupt
    if named is None:
        return None if first.consequence and first.kind == "signal" else first
    left = next((leaver for leaver in leavers if leaver.rank == named), None)
    if left is not None:
        return _record_of(left)
    return replace(first, rank=named, message=f"rank {first.rank} waited for it in vain: {first.message}")


def _named(first: FailureRecord, failures: Sequence[FailureRecord]) -> int | None:
    """Returns the rank that a record is about in the end: those that are about others themselves are passed over."""
    complains = {record.rank: record for record in failures if record.consequence and record.about}
    named, seen = first, {first.rank}
    while named.about:
        rank = named.about[0]
        if rank not in complains:
            return rank
        if rank in seen:
            return None
        seen.add(rank)
        named = complains[rank]
    return None


def _record_of(leaver: Leaver) -> FailureRecord:
    how = "its program came to its end" if leaver.in_order else "os._exit, or an exit in a library"
    text = f"it left with exit code 0 ({how}) while other ranks still ran; all ranks make the same collective calls"
    return FailureRecord(leaver.rank, "left", PeerFailed.exit_code, text)


def judge(
    failures: tuple[FailureRecord, ...],
    n: int,
    seconds: float,
    *,
    status: int = 0,
    leavers: Sequence[Leaver] = (),
    has_abrupt_leaver: bool = False,
    ended_by: int | None = None,
    limit_s: float | None = None,
    places: Mapping[int, str] = MappingProxyType({}),
) -> JobResult:
    """Finds the first cause.

    Args:
        failures: records of the ranks that failed, one each, in order of time.
        n: number of ranks.
        seconds: how long the job took.
        status: exit status of mpiexec, where it ended before the ranks.
        leavers: the ranks that have left with exit code 0, in order of time.
        has_abrupt_leaver: whether one that has left inside its program has left the others alone.
        ended_by: the signal that made the launcher end the job, if one did.
        limit_s: the time limit, if it has passed.
        places: file and line in which ranks were then, "" where that is not known.
    """
    result = JobResult(0, "done", None, "", seconds, failures)
    if ended_by is not None:
        message = f"ended by {signal.Signals(ended_by).name}; all ranks have been ended"
        return replace(result, exit_code=128 + ended_by, cause="interrupt", message=message)
    if limit_s is not None:
        gone = sorted(leaver.rank for leaver in leavers)
        left = [rank for rank in range(n) if rank not in gone]
        who = f"{names_of(left)} of {n}" if gone else f"the {n} ranks"
        message = (
            f"{who} were still running after the limit of {limit_s:g} s and have been ended; where each "
            f"Python rank was stands above; raise the limit if the job is only slow"
        )
        if gone:
            message += f"; {names_of(gone)} had left with exit code 0"
        elif len(set(places.values())) > 1:
            message += f"; {_places_text(places)}"
        return replace(result, exit_code=TimedOut.exit_code, cause="timeout", message=message)
    first = first_cause(failures, leavers)
    if first is None and has_abrupt_leaver:
        first = next((_record_of(leaver) for leaver in leavers if not leaver.in_order), None)
    if first is not None:
        message = f"rank {first.rank} failed first: {first.message}{_HINTS.get(first.signal, '')}"
        return replace(
            result, exit_code=first.exit_code, cause=first.kind, failed_rank=first.rank, message=message,
            is_bare=first.kind == "exit" and first.message.startswith("ended with exit code"),
        )  # fmt: skip
    if status:
        message = f"no rank reported a failure, but mpiexec ended with status {status}; its words are above"
        code = status if 0 < status < 128 else 1  # an MPI_Abort that mpiexec alone has seen: its number
        return replace(result, exit_code=code, cause="mpiexec", message=message, is_bare=True)
    return result


def unwritten(result: JobResult, error: OSError | ValueError) -> JobResult:
    """Returns the result of a job whose output cannot be written."""
    if isinstance(error, BrokenPipeError):  # whoever reads it has read enough
        return judge(result.failures, 0, result.seconds, ended_by=signal.SIGPIPE)
    reason = getattr(error, "strerror", None) or error
    message = f"what the ranks print cannot be written: {reason}; all ranks have been ended"
    return replace(result, exit_code=1, cause="output", failed_rank=None, message=message)


def place_in(stacks: bytes) -> str:
    """Returns file and line in which a rank's main thread was ("train.py:31"), out of the stacks that it printed."""
    main_thread = stacks.decode(errors="replace").rpartition("(most recent call first):")[2]
    return innermost_line((file, int(line)) for file, line in _FRAME.findall(main_thread))


def _places_text(places: Mapping[int, str]) -> str:
    """Returns which ranks were where; those that are alone last."""
    ranks_at: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        ranks_at.setdefault(place or "an unknown line", []).append(rank)
    groups = sorted(ranks_at.items(), key=lambda group: -len(group[1]))
    parts = [f"{names_of(ranks)} {'were' if ranks[1:] else 'was'} in {place}" for place, ranks in groups]
    return ", ".join([*parts[:_MOST_PLACES], *(["others elsewhere"] if parts[_MOST_PLACES:] else [])])


def failure_text(result: JobResult) -> str:
    """Returns why a job failed, for people: the tracebacks, the first failing rank's last; "" if it did not."""
    if result.cause == "done":
        return ""
    who: dict[str, list[int]] = {}
    for record in result.failures:
        if record.traceback:
            who.setdefault(record.traceback, []).append(record.rank)
    parts = []
    genuine = {record.rank for record in result.failures if not record.consequence}

    def nearness(item: tuple[str, list[int]]) -> tuple[bool, bool]:
        return result.failed_rank in item[1], not genuine.isdisjoint(item[1])

    for text, ranks in sorted(who.items(), key=nearness):
        name = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"
        parts.append(f"--- {name}\n{text.rstrip()}\n")
    return "".join(parts) + f"lowshard run: {result.message} (exit code {result.exit_code})\n"
