"""Messages between two ranks over MPI: none waits without a deadline, and groups share one MPI communicator.

A group is told apart by its tag, so splitting one costs no MPI communicator, of which there are few thousand. A message
of up to SHORT_BYTES goes whole. Of a longer one a note goes in its place, with its length and the tag of its bytes.
Messages and notes are received into memory of the mailbox, and so in the order in which they were sent, and never past
the end of a buffer: Open MPI writes a message that is longer than expected whole before it says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from ctypes import memmove
from itertools import count
from typing import Any

import numpy as np

from lowshard.comm.call import Call
from lowshard.comm.check import sent_apart, wait_s
from lowshard.comm.transport import Front
from lowshard.comm.wait_guard import Lookout
from lowshard.comm.work import FirstFailure, Work, failed_work
from lowshard.errors import BufferMismatchError, CommError, LowshardError, TimedOut

Array = Any

NOTE_BYTES = 2048
"""Of a note, which no short message has. Below what any MPI sends without asking the receiver."""
SHORT_BYTES = NOTE_BYTES - 8
PIECE_BYTES = 1 << 30
"""Longer messages go in such pieces: MPI before version 4, so Open MPI 5, counts in C ints."""
_LONG_TAGS = 1 << 13
"""Of the bytes of long messages, odd ones below 2^14, taken in turn by each sender; those of groups are even."""
_PAUSE_S, _SPINS = 1e-4, 200
_KEPT = 64
"""Messages that were started and may have ended, from which on those that have are let go of."""


def pieces(buf: Array) -> list[Array]:
    """Return a flat buffer as bytes, in pieces that MPI can count."""
    raw = buf.view(np.uint8)
    return [raw[at : at + PIECE_BYTES] for at in range(0, raw.size, PIECE_BYTES)]


def _raw(buf: Array) -> Array:
    """Return a flat buffer as mpi4py takes it, which does not know the dtypes of ml_dtypes."""
    return buf if buf.dtype.kind in "fiu" else buf.view(np.uint8)


class _Room:
    """Memory for a short message or a note."""

    def __init__(self, byte: Any, status: Any) -> None:
        self.memory, self.status = np.zeros(NOTE_BYTES, np.uint8), status
        self.spec = [self.memory, byte]
        self.address = self.memory.ctypes.data
        self.note = self.memory[:16].view(np.int64)  # of a long message: its bytes, their tag


class Post:
    """What the mailboxes over one MPI communicator share: the tags in use, and the long messages under way.

    A long message that was started goes on whatever the caller does: a thread drives it while it is under way.
    """

    def __init__(self, mpi: Any, mpi_comm: Any) -> None:
        self.next_group = self.inner_groups = 1
        self.groups = int(mpi_comm.Get_attr(mpi.TAG_UB) or 32767) // 2
        self.numbers = count()
        self.rooms: list[_Room] = []
        self.abandoned: list[object] = []
        """What MPI may still read or write, though nobody waits for it any more."""
        self.lock = threading.RLock()
        self._works: list[MessageWork] = []
        self._thread: threading.Thread | None = None

    def add(self, work: MessageWork) -> None:
        """See to it that a long message goes on."""
        with self.lock:
            self._works.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._drive, name="lowshard messages", daemon=True)
                self._thread.start()

    def push(self) -> None:
        """Let the long messages that were started go on."""
        if self._works:
            with self.lock:
                self._works = [work for work in self._works if not work.advance()]

    def _drive(self) -> None:
        while True:
            with self.lock:
                self.push()
                if not self._works:
                    self._thread = None
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

    def __init__(
        self, box: Mailbox, sends: bool, buf: Array, peer: int, requests: list[Any], room: _Room | None = None
    ) -> None:  # fmt: skip
        self._box, self.sends, self._buf, self.peer = box, sends, buf, peer
        self._requests, self._room, self.is_long = requests, room, buf.nbytes > SHORT_BYTES

    def advance(self) -> bool:
        """Let it go on, and say whether it has ended."""
        if self.ended:
            return True
        if not self.is_long:
            return self._advance()
        with self._box.post.lock:
            return self.ended or self._advance()

    def _advance(self) -> bool:
        room, requests = self._room, self._requests
        if room is not None:
            if not requests[0].Test(room.status):
                return False
            requests = self.take(room)
        while requests and requests[-1].Test():
            requests.pop()
        if requests:
            return False
        self.end(self._error)
        return True

    def take(self, room: _Room) -> list[Any]:
        """Take a short message out of its room, or ask for the bytes of a long one: their requests."""
        box, buf, came, tag = self._box, self._buf, room.status.Get_count(self._box.byte), 0
        is_note = came == NOTE_BYTES
        self._room, self._requests = None, []
        if is_note:
            came, tag = room.note.tolist()
        if came != buf.nbytes:
            text = f"recv: rank {self.peer} sent {came} bytes, this rank expects {buf.nbytes}"
            self._error = BufferMismatchError(text)
            buf = np.empty(came, np.uint8)  # what nobody wants must come all the same
        if is_note:
            self._requests = box.receive_pieces(buf, self.peer, tag)
        elif self._error is None:
            memmove(box.address_of(buf), room.address, came)
        box.rooms.append(room)
        return self._requests

    def end(self, error: LowshardError | None) -> None:
        """Note the end; the buffer is free."""
        self.ended, self._error, self._buf, self._room = True, error, None, None
        if error is not None and self.failure is not None:
            self.failure.add(self, error)

    def abandon(self, error: CommError) -> None:
        """End what may never end by itself."""
        with self._box.post.lock:
            if self.ended:
                return
            self._box.post.abandoned.append((self._requests, self._room, self._buf))
            if not self.sends and not self._box.mpi_ended():
                for request in self._requests:
                    request.Cancel()
            self.end(error)

    @property
    def text(self) -> str:
        """What is waited for."""
        return f"{'recv from' if self.sends else 'send to'} rank {self._box.rank}"

    def done(self) -> bool:
        """Say whether it has ended."""
        return self.advance()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end; see `Work.wait`."""
        timeout_s = None if timeout_s is None else wait_s(timeout_s)
        if not self.advance():
            try:
                self._box.await_all([self], timeout_s)
            except CommError:
                self.told = timeout_s is None  # else the message goes on
                raise
        if self._error is not None:
            self.told = True
            raise self._error


