"""Loopback: a communicator for the threads of one process. No MPI, no GPU.

Ranks post their buffers on a board, wait for each other, copy what is theirs, and wait again so that
no buffer is reused too early. Every wait has a deadline and names who is missing.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from lowshard.argument import brief, whole
from lowshard.comm import check
from lowshard.comm.communicator import Communicator
from lowshard.comm.reach import Published, Reach
from lowshard.comm.transport import Transport
from lowshard.errors import BufferMismatchError, CommError, PeerFailed, TimedOut

Array = Any
T = TypeVar("T")

_MOST_RANKS = 1 << 16
"""Each is a thread of this process."""
_JOIN_S = 0.05
_LOOK_S = 0.25
"""From one look at who is missing to the next."""
_GONE_S = 1.0
"""What a rank has started before its program ended may still be on its way."""
_AFTER_FAILURE_S = 5.0


class Programs:
    """Which ranks of a group, and of those split from it, have ended their program."""

    def __init__(self) -> None:
        self._ended: dict[int, float] = {}
        self._before = set(threading.enumerate())
        self.threads: list[threading.Thread] = []
        """Of the ranks."""

    def end(self, rank: int) -> None:
        """Note that a rank's program has ended well."""
        self._ended[rank] = time.monotonic()

    def forget(self) -> None:
        """Note that all have, and that whoever has kept a communicator may use it."""
        self._ended.clear()

    def check(self, missing: Sequence[int]) -> None:
        """Raise PeerFailed if one of the ranks that others wait for will not come any more.

        It may come as long as another thread lives that was started since: it may be one that the rank has left behind.
        """
        for rank in missing:
            ended_s = self._ended.get(rank)
            if ended_s is None or time.monotonic() - ended_s < _GONE_S:
                continue
            if self._before.union(self.threads).issuperset(threading.enumerate()):
                raise PeerFailed(f"rank {rank} has ended its program without this collective").about([rank])


class Board:
    """What the ranks of one group share."""

    def __init__(
        self, size: int, timeout_s: float, names: Sequence[int], programs: Programs | None = None
    ) -> None:
        self.size, self.timeout_s, self.names = size, timeout_s, list(names)
        self.programs = Programs() if programs is None else programs
        self.slots: list[Any] = [None] * size
        self.word = np.zeros(1, np.int64)
        self.mail: dict[tuple[int, int], queue.Queue[np.ndarray]] = {}
        self.children: weakref.WeakSet[Board] = weakref.WeakSet()
        self.failure: tuple[type[CommError], str, Sequence[int]] | None = None
        self._arrived: set[int] = set()
        self._generation = 0
        self._condition = threading.Condition()

    def wait(self, rank: int) -> None:
        """Return once all ranks have come; raise PeerFailed or TimedOut otherwise."""
        deadline = time.monotonic() + self.timeout_s
        with self._condition:
            self._check()
            generation = self._generation
            self._arrived.add(rank)
            if len(self._arrived) == self.size:
                self._arrived.clear()
                self._generation += 1
                self._condition.notify_all()
                return
            while self._generation == generation:
                self._condition.wait(max(0.0, min(_LOOK_S, deadline - time.monotonic())))
                if self._generation != generation:
                    return
                self._check()
                missing = [self.names[r] for r in range(self.size) if r not in self._arrived]
                self.programs.check(missing)
                if time.monotonic() >= deadline:
                    self.fail(f"ranks {missing} did not come within {self.timeout_s:g} s", TimedOut, missing)
                    self._check()

    def fail(self, text: str, kind: type[CommError] = PeerFailed, about: Sequence[int] = ()) -> None:
        """End every wait of this group and of those split from it."""
        with self._condition:
            if self.failure is None:
                self.failure = (kind, text, about)
            self._condition.notify_all()
        for child in self.children:
            child.fail(text, kind, about)

    def _check(self) -> None:
        if self.failure is not None:
            kind, text, about = self.failure
            raise kind(text).about(about)

    def box(self, src: int, dst: int) -> queue.Queue[np.ndarray]:
        with self._condition:
            return self.mail.setdefault((src, dst), queue.Queue())

    def child(self, members: Sequence[int]) -> Board:
        board = Board(len(members), self.timeout_s, [self.names[m] for m in members], self.programs)
        with self._condition:
            self.children.add(board)
        return board


