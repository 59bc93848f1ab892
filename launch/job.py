"""Starts ranks with mpiexec, watches them, and leaves nothing behind.

A job has a directory of its own, with the socket that its supervisors (`launch/supervisor.py`) connect to, and
mpiexec's temporary files. The directory's path, in each process's environment, is also what tells this job's processes
from all others. The launcher is the hub of the job's failure channel: it hears how each rank ends, tells the others,
and gives them a moment to speak before it ends the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from lowshard import settings
from lowshard.argument import brief, instance, items, mapping, real, truth, whole
from lowshard.argument import path as check_path
from lowshard.comm.abort import FailureRecord
from lowshard.comm.failure import MESSAGE, Hub
from lowshard.comm.interface import addresses_towards, interface_addresses
from lowshard.comm.listener import Client, Listener
from lowshard.comm.wait_guard import names_of
from lowshard.errors import LaunchError, PeerFailed
from lowshard.launch.environment import allocated_nodes, find_rank, passed_names, without_rank
from lowshard.launch.host import Spread
from lowshard.launch.leftover import processes_of, signal_group, signal_process
from lowshard.launch.mpiexec import MpiInstall, find_mpi, rank_environment
from lowshard.launch.output import Output
from lowshard.launch.streams import open_closed_streams
from lowshard.launch.supervisor import PURPOSE, STREAMS, link_text, shared_folder
from lowshard.launch.verdict import JobResult, Leaver, failure_text, first_cause, judge, place_in, unwritten

__all__ = ["JobResult", "first_cause", "python_command", "run_ranks"]

# Open MPI's mpiexec says so now and then when it has started a remote shell; nothing follows from it.
_MPIEXEC_NOISE = re.compile(rb"^\[[^\]\n]*\] plm:ssh: Warning: setpgid.*\n", re.MULTILINE)

_CHILD = ("-m", "lowshard.launch.child")
_TICK_S = 0.05
_MOST_RANKS = 1 << 20
_START_S = 300.0  # for all ranks to have started
_GRACE_S = 1.0  # between the first failure and the end of the job, for the others to speak
_STACKS_S = 0.7  # for the ranks to print their stacks
_ALL_OVER_S = 10.0  # for mpiexec to end when every rank's program is over
_END_S = 3.0  # the same where the ranks are being ended
_TERM_S = 0.7  # from SIGTERM to SIGKILL, of mpiexec
_KILL_S = 5.0  # from SIGKILL to giving up on a process that the kernel holds
_STRAGGLER_S = 0.3  # for what a rank left behind (a resource tracker, say) to end by itself
_LOST_S = (
    1.5  # from the end of a supervisor's connection to calling its rank lost: mpiexec may end, and say why
)
_ABRUPT_S = 1.0  # from an os._exit(0) to calling it a failure, where others still run
_HINT_S = 10.0  # from a rank's leaving in order to a word about it


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
) -> JobResult:
    """Starts n ranks of a command, passes their output on, and returns when every process has ended.

    The output comes line by line, `[rank] ` in front. The ranks' stdin is empty. When a rank fails, the others
    have a second to say so too; then the job is ended. The first failing rank's traceback is printed last. A
    rank fails, too, when its host confirms nothing for 12 s.
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
    try:
        folder = tempfile.mkdtemp(prefix="lowshard-job-")
        Path(folder, "tmp").mkdir()
    except OSError as error:
        raise LaunchError(f"a job needs a folder: {error}; write TMPDIR=FOLDER before the command") from error
    with contextlib.ExitStack() as stack:
        for made in (folder, shared_folder(folder)):
            stack.callback(shutil.rmtree, made, ignore_errors=True)
        hub = JobHub(n, _listener(None if everywhere else Path(folder), spread), Output(files, prefix_output))
        stack.callback(hub.close)
        stack.callback(hub.remove_files)
        assert hub.listener is not None
        environment[settings.LINK.name] = link_text(hub.listener.token, hub.listener.addresses)
        environment[settings.JOB_DIR.name] = folder
        environment[settings.USER_TMPDIR.name] = environment.get("TMPDIR", "")
        environment["TMPDIR"] = f"{folder}/tmp"  # so that mpiexec's leftovers go with the job directory
        if mpi.family == "openmpi":
            for name in ("btl_sm", "osc_sm", "osc_rdma"):
                environment.setdefault(f"OMPI_MCA_{name}_backing_directory", str(shared_folder(folder)))
        environment["LOWSHARD_LAST"] = ""  # Hydra's -genvlist loses the last variable of all (5.0)
        line = mpi.command(
            n,
            program,
            spread=spread,
            hostfile=f"{folder}/hosts",
            cwd=os.path.abspath(cwd or os.curdir),
            passed=passed_names(environment) if everywhere else (),
        )
        if spread is not None:
            Path(folder, "hosts").write_text(spread.hostfile(mpi.family), encoding="utf-8")
        return _Job(folder, hub).run(line, environment, cwd, timeout_s)


