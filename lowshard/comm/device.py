"""What the communicators over GPU arrays have in common: the device, and a communicator of the host beside it."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.protocol import Communicator
from lowshard.errors import BufferMismatchError, LowshardError

Array = Any


class DeviceCommunicator(Communicator):
    """Collectives over arrays of one GPU; checks between ranks go over the host, without touching the GPU."""

    _binding: Binding
    _host: Communicator | None
    _device: int

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
