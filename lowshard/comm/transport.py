"""The floor of every communicator: the primitives that a transport (loopback, mpi, nccl) gives.

Primitives are underscored, take flat, contiguous, already checked arrays, and count nothing; the public
calls over them are in `lowshard.comm.protocol`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from types import ModuleType
from typing import Any, NoReturn, Self, cast

import numpy as np

from lowshard.bounded import BoundedCache
from lowshard.comm import check
from lowshard.comm.activity import Activity
from lowshard.comm.call import Call, Check
from lowshard.comm.reach import Reach
from lowshard.comm.reduction import fold
from lowshard.errors import BufferMismatchError, CommError
from lowshard.settings import CHECK, TIMEOUT_S

Array = Any  # a NumPy or CuPy array; CuPy ships no types

_USES_KEPT = 200
CALLS_BYTES = 4 << 20
"""What a communicator keeps of calls that were made before, at most."""
_PLANS_KEPT = 1024
_CALL_BYTES = 2048
"""Of one call, beside some numbers for every rank."""


class Traffic:
    """What this rank has called and moved since the communicator was made or `clear` was called.

    Moves count the elements that others were given. Reductions count what a reduce-scatter and an
    all-gather need; the transport's own algorithm may send more or less.
    """

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._sent_bytes = self._received_bytes = self._reached_bytes = 0
        self._uses: list[Call] = []
        self.sources: list[Callable[[], Iterable[tuple[Call, int]]]] = []
        """Each returns calls that were not counted here, and how often each was made since it was asked."""

    def count(self, call: Call) -> None:
        """Count one call; it is added up when somebody asks."""
        if call.uses == 0:
            if len(self._uses) >= _USES_KEPT:  # of calls that are made once, such as splits
                self._add_up()
            self._uses.append(call)
        call.uses += 1

    def add(self, name: str, sent_bytes: int, received_bytes: int, reached_bytes: int = 0) -> None:
        """Count one call by its numbers."""
        self._calls[name] += 1
        self._reached_bytes += reached_bytes
        self._sent_bytes += sent_bytes
        self._received_bytes += received_bytes

    @property
    def calls(self) -> Counter[str]:
        """Calls by collective name."""
        self._add_up()
        return self._calls

    @property
    def sent_bytes(self) -> int:
        """Bytes of this rank's elements that other ranks were given (once for each of them)."""
        self._add_up()
        return self._sent_bytes

    @property
    def received_bytes(self) -> int:
        """Bytes of other ranks' elements that this rank was given."""
        self._add_up()
        return self._received_bytes

    @property
    def reached_bytes(self) -> int:
        """Of `received_bytes`, those of boxes (`execute`, reshards, loads) that came by memory, not by messages."""
        self._add_up()
        return self._reached_bytes

    def clear(self) -> None:
        """Start from zero."""
        self._add_up()
        self._calls.clear()
        self._sent_bytes = self._received_bytes = self._reached_bytes = 0

    def _add_up(self) -> None:
        used, self._uses = [(call, call.uses) for call in self._uses], []
        for call, _ in used:
            call.uses = 0
        for call, times in chain(used, *(source() for source in self.sources)):
            self._calls[call.name] += times
            self._sent_bytes += times * call.sent_bytes
            self._received_bytes += times * call.received_bytes
            self._reached_bytes += times * call.reached_bytes


class _EndOfTurn(AbstractContextManager[None]):
    """Gives a turn back at the end of a block."""

    def __init__(self, turn: Any) -> None:
        self._turn = turn

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        self._turn.release()