_SENT = object.__new__(MessageWork)
"""A message that has gone."""
_SENT.ended = True


class Mailbox:
    """The messages of one group."""

    def __init__(
        self, mpi: Any, mpi_comm: Any, ranks: Sequence[int], rank: int, lookout: Lookout, timeout_s: float,
        group: int = 0, post: Post | None = None, watched: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Make the mailbox of a group over an MPI communicator of our own.

        `ranks` are the group's as those of the communicator, `watched` as those of the side channel (the same by
        default); `rank` is this one in the group, `group` its number, `post` that of the communicator.
        """
        self._mpi, self.mpi_comm, self.ranks, self.rank = mpi, mpi_comm, list(ranks), rank
        self.lookout, self.timeout_s, self.tag = lookout, timeout_s, 2 * group
        self.watched = self.ranks if watched is None else list(watched)
        self.post = Post(mpi, mpi_comm) if post is None else post
        self.byte, self.new_status, self.address_of = mpi.BYTE, mpi.Status, mpi.Get_address
        self.mpi_ended = mpi.Is_finalized
        self.isend, self.irecv, self.rooms = mpi_comm.Isend, mpi_comm.Irecv, self.post.rooms
        self._testall, self._any_status = mpi.Request.Testall, mpi.Status()
        self._started: list[MessageWork] = []
        self._prune_from = _KEPT

    def free(self) -> None:
        """Free the MPI communicator, if no group was ever split from these ranks: it would use it too.

        Collective: all ranks of the MPI communicator call this, unless a failure is known.
        """
        if (
            self.post.next_group == self.post.inner_groups
            and not self.lookout.failed()
            and not self.mpi_ended()
        ):
            self.mpi_comm.Free()

    def reserve(self, number: int, inner: bool = False) -> None:
        """Take all numbers of groups below one; `inner` for those that end with this mailbox."""
        if number > self.post.groups:
            raise CommError(
                f"MPI has tags for {self.post.groups} groups and each split() takes one; split less often"
            )
        self.post.next_group = max(self.post.next_group, number)
        if inner:
            self.post.inner_groups = self.post.next_group

    def part(self, ranks: Sequence[int], rank: int, group: int) -> Mailbox:
        """Return the mailbox of a part of the group, ranks in the part's order."""
        return Mailbox(
            self._mpi, self.mpi_comm, [self.ranks[r] for r in ranks], rank, self.lookout, self.timeout_s, group,
            self.post, [self.watched[r] for r in ranks],
        )  # fmt: skip

    def send_pieces(self, buf: Array, dst: int, tag: int) -> list[Any]:
        """Start to send the bytes of a buffer; their requests."""
        return [self.isend([part, self.byte], self.ranks[dst], tag) for part in pieces(buf)]

    def receive_pieces(self, buf: Array, src: int, tag: int) -> list[Any]:
        """Start to receive them."""
        return [self.irecv([part, self.byte], self.ranks[src], tag) for part in pieces(buf)]

    def _begin(self, sends: bool, buf: Array, peer: int) -> MessageWork:
        mpi_peer, tag, byte = self.ranks[peer], self.tag, self.byte
        if not sends:
            room = self._room()
            return MessageWork(self, sends, buf, peer, [self.irecv(room.spec, mpi_peer, tag)], room)
        if buf.nbytes <= SHORT_BYTES:
            return MessageWork(self, sends, buf, peer, [self.isend([_raw(buf), byte], mpi_peer, tag)])
        note, long_tag = np.zeros(NOTE_BYTES, np.uint8), 2 * (next(self.post.numbers) % _LONG_TAGS) + 1
        note.view(np.int64)[:2] = buf.nbytes, long_tag
        requests = [self.isend([note, byte], mpi_peer, tag), *self.send_pieces(buf, peer, long_tag)]
        return MessageWork(self, sends, buf, peer, requests)

    def _room(self) -> _Room:
        return self.rooms.pop() if self.rooms else _Room(self.byte, self.new_status())

    def run(self, sends: bool, buf: Array, peer: int) -> None:
        """Send or receive, and wait."""
        work = self._begin(sends, buf, peer)
        if not work.advance():
            self.await_all([work])
        if work._error is not None:
            raise work._error

    def start(self, sends: bool, buf: Array, peer: int, failure: FirstFailure) -> Work:
        """Start a message; `failure` keeps its error."""
        if sends and buf.nbytes <= SHORT_BYTES:
            request = self.isend([_raw(buf), self.byte], self.ranks[peer], self.tag)
            if request.Test():
                return _SENT
            work = MessageWork(self, sends, buf, peer, [request])
        else:
            work = self._begin(sends, buf, peer)
        work.failure = failure
        self._started.append(work)
        if len(self._started) > self._prune_from:
            self._started = [one for one in self._started if not one.advance()]
            self._prune_from = 2 * len(self._started) + _KEPT
        if work.is_long:
            self.post.add(work)
        return work

    def run_all(self, batch: Sequence[tuple[Call, Array, int]]) -> None:
        """Start messages, the calls of send and recv with buffer and peer, and wait for all of them.

        One of another length is told of when the others have ended.
        """
        if any(buf.nbytes > SHORT_BYTES for _, buf, _ in batch):
            works = [self._begin(call.name == "send", buf, peer) for call, buf, peer in sent_apart(batch)]
            self.await_all(works)
        else:
            works = self._run_short(batch)
        for work in works:
            if work._error is not None:
                raise work._error

    def _run_short(self, batch: Sequence[tuple[Call, Array, int]]) -> list[MessageWork]:
        """As `run_all`; returns those messages that have not simply come.

        They come out of their rooms when all is sent, so what is sent may be received over.
        """
        isend, irecv, ranks = self.isend, self.irecv, self.ranks
        tag, byte, rooms = self.tag, self.byte, self.rooms
        sent, sent_statuses, coming, statuses, taken = [], [], [], [], []
        for message in batch:
            call, buf, peer = message
            if call.name == "send":
                raw = buf if buf.dtype.kind in "fiu" else buf.view(np.uint8)
                sent.append(isend([raw, byte], ranks[peer], tag))
                sent_statuses.append(self._any_status)
            else:
                room = rooms.pop() if rooms else _Room(byte, self.new_status())
                coming.append(irecv(room.spec, ranks[peer], tag))
                statuses.append(room.status)
                taken.append((buf, room, peer))
        testall, requests, all_statuses = self._testall, sent + coming, sent_statuses + statuses
        for _ in range(_SPINS):
            if testall(requests, all_statuses):
                break
        else:
            sends = [(buf, peer) for call, buf, peer in batch if call.name == "send"]
            works = [MessageWork(self, True, *row, [one]) for row, one in zip(sends, sent, strict=True)]
            self.await_all(works)
            rows = zip(taken, coming, strict=True)
            works = [MessageWork(self, False, buf, peer, [one], room) for (buf, room, peer), one in rows]
            self.await_all(works)
            return works
        works = []
        for buf, room, peer in taken:
            came = room.status.Get_count(byte)
            if came == buf.nbytes:
                memmove(self.address_of(buf), room.address, came)
                rooms.append(room)
            else:
                works.append(MessageWork(self, False, buf, peer, []))
                works[-1].take(room)
        self.await_all(works)
        return works

    def await_all(self, works: Sequence[MessageWork], timeout_s: float | None = None) -> None:
        """Return when all have ended, whatever the end, or raise why they have not.

        `timeout_s` is the caller's own patience: when it is over nothing has failed, and the messages go on.
        """
        pending = [work for work in works if not work.advance()]
        if not pending:
            return
        push = self.post.push

        def ended() -> bool:
            pending[:] = [work for work in pending if not work.advance()]
            push()
            return not pending

        if timeout_s is not None and timeout_s < self.timeout_s:
            self._be_patient(ended, pending[0].text, timeout_s)
            return
        try:
            self.lookout.wait(
                ended,
                pending[0].text,
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
        try:
            self.await_all(works)
        except CommError as error:  # no rank is waited for any more
            for work in works:
                work.abandon(error)

    def drop(self) -> None:
        """End what is under way: what it needs is given back."""
        for work in self._started:
            work.abandon(
                CommError("the communicator of this message is closed; wait for its messages before")
            )
        self._started = []


class ByMailbox:
    """How a transport that has a mailbox moves the messages of its user."""

    mailbox: Mailbox
    closed: bool
    ended: bool

    def send(self, buf: Array, dst: int) -> None:
        """Send a message."""
        self.mailbox.run(True, buf, dst)

    def recv(self, buf: Array, src: int) -> None:
        """Receive a message of this length."""
        self.mailbox.run(False, buf, src)

    def start_message(self, front: Front, name: str, buf: Array, peer: int) -> Work:
        """Start a send or a recv."""
        try:
            _, flat = front.checked_message(name, buf, peer)
        except LowshardError as error:
            return failed_work(name, error, front.failure)
        return self.mailbox.start(name == "send", flat, peer, front.failure)

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