class LoopbackTransport(Transport):
    """One thread's end of a loopback group."""

    name = "loopback"

    def __init__(self, board: Board, rank: int) -> None:
        super().__init__(rank, board.size, timeout_s=board.timeout_s)
        self._board = board

    def meet(self, mine: Any) -> list[Any]:
        """Post a value and return everybody's; `leave` must follow once they have been read."""
        self._board.slots[self.rank] = mine
        self._board.wait(self.rank)
        return list(self._board.slots)

    def leave(self) -> None:
        self._board.wait(self.rank)
        self._board.slots[self.rank] = None

    def compare(self, signature: int) -> bool:
        same = len(set(self.meet(signature))) == 1
        self.leave()
        return same

    def new_reach(self) -> Reach:
        return _ThreadReach(self)

    def all_gather_v(self, send: Array, recv: Array, counts: Sequence[int], displs: Sequence[int]) -> None:
        own = recv[displs[self.rank] : displs[self.rank] + counts[self.rank]]
        for peer, data in enumerate(self.meet(check.apart(send, recv, own))):
            _copy(data, recv[displs[peer] : displs[peer] + counts[peer]], peer)
        self.leave()

    def all_to_all_v(
        self, send: Array, send_counts: Sequence[int], send_displs: Sequence[int], recv: Array, recv_counts:
        Sequence[int], recv_displs: Sequence[int],
    ) -> None:  # fmt: skip
        posted = self.meet((send, send_counts, send_displs))
        parts = []
        for peer, (data, counts, displs) in enumerate(posted):
            part = data[displs[self.rank] : displs[self.rank] + counts[self.rank]]
            target = recv[recv_displs[peer] : recv_displs[peer] + recv_counts[peer]]
            # In place: what this rank still sends would be overwritten by what it receives.
            parts.append((part, target, peer))
        aliased = np.may_share_memory(send, recv)
        if aliased:
            parts = [(part.copy(), target, peer) for part, target, peer in parts]
            self._board.wait(self.rank)
        for part, target, peer in parts:
            _copy(part, target, peer)
        if not aliased:
            self._board.wait(self.rank)
        self.leave()

    def send(self, buf: Array, dst: int) -> None:
        self._board.box(self.rank, dst).put(buf.copy())

    def recv(self, buf: Array, src: int) -> None:
        deadline = time.monotonic() + self._board.timeout_s
        name = self._board.names[src]
        while True:
            with suppress(queue.Empty):
                data = self._board.box(src, self.rank).get(timeout=0.05)
                break
            self._board._check()
            self._board.programs.check([name])
            if time.monotonic() >= deadline:
                text = f"recv: rank {src} sent nothing within {self._board.timeout_s:g} s"
                raise TimedOut(text).about([name])
        _copy(data, buf, src)

    def barrier(self) -> None:
        self._board.wait(self.rank)

    def way_between(self, one: int, other: int) -> tuple[str, str]:
        return "the memory of one process", "they are threads of it"

    def split(self, color: int | None, key: int) -> LoopbackTransport | None:
        asked = self.meet((color, key))
        members = sorted((k, r) for r, (c, k) in enumerate(asked) if c is not None and c == color)
        ranks = [r for _, r in members]
        self._board.wait(self.rank)
        leader = ranks[0] if ranks else self.rank
        boards = self.meet(self._board.child(ranks) if ranks and leader == self.rank else None)
        board = boards[leader]
        self.leave()
        return None if color is None else LoopbackTransport(board, ranks.index(self.rank))


