"""What each rank runs: `python -m lowshard.launch.child [--module | --exec] target args...`.

Under a launcher of ours (`LOWSHARD_JOB_DIR` is set) this is two processes. The outer one, the keeper, starts
the rank, waits, and notes how it ended: no mpiexec tells reliably which rank died first and of what. It also
ends the rank when the launcher itself is killed. The inner one, the rank, runs the target with its output tied
to the launcher's pipes, and turns an uncaught exception or a nonzero `sys.exit` into the end of the whole job.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.util
import io
import json
import os
import resource
import runpy
import select
import shutil
import signal
import socket
import sys
import time
import warnings
from pathlib import Path
from types import TracebackType

from lowshard.comm.abort import (
    JOB_DIR_VARIABLE,
    FailureRecord,
    end_job,
    has_failure,
    install_abort_hook,
    report_exception,
    report_failure,
)
from lowshard.errors import LaunchError, LowshardError, PeerFailed
from lowshard.launch.environment import find_rank
from lowshard.launch.job import ALIVE_NAME, OWN_TMPDIR_VARIABLE, RANK_DIR, STACK_SIGNAL, STREAM_NAMES

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # what mpiexec and people end a job with
_USAGE = "usage: python -m lowshard.launch.child [--module | --exec] target args..."


def main(argv: list[str]) -> int:
    """Runs one rank; returns its exit code where the rank ends in the ordinary way."""
    mode = "script"
    if argv and argv[0] in ("--module", "--exec"):
        mode, argv = argv[0][2:], argv[1:]
    if not argv:
        raise LaunchError(f"a rank needs something to run; {_USAGE}")
    launched = find_rank(os.environ)
    rank = 0 if launched is None else launched.rank
    own_tmpdir = os.environ.pop(OWN_TMPDIR_VARIABLE, None)
    if own_tmpdir is not None:
        os.environ["TMPDIR"] = own_tmpdir
        if not own_tmpdir:
            del os.environ["TMPDIR"]

    job_dir = os.environ.get(JOB_DIR_VARIABLE)
    if job_dir is not None:
        folder = Path(job_dir)
        _tie_output(folder, rank)
        keeper_pid = os.getpid()
        pid = _fork()
        if pid:
            return _keep(pid, rank, folder)
        _die_with(keeper_pid)
        _sign_in(folder, rank, takes_stack_signal=mode != "exec")
    if mode == "exec":
        return _exec(argv, rank)
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    return _run(mode, argv, rank)


def _run(mode: str, argv: list[str], rank: int) -> int:
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
            message = f"sys.exit({end.code!r})"
            report_failure(FailureRecord(rank, time.time(), "exit", code, message))
            end_job(code)
    except BaseException as error:
        # A child that the program forked may get here too; it is no rank, and must not end the job.
        if os.getpid() != rank_pid:
            raise
        error.with_traceback(_without_our_frames(error.__traceback__))
        if sys.excepthook.__module__ not in ("sys", install_abort_hook.__module__):
            sys.excepthook(type(error), error, error.__traceback__)  # the program has its own way to show it
        end_job(report_exception(rank, error))
    return 0


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
    """Ends the job for a target that is not there."""
    report_failure(FailureRecord(rank, time.time(), "exit", LaunchError.exit_code, message))
    end_job(LaunchError.exit_code)


def _exec(argv: list[str], rank: int) -> int:
    """Becomes another program."""
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        report_failure(
            FailureRecord(
                rank, time.time(), "exit", LaunchError.exit_code, f"cannot run {argv[0]!r}: {error.strerror}"
            )
        )
        os._exit(LaunchError.exit_code)


def _code_of(end: SystemExit) -> int:
    """Returns the exit code of a `sys.exit` and prints its text, as the interpreter would."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """Drops the outermost frames, of this module and of runpy, that say nothing about the user's program."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (
        __file__,
        runpy.__file__,
        "<frozen runpy>",
    ):
        trace = trace.tb_next
    return trace


def _tie_output(folder: Path, rank: int) -> None:
    """Ties this process's stdout and stderr to the launcher's pipes for this rank.

    mpiexec's own forwarding cuts and joins lines of different ranks. Where the pipes are not there (a rank on
    another host) it has to do.
    """
    for target_fd, name in enumerate(STREAM_NAMES, start=1):
        path = folder / f"{name}-{rank}"
        if not path.exists():
            continue
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # fails at once if the launcher has gone
        os.set_blocking(fd, True)
        os.dup2(fd, target_fd)
        os.close(fd)


def _fork() -> int:
    """Forks; NumPy's idle worker threads, which Python warns of, are no danger (BLAS handles a fork)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _die_with(keeper_pid: int) -> None:
    """Asks the kernel to kill this process when the keeper ends: nobody else would end it then."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper_pid:  # it ended before the kernel was asked
        os._exit(PeerFailed.exit_code)


def _sign_in(folder: Path, rank: int, takes_stack_signal: bool) -> None:
    """Tells the launcher where this rank runs."""
    about = {"pid": os.getpid(), "host": socket.gethostname(), "takes_stack_signal": takes_stack_signal}
    path = folder / RANK_DIR / f"{rank}.json"
    if path.parent.is_dir():
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(about), encoding="utf-8")
        draft.rename(path)


def _keep(pid: int, rank: int, folder: Path) -> int:
    """Waits for the rank, notes a bad end that the rank could not note itself, and ends in the same way."""
    told: list[int] = []
    # mpiexec signals the whole process group, so the rank has had these too: do not pass them on twice.
    for number in (*_ENDING, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda got, frame: told.append(got))
    launcher_lives = _wait(pid, folder)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    ended_s = time.time()
    job_over = any(number in _ENDING for number in told)
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else "?"
        message = f"killed by signal {-status} ({name})"
        code = PeerFailed.exit_code
        # mpiexec's SIGKILL goes to the keeper too: a keeper that sees its rank killed, sees it killed alone.
        swept = job_over and -status in _ENDING
        record = FailureRecord(rank, ended_s, "signal", code, message, signal=-status, consequence=swept)
    else:
        message = f"ended with exit code {status}"
        record = FailureRecord(rank, ended_s, "exit", status, message, consequence=job_over)
    if status and launcher_lives and not has_failure(folder, rank):
        report_failure(record)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core file, the rank's own, is enough
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(abs(status))


def _wait(pid: int, folder: Path) -> bool:
    """Returns when the rank has ended, whether the launcher lives; if it does not, ends the rank first."""
    rank_fd = os.pidfd_open(pid)
    watched = select.poll()
    watched.register(rank_fd, select.POLLIN)
    alive = folder / ALIVE_NAME
    alive_fd = os.open(alive, os.O_RDONLY | os.O_NONBLOCK) if alive.exists() else -1
    if alive_fd >= 0:
        watched.register(alive_fd, 0)  # no data ever comes: only the hang-up is of interest
    ready = [fd for fd, _ in watched.poll()]
    if rank_fd in ready:
        return True
    os.kill(pid, signal.SIGKILL)
    watched.unregister(alive_fd)
    watched.poll()
    shutil.rmtree(folder, ignore_errors=True)  # whoever made it can no longer do so
    return False


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except LowshardError as problem:
        print(f"lowshard: {problem}", file=sys.stderr)
        code = problem.exit_code
    sys.exit(code)
