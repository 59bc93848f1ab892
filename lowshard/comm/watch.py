"""The side channel: every rank learns within milliseconds that another failed, left or fell silent, and which one.

MPI tells nobody: where one rank fails, the others wait for it in a collective for ever. So each rank has a
connection to rank 0, beside MPI. Over it go heartbeats, five a second, what a failing rank says of itself, and
farewells; a process that dies closes it. Rank 0 passes the first failure on to all.

A star it is: rank 0's thread takes in 5 small frames a second from each rank and sends as many. That is fine for
hundreds of ranks (each takes one file descriptor of rank 0: see `ulimit -n`); for thousands it would have to be a tree.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
import math
import os
import select
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from lowshard.comm import abort
from lowshard.comm import heartbeat as hb
from lowshard.comm.call import TEXT_BYTES, Activity, read_text
from lowshard.comm.door import tune
from lowshard.comm.heartbeat_memory import EPOLL_FD, FAILURE_AT, MESSAGE_BYTES, OUTBOX_AT
from lowshard.comm.progress import let_mpi_go_on
from lowshard.comm.waits import Waits
from lowshard.comm.watch_setup import cut, meet
from lowshard.errors import CommError, PeerFailed, TimedOut
from lowshard.settings import ON_FAILURE

__all__ = ["Watch", "time_out_report"]


Told = Literal["failed", "exit", "timed out", "disagreed"]

_EXIT_PAUSE_S = 0.002
_GONE_S = 1.0  # what a rank sent before it left may still be on its way
_TELL_S = 0.3  # for the hub to hear, and to pass on
_FAREWELL_S = 1.5
_LOOK_MS = 1000  # from one look at who waits for long to the next
_KINDS: dict[str, tuple[int, str]] = {
    "failed": (hb.FAILED, "failed"),
    "exit": (hb.EXIT, "ended its program"),
    "timed out": (hb.TIMED_OUT, "timed out"),
    "disagreed": (hb.DISAGREED, "found that ranks disagree"),
}
_watches: set[Watch] = set()  # that this process has open


class Watch:
    """One rank's end of the side channel; see the module. A world of one rank has no sockets and no threads.

    Attributes:
        rank: this rank.
        size: number of ranks.
        world_rank: this process's rank in the job, where the communicator that is watched is not the world's.
        flag: one int64, 0 until a failure is known and 1 from then on; compiled waits poll it by its address.
    """

    def __init__(self, rank: int, size: int, activity: Activity, grace_s: float) -> None:
        """Make an end without connections; `start` makes whole ones."""
        self.rank, self.size = rank, size
        self.world_rank = abort.world_rank(rank)
        self.world_ranks = tuple(range(size))
        self._activity = activity
        self._grace_s = grace_s
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._epoll: select.epoll | None = None
        self._wake = self._news = -1
        self._own = np.frombuffer(activity.text, np.uint8)
        self._lay_out({})

    @classmethod
    def start(
        cls,
        mpi_comm: Any,
        activity: Activity,
        *,
        heartbeat_limit_s: float | None = None,
        grace_s: float = 2.0,
        timeout_s: float = 600.0,
        connect_limit_s: float = 10.0,
        world_ranks: Sequence[int] | None = None,
    ) -> Self:
        """Connect the ranks of an mpi4py communicator and begin to watch.

        Collective: all ranks of `mpi_comm` call this, before anything else goes over it. Rank 0's settings count
        for all. Ranks of its machine reach it by a Unix socket in a private folder; where some are on other hosts, all
        reach it by TCP, at the addresses that lead to those hosts. LOWSHARD_INTERFACE there names another interface.

        After a failure a process that does not end within the grace is ended, with exit code 70, or 71 where a
        time-out was the cause; LOWSHARD_ON_FAILURE=raise leaves it alone.

        Args:
            mpi_comm: the communicator; it is not kept.
            activity: what this rank is in, for the others and for messages.
            heartbeat_limit_s: a rank that is silent for longer has failed; by default LOWSHARD_HEARTBEAT_S, else 10.
            grace_s: seconds that a process has to end by itself once a failure is known.
            timeout_s: how long to wait for the ranks that are late to this call.
            connect_limit_s: how long to try to connect.
            world_ranks: the ranks of `mpi_comm` as ranks of the job; by default the same.

        Raises:
            CommError: some rank reaches no address of rank 0, or a setting is wrong; the same on all ranks.
            TimedOut: not all ranks came.
        """
        watch = cls(mpi_comm.Get_rank(), mpi_comm.Get_size(), activity, grace_s)
        if world_ranks is not None:
            watch.world_ranks = tuple(world_ranks)
        if watch.size == 1:
            return watch
        problem, ends = "", True
        loop: Any = hb.loop
        try:
            loop, ends = hb.compiled_loop(), _ends_process()
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            problem = f"rank {watch.rank}: {error}"
        links, limit_s = meet(mpi_comm, heartbeat_limit_s, problem, timeout_s, connect_limit_s)
        watch._begin(links, loop, ends, limit_s)
        return watch

    # ---- what others ask

    @property
    def failed_rank(self) -> int | None:
        """The rank whose failure was the first; None while there is none."""
        return int(self._words[hb.FAILED_RANK]) if self.flag[0] else None

    @property
    def cause(self) -> str:
        """The failure in words, the same on all ranks; "" while there is none."""
        if not self.flag[0]:
            return ""
        size = int(self._words[hb.FAILURE_BYTES])
        return self._memory[FAILURE_AT : FAILURE_AT + size].tobytes().decode(errors="replace")

    def said_before(self, text: str) -> int | None:
        """Return the rank of the job that told of its failure first, if it did so in this text; else None."""
        first = self.failed_rank
        if first is None or first == self.rank:
            return None
        said = self.cause.partition(": ")[2]
        same = bool(said) and cut(text, len(said.encode())).decode() == said
        return self.world_ranks[first] if same else None

    def error(self, where: str) -> CommError:
        """Return the error to raise on this rank after a failure.

        Args:
            where: what this rank was in, as `Activity.where` says it.

        Returns:
            PeerFailed; or TimedOut where it was this rank that timed out.
        """
        if self.failed_rank == self.rank and self._words[hb.KIND] == hb.TIMED_OUT:
            return TimedOut(self.cause)
        error = PeerFailed(f"{self.cause}; this rank was in {where}")
        return error if self.failed_rank is None else error.about([self.world_ranks[self.failed_rank]])

    @property
    def whole(self) -> bool:
        """Whether it may serve from now on: as far as this rank knows, none has failed and none has left."""
        return (self.size == 1 or self._alive()) and not self.flag[0] and not self._gone_ns.any()

    @property
    def gone(self) -> frozenset[int]:
        """The ranks that have ended their program in an ordinary way."""
        return frozenset(np.flatnonzero(self._gone_ns).tolist())

    def left(self, rank: int) -> bool:
        """Say whether a rank has ended its program in an ordinary way; cheap."""
        return bool(self._gone_ns[rank])

    @property
    def gone_address(self) -> int:
        """Address of an int64 a rank: when it ended its program in order, in ns of the monotonic clock, or 0."""
        return int(self._gone_ns.ctypes.data)

    def check_gone(self, missing_ranks: Iterable[int], where: str) -> None:
        """Raise if one of the ranks that this one waits for has left more than a second ago.

        Args:
            missing_ranks: those that have not come to a collective yet.
            where: that collective.

        Raises:
            PeerFailed: such a rank will not come any more.
        """
        now_ns = time.monotonic_ns()
        for rank in missing_ranks:
            gone_ns = int(self._gone_ns[rank])
            if gone_ns and now_ns - gone_ns > _GONE_S * 1e9:
                raise PeerFailed(
                    f"rank {rank} has ended its program without this collective; this rank waits for it in {where}"
                ).about([self.world_ranks[rank]])

    def others(self) -> list[str]:
        """Return a line on each rank that this one is connected with: what it was last in, when it was heard."""
        lines = []
        now_ns = time.monotonic_ns()
        for link in range(len(self._sockets)):
            word, at = hb.link_word(link), hb.text_at(link)
            rank, heard_ns = int(self._words[word + hb.PEER]), int(self._words[word + hb.HEARD_NS])
            last = read_text(self._memory[at : at + TEXT_BYTES].tobytes()) or "no collective"
            state = ", has ended its program" if self.left(rank) else ""
            lines.append(f"rank {rank}: last in {last}, heard {(now_ns - heard_ns) / 1e9:.1f} s ago{state}")
        return lines

    # ---- what this rank says

    def tell(self, kind: Told, text: str) -> None:
        """Tell all ranks that this one fails; returns once they have been told, or after 0.3 s.

        Where a failure is known already that one stands, and nothing is told.

        Args:
            kind: "failed" for an exception, "exit" for a `sys.exit`, "timed out", "disagreed".
            text: the exception in one line, or what the rank waited for.
        """
        number, verb = _KINDS[kind]
        if os.getpid() != self._pid:  # in a forked child the lock may be held for ever
            return
        with self._lock:
            if self.flag[0] or not self._alive():
                return
            data = cut(f"rank {self.rank} {verb}: {text}", MESSAGE_BYTES)
            self._memory[OUTBOX_AT : OUTBOX_AT + len(data)] = np.frombuffer(data, np.uint8)
            self._words[hb.TOLD_KIND], self._words[hb.TOLD_BYTES] = number, len(data)
            os.eventfd_write(self._wake, 1)
        end_s = time.monotonic() + _TELL_S
        while not self.flag[0] and time.monotonic() < end_s:
            time.sleep(0.001)

    def ending(self, exit_code: int, within_s: float) -> None:
        """Note that this process is ending by itself: it is forced, without a word, only if that takes too long."""
        self._words[hb.END_CODE] = exit_code
        self._words[hb.END_NS] = time.monotonic_ns() + int(within_s * 1e9)

    def close(self) -> None:
        """Say farewell: this rank ends its program in the ordinary way, or needs no watch any more.

        On rank 0 the threads go on until all other ranks have said so too, since they depend on it; on another
        rank they have ended when this returns. At the end of the program it is called by itself, and rank 0 waits.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self._alive() or self._words[hb.CLOSING]:
                return
            self._words[hb.CLOSING] = 1
            os.eventfd_write(self._wake, 1)
        if self.rank != 0 and not self.flag[0]:
            self._join(_FAREWELL_S)

    # ---- threads

    def _lay_out(self, links: dict[int, socket.socket]) -> None:
        """Make the arrays that the loop shares with all others."""
        self._sockets = [links[rank] for rank in sorted(links)]
        descriptors = [connection.fileno() for connection in self._sockets]
        self._words, self._memory = hb.make_memory(
            self.rank,
            self.size,
            len(links),
            max(descriptors, default=-1) + 1,
            self._own.ctypes.data,
            abort.forced_end_parts(self.world_rank),
        )
        self._words[hb.WORLD_RANK], self._words[hb.GRACE_NS] = self.world_rank, int(self._grace_s * 1e9)
        for link, rank in enumerate(sorted(links)):
            word = hb.link_word(link)
            self._words[word + hb.FD], self._words[word + hb.PEER] = descriptors[link], rank
            self._words[hb.descriptor_at(self._words, descriptors[link])] = link
        self.flag: NDArray[np.int64] = self._words[hb.FLAG : hb.FLAG + 1]
        first = hb.gone_at(self._words, 0)
        self._gone_ns = self._words[first : first + self.size]

    def _begin(self, links: dict[int, socket.socket], loop: Any, ends: bool, limit_s: float) -> None:
        """Start the threads."""
        for connection in links.values():
            connection.setblocking(False)
            tune(connection, 2 * limit_s)
        self._lay_out(links)
        self._wake, self._news = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2))
        self._epoll = select.epoll()
        for fd in (self._wake, *(connection.fileno() for connection in self._sockets)):
            self._epoll.register(fd, select.EPOLLIN)
        words = self._words
        words[EPOLL_FD], words[hb.WAKE_FD], words[hb.NEWS_FD] = self._epoll.fileno(), self._wake, self._news
        words[hb.LIMIT_NS], words[hb.ARMED] = int(limit_s * 1e9), ends
        self._threads = [
            threading.Thread(target=loop, args=(words, self._memory), name="lowshard-watch", daemon=True),
            threading.Thread(target=self._attend, name="lowshard-watch-end", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        while not words[hb.RUNNING]:  # the program may hold the interpreter from here on
            time.sleep(0.001)
        _watches.add(self)
        abort.add_watch(self)
        atexit.register(self._at_exit)

    def _alive(self) -> bool:
        """Say whether the threads run."""
        return bool(self._threads) and not self._words[hb.OVER]

    def _attend(self) -> None:
        """Do after a failure what needs the interpreter; tidy up at the end."""
        words = self._words
        news = select.poll()
        news.register(self._news, select.POLLIN)
        reported = False
        waits = Waits(words[hb.LIMIT_NS])
        while not words[hb.OVER]:
            due = self.flag[0] and words[hb.ARMED] and not words[hb.END_NS]
            left_s = (words[hb.FAILED_NS] + words[hb.GRACE_NS] - time.monotonic_ns()) / 1e9
            if due and left_s <= 0:
                self._end_process()
            news.poll(math.ceil(left_s * 1000) if due else None if self.flag[0] else _LOOK_MS)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._news)
            if self.flag[0] and not reported:
                reported = True
                if words[hb.KIND] == hb.TIMED_OUT:
                    _write(time_out_report(self._activity, self))
            if not self.flag[0]:
                self._activity.note_wait()
                if self.rank == 0 and (text := waits.look(self._texts())):
                    _write(f"rank {self.world_rank} | {text}\n")
        self._release()

    def _texts(self) -> dict[int, bytes]:
        """Return what each rank that has not left is in, as it said last, by its rank in the job."""
        texts = {self.world_rank: self._activity.text.tobytes()}
        for link in range(len(self._sockets)):
            rank, at = int(self._words[hb.link_word(link) + hb.PEER]), hb.text_at(link)
            if not self.left(rank):
                texts[self.world_ranks[rank]] = self._memory[at : at + TEXT_BYTES].tobytes()
        return texts

    def _end_process(self) -> None:
        """End this process: a rank failed, and this one waits for it in MPI, computes, or sleeps."""
        timed_out = self._words[hb.KIND] == hb.TIMED_OUT
        code = TimedOut.exit_code if timed_out else PeerFailed.exit_code
        message = (
            f"{self.cause}; this rank was in {self._activity.where()} and did not end within {self._grace_s:g} s: "
            f"it ends with exit code {code}"
        )
        abort.leave_forced_end(self.world_rank, code, message)
        _write(f"rank {self.world_rank} | {message}\n")
        self._words[hb.SAID] = 1
        abort.flush_output()
        os._exit(code)

    def _release(self) -> None:
        """Close what the threads needed."""
        self._threads[0].join()
        with self._lock:
            abort.remove_watch(self)
            atexit.unregister(self._at_exit)
            _watches.discard(self)
            self._close_files()

    def _close_files(self) -> None:
        for connection in self._sockets:
            connection.close()
        if self._epoll is not None and not self._epoll.closed:
            self._epoll.close()
            os.close(self._wake)
            os.close(self._news)

    def _join(self, limit_s: float) -> None:
        """Wait for the threads to end; not where one of them calls this."""
        if threading.current_thread() not in self._threads:
            self._threads[1].join(limit_s)

    def _at_exit(self) -> None:
        """Leave in good order; on rank 0, stay as long as others need it.

        After a failure this does not return: MPI's finalize, which comes next, would wait for the rank that failed.
        """
        if os.getpid() == self._pid:
            self.close()
            while self._alive():
                if not self.flag[0]:
                    let_mpi_go_on()  # what others wait for may still lie here
                self._join(_EXIT_PAUSE_S)


def time_out_report(activity: Activity, watch: Watch) -> str:
    """Return what there is to say of this rank when a wait took too long, the rank in front of each line.

    What it is in, its last 64 collectives, what it knows of others, and the stacks of all its threads. When a rank
    tells of a time-out every rank prints this to stderr by itself.
    """
    out = io.StringIO()
    out.write(f"time-out report: this rank is in {activity.where()}\n")
    activity.dump_ring(out)
    out.write("".join(f"{line}\n" for line in watch.others()))
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        out.write(file.read())
    return "".join(f"rank {watch.world_rank} | {line}\n" for line in out.getvalue().splitlines() if line)


def _ends_process() -> bool:
    """Say whether a process that hangs after a failure is to be ended."""
    return ON_FAILURE.choice() == "end"


def _write(text: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # a broken or closed stream has no reader
            sys.stderr.write(text)
            sys.stderr.flush()


def _close_in_child() -> None:
    """Let go of the connections in a forked child: they must close when the rank itself dies."""
    for watch in list(_watches):
        watch._close_files()
    _watches.clear()


os.register_at_fork(after_in_child=_close_in_child)
