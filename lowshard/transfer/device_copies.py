"""Copies between host memory and arrays on GPUs, through page-locked buffers (`transfer.pinned`).

They are for memory that a GPU cannot read by itself: received bytes, and snapshots mapped from other processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.nccl_wait import wait_for
from lowshard.comm.work import Stream
from lowshard.errors import CommError, StreamError
from lowshard.kernels.buffer import allocate, is_gpu
from lowshard.kernels.staging import assign, contiguous
from lowshard.transfer.pinned import SLOT_BYTES, Round, Slots

Array = Any
Part = Callable[[np.ndarray], None]
"""Fills, or reads, the next bytes of an array, row-major."""


class DeviceCopies:
    """Copies to and from arrays on GPUs, on a stream of their own for each GPU."""

    def __init__(self, arrays: Iterable[Array], timeout_s: float) -> None:
        on_gpus = [array for array in arrays if is_gpu(array)]
        self._gpus: dict[int, _Gpu] = {}
        if on_gpus:
            binding = Binding.load(with_nccl=False)
            for device in {binding.device(array) for array in on_gpus}:
                self._gpus[device] = _Gpu(binding.of_device(device), device, timeout_s)

    def follow(self, stream: Stream = None) -> None:
        """Make later copies wait for what is queued on a stream. The host does not wait."""
        if stream is not None and not self._gpus:
            raise StreamError("stream= is for GPU arrays, and none of these lies on a GPU; leave it out")
        for gpu in self._gpus.values():
            gpu.follow(stream)

    @contextmanager
    def current(self, array: Array) -> Iterator[None]:
        """Make the copy stream current on an array's GPU, so that kernels on it run in order."""
        if not is_gpu(array):
            yield
            return
        with self._gpus[array.device.id].current():
            yield

    def store(self, target: Array, fill: Part) -> None:
        """Fill an array on a GPU. The last copy may still be running when it returns."""
        with self.current(target):
            whole = target if target.flags.c_contiguous else allocate(target.shape, target.dtype, target)
            self._gpus[target.device.id].run(whole, fill, stores=True)
            if whole is not target:
                assign(target, whole)

    def fetch(self, source: Array, take: Part) -> None:
        """Read an array on a GPU: `take` receives its bytes, after what was queued before."""
        with self.current(source):
            whole = source if source.flags.c_contiguous else contiguous(source)
            self._gpus[source.device.id].run(whole, take, stores=False)

    def upload(self, values: np.ndarray, beside: Array) -> Array:
        """Return a copy of host memory on the GPU of another array; the copy may still be running."""
        with self.current(beside):
            made = allocate(values.shape, values.dtype, beside)
        self.store(made, filled_from(values))
        return made

    def wait(self) -> None:
        """Wait until no copy is running."""
        for gpu in self._gpus.values():
            gpu.wait()


class _Gpu:
    """One GPU: its copy stream and unused page-locked buffers."""

    def __init__(self, binding: Binding, device: int, timeout_s: float) -> None:
        self._binding, self._device, self._timeout_s = binding, device, timeout_s
        with binding.on_device(device):
            self._stream = binding.new_stream()
        self._spare: list[Slots] = []
        self._lock = threading.Lock()

    def follow(self, stream: Stream) -> None:
        with self._binding.on_device(self._device), ExitStack() as stack:
            if stream is not None:
                stack.enter_context(self._binding.on_stream(stream, self._device))
            event = self._binding.new_event()
            event.record(self._binding.stream())
            self._stream.wait_event(event)

    @contextmanager
    def current(self) -> Iterator[None]:
        binding = self._binding
        with binding.on_device(self._device), binding.on_stream(self._stream, self._device):
            try:
                yield
            except binding.cuda_error as error:
                raise CommError(
                    f"CUDA refuses a copy between the host and GPU {self._device}: {error}; the error may come from "
                    "work that was queued before"
                ) from error

    def run(self, array: Array, part: Part, stores: bool) -> None:
        """Copy a contiguous array through page-locked buffers of its own."""
        with self._lock:
            slots = self._spare.pop() if self._spare else None
        if slots is None:
            slots = Slots(self._binding, lambda n: np.empty(n, np.uint8), self._timeout_s)
        try:
            slots.run(self._rounds(array, part, stores), "a version")
        finally:
            with self._lock:
                self._spare.append(slots)

    def _rounds(self, array: Array, part: Part, stores: bool) -> Iterator[Round]:
        at, size_bytes = self._binding.pointer(array), array.nbytes
        for begin in range(0, size_bytes, SLOT_BYTES):
            size = min(SLOT_BYTES, size_bytes - begin)
            piece = ((at + begin, 0, size),)
            yield Round(size, () if stores else piece, part, piece if stores else ())

    def wait(self) -> None:
        with self.current():
            event = self._binding.new_event()
            event.record(self._stream)
            wait_for(event, time.monotonic() + self._timeout_s, None, None, "a version: copies to a GPU")


def filled_from(values: np.ndarray) -> Part:
    """Return a function that fills memory with an array's bytes, row-major, call after call."""
    raw, at = np.ascontiguousarray(values).reshape(-1).view(np.uint8), 0

    def fill(room: np.ndarray) -> None:
        nonlocal at
        room[...] = raw[at : at + room.size]
        at += room.size

    return fill


def read_into(raw: np.ndarray) -> Part:
    """Return a function that reads memory into an array of bytes, call after call."""
    at = 0

    def take(room: np.ndarray) -> None:
        nonlocal at
        raw[at : at + room.size] = room
        at += room.size

    return take
