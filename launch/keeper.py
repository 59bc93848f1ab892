"""The outer process of a rank: it starts the rank, watches it, says how it ended, and never leaves it alone.

No mpiexec tells reliably which rank died first and of what, or sees that a rank is stopped. The keeper does, and
tells the launcher over the link; on the launcher's own machine also by files in the job directory. It ends the rank
when the launcher has gone, or has been out of reach for the limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import NoReturn

from lowshard.comm.abort import (
    FailureRecord,
    has_failure,
    make_failure_dir,
    read_failures,
    write_failure,
)
from lowshard.comm.interface import boot_id
from lowshard.errors import LaunchError, PeerFailed
from lowshard.launch.janitor import dismiss_janitor, start_janitor
from lowshard.launch.job_dir import ALIVE_NAME, STACK_SIGNAL, STREAM_NAMES, tie_output
from lowshard.launch.leftover import stray_files, sweep_files
from lowshard.launch.uplink import (
    BEAT_S,
    LinkAddress,
    Uplink,
    failure_fields,
    stopped_record,
)
from lowshard.settings import HEARTBEAT_S, JOB_DIR, LINK, START_S, change

__all__ = ["IS_OVER", "SHOWS_STACKS", "Keeper"]

SHOWS_STACKS, IS_OVER = b"s", b"o"
"""What a rank tells its keeper: that it can show its stacks; that its program has come to its end in order."""

_PR_SET_CHILD_SUBREAPER = 36
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # what mpiexec and people end a job with
_HOLD_S = 0.5  # between a failure and its being seen by mpiexec, which ends the others without a word
_LAST_WORDS_S = 0.5
_DYING_S = 0.2
_PAUSE_S = 1.0  # from one heartbeat to the next, in a process that nobody has stopped
_ORPHAN_S = 0.5  # for what a rank left behind to end by itself
_KILL_S = 1.0  # from SIGKILL to giving up on a process


class Keeper:
    """Watches one rank of a job from before its start to after its end."""

    def __init__(self, rank: int, size: int, job_dir: Path) -> None:
        """Connects to the launcher.

        Raises:
            LaunchError: the launcher cannot be reached, or its variables are damaged.
        """
        self._rank = rank
        self._size = size
        self._limit_s = HEARTBEAT_S.seconds(error=LaunchError)
        self._uplink: Uplink | None = None
        self._alive = job_dir / ALIVE_NAME
        # Whether the launcher's files are here: a shared file system is not enough, FIFOs join no two machines.
        self._is_near = True
        if LINK.is_set():
            address = LinkAddress.parse(LINK.text())
            start_s = START_S.seconds() / 2  # so that this end is the first to complain
            self._uplink = Uplink(address, rank, self._limit_s, start_s)
            self._is_near = address.boot == boot_id() and self._alive.exists()
        self._janitor_fd = -1
        self._folder = job_dir
        self._files_before = stray_files()
        if self._is_near:
            tie_output(job_dir, rank)
            return
        self._folder = Path(tempfile.mkdtemp(prefix="lowshard-rank-"))
        make_failure_dir(self._folder)
        change(JOB_DIR.name, str(self._folder))  # where the rank leaves its record
        if self._uplink is not None:
            for target_fd, name in enumerate(STREAM_NAMES, start=1):
                fd = self._uplink.stream(name, start_s)
                os.dup2(fd, target_fd)
                os.close(fd)
            self._janitor_fd = start_janitor(self._uplink.fileno(), rank, self._folder, self._files_before)

    def leave(self) -> None:
        """To be called in the rank: these ends are the keeper's alone, they must close when it ends."""
        if self._janitor_fd >= 0:
            os.close(self._janitor_fd)
        if self._uplink is not None:
            self._uplink.close()

    def keep(self, pid: int, told_fd: int) -> NoReturn:
        """Waits for the rank, notes a bad end that the rank could not note itself, and ends in the same way.

        Args:
            pid: the rank.
            told_fd: read end of a pipe on which a Python rank writes SHOWS_STACKS and IS_OVER.
        """
        told: list[int] = []
        # mpiexec signals the whole process group, so the rank has had these too: do not pass them on twice.
        for number in (*_ENDING, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda got, frame: told.append(got))
        ctypes.CDLL(None).prctl(
            _PR_SET_CHILD_SUBREAPER, 1
        )  # what the rank leaves behind comes to this process
        self._speaks = self._is_over = False
        launcher_lives = self._watch(pid, told_fd, told)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status and launcher_lives and not has_failure(self._folder, self._rank):
            job_over = any(number in _ENDING for number in told)
            self._report(_record_of_end(self._rank, status, job_over, self._killed_it))
        if launcher_lives:
            self._pass_failure_on()
            self._send(ended=True, status=status)
            left_early = self._speaks and not self._is_over
            if (status or left_early) and self._size > 1:
                self._hold(told)
        _end_orphans()
        if not self._is_near:
            shutil.rmtree(self._folder, ignore_errors=True)
        if not self._is_near or not launcher_lives:  # else the launcher does it
            sweep_files(self._files_before)
        if self._uplink is not None:
            self._uplink.flush(_LAST_WORDS_S)
            self._uplink.close()
        if self._janitor_fd >= 0:
            dismiss_janitor(self._janitor_fd)
        _end_like(status)

    def _watch(self, pid: int, told_fd: int, told: list[int]) -> bool:
        """Returns when the rank has ended, whether the launcher lives; if it does not, ends the rank first."""
        rank_fd = os.pidfd_open(pid)
        watched = select.poll()
        watched.register(rank_fd, select.POLLIN)
        watched.register(told_fd, select.POLLIN)
        alive_fd = os.open(self._alive, os.O_RDONLY | os.O_NONBLOCK) if self._is_near else -1
        if alive_fd >= 0:
            watched.register(alive_fd, 0)  # no data ever comes: only the hang-up is of interest
        if self._uplink is not None:
            watched.register(self._uplink.fileno(), select.POLLIN)
        self._send(rank_pid=pid)
        self._passed_on = self._killed_it = False
        stopped_s: float | None = None  # since when the rank is; of a clock that does not jump
        turn_s = time.monotonic()
        while True:
            ready = [fd for fd, _ in watched.poll(BEAT_S * 1000)]
            turn_s, last_s = time.monotonic(), turn_s
            if stopped_s is not None and turn_s - last_s > _PAUSE_S:
                # This process was stopped too: all of the job was, on purpose.
                stopped_s += turn_s - last_s
            if told_fd in ready and not self._take(os.read(told_fd, 16)):
                watched.unregister(told_fd)
            if rank_fd in ready:
                return True
            _reap_orphans(pid)
            if self._uplink is not None:
                for request in self._uplink.receive():
                    if request.get("do") == "stacks":
                        os.kill(pid, STACK_SIGNAL)
            if alive_fd in ready or (self._uplink is not None and self._uplink.lost):
                os.kill(pid, signal.SIGKILL)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                if _hangs_up(alive_fd):
                    shutil.rmtree(self._folder, ignore_errors=True)  # whoever made it can no longer do so
                return False
            stopped_s = _stopped_since(pid, stopped_s)
            if stopped_s is not None and any(number in _ENDING for number in told):
                os.kill(pid, signal.SIGKILL)  # it was told too, and cannot hear
                self._killed_it = True
            now_s, for_s = time.time(), 0.0 if stopped_s is None else time.monotonic() - stopped_s
            if for_s > self._limit_s:
                self._report(stopped_record(self._rank, now_s - for_s, now_s))
            self._pass_failure_on()
            self._send(stopped_at_s=0.0 if stopped_s is None else now_s - for_s)

    def _take(self, words: bytes) -> bool:
        """Passes on what the rank has told; says whether it may tell more."""
        if SHOWS_STACKS in words:
            self._speaks = True
            self._send(takes_stack_signal=True)
        if IS_OVER in words:
            self._is_over = True
            self._send(is_over=True)
        return bool(words)

    def _report(self, record: FailureRecord) -> None:
        """Leaves a record in the folder that the launcher, or this keeper's own passing on, reads."""
        with contextlib.suppress(OSError):  # the launcher is gone, and its folder with it
            write_failure(self._folder, record)

    def _pass_failure_on(self) -> None:
        """Sends the rank's record up, once."""
        if not self._passed_on and has_failure(self._folder, self._rank):
            for record in read_failures(self._folder):
                if record.rank == self._rank:
                    self._send(failure=failure_fields(record))
                    self._passed_on = True

    def _send(self, **message: object) -> None:
        if self._uplink is not None:
            self._uplink.send(**message)

    def _hold(self, told: list[int]) -> None:
        """Lets the other ranks say that they have noticed: mpiexec kills them once it sees this process's end."""
        if self._uplink is None:
            return
        end_s = time.monotonic() + _HOLD_S
        watched = select.poll()
        watched.register(self._uplink.fileno(), select.POLLIN)
        while time.monotonic() < end_s and not self._uplink.lost and not any(got in _ENDING for got in told):
            if watched.poll(50):
                self._uplink.receive()
            self._uplink.flush()


