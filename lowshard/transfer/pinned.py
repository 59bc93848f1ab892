"""Page-locked host memory between a GPU and what the host reads or writes: two slots that take turns.

While the host works on what lies in one slot, the GPU fills the other. Of the stream only what the host needs
is waited for; nothing else on the device is.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.nccl_wait import wait_for
from lowshard.comm.wait_guard import Watching
from lowshard.errors import CommError

SLOT_BYTES = 8 << 20
_PAGE_BYTES = 4096

Piece = tuple[int, int, int]
"""A stretch that is copied: device address, offset in the slot, bytes."""


@dataclass(frozen=True)
class Round:
    """What one slot is used for: filled by the GPU, worked on by the host, taken back by the GPU."""

    n_bytes: int
    """Length of the slot."""
    fetch: tuple[Piece, ...]
    """Copied to the slot before `work`."""
    work: Callable[[np.ndarray], None]
    """What the host does with the slot's bytes."""
    store: tuple[Piece, ...]
    """Copied to the device after `work`."""


class _Slot:
    def __init__(self, binding: Binding) -> None:
        self.memory = np.empty(0, np.uint8)
        self.address = 0
        self.filled = binding.new_event()
        """Done when the GPU has filled the slot."""
        self.free = binding.new_event()
        """Done when the GPU does not need the slot any more."""
        self.used = False
        self.unlock: Callable[[], None] = _nothing


class Slots:
    """Two slots, made and grown as they are needed, up to about `slot_bytes` each."""

    def __init__(
        self,
        binding: Binding,
        make: Callable[[int], np.ndarray],
        timeout_s: float,
        watch: Watching | None = None,
    ) -> None:
        """Make slots without memory."""
        self._binding, self._make, self._timeout_s, self._watch = binding, make, timeout_s, watch
        self._slots: list[_Slot] = []
        self._turn = 0
        # Not by __del__: in a cycle of references the events, which it would ask, may be destroyed before it runs.
        weakref.finalize(self, _give_back, self._slots).atexit = False

    def run(self, rounds: Iterable[Round], what: str) -> None:
        """Do the rounds one after the other on the current stream.

        When it returns, the copies back to the device may still be queued.

        Args:
            rounds: what to do.
            what: the call they belong to, for messages.
        """
        stream = self._binding.stream()
        before: tuple[Round, _Slot] | None = None
        try:
            for part in rounds:
                slot = self._take(part.n_bytes, what)
                self._fill(part, slot, stream)
                if before is not None:
                    self._finish(*before, stream, what)
                before = (part, slot)
            if before is not None:
                self._finish(*before, stream, what)
        except BaseException:
            for slot in self._slots:  # what has been queued still comes
                slot.free.record(stream)
                slot.used = True
            raise

    def close(self) -> None:
        """Give the memory back once the device does not need it any more."""
        while self._slots:
            self._release(self._slots[-1], "close")
            self._slots.pop()

    def _release(self, slot: _Slot, what: str) -> None:
        if slot.used:
            self._wait(slot.free, what)
        slot.used = False
        slot.unlock()
        slot.unlock = _nothing

    def _take(self, n_bytes: int, what: str) -> _Slot:
        if not self._slots:
            self._slots += [_Slot(self._binding), _Slot(self._binding)]
        self._turn = 1 - self._turn
        slot = self._slots[self._turn]
        if slot.memory.size < n_bytes:
            self._release(slot, what)
            size = max(_PAGE_BYTES, 1 << (n_bytes - 1).bit_length())
            memory = self._make(size + _PAGE_BYTES)
            first = -memory.ctypes.data % _PAGE_BYTES  # whole pages: no other memory is locked with them
            slot.memory = memory[first : first + size]
            slot.address, slot.unlock = slot.memory.ctypes.data, self._binding.lock(slot.memory)
        return slot

    def _fill(self, part: Round, slot: _Slot, stream: Any) -> None:
        if part.fetch:
            if slot.used:
                stream.wait_event(slot.free)  # it may have been used on another stream
            for device, offset, n_bytes in part.fetch:
                self._binding.fetch(slot.address + offset, device, n_bytes, stream.ptr)
            slot.filled.record(stream)

    def _finish(self, part: Round, slot: _Slot, stream: Any, what: str) -> None:
        if part.fetch:
            self._wait(slot.filled, what)
        elif slot.used:
            self._wait(slot.free, what)
        part.work(slot.memory[: part.n_bytes])
        for device, offset, n_bytes in part.store:
            self._binding.store(device, slot.address + offset, n_bytes, stream.ptr)
        if part.store:
            slot.free.record(stream)
            slot.used = True

    def _wait(self, event: Any, what: str) -> None:
        wait_for(
            event,
            time.monotonic() + self._timeout_s,
            self._watch,
            None,
            f"{what}: the copy of buffers to the host",
        )


_kept: list[_Slot] = []


def _give_back(slots: list[_Slot]) -> None:
    """Unlock slots that nobody closed; those that the device may still write to are kept for ever."""
    for slot in slots:
        with suppress(CommError):
            if not slot.used or slot.free.done:
                slot.unlock()
                continue
        _kept.append(slot)


def _nothing() -> None:
    """What there is to undo for memory that is not locked."""
