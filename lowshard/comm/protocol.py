"""The communicator contract: collectives over raw buffers, the same on every transport.

Everything users see lives here once: arguments are checked, calls counted, numbered and recorded. How a call
runs is planned in `lowshard.comm.default_collectives`; how bytes move is the transport's (`lowshard.comm.transport`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

from lowshard import dtypes
from lowshard.argument import whole
from lowshard.comm import check
from lowshard.comm.background import Background
from lowshard.comm.call_cache import Arguments, key_of, name_of, text_of
from lowshard.comm.default_collectives import NO_ARRAY
from lowshard.comm.work import Op, Order, Starter, Stream, Work
from lowshard.errors import CommError, LowshardError
from lowshard.foreign_array import is_foreign, view_of

Array = Any  # a NumPy or CuPy array; CuPy ships no types
_MOST = (1 << 31) - 1
"""Of a colour and a key: MPI takes C ints."""
_NOTHING_WRONG: AbstractContextManager[LowshardError | None] = nullcontext()


class Communicator(Arguments):
    """Collectives over the buffers of a group of ranks.

    Buffers are C-contiguous arrays with a dtype of the table, of `xp` or of any library whose arrays have DLPack,
    `__cuda_array_interface__` or a buffer (torch, JAX): their own memory is read and written, never a copy. Read-only
    ones (JAX's) are sources only. Counts are in elements. Every method but the attributes and `empty` is collective:
    all ranks of the communicator call it, in one order (`send` and `recv`: the two ranks concerned). Results are
    written into the buffers given; shared ones, which are new, are of the library of the input.

    One thread at a time calls a communicator, since the calls of several have no order that is the same on all ranks:
    CommError where one calls while another is in a call. Split it, a communicator for each thread.

    Ranks compare what they ask for before anything moves (`LOWSHARD_CHECK`: hash, the default, full or off), so that
    each of these errors is raised by all ranks alike: MismatchError where they ask for different things, and what is
    wrong with the arguments of one. A wait that ends without the others raises PeerFailed or TimedOut. On NCCL `hash`
    compares a little later, so that no call waits for another host: `lowshard.comm.nccl` says what that means.

    On GPUs `stream` says where a call is put: a stream of CuPy or torch, an object with `__cuda_stream__`, or the
    address of a cudaStream_t; by default CuPy's current stream of the buffers' device. A stream of another device is a
    StreamError. On CPUs any stream is a CommError.
    """

    @property
    def control(self) -> Communicator:
        """A communicator over host memory for checks and small facts; itself on a CPU."""
        return self

    @property
    def _agreeing(self) -> Communicator:
        """The communicator that ranks agree over: its calls are in one order with this one's."""
        return self.control

    @property
    def start(self) -> Starter:
        """The same calls, not waited for: each method returns a `Work`.

        The buffers belong to the call until the work is done. Calls run in the order they are started in.
        """
        return Starter(self)

    @property
    def beside(self) -> Background:
        """Runs saves beside this communicator's calls, one at a time.

        Collective: all ranks of the communicator ask for it the first time, when it is made.
        """
        if self._beside is None:
            self._beside = Background(self, "lowshard save")
        return self._beside

    def settle_beside(self) -> Exception | None:
        """Wait for what was started on `beside`; return what went wrong in it and was told to nobody.

        Not collective.
        """
        return None if self._beside is None else self._beside.settle()

    def _current(self, stream: Stream) -> AbstractContextManager[LowshardError | None]:
        """Make the device of the buffers and, unless it is None, a stream current for a block.

        The block gets what is wrong with the stream, for the caller to let all ranks raise; here there are none.
        """
        if stream is None:
            return _NOTHING_WRONG
        text = (
            f"stream= is for communicators over GPU arrays, but this one ({self.transport}) moves host memory"
        )
        return nullcontext(CommError(f"{text}; leave it out"))

    def meeting(self, what: str, stream: Stream = None) -> AbstractContextManager[LowshardError | None]:
        """Make device and stream current for a block: a call of several steps, in which the hosts of all ranks meet.

        The block gets what is wrong with the stream, for the caller to let all ranks raise. No CUDA graph records it.
        """
        return self._current(stream)

    def _on_stream(self, stream: Stream, name: str, *args: Any, **options: Any) -> Any:
        """Make a call by its name with a stream current; all ranks refuse it where one rank's stream is wrong."""
        with self._current(stream) as wrong:
            if wrong is None:
                return getattr(self, name)(*args, **options)
        return self._refuse_argument(wrong, name, f"{name} on a stream")

    def _start_on_stream(self, stream: Stream, name: str, start: Callable[[], Work]) -> Work:
        """Start a call with a stream current."""
        with self._current(stream) as wrong:
            if wrong is None:
                return start()
        error = wrong
        return self._start(name, lambda: self._refuse_argument(error, name, f"{name} on a stream"))

    def _on_views(self, name: str, **given: Any) -> Any:
        """Make a call by its name with the arrays of other libraries seen as NumPy's or CuPy's."""
        try:
            seen = {argument: view_of(value, argument) for argument, value in given.items()}
        except LowshardError as error:
            self._refuse_argument(error, name, name + NO_ARRAY)
        return getattr(self, name)(**seen)

    def _refuse_argument(self, error: LowshardError, name: str, text: str) -> NoReturn:
        if name in ("send", "recv", "send_recv"):  # calls of two ranks, which no other would refuse
            raise error
        self._refuse(error, text)

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Array:
        """Return an array, not filled, in memory that the other ranks of the node can read where it lies.

        Nothing is staged for such arrays; any other array works too. On a GPU fp8 and e8m0 are uint8. Not collective.

        Raises:
            DTypeError: a dtype outside the table.
            BufferMismatchError: a shape that is none.
        """
        kind = dtypes.get(dtype).in_memory(self.xp)
        return self.xp.empty(check.extents(shape, kind.itemsize), kind)

    # ---- moves

    def all_gather(
        self, send: Array, recv: Array | None = None, *, shared: bool = False, stream: Stream = None
    ) -> Array | None:
        """Put every rank's `send` into `recv` on all ranks, in rank order.

        Collective: all ranks of the communicator call this. recv holds size x send elements. In
        place: pass this rank's own part of recv as send.

        Args:
            send: this rank's part.
            recv: where the whole goes.
            shared: return the whole instead, joined along the first dim: one read-only array for all ranks of the
                node. recv is None.

        Raises:
            BufferMismatchError: shape, dtype, device or memory order do not fit.
            MismatchError: ranks ask for different things.
            CommError: the communicator is closed.
        """
        if stream is not None:
            return self._on_stream(stream, "all_gather", send, recv, shared=shared)
        if shared is not False and self._is_shared(shared, "all_gather"):
            return self._shared("all_gather", send, recv)
        call = self._known(("all_gather", key_of(send)), send, recv)
        if call is None:
            if is_foreign(send, recv):
                return self._on_views("all_gather", send=send, recv=recv)
            try:
                call = self._check_all_gather(send, recv)
            except LowshardError as error:
                self._refuse(error, f"all_gather {text_of(send)}")
        self._do(call, send, recv)
        return None

    def all_gather_v(
        self,
        send: Array,
        recv: Array,
        recv_counts: Sequence[int],
        recv_displs: Sequence[int],
        *,
        stream: Stream = None,
    ) -> None:
        """Put every rank's `send`, of its own length, into `recv` on all ranks.

        Collective: all ranks of the communicator call this. `recv_counts[i]` elements of rank i land
        at `recv_displs[i]`. In place: pass this rank's own part of recv as send.

        Raises:
            BufferMismatchError: counts do not fit the buffers, or the buffers are not as required.
            MismatchError: ranks ask for different things.
            CommError: the communicator is closed.
        """
        if stream is not None:
            self._on_stream(stream, "all_gather_v", send, recv, recv_counts, recv_displs)
            return
        if is_foreign(send, recv):
            self._on_views(
                "all_gather_v", send=send, recv=recv, recv_counts=recv_counts, recv_displs=recv_displs
            )
            return
        try:
            s, r = self._flat(send, "send"), self._flat(recv, "recv", writes=True)
            check.same_dtype(s, r)
            counts, displs = check.spans("recv", self.size, r, recv_counts, recv_displs)
            own, rule = counts[self.rank], "send holds its own recv_counts entry"
            check.need(s.size == own, "all_gather_v", rule, own, s.size)
        except LowshardError as error:
            self._refuse(error, f"all_gather_v {name_of(send)} recv_counts={check.counts_text(recv_counts)}")
        moved = (sum(counts) - s.size) * s.itemsize
        text = f"all_gather_v {s.dtype.name} recv_counts={counts}"
        call = self._make("all_gather_v", text, 0, s.nbytes * (self.size - 1), moved)
        call.run = self._run_all_gather_v
        self._do(call, call, s, r, counts, displs)

    def all_to_all(self, send: Array, recv: Array, *, stream: Stream = None) -> None:
        """Send part j of `send` to rank j, and put what rank i sent into part i of `recv`.

        Collective: all ranks of the communicator call this. Both hold the same number of elements, a
        multiple of size.

        Raises:
            BufferMismatchError: as for all_gather, or the elements do not divide by size.
            MismatchError: ranks ask for different things.
            CommError: the communicator is closed.
        """
        if stream is not None:
            self._on_stream(stream, "all_to_all", send, recv)
            return
        call = self._known(("all_to_all", key_of(send)), send, recv)
        if call is None:
            if is_foreign(send, recv):
                self._on_views("all_to_all", send=send, recv=recv)
                return
            try:
                call = self._check_all_to_all(send, recv)
            except LowshardError as error:
                self._refuse(error, f"all_to_all {text_of(send)}")
        self._do(call, send, recv)

    def all_to_all_v(
        self, send: Array, send_counts: Sequence[int], send_displs: Sequence[int], recv: Array,
        recv_counts: Sequence[int], recv_displs: Sequence[int],
        *, stream: Stream = None,
    ) -> None:  # fmt: skip
        """Send `send_counts[j]` elements at `send_displs[j]` to rank j, and receive likewise.

        Collective: all ranks of the communicator call this. Counts may be 0 and differ; send parts
        may overlap, receive parts must not.

        Raises:
            BufferMismatchError: a count or displacement leaves its buffer, or as for all_gather.
            MismatchError: ranks ask for different things, or one expects another count than is sent to it.
            CommError: the communicator is closed.
        """
        if stream is not None:
            self._on_stream(
                stream, "all_to_all_v", send, send_counts, send_displs, recv, recv_counts, recv_displs
            )
            return
        key = self._counts_key(send, send_counts, send_displs, recv, recv_counts, recv_displs)
        call = None if key is None else self._known(key, send, recv)
        if call is not None:
            self._do(call, call, send, *call.spans[:2], recv, *call.spans[2:])
            return
        if is_foreign(send, recv):
            self._on_views(
                "all_to_all_v",
                send=send,
                send_counts=send_counts,
                send_displs=send_displs,
                recv=recv,
                recv_counts=recv_counts,
                recv_displs=recv_displs,
            )
            return
        try:
            s, r = self._flat(send, "send"), self._flat(recv, "recv", writes=True)
            check.same_dtype(s, r)
            sc, sd = check.spans("send", self.size, s, send_counts, send_displs)
            rc, rd = check.spans("recv", self.size, r, recv_counts, recv_displs)
            rule = "a rank sends itself what it receives from itself"
            check.need(sc[self.rank] == rc[self.rank], "all_to_all_v", rule, sc[self.rank], rc[self.rank])
        except LowshardError as error:
            self._refuse(error, f"all_to_all_v {name_of(send)}")
        own = sc[self.rank]
        sent, received = (sum(sc) - own) * s.itemsize, (sum(rc) - own) * r.itemsize
        call = self._make("all_to_all_v", f"all_to_all_v {s.dtype.name}", r.size, sent, received)
        call.run, call.spans = self._run_all_to_all_v, (sc, sd, rc, rd)
        if key is not None and self._ready(send) and self._ready(recv, True):
            self._keep(key, call)
        self._do(call, call, s, sc, sd, r, rc, rd)

    def broadcast(
        self, buf: Array | None, root: int = 0, *, shared: bool = False, stream: Stream = None
    ) -> Array | None:
        """Copy root's `buf` into every rank's `buf`.

        Collective: all ranks of the communicator call this.

        Args:
            buf: the array; with shared, root's alone, and the others pass None.
            root: whose array.
            shared: return a copy of root's array instead: one read-only array for all ranks of the node.

        Raises:
            BufferMismatchError: as for all_gather.
            MismatchError: ranks ask for different things.
            CommError: the communicator is closed, or there is no such root.
        """
        if stream is not None:
            return self._on_stream(stream, "broadcast", buf, root, shared=shared)
        if type(root) is not int:
            root = check.rank(root)
        if shared is not False and self._is_shared(shared, "broadcast"):
            return self._shared("broadcast", buf, None, root=root)
        mine = self.rank == root
        call = self._known(("broadcast", key_of(buf), root), buf if mine else None, None if mine else buf)
        if call is None:
            if is_foreign(buf):
                return self._on_views("broadcast", buf=buf, root=root)
            try:
                call = self._check_broadcast(buf, root)
            except LowshardError as error:
                self._refuse(error, f"broadcast {text_of(buf)} root={root}")
        self._do(call, buf)
        return None

    def gather(self, send: Array, recv: Array | None, root: int = 0, *, stream: Stream = None) -> None:
        """Put every rank's `send` into root's `recv`, in rank order; others pass recv=None.

        Collective: all ranks of the communicator call this.

        Raises:
            BufferMismatchError: as for all_gather, or root passed no recv.
            MismatchError: ranks ask for different things.
            CommError: the communicator is closed, or there is no such root.
        """
        if stream is not None:
            self._on_stream(stream, "gather", send, recv, root)
            return
        if type(root) is not int:
            root = check.rank(root)
        call = self._known(("gather", key_of(send), root), send, recv if self.rank == root else None)
        if call is None:
            if is_foreign(send, recv):
                self._on_views("gather", send=send, recv=recv, root=root)
                return
            try:
                call = self._check_gather(send, recv, root)
            except LowshardError as error:
                self._refuse(error, f"gather {text_of(send)} root={root}")
        self._do(call, send, recv if self.rank == root else None)

    def scatter(self, send: Array | None, recv: Array, root: int = 0, *, stream: Stream = None) -> None:
        """Put part i of root's `send` into rank i's `recv`; others pass send=None.

        Collective: all ranks of the communicator call this.

        Raises:
            BufferMismatchError: as for all_gather, or root passed no send.
            MismatchError: ranks ask for different things.
            CommError: the communicator is closed, or there is no such root.
        """
        if stream is not None:
            self._on_stream(stream, "scatter", send, recv, root)
            return
        if type(root) is not int:
            root = check.rank(root)
        call = self._known(("scatter", key_of(recv), root), send if self.rank == root else None, recv)
        if call is None:
            if is_foreign(send, recv):
                self._on_views("scatter", send=send, recv=recv, root=root)
                return
            try:
                call = self._check_scatter(send, recv, root)
            except LowshardError as error:
                self._refuse(error, f"scatter {text_of(recv)} root={root}")
        self._do(call, send if self.rank == root else None, recv)

    def send(self, buf: Array, dst: int, *, stream: Stream = None) -> None:
        """Send `buf` to rank `dst`, which calls `recv`.

        A message of less than some 100 bytes is taken at once, longer ones may wait for the receiver, and so may any
        when many are on their way. So two ranks that both send before they receive use `send_recv` or `grouped`.

        Raises:
            BufferMismatchError: as for all_gather.
            CommError: the communicator is closed, or dst is no other rank of it.
        """
        if stream is not None:
            self._on_stream(stream, "send", buf, dst)
            return
        if type(dst) is not int:
            dst = check.rank(dst)
        call = self._known(("send", key_of(buf), dst), buf, None)
        if call is None:
            if is_foreign(buf):
                self._on_views("send", buf=buf, dst=dst)
                return
            b = self._flat(buf, "buf")
            self._peer(dst, "dst")
            call = self._make("send", f"send {text_of(b)} to rank {dst}", 0, b.nbytes, 0)
            call.run = self._send
            self._keep(("send", key_of(b), dst), call)
        self._message(call, buf if buf.ndim == 1 else buf.reshape(-1), dst)

    def recv(self, buf: Array, src: int, *, stream: Stream = None) -> None:
        """Receive into `buf` what rank `src` sends; sizes and dtypes agree.

        Raises:
            BufferMismatchError: as for all_gather, or another number of bytes came.
            CommError: the communicator is closed, or src is no other rank of it.
        """
        if stream is not None:
            self._on_stream(stream, "recv", buf, src)
            return
        if type(src) is not int:
            src = check.rank(src)
        call = self._known(("recv", key_of(buf), src), None, buf)
        if call is None:
            if is_foreign(buf):
                self._on_views("recv", buf=buf, src=src)
                return
            b = self._flat(buf, "buf", writes=True)
            self._peer(src, "src")
            call = self._make("recv", f"recv {text_of(b)} from rank {src}", b.size, 0, b.nbytes)
            call.run = self._recv
            self._keep(("recv", key_of(b), src), call)
        self._message(call, buf if buf.ndim == 1 else buf.reshape(-1), src)

    def send_recv(self, send: Array, dst: int, recv: Array, src: int, *, stream: Stream = None) -> None:
        """Send to rank `dst` and receive from rank `src` at once: a step of a ring, or an exchange of two ranks.

        The buffers must not overlap. Two or more messages each way: `grouped`.

        Raises:
            BufferMismatchError: as for `recv`.
            CommError: the communicator is closed, or dst or src is no other rank of it.
        """
        if stream is not None:
            self._on_stream(stream, "send_recv", send, dst, recv, src)
            return
        if self._in_group():
            self.send(send, dst)
            self.recv(recv, src)
            return
        if (type(dst), type(src)) != check.RANKS:
            dst, src = check.rank(dst), check.rank(src)
        key = ("send_recv", key_of(send), dst, key_of(recv), src)
        call = self._calls.get(key)
        if call is None or self._closed or not (self._ready(send) and self._ready(recv, True)):
            if is_foreign(send, recv):
                self._on_views("send_recv", send=send, dst=dst, recv=recv, src=src)
                return
            s, r = self._flat(send, "send"), self._flat(recv, "recv", writes=True)
            self._peer(dst, "dst")
            self._peer(src, "src")
            text = f"send_recv {text_of(s)} to rank {dst}, {text_of(r)} from rank {src}"
            call = self._keep(key, self._make("send_recv", text, r.size, s.nbytes, r.nbytes))
        self._swap(call, send.reshape(-1), dst, recv.reshape(-1), src)

    @contextmanager
    def grouped(self) -> Iterator[None]:
        """Start every send and recv called inside at once, when the block ends, and wait for all.

        So ranks that send to each other in a ring cannot block each other. Nothing has moved before the end of the
        block; only send and recv are allowed in it.

        Raises:
            CommError: a group within a group.
        """
        if self._batch is not None:
            raise CommError("grouped() blocks do not nest; end the outer one first")
        self._batch, self._batch_thread = [], threading.get_ident()
        try:
            yield
            batch, self._batch = self._batch, None
            if batch:
                self._run_batch(batch)
        finally:
            self._batch = self._batch_thread = None

    def barrier(self) -> None:
        """Return once every rank has called it.

        Collective: all ranks of the communicator call this.

        Raises:
            MismatchError: another rank calls something else.
            CommError: the communicator is closed.
        """
        call = None if self._closed else self._calls.get("barrier")
        if call is None:
            self._open()
            call = self._make("barrier", "barrier", 0, 0, 0)
            call.run = self._plan_barrier(call)
            self._keep("barrier", call)
        self._do(call)

    # ---- reductions

    def all_reduce(
        self, send: Array, recv: Array | None = None, op: Op = "sum", order: Order = "fast",
        *, shared: bool = False, stream: Stream = None,
    ) -> Array | None:  # fmt: skip
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
            shared: return the result instead: one read-only array for all ranks of the node. recv is None.

        Raises:
            BufferMismatchError: as for all_gather.
            MismatchError: ranks ask for different things.
            CommError: the communicator is closed; unknown op or order.
            DTypeError: the op makes no sense for the dtype (avg of bool).
        """
        if stream is not None:
            return self._on_stream(stream, "all_reduce", send, recv, op, order, shared=shared)
        if (type(op), type(order)) != check.NAMES:
            op, order = check.names(op, order)  # type: ignore[assignment]  # checked where a call is made
        if shared is not False and self._is_shared(shared, "all_reduce"):
            return self._shared("all_reduce", send, recv, op=op, order=order)
        call = self._known(("all_reduce", key_of(send), op, order), send, recv)
        if call is None:
            if is_foreign(send, recv):
                return self._on_views("all_reduce", send=send, recv=recv, op=op, order=order)
            try:
                call = self._check_all_reduce(send, recv, op, order)
            except LowshardError as error:
                self._refuse(error, f"all_reduce {text_of(send)} {op} {order}")
        self._do(call, send, recv)
        return None

    def reduce_scatter(
        self, send: Array, recv: Array, op: Op = "sum", order: Order = "fast", *, stream: Stream = None
    ) -> None:
        """Reduce every rank's `send` elementwise and put part i of the result into rank i's `recv`.

        Collective: all ranks of the communicator call this. send holds size x recv elements. op and
        order: as for all_reduce.

        Raises:
            BufferMismatchError: as for all_gather.
            MismatchError: ranks ask for different things.
            CommError: the communicator is closed; unknown op or order.
            DTypeError: the op makes no sense for the dtype.
        """
        if stream is not None:
            self._on_stream(stream, "reduce_scatter", send, recv, op, order)
            return
        if (type(op), type(order)) != check.NAMES:
            op, order = check.names(op, order)  # type: ignore[assignment]  # checked where a call is made
        call = self._known(("reduce_scatter", key_of(send), op, order), send, recv)
        if call is None:
            if is_foreign(send, recv):
                self._on_views("reduce_scatter", send=send, recv=recv, op=op, order=order)
                return
            try:
                call = self._check_reduce_scatter(send, recv, op, order)
            except LowshardError as error:
                self._refuse(error, f"reduce_scatter {text_of(send)} {op} {order}")
        self._do(call, send, recv)

    def reduce(
        self, send: Array, recv: Array | None, op: Op = "sum", root: int = 0, order: Order = "fast",
        *, stream: Stream = None,
    ) -> None:  # fmt: skip
        """Reduce every rank's `send` elementwise into root's `recv`; others pass recv=None.

        Collective: all ranks of the communicator call this. op and order: as for all_reduce.

        Raises:
            BufferMismatchError: as for all_gather, or root passed no recv.
            MismatchError: ranks ask for different things.
            CommError: the communicator is closed; no such root; unknown op or order.
            DTypeError: the op makes no sense for the dtype.
        """
        if stream is not None:
            self._on_stream(stream, "reduce", send, recv, op, root, order)
            return
        if type(root) is not int:
            root = check.rank(root)
        out = recv if self.rank == root else None
        if (type(op), type(order)) != check.NAMES:
            op, order = check.names(op, order)  # type: ignore[assignment]  # checked where a call is made
        call = self._known(("reduce", key_of(send), op, root, order), send, out)
        if call is None:
            if is_foreign(send, recv):
                self._on_views("reduce", send=send, recv=recv, op=op, root=root, order=order)
                return
            try:
                call = self._check_reduce(send, recv, op, root, order)
            except LowshardError as error:
                self._refuse(error, f"reduce {text_of(send)} {op} {order} root={root}")
        self._do(call, send, out)

    # ---- groups

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Return the communicator of the ranks with the same colour, ordered by key, then rank.

        Collective: all ranks of the communicator call this. A rank with color=None gets None.

        Raises:
            MismatchError: another rank calls something else.
            CommError: the communicator is closed, or color is negative.
        """
        try:
            self._open()
            rule = f"split takes a color of 0 to {_MOST}, or None for a rank that takes no part"
            color = None if color is None else whole(color, rule, CommError, 0, _MOST)
            key = whole(key, f"split orders by a key of {-_MOST} to {_MOST}", CommError, -_MOST, _MOST)
        except LowshardError as error:
            self._refuse(error, "split")
        call = self._make("split", "split", 0, 0, 0)
        made: list[Communicator | None] = []

        def run() -> None:
            self._verify(call)
            made.append(self._split(color, key))

        call.run = run
        self._do(call)
        return made.pop()  # the record of calls keeps this one for a while, but not the group
