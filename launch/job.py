"""Starts ranks with mpiexec, watches them, and leaves nothing behind.

A job has a directory of its own. In it lie a FIFO for each rank's stdout and stderr, the ranks' pids, the
records of ranks that failed (`lowshard.comm.abort`), and mpiexec's temporary files. The directory's path, in
each process's environment, is also what tells this job's processes from all others.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from lowshard import settings
from lowshard.argument import brief, instance, items, mapping, real, truth, whole
from lowshard.argument import number as finite
from lowshard.argument import path as check_path
from lowshard.comm.abort import FailureRecord, read_failures
from lowshard.errors import LaunchError
from lowshard.launch.environment import allocated_nodes, find_rank, passed_names, without_rank
from lowshard.launch.host import Spread
from lowshard.launch.job_dir import HOSTFILE_NAME, TMP_NAME, job_folder, make_job_dir
from lowshard.launch.leftover import processes_of, signal_group, signal_process, stray_files, sweep_files
from lowshard.launch.link import Link
from lowshard.launch.mpiexec import MpiInstall, find_mpi, rank_environment
from lowshard.launch.output import Output
from lowshard.launch.streams import open_closed_streams
from lowshard.launch.verdict import (
    JobResult,
    failure_text,
    first_cause,
    judge,
    one_each,
    place_in,
    unwritten,
)

__all__ = ["JobResult", "first_cause", "python_command", "run_ranks"]

# Hydra kills all keepers when one is killed, in an instant. (The process that it names need not be the first.)
_HYDRA_KILLED = re.compile(rb"BAD TERMINATION[^\0]*\n=\s+EXIT CODE: 9\s")

# Open MPI's mpiexec says so now and then when it has started a remote shell; nothing follows from it.
_MPIEXEC_NOISE = re.compile(rb"^\[[^\]\n]*\] plm:ssh: Warning: setpgid.*\n", re.MULTILINE)

_CHILD = ("-m", "lowshard.launch.child")
_TICK_S = 0.05
_MOST_RANKS = 1 << 20
_STACKS_S = 0.7  # for the ranks to print their stacks
_TERM_S = 2.0  # from SIGTERM to SIGKILL
_KILL_S = 5.0  # from SIGKILL to giving up on a process that the kernel holds
_STRAGGLER_S = 0.5  # for what a rank left behind (a resource tracker, say) to end by itself
_SILENT_TERM_S = 0.5  # the same where a rank cannot be reached, or cannot react: mpiexec would wait for it
_LAST_WORDS_S = 1.0  # for what ranks on other hosts wrote, and for their keepers, to arrive


def python_command(target: str, args: Sequence[str] = (), *, module: bool = False) -> list[str]:
    """Returns the command that runs a Python script or module as a rank, with exceptions ending the job.

    Raises:
        LaunchError: what is not text, or a text where a sequence of them is expected.
    """
    is_module = truth(module, "module is True or False", LaunchError)
    words = _as_words([target], "target is the path of a script, or the name of a module")
    return [
        sys.executable, *_CHILD, *(["--module"] if is_module else []), *words,
        *_as_words(args, "args is a sequence of texts"),
    ]  # fmt: skip


def _as_words(given: object, rule: str) -> list[str]:
    """Returns the words of a command line, or raises LaunchError."""
    words = items(given, rule, LaunchError)
    for word in words:
        if not isinstance(word, (str, os.PathLike)):
            raise LaunchError(f"{rule}, got {brief(given)}")
    return [os.fspath(word) for word in words]


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
    spread: Spread | None = None,
    grace_s: float = 1.0,
) -> JobResult:
    """Starts n ranks of a command, passes their output on, and returns when every process has ended.

    The output comes line by line, `[rank] ` in front. The ranks' stdin is empty. When a rank fails, the others
    have `grace_s` to say so too; then the job is ended. The first failing rank's traceback is printed last. A
    rank fails, too, when it is stopped (SIGSTOP), or nothing is heard of its host, for longer than
    `LOWSHARD_HEARTBEAT_S` in the environment says (10 s).
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
        spread: the hosts to start them on; None for this one, or those that a batch system has given.
        grace_s: seconds between the first failure and the end of the job.

    Raises:
        LaunchError: no ranks can be started as asked.
        DependencyError: mpi4py, an MPI library or mpiexec is missing.
    """
    n = whole(n, f"a job has at least 1 rank, and at most {_MOST_RANKS}; n", LaunchError, 1, _MOST_RANKS)
    if timeout_s is not None:
        timeout_s = real(timeout_s, "timeout_s must be positive, or None for no limit", LaunchError)
    program = _as_words(command, "a job needs a command to run, a sequence of texts")
    if not program:
        raise LaunchError("a job needs a command to run; got an empty one")
    grace_s = finite(grace_s, "grace_s is a number of seconds, 0 or more", LaunchError, 0)
    prefix_output = truth(prefix_output, "prefix_output is True or False", LaunchError)
    cwd = None if cwd is None else check_path(cwd, "cwd is the path of a folder, or None", LaunchError)
    for name, file in (("stdout", stdout), ("stderr", stderr)):
        if file is not None and not callable(getattr(file, "write", None)):
            raise LaunchError(f"{name} is a text file that is open, or None; got {brief(file)}")
    if mpi is not None:
        instance(mpi, MpiInstall, "mpi is what find_mpi returns, or None", LaunchError)
    if spread is not None:
        instance(spread, Spread, "spread is a Spread, or None", LaunchError)
    rule = "env is a mapping of names to texts, or None"
    base = dict(settings.environment() if env is None else mapping(env, rule, LaunchError))
    for word in (*base, *base.values()):
        instance(word, str, rule, LaunchError)
    ours = find_rank(base)
    if ours is not None:
        if ours.size > 1:
            raise LaunchError(
                f"ranks are started from outside a job, but this process is already rank {ours.rank} of "
                f"{ours.size} (started by {ours.launcher}); run the program with one launcher only"
            )
        base = without_rank(base)
    mpi = find_mpi() if mpi is None else mpi
    if tuple(program[1:3]) != _CHILD:
        program = [sys.executable, *_CHILD, "--exec", *program]
    open_closed_streams()
    files = (sys.stdout if stdout is None else stdout, sys.stderr if stderr is None else stderr)
    environment = rank_environment(mpi, n, base, spread=spread)
    everywhere = spread is not None or allocated_nodes(base) > 1
    with (
        job_folder() as folder,
        contextlib.closing(Link(n, environment, None if everywhere else Path(folder), spread)) as link,
    ):
        environment[settings.JOB_DIR.name] = folder
        environment[settings.USER_TMPDIR.name] = environment.get("TMPDIR", "")
        environment["TMPDIR"] = (
            f"{folder}/{TMP_NAME}"  # so that mpiexec's leftovers go with the job directory
        )
        environment.update(link.start())
        environment["LOWSHARD_LAST"] = ""  # Hydra's -genvlist loses the last variable of all (5.0)
        line = mpi.command(
            n,
            program,
            spread=spread,
            hostfile=str(Path(folder) / HOSTFILE_NAME),
            cwd=os.path.abspath(cwd or os.getcwd()),
            passed=passed_names(environment) if everywhere else (),
        )
        if spread is not None:
            (Path(folder) / HOSTFILE_NAME).write_text(spread.hostfile(mpi.family), encoding="utf-8")
        job = _Job(Path(folder), n, files, prefix_output, link)
        return job.run(line, environment, cwd, timeout_s, grace_s)


class _Job:
    """One run of mpiexec, from the job directory to the last sweep."""

    def __init__(self, folder: Path, n: int, files: tuple[TextIO, TextIO], prefix: bool, link: Link) -> None:
        self._folder = folder
        self._n = n
        self._output = Output(files, prefix)
        self._link = link
        self._signals: list[int] = []
        self._is_cut_short = False  # the output cannot be written

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
        limit_s = None if timeout_s is None else start_s + timeout_s
        files_before = stray_files()
        with contextlib.ExitStack() as stack:
            for fd, rank, stream in make_job_dir(self._folder, self._n):
                stack.callback(os.close, fd)
                if rank is not None:
                    self._output.add(fd, stream, rank)
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
            stack.enter_context(mpiexec)  # waits for its end
            stack.callback(_kill, mpiexec)  # whatever went wrong before
            timed_out = False
            try:
                for stream, pipe in enumerate((mpiexec.stdout, mpiexec.stderr)):
                    assert pipe is not None
                    self._output.add(pipe.fileno(), stream, None)
                timed_out = self._watch(mpiexec, grace_s, limit_s)
            finally:
                self._end(mpiexec)
                self._output.close()
                sweep_files(files_before)
            result = judge(
                self._failures(),
                self._n,
                time.monotonic() - start_s,
                status=mpiexec.returncode,
                leavers=self._link.leavers(),
                ended_by=self._signals[0] if self._signals else None,
                limit_s=timeout_s if timed_out else None,
                places={rank: place_in(text) for rank, text in self._output.stacks.items()},
            )
            if self._output.error is not None and (self._is_cut_short or result.cause == "done"):
                result = unwritten(result, self._output.error)
            if result.cause in ("done", "mpiexec"):  # else we say it better
                self._output.say(_MPIEXEC_NOISE.sub(b"", self._output.from_mpiexec).decode(errors="replace"))
            self._output.say(failure_text(result))
        return result

    def _failures(self) -> tuple[FailureRecord, ...]:
        """Returns one record of each rank that has failed."""
        found = one_each([*read_failures(self._folder), *self._link.failures()])
        if found and all(record.consequence for record in found):
            # Those who complain were faster than the link's own limit.
            found = one_each([*found, *self._link.suspects(found[0].time_s)])
        # Hydra kills the keepers of all others, too, when a rank has left inside its program; its status may be 0.
        abrupt = any(not leaver.in_order for leaver in self._link.leavers())
        if not found and (abrupt or _HYDRA_KILLED.search(self._output.from_mpiexec)):
            return tuple(self._link.first_killed())
        return found

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

    def _watch(self, mpiexec: subprocess.Popen[bytes], grace_s: float, limit_s: float | None) -> bool:
        """Passes output on until the job has ended or must be ended; returns whether the time ran out."""
        failed_s: float | None = None
        while mpiexec.poll() is None and not self._signals:
            self._pump()
            now_s = time.monotonic()
            if self._output.error is not None and not self._signals:
                self._is_cut_short = True
                return False
            failures = self._failures()
            if not failures:
                self._link.check()
            if failed_s is None and failures:
                failed_s = now_s
            if failed_s is not None and (now_s > failed_s + grace_s or len(failures) == self._n > 1):
                return False
            if failed_s is None and limit_s is not None and now_s > limit_s:
                self._output.keep_stacks()
                self._link.ask_for_stacks()
                self._pump_for(_STACKS_S, mpiexec)
                return True
        return False

    def _pump(self, tick_s: float = _TICK_S) -> None:
        """Passes on what there is to pass on, waiting a moment for it."""
        for connection, stream, rank in self._link.streams():
            self._output.add(connection.detach(), stream, rank, from_afar=True)
        self._output.pump(tick_s)

    def _pump_for(self, seconds: float, mpiexec: subprocess.Popen[bytes]) -> None:
        """Passes output on for a while, or until mpiexec ends or somebody is impatient."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and mpiexec.poll() is None and len(self._signals) < 2:
            self._pump()

    def _end(self, mpiexec: subprocess.Popen[bytes]) -> None:
        """Ends whatever of the job still runs: mpiexec gently, then its group, then every process of the job."""
        self._link.expect_ends()
        deaf = any(record.kind in ("lost", "stopped") for record in self._failures())
        if mpiexec.poll() is None:
            signal_group(mpiexec.pid, signal.SIGTERM)
            self._pump_for(_SILENT_TERM_S if deaf else _TERM_S, mpiexec)
        if mpiexec.poll() is None:
            signal_group(mpiexec.pid, signal.SIGKILL)
        mpiexec.wait()
        afar_s = time.monotonic() + (0 if deaf else _LAST_WORDS_S)
        while self._output.from_afar and time.monotonic() < afar_s:
            self._pump()
        self._link.close(0 if deaf else _LAST_WORDS_S)  # ends the ranks whose mpiexec did not
        kill_s = time.monotonic() + (0 if deaf else _STRAGGLER_S)
        while left := processes_of(self._folder):
            now_s = time.monotonic()
            if now_s > kill_s + _KILL_S:
                self._output.say(f"lowshard run: the kernel does not let go of processes {left}\n")
                return
            if now_s > kill_s or len(self._signals) > 1:
                for pid in left:
                    signal_process(pid, signal.SIGKILL, self._folder)
            self._output.pump(_TICK_S)


def _kill(mpiexec: subprocess.Popen[bytes]) -> None:
    """Ends mpiexec and its group at once, where they have not ended."""
    if mpiexec.poll() is None:
        signal_group(mpiexec.pid, signal.SIGKILL)