class Transport(ABC):
    """What a transport gives, and what every communicator has: rank, size, counters, an end."""

    rank: int
    """This rank within the communicator."""
    size: int
    """Number of ranks."""
    traffic: Traffic
    timeout_s: float
    """Seconds after which a wait for other ranks raises TimedOut."""

    def __init__(
        self, rank: int, size: int, *, group: str = "0", timeout_s: float | None = None,
        activity: Activity | None = None,
    ) -> None:  # fmt: skip
        """Make the part that all transports share.

        Args:
            rank: this rank.
            size: number of ranks.
            group: names the group among all that its ranks are in; equal on all of them.
            timeout_s: deadline of each wait; by default the environment's.
            activity: what this process is in; a communicator split from another shares its.
        """
        self.rank, self.size = rank, size
        self.traffic = Traffic()
        self.timeout_s = TIMEOUT_S.seconds() if timeout_s is None else timeout_s
        self._group_name = group
        self._check = cast("Check", CHECK.choice())
        self._activity = Activity() if activity is None else activity
        self._sequence = 0
        # A call holds some numbers for every rank, of which closures have a part that is not seen by weighing.
        self._calls = BoundedCache[Any, Call](None, CALLS_BYTES, lambda key, call: _CALL_BYTES + 64 * size)
        # One thread at a time: threads that call at once would do so in another order on each rank.
        self._turn = threading.RLock()
        self._end_of_turn = _EndOfTurn(self._turn)
        self._agreed_plans: set[str] = set()
        self._reach: Reach | None = None
        self._closed = False
        self._failed = False  # a peer may be gone: wait for no one any more

    # ---- what a transport gives

    @property
    @abstractmethod
    def transport(self) -> str:
        """The transport's name: loopback, mpi or nccl."""

    @property
    def xp(self) -> ModuleType:
        """The array module of the buffers: numpy or cupy."""
        return np

    @abstractmethod
    def _all_gather_v(
        self, send: Array, recv: Array, counts: Sequence[int], displs: Sequence[int]
    ) -> None: ...

    @abstractmethod
    def _all_to_all_v(
        self,
        send: Array,
        send_counts: Sequence[int],
        send_displs: Sequence[int],
        recv: Array,
        recv_counts: Sequence[int],
        recv_displs: Sequence[int],
    ) -> None: ...

    @abstractmethod
    def _broadcast(self, buf: Array, root: int) -> None: ...

    @abstractmethod
    def _gather(self, send: Array, recv: Array | None, root: int) -> None: ...

    @abstractmethod
    def _scatter(self, send: Array | None, recv: Array, root: int) -> None: ...

    @abstractmethod
    def _send(self, buf: Array, dst: int) -> None: ...

    @abstractmethod
    def _recv(self, buf: Array, src: int) -> None: ...

    @abstractmethod
    def _barrier(self) -> None: ...

    @abstractmethod
    def _split(
        self, color: int | None, key: int
    ) -> Any: ...  # the group's communicator; None without a colour

    @abstractmethod
    def _close(self) -> None: ...

    def _native_all_reduce(self, send: Array, recv: Array, op: str) -> bool:
        """Reduce with the transport's own call if it takes dtype and op; return whether it did."""
        return False

    def _native_reduce_scatter(self, send: Array, recv: Array, op: str) -> bool:
        """As `_native_all_reduce`, for reduce_scatter."""
        return False

    @property
    def _compares(self) -> bool:
        """Whether ranks can compare numbers at once; else `_compare` says yes to everything."""
        return True

    @abstractmethod
    def _compare(self, signature: int) -> bool:
        """Return, on all ranks alike, whether all ranks gave the same signature."""

    def _to_host(self, array: Array) -> np.ndarray:
        """Return an array that ranks have exchanged facts in, where this process can read it."""
        return array if isinstance(array, np.ndarray) else array.get()

    def _agrees_without_waiting(self, signature: int, text: str) -> bool:
        """Say whether ranks need not meet to agree on a plan; see `lowshard.comm.agreement.agree_on_plan`."""
        return text in self._agreed_plans

    def _has_agreed(self, text: str) -> None:
        """Remember, where there is nothing but the GPU to compare over, that all ranks have agreed on a plan."""
        if not self._compares:
            if len(self._agreed_plans) >= _PLANS_KEPT:
                self._agreed_plans.clear()
            self._agreed_plans.add(text)

    # ---- memory of other ranks

    @property
    def node_size(self) -> int | None:
        """Ranks a node, where rank r is on node r // node_size; None where there is one node, or no such number."""
        return None

    @property
    def reach(self) -> Reach:
        """What this rank reaches of other ranks' memory."""
        if self._reach is None:
            self._reach = self._new_reach()
        return self._reach

    def _new_reach(self) -> Reach:
        return Reach(self.rank, self.size)

    def fold(self, terms: Sequence[Array], out: Array, op: str, divisor: int = 1) -> None:
        """Write the reduction of arrays of any strides into `out`, in tree order; a step of this rank alone."""
        fold(terms, out, op, "tree", divisor)

    # ---- life

    def close(self) -> None:
        """Give the transport's resources back. Closing twice is safe.

        Collective: all ranks of the communicator call this. Where a `with` block ends by an exception the
        ranks may not all get here, so what would wait for them is left to the end of the process.

        Raises:
            CommError: another thread is in a call of this communicator.
        """
        if self._closed:
            return
        if not self._turn.acquire(blocking=False):
            if not self._failed:
                self._not_its_turn("close")
            self._closed = True  # the call that is going on reads what would be given back
            return
        try:
            self._closed = True
            self._close()
        finally:
            self._turn.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._failed = self._failed or exc[0] is not None
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<{self.transport} communicator: rank {self.rank} of {self.size}{state}>"

    # ---- checks

    def turn(self, what: str) -> AbstractContextManager[None]:
        """Take the turn of this thread for a `with` block, a call of several steps: no other thread calls meanwhile.

        Raises:
            CommError: another thread is in a call of this communicator.
        """
        self._enter(what)
        return self._end_of_turn

    def _enter(self, what: str) -> None:
        """Begin a call of this thread; `_turn.release` ends it.

        Raises:
            CommError: another thread is in a call of this communicator.
        """
        if not self._turn.acquire(blocking=False):
            self._not_its_turn(what)

    def _not_its_turn(self, what: str) -> NoReturn:
        raise CommError(
            f"one thread at a time calls a communicator, but thread {threading.current_thread().name!r} of rank "
            f"{self.rank} called {what} while another was in a call; split() the communicator, once for each thread"
        )

    def _open(self) -> None:
        if self._closed:
            raise CommError(f"this {self.transport} communicator is closed; make a new one")

    def _flat(self, buf: Array, name: str, writes: bool = False) -> Array:
        self._open()
        return check.flat(buf, name, self.xp, self.transport, writes)

    def _root(self, root: int) -> None:
        if type(root) is not int or not 0 <= root < self.size:
            raise CommError(f"root is a rank of the communicator, 0 to {self.size - 1}, got {root}")

    def _peer(self, peer: int, name: str) -> None:
        if type(peer) is not int or not 0 <= peer < self.size or peer == self.rank:
            raise CommError(
                f"{name} is another rank of the communicator, 0 to {self.size - 1} but not {self.rank}, "
                f"got {peer}"
            )

    def _root_buffer(self, buf: Array | None, name: str, root: int, like: Array, elems: int) -> Array | None:
        if self.rank != root:
            return None
        if buf is None:
            raise BufferMismatchError(f"root (rank {root}) passes {name}, got None")
        flat = self._flat(buf, name, writes=name == "recv")
        check.same_dtype(like, flat)
        check.need(flat.size == elems, name, f"root's {name} holds {elems} elements", elems, flat.size)
        return flat
