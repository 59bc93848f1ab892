"""Messages between two ranks over MPI: none waits without a deadline, and groups share one MPI communicator.

A group is told apart by its tag, so splitting one costs no MPI communicator, of which there are few thousand. A message
is received once MPI has matched it and told its length, in the order in which recvs were called, and so never past the
end of a buffer: Open MPI writes a message that is longer than expected whole before it says so.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import repeat, starmap
from typing import Any

import numpy as np

from lowshard.comm.call import Call
from lowshard.comm.check import sent_apart, wait_s
from lowshard.comm.transport import Front
from lowshard.comm.wait_guard import Lookout
from lowshard.comm.work import FirstFailure, Work, failed_work
from lowshard.errors import BufferMismatchError, CommError, LowshardError, TimedOut

Array = Any

SHORT_BYTES = 2048
"""What any MPI sends without asking the receiver."""
MOST_BYTES = 1 << 30
"""Longer messages have a datatype of their own: MPI before version 4, so Open MPI 5, counts in C ints."""
_PAUSE_S, _SPINS = 1e-4, 200
_KEPT = 64
"""Messages that were started and may have ended, from which on those that have are let go of."""


class Post:
    """What the mailboxes over one MPI communicator share: the tags in use, and the long messages under way.

    A long message that was started goes on whatever the caller does: a thread drives it while it is under way.
    """

    def __init__(self) -> None:
        self.next_group = self.inner_groups = 1
        self.abandoned: list[object] = []
        """What MPI may still read or write, though nobody waits for it any more."""
        self.lock = threading.RLock()
        """Of whoever lets messages go on, where threads do beside the caller's."""
        self.threads = 0
        """Those: one that drives long messages, and where a staged transport starts messages, theirs as one."""
        self._works: list[MessageWork] = []
        self._driven = False

    def add(self, work: MessageWork) -> None:
        """See to it that a long message goes on."""
        with self.lock:
            self._works.append(work)
            if not self._driven:
                self._driven, self.threads = True, self.threads + 1
                threading.Thread(target=self._drive, name="lowshard messages", daemon=True).start()

    def push(self) -> None:
        """Let the long messages that were started go on."""
        if self._works:
            with self.lock:
                self._works = [work for work in self._works if not work.done()]

    def _drive(self) -> None:
        while True:
            with self.lock:
                self.push()
                if not self._works:
                    self._driven, self.threads = False, self.threads - 1
                    return
            time.sleep(_PAUSE_S)


