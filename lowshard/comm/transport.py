"""What a transport is: primitives that move flat arrays between ranks, and what it declares that it can do beside.

A transport is one class that derives from `Transport` alone, in a module of its own. A `Communicator` holds it: that
checks arguments, counts and records; it asks the transport and never the other way round. Primitives take flat,
contiguous, already checked arrays, and count nothing. What a transport declares:

- `buffers`: where arrays lie, in host memory or on a GPU;
- `plans`: collectives of the table that it has a plan of its own for; of the others the table has one;
- `reach`: the memory of other ranks;
- `launch`: what is around every call, on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Protocol, cast

import numpy as np

from lowshard.comm import call_comparison
from lowshard.comm.call import Activity, Call, Check
from lowshard.comm.check import HostBuffers
from lowshard.comm.reach import Reach
from lowshard.comm.reduction import fold
from lowshard.comm.work import FirstFailure, Work
from lowshard.errors import CommError, LowshardError
from lowshard.settings import CHECK, TIMEOUT_S

Array = Any  # a NumPy or CuPy array; CuPy ships no types
Run = Callable[..., Any]
"""Does a planned call, from its `send` and `recv`."""
Planner = Callable[..., Run | None]
"""Returns the run of a call, from the transport, the call, dtype and elements and what the call asks for beside; None
where the table's own plan serves."""


class Front(Protocol):
    """What a transport asks of the communicator that holds it, when calls are started.

    Attributes:
        failure: keeps what has failed and was not waited for, for `close` to raise.
    """

    failure: FirstFailure

    def in_thread(self, name: str, call: Callable[[], Any]) -> Work:
        """Give a call to the communicator's thread, after those that were given before."""

    def in_line(self, name: str, peer: int, call: Callable[[], Any]) -> Work:
        """Give a message to the thread of the messages to or from one peer."""

    def message(self, name: str, buf: Array, peer: int) -> None:
        """Make a call of `send` or `recv`."""

    def checked_message(self, name: str, buf: Array, peer: int) -> tuple[Call, Array, int]:
        """Check a message, count it, and return the call with its flat buffer and the peer."""

    def settle(self, name: str, peer: int) -> None:
        """Wait for what was started before a message, where threads run it."""


