"""The communicator: collectives over raw buffers, the same on every transport.

Everything users see lives here once: arguments are checked, calls counted, numbered and recorded. What a collective is
stands in `lowshard.comm.collectives`; how bytes move is the transport's (`lowshard.comm.transport`), which this holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial, wraps
from inspect import signature
from itertools import chain, combinations
from types import ModuleType
from typing import Any, Concatenate, ParamSpec, Self
from weakref import WeakSet

from lowshard.argument import whole
from lowshard.comm import check
from lowshard.comm import collectives as table
from lowshard.comm.background import Background
from lowshard.comm.call import Call
from lowshard.comm.caller import Caller
from lowshard.comm.check import NOTHING_WRONG
from lowshard.comm.collectives import Collective
from lowshard.comm.reach import Reach
from lowshard.comm.transport import Transport
from lowshard.comm.work import Op, Order, Stream, Work, failed_work
from lowshard.errors import CommError, LowshardError
from lowshard.foreign_array import view_or_same

Array = Any  # a NumPy or CuPy array; CuPy ships no types
P = ParamSpec("P")

_MOST = (1 << 31) - 1
"""Of a colour and a key: MPI takes C ints."""
_PAIRS_SHOWN = 12
"""Of one way, by `explain`."""


class Communicator:
    """Collectives over the buffers of a group of ranks.

    Buffers are C-contiguous arrays with a dtype of the table, of `xp` or of any library whose arrays have DLPack,
    `__cuda_array_interface__` or the buffer protocol (torch, JAX). Their own memory is read and written, never a copy.
    Read-only ones (JAX's) are sources only. Counts are in elements. Every method but the attributes and `empty` is
    collective: all ranks of the communicator call it, in one order (`send` and `recv`: the two ranks concerned).
    Results are written into the buffers given.

    One thread at a time calls a communicator, since the calls of several threads have no order that all ranks share. A
    call made while another thread is in one raises CommError. `split` makes a communicator for each thread.

    Wrong arguments raise at once, on the rank that has them; the others hear of it when that rank ends, or at their
    deadline. Ranks compare what they ask for before anything moves (`LOWSHARD_CHECK`: hash, the default, full or off),
    so that all of them raise one MismatchError where they ask for different things. A wait that ends without the others
    raises PeerFailed or TimedOut. On NCCL `hash` compares when a wait has failed, so that no call waits for another
    host: `lowshard.comm.nccl` says what that means.

    A call raises BufferMismatchError (shape, counts, device or memory order do not fit, a buffer is read-only or no
    array), DTypeError (a dtype outside the table, an op that makes no sense for it), CommError (no such root, peer, op
    or order; the communicator is closed), MismatchError, PeerFailed or TimedOut.

    On GPUs `stream` says where a call is put: a stream of CuPy or torch, an object with `__cuda_stream__`, or the
    address of a cudaStream_t; by default CuPy's current stream of the buffers' device. A stream of another device is a
    StreamError. On CPUs any stream is a CommError.
    """

    def __init__(self, transport: Transport, control: Communicator | None = None) -> None:
        """Hold a transport, which `close` closes.

        Args:
            transport: moves bytes between the ranks.
            control: the communicator over `transport.host`, where there is one already.
        """
        self._transport, self._control = transport, control
        self.rank, self.size = transport.rank, transport.size
        """This rank within the communicator, and the number of ranks."""
        self.xp: ModuleType = transport.buffers.xp
        """The array module of the buffers: numpy or cupy."""
        self._caller = Caller(transport)
        self.traffic = self._caller.traffic
        self._backgrounds: WeakSet[Background] = WeakSet()
        self._beside: Background | None = None

    @property
    def transport(self) -> str:
        """The transport's name: loopback, mpi, nccl or staged."""
        return self._transport.name

    @property
    def timeout_s(self) -> float:
        """Seconds after which a wait for other ranks raises TimedOut."""
        return self._transport.timeout_s

    @property
    def control(self) -> Communicator:
        """A communicator over host memory for checks and small facts; itself on a CPU."""
        if self._transport.host is None:
            return self
        if self._control is None:
            self._control = Communicator(self._transport.host)
        return self._control

    @property
    def node_size(self) -> int | None:
        """Ranks a node, where rank r is on node r // node_size; None where there is one node, or no such number."""
        return self._transport.node_size

    @cached_property
    def reach(self) -> Reach:
        """Which ranks' memory this rank reads and writes directly."""
        return self._transport.reach

    def explain(self) -> str:
        """Return how each pair of ranks is reached and why, as text. Not collective."""
        t = self._transport
        by_way: dict[tuple[str, str], list[str]] = {}
        for one, other in combinations(range(self.size), 2):
            by_way.setdefault(t.way_between(one, other), []).append(f"{one}-{other}")
        lines = [f"{self.size} rank{'s' * (self.size != 1)}, transport {t.name}"]
        for (way, why), pairs in by_way.items():
            more = f" and {len(pairs) - _PAIRS_SHOWN} more pairs" * (len(pairs) > _PAIRS_SHOWN)
            lines.append(f"  ranks {', '.join(pairs[:_PAIRS_SHOWN])}{more}: {way}, since {why}")
        return "\n".join(lines)

    @cached_property
    def start(self) -> Starter:
        """The same calls but `split` and `send_recv`, not waited for: each method returns a `Work`.

        The buffers belong to the call until the work is done. Calls run in the order they are started in. One thread
        at a time starts and awaits messages.
        """
        return Starter(self)

    @property
    def beside(self) -> Background:
        """What runs saves in the background, one at a time.

        Collective: all ranks of the communicator read it the first time, when it is made.
        """
        if self._beside is None:
            self._beside = Background(self, "lowshard save")
        return self._beside

    def settle_beside(self) -> Exception | None:
        """Wait for what was started on `beside`; return its error if no call has raised it yet.

        Not collective.
        """
        return None if self._beside is None else self._beside.settle()

    def fold(self, terms: Sequence[Array], out: Array, op: str, divisor: int = 1) -> None:
        """Write the reduction of arrays of any strides into `out`, in tree order; a step of this rank alone."""
        self._transport.fold(terms, out, op, divisor)

    def meeting(self, what: str, stream: Stream = None) -> AbstractContextManager[LowshardError | None]:
        """Make device and stream current for a block: a call of several steps, in which the hosts of all ranks meet.

        The block gets what is wrong with the stream, for the caller to let all ranks raise. No CUDA graph records it.
        """
        if stream is None and self._transport.launch is None:  # there is no device
            return NOTHING_WRONG
        return self._transport.buffers.meeting(what, stream, self._caller.in_group())

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Array:
        """Return an array, not filled, in memory that the other ranks of the node can read where it lies.

        Nothing is staged for such arrays; any other array works too. On a GPU fp8 and e8m0 are uint8. Not collective.

        Raises:
            DTypeError: a dtype outside the table.
            BufferMismatchError: an invalid shape.
        """
        return self._transport.empty(shape, dtype)

    # ---- moves; what they raise stands at the class

    def all_gather(self, send: Array, recv: Array, *, stream: Stream = None) -> None:
        """Put every rank's `send` into `recv` on all ranks, in rank order.

        Collective: all ranks of the communicator call this. recv holds size x send elements. In
        place: pass this rank's own part of recv as send.

        Args:
            send: this rank's part.
            recv: where the whole goes.
        """
        self._caller.call(table.ALL_GATHER, (), send, recv, stream)

    def all_gather_v(
        self, send: Array, recv: Array, recv_counts: Sequence[int], recv_displs: Sequence[int],
        *, stream: Stream = None,
    ) -> None:  # fmt: skip
        """Put every rank's `send`, of its own length, into `recv` on all ranks.

        Collective: all ranks of the communicator call this. `recv_counts[i]` elements of rank i land
        at `recv_displs[i]`. In place: pass this rank's own part of recv as send.
        """
        self._caller.call(table.ALL_GATHER_V, _hashable(recv_counts, recv_displs), send, recv, stream)

    def all_to_all(self, send: Array, recv: Array, *, stream: Stream = None) -> None:
        """Send part j of `send` to rank j, and put what rank i sent into part i of `recv`.

        Collective: all ranks of the communicator call this. Both hold the same number of elements, a
        multiple of size.
        """
        self._caller.call(table.ALL_TO_ALL, (), send, recv, stream)

    def all_to_all_v(
        self, send: Array, send_counts: Sequence[int], send_displs: Sequence[int], recv: Array,
        recv_counts: Sequence[int], recv_displs: Sequence[int],
        *, stream: Stream = None,
    ) -> None:  # fmt: skip
        """Send `send_counts[j]` elements at `send_displs[j]` to rank j, and receive likewise.

        Collective: all ranks of the communicator call this. Counts may be 0 and differ; send parts
        may overlap, receive parts must not.
        """
        spans = _hashable(send_counts, send_displs, recv_counts, recv_displs)
        self._caller.call(table.ALL_TO_ALL_V, spans, send, recv, stream)

    def broadcast(self, buf: Array, root: int = 0, *, stream: Stream = None) -> None:
        """Copy root's `buf` into every rank's `buf`.

        Collective: all ranks of the communicator call this.

        Args:
            buf: the array.
            root: whose array.
        """
        if type(root) is not int:
            root = check.rank(root)
        send, recv = (buf, None) if self.rank == root else (None, buf)
        self._caller.call(table.BROADCAST, (root,), send, recv, stream)

    def gather(self, send: Array, recv: Array | None, root: int = 0, *, stream: Stream = None) -> None:
        """Put every rank's `send` into root's `recv`, in rank order; others pass recv=None.

        Collective: all ranks of the communicator call this.
        """
        if type(root) is not int:
            root = check.rank(root)
        self._caller.call(table.GATHER, (root,), send, recv if self.rank == root else None, stream)

    def scatter(self, send: Array | None, recv: Array, root: int = 0, *, stream: Stream = None) -> None:
        """Put part i of root's `send` into rank i's `recv`; others pass send=None.

        Collective: all ranks of the communicator call this.
        """
        if type(root) is not int:
            root = check.rank(root)
        self._caller.call(table.SCATTER, (root,), send if self.rank == root else None, recv, stream)

    def barrier(self) -> None:
        """Return once every rank has called it.

        Collective: all ranks of the communicator call this.
        """
        self._caller.call(table.BARRIER, (), None, None)

    # ---- reductions

    def all_reduce(
        self, send: Array, recv: Array, op: Op = "sum", order: Order = "fast", *, stream: Stream = None
    ) -> None:
        """Reduce every rank's `send` elementwise and put the result into every rank's `recv`.

        Collective: all ranks of the communicator call this. In place: pass one array as both.
        bf16, fp16 and fp8 accumulate in float32 and are rounded once.

        Args:
            send: this rank's operand.
            recv: the result, as many elements as send.
            op: sum, avg (integers: floor), min, max or prod; also mpi4py's SUM, MIN, MAX and PROD.
            order: "tree" (balanced binary tree over ranks) and "rank" (one after the other) give the
                same bits on every transport; "fast" is the transport's own, and NCCL and MPI promise no bits: NCCL's
                avg scales each operand before it adds them, and with LOWSHARD_NCCL_REDUCE16=nccl it reduces bf16 and
                fp16 too, in a precision of its choice.
        """
        if (type(op), type(order)) != check.NAMES:
            op, order = check.names(op, order)  # type: ignore[assignment]  # checked where a call is made
        self._caller.call(table.ALL_REDUCE, (op, order), send, recv, stream)

    def reduce_scatter(
        self, send: Array, recv: Array, op: Op = "sum", order: Order = "fast", *, stream: Stream = None
    ) -> None:
        """Reduce every rank's `send` elementwise and put part i of the result into rank i's `recv`.

        Collective: all ranks of the communicator call this. send holds size x recv elements. op and
        order: as for all_reduce.
        """
        if (type(op), type(order)) != check.NAMES:
            op, order = check.names(op, order)  # type: ignore[assignment]  # checked where a call is made
        self._caller.call(table.REDUCE_SCATTER, (op, order), send, recv, stream)

    def reduce(
        self, send: Array, recv: Array | None, op: Op = "sum", root: int = 0, order: Order = "fast",
        *, stream: Stream = None,
    ) -> None:  # fmt: skip
        """Reduce every rank's `send` elementwise into root's `recv`; others pass recv=None.

        Collective: all ranks of the communicator call this. op and order: as for all_reduce.
        """
        if type(root) is not int:
            root = check.rank(root)
        if (type(op), type(order)) != check.NAMES:
            op, order = check.names(op, order)  # type: ignore[assignment]  # checked where a call is made
        self._caller.call(table.REDUCE, (op, root, order), send, recv if self.rank == root else None, stream)

    # ---- messages

    def send(self, buf: Array, dst: int, *, stream: Stream = None) -> None:
        """Send `buf` to rank `dst`, which calls `recv`.

        A message of less than about 100 bytes returns at once. A longer one may wait for the receiver, and so may any
        while many are in flight. So two ranks that both send before they receive use `send_recv` or `grouped`.
        """
        if type(dst) is not int:
            dst = check.rank(dst)
        self._caller.message("send", buf, dst, stream)

    def recv(self, buf: Array, src: int, *, stream: Stream = None) -> None:
        """Receive into `buf` what rank `src` sends: an array of this dtype and number of elements.

        Ranks that are processes compare the bytes of a message, not its dtype.
        """
        if type(src) is not int:
            src = check.rank(src)
        self._caller.message("recv", buf, src, stream)

    def send_recv(self, send: Array, dst: int, recv: Array, src: int, *, stream: Stream = None) -> None:
        """Send to rank `dst` and receive from rank `src` at once: a step of a ring, or an exchange of two ranks.

        The buffers may overlap. Two or more messages each way: `grouped`.
        """
        if (type(dst), type(src)) != check.RANKS:
            dst, src = check.rank(dst), check.rank(src)
        self._caller.swap(dst, src, send, recv, stream)

    def grouped(self) -> AbstractContextManager[None]:
        """Start every send and recv called inside at once, when the block ends, and wait for all.

        So ranks that send to each other in a ring cannot block each other. Nothing has moved before the end of the
        block, and what is sent is what was there then, whatever is received over it; only send and recv are allowed.
        """
        return self._caller

    # ---- groups and life

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Return the communicator of the ranks with the same colour, ordered by key, then rank.

        Collective: all ranks of the communicator call this. A rank with color=None gets None.

        Raises:
            MismatchError: another rank calls something else.
            CommError: the communicator is closed, or color is negative.
        """
        t, c = self._transport, self._caller
        t.buffers.refuse_capture("split")
        c.open()
        rule = f"split takes a color of 0 to {_MOST}, or None for a rank that takes no part"
        color = None if color is None else whole(color, rule, CommError, 0, _MOST)
        key = whole(key, f"split orders by a key of {-_MOST} to {_MOST}", CommError, -_MOST, _MOST)
        call = c.make("split", "split")
        made: list[Transport | None] = []

        def run() -> None:
            t.verify(call)
            made.append(t.split(color, key))

        c.run(call, run)
        group = made.pop()
        if group is None:
            return None
        group.why = t.why
        return Communicator(group)

    def close(self) -> None:
        """Wait for what was started, and give the transport's resources back. Closing twice is safe.

        Collective: all ranks of the communicator call this. Where a `with` block ends by an exception the
        ranks may not all get here, so what would wait for them is left to the end of the process.

        Raises:
            CommError: another thread is in a call of this communicator.
            Exception: an error of a started call, or of a save or refit in the background, that nobody has been told.
        """
        t, fronts = self._transport, [c for c in (self._control, self) if c is not None]
        if t.closed:
            return
        t.buffers.refuse_capture("close")
        behind = [b for front in fronts for b in list(front._backgrounds)]
        untold: list[BaseException] = []
        if not t.failed:  # the control is closed with this one
            ended = chain((c._caller.settle_all() for c in fronts), (b.settle() for b in behind))
            untold = [error for error in ended if error is not None]
        elif not all(b.idle for b in behind):
            t.closed = True  # what goes on reads what would be given back
            return
        for front in reversed(fronts):
            front._caller.close()
        if untold:
            raise untold[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._transport.failed = self._transport.failed or exc[0] is not None
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._transport.closed else ""
        return f"<{self.transport} communicator: rank {self.rank} of {self.size}{state}>"

    # ---- any collective of the table, and steps of clients

    def call(
        self, what: Collective, send: Array | None = None, recv: Array | None = None, *detail: Any,
        stream: Stream = None,
    ) -> None:  # fmt: skip
        """Make a call of a collective by its record; the methods above are this, with names for the detail.

        Collective: all ranks of the communicator call this.

        Args:
            what: the record.
            send: what this rank gives; None where it gives nothing.
            recv: where its part of the result goes; None where it gets nothing.
            detail: the record's further arguments, hashable: op and order of an all_reduce, say.
            stream: as for the other methods.

        Raises:
            BufferMismatchError: as for all_gather.
            MismatchError: ranks ask for different things.
            CommError: the communicator is closed.
        """
        self._caller.call(what, detail, send, recv, stream)

    def step(
        self, name: str, text: str, run: Callable[..., None], *args: Any, sent_bytes: int = 0, received_bytes: int = 0,
        reached_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Run an operation of a client's own as one call of this communicator: in turn, recorded and counted.

        Collective: all ranks of the communicator call this.

        Args:
            name: the name under which `traffic` counts it.
            text: what errors and the record of calls say of it; equal on all ranks.
            run: the function that does it.
            args: its arguments.
            sent_bytes: bytes of this rank's elements that other ranks get.
            received_bytes: bytes of other ranks' elements that this rank gets.
            reached_bytes: those of received_bytes that come by memory, not by messages.
        """
        self._caller.run(Call(name, text, 0, sent_bytes, received_bytes, reached_bytes), run, *args)

    def carry(
        self, send: Array, send_counts: Sequence[int], send_displs: Sequence[int], recv: Array,
        recv_counts: Sequence[int], recv_displs: Sequence[int],
    ) -> None:  # fmt: skip
        """Move what all_to_all_v moves, as a part of a `step`: nothing is checked, compared or counted.

        Collective: all ranks of the communicator call this.
        """
        self._transport.all_to_all_v(send, send_counts, send_displs, recv, recv_counts, recv_displs)

    def turn(self, what: str) -> AbstractContextManager[None]:
        """Keep other threads from calling for a `with` block, which makes one call of several steps.

        Raises:
            CommError: another thread is in a call of this communicator.
        """
        return self._caller.turn(what)


def _started(
    method: Callable[Concatenate[Communicator, P], object],
) -> Callable[Concatenate[Starter, P], Work]:
    """Return what starts a call of the communicator, with the same arguments."""
    name, takes = method.__name__, signature(method)

    @wraps(method)
    def start(self: Starter, /, *args: P.args, **options: P.kwargs) -> Work:
        given = takes.bind(self, *args, **options)  # what is not such a call raises TypeError here
        return self._start(name, *given.args[1:], **given.kwargs)

    start.__doc__ = f"Start `{name}`."
    start.__annotations__ = {**method.__annotations__, "return": "Work"}
    start.__signature__ = takes.replace(return_annotation="Work")  # type: ignore[attr-defined]
    return start


class Starter:
    """Every collective of a communicator, with the same arguments, started and not waited for.

    On GPUs a started call follows what `stream` (by default the current one) has been given.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._begin = partial(comm._transport.start_message, comm._caller)

    # Arrays of other libraries are seen as NumPy's or CuPy's here: their current stream is that of the caller's thread.
    # What cannot be seen is refused by the call itself, in its turn.

    def _start(self, name: str, *args: Any, stream: Stream = None, **options: Any) -> Work:
        comm = self._comm

        def begin() -> Work:
            seen = [view_or_same(arg, writes=place == 1) for place, arg in enumerate(args)]  # send, recv, ...
            make = getattr(comm, name)
            return comm._transport.start(comm._caller, name, lambda: make(*seen, **options))

        return begin() if stream is None else self._on_stream(stream, name, begin)

    def send(self, buf: Array, dst: int, *, stream: Stream = None) -> Work:
        """Start `send`; it need not be in turn with collectives."""
        if stream is None and type(dst) is int:
            return self._begin("send", buf, dst)
        return self._start_message("send", buf, dst, stream)

    def recv(self, buf: Array, src: int, *, stream: Stream = None) -> Work:
        """Start `recv`; it need not be in turn with collectives."""
        if stream is None and type(src) is int:
            return self._begin("recv", buf, src)
        return self._start_message("recv", buf, src, stream)

    def _start_message(self, name: str, buf: Array, peer: int, stream: Stream) -> Work:
        peer = check.rank(peer)
        if stream is None:
            return self._begin(name, buf, peer)
        return self._on_stream(stream, name, lambda: self._begin(name, buf, peer))

    def _on_stream(self, stream: Stream, name: str, begin: Callable[[], Work]) -> Work:
        t, caller = self._comm._transport, self._comm._caller
        with t.buffers.current(stream, caller.in_group()) as wrong:
            return begin() if wrong is None else failed_work(name, wrong, caller.failure)

    call = _started(Communicator.call)
    all_gather = _started(Communicator.all_gather)
    all_gather_v = _started(Communicator.all_gather_v)
    all_to_all = _started(Communicator.all_to_all)
    all_to_all_v = _started(Communicator.all_to_all_v)
    broadcast = _started(Communicator.broadcast)
    gather = _started(Communicator.gather)
    scatter = _started(Communicator.scatter)
    all_reduce = _started(Communicator.all_reduce)
    reduce_scatter = _started(Communicator.reduce_scatter)
    reduce = _started(Communicator.reduce)
    barrier = _started(Communicator.barrier)


def _hashable(*spans: Any) -> tuple[Any, ...]:
    """Return counts as tuples; what are no counts as they came, for the check to refuse."""
    try:
        return tuple(map(tuple, spans))
    except TypeError:
        return spans
