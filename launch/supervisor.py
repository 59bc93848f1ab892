"""The outer process of a rank: it starts the rank, passes on what it prints and says, and knows how it ended.

mpiexec's child is this process, and it ends only when the launcher says so: mpiexec hears of no failure before the
launcher has, and kills nobody. A rank is ended by its supervisor where the launcher is gone; what the rank has left
behind, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import NoReturn

from lowshard.comm.failure import MESSAGE, UNCONFIRMED_S, Wire
from lowshard.comm.interface import boot_id
from lowshard.comm.listener import connect, tune
from lowshard.errors import LaunchError, PeerFailed
from lowshard.settings import JOB_DIR, LINK, change, environment

__all__ = ["PURPOSE", "STACK_SIGNAL", "STREAMS", "Supervisor", "link_text", "shared_folder"]

PURPOSE = 2
"""Of a supervisor's connection."""
STREAMS = (b"o", b"e")
"""Kinds of the frames with what a rank prints to stdout and to stderr."""
STACK_SIGNAL = signal.SIGUSR1
"""Makes a rank print the stacks of its threads."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # what mpiexec ends a job with
_CONNECT_S = 60.0
_TURN_S = 0.25
_STARTING_S = 60.0
_MPICH_FILE = re.compile(r"/dev/shm/mpich_shm_\w+")
_TERM_S = 1.0  # from SIGTERM to SIGKILL
_ORPHAN_S = 0.5  # for what a rank left behind (a resource tracker, say) to end by itself
_LAST_WORDS_S = 2.0
_READ_BYTES = 1 << 16
_MOST_UNSENT_BYTES = 1 << 20  # then the rank waits


def link_text(token: bytes, addresses: tuple[str, ...]) -> str:
    """Returns what LOWSHARD_LINK says of a launcher's listener."""
    return ",".join((token.hex(), boot_id(), *addresses))


def shared_folder(job_dir: str) -> Path:
    """Returns the folder for what a job's MPI library puts into shared memory, on each host."""
    return Path("/dev/shm") / Path(job_dir).name