def _listener(folder: Path | None, spread: Spread | None) -> Listener:
    """Returns a listener where a job's hosts find it, and nowhere else: in a folder, or on the network without one."""
    try:
        if folder is not None:
            try:
                return Listener.in_folder(folder)
            except OSError:  # a file system that takes no sockets
                return Listener.on_network(["127.0.0.1"])
        if spread is not None and spread.iface:
            named = interface_addresses().get(spread.iface)
            if named is None:
                raise LaunchError(f"this host has no network interface {spread.iface!r} with an address")
            return Listener.on_network(named[:1])
        hosts = [] if spread is None else [host.name.strip("[]") for host in spread.hosts]
        return Listener.on_network(addresses_towards(hosts))
    except OSError as error:
        raise LaunchError(f"the launcher needs a socket for its ranks to report to: {error}") from error


@dataclass
class _Rank:
    """What is known of a rank; times are of the monotonic clock."""

    host: str = "an unknown host"
    pid: int = 0  # of its supervisor
    takes_stack_signal: bool = False
    left_s: float | None = None  # its program was over, or it ended with exit code 0
    is_in_order: bool = False  # its program came to its end
    status: int | None = None  # exit code, negative for a signal
    lost_s: float | None = None  # its supervisor's connection closed without a word


class JobHub(Hub):
    """The launcher's end of the failure channel, to the supervisors of all ranks.

    Attributes:
        states: what is known of the ranks that have come, by rank.
        records: of the ranks that have failed, in order of arrival.
        files: what MPICH has in this host's shared memory.
    """

    def __init__(self, n: int, listener: Listener, output: Output) -> None:
        super().__init__(range(n), listener)
        self.output = output
        self.states: dict[int, _Rank] = {}
        self.records: dict[int, FailureRecord] = {}
        self._is_ending = False
        self.files = set[str]()

    @property
    def are_all_over(self) -> bool:
        """Whether every rank's program has ended."""
        return len(self.states) == len(self.ranks) and all(s.status is not None for s in self.states.values())

    def take(self, rank: int, kind: bytes, content: bytes) -> None:
        """Do what a rank, or its supervisor, has said."""
        if kind in STREAMS:
            self.output.add(rank, STREAMS.index(kind), content)
            return
        message, state, now_s = json.loads(content), self.states[rank], time.monotonic()
        match message["do"]:
            case "hello":
                state.host, state.pid = str(message["host"]), int(message["pid"])
            case "speaks":
                state.takes_stack_signal = True
            case "bye":
                state.left_s, state.is_in_order = now_s, True
            case "tell" if message["record"] is not None:
                self.records.setdefault(rank, FailureRecord.from_fields({**message["record"], "rank": rank}))
            case "maps":
                self.files.update(message["files"])
                return
            case "ended":
                self._ended(rank, state, int(message["status"]), bool(message["swept"]))
                return
        super().take(rank, kind, content)

    def lost(self, rank: int) -> None:
        """Note that a supervisor's connection has closed, before it said how its rank ended."""
        state = self.states[rank]
        if state.status is None and not self._is_ending:
            state.lost_s = time.monotonic()
            self.fail(rank, "died", f"its supervisor on {state.host} is gone")

    def lost_ranks(self) -> list[FailureRecord]:
        """Returns the records of the ranks whose supervisors are gone, the first one first."""
        gone = sorted((s.lost_s, rank) for rank, s in self.states.items() if s.lost_s is not None)
        return [self._lost_record(rank) for lost_s, rank in gone if rank not in self.records]

    def leavers(self) -> list[Leaver]:
        """Returns the ranks that have left with exit code 0, which is a failure only where others need them."""
        gone = sorted((s.left_s, rank) for rank, s in self.states.items() if s.left_s is not None)
        return [Leaver(rank, self.states[rank].is_in_order) for _, rank in gone]

    def order(self, word: bytes) -> None:
        """Tell all supervisors something: to show stacks, to end, to kill."""
        self._is_ending |= word != b"stacks"
        for rank, wire in self.peers.items():
            if not wire.closed and (word != b"stacks" or self.states[rank].takes_stack_signal):
                wire.send(MESSAGE, word)

    def remove_files(self) -> None:
        """Remove what MPICH has left, where mpiexec has killed the supervisors too."""
        for file in self.files:
            Path(file).unlink(missing_ok=True)

    def _let_in(self, client: Client) -> None:
        if client.purpose != PURPOSE or client.rank not in self.ranks or client.rank in self.states:
            client.connection.close()
            return
        self.states[client.rank] = _Rank()
        self.add(client.rank, client.connection)

    def _ended(self, rank: int, state: _Rank, status: int, swept: bool) -> None:
        """Note how a rank has ended, and tell the others."""
        state.status = status
        if status == 0:
            state.left_s = state.left_s or time.monotonic()
            self.leave(rank)
            return
        code, kind, text, number = status, "exit", f"ended with exit code {status}", None
        if status < 0:
            number = -status
            name = signal.Signals(number).name if number in set(signal.Signals) else "?"
            code, kind, text = PeerFailed.exit_code, "signal", f"killed by signal {number} ({name})"
        follows = swept or self._is_ending or (self.first is not None and self.first["rank"] != rank)
        record = FailureRecord(rank, kind, code, text, signal=number, consequence=follows)
        self.records.setdefault(rank, record)
        self.fail(rank, "died" if status < 0 else "exit", text)

    def _lost_record(self, rank: int) -> FailureRecord:
        state = self.states[rank]
        text = (
            f"its supervisor on {state.host} (process {state.pid}) is gone: the host or the network failed, or it was "
            "killed; if nobody killed it, the kernel did for want of memory: see dmesg there"
        )
        return FailureRecord(rank, "lost", PeerFailed.exit_code, text)


