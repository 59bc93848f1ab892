"""Ends every rank when one fails: say who and why, leave a record, abort the job.

Without this an uncaught exception in one rank leaves the others waiting for ever: Python runs mpi4py's
finalize on the way out, and finalize waits for the ranks that wait in a collective.

Where there is a side channel (`lowshard.comm.watch`) the others hear of the failure first, in milliseconds, and
have a moment to say where they were before the abort ends them.

A launcher that wants to know more than an exit status names a directory in `LOWSHARD_JOB_DIR`; each rank that
fails leaves one `FailureRecord` there, and the launcher prints it. Where there is no such directory the
traceback goes to stderr, with the rank in front of each line.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Literal, NoReturn, Protocol, Self

from lowshard.comm.call import innermost_line
from lowshard.errors import CommError, MismatchError, PeerFailed, TimedOut
from lowshard.settings import JOB_DIR

__all__ = [
    "FailureRecord",
    "add_watch",
    "await_end",
    "end_job",
    "exit_code_of",
    "fail",
    "fail_with",
    "flush_output",
    "forced_end_parts",
    "install_abort_hook",
    "leave_forced_end",
    "read_failures",
    "remove_watch",
    "report_exception",
    "show_by",
    "world_rank",
    "write_failure",
]

_FAILURE_DIR = "failures"
_ABORT_LIMIT_S = 2.0
_FIRST_CAUSE_S = 0.3
_SPEAK_S = 0.5  # from telling the others of a failure to the abort that would cut them off
_SURVIVOR_SPEAK_S = (
    1.0  # longer: the abort of the rank that failed first, and its exit code, are to come first
)
_INTERRUPTED = 130  # what a shell reports for a program that SIGINT ended

Told = Literal["failed", "exit", "timed out", "disagreed"]

_installed: dict[str, int] = {}  # "pid": the process that holds the hook; a forked child must not end the job
_ending = threading.RLock()  # held, from then on, by the thread that ends this process


class _Watch(Protocol):
    """What this module needs of the side channel."""

    rank: int

    @property
    def failed_rank(self) -> int | None: ...

    def said_before(self, text: str) -> int | None: ...

    def tell(self, kind: Told, text: str) -> None: ...

    def ending(self, exit_code: int, within_s: float) -> None: ...


_watches: list[_Watch] = []


@dataclass(frozen=True)
class FailureRecord:
    """Why one rank ended badly, as the launcher reads it.

    Attributes:
        rank: the rank that failed.
        time_s: wall-clock time of the failure, seconds since the epoch.
        kind: "exception", "exit" (a nonzero `sys.exit` or `os._exit`), "left" (it ended with 0 while others waited
            for it), "signal", "stopped" (not continued) or "lost" (its host cannot be reached).
        exit_code: what the job returns if this failure is the first cause.
        message: one line: the last line of the traceback, or what happened.
        traceback: the full text, or "".
        error: qualified class name of the exception, or "".
        signal: number of the signal that ended the rank, if one did.
        consequence: true where another rank failed first (a `PeerFailed`, or a signal sent by mpiexec's clean-up).
        about: the ranks that a `PeerFailed` or a `TimedOut` is about, where they are known.
    """

    rank: int
    time_s: float
    kind: str
    exit_code: int
    message: str
    traceback: str = ""
    error: str = ""
    signal: int | None = None
    consequence: bool = False
    about: tuple[int, ...] = ()

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Returns the record that `asdict` and JSON have made fields of."""
        return cls(**{**fields, "about": tuple(fields["about"])})


def write_failure(job_dir: Path, record: FailureRecord) -> None:
    """Leaves a rank's record in the job directory; the first one of a rank stands.

    Raises:
        OSError: the directory is not there (any more), or cannot be written.
    """
    folder = job_dir / _FAILURE_DIR
    if has_failure(job_dir, record.rank):
        return
    draft = folder / f".{record.rank}-{os.getpid()}-{threading.get_ident()}"
    draft.write_text(json.dumps(asdict(record)), encoding="utf-8")
    draft.rename(folder / f"{record.rank}.json")  # so that the launcher sees it whole or not at all


def read_failures(job_dir: Path) -> tuple[FailureRecord, ...]:
    """Returns the records that the ranks of a job have left so far, in order of time."""
    paths = (job_dir / _FAILURE_DIR).glob("[0-9]*.json")
    records = [FailureRecord.from_fields(json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    return tuple(sorted(records, key=lambda record: record.time_s))


def has_failure(job_dir: Path, rank: int) -> bool:
    """Says whether a rank has left its record."""
    return (job_dir / _FAILURE_DIR / f"{rank}.json").exists()


def make_failure_dir(job_dir: Path) -> None:
    """Makes the place for the records; the launcher calls this once."""
    (job_dir / _FAILURE_DIR).mkdir()


def exit_code_of(error: BaseException) -> int:
    """Returns the exit code of an uncaught exception: 72, 71, 70 for our multi-rank errors, 130 for Ctrl-C, else 1.

    Wrong usage (2) is what a command line says of its own arguments, not what a program died of.
    """
    if isinstance(error, CommError):
        return error.exit_code
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def add_watch(watch: _Watch) -> None:
    """Has a side channel told of this process's failures from now on."""
    _watches.append(watch)


def remove_watch(watch: _Watch) -> None:
    """Forgets a side channel."""
    if watch in _watches:
        _watches.remove(watch)


def world_rank(otherwise: int) -> int:
    """Returns this process's rank in the job, as its records have it; where MPI is not running, the one given."""
    mpi = _running_mpi()
    return otherwise if mpi is None else int(mpi.COMM_WORLD.Get_rank())


def leave_forced_end(rank: int, exit_code: int, message: str) -> None:
    """Leaves the record, if a launcher wants one, of a process that is ended since another rank failed."""
    job_dir = JOB_DIR.text()
    if job_dir:
        # The line on stderr says the same: a launcher that is gone, or on another host, loses nothing.
        with contextlib.suppress(OSError):
            write_failure(Path(job_dir), _forced_end(rank, time.time(), exit_code, message))


def forced_end_parts(rank: int) -> bytes:
    """Returns what `leave_forced_end` would write, in parts, for code that has no interpreter to do it.

    The name of a draft, the name it gets, and the text before the time, the exit code and the message and after
    it, each with a 0 at its end. Nothing where no launcher wants a record.
    """
    job_dir = JOB_DIR.text()
    if not job_dir:
        return b""
    folder = os.path.join(os.path.abspath(job_dir), _FAILURE_DIR)
    marks = (0.12345, 98765, "MESSAGE")
    rest = json.dumps(asdict(_forced_end(rank, *marks)))
    parts = [f"{folder}/.{rank}-{os.getpid()}-forced", f"{folder}/{rank}.json"]
    for mark in marks:
        before, _, rest = rest.partition(str(mark))
        parts.append(before)
    return b"".join(os.fsencode(part) + b"\0" for part in (*parts, rest))


def _forced_end(rank: int, time_s: float, exit_code: int, message: str) -> FailureRecord:
    return FailureRecord(rank, time_s, "exit", exit_code, message, consequence=True)


def _tell(kind: Told, text: str) -> None:
    """Tells the other ranks; where they know of a failure already, that one stands."""
    for watch in (*_watches,):
        watch.tell(kind, text)


def fail(rank: int, error: BaseException) -> NoReturn:
    """Ends this process, and the job, for an uncaught exception in any of its threads; says so first.

    The first thread to come here ends the process. All others wait here for that end: what they would say may follow
    from what the first one has told the other ranks.
    """
    _begin_end()
    end_job(report_exception(rank, error))


def fail_with(record: FailureRecord) -> NoReturn:
    """Does as `fail` for a failure that is not an exception."""
    _begin_end()
    _report(record, "exit", record.message)
    end_job(record.exit_code)


def await_end() -> None:
    """Waits for the end of this process if one of its threads is ending it; else returns at once."""
    _begin_end()
    _ending.release()


def _begin_end() -> None:
    """Returns in the first thread that comes here, every time that it does; in all others never."""
    if not _ending.acquire(blocking=False):
        threading.Event().wait()


def _report(record: FailureRecord, kind: Told, text: str) -> None:
    """Hands a record to the launcher; where there is none, prints it to stderr with the rank in each line.

    With a launcher the others are told only then: what they do about it may end this process. Without one they are told
    first, and leave it a second to speak: of ranks that fail alike, the one whose telling came first prints its text,
    and the others a line.
    """
    if _left_record(record):
        _tell(kind, text)
        return
    _tell(kind, text)
    first = next((rank for w in _watches if (rank := w.said_before(text)) is not None), None)
    shown = record.traceback.rstrip("\n") or record.message
    if first is not None:
        place = re.findall(r'File "(.+)", line (\d+)', record.traceback)
        line = innermost_line((file, int(number)) for file, number in reversed(place))
        shown = f"the same error as on rank {first}{f', at {line}' if line else ''}"
    _say("".join(f"rank {record.rank} | {line}\n" for line in shown.splitlines()))


def _left_record(record: FailureRecord) -> bool:
    """Leaves a record for the launcher; says whether there is one that wants it, and could."""
    job_dir = JOB_DIR.text()
    if not job_dir:
        return False
    try:
        write_failure(Path(job_dir), record)
    except OSError as error:  # another host, or the launcher is gone: the text must not be lost
        _say(f"rank {record.rank} | no record of this failure in {job_dir}: {error}\n")
        return False
    return True


def _say(text: str) -> None:
    """Prints to stderr, where there is one, in one write, so that ranks do not mix their lines."""
    if sys.stderr is not None:
        sys.stderr.write(text)
        sys.stderr.flush()


def report_exception(rank: int, error: BaseException) -> int:
    """Reports an uncaught exception of this rank, and returns the exit code that goes with it.

    A survivor (`PeerFailed`) waits a moment: the abort that follows would cut off the rank that failed first.
    """
    lines = list(traceback.TracebackException.from_exception(error).format())
    code = exit_code_of(error)
    last = traceback.format_exception_only(error)[-1].strip()
    cls = type(error)
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    consequence = isinstance(error, PeerFailed)
    about = error.ranks if isinstance(error, CommError) else ()
    record = FailureRecord(
        rank, time.time(), "exception", code, last, "".join(lines), name, consequence=consequence, about=about
    )
    if isinstance(error, TimedOut):
        _report(record, "timed out", str(error))
    elif isinstance(error, MismatchError):
        _report(record, "disagreed", str(error))
    else:
        _report(record, "failed", last)
    if consequence and not _watches:  # with a watch it is `end_job` that waits
        time.sleep(_FIRST_CAUSE_S)
    return code


def end_job(exit_code: int) -> NoReturn:
    """Ends this process at once and, where MPI is running, all ranks with it. Never returns.

    No finalize, no exit handlers: any of them may wait for a rank that waits for this one. The other ranks are told,
    and have a moment to speak.
    """
    _begin_end()
    flush_output()
    _tell("exit", f"exit code {exit_code}")
    speak_s = max((_SPEAK_S if w.failed_rank == w.rank else _SURVIVOR_SPEAK_S for w in _watches), default=0.0)
    for watch in _watches:
        watch.ending(exit_code, speak_s + 1.5 * _ABORT_LIMIT_S)
    time.sleep(speak_s)
    # The abort itself may hang (a broken network, a library in a bad state); this process ends all the same.
    backstop = threading.Timer(_ABORT_LIMIT_S, os._exit, (exit_code,))
    backstop.daemon = True
    backstop.start()
    mpi = _running_mpi()
    if mpi is not None:
        if JOB_DIR.is_set():
            # The launcher says it better than MPICH's own line, which comes on this rank's stderr.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        mpi.COMM_WORLD.Abort(exit_code)
    os._exit(exit_code)


def install_abort_hook(rank: int | None = None) -> None:
    """Makes an uncaught exception in any thread of this rank end the whole job, with the rank in the traceback.

    May be called any number of times. Hooks that the program had put in `sys.excepthook` and `threading.excepthook`
    are called before the job ends. Nothing changes in an interactive session, in a forked child, or in a world of
    one rank. A nonzero `sys.exit` does not come through here (Python offers no hook for it); `lowshard run` handles it.

    Args:
        rank: this process's rank, if known before MPI is initialised; else MPI is asked when the time comes.
    """
    _wrap_thread_hook(rank)
    if _installed.get("pid") == os.getpid():
        return
    _installed["pid"] = os.getpid()
    previous_hook = sys.excepthook

    def hook(cls: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not _must_end_job(rank):
            previous_hook(cls, error, trace)
            return
        if previous_hook is not sys.__excepthook__:
            show_by(previous_hook, cls, error, trace)
        _fail_here(rank, error)

    sys.excepthook = hook


def _wrap_thread_hook(rank: int | None) -> None:
    """Puts ours before the hook for threads that is there now: a program may have set one since a launcher put ours."""
    previous_hook = threading.excepthook
    if getattr(previous_hook, "__module__", "") == __name__:
        return

    def hook(args: threading.ExceptHookArgs) -> None:
        error = args.exc_value
        if error is None or isinstance(error, SystemExit) or not _must_end_job(rank):
            previous_hook(args)  # Python's own says nothing about a SystemExit in a thread, nor do we
            return
        if previous_hook is not threading.__excepthook__:
            show_by(previous_hook, args)
        _fail_here(rank, error)

    threading.excepthook = hook


def show_by(hook: Callable[..., object], *args: object) -> None:
    """Has a program's own hook show an exception. What goes wrong in it is printed, and the job ends all the same."""
    try:
        hook(*args)
    except BaseException:
        traceback.print_exc()


def _fail_here(rank: int | None, error: BaseException) -> NoReturn:
    """Ends the job for an exception of this process, whatever its rank."""
    flush_output()
    fail(world_rank(0) if rank is None else rank, error)


def _must_end_job(rank: int | None) -> bool:
    """Says whether other ranks could hang if only this process went away."""
    if _installed.get("pid") != os.getpid() or hasattr(sys, "ps1") or sys.flags.interactive:
        return False
    if rank is not None:  # our launcher started it as a rank
        return True
    mpi = _running_mpi()
    return mpi is not None and mpi.COMM_WORLD.Get_size() > 1


def _running_mpi() -> ModuleType | None:
    """Returns mpi4py.MPI if this process has loaded it and MPI is between init and finalize."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    return mpi


def flush_output() -> None:
    """Pushes out what this process has printed; a closed or broken stream has nothing left to save."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            try:
                stream.flush()
            except (BrokenPipeError, ValueError):
                continue