class Supervisor:
    """Watches one rank of a job from before its start to after its end."""

    def __init__(self, rank: int) -> None:
        """Connects to the launcher.

        Raises:
            LaunchError: the launcher cannot be reached, or its variable is damaged.
        """
        token, boot, *addresses = LINK.text().split(",")
        try:
            connection = connect(addresses, bytes.fromhex(token), PURPOSE, rank, _CONNECT_S)
        except ValueError:
            raise LaunchError(f"{LINK.name} is set by the launcher alone; unset it") from None
        except ConnectionError as error:
            raise LaunchError(
                f"rank {rank} on {socket.gethostname()} must reach the launcher, but none of its addresses lets it in: "
                f"{error}; let the hosts of a job connect to each other, or name the network with --iface"
            ) from None
        tune(connection, UNCONFIRMED_S)
        self._launcher = Wire(connection)
        self._launcher.say(do="hello", host=socket.gethostname(), pid=os.getpid())
        self._folder = Path(JOB_DIR.text())
        self._is_near, self._shared = boot == boot_id(), shared_folder(str(self._folder))
        if self._shared.parent.is_dir():
            self._shared.mkdir(mode=0o700, exist_ok=True)
        mine, self._ranks_end = socket.socketpair()
        self._rank = Wire(mine)
        ends = [os.pipe(), os.pipe()]
        self._pipes = {ends[i][0]: STREAMS[i] for i in range(2)}
        self._writes = [write for _, write in ends]
        for fd in self._pipes:
            os.set_blocking(fd, False)
        self._own_pid, self._environment, self._begun_s = os.getpid(), environment(), time.monotonic()

    def become_rank(self) -> None:
        """To be called in the rank: ties its output, its failure channel and its life to this process."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._own_pid:  # it ended before the kernel was asked
            os._exit(PeerFailed.exit_code)
        for target, fd in enumerate(self._writes, start=1):
            os.dup2(fd, target)
            os.close(fd)
        for fd in self._pipes:
            os.close(fd)
        self._launcher.close()
        self._rank.close()
        self._ranks_end.set_inheritable(True)
        change(LINK.name, f"fd:{self._ranks_end.detach()}:{os.getpid()}")

    def supervise(self, pid: int) -> NoReturn:
        """Passes on what the rank and the launcher say, and how the rank ended; ends when the launcher says so."""
        told: list[int] = []
        for number in (*_ENDING, signal.SIGUSR1, signal.SIGUSR2):  # the rank has had these too
            signal.signal(number, lambda got, frame: told.append(got))
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what the rank leaves comes to this process
        for fd in self._writes:
            os.close(fd)
        self._ranks_end.close()
        self._files = set[str]()
        self._pid, self._has_ended, self._is_over, self._kill_s = pid, False, False, float("inf")
        rank_fd = os.pidfd_open(pid)
        while True:
            ready = self._wait(rank_fd)
            self._note_files()
            self._hear_launcher()
            if self._launcher.closed:
                self._is_over, self._kill_s = True, 0.0
            self._pass_on()
            now_s = time.monotonic()
            if not self._has_ended and rank_fd in ready:
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                self._pass_on()  # its last words
                swept = -status in _ENDING and any(number in _ENDING for number in told)
                self._launcher.say(do="ended", status=status, swept=swept)
                self._has_ended, self._kill_s = True, min(self._kill_s, now_s + _ORPHAN_S)
            if now_s > self._kill_s:
                self._kill()
            if not _reap_orphans(pid) and self._has_ended and self._is_over:
                break
        end_s = time.monotonic() + (0 if self._launcher.closed else _LAST_WORDS_S)
        self._pass_on()
        while self._launcher.unsent and time.monotonic() < end_s:
            self._launcher.flush()
            time.sleep(0.01)
        shutil.rmtree(self._shared, ignore_errors=True)
        for file in self._files:
            Path(file).unlink(missing_ok=True)
        if self._launcher.closed and self._is_near:  # whoever made it can no longer do so
            shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)

    def _wait(self, rank_fd: int) -> set[int]:
        """Waits for something to do, for a while at most; returns the descriptors that are ready."""
        poll = select.poll()
        for wire in (self._launcher, self._rank):
            if not wire.closed:
                poll.register(wire, select.POLLIN | (select.POLLOUT if wire.unsent else 0))
        if len(self._launcher.unsent) < _MOST_UNSENT_BYTES:
            for fd in self._pipes:
                poll.register(fd, select.POLLIN)
        if not self._has_ended:
            poll.register(rank_fd, select.POLLIN)
        is_short = self._is_over or self._kill_s < float("inf") or self._seeks_files()
        wait_s = 0.02 if is_short else _TURN_S
        return {fd for fd, _ in poll.poll(1000 * wait_s)}

    def _seeks_files(self) -> bool:
        """Says whether MPICH may be starting: a rank that is killed then must not leave what it has made."""
        is_young = time.monotonic() < self._begun_s + _STARTING_S
        return "PMI_RANK" in self._environment and not self._files and is_young

    def _note_files(self) -> None:
        """Notes what MPICH has in shared memory, under a name that nobody can choose, while the rank maps it."""
        if self._seeks_files():
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{self._pid}/maps").read_text(errors="replace")
                self._files.update(_MPICH_FILE.findall(maps))
            if self._files and self._is_near:  # mpiexec may kill this process too
                self._launcher.say(do="maps", files=sorted(self._files))

    def _hear_launcher(self) -> None:
        if self._launcher.closed:
            return
        self._launcher.flush()
        for kind, content in self._launcher.receive():
            if content == b"stacks":
                self._signal_rank(STACK_SIGNAL)
            elif content == b"end" and not self._is_over:
                self._is_over, self._kill_s = True, min(self._kill_s, time.monotonic() + _TERM_S)
                self._signal_rank(signal.SIGTERM)
            elif content == b"kill":
                self._is_over, self._kill_s = True, 0.0
            elif kind == MESSAGE:
                self._rank.send(kind, content)

    def _signal_rank(self, number: int) -> None:
        if not self._has_ended:  # else its number may be another process's
            os.kill(self._pid, number)

    def _pass_on(self) -> None:
        """Passes on what the rank has said and printed."""
        if not self._rank.closed:
            self._rank.flush()
            for kind, content in self._rank.receive():
                self._launcher.send(kind, content)
        for fd, kind in [*self._pipes.items()]:
            with contextlib.suppress(BlockingIOError):
                while len(self._launcher.unsent) < _MOST_UNSENT_BYTES:
                    data = os.read(fd, _READ_BYTES)
                    if not data:
                        os.close(fd)
                        del self._pipes[fd]
                        break
                    self._launcher.send(kind, data)

    def _kill(self) -> None:
        """Kills the rank, or what it has left behind: this process is its parent now."""
        if not self._has_ended:
            self._signal_rank(signal.SIGKILL)
            return
        with contextlib.suppress(OSError):  # a kernel that has no such list
            children = Path(f"/proc/self/task/{self._own_pid}/children").read_text(encoding="ascii")
            for word in children.split():
                with contextlib.suppress(OSError):  # it has ended, or runs as another user
                    os.kill(int(word), signal.SIGKILL)


def _reap_orphans(rank_pid: int) -> bool:
    """Lets go of what has ended but the rank; says whether there are children left."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    try:
        while (ended := os.waitid(os.P_ALL, 0, flags)) is not None and ended.si_pid != rank_pid:
            os.waitpid(ended.si_pid, 0)
    except ChildProcessError:
        return False
    return True
