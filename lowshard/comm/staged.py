"""Staged: GPU arrays moved through host memory by a communicator of the host.

For ranks that outnumber the GPUs, and where there is no NCCL. A call waits for the caller's stream to get to its
buffers, copies what it sends to the host, has the host make it, and returns when what came is on the device. Sums are
made on the host, so they have the bits that the CPU path gives them. Each thread that
calls keeps as much page-locked host memory as the largest buffers needed.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np

from lowshard.comm.call import Call
from lowshard.comm.collectives import ALL_REDUCE, REDUCE, REDUCE_SCATTER, Collective, planned
from lowshard.comm.communicator import Communicator
from lowshard.comm.device import GpuBuffers
from lowshard.comm.messages import ByMailbox
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.nccl_wait import wait_for
from lowshard.comm.transport import Front, Planner, Run, Transport
from lowshard.comm.wait_guard import Watching
from lowshard.comm.work import Work
from lowshard.foreign_array import view_or_same

Array = Any
_PAGE_BYTES, _ALIGN_BYTES = 4096, 64
_NO_MEMORY = np.empty(0, np.uint8)
_kept: list[np.ndarray] = []
"""Memory of a copy that was not done in time: the device may still use it."""


class StagedTransport(Transport):
    """The ranks of a transport of the host, with buffers on GPUs."""

    name = "staged"

    def __init__(
        self, host: Transport, binding: Binding | None = None, *, device: int = 0, watch: Watching | None = None,
    ) -> None:  # fmt: skip
        binding = Binding.load(with_nccl=False) if binding is None else binding
        self._binding = binding.of_device(device)
        self.buffers: GpuBuffers = GpuBuffers("staged", self._binding, device)
        super().__init__(
            host.rank, host.size, group=host.group, timeout_s=host.timeout_s, activity=host.activity,
            buffers=self.buffers,
        )  # fmt: skip
        self.launch = self.buffers.launch
        self.host: Transport = host
        self._device, self._watch = device, watch
        self._side: Any = None
        self._thread = threading.local()
        if isinstance(host, ByMailbox):
            host.mailbox.post.threads += 1  # messages that are started run in threads of their own

    # ---- between the device and the host, on the current stream

    def _rooms(self, *bufs: Array) -> list[np.ndarray]:
        """Return page-locked host memory for the content of some arrays, until the next call of this thread."""
        ends = list(accumulate(-(-buf.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES for buf in bufs))
        memory = self._memory()
        if memory.size < ends[-1]:
            size = max(_PAGE_BYTES, 1 << (ends[-1] - 1).bit_length())
            made = self.host.empty(size + _PAGE_BYTES, np.uint8)
            first = -made.ctypes.data % _PAGE_BYTES  # whole pages: no other memory is locked with them
            memory = self._thread.memory = made[first : first + size]
            weakref.finalize(memory, self._binding.lock(memory)).atexit = False
        begins = [0, *ends[:-1]]
        return [memory[at : at + buf.nbytes].view(buf.dtype) for at, buf in zip(begins, bufs, strict=True)]

    def _memory(self) -> np.ndarray:
        return getattr(self._thread, "memory", _NO_MEMORY)

    def _fetch(self, buf: Array, content: np.ndarray) -> np.ndarray:
        """Copy an array to the host."""
        if buf.size:
            at = self._binding.pointer(buf)
            self._binding.fetch(content.ctypes.data, at, buf.nbytes, self._binding.stream().ptr)
            self._wait("the copy of buffers to the host")
        return content

    def _store(self, buf: Array, content: np.ndarray, parts: Iterable[tuple[int, int]] | None = None) -> None:
        """Copy parts (first element, elements) of an array back, by default all of it."""
        width, stream = buf.dtype.itemsize, self._binding.stream().ptr
        target, source = self._binding.pointer(buf), content.ctypes.data
        for begin, elems in ((0, buf.size),) if parts is None else parts:
            if elems:
                self._binding.store(target + begin * width, source + begin * width, elems * width, stream)
        self._wait("the copy of results to the device")

    def _wait(self, what: str) -> None:
        event = self._binding.new_event()
        event.record(self._binding.stream())
        try:
            wait_for(event, time.monotonic() + self.timeout_s, self._watch, None, what)
        except BaseException:
            _kept.append(self._memory())
            raise

    # ---- moves

    def all_gather_v(self, send: Array, recv: Array, counts: Sequence[int], displs: Sequence[int]) -> None:
        given, found = self._rooms(send, recv)
        self.host.all_gather_v(self._fetch(send, given), found, counts, displs)
        self._store(recv, found, zip(displs, counts, strict=True))

    def all_to_all_v(
        self, send: Array, send_counts: Sequence[int], send_displs: Sequence[int], recv: Array,
        recv_counts: Sequence[int], recv_displs: Sequence[int],
    ) -> None:  # fmt: skip
        given, found = self._rooms(send, recv)
        self._fetch(send, given)
        self.host.all_to_all_v(given, send_counts, send_displs, found, recv_counts, recv_displs)
        self._store(recv, found, zip(recv_displs, recv_counts, strict=True))

    def send(self, buf: Array, dst: int) -> None:
        self.host.send(self._fetch(buf, *self._rooms(buf)), dst)

    def recv(self, buf: Array, src: int) -> None:
        (content,) = self._rooms(buf)
        self.host.recv(content, src)
        self._store(buf, content)

    def run_batch(self, front: Front, batch: Sequence[tuple[Call, Array, int]]) -> None:
        """Copy all that is sent to the host, let the host's messages go together, copy what came to the device."""
        self.buffers.refuse_capture("messages")
        with self._binding.on_device(self._device):
            for call, _, peer in batch:
                front.settle(call.name, peer)  # it was started before
            # Also what is received into: where a message is refused the others arrive, and this one stays as it was.
            whole = self._rooms(*(buf for _, buf, _ in batch))
            for (_, buf, _), content in zip(batch, whole, strict=True):
                self._fetch(buf, content)
            try:
                pairs = zip(batch, whole, strict=True)
                self.host.run_batch(front, [(call, content, peer) for (call, _, peer), content in pairs])
            finally:
                for (call, buf, _), content in zip(batch, whole, strict=True):
                    if call.name == "recv":
                        self._store(buf, content)

    # ---- calls that are not waited for

    def start(self, front: Front, name: str, call: Callable[[], Any]) -> Work:
        """Run a call by the communicator's thread, on a stream of the communicator's own."""
        return front.in_thread(name, self._beside(name, call))

    def start_message(self, front: Front, name: str, buf: Array, peer: int) -> Work:
        """Run a send or a recv by a thread."""
        buf = view_or_same(buf, writes=name == "recv")
        return front.in_line(name, peer, self._beside(name, lambda: front.message(name, buf, peer)))

    def _beside(self, name: str, call: Callable[[], Any]) -> Callable[[], Any]:
        """Return a call for another thread, whose copies come after what the current stream was given."""
        self.buffers.refuse_capture(f"start.{name}")
        with self._binding.on_device(self._device):
            if self._side is None:
                self._side = self._binding.new_stream()
            ready = self._binding.new_event()
            ready.record(self._binding.stream())
            self._side.wait_event(ready)

        def run() -> Any:
            self._binding.select(self._device)  # a new thread begins on device 0
            with self._side:
                return call()

        return run

    # ---- reductions, which check between ranks too

    def _reduced(self, what: Collective, call: Call, dtype: Any, elems: int, *detail: Any) -> Run:
        plan = planned(self.host, what, call, dtype, elems, *detail)

        def run(send: Array, recv: Array | None) -> None:
            self.lend_name()
            if recv is None:
                plan(self._fetch(send, *self._rooms(send)), None)
                return
            given, found = self._rooms(send, recv)
            plan(self._fetch(send, given), found)
            self._store(recv, found)

        return run

    plans: ClassVar[Mapping[str, Planner]] = {
        what.name: lambda t, call, dtype, elems, *detail, what=what: t._reduced(
            what, call, dtype, elems, *detail
        )
        for what in (ALL_REDUCE, REDUCE_SCATTER, REDUCE)
    }

    # ---- checks between ranks

    def compare(self, signature: int) -> bool:
        return self.host.compare(signature)

    def gather_facts(self, record: np.ndarray) -> np.ndarray:
        return self.host.gather_facts(record)

    # ---- groups and life

    def barrier(self) -> None:
        self.host.barrier()

    def way_between(self, one: int, other: int) -> tuple[str, str]:
        way, why = self.host.way_between(one, other)
        return f"host memory, and from there {way}", f"{self.why or 'NCCL is not used'}; and {why}"

    def split(self, color: int | None, key: int) -> Transport | None:
        self.lend_name()
        host = self.host.split(color, key)
        if host is None:
            return None
        return StagedTransport(host, self._binding, device=self._device, watch=self._watch)

    def end(self) -> None:
        self._thread = threading.local()
        self.host.failed = self.host.failed or self.failed
        self.host.close()


def staged_communicator(host: Communicator, binding: Binding | None = None, **options: Any) -> Communicator:
    """Return a communicator over GPU arrays that pass through the memory of the host."""
    return Communicator(StagedTransport(host._transport, binding, **options), host)
