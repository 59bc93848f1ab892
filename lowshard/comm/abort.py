"""Ends every rank when one fails: say who and why, tell the others, end the job.

Without this an uncaught exception in one rank leaves the others waiting for ever: Python runs mpi4py's
finalize on the way out, and finalize waits for the ranks that wait in a collective.

The other ranks hear of it over the failure channel (`lowshard.comm.failure`) first, and have a moment to say where
they were. Under `lowshard run` the launcher gets a `FailureRecord` over the same channel, prints it and ends the job;
else the traceback goes to stderr, with the rank in front of each line, and MPI ends the job.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import ModuleType, TracebackType
from typing import Any, NoReturn, Self

from lowshard.comm.failure import begin_end, channels
from lowshard.errors import CommError, MismatchError, PeerFailed, TimedOut

__all__ = [
    "FailureRecord", "await_end", "end_job", "exit_code_of", "fail", "fail_with", "install_abort_hook", "show_by",
]  # fmt: skip

_ABORT_LIMIT_S = 2.0
_SPEAK_S = 0.5  # from telling the others of a failure to the abort that would cut them off
_SURVIVOR_SPEAK_S = (
    1.0  # longer: the abort of the rank that failed first, and its exit code, are to come first
)
_MOST_CHARACTERS = 100_000  # of a traceback
_INTERRUPTED = 130  # what a shell reports for a program that SIGINT ended

_installed: dict[str, int] = {}  # "pid": the process that holds the hook; a forked child must not end the job
_ending = threading.RLock()  # held, from then on, by the thread that ends this process


@dataclass(frozen=True)
class FailureRecord:
    """Why one rank ended badly, as the launcher reads it.

    Attributes:
        rank: the rank that failed.
        kind: "exception", "exit" (a nonzero `sys.exit` or `os._exit`), "left" (it ended with 0 while others waited
            for it), "signal" or "lost" (its host cannot be reached, or its supervisor is gone).
        exit_code: what the job returns if this failure is the first cause.
        message: one line: that of the exception, or what happened.
        traceback: the full text, or "".
        error: qualified class name of the exception, or "".
        signal: number of the signal that ended the rank, if one did.
        consequence: true where another rank failed first (a `PeerFailed`, or an end after a failure was known).
        about: the ranks that a `PeerFailed` or a `TimedOut` is about, where they are known.
    """

    rank: int
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
        """Returns the record that `asdict` and JSON have made fields of; TypeError or KeyError where they are none."""
        return cls(**{**fields, "about": tuple(fields["about"])})


def exit_code_of(error: BaseException) -> int:
    """Returns the exit code of an uncaught exception: 72, 71, 70 for our multi-rank errors, 130 for Ctrl-C, else 1.

    Wrong usage (2) is what a command line says of its own arguments, not what a program died of.
    """
    if isinstance(error, CommError):
        return error.exit_code
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def fail(rank: int, error: BaseException) -> NoReturn:
    """Ends this process, and the job, for an uncaught exception in any of its threads; says so first.

    The first thread to come here ends the process. All others wait here for that end: what they would say may follow
    from what the first one has told the other ranks.
    """
    _begin_end()
    _report(record_of(rank, error), error)
    end_job(exit_code_of(error))


def fail_with(record: FailureRecord) -> NoReturn:
    """Does as `fail` for a failure that is not an exception."""
    _begin_end()
    _report(record, None)
    end_job(record.exit_code)


def await_end() -> None:
    """Waits for the end of this process if one of its threads is ending it; else returns at once."""
    _begin_end()
    _ending.release()


def record_of(rank: int, error: BaseException) -> FailureRecord:
    """Returns the record of an uncaught exception."""
    told = traceback.TracebackException.from_exception(error)
    text = "".join(told.format())
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[: _MOST_CHARACTERS // 2]}\n[...]\n{text[-_MOST_CHARACTERS // 2 :]}"
    told.__notes__ = []  # the line says what went wrong, a note what else there is to say
    last = [*told.format_exception_only()][-1].strip()[:_MOST_CHARACTERS]
    cls = type(error)
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    return FailureRecord(
        rank, "exception", exit_code_of(error), last, text, name, consequence=isinstance(error, PeerFailed),
        about=error.ranks if isinstance(error, CommError) else (),
    )  # fmt: skip


def end_job(exit_code: int) -> NoReturn:
    """Ends this process at once, and all ranks with it. Never returns.

    No finalize, no exit handlers: any of them may wait for a rank that waits for this one. The other ranks are told,
    and have a moment to speak; under `lowshard run` it is the launcher that ends them.
    """
    _begin_end()
    _flush_output()
    begin_end()
    for channel in channels():
        channel.tell("exit", f"exit code {exit_code}")
    if not any(channel.is_launchers for channel in channels()):
        speak_s = [_SPEAK_S if c.failed_rank == c.rank else _SURVIVOR_SPEAK_S for c in channels()]
        # One after the other: Open MPI's launcher may hang where several ranks abort at once.
        turn_s = min(0.1 * max((c.rank for c in channels()), default=0), 1.0)
        time.sleep(max(speak_s, default=0.0) + turn_s)
        # The abort itself may hang (a broken network, a library in a bad state); this process ends all the same.
        backstop = threading.Timer(_ABORT_LIMIT_S, os._exit, (exit_code,))
        backstop.daemon = True
        backstop.start()
        mpi = _running_mpi()
        if mpi is not None:
            mpi.COMM_WORLD.Abort(exit_code)
    os._exit(exit_code)


def install_abort_hook(rank: int | None = None) -> None:
    """Makes an uncaught exception in any thread of this rank end the whole job, with the rank in the traceback.

    May be called any number of times. Hooks that the program had put in `sys.excepthook` and `threading.excepthook`
    are called before the job ends. Nothing changes in an interactive session, in a forked child, or in a world of
    one rank. A nonzero `sys.exit` does not come through here (Python offers no hook for it); `lowshard run` handles it.
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


