"""NCCL: the communicator over CuPy buffers.

Everything is put on CuPy's current stream of the buffers' device, whichever device the thread has made current. Nothing
here waits for the device, but for three rare calls: `split`, `close`, and `barrier` where there is no control
communicator. Those wait with a deadline, and a communicator whose wait failed is aborted before anything else is done
with it. Results in order="fast" are NCCL's: equal on all ranks, but it promises nothing about the bits from one run,
size or number of ranks to another.

CUDA graphs record the collectives, send and recv, also in `grouped` and `send_recv`. All ranks capture, and replay, the
same calls; they are compared and counted when they are captured, not when they are replayed. Memory of temporaries is
kept until the communicator is closed, since the graph uses it again. Graphs do not record what the host takes part in:
`start`, the wait for what was started, `barrier`, `split`, `close`, `execute`, and any call of a staged
communicator. Those raise CaptureError, on each rank by itself, before anything is put on the stream. A graph
that has recorded calls is destroyed before the communicator is closed: else `close` raises TimedOut.

No call waits for another host. Each rank keeps a record of its last 64 calls. When a wait of the host has failed
(`Work.wait(timeout_s)`, `barrier`, `split`, `close`), ranks compare their records over the host's communicator, where
there is one. The error names the first call that differs, with both texts and lines, or the ranks that did not come to
a call. NCCL's work is given up then, and what it was to write is undefined. `LOWSHARD_CHECK=full` compares each call
before it is given to NCCL, and so waits for the other hosts; `off` keeps no record.

Ranks of a communicator that lowshard has made are connected to each other when it is made, and those of its groups in
`split`, in a thread that keeps the deadline: so no first call blocks, and an abort is always safe. This is why blocking
communicators serve. A communicator of the user's (`from_nccl`) is taken as it is: NCCL connects two ranks inside the
first call that needs it, which blocks the host until the other rank has come, whatever the deadline.

`NCCL_COMM_SPLIT_SHARE_RESOURCES=1`, which NCCL reads, has the groups of `split` share the buffers and threads of their
communicator, as `split_share=1` of a communicator of the user's does: less memory for each axis of a mesh. A group that
fails is aborted here, and NCCL says that this may make the others of such a family unusable. So it is off by default.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from lowshard.comm import check
from lowshard.comm.call import RECORD_CALLS, Call, Place, place_text, source_place
from lowshard.comm.call_comparison import counts_error, late_ranks, mismatch, share_texts, verify_counts
from lowshard.comm.collectives import ALL_REDUCE, REDUCE_SCATTER
from lowshard.comm.communicator import Communicator
from lowshard.comm.device import GpuBuffers
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.nccl_handle import NCCLHandle
from lowshard.comm.nccl_wire import SUM, UINT8, Exchange, exchange_of, exchange_parts, native_code, wire_of
from lowshard.comm.stream_work import SideStream, StreamWork
from lowshard.comm.transport import Front, Planner, Run, Transport
from lowshard.comm.wait_guard import Watching
from lowshard.errors import CommError, LowshardError
from lowshard.settings import TIMEOUT_S, environment

Array = Any

_LOOK_S = 0.01
"""How often calls ask NCCL, CUDA and the failure channel for what has gone wrong, at most."""
_CAPTURED = frozenset((
    "all_gather", "all_gather_v", "all_to_all", "all_to_all_v", "broadcast", "gather", "scatter", "send", "recv",
    "send_recv", "all_reduce", "reduce_scatter", "reduce",
))  # fmt: skip
"""Calls that a CUDA graph records."""
_Counts = tuple[list[int], list[int]]
_NO_CALLS, _IN_VAIN = 16, 17
"""What ranks compare as they meet on the host: all calls so far as one number, or that a wait was in vain."""
_ODD, _MASK = 0x9E37_79B9_7F4A_7C15, (1 << 62) - 1
_EARLY_S = 5.0
_NO_COLOR = -1  # NCCL_SPLIT_NOCOLOR


class NCCLTransport(Transport):
    """A `cupy.cuda.nccl.NcclCommunicator` and, if there is one, a transport of the host beside it."""

    name = "nccl"

    def __init__(
        self, handle: Any, rank: int, size: int, host: Transport | None = None, *, owned: bool = True, binding:
        Binding | None = None, timeout_s: float | None = None, watch: Watching | None = None,
    ) -> None:  # fmt: skip
        """Wrap an NCCL communicator."""
        binding = Binding.load() if binding is None else binding
        given = {} if host is None else {"group": host.group, "activity": host.activity}
        if timeout_s is None:
            timeout_s = TIMEOUT_S.seconds() if host is None else host.timeout_s
        self._calls = _NO_CALLS
        # A rank that waits for the GPU finds out why before one that waits for it on the host gives up.
        early_s = 0.0 if host is None else min(_EARLY_S, timeout_s / 4)
        self._made: deque[tuple[int, str, Place, _Counts | None]] = deque(maxlen=RECORD_CALLS)
        self._nccl = NCCLHandle(
            handle, binding, owned=owned, timeout_s=timeout_s - early_s, watch=watch, explain=self._explain
        )
        self._handle, self._call, self._device = self._nccl.raw, self._nccl.call, self._nccl.device
        self._binding = binding.of_device(self._device)
        self.buffers: GpuBuffers = GpuBuffers(
            "nccl", self._binding, self._device, self._captures, self._before
        )
        super().__init__(rank, size, timeout_s=timeout_s, buffers=self.buffers, **given)  # type: ignore[arg-type]
        self.launch, self.compares = self.buffers.launch, host is not None
        if host is None:
            self.check = "off"  # there is nothing to compare over but the GPU
        self.host, self._side = host, SideStream(self._binding, self._nccl.has_ended)
        self._next_look_s, self._ranks = time.monotonic() + _LOOK_S, range(size)
        has = (self._nccl.rank, self._nccl.size)
        if has != (rank, size):
            raise CommError(
                f"this NCCL communicator is rank {has[0]} of {has[1]}, but it was given as rank {rank} of {size}"
            )
        if environment().get("NCCL_COMM_BLOCKING") == "0":
            warnings.warn(
                "NCCL_COMM_BLOCKING=0 makes NCCL answer before it is done, which neither CuPy's binding nor lowshard "
                "understands; unset it",
                RuntimeWarning,
                stacklevel=2,
            )

    def connect(self) -> None:
        """Connect all ranks to each other; see `NCCLHandle.connect`."""
        self._nccl.connect()

    # ---- checks between ranks

    def verify(self, call: Call) -> None:
        self._verify(call, None)

    def _verify(self, call: Call, counts: _Counts | None) -> None:
        """Compare a call, and the counts of an exchange, before it is made; or note it, to be compared in need."""
        if self.check == "full":
            super().verify(call)
            if counts is not None:
                verify_counts(self, call, *counts)
        elif self.check == "hash":
            self._made.append((self.sequence, call.text, source_place(), counts))
            self._calls = (self._calls * _ODD + call.signature) & _MASK

    def compare(self, signature: int) -> bool:
        return True if self.host is None else self.host.compare(signature)

    def to_host(self, array: Array) -> np.ndarray:
        self._wait_for_stream("what ranks agree on")
        return super().to_host(array)

    def _wait_for_stream(self, what: str) -> None:
        """Wait, with the deadline, for what the current stream has been given."""
        event = self._binding.new_event()
        event.record(self._binding.stream())
        self._nccl.wait_on_host(event, self._nccl.timeout_s, what)

    def gather_facts(self, record: np.ndarray) -> np.ndarray:
        if self.host is None:
            return super().gather_facts(record)
        self._meet()
        return self.host.gather_facts(record)

    def _meet(self) -> None:
        """Meet on the host, and raise on all ranks what differs in the calls so far."""
        if self.host is None or self.host.compare(self._calls if self.check == "hash" else _NO_CALLS):
            return
        found = self._difference()
        self._nccl.give_up()
        raise found or CommError("ranks have made different calls, longer ago than their records reach")

    def _explain(self) -> LowshardError | None:
        """Return what the records say of a wait that was in vain: others may be in a meeting, or explain it too."""
        if self.host is None or self.check != "hash" or self.size == 1:
            return None
        self.host.compare(_IN_VAIN)
        return self._difference()

    def _difference(self) -> LowshardError | None:
        """Return what the ranks' records of their last calls say, the same on all ranks.

        A MismatchError where calls differ; a TimedOut that names the ranks that did not come to a call; None where the
        records are equal.
        """
        assert self.host is not None
        mine = [(number, text, place_text(place), counts) for number, text, place, counts in self._made]
        said = [json.loads(row) for row in share_texts(self.host, json.dumps(mine))]
        records = [{row[0]: row[1:] for row in rows} for rows in said]
        ends = [max(record, default=0) for record in records]
        first = max(min(record, default=0) for record in records)  # older calls are forgotten somewhere
        for number in range(max(first, 1), min(ends) + 1):
            rows = [record.get(number, ["nothing", "?", None]) for record in records]
            if len({row[0] for row in rows}) > 1:
                return mismatch([row[:2] for row in rows], number)
            counts = [row[2] for row in rows]
            if all(counts) and any(
                counts[i][0][j] != counts[j][1][i] for i in self._ranks for j in self._ranks
            ):
                return counts_error(rows[0][0], [row[1] for row in rows], counts, number)
        behind = [rank for rank, end in enumerate(ends) if end < max(ends)]
        if not behind:
            return None
        number = min(ends) + 1
        asked = next(record[number] for record in records if number in record)
        return late_ranks(behind, asked, number)

    # ---- the way to NCCL

    def _captures(self, call: Call) -> bool:
        if not self._binding.capturing(self._binding.stream()):
            return False
        if call.name not in _CAPTURED:
            self.buffers.refuse_capture(call.text)
        return True

    def _before(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_S
            self._nccl.look(self._binding.stream(), self.buffers.latest)
        self._begin_messages()
        self._side.drop()
        self._side.precede()

    def run_batch(self, front: Front, batch: Sequence[tuple[Call, Array, int]]) -> None:
        with self._binding.on_device(self._device):
            if not self._binding.capturing(self._binding.stream()):
                self._before()
            self._run_group(check.sent_apart(batch))

    def _run_group(self, batch: Sequence[tuple[Call, Array, int]]) -> None:
        with self._nccl.group():
            for call, buf, peer in batch:
                (self.send if call.name == "send" else self.recv)(buf, peer)

    # ---- calls that are not waited for

    def start(self, front: Front, name: str, call: Callable[[], Any]) -> StreamWork:
        """Run what `call` puts on the current stream on a stream of this communicator's own instead.

        NCCL orders the kernels of one communicator among themselves, on whichever streams they are. Started
        work of two communicators runs at once: all ranks start it in one order.
        """
        self.buffers.refuse_capture(f"start.{name}")
        self._begin_messages()
        text, failure = f"{name} on rank {self.rank}", front.failure
        work = StreamWork(self._nccl, self._binding, text, failure=failure)
        try:
            with self._binding.on_device(self._device):
                self._side.fork()
                event, result = self._side.run(call, work.what)
        except Exception as error:  # a work tells by its wait, on every transport
            return work.failed(error)
        return work.begun(event, result)

    def start_message(self, front: Front, name: str, buf: Array, peer: int) -> StreamWork:
        """Keep a message for the next group.

        NCCL runs messages one after the other: two ranks that start a send to each other and then a recv would
        wait for ever. So messages begin together, when one of them is waited for or asked about, or with the next
        call of this thread on any NCCL communicator; and they are in turn with collectives.
        """
        self.buffers.refuse_capture(f"start.{name}")
        waiting = _waiting()
        text, begin = f"{name} of rank {self.rank}", lambda: _begin_all(waiting)
        work = StreamWork(  # perhaps waited for in another thread
            self._nccl, self._binding, text, begin, front.failure
        )
        try:
            checked = front.checked_message(name, buf, peer)
        except Exception as error:
            return work.failed(error)
        with self._binding.on_device(self._device):
            self._side.fork()
        waiting.setdefault(self, []).append((work, *checked))
        return work

    def _begin_messages(self) -> None:
        _begin_all(_waiting())

    def _begin(self, messages: list[tuple[StreamWork, Call, Array, int]]) -> None:
        try:
            with self._binding.on_device(self._device):
                what = ", ".join(dict.fromkeys(item[0].what for item in messages))
                event, _ = self._side.run(lambda: self._run_group([item[1:] for item in messages]), what)
        except Exception as error:
            for work, *_ in messages:
                work.failed(error)
        else:
            for work, *_ in messages:
                work.begun(event)

    def _stream(self) -> int:
        return int(self._binding.stream().ptr)

    # ---- moves: addresses are a buffer's own plus displacement times itemsize, never those of slices

    def _plan_all_gather(self, call: Call, dtype: Any, elems: int) -> Run:
        wire, address = wire_of(dtype), self._binding.pointer
        count = elems * wire.per_elem

        def run(send: Array, recv: Array) -> None:
            self.verify(call)
            if count:
                source, target = address(send), address(recv)
                self._call(self._handle.allGather, source, target, count, wire.code, self._stream())

        return run

    def _plan_all_to_all(self, call: Call, dtype: Any, elems: int) -> Run:
        each = elems // self.size
        counts, displs = [each] * self.size, [each * i for i in range(self.size)]
        exchange = exchange_of(wire_of(dtype), self.rank, counts, displs, counts, displs)

        def run(send: Array, recv: Array) -> None:
            self.verify(call)
            self._exchange(exchange, send, recv)

        return run

    def _plan_all_to_all_v(self, call: Call, dtype: Any, elems: int, *spans: Sequence[int]) -> Run:
        counts = list(map(int, spans[0])), list(map(int, spans[2]))
        exchange = exchange_of(wire_of(dtype), self.rank, *spans)

        def run(send: Array, recv: Array) -> None:
            self._verify(call, counts)
            self._exchange(exchange, send, recv)

        return run

    def all_gather_v(self, send: Array, recv: Array, counts: Sequence[int], displs: Sequence[int]) -> None:
        source = self._binding.pointer(send)
        if len(set(counts)) == 1:
            self._all_gather_equal(source, recv, counts[0], displs)
            return
        wire, stream, target = wire_of(recv.dtype), self._stream(), self._binding.pointer(recv)
        with self._nccl.group():
            for root, (elems, displ) in enumerate(zip(counts, displs, strict=True)):
                if elems:
                    at, count = target + displ * wire.item_bytes, elems * wire.per_elem
                    given = source if root == self.rank else at
                    self._call(self._handle.broadcast, given, at, count, wire.code, root, stream)

    def _all_gather_equal(self, source: int, recv: Array, elems: int, displs: Sequence[int]) -> None:
        if elems == 0:
            return
        wire, stream = wire_of(recv.dtype), self._stream()
        # Displacements are each rank's own affair. What goes over the wire must not depend on them.
        dense = all(displ == i * elems for i, displ in enumerate(displs))
        whole = recv if dense else self.buffers.xp.empty(elems * self.size, recv.dtype)
        begin, target = self._binding.pointer(whole), self._binding.pointer(recv)
        self._call(self._handle.allGather, source, begin, elems * wire.per_elem, wire.code, stream)
        if not dense:
            part_bytes = elems * wire.item_bytes
            for i, displ in enumerate(displs):
                self._binding.copy(
                    target + displ * wire.item_bytes, begin + i * part_bytes, part_bytes, stream
                )

    def all_to_all_v(
        self, send: Array, send_counts: Sequence[int], send_displs: Sequence[int], recv: Array, recv_counts:
        Sequence[int], recv_displs: Sequence[int],
    ) -> None:  # fmt: skip
        spans = send_counts, send_displs, recv_counts, recv_displs
        self._exchange(exchange_of(wire_of(send.dtype), self.rank, *spans), send, recv)

    def _exchange(self, exchange: Exchange, send: Array, recv: Array) -> None:
        """Send and receive parts in one group; the own part is a copy on the device."""
        source, target = self._binding.pointer(send), self._binding.pointer(recv)
        if self.buffers.overlap(send, recv) and not exchange.is_in_place(source, target):
            send = self.buffers.copied(send)
            source = self._binding.pointer(send)
        exchange_parts(self._nccl, self._binding, exchange, source, target, self._stream())

    def broadcast(self, buf: Array, root: int) -> None:
        wire = wire_of(buf.dtype)
        if buf.size:
            at, count = self._binding.pointer(buf), buf.size * wire.per_elem
            self._call(self._handle.broadcast, at, at, count, wire.code, root, self._stream())

    def send(self, buf: Array, dst: int) -> None:
        self._message_of(self._handle.send, buf, dst)

    def recv(self, buf: Array, src: int) -> None:
        self._message_of(self._handle.recv, buf, src)

    def _message_of(self, function: Any, buf: Array, peer: int) -> None:
        if buf.size:
            wire, at = wire_of(buf.dtype), self._binding.pointer(buf)
            self._call(function, at, buf.size * wire.per_elem, wire.code, peer, self._stream())

    # ---- reductions

    def _plan_all_reduce(self, call: Call, dtype: Any, elems: int, op: str, order: str) -> Run:
        size_bytes, code = elems * dtype.itemsize, native_code(dtype, op, order)
        exchanged = ALL_REDUCE.plan(self, call, dtype, elems, op, order)
        native = "allReduce", wire_of(dtype).code, code
        return self._reducing(call, native, elems, (size_bytes, size_bytes, 0), exchanged)

    def _plan_reduce_scatter(self, call: Call, dtype: Any, elems: int, op: str, order: str) -> Run:
        part_bytes, code = elems * dtype.itemsize, native_code(dtype, op, order)
        exchanged = REDUCE_SCATTER.plan(self, call, dtype, elems, op, order)
        native = "reduceScatter", wire_of(dtype).code, code
        spans_bytes = part_bytes * self.size, part_bytes, part_bytes * self.rank
        return self._reducing(call, native, elems, spans_bytes, exchanged)

    def _reducing(
        self, call: Call, native: tuple[str, int, int | None], elems: int, spans_bytes: tuple[int, int, int],
        exchanged: Run,
    ) -> Run:  # fmt: skip
        """Return what runs a reduction: NCCL's own, or the exchange and the fold where that has no code."""
        (name, dtype_code, code), address = native, self._binding.pointer
        send_bytes, recv_bytes, own_bytes = spans_bytes

        def run(send: Array, recv: Array) -> None:
            source, target = address(send), address(recv)
            apart = source + send_bytes <= target or target + recv_bytes <= source
            if not apart and source + own_bytes != target:
                send = self.buffers.copied(send)
                source = address(send)
            if code is None:
                exchanged(send, recv)
                return
            self.verify(call)
            if elems:
                function, stream = getattr(self._handle, name), self._stream()
                self._call(function, source, target, elems, dtype_code, code, stream)

        return run

    def terms(self, send: Array, counts: Sequence[int], displs: Sequence[int]) -> list[Array]:
        """As everywhere, but for the own operand, which is folded where it lies."""
        n, here, wire = counts[self.rank], displs[self.rank], wire_of(send.dtype)
        others = [0 if i == self.rank else n for i in range(self.size)]
        places = [n * (i - (i > self.rank)) for i in range(self.size)]
        given = [0 if i == self.rank else count for i, count in enumerate(counts)]
        taken = self.buffers.xp.empty((self.size - 1, n), send.dtype)
        self._exchange(exchange_of(wire, self.rank, given, displs, others, places), send, taken)
        found = list(taken)
        return [*found[: self.rank], send[here : here + n], *found[self.rank :]]

    plans: ClassVar[Mapping[str, Planner]] = {
        "all_gather": _plan_all_gather,
        "all_to_all": _plan_all_to_all,
        "all_to_all_v": _plan_all_to_all_v,
        "all_reduce": _plan_all_reduce,
        "reduce_scatter": _plan_reduce_scatter,
    }

    # ---- groups and life

    def barrier(self) -> None:
        if self.host is not None:
            self._meet()
            return
        one = self.buffers.xp.zeros(1, np.uint8)
        at = self._binding.pointer(one)
        self._call(self._handle.allReduce, at, at, 1, UINT8, SUM, self._stream())
        self._wait_for_stream("barrier")

    def way_between(self, one: int, other: int) -> tuple[str, str]:
        return (
            "NCCL",
            "their arrays lie on GPUs; it takes NVLink, PCIe or the network, and NCCL_DEBUG=INFO says which",
        )

    def split(self, color: int | None, key: int) -> Transport | None:
        nccl = self._nccl
        self.lend_name()
        # A split may deadlock with work of the same communicator that is still under way.
        nccl.blocking(self._binding.synchronize, "split: the work queued before it")
        if self.host is not None:
            self._meet()  # a rank that does not come is found here, and named
        asked = _NO_COLOR if color is None else color
        handle = nccl.blocking(lambda: self._call(self._handle.commSplit, asked, key), "split")
        host = None if self.host is None else self.host.split(color, key)
        if handle is None:
            return None
        rank, size = int(handle.rank_id()), int(handle.size())
        made = NCCLTransport(
            handle, rank, size, host, binding=self._binding, timeout_s=self.timeout_s, watch=nccl.watch
        )
        try:
            made.connect()
        except LowshardError:
            made.close()  # it has failed: an abort where one is possible, and the end of its host transport
            raise
        return made

    def end(self) -> None:
        if not self.failed:
            self._begin_messages()
        self._nccl.failed = self._nccl.failed or self.failed
        try:
            if not self._nccl.failed:
                self._meet()
            self._nccl.end()
        finally:
            if self.host is not None:
                self.host.failed = self.host.failed or self._nccl.failed
                self.host.close()


def nccl_communicator(
    handle: Any, rank: int, size: int, host: Communicator | None = None, **options: Any
) -> Communicator:
    """Return a communicator over an NCCL communicator."""
    return Communicator(
        NCCLTransport(handle, rank, size, None if host is None else host._transport, **options), host
    )


_thread = threading.local()
_Messages = dict[NCCLTransport, list[tuple[StreamWork, Call, Array, int]]]


def _waiting() -> _Messages:
    """Return the messages that this thread has started, on any communicator, and that have not begun."""
    if not hasattr(_thread, "waiting"):
        _thread.waiting = {}
    return _thread.waiting  # type: ignore[no-any-return]


def _begin_all(waiting: _Messages) -> None:
    while waiting:
        comm, messages = waiting.popitem()
        comm._begin(messages)