class _ThreadReach(Reach):
    """Threads see all of the process's memory."""

    def __init__(self, over: LoopbackTransport) -> None:
        super().__init__(over.rank, over.size)
        self.peers, self.homes = tuple(range(over.size)), (0,) * over.size
        self._over, self.word = over, over._board.word

    def maps(self, array: Array) -> bool:
        return True

    def publish(self, arrays: Sequence[Array | None], note: int = 0) -> Published:
        flat = [None if a is None or not a.nbytes else a.reshape(-1).view(np.uint8) for a in arrays]
        posted = self._over.meet((flat, note))
        self._over.leave()
        return _Posted(posted)

    def barrier(self) -> None:
        self._over.barrier()


class _Posted(Published):
    def __init__(self, posted: Sequence[tuple[Sequence[np.ndarray | None], int]]) -> None:
        self._posted = posted
        self.notes = {rank: note for rank, (_, note) in enumerate(posted)}

    def view(self, rank: int, index: int = 0) -> np.ndarray | None:
        return self._posted[rank][0][index]


def loopback(size: int, timeout_s: float = 60.0) -> list[Communicator]:
    """Return `size` communicators of one group, for as many threads of this process.

    Args:
        size: number of ranks.
        timeout_s: seconds after which a wait raises TimedOut and names the missing ranks.

    Raises:
        CommError: no such number of ranks, or of seconds.
    """
    size = whole(
        size, f"a loopback group has at least one rank and at most {_MOST_RANKS}", CommError, 1, _MOST_RANKS
    )
    timeout_s = check.deadline_s(timeout_s)
    board = Board(size, timeout_s, range(size))
    return [Communicator(LoopbackTransport(board, rank)) for rank in range(size)]


def run_loopback(size: int, function: Callable[[Communicator], T], timeout_s: float = 60.0) -> list[T]:
    """Run `function(comm)` in `size` threads and return the results in rank order.

    The first rank that raises ends the others' waits; its error is raised here, with the rank noted. Ctrl-C here ends
    their waits too.

    Args:
        size: number of ranks.
        function: what each rank runs, with its communicator.
        timeout_s: as for `loopback`.

    Raises:
        CommError: as `loopback`, or a function that cannot be called.
    """
    if not callable(function):
        raise CommError(
            f"function is what each rank runs, called with its communicator; got {brief(function)}"
        )
    comms = loopback(size, timeout_s)
    size = len(comms)
    board = comms[0]._transport._board  # type: ignore[attr-defined]
    results: list[Any] = [None] * size
    failures: list[tuple[int, BaseException]] = []

    def work(comm: Communicator) -> None:
        try:
            results[comm.rank] = function(comm)
        except BaseException as error:
            failures.append((comm.rank, error))
            board.fail(f"rank {comm.rank} failed: {type(error).__name__}: {error}", about=[comm.rank])
        else:
            board.programs.end(comm.rank)

    threads = [threading.Thread(target=work, args=(c,), daemon=True, name=f"rank {c.rank}") for c in comms]
    board.programs.threads = threads
    # A rank may compute for as long as it likes. Once one has failed the others' waits end, so they have little left.
    failed_s: float | None = None
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(_JOIN_S)
            if failures and failed_s is None:
                failed_s = time.monotonic()
            if failed_s is not None and time.monotonic() > failed_s + timeout_s + _AFTER_FAILURE_S:
                break
    except BaseException as left:  # Ctrl-C
        board.fail(f"run_loopback was left by {type(left).__name__}")
        raise
    if failures:
        # What a rank raises because another failed is not the cause: prefer the others.
        first = [f for f in failures if not isinstance(f[1], PeerFailed)] or failures
        rank, error = first[0]
        error.add_note(f"raised on loopback rank {rank} of {size}")
        raise error
    board.programs.forget()
    for comm in comms:
        comm._caller.end_threads()
    return results


def _copy(data: np.ndarray, target: np.ndarray, peer: int) -> None:
    if data.dtype != target.dtype or data.size != target.size:
        raise BufferMismatchError(
            f"rank {peer} gave {data.size} elements of {data.dtype}, this rank expects {target.size} of {target.dtype}"
        )
    if data.ctypes.data != target.ctypes.data:
        target[...] = data
