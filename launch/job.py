"""Starts ranks with mpiexec, watches them, and leaves nothing behind.

A job has a directory of its own. In it lie a FIFO for each rank's stdout and stderr, the ranks' pids, the
records of ranks that failed (`lowshard.comm.abort`), and mpiexec's temporary files. The directory's path, in
each process's environment, is also what tells this job's processes from all others.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from lowshard.comm.abort import JOB_DIR_VARIABLE, FailureRecord, make_failure_dir, read_failures
from lowshard.errors import LaunchError, TimedOut
from lowshard.launch.environment import find_rank, without_rank
from lowshard.launch.leftover import processes_of, signal_group, signal_process, stray_files, sweep_files
from lowshard.launch.mpiexec import MpiInstall, find_mpi, rank_environment
from lowshard.launch.output import Output

__all__ = ["JobResult", "first_cause", "python_command", "run_ranks"]

# Names inside the job directory, shared with lowshard.launch.child.
ALIVE_NAME = "alive"  # a FIFO that the launcher holds open: its end is the launcher's end
RANK_DIR = "ranks"  # RANK.json: pid and host of each rank
STREAM_NAMES = ("stdout", "stderr")  # stdout-RANK, stderr-RANK: a FIFO each
OWN_TMPDIR_VARIABLE = "LOWSHARD_USER_TMPDIR"  # the user's TMPDIR: mpiexec is given one in the job directory
STACK_SIGNAL = signal.SIGUSR1  # makes a rank print the stacks of its threads

_CHILD = ("-m", "lowshard.launch.child")
_TICK_S = 0.05
_STACKS_S = 0.7  # for the ranks to print their stacks
_TERM_S = 2.0  # from SIGTERM to SIGKILL
_KILL_S = 5.0  # from SIGKILL to giving up on a process that the kernel holds
_STRAGGLER_S = 0.5  # for what a rank left behind (a resource tracker, say) to end by itself
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
            nonzero `sys.exit` its number, death by a signal 70, the time limit 71, Ctrl-C 130.
        cause: "done", "exception", "exit", "signal", "timeout", "interrupt" or "mpiexec".
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


def python_command(target: str, args: Sequence[str] = (), *, module: bool = False) -> list[str]:
    """Returns the command that runs a Python script or module as a rank, with exceptions ending the job."""
    return [sys.executable, *_CHILD, *(["--module"] if module else []), target, *args]


def first_cause(failures: Sequence[FailureRecord]) -> FailureRecord | None:
    """Returns the failure that brought the job down: the earliest that is not the consequence of another."""
    died = any(record.kind == "signal" and not record.consequence for record in failures)

    def order(record: FailureRecord) -> tuple[int, float]:
        ended_by_launcher = record.consequence and record.kind != "exception"
        mpi_noticed_a_death = died and record.error == _MPI_ERROR
        level = 3 if ended_by_launcher else 2 if record.consequence else 1 if mpi_noticed_a_death else 0
        return level, record.time_s

    return min(failures, key=order, default=None)


def run_ranks(
    command: Sequence[str],
    n: int,
    *,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    prefix_output: bool = True,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    mpi: MpiInstall | None = None,
    grace_s: float = 1.0,
) -> JobResult:
    """Starts n ranks of a command, passes their output on, and returns when every process has ended.

    The output comes line by line, `[rank] ` in front. The ranks' stdin is empty. When a rank fails, the others
    have `grace_s` to say so too; then the job is ended. The first failing rank's traceback is printed last.
    In the main thread Ctrl-C, SIGTERM and SIGHUP end the job (twice: at once).

    Args:
        command: what each rank runs: `python_command(...)`, or any program and its arguments.
        n: number of ranks.
        timeout_s: ends the job after so many seconds, with the stacks of all ranks; None for no limit.
        env: the environment to start from; `os.environ` if None.
        cwd: working directory of the ranks; the caller's if None.
        prefix_output: false passes the ranks' bytes on as they are, in whole lines where they come in time.
        stdout: where the ranks' stdout goes; `sys.stdout` if None.
        stderr: where the ranks' stderr and the launcher's own words go; `sys.stderr` if None.
        mpi: what to start the ranks with; looked up if None.
        grace_s: seconds between the first failure and the end of the job.

    Raises:
        LaunchError: no ranks can be started as asked.
        DependencyError: mpi4py, an MPI library or mpiexec is missing.
    """
    if n < 1:
        raise LaunchError(f"a job has at least 1 rank; got n={n}")
    if not command:
        raise LaunchError("a job needs a command to run; got an empty one")
    if timeout_s is not None and not timeout_s > 0:
        raise LaunchError(f"timeout_s must be positive, or None for no limit; got {timeout_s}")
    base = dict(os.environ if env is None else env)
    ours = find_rank(base)
    if ours is not None:
        if ours.size > 1:
            raise LaunchError(
                f"ranks are started from outside a job, but this process is already rank {ours.rank} of "
                f"{ours.size} (started by {ours.launcher}); run the program with one launcher only"
            )
        base = without_rank(base)
    mpi = find_mpi() if mpi is None else mpi
    program = list(command)
    if tuple(program[1:3]) != _CHILD:
        program = [sys.executable, *_CHILD, "--exec", *program]
    sinks = (sys.stdout if stdout is None else stdout, sys.stderr if stderr is None else stderr)
    with tempfile.TemporaryDirectory(prefix="lowshard-job-", ignore_cleanup_errors=True) as folder:
        job = _Job(Path(folder), n, sinks, prefix_output)
        return job.run(mpi.command(n, program), rank_environment(mpi, n, base), cwd, timeout_s, grace_s)


class _Job:
    """One run of mpiexec, from the job directory to the last sweep."""

    def __init__(self, folder: Path, n: int, sinks: tuple[TextIO, TextIO], prefix: bool) -> None:
        self._folder = folder
        self._n = n
        self._stderr = sinks[1]
        self._output = Output(sinks, prefix)
        self._signals: list[int] = []

    def run(
        self,
        command: list[str],
        env: dict[str, str],
        cwd: str | Path | None,
        timeout_s: float | None,
        grace_s: float,
    ) -> JobResult:
        """Runs the job to its end."""
        start_s = time.monotonic()
        files_before = stray_files()
        env[JOB_DIR_VARIABLE] = str(self._folder)
        env[OWN_TMPDIR_VARIABLE] = env.get("TMPDIR", "")
        env["TMPDIR"] = str(self._folder / "tmp")  # so that mpiexec's leftovers go with the job directory
        with contextlib.ExitStack() as stack:
            self._lay_out(stack)
            stack.enter_context(self._signals_caught())
            try:
                mpiexec = subprocess.Popen(
                    command,
                    env=env,
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,  # a launcher in the background must not read a terminal
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    process_group=0,
                )
            except OSError as error:
                raise LaunchError(f"{command[0]} cannot be started: {error}") from error
            stack.enter_context(mpiexec)
            timed_out = False
            try:
                for stream, pipe in enumerate((mpiexec.stdout, mpiexec.stderr)):
                    assert pipe is not None
                    self._output.add(pipe.fileno(), stream, None)
                timed_out = self._watch(mpiexec, start_s, timeout_s, grace_s)
            finally:
                self._end(mpiexec)
                self._output.close()
                sweep_files(files_before)
            seconds = time.monotonic() - start_s
            result = self._judge(mpiexec.returncode, timed_out, timeout_s, seconds)
        self._say(result)
        return result

    def _lay_out(self, stack: contextlib.ExitStack) -> None:
        """Makes the job directory's contents and opens this side of the FIFOs."""
        make_failure_dir(self._folder)
        for name in (RANK_DIR, "tmp"):
            (self._folder / name).mkdir()
        names: list[tuple[str, int | None, int]] = [(ALIVE_NAME, None, 0)]
        names += [
            (f"{name}-{rank}", rank, i) for rank in range(self._n) for i, name in enumerate(STREAM_NAMES)
        ]
        for name, rank, stream in names:
            os.mkfifo(self._folder / name, mode=0o600)
            flags = os.O_RDWR if rank is None else os.O_RDONLY
            try:
                fd = os.open(self._folder / name, flags | os.O_NONBLOCK)
            except OSError as error:
                raise LaunchError(
                    f"the launcher holds 2 files open for each of the {self._n} ranks, and cannot open "
                    f"{name}: {error}; raise the limit (ulimit -n) or start fewer ranks"
                ) from error
            stack.callback(os.close, fd)
            if rank is not None:
                self._output.add(fd, stream, rank)

    @contextlib.contextmanager
    def _signals_caught(self) -> Iterator[None]:
        """Notes the signals that ask the launcher to end, so that it can end the job first."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        # Not those that are ignored (nohup), nor those that a C library handles (None): they could not be put back.
        before = {number: signal.getsignal(number) for number in numbers}
        before = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}
        for number in before:
            signal.signal(number, lambda got, frame: self._signals.append(got))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watch(
        self, mpiexec: subprocess.Popen[bytes], start_s: float, timeout_s: float | None, grace_s: float
    ) -> bool:
        """Passes output on until the job has ended or must be ended; returns whether the time ran out."""
        failed_s: float | None = None
        while mpiexec.poll() is None and not self._signals:
            self._output.pump(_TICK_S)
            now_s = time.monotonic()
            if self._output.broken:
                self._signals.append(signal.SIGPIPE)
            if failed_s is None and read_failures(self._folder):
                failed_s = now_s
            if failed_s is not None and now_s > failed_s + grace_s:
                return False
            if failed_s is None and timeout_s is not None and now_s > start_s + timeout_s:
                self._ask_for_stacks()
                self._pump_for(_STACKS_S, mpiexec)
                return True
        return False

    def _pump_for(self, seconds: float, mpiexec: subprocess.Popen[bytes]) -> None:
        """Passes output on for a while, or until mpiexec ends or somebody is impatient."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and mpiexec.poll() is None and len(self._signals) < 2:
            self._output.pump(_TICK_S)

    def _ask_for_stacks(self) -> None:
        """Makes each Python rank on this host print the stacks of its threads."""
        for path in (self._folder / RANK_DIR).glob("*.json"):
            about = json.loads(path.read_text(encoding="utf-8"))
            if about["host"] == socket.gethostname() and about["takes_stack_signal"]:
                signal_process(about["pid"], STACK_SIGNAL, self._folder)

    def _end(self, mpiexec: subprocess.Popen[bytes]) -> None:
        """Ends whatever of the job still runs: mpiexec gently, then its group, then every process of the job."""
        if mpiexec.poll() is None:
            signal_group(mpiexec.pid, signal.SIGTERM)
            self._pump_for(_TERM_S, mpiexec)
        if mpiexec.poll() is None:
            signal_group(mpiexec.pid, signal.SIGKILL)
        mpiexec.wait()
        kill_s = time.monotonic() + _STRAGGLER_S
        while left := processes_of(self._folder):
            now_s = time.monotonic()
            if now_s > kill_s + _KILL_S:
                self._write(f"lowshard run: the kernel does not let go of processes {left}\n")
                return
            if now_s > kill_s or len(self._signals) > 1:
                for pid in left:
                    signal_process(pid, signal.SIGKILL, self._folder)
            self._output.pump(_TICK_S)

    def _judge(self, status: int, timed_out: bool, timeout_s: float | None, seconds: float) -> JobResult:
        """Finds the first cause."""
        failures = read_failures(self._folder)
        result = JobResult(0, "done", None, "", seconds, failures)
        if self._signals:
            name = signal.Signals(self._signals[0]).name
            message = f"ended by {name}; all ranks have been ended"
            return replace(result, exit_code=128 + self._signals[0], cause="interrupt", message=message)
        if timed_out:
            message = (
                f"the {self._n} ranks were still running after the limit of {timeout_s:g} s and have been ended; "
                f"where each Python rank was stands above; raise the limit if the job is only slow"
            )
            return replace(result, exit_code=TimedOut.exit_code, cause="timeout", message=message)
        first = first_cause(failures)
        if first is not None:
            message = f"rank {first.rank} failed first: {first.message}{_HINTS.get(first.signal, '')}"
            return replace(
                result, exit_code=first.exit_code, cause=first.kind, failed_rank=first.rank, message=message
            )
        if status:
            message = (
                f"no rank reported a failure, but mpiexec ended with status {status}; its words are above"
            )
            return replace(result, exit_code=1, cause="mpiexec", message=message)
        return result

    def _say(self, result: JobResult) -> None:
        """Prints why the job failed, the first failing rank's traceback last."""
        if result.cause in ("done", "mpiexec"):  # else we say it better
            self._write(self._output.from_mpiexec.decode(errors="replace"))
        if result.cause == "done":
            return
        who: dict[str, list[int]] = {}
        for record in result.failures:
            if record.traceback:
                who.setdefault(record.traceback, []).append(record.rank)
        for text, ranks in sorted(who.items(), key=lambda item: result.failed_rank in item[1]):
            name = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"
            self._write(f"--- {name}\n{text.rstrip()}\n")
        self._write(f"lowshard run: {result.message} (exit code {result.exit_code})\n")

    def _write(self, text: str) -> None:
        if text and not self._output.broken:
            self._stderr.write(text)
            self._stderr.flush()
