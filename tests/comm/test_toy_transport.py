"""A transport in one file passes the whole contract: threads that trade copies, and nothing but the primitives."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support import mode
from support.case_table import some_cases
from support.comm_cases import Way, cases_for, run_case

from lowshard import comm as lc
from lowshard.comm import Communicator
from lowshard.comm.transport import Transport
from lowshard.errors import BufferMismatchError, TimedOut

TIMEOUT_S = 60.0


class Post:
    """What the ranks of a group share."""

    def __init__(self, size: int) -> None:
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)
        self.mail: dict[tuple[int, int], queue.Queue[np.ndarray]] = {}
        self.lock = threading.Lock()

    def line(self, src: int, dst: int) -> queue.Queue[np.ndarray]:
        with self.lock:
            return self.mail.setdefault((src, dst), queue.Queue())


class ToyTransport(Transport):
    name = "toy"

    def __init__(self, post: Post, rank: int) -> None:
        super().__init__(rank, len(post.slots), timeout_s=TIMEOUT_S)
        self._post = post

    def trade(self, mine: Any) -> list[Any]:
        """Return what all ranks come with."""
        self._post.slots[self.rank] = mine
        try:
            self._post.barrier.wait(TIMEOUT_S)
            found = list(self._post.slots)
            self._post.barrier.wait(TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise TimedOut("a rank did not come") from None
        return found

    def all_gather_v(self, send: Any, recv: Any, counts: Sequence[int], displs: Sequence[int]) -> None:
        for part, count, displ in zip(self.trade(send.copy()), counts, displs, strict=True):
            recv[displ : displ + count] = part

    def all_to_all_v(
        self, send: Any, send_counts: Sequence[int], send_displs: Sequence[int], recv: Any,
        recv_counts: Sequence[int], recv_displs: Sequence[int],
    ) -> None:  # fmt: skip
        parts = [send[at : at + n].copy() for n, at in zip(send_counts, send_displs, strict=True)]
        for given, count, displ in zip(self.trade(parts), recv_counts, recv_displs, strict=True):
            recv[displ : displ + count] = given[self.rank]

    def send(self, buf: Any, dst: int) -> None:
        self._post.line(self.rank, dst).put(buf.copy())

    def recv(self, buf: Any, src: int) -> None:
        try:
            found = self._post.line(src, self.rank).get(timeout=TIMEOUT_S)
        except queue.Empty:
            raise TimedOut(f"recv: rank {src} sent nothing within {TIMEOUT_S:g} s") from None
        if found.nbytes != buf.nbytes:
            raise BufferMismatchError(f"rank {src} sent {found.nbytes} bytes, this rank expects {buf.nbytes}")
        buf[...] = found.view(buf.dtype)

    def compare(self, signature: int) -> bool:
        return len(set(self.trade(signature))) == 1

    def split(self, color: int | None, key: int) -> ToyTransport | None:
        asked = self.trade((color, key))
        members = [
            r for _, r in sorted((k, r) for r, (c, k) in enumerate(asked) if c is not None and c == color)
        ]
        posts = self.trade(Post(len(members)) if members[:1] == [self.rank] else None)
        return ToyTransport(posts[members[0]], members.index(self.rank)) if members else None


@pytest.mark.parametrize(
    ("name", "size"),
    [
        (name, size)
        for size in ([1, 2, 3, 4, 8] if mode.full() else [2])
        for name in cases_for(Way(size, "mpi"), some_cases(25, "toy transport"))
    ],
)
def test_the_contract_holds_on_a_transport_of_primitives_alone(name: str, size: int) -> None:
    post = Post(size)
    lc.run_loopback(
        size, lambda beside: run_case(name, Communicator(ToyTransport(post, beside.rank))), TIMEOUT_S
    )
