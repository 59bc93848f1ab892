"""What the communicators over GPU arrays have in common: the device, and a communicator of the host beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.comm.call import Call
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.protocol import Communicator
from lowshard.comm.work import Stream
from lowshard.errors import BufferMismatchError, CaptureError, CommError, LowshardError, StreamError

Array = Any


class DeviceCommunicator(Communicator):
    """Collectives over arrays of one GPU; checks between ranks go over the host, without touching the GPU."""

    _binding: Binding
    _host: Communicator | None
    _device: int
    _latest = "a call"
    """The text of the latest call: what the GPU tells late is about it, or about one before it."""
    _captured: list[Any]
    """Memory of temporaries that captured calls use whenever their graph runs."""

    @property
    def xp(self) -> ModuleType:
        """The array module of the buffers: cupy."""
        return self._binding.xp

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Array:
        """Return an array, not filled, on the device; of uint8 for fp8 and e8m0 where CuPy does not have them.

        Not collective.

        Raises:
            DTypeError: a dtype outside the table.
            BufferMismatchError: a shape that is none.
        """
        row = dtypes.get(dtype)
        with self._binding.on_device(self._device):
            try:
                return super().empty(shape, row)
            except (TypeError, ValueError) as error:
                if isinstance(error, LowshardError) or row.bits != 8:
                    raise
                return super().empty(shape, "uint8")

    @property
    def control(self) -> Communicator:
        """The communicator of the host; this one itself when there is none."""
        return self if self._host is None else self._host

    # ---- the stream that a caller names

    @contextmanager
    def _current(self, stream: Stream) -> Iterator[LowshardError | None]:
        wrong: LowshardError | None = None
        with self._binding.on_device(self._device), ExitStack() as stack:
            if stream is not None and self._in_group():
                wrong = CommError(
                    "messages of a grouped() block go together, on the stream that is current at its end; "
                    "leave stream= out"
                )
            elif stream is not None:
                try:
                    stack.enter_context(self._binding.on_stream(stream, self._device))
                except StreamError as error:
                    wrong = error
            yield wrong

    @contextmanager
    def meeting(self, what: str, stream: Stream = None) -> Iterator[LowshardError | None]:
        """Make the device and a stream current for a call of several steps; see `Communicator.meeting`."""
        with self._current(stream) as wrong:
            self._refuse_capture(what)
            yield wrong

    # ---- the device of the buffers is current while something is launched, whichever the caller's thread has

    def _before(self) -> None:
        """What is done before each call, with the device current."""

    def _refuse_capture(self, what: str) -> None:
        """Raise CaptureError where a CUDA graph records the current stream."""
        if self._binding.capturing(self._binding.stream()):
            raise CaptureError(
                f"a CUDA graph cannot record {what} over {self.transport}, and the current stream is being captured; "
                "call it before or after the capture (what can be captured: lowshard.comm.nccl)"
            )

    def _captures(self, call: Call) -> bool:
        """Say whether a CUDA graph records this call.

        Raises:
            CaptureError: it does, and this call cannot be recorded.
        """
        self._refuse_capture(call.name)
        return False

    def _do(self, call: Call, *buffers: Any) -> None:
        with self._binding.on_device(self._device):
            try:
                if self._captures(call):
                    with self._binding.keep_memory(self._captured):
                        super()._do(call, *buffers)
                    return
                self._before()
                super()._do(call, *buffers)
            except self._binding.cuda_error as error:
                raise self._failed_in(call, error) from error
            self._latest = call.text

    def _message(self, call: Call, buf: Array, peer: int) -> None:
        with self._binding.on_device(self._device):
            try:
                if not self._captures(call) and self._batch is None:
                    self._before()
                super()._message(call, buf, peer)
            except self._binding.cuda_error as error:
                raise self._failed_in(call, error) from error
            self._latest = call.text

    def _failed_in(self, call: Call, error: Exception) -> CommError:
        return CommError(
            f"CUDA refuses {call.text}: {error}; the error may come from work that was queued before"
        )

    def _flat(self, buf: Array, name: str, writes: bool = False) -> Array:
        flat = super()._flat(buf, name, writes)
        device = self._binding.device(flat)
        if device != self._device:
            raise BufferMismatchError(
                f"{name} lies on the communicator's device {self._device}, got an array on device {device}; "
                "copy it there first"
            )
        return flat

    def _ready(self, buf: Array, writes: bool = False) -> bool:
        if type(buf) is not self.xp.ndarray or self._binding.device(buf) != self._device:
            return False
        flags = buf.flags
        return bool(flags.c_contiguous and (not writes or getattr(flags, "writeable", True)))

    @property
    def _compares(self) -> bool:
        return self._host is not None

    def _compare(self, signature: int) -> bool:
        return True if self._host is None else self._host._compare(signature)

    def _gather_facts(self, record: np.ndarray) -> np.ndarray:
        return super()._gather_facts(record) if self._host is None else self._host._gather_facts(record)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """As `Communicator.split`."""
        self._refuse_capture("split")
        return super().split(color, key)

    def close(self) -> None:
        """As `Communicator.close`."""
        if not self._closed:
            self._refuse_capture("close")
        super().close()

    def _copy(self, target: Array, source: Array) -> None:
        if target.size and self._binding.pointer(target) != self._binding.pointer(source):
            self.xp.copyto(target, source)

    def _overlap(self, a: Array, b: Array) -> bool:
        at_a, at_b = self._binding.pointer(a), self._binding.pointer(b)
        return bool(a.nbytes and b.nbytes) and at_a < at_b + b.nbytes and at_b < at_a + a.nbytes

    def _lend_name(self) -> None:
        """Let the host's errors number the call, and name its line, as this communicator does; its groups, too."""
        if self._host is not None:
            self._host._sequence, self._host._started_at = self._sequence, self._started_at
