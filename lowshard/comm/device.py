"""Buffers of one GPU, as transports over GPU arrays hold them: the device, its streams, what CUDA graphs record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from lowshard import dtypes
from lowshard.comm.call import Call
from lowshard.comm.check import HostBuffers
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.work import Stream
from lowshard.errors import BufferMismatchError, CaptureError, CommError, LowshardError, StreamError

Array = Any


class GpuBuffers(HostBuffers):
    """CuPy arrays of one device. Checks between ranks go over the host, without touching it.

    Attributes:
        binding: how CuPy is reached.
        device: the number of the GPU.
        latest: the text of the latest call: what the GPU tells late is about it, or about one before it.
        captured: memory of temporaries that captured calls use whenever their graph runs.
    """

    def __init__(
        self, transport: str, binding: Binding, device: int, captures: Callable[[Call], bool] | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Take a device."""
        super().__init__(transport)
        self.binding, self.device = binding, device
        self.latest = "a call"
        self.captured: list[Any] = []
        self._captures, self._before = captures, before

    @property
    def xp(self) -> ModuleType:
        """The array module of the buffers: cupy."""
        return self.binding.xp

    def empty(self, shape: int | Sequence[int], dtype: Any) -> Array:
        """Return an array, not filled, on the device; of uint8 for fp8 and e8m0 where CuPy does not have them."""
        row = dtypes.get(dtype)
        with self.binding.on_device(self.device):
            try:
                return super().empty(shape, row)
            except (TypeError, ValueError) as error:
                if isinstance(error, LowshardError) or row.bits != 8:
                    raise
                return super().empty(shape, "uint8")

    def flat(self, buf: Array, name: str, writes: bool = False) -> Array:
        """Return a buffer with one dim, or raise what is wrong with it; one of another device is."""
        flat = super().flat(buf, name, writes)
        device = self.binding.device(flat)
        if device != self.device:
            raise BufferMismatchError(
                f"{name} lies on the communicator's device {self.device}, got an array on device {device}; "
                "copy it there first"
            )
        return flat

    def ready(self, buf: Array, writes: bool = False) -> bool:
        """Say whether a buffer passes as it is."""
        if type(buf) is not self.xp.ndarray or self.binding.device(buf) != self.device:
            return False
        flags = buf.flags
        return bool(flags.c_contiguous and (not writes or getattr(flags, "writeable", True)))

    # ---- the stream that a caller names

    @contextmanager
    def current(self, stream: Stream, grouped: bool) -> Iterator[LowshardError | None]:
        """Make the device and, unless it is None, a stream current; see `HostBuffers.current`."""
        wrong: LowshardError | None = None
        with self.binding.on_device(self.device), ExitStack() as stack:
            if stream is not None and grouped:
                wrong = CommError(
                    "messages of a grouped() block go together, on the stream that is current at its end; "
                    "leave stream= out"
                )
            elif stream is not None:
                try:
                    stack.enter_context(self.binding.on_stream(stream, self.device))
                except StreamError as error:
                    wrong = error
            yield wrong

    @contextmanager
    def meeting(self, what: str, stream: Stream, grouped: bool) -> Iterator[LowshardError | None]:
        """As `current`, for a call in which hosts meet, so that no CUDA graph records it."""
        with self.current(stream, grouped) as wrong:
            self.refuse_capture(what)
            yield wrong

    # ---- the device of the buffers is current while something is launched, whichever the caller's thread has

    def refuse_capture(self, what: str) -> None:
        """Raise CaptureError where a CUDA graph records the current stream."""
        if self.binding.capturing(self.binding.stream()):
            raise CaptureError(
                f"a CUDA graph cannot record {what} over {self.transport}, and the current stream is being captured; "
                "call it before or after the capture (what can be captured: lowshard.comm.nccl)"
            )

    def launch(self, call: Call, step: Callable[..., None], *args: Any, begins: bool = True) -> None:
        """Run a step of a call with the device current; see `Transport.launch`."""
        binding = self.binding
        with binding.on_device(self.device):
            try:
                if self._captures is None:
                    self.refuse_capture(call.name)
                elif self._captures(call):
                    with binding.keep_memory(self.captured):
                        step(*args)
                    return
                if begins and self._before is not None:
                    self._before()
                step(*args)
            except binding.cuda_error as error:
                raise CommError(
                    f"CUDA refuses {call.text}: {error}; the error may come from work that was queued before"
                ) from error
            self.latest = call.text

    # ---- arrays

    def copy(self, target: Array, source: Array) -> None:
        """Copy an array, unless it lies there already."""
        if target.size and self.binding.pointer(target) != self.binding.pointer(source):
            self.xp.copyto(target, source)

    def copied(self, array: Array) -> Array:
        """Return a copy of a contiguous array; CuPy's own would load a kernel, and wait for the device, at first."""
        made = self.xp.empty_like(array)
        at, stream = self.binding.pointer, self.binding.stream().ptr
        self.binding.copy(at(made), at(array), array.nbytes, stream)
        return made

    def overlap(self, a: Array, b: Array) -> bool:
        """Say whether two arrays share memory."""
        at_a, at_b = self.binding.pointer(a), self.binding.pointer(b)
        return bool(a.nbytes and b.nbytes) and at_a < at_b + b.nbytes and at_b < at_a + a.nbytes
