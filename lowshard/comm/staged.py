"""Staged: GPU arrays moved through host memory by a communicator of the host.

For ranks that outnumber the GPUs, and where there is no NCCL. Buffers pass through page-locked memory in
pieces of bounded size; sums are made on the host, so they have the bits that the CPU path gives them. Each
call waits for the caller's stream to get to its buffers, and returns when the results are queued for the
device. Tested over streams and arrays that stand in for CuPy's; not run on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from lowshard.comm.call import Call
from lowshard.comm.collectives import ALL_REDUCE, REDUCE, REDUCE_SCATTER, planned
from lowshard.comm.communicator import Communicator
from lowshard.comm.device import GpuBuffers
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.nccl_wait import is_done
from lowshard.comm.pinned import SLOT_BYTES, Piece, Round, Slots
from lowshard.comm.stream_work import SideStream
from lowshard.comm.transport import Front, Planner, Run, Transport
from lowshard.comm.wait_guard import Watching
from lowshard.comm.work import Work

Array = Any
Parts = list[tuple[int, int, int]]
"""(first element in the array, first element in the slot, elements)"""


class StagedTransport(Transport):
    """The ranks of a transport of the host, with buffers on GPUs."""

    name = "staged"

    def __init__(
        self,
        host: Transport,
        binding: Binding | None = None,
        *,
        device: int = 0,
        watch: Watching | None = None,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        """Wrap a transport of the host.

        Args:
            host: moves and reduces; `end` closes it.
            binding: by default the installed libraries'; NCCL is not needed.
            device: the number of the GPU that all buffers lie on.
            watch: the side channel that tells of failed ranks, if there is one.
            slot_bytes: about how much is moved at a time; the same on all ranks.

        Raises:
            DependencyError: CuPy is missing.
        """
        binding = Binding.load(with_nccl=False) if binding is None else binding
        self._binding = binding.of_device(device)
        self.buffers: GpuBuffers = GpuBuffers("staged", self._binding, device)
        super().__init__(
            host.rank, host.size, group=host.group, timeout_s=host.timeout_s, activity=host.activity,
            buffers=self.buffers,
        )  # fmt: skip
        self.launch = self.buffers.launch
        self.host: Transport = host
        self._device, self._watch, self._slot_bytes = device, watch, slot_bytes
        self._own_slots = self._new_slots()
        self._side = self._new_side()
        self._thread = threading.local()

    def _new_side(self) -> SideStream:
        return SideStream(self._binding, lambda event, what: is_done(event, self._watch, None, what))

    def _new_slots(self) -> Slots:
        return Slots(self._binding, lambda n: self.host.empty(n, np.uint8), self.timeout_s, self._watch)

    @property
    def _slots(self) -> Slots:
        """The slots of this thread: a started message has its own."""
        return getattr(self._thread, "slots", self._own_slots)

    # ---- pieces

    def _chunk(self, dtype: np.dtype[Any], width: int) -> int:
        """Return the elements of a part that are moved at a time where a slot holds `width` parts."""
        return max(1, self._slot_bytes // (width * dtype.itemsize))

    def _pieces(self, buf: Array, parts: Parts) -> tuple[Piece, ...]:
        """Return parts of an array as copies, neighbours joined."""
        at, width = self._binding.pointer(buf), buf.dtype.itemsize
        joined: list[list[int]] = []
        for start, offset, count in parts:
            if not count:
                continue
            last = joined[-1] if joined else None
            if last is not None and (last[0] + last[2], last[1] + last[2]) == (start, offset):
                last[2] += count
            else:
                joined.append([start, offset, count])
        return tuple((at + start * width, offset * width, count * width) for start, offset, count in joined)

    # ---- moves

    def all_gather_v(self, send: Array, recv: Array, counts: Sequence[int], displs: Sequence[int]) -> None:
        own = recv[displs[self.rank] : displs[self.rank] + counts[self.rank]]
        in_place = send.size and self._binding.pointer(send) == self._binding.pointer(own)
        if not in_place and self.buffers.overlap(send, recv):
            send = send.copy()
        dtype, chunk = recv.dtype, self._chunk(recv.dtype, self.size)

        def rounds() -> Iterator[Round]:
            for done in range(0, max(counts), chunk):
                now = [min(max(n - done, 0), chunk) for n in counts]
                starts = _starts(now)
                begin, length = starts[self.rank], now[self.rank]

                def work(slot: np.ndarray, now: list[int] = now, starts: list[int] = starts) -> None:
                    whole = slot.view(dtype)
                    mine = whole[starts[self.rank] : starts[self.rank] + now[self.rank]]
                    self.host.all_gather_v(mine, whole, now, starts)

                back = [
                    (displs[i] + done, starts[i], now[i])
                    for i in range(self.size)
                    if i != self.rank or not in_place
                ]
                yield Round(
                    sum(now) * dtype.itemsize,
                    self._pieces(send, [(done, begin, length)]),
                    work,
                    self._pieces(recv, back),
                )

        self._slots.run(rounds(), "all_gather")

    def all_to_all_v(
        self,
        send: Array,
        send_counts: Sequence[int],
        send_displs: Sequence[int],
        recv: Array,
        recv_counts: Sequence[int],
        recv_displs: Sequence[int],
    ) -> None:
        # How many rounds it takes is not a rank's own affair.
        mine = np.array([max(*send_counts, *recv_counts)], np.int64)
        longest = int(self.host.gather_facts(mine).max())
        self._exchange(longest, send, send_counts, send_displs, recv, recv_counts, recv_displs)

    def _plan_all_to_all(self, call: Call, dtype: Any, elems: int) -> Run:
        each = elems // self.size
        counts, displs = [each] * self.size, [each * i for i in range(self.size)]

        def run(send: Array, recv: Array) -> None:
            self.verify(call)
            self._exchange(each, send.reshape(-1), counts, displs, recv.reshape(-1), counts, displs)

        return run

    def _exchange(
        self,
        longest: int,
        send: Array,
        send_counts: Sequence[int],
        send_displs: Sequence[int],
        recv: Array,
        recv_counts: Sequence[int],
        recv_displs: Sequence[int],
    ) -> None:
        if self.buffers.overlap(send, recv):
            send = send.copy()
        me, dtype, chunk = self.rank, send.dtype, self._chunk(send.dtype, 2 * self.size)
        keeps = send_counts[me]
        self.buffers.copy(
            recv[recv_displs[me] : recv_displs[me] + keeps], send[send_displs[me] : send_displs[me] + keeps]
        )

        def rounds() -> Iterator[Round]:
            for done in range(0, longest, chunk):
                go = [0 if i == me else min(max(n - done, 0), chunk) for i, n in enumerate(send_counts)]
                come = [0 if i == me else min(max(n - done, 0), chunk) for i, n in enumerate(recv_counts)]
                at, to, half = _starts(go), _starts(come), sum(go)

                def work(
                    slot: np.ndarray,
                    go: list[int] = go,
                    at: list[int] = at,
                    come: list[int] = come,
                    to: list[int] = to,
                    half: int = half,
                ) -> None:
                    whole = slot.view(dtype)
                    self.host.all_to_all_v(whole[:half], go, at, whole[half:], come, to)

                yield Round(
                    (half + sum(come)) * dtype.itemsize,
                    self._pieces(send, [(send_displs[i] + done, at[i], go[i]) for i in range(self.size)]),
                    work,
                    self._pieces(
                        recv, [(recv_displs[i] + done, half + to[i], come[i]) for i in range(self.size)]
                    ),
                )

        self._slots.run(rounds(), "all_to_all")

    def broadcast(self, buf: Array, root: int) -> None:
        def work(slot: np.ndarray) -> None:
            self.host.broadcast(slot.view(buf.dtype), root)

        reads, writes = self.rank == root, self.rank != root
        self._slots.run(self._whole(buf, work, reads, writes), "broadcast")

    def gather(self, send: Array, recv: Array | None, root: int) -> None:
        n, dtype, chunk = send.size, send.dtype, self._chunk(send.dtype, self.size + 1)

        def rounds() -> Iterator[Round]:
            for done in range(0, n, chunk):
                now = min(n - done, chunk)
                back: tuple[Piece, ...] = ()
                if recv is not None:
                    back = self._pieces(recv, [(n * i + done, now * (1 + i), now) for i in range(self.size)])

                def work(slot: np.ndarray, now: int = now) -> None:
                    whole = slot.view(dtype)
                    self.host.gather(whole[:now], None if recv is None else whole[now:], root)

                size = now * (1 if recv is None else 1 + self.size)
                yield Round(size * dtype.itemsize, self._pieces(send, [(done, 0, now)]), work, back)

        self._slots.run(rounds(), "gather")

    def scatter(self, send: Array | None, recv: Array, root: int) -> None:
        n, dtype, chunk = recv.size, recv.dtype, self._chunk(recv.dtype, self.size + 1)

        def rounds() -> Iterator[Round]:
            for done in range(0, n, chunk):
                now = min(n - done, chunk)
                out: tuple[Piece, ...] = ()
                if send is not None:
                    out = self._pieces(send, [(n * i + done, now * (1 + i), now) for i in range(self.size)])

                def work(slot: np.ndarray, now: int = now) -> None:
                    whole = slot.view(dtype)
                    self.host.scatter(None if send is None else whole[now:], whole[:now], root)

                size = now * (1 if send is None else 1 + self.size)
                yield Round(size * dtype.itemsize, out, work, self._pieces(recv, [(done, 0, now)]))

        self._slots.run(rounds(), "scatter")

    def send(self, buf: Array, dst: int) -> None:
        def work(slot: np.ndarray) -> None:
            self.host.send(slot.view(buf.dtype), dst)

        self._slots.run(self._whole(buf, work, reads=True, writes=False, message=True), "send")

    def recv(self, buf: Array, src: int) -> None:
        def work(slot: np.ndarray) -> None:
            self.host.recv(slot.view(buf.dtype), src)

        self._slots.run(self._whole(buf, work, reads=False, writes=True, message=True), "recv")

    def _whole(
        self, buf: Array, work: Callable[[np.ndarray], None], reads: bool, writes: bool, message: bool = False
    ) -> Iterator[Round]:
        """Yield the rounds of a buffer that the host works on piece by piece, each in place.

        Args:
            buf: the buffer.
            work: what the host does with a piece's bytes.
            reads: whether the device's content is wanted.
            writes: whether the result goes back.
            message: the last piece is shorter than the others, if need be empty, so that no message is the
                beginning of a longer one.
        """
        chunk = self._chunk(buf.dtype, 1)
        end = buf.size + 1 if message else buf.size
        for done in range(0, end, chunk):
            now = min(buf.size - done, chunk)
            piece = self._pieces(buf, [(done, 0, now)])
            yield Round(now * buf.dtype.itemsize, piece if reads else (), work, piece if writes else ())

    # ---- messages in groups

    def run_batch(self, front: Front, batch: Sequence[tuple[Call, Array, int]]) -> None:
        """Move all that is sent to the host, let the host's messages go together, move what came to the device."""
        self.buffers.refuse_capture("messages")
        with self._binding.on_device(self._device):
            self._exchange_batch(front, batch)

    def _exchange_batch(self, front: Front, batch: Sequence[tuple[Call, Array, int]]) -> None:
        for call, _, peer in batch:
            front.settle(call.name, peer)  # it stages through the same slots
        whole: list[np.ndarray] = []
        pieces: list[tuple[Call, Array, int]] = []
        for call, buf, peer in batch:
            sends = call.name == "send"
            content = np.empty(buf.size, buf.dtype)
            whole.append(content)
            # Also what is received into: where a message is refused the others arrive, and this one stays as it was.
            self._transfer(buf, content, to_host=True)
            run = self.host.send if sends else self.host.recv
            beside = Call(call.name, call.text, 0, run=run)
            chunk = self._chunk(buf.dtype, 1)
            pieces += [(beside, content[at : at + chunk], peer) for at in range(0, buf.size + 1, chunk)]
        try:
            self.host.run_batch(front, pieces)
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

    def start(self, front: Front, name: str, call: Callable[[], Any]) -> StagedWork:
        """Run a call by the communicator's thread, on a stream of the communicator's own."""
        self.buffers.refuse_capture(f"start.{name}")
        with self._binding.on_device(self._device):
            self._side.fork()
        return StagedWork(self._binding, front.in_thread(name, lambda: self._on_side(self._side, call, name)))

    def start_message(self, front: Front, name: str, buf: Array, peer: int) -> StagedWork:
        """Run a send or a recv by a thread, with a stream and slots, of its own."""
        self.buffers.refuse_capture(f"start.{name}")
        side = self._new_side()
        with self._binding.on_device(self._device):
            side.fork()

        def run() -> Any:
            self._thread.slots = slots = self._new_slots()
            ended = self._on_side(side, lambda: front.message(name, buf, peer), name)
            slots.close()
            return ended

        return StagedWork(self._binding, front.in_line(name, peer, run))

    def _on_side(self, side: SideStream, call: Callable[[], Any], name: str) -> Any:
        self._binding.select(self._device)  # a new thread begins on device 0
        return side.run(call, f"{name} of rank {self.rank}")

    # ---- reductions: the host's own, which check between ranks too

    def _plan_all_reduce(self, call: Call, dtype: Any, elems: int, op: str, order: str) -> Run:
        chunk = self._chunk(dtype, 1)
        plans = {n: planned(self.host, ALL_REDUCE, call, dtype, n, op, order) for n in _lengths(elems, chunk)}

        def run(send: Array, recv: Array) -> None:
            self.lend_name()
            s, r = send.reshape(-1), recv.reshape(-1)
            if self.buffers.overlap(s, r) and self._binding.pointer(s) != self._binding.pointer(r):
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
            n: planned(self.host, REDUCE_SCATTER, call, dtype, n, op, order) for n in _lengths(elems, chunk)
        }

        def run(send: Array, recv: Array) -> None:
            self.lend_name()
            s, r = send.reshape(-1), recv.reshape(-1)
            if self.buffers.overlap(s, r):
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
        plans = {
            n: planned(self.host, REDUCE, call, dtype, n, op, root, order) for n in _lengths(elems, chunk)
        }

        def run(send: Array, recv: Array | None) -> None:
            self.lend_name()
            s, r = send.reshape(-1), None if recv is None else recv.reshape(-1)
            if (
                r is not None
                and self.buffers.overlap(s, r)
                and self._binding.pointer(s) != self._binding.pointer(r)
            ):
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

    plans: ClassVar[Mapping[str, Planner]] = {
        "all_to_all": _plan_all_to_all,
        "all_reduce": _plan_all_reduce,
        "reduce_scatter": _plan_reduce_scatter,
        "reduce": _plan_reduce,
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
        return StagedTransport(
            host, self._binding, device=self._device, watch=self._watch, slot_bytes=self._slot_bytes
        )

    def end(self) -> None:
        if not self.failed:
            self._own_slots.close()
        self.host.failed = self.host.failed or self.failed
        self.host.close()


def staged_communicator(host: Communicator, binding: Binding | None = None, **options: Any) -> Communicator:
    """Return a communicator over GPU arrays that pass through the memory of the host.

    Args:
        host: a communicator of the host, its control; closed with it.
        binding: as for `StagedTransport`, and so are the options.
    """
    return Communicator(StagedTransport(host._transport, binding, **options), host)


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


def _starts(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts))]
