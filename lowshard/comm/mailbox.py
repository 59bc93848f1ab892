"""Messages between two ranks over MPI: none waits without a deadline, and groups share one MPI communicator.

A group is told apart by its tag. So splitting a group costs no MPI communicator, of which there are few thousand.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from lowshard.comm.check import wait_s
from lowshard.comm.large_count import byte_message
from lowshard.comm.wait_guard import Lookout
from lowshard.comm.work import FirstFailure
from lowshard.errors import BufferMismatchError, CommError, LowshardError, TimedOut

Array = Any

_EAGER_BYTES = 1024
"""Messages up to this MPI takes without waiting for the receiver."""


class Post:
    """What the mailboxes over one MPI communicator share: the tags in use, and the messages under way.

    A message that was started goes on whatever the caller does: a thread asks MPI about it while it is under way.
    """

    PAUSE_S = 1e-4

    def __init__(self, tags: int) -> None:
        self.next_tag, self.tags = 1, tags
        self._lock = threading.Lock()
        self._works: list[MessageWork] = []
        self.turns: dict[tuple[int, int], deque[list[Any]]] = {}
        self._thread: threading.Thread | None = None

    def add(self, work: MessageWork) -> None:
        """See to it that a message goes on."""
        with self._lock:
            self._works.append(work)  # behind the others: messages of one pair stay in order
            self._advance_all()
            if self._works and self._thread is None:
                self._thread = threading.Thread(target=self._drive, name="lowshard messages", daemon=True)
                self._thread.start()

    def advance(self, work: MessageWork) -> bool:
        """Let a message go on, and all others that are under way; say whether it has ended."""
        with self._lock:
            if work not in self._works:
                work._advance_locked()
            self._advance_all()
            return work._ended

    @property
    def busy(self) -> bool:
        """Whether messages are under way."""
        return bool(self._works)

    def push(self) -> bool:
        """Let the messages under way go on; returns False."""
        with self._lock:
            self._advance_all()
        return False

    def of(self, mailbox: Mailbox) -> list[MessageWork]:
        """Return the messages under way of one mailbox."""
        with self._lock:
            return [work for work in self._works if work.mailbox is mailbox]

    def drop(self, mailbox: Mailbox, error: CommError) -> None:
        """End the messages under way of a mailbox."""
        with self._lock:
            for work in self._works:
                if work.mailbox is mailbox:
                    work._end(error)
            self._works = [work for work in self._works if not work._ended]

    def _advance_all(self) -> None:
        for work in self._works:
            work._advance_locked()
        self._works = [work for work in self._works if not work._ended]

    def _drive(self) -> None:
        while True:
            with self._lock:
                self._advance_all()
                if not self._works:
                    self._thread = None
                    return
            time.sleep(self.PAUSE_S)


class MessageWork:
    """A send or recv under way.

    Attributes:
        told: whether somebody who waited was told of its error.
        failure: keeps it if it fails; None for one that is sure to be waited for.
    """

    def __init__(
        self, post: Post, mailbox: Mailbox, advance: Callable[[], bool],
        finish: Callable[[Callable[[], bool], float | None], None],
    ) -> None:  # fmt: skip
        self._post, self.mailbox, self._advance, self._finish = post, mailbox, advance, finish
        self._ended = False
        self._error: LowshardError | None = None
        self.told = False
        self.failure: FirstFailure | None = None
        self.owner: object = None
        """What must live until it has ended."""

    def _advance_locked(self) -> None:
        if self._ended:
            return
        try:
            self._ended = self._advance()
        except LowshardError as error:
            self._end(error)
        if self._ended:
            self._advance, self.owner = bool, None  # the buffer is free

    def _end(self, error: LowshardError) -> None:
        self._ended, self._error = True, error
        if self.failure is not None:
            self.failure.add(self, error)

    def done(self) -> bool:
        """Say whether it has ended."""
        return self._ended or self._post.advance(self)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end; see `Work.wait`."""
        timeout_s = wait_s(timeout_s)
        try:
            self.await_end(timeout_s)
        except CommError:
            self.told = timeout_s is None  # else the message goes on
            raise
        if self._error is not None:
            self.told = True
            raise self._error

    def await_end(self, timeout_s: float | None = None) -> None:
        """Return at the end, whatever that is, or raise why there is none in time."""
        if not self.done():
            self._finish(self.done, timeout_s)


