"""NCCL: the communicator over CuPy buffers.

Everything is put on CuPy's current stream of the buffers' device, whichever device the thread has made current. Nothing
here waits for the device, but for three rare calls: `split`, `close`, and `barrier` where there is no control
communicator. Those wait with a deadline, and a communicator whose wait failed is aborted before anything else is done
with it. Results in
order="fast" are NCCL's: equal on all ranks, but it promises nothing about the bits from one run, size or
number of ranks to another.

CUDA graphs record the collectives, send and recv, also in `grouped` and `send_recv`. All ranks capture, and replay, the
same calls; they are compared and counted when they are captured, not when they are replayed. Memory of temporaries is
kept until the communicator is closed, since the graph uses it again. Graphs do not record what the host takes part in:
`start`, the wait for what was started, `barrier`, `split`, `close`, `shared=True`, `execute`, and any call of a staged
communicator. Those raise CaptureError, on each rank by itself, before anything is put on the stream. A graph
that has recorded calls is destroyed before the communicator is closed: else `close` raises TimedOut.

Tested over a stand-in that moves host memory; not run on a GPU.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.comm.call import Call
from lowshard.comm.device import DeviceCommunicator
from lowshard.comm.lookout import Watching
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.nccl_handle import NCCLHandle
from lowshard.comm.protocol import Communicator
from lowshard.comm.stream_work import SideStream, StreamWork
from lowshard.errors import CommError

Array = Any

_UINT8 = 1  # ncclUint8
_LOOK_S = 0.01
"""How often calls ask NCCL, CUDA and the side channel for what has gone wrong, at most."""
_CAPTURED = frozenset((
    "all_gather", "all_gather_v", "all_to_all", "all_to_all_v", "broadcast", "gather", "scatter", "send", "recv",
    "send_recv", "all_reduce", "reduce_scatter", "reduce",
))  # fmt: skip
"""Calls that a CUDA graph records."""
_NO_COLOR = -1  # NCCL_SPLIT_NOCOLOR
_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3}  # ncclRedOp_t

# NCCL reduces these as the contract asks. It takes fp16 and bf16 too, but promises no float32
# accumulator for them, so these go through the exchange of Communicator.
_NATIVE = frozenset(("float32", "float64", "int8", "int32", "int64", "uint8", "uint32", "uint64"))


class NCCLCommunicator(DeviceCommunicator):
    """A `cupy.cuda.nccl.NcclCommunicator` and, if there is one, a communicator of the host beside it."""

    def __init__(
        self,
        handle: Any,
        rank: int,
        size: int,
        host: Communicator | None = None,
        *,
        owned: bool = True,
        binding: Binding | None = None,
        timeout_s: float | None = None,
        watch: Watching | None = None,
    ) -> None:
        """Wrap an NCCL communicator.

        Args:
            handle: the NCCL communicator: CuPy's, or nccl4py's.
            rank: this rank in it.
            size: its number of ranks.
            host: a communicator over the same ranks for checks on the host; `close` closes it.
            owned: whether `close` ends the NCCL communicator too.
            binding: by default the installed libraries'.
            timeout_s: deadline of every wait of the host; by default that of `host`, or the environment's.
            watch: the side channel that tells of failed ranks, if there is one.

        Raises:
            CommError: rank and size are not those of the NCCL communicator.
            DependencyError: CuPy or NCCL is missing.
        """
        if host is None:
            super().__init__(rank, size, timeout_s=timeout_s)
            self._check = "off"  # there is nothing to compare over but the GPU
        else:
            timeout_s = host.timeout_s if timeout_s is None else timeout_s
            super().__init__(rank, size, group=host._group_name, timeout_s=timeout_s, activity=host._activity)
        binding = Binding.load(handle) if binding is None else binding
        self._nccl = NCCLHandle(handle, binding, owned=owned, timeout_s=self.timeout_s, watch=watch)
        self._handle, self._call, self._device = self._nccl.raw, self._nccl.call, self._nccl.device
        self._binding = binding.of_device(self._device)
        self._host, self._side = host, SideStream(self._binding, self._nccl.has_ended)
        self._captured = []
        self._next_look_s = time.monotonic() + _LOOK_S
        has = (self._nccl.rank, self._nccl.size)
        if has != (rank, size):
            raise CommError(
                f"this NCCL communicator is rank {has[0]} of {has[1]}, but it was given as rank {rank} of {size}"
            )
        if os.environ.get("NCCL_COMM_BLOCKING") == "0":
            warnings.warn(
                "NCCL_COMM_BLOCKING=0 makes NCCL answer before it is done, which neither CuPy's binding nor lowshard "
                "understands; unset it",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def transport(self) -> str:
        """The transport's name."""
        return "nccl"

    # ---- the way to NCCL

    def _captures(self, call: Call) -> bool:
        if not self._binding.capturing(self._binding.stream()):
            return False
        if call.name not in _CAPTURED or "shared" in call.text:
            self.refuse_capture(call.text)
        return True

    def _before(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_S
            self._nccl.look(self._binding.stream(), self._latest)
        self._begin_messages()
        self._side.drop()

    def _run_batch(self, batch: Sequence[tuple[Call, Array, int]]) -> None:
        with self._binding.on_device(self._device):
            if not self._binding.capturing(self._binding.stream()):
                self._before()
            self._run_group(batch)

    def _run_group(self, batch: Sequence[tuple[Call, Array, int]]) -> None:
        with self._nccl.group():
            for call, buf, peer in batch:
                call.run(buf, peer)

    # ---- calls that are not waited for

    def _start(self, name: str, call: Callable[[], Any]) -> StreamWork:
        """Run what `call` puts on the current stream on a stream of this communicator's own instead.

        NCCL orders the kernels of one communicator among themselves, on whichever streams they are. Started
        work of two communicators runs at once: all ranks start it in one order.
        """
        self.refuse_capture(f"start.{name}")
        self._begin_messages()
        work = StreamWork(self._nccl, self._binding, f"{name} on rank {self.rank}")
        try:
            with self._binding.on_device(self._device):
                self._side.fork()
                event, result = self._side.run(call, work.what)
        except Exception as error:  # a work tells by its wait, on every transport
            return work.failed(error)
        return work.begun(event, result)

    def _start_message(self, name: str, buf: Array, peer: int) -> StreamWork:
        """Keep a message for the next group.

        NCCL runs messages one after the other: two ranks that start a send to each other and then a recv would
        wait for ever. So messages begin together, when one of them is waited for or asked about, or with the next
        call of this thread on any NCCL communicator; and they are in turn with collectives.
        """
        self.refuse_capture(f"start.{name}")
        waiting = _waiting()
        text, begin = f"{name} of rank {self.rank}", lambda: _begin_all(waiting)
        work = StreamWork(self._nccl, self._binding, text, begin)  # perhaps waited for in another thread
        outer, self._batch = self._batch, []
        try:
            (self.send if name == "send" else self.recv)(buf, peer)
            made = self._batch
        except Exception as error:
            return work.failed(error)
        finally:
            self._batch = outer
        with self._binding.on_device(self._device):
            self._side.fork()
        waiting.setdefault(self, []).extend((work, *item) for item in made)
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

    def _put(self, part: Array, peer: int) -> None:
        if part.size:
            pointer, code = self._binding.pointer(part), _code(part)
            self._call(self._handle.send, pointer, part.size, code, peer, self._stream())

    def _take(self, part: Array, peer: int) -> None:
        if part.size:
            pointer, code = self._binding.pointer(part), _code(part)
            self._call(self._handle.recv, pointer, part.size, code, peer, self._stream())

    # ---- moves

    def _all_gather_v(self, send: Array, recv: Array, counts: Sequence[int], displs: Sequence[int]) -> None:
        send, (recv, counts, displs) = _plain(send), _plain_v(recv, counts, displs)
        if len(set(counts)) == 1:
            self._all_gather_equal(send, recv, counts[0], displs)
            return
        with self._nccl.group():
            for root, (count, displ) in enumerate(zip(counts, displs, strict=True)):
                if count:
                    target = recv[displ : displ + count]
                    at = self._binding.pointer(target)
                    source = self._binding.pointer(send) if root == self.rank else at
                    self._call(self._handle.broadcast, source, at, count, _code(target), root, self._stream())

    def _all_gather_equal(self, send: Array, recv: Array, count: int, displs: Sequence[int]) -> None:
        if count == 0:
            return
        # Displacements are each rank's own affair. What goes over the wire must not depend on them.
        dense = all(displ == i * count for i, displ in enumerate(displs))
        whole = recv[: count * self.size] if dense else self.xp.empty(count * self.size, recv.dtype)
        at, source = self._binding.pointer(whole), self._binding.pointer(send)
        self._call(self._handle.allGather, source, at, count, _code(send), self._stream())
        if not dense:
            for i, displ in enumerate(displs):
                self._copy(recv[displ : displ + count], whole[i * count : (i + 1) * count])

    def _all_to_all_v(
        self,
        send: Array,
        send_counts: Sequence[int],
        send_displs: Sequence[int],
        recv: Array,
        recv_counts: Sequence[int],
        recv_displs: Sequence[int],
    ) -> None:
        send, send_counts, send_displs = _plain_v(send, send_counts, send_displs)
        recv, recv_counts, recv_displs = _plain_v(recv, recv_counts, recv_displs)
        if self._overlap(send, recv):
            send = send.copy()
        out = [send[d : d + n] for n, d in zip(send_counts, send_displs, strict=True)]
        into = [recv[d : d + n] for n, d in zip(recv_counts, recv_displs, strict=True)]
        with self._nccl.group():
            for peer in range(self.size):
                if peer != self.rank:
                    self._put(out[peer], peer)
                    self._take(into[peer], peer)
        self._copy(into[self.rank], out[self.rank])

    def _broadcast(self, buf: Array, root: int) -> None:
        buf = _plain(buf)
        if buf.size:
            at = self._binding.pointer(buf)
            self._call(self._handle.broadcast, at, at, buf.size, _code(buf), root, self._stream())

    def _gather(self, send: Array, recv: Array | None, root: int) -> None:
        send = _plain(send)
        if recv is None:
            self._put(send, root)
            return
        parts = _plain(recv).reshape(self.size, send.size)
        with self._nccl.group():
            for peer in range(self.size):
                if peer != root:
                    self._take(parts[peer], peer)
        self._copy(parts[root], send)

    def _scatter(self, send: Array | None, recv: Array, root: int) -> None:
        recv = _plain(recv)
        if send is None:
            self._take(recv, root)
            return
        parts = _plain(send).reshape(self.size, recv.size)
        with self._nccl.group():
            for peer in range(self.size):
                if peer != root:
                    self._put(parts[peer], peer)
        self._copy(recv, parts[root])

    def _send(self, buf: Array, dst: int) -> None:
        self._put(_plain(buf), dst)

    def _recv(self, buf: Array, src: int) -> None:
        self._take(_plain(buf), src)

    # ---- reductions

    def _native_all_reduce(self, send: Array, recv: Array, op: str) -> bool:
        if dtypes.get(send.dtype).name not in _NATIVE:
            return False
        if send.size:
            in_place = self._binding.pointer(send) == self._binding.pointer(recv)
            if not in_place and self._overlap(send, recv):
                send = send.copy()
            source, at = self._binding.pointer(send), self._binding.pointer(recv)
            self._call(self._handle.allReduce, source, at, send.size, _code(send), _OPS[op], self._stream())
        return True

    def _native_reduce_scatter(self, send: Array, recv: Array, op: str) -> bool:
        if dtypes.get(send.dtype).name not in _NATIVE:
            return False
        if recv.size:
            own = send[recv.size * self.rank : recv.size * (self.rank + 1)]
            in_place = self._binding.pointer(own) == self._binding.pointer(recv)
            if not in_place and self._overlap(send, recv):
                send = send.copy()
            source, at = self._binding.pointer(send), self._binding.pointer(recv)
            self._call(
                self._handle.reduceScatter, source, at, recv.size, _code(recv), _OPS[op], self._stream()
            )
        return True

    # ---- groups and life

    def _barrier(self) -> None:
        if self._host is not None:
            self._host._barrier()
            return
        one = self.xp.zeros(1, np.uint8)
        at = self._binding.pointer(one)
        self._call(self._handle.allReduce, at, at, 1, _UINT8, _OPS["sum"], self._stream())
        event = self._binding.new_event()
        event.record(self._binding.stream())
        self._nccl.wait_on_host(event, self._nccl.timeout_s, "barrier")

    def _split(self, color: int | None, key: int) -> Communicator | None:
        nccl = self._nccl
        self._lend_name()
        # A split may deadlock with work of the same communicator that is still under way.
        nccl.blocking(self._binding.synchronize, "split: the work queued before it")
        if self._host is not None:
            self._host._barrier()  # a rank that does not come is found here, and named
        asked = _NO_COLOR if color is None else color
        handle = nccl.blocking(lambda: self._call(self._handle.commSplit, asked, key), "split")
        host = None if self._host is None else self._host._split(color, key)
        if handle is None:
            return None
        rank, size = int(handle.rank_id()), int(handle.size())
        part = NCCLCommunicator(
            handle, rank, size, host, binding=self._binding, timeout_s=nccl.timeout_s, watch=nccl.watch
        )
        part._nccl.connect()
        return part

    def _close(self) -> None:
        if not self._failed:
            self._begin_messages()
        self._nccl.failed = self._nccl.failed or self._failed
        try:
            self._nccl.end()
        finally:
            if self._host is not None:
                self._host._failed = self._host._failed or self._nccl.failed
                self._host.close()


_thread = threading.local()
_Messages = dict[NCCLCommunicator, list[tuple[StreamWork, Call, Array, int]]]


def _waiting() -> _Messages:
    """Return the messages that this thread has started, on any communicator, and that have not begun."""
    if not hasattr(_thread, "waiting"):
        _thread.waiting = {}
    return _thread.waiting  # type: ignore[no-any-return]


def _begin_all(waiting: _Messages) -> None:
    while waiting:
        comm, messages = waiting.popitem()
        comm._begin(messages)


def _plain(buf: Array) -> Array:
    """Return a flat buffer in a type that NCCL has: itself, or its bytes."""
    return buf if dtypes.get(buf.dtype).nccl is not None else buf.view(np.uint8)


def _plain_v(
    buf: Array, counts: Sequence[int], displs: Sequence[int]
) -> tuple[Array, Sequence[int], Sequence[int]]:
    """As `_plain`, with counts and displacements in the elements of what it returns."""
    if dtypes.get(buf.dtype).nccl is not None:
        return buf, counts, displs
    width = buf.dtype.itemsize
    return buf.view(np.uint8), [n * width for n in counts], [d * width for d in displs]


def _code(buf: Array) -> int:
    code = dtypes.get(buf.dtype).nccl
    assert code is not None, "buffers go through _plain first"
    return code