class Transport(ABC):
    """What moves bytes between the ranks of a communicator.

    Attributes:
        rank: this rank.
        size: number of ranks.
        group: names the group among all that its ranks are in; equal on all of them.
        timeout_s: seconds after which a wait for other ranks raises TimedOut.
        activity: what this process is in.
        check: how ranks compare what they ask for.
        sequence: number of the latest call.
        closed: whether it takes no more calls.
        ended: whether its resources were given back; what goes on while it is closed has them still.
        failed: a peer may be gone: wait for no one any more.
        why: why it was chosen, where there was a choice.
    """

    name: ClassVar[str]
    """What `Communicator.transport` says."""
    plans: ClassVar[Mapping[str, Planner]] = {}
    """By collective, its own plan."""
    launch: Callable[..., None] | None = None
    """Runs a step of a call, from the call, the step and its arguments, on a device; None where there is none."""
    compares: bool = True
    """Whether ranks can compare numbers at once; else `compare` says yes to everything."""
    host: Transport | None = None
    """What moves host memory between the same ranks, beside a transport of GPU arrays."""

    def __init__(
        self, rank: int, size: int, *, group: str = "0", timeout_s: float | None = None,
        activity: Activity | None = None, buffers: HostBuffers | None = None,
    ) -> None:  # fmt: skip
        """Make the part that all transports share.

        Args:
            rank: this rank.
            size: number of ranks.
            group: names the group.
            timeout_s: deadline of each wait; by default the environment's.
            activity: what this process is in; a group split from another shares its.
            buffers: where arrays lie; by default in host memory.
        """
        self.rank, self.size, self.group = rank, size, group
        self.timeout_s = TIMEOUT_S.seconds() if timeout_s is None else timeout_s
        self.check = cast("Check", CHECK.choice())
        self.activity = Activity() if activity is None else activity
        self.buffers = HostBuffers(self.name) if buffers is None else buffers
        self.sequence = 0
        self.closed = self.ended = self.failed = False
        self.why = ""
        self._reach: Reach | None = None

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise CommError(
            "a communicator, and what holds one, belongs to the process that made it and cannot be pickled or copied; "
            "make one in each process, and send plans, layouts and arrays, which can"
        )

    # ---- primitives

    @abstractmethod
    def all_gather_v(self, send: Array, recv: Array, counts: Sequence[int], displs: Sequence[int]) -> None:
        """Put every rank's part into `recv`."""

    @abstractmethod
    def all_to_all_v(
        self, send: Array, send_counts: Sequence[int], send_displs: Sequence[int], recv: Array,
        recv_counts: Sequence[int], recv_displs: Sequence[int],
    ) -> None:  # fmt: skip
        """Send a part to each rank and receive one from each; parts of one rank to itself too."""

    @abstractmethod
    def send(self, buf: Array, dst: int) -> None:
        """Send a message."""

    @abstractmethod
    def recv(self, buf: Array, src: int) -> None:
        """Receive a message of this length."""

    @abstractmethod
    def compare(self, signature: int) -> bool:
        """Return, on all ranks alike, whether all ranks gave the same signature."""

    @abstractmethod
    def split(self, color: int | None, key: int) -> Transport | None:
        """Return the transport of the ranks of one colour, by key, then rank; None without a colour."""

    def barrier(self) -> None:
        """Return once all ranks have come; by default, by comparing."""
        self.compare(call_comparison.STEP_SIGNATURE)

    def broadcast(self, buf: Array, root: int) -> None:
        """Copy root's buffer to all ranks; by default, as an exchange."""
        zero = [0] * self.size
        if self.rank == root:  # its buffer may be read-only
            others = [0 if i == root else buf.size for i in range(self.size)]
            self.all_to_all_v(buf, others, zero, self._none_of(buf), zero, zero)
        else:
            mine = [buf.size if i == root else 0 for i in range(self.size)]
            self.all_to_all_v(self._none_of(buf), zero, zero, buf, mine, zero)

    def gather(self, send: Array, recv: Array | None, root: int) -> None:
        """Put every rank's part into root's `recv`; by default, as an exchange."""
        counts, displs, zero = self._rows(send.size, root)
        if recv is None:
            self.all_to_all_v(send, counts, zero, self._none_of(send), zero, zero)
        else:
            self.all_to_all_v(send, counts, zero, recv, [send.size] * self.size, displs)

    def scatter(self, send: Array | None, recv: Array, root: int) -> None:
        """Give every rank its part of root's `send`; by default, as an exchange."""
        counts, displs, zero = self._rows(recv.size, root)
        if send is None:
            self.all_to_all_v(self._none_of(recv), zero, zero, recv, counts, zero)
        else:
            self.all_to_all_v(send, [recv.size] * self.size, displs, recv, counts, zero)

    def _none_of(self, buf: Array) -> Array:
        return self.buffers.xp.empty(0, buf.dtype)

    def _rows(self, elems: int, root: int) -> tuple[list[int], list[int], list[int]]:
        """Return counts to or from root alone, where each rank's part begins in root's array, and zeros."""
        ranks = range(self.size)
        return [elems if i == root else 0 for i in ranks], [elems * i for i in ranks], [0] * self.size

    def close(self) -> None:
        """Give the resources back, once."""
        if not self.closed:
            self.closed = self.ended = True
            self.end()

    def end(self) -> None:  # noqa: B027  # many have none
        """Give the resources back."""

    def end_with_mpi(self) -> bool:
        """Take no more calls if they go over MPI, which is being finalized; return whether they do."""
        return False

    # ---- what it may declare beside

    def way_between(self, one: int, other: int) -> tuple[str, str]:
        """Return how two ranks reach each other, and why so: what follows "since"."""
        return self.name, self.why or "that is what this communicator was made of"

    def native_all_reduce(self, send: Array, recv: Array, op: str) -> bool:
        """Reduce with the transport's own call if it takes dtype and op; return whether it did."""
        return False

    def native_reduce_scatter(self, send: Array, recv: Array, op: str) -> bool:
        """As `native_all_reduce`, for reduce_scatter."""
        return False

    def terms(self, send: Array, counts: Sequence[int], displs: Sequence[int]) -> list[Array]:
        """Return every rank's operand for this rank's part, in rank order: an exact exchange."""
        n, size = counts[self.rank], self.size
        found = self.buffers.xp.empty((size, n), send.dtype)
        self.all_to_all_v(send, counts, displs, found.reshape(-1), [n] * size, [n * i for i in range(size)])
        return list(found)

    def empty(self, shape: int | Sequence[int], dtype: Any) -> Array:
        """Return an array, not filled, where others read it most easily."""
        return self.buffers.empty(shape, dtype)

    def fold(self, terms: Sequence[Array], out: Array, op: str, divisor: int = 1) -> None:
        """Write the reduction of arrays of any strides into `out`, in tree order; a step of this rank alone."""
        fold(terms, out, op, "tree", divisor)

    @property
    def node_size(self) -> int | None:
        """Ranks a node, where rank r is on node r // node_size; None where there is one node, or no such number."""
        return None

    @property
    def reach(self) -> Reach:
        """What this rank reaches of other ranks' memory."""
        if self._reach is None:
            self._reach = self.new_reach()
        return self._reach

    def new_reach(self) -> Reach:
        """Return what this rank reaches; by default its own memory."""
        return Reach(self.rank, self.size)

    # ---- checks between ranks; `lowshard.comm.call_comparison` has what is done by default

    def verify(self, call: Call) -> None:
        """Return if all ranks make this call; else raise one error on all of them."""
        if self.check == "off" or self.size == 1:
            return
        if self.check == "full":
            call_comparison.compare_texts(self, call.text)
        elif not self.compare(call.signature):
            call_comparison.differ(self, call.text)

    def gather_facts(self, record: np.ndarray) -> np.ndarray:
        """Return every rank's record of one length `[size, n]`, moved by the primitives: no traffic of the user's."""
        xp, n, size = self.buffers.xp, record.size, self.size
        recv = xp.empty((size, n), record.dtype)
        self.all_gather_v(xp.asarray(record), recv.reshape(-1), [n] * size, [n * i for i in range(size)])
        return self.to_host(recv)

    def to_host(self, array: Array) -> np.ndarray:
        """Return an array that ranks have exchanged facts in, where this process can read it."""
        return self.buffers.to_host(array)

    def lend_name(self) -> None:
        """Let errors of `host` number a call as this transport does; its groups, too."""
        if self.host is not None:
            self.host.sequence = self.sequence

    # ---- calls that are not waited for, and messages that go together

    def start(self, front: Front, name: str, call: Callable[[], Any]) -> Work:
        """Start a call; by default the communicator's thread makes it."""
        return front.in_thread(name, call)

    def start_message(self, front: Front, name: str, buf: Array, peer: int) -> Work:
        """Start a send or a recv; by default a thread makes it: it waits for one rank only."""
        return front.in_line(name, peer, lambda: front.message(name, buf, peer))

    def settle(self) -> None:  # noqa: B027  # most have the communicator's threads wait for them
        """Wait for the messages that were started, where no thread of the communicator does."""

    def come_after(self) -> None:  # noqa: B027  # without a device nothing is left to do when a thread is done
        """Have the device do what follows after what the communicator's thread has given it."""

    def run_batch(self, front: Front, batch: Sequence[tuple[Call, Array, int]]) -> None:
        """Run sends and recvs together; by default sends never wait, so they go first."""
        for call, _, peer in batch:
            front.settle(call.name, peer)
        failed: LowshardError | None = None
        for call, buf, peer in sorted(batch, key=lambda item: item[0].name != "send"):
            try:
                (self.send if call.name == "send" else self.recv)(buf, peer)
            except LowshardError as error:  # the others are on their way and must arrive
                failed = failed or error
        if failed is not None:
            raise failed
