"""Staged moves: GPU arrays cut into pieces that pass through page-locked memory to a communicator of the host.

Tested over streams and arrays that stand in for CuPy's; not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from lowshard.comm.call import Call
from lowshard.comm.device import DeviceCommunicator
from lowshard.comm.pinned import Piece, Round, Slots
from lowshard.comm.protocol import Communicator

Array = Any
Run = Callable[..., Any]
Parts = list[tuple[int, int, int]]
"""(first element in the array, first element in the slot, elements)"""


class StagedMoves(DeviceCommunicator):
    """The primitives that move, over those of the host's communicator."""

    _host: Communicator
    _slot_bytes: int

    @property
    def _slots(self) -> Slots:
        """The slots that this thread uses."""
        raise NotImplementedError

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

    def _all_gather_v(self, send: Array, recv: Array, counts: Sequence[int], displs: Sequence[int]) -> None:
        own = recv[displs[self.rank] : displs[self.rank] + counts[self.rank]]
        in_place = send.size and self._binding.pointer(send) == self._binding.pointer(own)
        if not in_place and self._overlap(send, recv):
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
                    self._host._all_gather_v(mine, whole, now, starts)

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

    def _all_to_all_v(
        self,
        send: Array,
        send_counts: Sequence[int],
        send_displs: Sequence[int],
        recv: Array,
        recv_counts: Sequence[int],
        recv_displs: Sequence[int],
    ) -> None:
        # How many rounds it takes is no rank's own affair.
        mine = np.array([max(*send_counts, *recv_counts)], np.int64)
        longest = int(self._host._gather_facts(mine).max())
        self._exchange(longest, send, send_counts, send_displs, recv, recv_counts, recv_displs)

    def _plan_all_to_all(self, call: Call, dtype: Any, elems: int) -> Run:
        each = elems // self.size
        counts, displs = [each] * self.size, [each * i for i in range(self.size)]

        def run(send: Array, recv: Array) -> None:
            self._verify(call)
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
        if self._overlap(send, recv):
            send = send.copy()
        me, dtype, chunk = self.rank, send.dtype, self._chunk(send.dtype, 2 * self.size)
        keeps = send_counts[me]
        self._copy(
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
                    self._host._all_to_all_v(whole[:half], go, at, whole[half:], come, to)

                yield Round(
                    (half + sum(come)) * dtype.itemsize,
                    self._pieces(send, [(send_displs[i] + done, at[i], go[i]) for i in range(self.size)]),
                    work,
                    self._pieces(
                        recv, [(recv_displs[i] + done, half + to[i], come[i]) for i in range(self.size)]
                    ),
                )

        self._slots.run(rounds(), "all_to_all")

    def _broadcast(self, buf: Array, root: int) -> None:
        def work(slot: np.ndarray) -> None:
            self._host._broadcast(slot.view(buf.dtype), root)

        reads, writes = self.rank == root, self.rank != root
        self._slots.run(self._whole(buf, work, reads, writes), "broadcast")

    def _gather(self, send: Array, recv: Array | None, root: int) -> None:
        n, dtype, chunk = send.size, send.dtype, self._chunk(send.dtype, self.size + 1)

        def rounds() -> Iterator[Round]:
            for done in range(0, n, chunk):
                now = min(n - done, chunk)
                back: tuple[Piece, ...] = ()
                if recv is not None:
                    back = self._pieces(recv, [(n * i + done, now * (1 + i), now) for i in range(self.size)])

                def work(slot: np.ndarray, now: int = now) -> None:
                    whole = slot.view(dtype)
                    self._host._gather(whole[:now], None if recv is None else whole[now:], root)

                size = now * (1 if recv is None else 1 + self.size)
                yield Round(size * dtype.itemsize, self._pieces(send, [(done, 0, now)]), work, back)

        self._slots.run(rounds(), "gather")

    def _scatter(self, send: Array | None, recv: Array, root: int) -> None:
        n, dtype, chunk = recv.size, recv.dtype, self._chunk(recv.dtype, self.size + 1)

        def rounds() -> Iterator[Round]:
            for done in range(0, n, chunk):
                now = min(n - done, chunk)
                out: tuple[Piece, ...] = ()
                if send is not None:
                    out = self._pieces(send, [(n * i + done, now * (1 + i), now) for i in range(self.size)])

                def work(slot: np.ndarray, now: int = now) -> None:
                    whole = slot.view(dtype)
                    self._host._scatter(None if send is None else whole[now:], whole[:now], root)

                size = now * (1 if send is None else 1 + self.size)
                yield Round(size * dtype.itemsize, out, work, self._pieces(recv, [(done, 0, now)]))

        self._slots.run(rounds(), "scatter")

    def _send(self, buf: Array, dst: int) -> None:
        def work(slot: np.ndarray) -> None:
            self._host._send(slot.view(buf.dtype), dst)

        self._slots.run(self._whole(buf, work, reads=True, writes=False, message=True), "send")

    def _recv(self, buf: Array, src: int) -> None:
        def work(slot: np.ndarray) -> None:
            self._host._recv(slot.view(buf.dtype), src)

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


def _starts(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts))]
