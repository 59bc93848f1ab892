"""Staged: GPU arrays moved through host memory by a communicator of the host.

For ranks that outnumber the GPUs, and where there is no NCCL. Buffers pass through page-locked memory in
pieces of bounded size; sums are made on the host, so they have the bits that the CPU path gives them. Each
call waits for the caller's stream to get to its buffers, and returns when the results are queued for the
device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, ClassVar, NamedTuple

import numpy as np

from lowshard.comm.call import Call
from lowshard.comm.collectives import ALL_REDUCE, REDUCE, REDUCE_SCATTER, Collective, planned
from lowshard.comm.communicator import Communicator
from lowshard.comm.device import GpuBuffers
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.nccl_wait import is_done
from lowshard.comm.pinned import SLOT_BYTES, Piece, Round, Slots
from lowshard.comm.stream_work import SideStream
from lowshard.comm.transport import Front, Planner, Run, Transport
from lowshard.comm.wait_guard import Watching
from lowshard.comm.work import Work
from lowshard.foreign_array import view_or_same

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
        """Wrap a transport of the host."""
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

    def _by_pieces(
        self,
        name: str,
        dtype: Any,
        cuts: Iterable[tuple[int, int]],
        work: Callable[[np.ndarray, np.ndarray], Any],
        fetch: _RowsInSlot | None,
        store: _RowsInSlot | None,
    ) -> None:
        """Have the host work on a call piece by piece."""
        parts = max(array.first + array.rows for array in (fetch, store) if array is not None)

        def pieces(array: _RowsInSlot | None, done: int, now: int) -> tuple[Piece, ...]:
            if array is None:
                return ()
            buf, rows, first = array
            elems = buf.size // rows
            return self._pieces(buf, [(elems * i + done, now * (first + i), now) for i in range(rows)])

        def round_of(piece: tuple[int, int]) -> Round:
            now = piece[1]

            def on_slot(slot: np.ndarray) -> None:
                whole = slot.view(dtype)
                work(whole[:now], whole[now:])

            n_bytes = now * parts * dtype.itemsize
            return Round(n_bytes, pieces(fetch, *piece), on_slot, pieces(store, *piece))

        self._slots.run(map(round_of, cuts), name)

    # ---- moves

    def all_gather_v(self, send: Array, recv: Array, counts: Sequence[int], displs: Sequence[int]) -> None:
        own = recv[displs[self.rank] : displs[self.rank] + counts[self.rank]]
        in_place = send.size and self._binding.pointer(send) == self._binding.pointer(own)
        if not in_place and self.buffers.overlap(send, recv):
            send = self.buffers.copied(send)
        dtype, chunk = recv.dtype, self._chunk(recv.dtype, self.size)

        def round_from(done: int) -> Round:
            now = [min(max(n - done, 0), chunk) for n in counts]
            starts = _starts(now)
            begin, length = starts[self.rank], now[self.rank]

            def work(slot: np.ndarray) -> None:
                whole = slot.view(dtype)
                self.host.all_gather_v(whole[begin : begin + length], whole, now, starts)

            fetch = self._pieces(send, [(done, begin, length)])
            back = [
                (displs[i] + done, starts[i], now[i])
                for i in range(self.size)
                if i != self.rank or not in_place
            ]
            return Round(sum(now) * dtype.itemsize, fetch, work, self._pieces(recv, back))

        self._slots.run(map(round_from, range(0, max(counts), chunk)), "all_gather")

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
            send = self.buffers.copied(send)
        me, dtype, chunk = self.rank, send.dtype, self._chunk(send.dtype, 2 * self.size)
        keeps = send_counts[me]
        self.buffers.copy(
            recv[recv_displs[me] : recv_displs[me] + keeps], send[send_displs[me] : send_displs[me] + keeps]
        )

        def round_from(done: int) -> Round:
            go = [0 if i == me else min(max(n - done, 0), chunk) for i, n in enumerate(send_counts)]
            come = [0 if i == me else min(max(n - done, 0), chunk) for i, n in enumerate(recv_counts)]
            at, to, half = _starts(go), _starts(come), sum(go)

            def work(slot: np.ndarray) -> None:
                whole = slot.view(dtype)
                self.host.all_to_all_v(whole[:half], go, at, whole[half:], come, to)

            out = [(send_displs[i] + done, at[i], go[i]) for i in range(self.size)]
            back = [(recv_displs[i] + done, half + to[i], come[i]) for i in range(self.size)]
            n_bytes = (half + sum(come)) * dtype.itemsize
            return Round(n_bytes, self._pieces(send, out), work, self._pieces(recv, back))

        self._slots.run(map(round_from, range(0, longest, chunk)), "all_to_all")

    def send(self, buf: Array, dst: int) -> None:
        self._message("send", buf, lambda one, _: self.host.send(one, dst), to_host=True)

    def recv(self, buf: Array, src: int) -> None:
        self._message("recv", buf, lambda one, _: self.host.recv(one, src), to_host=False)

    def _message(
        self, name: str, buf: Array, work: Callable[[np.ndarray, np.ndarray], Any], to_host: bool
    ) -> None:
        # The last piece is shorter than the others, if need be empty: no message is the beginning of a longer one.
        cuts = _cuts(buf.size, self._chunk(buf.dtype, 1), buf.size + 1)
        whole = _RowsInSlot(buf)
        self._by_pieces(name, buf.dtype, cuts, work, whole if to_host else None, None if to_host else whole)

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
            content = np.empty(buf.size, buf.dtype)
            whole.append(content)
            # Also what is received into: where a message is refused the others arrive, and this one stays as it was.
            self._transfer(buf, content, to_host=True)
            chunk = self._chunk(buf.dtype, 1)
            pieces += [(call, content[at : at + chunk], peer) for at in range(0, buf.size + 1, chunk)]
        try:
            self.host.run_batch(front, pieces)
        finally:
            for (call, buf, _), content in zip(batch, whole, strict=True):
                if call.name == "recv":
                    self._transfer(buf, content, to_host=False)

    def _transfer(self, buf: Array, content: np.ndarray, to_host: bool) -> None:
        """Copy a whole buffer to or from ordinary memory."""
        at = 0

        def work(one: np.ndarray, others: np.ndarray) -> None:
            nonlocal at
            part = content[at : at + one.size]
            at += one.size
            if to_host:
                part[...] = one
            else:
                one[...] = part

        self._message("grouped send and recv", buf, work, to_host)

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
        buf, side = view_or_same(buf, writes=name == "recv"), self._new_side()
        with self._binding.on_device(self._device):
            side.fork()

        def run() -> Any:
            with closing(self._new_slots()) as self._thread.slots:
                return self._on_side(side, lambda: front.message(name, buf, peer), name)

        return StagedWork(self._binding, front.in_line(name, peer, run))

    def come_after(self) -> None:
        with self._binding.on_device(self._device):
            self._side.precede()

    def _on_side(self, side: SideStream, call: Callable[[], Any], name: str) -> Any:
        self._binding.select(self._device)  # a new thread begins on device 0
        return side.run(call, f"{name} of rank {self.rank}")

    # ---- reductions: the host's own, which check between ranks too

    def _plan_all_reduce(self, call: Call, dtype: Any, elems: int, *detail: Any) -> Run:
        return self._reduced(ALL_REDUCE, call, dtype, elems, *detail)

    def _plan_reduce_scatter(self, call: Call, dtype: Any, elems: int, *detail: Any) -> Run:
        return self._reduced(REDUCE_SCATTER, call, dtype, elems, *detail)

    def _plan_reduce(self, call: Call, dtype: Any, elems: int, *detail: Any) -> Run:
        return self._reduced(REDUCE, call, dtype, elems, *detail)

    def _reduced(self, what: Collective, call: Call, dtype: Any, elems: int, *detail: Any) -> Run:
        """Return the run of a reduction: of `elems` elements, or of that many for each rank in reduce_scatter."""
        scatters = what is REDUCE_SCATTER
        chunk = self._chunk(dtype, self.size + 1 if scatters else 1)
        end = max(elems, 1)  # one piece of no elements where there are none: the host checks the call
        lengths = {now for _, now in _cuts(elems, chunk, end)}
        plans = {n: planned(self.host, what, call, dtype, n, *detail) for n in lengths}

        def run(send: Array, recv: Array | None) -> None:
            self.lend_name()
            s, r = send.reshape(-1), None if recv is None else recv.reshape(-1)
            if r is not None and self.buffers.overlap(s, r):
                in_place = not scatters and self._binding.pointer(s) == self._binding.pointer(r)
                s = s if in_place else self.buffers.copied(s)

            def work(one: np.ndarray, others: np.ndarray) -> None:
                plans[one.size](others if scatters else one, None if r is None else one)

            fetch = _RowsInSlot(s, self.size, 1) if scatters else _RowsInSlot(s)
            store = None if r is None else _RowsInSlot(r)
            self._by_pieces(what.name, dtype, _cuts(elems, chunk, end), work, fetch, store)

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
        """Wait for the host's part of the call, and make the current stream wait for the device's."""
        event, result = self._work.wait(timeout_s)
        self._binding.stream().wait_event(event)
        return result


class _RowsInSlot(NamedTuple):
    """An array of rows of one length; a slot holds a part of each row, from its part number `first` on."""

    buf: Array
    rows: int = 1
    first: int = 0


def _cuts(elems: int, chunk: int, end: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield (first element, elements) of each piece, of those that begin before `end`; by default of all."""
    for done in range(0, elems if end is None else end, chunk):
        yield done, min(elems - done, chunk)


def _starts(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts))]