class Mailbox:
    """The messages of one group."""

    def __init__(
        self, mpi: Any, mpi_comm: Any, ranks: Sequence[int], rank: int, lookout: Lookout, timeout_s: float,
        tag: int = 0, post: Post | None = None, watched: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Make a mailbox over an MPI communicator of our own.

        Args:
            mpi: the module mpi4py.MPI.
            mpi_comm: the communicator.
            ranks: the group's ranks as ranks of it.
            rank: this rank in the group.
            lookout: what waits look at.
            timeout_s: deadline of each wait.
            tag: of the group.
            post: of the communicator; by default a new one.
            watched: the group's ranks as ranks of the failure channel; by default the same.
        """
        self._mpi, self._comm, self._ranks, self._rank = mpi, mpi_comm, list(ranks), rank
        self.lookout, self._timeout_s, self._tag = lookout, timeout_s, tag
        self.watched = self._ranks if watched is None else list(watched)
        """The group's ranks as ranks of the failure channel."""
        self._post = Post(int(mpi_comm.Get_attr(mpi.TAG_UB) or 32767)) if post is None else post
        self._status = mpi.Status()

    waiting: Mapping[tuple[str, int], Any] = MappingProxyType({})
    """The directions ("send" or "recv") and peers of started messages that others must not overtake."""

    @property
    def mpi_comm(self) -> Any:
        """The MPI communicator."""
        return self._comm

    def free(self) -> None:
        """Free the MPI communicator, if no group was ever split from these ranks: it would use it too.

        Collective: all ranks of the MPI communicator call this, unless a failure is known.
        """
        if self._post.next_tag == 1 and not self.lookout.failed() and not self._mpi.Is_finalized():
            self._comm.Free()

    @property
    def next_tag(self) -> int:
        """The next tag that is free in this process."""
        return self._post.next_tag

    def reserve(self, tag: int) -> None:
        """Take all tags below one.

        Raises:
            CommError: there are no more.
        """
        if tag > self._post.tags:
            raise CommError(f"MPI has {self._post.tags} tags and each split() takes one; split less often")
        self._post.next_tag = max(self._post.next_tag, tag)

    def part(self, ranks: Sequence[int], rank: int, tag: int) -> Mailbox:
        """Return the mailbox of a part of the group, ranks in the part's order."""
        return Mailbox(
            self._mpi,
            self._comm,
            [self._ranks[r] for r in ranks],
            rank,
            self.lookout,
            self._timeout_s,
            tag,
            self._post,
            [self.watched[r] for r in ranks],
        )

    def start_send(self, buf: Array, dst: int) -> MessageWork:
        """Start a send."""
        request = self._comm.Isend(byte_message(self._mpi, buf), self._ranks[dst], self._tag)
        return MessageWork(
            self._post, self, request.Test, self._finisher(f"recv from rank {self._rank}", dst)
        )

    def start_recv(self, buf: Array, src: int) -> MessageWork:
        """Start a recv; the message is looked at before it is received.

        Open MPI writes a message that is too long past the end of the buffer.
        """
        request: list[Any] = []
        # Messages of one pair go to the recvs in the order of these: only the first may look.
        turns = self._post.turns.setdefault((self._tag, src), deque())
        turns.append(request)

        def advance() -> bool:
            if not request:
                if turns[0] is not request:
                    return False
                message = self._comm.Improbe(self._ranks[src], self._tag, self._status)
                if message is None:
                    return False
                turns.popleft()
                if not turns:
                    self._post.turns.pop((self._tag, src), None)
                request.append(self._matched(message, buf, src))
            return bool(request[0].Test())

        return MessageWork(self._post, self, advance, self._finisher(f"send to rank {self._rank}", src))

    def send(self, buf: Array, dst: int) -> None:
        """Send and wait."""
        request = self._comm.Isend(byte_message(self._mpi, buf), self._ranks[dst], self._tag)
        if not request.Test():
            self._wait(request.Test, f"recv from rank {self._rank}", dst)

    def recv(self, buf: Array, src: int) -> None:
        """Receive and wait."""
        if self._post.busy:  # what was started before comes first
            self.keep_going(self.start_recv(buf, src)).wait()
            return
        source, status = self._ranks[src], self._status
        message = self._comm.Improbe(source, self._tag, status)
        if message is None:
            found: list[Any] = []

            def look() -> bool:
                came = self._comm.Improbe(source, self._tag, status)
                if came is not None:
                    found.append(came)
                return came is not None

            self._wait(look, f"send to rank {self._rank}", src)
            message = found[0]
        if self._status.Get_elements(self._mpi.BYTE) == buf.nbytes <= _EAGER_BYTES:
            message.Recv(byte_message(self._mpi, buf))
            return
        request = self._matched(message, buf, src)
        if not request.Test():
            self._wait(request.Test, f"send to rank {self._rank}", src)

    def _matched(self, message: Any, buf: Array, src: int) -> Any:
        """Start to receive a message that has been looked at; one of another length is thrown away."""
        came = self._status.Get_elements(self._mpi.BYTE)
        if came != buf.nbytes:
            message.Recv(byte_message(self._mpi, np.empty(came, np.uint8)))
            raise BufferMismatchError(f"recv: rank {src} sent {came} bytes, this rank expects {buf.nbytes}")
        return message.Irecv(byte_message(self._mpi, buf))

    def _wait(self, test: Callable[[], Any], what: str, peer: int) -> None:
        """Wait, and let started messages go on meanwhile."""
        post = self._post
        if post.busy:
            self.lookout.wait(
                lambda: test() or post.push(), what, lambda: [peer], self._timeout_s, self.watched
            )
        else:
            self.lookout.wait(test, what, lambda: [peer], self._timeout_s, self.watched)

    def keep_going(self, work: MessageWork) -> MessageWork:
        """See to it that a message goes on while the caller does something else."""
        self._post.add(work)
        return work

    def settle(self) -> None:
        """Wait for the messages that were started; how they end is told by their works."""
        for work in self._post.of(self):
            try:
                work.await_end()
            except CommError as error:  # no rank is waited for any more
                self._post.drop(self, error)
                return

    def drop(self) -> None:
        """End what is under way: what it needs is given back."""
        why = "the communicator of this message is closed; wait for its messages before"
        self._post.drop(self, CommError(why))

    def run_all(self, messages: Sequence[tuple[bool, Array, int]]) -> None:
        """Start messages, (sends, buffer, peer) each, and wait for all of them."""
        works = [
            self.start_send(buf, peer) if sends else self.start_recv(buf, peer)
            for sends, buf, peer in messages
        ]
        self.wait_for_all(works)

    def wait_for_all(self, works: Sequence[MessageWork]) -> None:
        """Wait for messages that were started together; one of another length is told when the others have ended."""
        for work in works:
            self._post.add(work)
        failed: LowshardError | None = None
        for work in works:
            try:
                work.wait()
            except BufferMismatchError as error:  # the others are on their way and must arrive
                failed = failed or error
        if failed is not None:
            raise failed

    def _finisher(self, what: str, peer: int) -> Callable[[Callable[[], bool], float | None], None]:
        def finish(done: Callable[[], bool], timeout_s: float | None) -> None:
            if timeout_s is None or timeout_s >= self._timeout_s:
                self.lookout.wait(done, what, lambda: [peer], self._timeout_s, self.watched)
                return
            # The caller's own patience: nothing has failed, and the message goes on.
            end_s = time.monotonic() + timeout_s
            while not done():
                if self.lookout.failed():
                    raise self.lookout.failure()
                if time.monotonic() >= end_s:
                    raise TimedOut(f"{what} has not come within {timeout_s:g} s; wait for it again")
                time.sleep(self._post.PAUSE_S)

        return finish
