"""What each rank runs: `python -m lowshard.launch.child [--module | --exec] target args...`.

Under a launcher of ours (`LOWSHARD_LINK` is set) this is two processes: the supervisor (`launch/supervisor.py`), which
is mpiexec's child, and the rank. The rank runs the target, and turns an uncaught exception or a nonzero `sys.exit` into
the end of the whole job.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import io
import os
import runpy
import sys
import warnings
from types import TracebackType
from typing import NoReturn

from lowshard import settings
from lowshard.comm.abort import (
    FailureRecord,
    await_end,
    fail,
    fail_with,
    install_abort_hook,
    show_by,
)
from lowshard.comm.failure import launcher_channel
from lowshard.errors import LaunchError, LowshardError
from lowshard.launch.environment import find_rank
from lowshard.launch.streams import open_closed_streams
from lowshard.launch.supervisor import STACK_SIGNAL, Supervisor

__all__ = ["main"]

_USAGE = "usage: python -m lowshard.launch.child [--module | --exec] target args..."


def main(argv: list[str]) -> int:
    """Runs one rank; returns its exit code where the rank ends in the ordinary way."""
    mode = "script"
    if argv and argv[0] in ("--module", "--exec"):
        mode, argv = argv[0][2:], argv[1:]
    if not argv:
        raise LaunchError(f"a rank needs something to run; {_USAGE}")
    launched = find_rank(settings.environment())
    rank = 0 if launched is None else launched.rank
    if settings.USER_TMPDIR.is_set():
        settings.change("TMPDIR", settings.USER_TMPDIR.text() or None)
        settings.change(settings.USER_TMPDIR.name, None)
    if settings.LINK.is_set():
        supervisor = Supervisor(rank)
        pid = _fork()
        if pid:
            supervisor.supervise(pid)
        supervisor.become_rank()
    if mode == "exec":
        _exec(argv, rank)
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    channel = launcher_channel(rank)
    if channel is not None:
        channel.say(do="speaks")
    _run(mode, argv, rank)
    return 0


def _run(mode: str, argv: list[str], rank: int) -> None:
    """Runs a Python script or module as `__main__`, and ends the job if it fails."""
    install_abort_hook(rank)
    rank_pid = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # the launcher shows the lines while the job runs
    try:
        _run_target(mode, argv, rank)
    except SystemExit as end:
        if os.getpid() != rank_pid:
            raise
        code = _code_of(end)
        if code:
            fail_with(FailureRecord(rank, "exit", code, f"sys.exit({end.code!r})"))
    except BaseException as error:
        # A child that the program forked may get here too; it is not a rank, and must not end the job.
        if os.getpid() != rank_pid:
            raise
        await_end()  # another thread may have failed, and this error be what came of it
        error.with_traceback(_without_our_frames(error.__traceback__))
        if sys.excepthook.__module__ not in ("sys", install_abort_hook.__module__):
            show_by(sys.excepthook, type(error), error, error.__traceback__)
        fail(rank, error)
    if os.getpid() == rank_pid:
        await_end()  # a thread may have failed


def _code_of(end: SystemExit) -> int:
    """Returns the exit code of a `sys.exit` and prints its text, as the interpreter would."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    with contextlib.suppress(Exception):  # the program has closed stderr, or its text has no str()
        print(end.code, file=sys.stderr)
    return 1


def _run_target(mode: str, argv: list[str], rank: int) -> None:
    """Runs the target with `sys.argv` and `sys.path` as `python target` would set them."""
    target = argv[0]
    sys.argv = list(argv)
    if mode == "module":
        if not _module_exists(target):
            _wrong_usage(rank, f"no module named {target!r}; give the name that `python -m` takes")
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    if not os.path.exists(target):
        _wrong_usage(rank, f"no script {target!r} in {os.getcwd()}")
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.abspath(target))
    runpy.run_path(target, run_name="__main__")


def _module_exists(name: str) -> bool:
    """Says whether `python -m name` would find something; errors inside a parent package come out."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return False
        raise


def _wrong_usage(rank: int, message: str) -> None:
    fail_with(FailureRecord(rank, "exit", LaunchError.exit_code, message))


def _exec(argv: list[str], rank: int) -> NoReturn:
    """Becomes another program."""
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        message = f"cannot run {argv[0]!r}: {error.strerror}"
        fail_with(FailureRecord(rank, "exit", LaunchError.exit_code, message))


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """Drops the outermost frames, of this module and of runpy, that say nothing about the user's program."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (
        __file__,
        runpy.__file__,
        "<frozen runpy>",
    ):
        trace = trace.tb_next
    return trace


def _fork() -> int:
    """Forks; NumPy's idle worker threads, which Python warns of, are no danger (BLAS handles a fork)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


if __name__ == "__main__":
    open_closed_streams()
    try:
        code = main(sys.argv[1:])
    except LowshardError as problem:
        print(f"lowshard: {problem}", file=sys.stderr)
        code = problem.exit_code
    sys.exit(code)