def show_by(hook: Callable[..., object], *args: object) -> None:
    """Has a program's own hook show an exception. What goes wrong in it is printed, and the job ends all the same."""
    try:
        hook(*args)
    except BaseException:
        traceback.print_exc()


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


def _begin_end() -> None:
    """Returns in the first thread that comes here, every time that it does; in all others never."""
    if not _ending.acquire(blocking=False):
        threading.Event().wait()


def _report(record: FailureRecord, error: BaseException | None) -> None:
    """Tells the others of a failure, and the launcher; where there is none, prints it to stderr.

    Of ranks that fail alike, the one whose telling came first prints its text, and the others a line.
    """
    kind = "exit" if error is None else "failed"
    if isinstance(error, TimedOut):
        kind = "timed out"
    elif isinstance(error, MismatchError):
        kind = "disagreed"
    about = None
    if isinstance(error, PeerFailed) and error.ranks:  # that one has left, or its failure is known
        kind, about = "left", error.ranks[0]
    text = str(error) if kind in ("timed out", "disagreed") else record.message
    if about is not None:
        text = f"while rank {record.rank} waited for it"
    launcher = next((channel for channel in channels() if channel.is_launchers), None)
    if launcher is not None:
        launcher.tell(kind, text, asdict(record), about)
        return
    for channel in channels():
        channel.tell(kind, text, about=about)
    same = next((c for c in channels() if c.failed_rank not in (None, record.rank) and text in c.cause), None)
    shown = record.traceback.rstrip("\n") or record.message
    if same is not None and not record.consequence:
        shown = f"the same error as on rank {same.failed_rank}"
    if sys.stderr is not None:  # in one write, so that ranks do not mix their lines
        sys.stderr.write("".join(f"rank {record.rank} | {line}\n" for line in shown.splitlines()))
        sys.stderr.flush()


def _fail_here(rank: int | None, error: BaseException) -> NoReturn:
    """Ends the job for an exception of this process, whatever its rank."""
    _flush_output()
    mpi = _running_mpi()
    own = 0 if mpi is None else int(mpi.COMM_WORLD.Get_rank())
    fail(own if rank is None else rank, error)


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


def _flush_output() -> None:
    """Pushes out what this process has printed; a closed or broken stream has nothing left to save."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            try:
                stream.flush()
            except (BrokenPipeError, ValueError):
                continue