def _record_of_end(rank: int, status: int, job_over: bool, by_keeper: bool) -> FailureRecord:
    """Returns the record of a rank that ended with a status, negative for a signal, perhaps its keeper's."""
    if status > 0:
        message = f"ended with exit code {status}"
        return FailureRecord(rank, time.time(), "exit", status, message, consequence=job_over)
    name = signal.Signals(-status).name if -status in set(signal.Signals) else "?"
    message = f"killed by signal {-status} ({name})"
    # mpiexec's SIGKILL goes to the keeper too: a keeper that sees its rank killed, sees it killed alone.
    swept = by_keeper or (job_over and -status in _ENDING)
    return FailureRecord(
        rank, time.time(), "signal", PeerFailed.exit_code, message, signal=-status, consequence=swept
    )


def _stopped_since(pid: int, before_s: float | None) -> float | None:
    """Returns since when a child is stopped (monotonic), None if it runs; `before_s` is the last answer."""
    while True:
        try:
            news = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        except ChildProcessError:
            return None
        if news is None:
            return before_s
        before_s = time.monotonic() if news.si_code in (os.CLD_STOPPED, os.CLD_TRAPPED) else None


def _hangs_up(alive_fd: int) -> bool:
    """Says whether the launcher is dead, and not merely out of reach; what it held open is closed one by one."""
    if alive_fd < 0:
        return False
    watched = select.poll()
    watched.register(alive_fd, 0)
    return bool(watched.poll(_DYING_S * 1000))


def _reap_orphans(rank_pid: int) -> None:
    """Lets go of what has ended while the rank lives."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while (ended := os.waitid(os.P_ALL, 0, flags)) is not None and ended.si_pid != rank_pid:
        os.waitpid(ended.si_pid, 0)


def _end_orphans() -> None:
    """Ends what the rank left behind: this process is its parent now."""
    kill_s = time.monotonic() + _ORPHAN_S
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while time.monotonic() < kill_s + _KILL_S:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if time.monotonic() > kill_s:
            with contextlib.suppress(OSError):  # a kernel that has no such list
                for pid in children.read_text(encoding="ascii").split():
                    with contextlib.suppress(OSError):  # it has ended, or runs as another user
                        os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)


def _end_like(status: int) -> NoReturn:
    """Ends this process as a rank ended, for mpiexec to see."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core file, the rank's own, is enough
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(abs(status))