class MessageWork:
    """A send or recv under way.

    Attributes:
        peer: the other rank.
        ended: whether it has ended, well or not.
        told: whether somebody who waited was told of its error.
        failure: keeps its error; None for one that is sure to be waited for.
    """

    ended = told = False
    failure: FirstFailure | None = None
    _error: LowshardError | None = None

    def __init__(self, box: Mailbox, sends: bool, buf: Array, peer: int, request: Any = None) -> None:
        """Make the work of a message that MPI has, or (no request) that is still to come."""
        self._box, self.sends, self._buf, self.peer, self._request = box, sends, buf, peer, request

    def comes(self, times: int = _SPINS, alone: bool = False) -> bool:
        """Look at it so many times, and say whether it has ended; `alone` where no other thread can look too."""
        if not alone and (post := self._box.post).threads:
            with post.lock:
                return self.comes(times, True)
        if self._request is None and not self.ended:
            self._box.match(self, times)
        while (request := self._request) is not None and times:
            if request.Test():
                self.end(self._error)
            times -= 1
        return self.ended

    def take(self, message: Any, came_bytes: int) -> None:
        """Receive a message that MPI has matched."""
        buf, spec = self._buf, self._box.spec
        if came_bytes != buf.nbytes:
            text = f"recv: rank {self.peer} sent {came_bytes} bytes, this rank expects {buf.nbytes}"
            self._error = BufferMismatchError(text)
            self._buf = buf = np.empty(came_bytes, np.uint8)  # what nobody wants must come all the same
        elif came_bytes <= SHORT_BYTES:
            message.Recv(spec(buf))  # it is here
            self.end(None)
            return
        self._request = message.Irecv(spec(buf))

    def end(self, error: LowshardError | None) -> None:
        """Note the end; the buffer is free."""
        self.ended, self._error, self._buf, self._request = True, error, None, None
        if error is not None and self.failure is not None:
            self.failure.add(self, error)

    def abandon(self, error: CommError) -> None:
        """End what may never end by itself."""
        box = self._box
        with box.post.lock:
            if self.ended:
                return
            if self._request is None:
                box.expected[self.peer].remove(self)
            else:
                box.post.abandoned.append((self._request, self._buf))
            self.end(error)

    def done(self) -> bool:
        """Let it go on, and say whether it has ended."""
        return self.comes(1)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end; see `Work.wait`."""
        timeout_s = None if timeout_s is None else wait_s(timeout_s)
        if not self.ended and not self.comes():
            try:
                self._box.await_all([self], timeout_s)
            except CommError:
                self.told = timeout_s is None  # else the message goes on
                raise
        if self._error is not None:
            self.told = True
            raise self._error


_DONE = object.__new__(MessageWork)
"""A message that has gone, or come."""
_DONE.ended = True


class Mailbox:
    """The messages of one group."""

    def __init__(
        self, mpi: Any, mpi_comm: Any, ranks: Sequence[int], rank: int, lookout: Lookout, timeout_s: float,
        group: int = 0, post: Post | None = None, watched: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Make the mailbox of a group over an MPI communicator of our own.

        `ranks` are the group's as those of the communicator, `watched` as those of the side channel (the same by
        default); `rank` is this one in the group, `group` its number and tag, `post` that of the communicator.
        """
        self._mpi, self.mpi_comm, self.ranks, self.rank = mpi, mpi_comm, list(ranks), rank
        self.lookout, self.timeout_s, self.tag = lookout, timeout_s, group
        self.watched = self.ranks if watched is None else list(watched)
        self.post = Post() if post is None else post
        self.expected: defaultdict[int, deque[MessageWork]] = defaultdict(deque)
        """Recvs by peer that no message has come for."""
        self.isend, self.irecv = mpi_comm.Isend, mpi_comm.Irecv
        self._improbe, self._status, self._all_gone = mpi_comm.Improbe, mpi.Status(), mpi.Request.Testall
        self._byte, self.address_of = mpi.BYTE, mpi.Get_address
        self._long_kinds: dict[int, Any] = {}
        self._started: list[MessageWork] = []
        self._prune_from = _KEPT

    def free(self) -> None:
        """Free the MPI communicator, if no group was ever split from these ranks: it would use it too.

        Collective: all ranks of the MPI communicator call this, unless a failure is known.
        """
        unused = self.post.next_group == self.post.inner_groups
        if unused and not self.lookout.failed() and not self._mpi.Is_finalized():
            self.mpi_comm.Free()

    def reserve(self, number: int, inner: bool = False) -> None:
        """Take all numbers of groups below one; `inner` for those that end with this mailbox."""
        self.post.next_group = max(self.post.next_group, number)
        if inner:
            self.post.inner_groups = self.post.next_group

    def part(self, ranks: Sequence[int], rank: int, group: int) -> Mailbox:
        """Return the mailbox of a part of the group, ranks in the part's order."""
        return Mailbox(
            self._mpi, self.mpi_comm, [self.ranks[r] for r in ranks], rank, self.lookout, self.timeout_s, group,
            self.post, [self.watched[r] for r in ranks],
        )  # fmt: skip

    def spec(self, buf: Array) -> list[Any]:
        """Return a flat buffer as bytes, the way mpi4py takes it."""
        if buf.nbytes <= MOST_BYTES:
            return [buf, self._byte]
        if buf.nbytes not in self._long_kinds:
            whole, rest = divmod(buf.nbytes, MOST_BYTES)
            places = [MOST_BYTES * i for i in range(whole + 1)]
            kind = self._byte.Create_hindexed([MOST_BYTES] * whole + [rest], places)
            self._long_kinds[buf.nbytes] = kind.Commit()
        return [buf, 1, self._long_kinds[buf.nbytes]]

    def match(self, work: MessageWork, times: int) -> None:
        """Give the messages that come from a rank to the recvs that wait for them, in order, this one at most."""
        expected, status, where = self.expected[work.peer], self._status, (self.ranks[work.peer], self.tag)
        for _ in range(times):
            while (message := self._improbe(*where, status)) is not None:
                first = expected.popleft()
                first.take(message, status.Get_elements(self._byte))
                if first is work:
                    return

    def send(self, buf: Array, peer: int) -> MessageWork:
        """Begin a send, and look at it once."""
        spec = [buf, self._byte] if buf.nbytes <= SHORT_BYTES else self.spec(buf)
        request = self.isend(spec, self.ranks[peer], self.tag)
        return _DONE if request.Test() else MessageWork(self, True, buf, peer, request)

    def recv(self, buf: Array, peer: int, times: int = 0, alone: bool = False) -> MessageWork:
        """Begin to receive the next message from a rank, and look for it so many times more; see `comes`."""
        if not alone and self.post.threads:
            with self.post.lock:
                return self.recv(buf, peer, times, True)
        expected, status = self.expected[peer], self._status
        message = None if expected else self._improbe(self.ranks[peer], self.tag, status)
        if message is None and times and not expected:
            looks = starmap(self._improbe, repeat((self.ranks[peer], self.tag, status), times))
            message = next(filter(None, looks), None)
        if message is None:
            work = MessageWork(self, False, buf, peer)
            expected.append(work)
            return work
        came_bytes = status.Get_elements(self._byte)
        if came_bytes == buf.nbytes <= SHORT_BYTES:
            message.Recv([buf, self._byte])
            return _DONE
        work = MessageWork(self, False, buf, peer)
        work.take(message, came_bytes)
        return work

    def keep(self, work: MessageWork, failure: FirstFailure, nbytes: int) -> None:
        """See to a message that was started and has not ended; `failure` keeps its error."""
        work.failure = failure
        self._started.append(work)
        if len(self._started) > self._prune_from:
            self._started = [one for one in self._started if not (one.ended or one.done())]
            self._prune_from = 2 * len(self._started) + _KEPT
        if nbytes > SHORT_BYTES:
            self.post.add(work)

    def run_all(self, batch: Sequence[tuple[Call, Array, int]]) -> None:
        """Start messages, the calls of send and recv with buffer and peer, and wait for all of them.

        One of another length is told of when the others have ended.
        """
        longer = [buf for _, buf, _ in batch if buf.nbytes > SHORT_BYTES]
        if longer:
            batch = sent_apart(batch, self.address_of)
        isend, ranks, tag, spec, byte = self.isend, self.ranks, self.tag, self.spec, self._byte
        requests, recvs = [], []
        for call, buf, peer in batch:
            if call.name == "send":
                requests.append(isend(spec(buf) if longer else [buf, byte], ranks[peer], tag))
            else:
                recvs.append((buf, peer))
        works = []
        if longer or not any(map(self._all_gone, repeat(requests, _SPINS))):
            sends = [(buf, peer) for call, buf, peer in batch if call.name == "send"]
            works = [MessageWork(self, True, *send, requests[i]) for i, send in enumerate(sends)]
            if not longer:
                self.await_all(works)  # so what is sent may be received over
        with self.post.lock:
            coming = [
                work for buf, peer in recvs if (work := self.recv(buf, peer, _SPINS, True)) is not _DONE
            ]
        if works or coming:
            self.await_all(coming + works)
            for work in coming:
                if work._error is not None:
                    raise work._error

    def await_all(self, works: Sequence[MessageWork], timeout_s: float | None = None) -> None:
        """Return when all have ended, whatever the end, or raise why they have not.

        `timeout_s` is the caller's own patience: when it is over nothing has failed, and the messages go on.
        """
        if all(work.comes() for work in works):
            return
        pending, push = [work for work in works if not work.ended], self.post.push
        text = f"{'recv from' if pending[0].sends else 'send to'} rank {self.rank}"

        def ended() -> bool:
            pending[:] = [work for work in pending if not work.done()]
            push()
            return not pending

        if timeout_s is not None and timeout_s < self.timeout_s:
            self._be_patient(ended, text, timeout_s)
            return
        try:
            self.lookout.wait(
                ended,
                text,
                lambda: sorted({work.peer for work in pending}),
                self.timeout_s,
                self.watched,
            )
        except CommError as error:
            for work in pending:
                work.abandon(error)
            raise

    def _be_patient(self, ended: Callable[[], bool], text: str, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        while not ended():
            if self.lookout.failed():
                raise self.lookout.failure()
            if time.monotonic() >= end_s:
                raise TimedOut(f"{text} has not come within {timeout_s:g} s; wait for it again")
            time.sleep(_PAUSE_S)

    def settle(self) -> None:
        """Wait for the messages that were started; how they end is told by their works."""
        works, self._started = self._started, []
        with suppress(CommError):  # the works have it
            self.await_all(works)

    def drop(self) -> None:
        """End what is under way: what it needs is given back."""
        for work in self._started:
            work.abandon(CommError("the communicator of this message is closed; wait for it first"))
        self._started = []


class ByMailbox:
    """How a transport that has a mailbox moves the messages of its user."""

    mailbox: Mailbox
    closed: bool
    ended: bool

    def send(self, buf: Array, dst: int) -> None:
        """Send a message."""
        self.mailbox.send(buf, dst).wait()

    def recv(self, buf: Array, src: int) -> None:
        """Receive a message of this length."""
        self.mailbox.recv(buf, src, _SPINS).wait()

    def start_message(self, front: Front, name: str, buf: Array, peer: int) -> Work:
        """Start a send or a recv."""
        try:
            _, buf, _ = front.checked_message(name, buf, peer)
        except LowshardError as error:
            return failed_work(name, error, front.failure)
        box = self.mailbox
        work = box.send(buf, peer) if name == "send" else box.recv(buf, peer)
        if work is not _DONE:
            box.keep(work, front.failure, buf.nbytes)
        return work

    def run_batch(self, front: Front, batch: Sequence[tuple[Call, Array, int]]) -> None:
        """Start all sends and recvs of a group, then wait for them."""
        self.mailbox.run_all(batch)

    def settle(self) -> None:
        """Wait for the messages that were started."""
        self.mailbox.settle()

    def end(self) -> None:
        """Give the resources back."""
        self.mailbox.drop()

    def end_with_mpi(self) -> bool:
        """Take no more calls: MPI, which is being finalized, would end the process."""
        self.closed = self.ended = True
        self.mailbox.drop()
        return True