class _Job:
    """One run of mpiexec."""

    def __init__(self, folder: str, hub: JobHub) -> None:
        self._folder, self._hub, self._output = folder, hub, hub.output
        self._signals: list[int] = []
        self._is_cut_short = False  # the output cannot be written

    def run(
        self, command: list[str], env: dict[str, str], cwd: str | Path | None, timeout_s: float | None
    ) -> JobResult:
        """Runs the job to its end."""
        start_s = time.monotonic()
        with contextlib.ExitStack() as stack:
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
            assert mpiexec.stdout is not None
            assert mpiexec.stderr is not None
            self._mpiexec, self._pipes = mpiexec, (mpiexec.stdout.fileno(), mpiexec.stderr.fileno())
            for fd in self._pipes:
                os.set_blocking(fd, False)
            timed_out, abrupt = False, True
            try:
                timed_out = self._watch(None if timeout_s is None else start_s + timeout_s)
                status = mpiexec.poll() if not self._hub.are_all_over and not timed_out else None
                abrupt = self._late_exits() != [] or bool(status)
            finally:
                self._end()
                self._output.settle(is_over=True)
            # For an MPI_Abort Hydra kills the supervisors, and ends with its number; 9 is a process that was killed.
            is_abort = status is not None and 0 < status < 128 and status != signal.SIGKILL
            result = judge(
                (*self._hub.records.values(),) if is_abort else self._failures(is_over=True),
                len(self._hub.ranks),
                time.monotonic() - start_s,
                status=status or 0,
                leavers=self._hub.leavers(),
                has_abrupt_leaver=abrupt,
                ended_by=self._signals[0] if self._signals else None,
                limit_s=timeout_s if timed_out else None,
                places={rank: place_in(text) for rank, text in self._output.stacks.items()},
            )
            if self._output.error is not None and (self._is_cut_short or result.cause == "done"):
                result = unwritten(result, self._output.error)
            if result.is_bare:  # else we say it better
                self._output.say(_MPIEXEC_NOISE.sub(b"", self._output.from_mpiexec).decode(errors="replace"))
            self._output.say(failure_text(result))
        return result

    def _failures(self, is_over: bool = False) -> tuple[FailureRecord, ...]:
        """Returns one record of each rank that has failed, in order of arrival."""
        now_s, states = time.monotonic(), self._hub.states
        lost = [
            r for r in self._hub.lost_ranks() if is_over or now_s - (states[r.rank].lost_s or now_s) > _LOST_S
        ]
        return (*self._hub.records.values(), *lost)

    def _late_exits(self) -> list[int]:
        """Returns the ranks that have left inside their programs, a second before the others."""
        now_s, states = time.monotonic(), self._hub.states
        return [
            rank
            for rank, state in states.items()
            if state.status == 0
            and state.takes_stack_signal
            and not state.is_in_order
            and now_s - (state.left_s or now_s) > _ABRUPT_S
        ]

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

    def _watch(self, limit_s: float | None) -> bool:
        """Passes output on until the job has ended or must be ended; returns whether the time ran out."""
        hub, start_s, failed_s, is_hinted = self._hub, time.monotonic(), None, False
        while not self._signals and not hub.are_all_over:
            self._pump()
            now_s = time.monotonic()
            if self._output.error is not None and not self._signals:
                self._is_cut_short = True
                return False
            if self._mpiexec.poll() is not None:  # somebody has called MPI_Abort, or no rank could be started
                self._pump_for(_STRAGGLER_S, lambda: hub.are_all_over)
                return False
            failures = self._failures()
            if failed_s is None and (failures or self._late_exits()):
                failed_s = now_s
            if failed_s is not None and now_s > failed_s + _GRACE_S:
                return False
            if failed_s is None and limit_s is not None and now_s > limit_s:
                self._output.keep_stacks()
                hub.order(b"stacks")
                self._pump_for(_STACKS_S, lambda: False)
                return True
            if now_s > start_s + _START_S and len(hub.states) < len(hub.ranks):
                for rank in sorted(hub.ranks - hub.states.keys()):
                    text = (
                        f"nothing was heard of it within {_START_S:g} s of the start; its host cannot be reached, or "
                        "does not get the program started"
                    )
                    hub.records[rank] = FailureRecord(rank, "lost", PeerFailed.exit_code, text)
                return False
            is_hinted = is_hinted or self._hint(now_s)
        return False

    def _hint(self, now_s: float) -> bool:
        """Says which ranks have left in order while others go on, who may wait for them; returns whether it did."""
        states = self._hub.states
        gone = [r for r, s in states.items() if s.left_s is not None and now_s - s.left_s > _HINT_S]
        left = [r for r, s in states.items() if s.left_s is None]
        if not gone or not left:
            return False
        self._output.say(
            f"lowshard run: {names_of(sorted(gone))} came to the end of the program {_HINT_S:g} s ago, while "
            f"{names_of(sorted(left))} still run: should they wait for it in MPI, they wait for ever\n"
        )
        return True

    def _pump(self, tick_s: float = _TICK_S) -> None:
        """Passes on what there is to pass on, waiting a moment for it."""
        self._hub.turn(tick_s)
        self._output.take_mpiexec(self._pipes)
        self._output.settle()

    def _pump_for(self, seconds: float, is_done: Callable[[], bool]) -> None:
        """Passes output on for a while, or until something is done or somebody is impatient."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and not is_done() and len(self._signals) < 2:
            self._pump(0.01)

    def _end(self) -> None:
        """Ends whatever of the job still runs: the ranks, mpiexec, then every process of the job."""
        is_good = self._hub.are_all_over and not self._signals
        self._hub.order(b"end")

        def has_ended() -> bool:
            return self._mpiexec.poll() is not None

        self._pump_for(_ALL_OVER_S if is_good else _END_S if self._hub.states else 0, has_ended)
        if len(self._signals) > 1:
            self._hub.order(b"kill")
        if not has_ended():
            signal_group(self._mpiexec.pid, signal.SIGTERM)
            self._pump_for(_TERM_S, has_ended)
        if not has_ended():
            signal_group(self._mpiexec.pid, signal.SIGKILL)
        self._mpiexec.wait()
        kill_s = time.monotonic() + _STRAGGLER_S
        while left := processes_of(self._folder):
            now_s = time.monotonic()
            if now_s > kill_s + _KILL_S:
                self._output.say(f"lowshard run: the kernel does not let go of processes {left}\n")
                break
            if now_s > kill_s or len(self._signals) > 1:
                for pid in left:
                    signal_process(pid, signal.SIGKILL, self._folder)
            self._pump(0.02)
        self._pump(0)


def _kill(mpiexec: subprocess.Popen[bytes]) -> None:
    if mpiexec.poll() is None:
        signal_group(mpiexec.pid, signal.SIGKILL)
