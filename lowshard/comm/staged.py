"""Staged: GPU arrays moved through host memory by a communicator of the host.

For ranks that outnumber the GPUs, and where there is no NCCL. Buffers pass through page-locked memory in
pieces of bounded size; sums are made on the host, so they have the bits that the CPU path gives them. Each
call waits for the caller's stream to get to its buffers, and returns when the results are queued for the
device. Tested over streams and arrays that stand in for CuPy's; not run on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from lowshard.comm.call import Call
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.nccl_wait import is_done
from lowshard.comm.pinned import SLOT_BYTES, Round, Slots
from lowshard.comm.protocol import Communicator
from lowshard.comm.staged_moves import StagedMoves
from lowshard.comm.stream_work import SideStream
from lowshard.comm.wait_guard import Watching
from lowshard.comm.work import ThreadWork, Work, Worker

Array = Any
Run = Callable[..., Any]


class StagedCommunicator(StagedMoves):
    """The ranks of a communicator of the host, with buffers on GPUs."""

    def __init__(
        self,
        host: Communicator,
        binding: Binding | None = None,
        *,
        device: int = 0,
        watch: Watching | None = None,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        """Wrap a communicator of the host.

        Args:
            host: moves and reduces; `close` closes it.
            binding: by default the installed libraries'; NCCL is not needed.
            device: the number of the GPU that all buffers lie on.
            watch: the side channel that tells of failed ranks, if there is one.
            slot_bytes: about how much is moved at a time; the same on all ranks.

        Raises:
            DependencyError: CuPy is missing.
        """
        super().__init__(
            host.rank, host.size, group=host._group_name, timeout_s=host.timeout_s, activity=host._activity
        )
        binding = Binding.load(with_nccl=False) if binding is None else binding
        self._binding = binding.of_device(device)
        self._host, self._device, self._watch, self._slot_bytes = host, device, watch, slot_bytes
        self._captured = []
        self._own_slots = self._new_slots()
        self._side = self._new_side()
        self._thread = threading.local()

    @property
    def transport(self) -> str:
        """The transport's name."""
        return "staged"

    def _new_side(self) -> SideStream:
        return SideStream(self._binding, lambda event, what: is_done(event, self._watch, None, what))

    def _new_slots(self) -> Slots:
        return Slots(self._binding, lambda n: self._host.empty(n, np.uint8), self.timeout_s, self._watch)

    @property
    def _slots(self) -> Slots:
        """The slots of this thread: a started message has its own."""
        return getattr(self._thread, "slots", self._own_slots)

    # ---- messages in groups

    def _run_batch(self, batch: Sequence[tuple[Call, Array, int]]) -> None:
        """Move all that is sent to the host, let the host's messages go together, move what came to the device."""
        self._refuse_capture("messages")
        with self._binding.on_device(self._device):
            self._exchange_batch(batch)

    def _exchange_batch(self, batch: Sequence[tuple[Call, Array, int]]) -> None:
        for call, _, peer in batch:
            self._settle(call.name, peer)  # it stages through the same slots
        whole: list[np.ndarray] = []
        pieces: list[tuple[Call, Array, int]] = []
        for call, buf, peer in batch:
            sends = call.name == "send"
            content = np.empty(buf.size, buf.dtype)
            whole.append(content)
            # Also what is received into: where a message is refused the others arrive, and this one stays as it was.
            self._transfer(buf, content, to_host=True)
            beside = self._host._make(call.name, call.text, 0, 0, 0)
            beside.run = self._host._send if sends else self._host._recv
            chunk = self._chunk(buf.dtype, 1)
            pieces += [(beside, content[at : at + chunk], peer) for at in range(0, buf.size + 1, chunk)]
        try:
            self._host._run_batch(pieces)
        finally:
            for (call, buf, _), content in zip(batch, whole, strict=True):
                if call.name == "recv":
                    self._transfer(buf, content, to_host=False)

    def _transfer(self, buf: Array, content: np.ndarray, to_host: bool) -> None:
        """Copy a whole buffer to or from ordinary memory."""
        flat, at = content.view(np.uint8), 0

        def work(slot: np.ndarray) -> None:
            nonlocal at
            part = flat[at : at + slot.size]
            at += slot.size
            if to_host:
                part[...] = slot
            else:
                slot[...] = part

        self._slots.run(self._whole(buf, work, reads=to_host, writes=not to_host), "grouped send and recv")

    # ---- calls that are not waited for

    def _start(self, name: str, call: Callable[[], Any]) -> StagedWork:
        """Run a call by the communicator's thread, on a stream of the communicator's own."""
        self._refuse_capture(f"start.{name}")
        with self._binding.on_device(self._device):
            self._side.fork()
        return StagedWork(self._binding, super()._start(name, lambda: self._on_side(self._side, call, name)))

    def _start_message(self, name: str, buf: Array, peer: int) -> StagedWork:
        """Run a send or a recv by a thread, with a stream and slots, of its own."""
        self._refuse_capture(f"start.{name}")
        side = self._new_side()
        with self._binding.on_device(self._device):
            side.fork()
        move = self.send if name == "send" else self.recv

        def run() -> Any:
            self._thread.slots = slots = self._new_slots()
            ended = self._on_side(side, lambda: move(buf, peer), name)
            slots.close()
            return ended

        work = ThreadWork(run, f"{name} of rank {self.rank}")
        line = self._lines.get((name, peer))
        if line is None:  # those of one pair stay in order
            line = self._lines[name, peer] = Worker(f"lowshard {name} rank {self.rank} {peer}")
        line.submit(work)
        return StagedWork(self._binding, work)

    def _on_side(self, side: SideStream, call: Callable[[], Any], name: str) -> Any:
        self._binding.select(self._device)  # a new thread begins on device 0
        return side.run(call, f"{name} of rank {self.rank}")

    # ---- reductions: the host's own, which check between ranks too

    def _plan_all_reduce(self, call: Call, dtype: Any, elems: int, op: str, order: str) -> Run:
        chunk = self._chunk(dtype, 1)
        plans = {n: self._host._plan_all_reduce(call, dtype, n, op, order) for n in _lengths(elems, chunk)}

        def run(send: Array, recv: Array) -> None:
            self._lend_name()
            s, r = send.reshape(-1), recv.reshape(-1)
            if self._overlap(s, r) and self._binding.pointer(s) != self._binding.pointer(r):
                s = s.copy()

            def work(slot: np.ndarray) -> None:
                piece = slot.view(dtype)
                plans[piece.size](piece, piece)

            def rounds() -> Iterator[Round]:
                for done, now in _cuts(elems, chunk):
                    yield Round(
                        now * dtype.itemsize,
                        self._pieces(s, [(done, 0, now)]),
                        work,
                        self._pieces(r, [(done, 0, now)]),
                    )

            self._slots.run(rounds(), "all_reduce")

        return run

    def _plan_reduce_scatter(self, call: Call, dtype: Any, elems: int, op: str, order: str) -> Run:
        size, chunk = self.size, self._chunk(dtype, self.size + 1)
        plans = {
            n: self._host._plan_reduce_scatter(call, dtype, n, op, order) for n in _lengths(elems, chunk)
        }

        def run(send: Array, recv: Array) -> None:
            self._lend_name()
            s, r = send.reshape(-1), recv.reshape(-1)
            if self._overlap(s, r):
                s = s.copy()

            def work(slot: np.ndarray) -> None:
                whole = slot.view(dtype)
                now = whole.size // (size + 1)
                plans[now](whole[now:], whole[:now])

            def rounds() -> Iterator[Round]:
                for done, now in _cuts(elems, chunk):
                    parts = [(elems * i + done, now * (1 + i), now) for i in range(size)]
                    yield Round(
                        now * (size + 1) * dtype.itemsize,
                        self._pieces(s, parts),
                        work,
                        self._pieces(r, [(done, 0, now)]),
                    )

            self._slots.run(rounds(), "reduce_scatter")

        return run

    def _plan_reduce(self, call: Call, dtype: Any, elems: int, op: str, root: int, order: str) -> Run:
        chunk, at_root = self._chunk(dtype, 1), self.rank == root
        plans = {n: self._host._plan_reduce(call, dtype, n, op, root, order) for n in _lengths(elems, chunk)}

        def run(send: Array, recv: Array | None) -> None:
            self._lend_name()
            s, r = send.reshape(-1), None if recv is None else recv.reshape(-1)
            if r is not None and self._overlap(s, r) and self._binding.pointer(s) != self._binding.pointer(r):
                s = s.copy()

            def work(slot: np.ndarray) -> None:
                piece = slot.view(dtype)
                plans[piece.size](piece, piece if at_root else None)

            def rounds() -> Iterator[Round]:
                for done, now in _cuts(elems, chunk):
                    part = [(done, 0, now)]
                    yield Round(
                        now * dtype.itemsize,
                        self._pieces(s, part),
                        work,
                        () if r is None else self._pieces(r, part),
                    )

            self._slots.run(rounds(), "reduce")

        return run

    # ---- groups and life

    def _barrier(self) -> None:
        self._host._barrier()

    def _split(self, color: int | None, key: int) -> Communicator | None:
        self._lend_name()
        host = self._host._split(color, key)
        if host is None:
            return None
        return StagedCommunicator(
            host, self._binding, device=self._device, watch=self._watch, slot_bytes=self._slot_bytes
        )

    def _close(self) -> None:
        if not self._failed:
            self._own_slots.close()
        self._host._failed = self._host._failed or self._failed
        self._host.close()


class StagedWork:
    """A call that a thread runs, and what it leaves on a stream."""

    def __init__(self, binding: Binding, work: Work) -> None:
        self._binding, self._work = binding, work

    def done(self) -> bool:
        """Say whether the call has ended; its last copies to the device may still be queued."""
        return self._work.done()

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait for the host's part of the call, and make the current stream wait for the device's.

        Raises:
            TimedOut: it has not ended in time; it goes on, and may be waited for again.
            LowshardError: what the call raised.
        """
        event, result = self._work.wait(timeout_s)
        self._binding.stream().wait_event(event)
        return result


def _cuts(elems: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield (first element, elements) of each piece; one of no elements where there are none."""
    for done in range(0, max(elems, 1), chunk):
        yield done, min(elems - done, chunk)


def _lengths(elems: int, chunk: int) -> set[int]:
    """Return the lengths that occur among the pieces."""
    return {now for _, now in _cuts(elems, chunk)}
