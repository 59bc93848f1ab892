"""`cupy.cuda.nccl`: communicators of threads and processes that check NCCL's rules.

A call is an operation on its stream. Ranks meet in files, so a call never blocks the host: the stream waits for what
NCCL's kernel would wait for. Where ranks ask for different things the stream is stuck, as NCCL's kernel may be, until
the communicator is aborted; it is reported once the host waits for it without an end, or after a minute.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from cupy import _memory, _streams
from cupy._meeting import Meeting
from cupy._memory import Access, serials
from cupy._streams import Work
from cupy.checker import LOCK, OFF, at_exit, count, need, report, where
from cupy.cuda import runtime

available = True
_VERSION = 23203
_NO_COLOR = -1
_TYPES = [
    np.dtype(kind)
    for kind in (
        np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, np.float16, np.float32, np.float64,
        ml_dtypes.bfloat16,
    )
]  # fmt: skip
"""By the numbers of ncclDataType_t."""
_OPS = (np.add, np.multiply, np.maximum, np.minimum, np.add)
_AVERAGE = 4
_INVALID_USAGE = 5

Span = tuple[int, int]
"""First address and end."""


class NcclError(RuntimeError):
    """CuPy's."""

    def __init__(self, status: int) -> None:
        super().__init__(f"NCCL_ERROR_{status}: said by the stand-in")
        self.status = status


def get_version() -> int:
    return _VERSION


def get_unique_id() -> bytes:
    return secrets.token_bytes(128)


# ---- calls and groups


class _Call:
    """A call of one rank."""

    def __init__(
        self, comm: NcclCommunicator, name: str, stream: int, reads: list[Span], writes: list[Span]
    ) -> None:
        self.comm, self.name, self.stream, self.reads, self.writes = comm, name, stream, reads, writes
        self.make: Callable[[], _Part] = _Part


class _Part:
    """What a call does when its turn has come."""

    stuck = ""
    posted = ""
    """What is left for the others, if it is not taken."""

    def post(self) -> None:
        """Give the others what they need."""

    def ready(self) -> bool:
        """Say whether the others have given theirs."""
        return True

    def run(self) -> None:
        """Write the results."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.calls: list[_Call] = []


_thread = _Thread()


def groupStart() -> None:
    """Collect this thread's calls."""
    _streams.set_open_groups(_streams.open_groups() + 1)


def groupEnd() -> None:
    """Put the collected calls on their streams, together."""
    need(_streams.open_groups() > 0, "groupEnd without groupStart")
    _streams.set_open_groups(_streams.open_groups() - 1)
    if _streams.open_groups():
        return
    count("collectives", OFF)
    calls, _thread.calls = _thread.calls, []
    by_comm: dict[NcclCommunicator, list[_Call]] = {}
    for call in calls:
        call.comm._need_life(f"the end of a group with {call.name}")
        by_comm.setdefault(call.comm, []).append(call)
    for some in by_comm.values():
        _check_group(some)
        _queue(some)


def _check_group(calls: Sequence[_Call]) -> None:
    need(
        len({call.stream for call in calls}) == 1,
        "calls of a communicator in one group are on several streams",
    )
    for i, call in enumerate(calls):
        for other in calls[:i]:
            for one, two in ((call, other), (other, call)):
                need(
                    not _overlap(one.writes, [*two.reads, *two.writes]),
                    f"{one.name} writes memory that {two.name} of the same group uses",
                )


def _overlap(some: Sequence[Span], others: Sequence[Span]) -> bool:
    return any(low < high_2 and low_2 < high for low, high in some for low_2, high_2 in others)


def _queue(calls: Sequence[_Call]) -> None:
    """Put calls of one communicator on its stream as one operation."""
    comm, stream = calls[0].comm, calls[0].stream
    touched = [Access(*span, False) for call in calls for span in call.reads if span[0] < span[1]]
    touched += [Access(*span, True) for call in calls for span in call.writes if span[0] < span[1]]

    def make() -> Work:
        parts = [call.make() for call in calls]
        posted: list[bool] = []

        def ready() -> bool:
            if comm._ended:
                return True
            if not posted:
                posted.append(True)
                for part in parts:
                    part.post()
            is_ready = all([part.ready() for part in parts])  # each is asked: it takes what has come
            work.stuck = next((part.stuck for part in parts if part.stuck), "")
            return is_ready and not work.stuck

        def run() -> list[Access]:
            if comm._ended:
                return []
            for part in parts:
                part.run()
            posts = [part.posted for part in parts if part.posted]
            if posts:  # all ranks have posted theirs and are done with the one before; a message tells of two alone
                for name in comm._posted:
                    comm._meeting.take_away(name)
                comm._posted = posts
            return touched

        work = Work(run, ready)
        return work

    names = "+".join(sorted({call.name for call in calls}))
    count("collectives")
    with LOCK:
        # NCCL orders the kernels of a communicator among themselves, whichever streams they are on.
        at = _streams.stream_at(stream)
        if at.capture is None:
            _streams.merge(at.clock, comm._clock)
        _streams.put(stream, f"NCCL's {names}", make)
        if at.capture is None:
            _streams.merge(comm._clock, at.clock)


@at_exit
def _look_for_open_groups() -> None:
    if _streams.open_groups():
        report(f"a group of NCCL calls is not ended: {len(_thread.calls)} calls never began")


class _Collective(_Part):
    """A call that all ranks make."""

    def __init__(
        self, call: _Call, head: list[Any], body: Span, result: Callable[[list[bytes]], bytes]
    ) -> None:
        comm = call.comm
        comm._calls += 1
        self._call, self._head, self._body, self._result = call, head, body, result
        self._meeting, self._number = comm._meeting, comm._calls

    def post(self) -> None:
        low, high = self._body
        self.posted = f"c{self._number}.{self._meeting.rank}"
        self._meeting.post(self.posted, self._head, ctypes.string_at(low, high - low))

    def ready(self) -> bool:
        left = [rank for rank in range(self._meeting.size) if self._meeting.has_left(rank)]
        if not self._meeting.all_there(f"c{self._number}"):
            gone = [rank for rank in left if not self._meeting.is_there(f"c{self._number}.{rank}")]
            self.stuck = f"rank {gone[0]} has left before call {self._number}, {self._head}" if gone else ""
            return False
        if self.stuck:
            return True
        self._given = [self._meeting.find(f"c{self._number}.{rank}") for rank in range(self._meeting.size)]
        for rank, given in enumerate(self._given):
            if given is not None and given[0] != self._head:
                self.stuck = (
                    f"call {self._number} of a communicator is {self._head} on rank {self._meeting.rank}, and "
                    f"{given[0]} on rank {rank}"
                )
        return True

    def run(self) -> None:
        made = self._result([given[1] for given in self._given if given is not None])
        (low, high), *_ = self._call.writes
        need(len(made) == high - low, f"{self._call.name} of {len(made)} bytes into {high - low}")
        ctypes.memmove(low, made, len(made))


class _Message(_Part):
    """A send or a recv."""

    def __init__(self, call: _Call, head: list[int], peer: int) -> None:
        meeting, numbers = call.comm._meeting, call.comm._messages
        self._call, self._head, self._meeting = call, head, meeting
        number = numbers[call.name, peer] = numbers.get((call.name, peer), 0) + 1
        self._sends, self._peer = call.name == "send", peer
        ranks = (meeting.rank, peer) if self._sends else (peer, meeting.rank)
        self._name = f"p{ranks[0]}.{ranks[1]}.{number}"
        self._taken: bytes | None = None

    def post(self) -> None:
        if self._sends:
            (low, high), *_ = self._call.reads
            self._meeting.post(self._name, self._head, ctypes.string_at(low, high - low))

    def ready(self) -> bool:
        has_left = self._meeting.has_left(self._peer)
        if not self._sends and self._taken is None and (found := self._meeting.find(self._name)) is not None:
            if found[0] != self._head:
                self.stuck = f"a recv of {self._head} (count, type) meets a send of {found[0]}"
                return False
            self._taken = found[1]
            self._meeting.take_away(self._name)
        is_over = not self._meeting.is_there(self._name) if self._sends else self._taken is not None
        self.stuck = (
            f"rank {self._peer} has left before a {self._call.name}" if has_left and not is_over else ""
        )
        return is_over

    def run(self) -> None:
        if not self._sends and self._taken:
            ctypes.memmove(self._call.writes[0][0], self._taken, len(self._taken))


class NcclCommunicator:
    """A rank's end of a communicator."""

    def __init__(self, ndev: int, commId: bytes, rank: int, config: Any = None) -> None:
        need(isinstance(commId, bytes) and len(commId) == 128, "a unique id has 128 bytes")
        need(0 <= rank < ndev, f"rank {rank} of {ndev}")
        if ndev > runtime.getDeviceCount() and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            raise NcclError(_INVALID_USAGE)
        self._set_up(commId, rank, ndev)

    def _set_up(self, name: bytes, rank: int, size: int) -> None:
        self._meeting = Meeting(name, rank, size)
        self._ended, self._calls, self._splits = "", 0, 0
        self._messages: dict[tuple[str, int], int] = {}
        self._posted: list[str] = []
        self._clock: dict[_streams.Stream, int] = {}
        self.comm = next(serials)
        self._meeting.post(f"hello.{rank}", None)
        self._meeting.wait(lambda: self._meeting.all_there("hello"), "the connection")

    def _need_life(self, name: str) -> None:
        need(not self._ended, f"{name} on a communicator after {self._ended}")

    # ---- what it is

    def rank_id(self) -> int:
        self._need_life("rank_id")
        return self._meeting.rank

    def size(self) -> int:
        self._need_life("size")
        return self._meeting.size

    def device_id(self) -> int:
        self._need_life("device_id")
        return 0

    def check_async_error(self) -> None:
        """Raise what has gone wrong: nothing has."""
        self._need_life("check_async_error")

    # ---- calls

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        lengths = (count, count, 0)
        self._collective("allReduce", (sendbuf, recvbuf), lengths, datatype, op, -1, stream, _reduced)

    def reduceScatter(
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None:
        lengths = (recvcount * self._meeting.size, recvcount, -recvcount * self._meeting.rank)

        def result(given: list[bytes], datatype: int, op: int) -> bytes:
            part = recvcount * _TYPES[datatype].itemsize
            first = part * self._meeting.rank
            return _reduced([one[first : first + part] for one in given], datatype, op)

        self._collective("reduceScatter", (sendbuf, recvbuf), lengths, datatype, op, -1, stream, result)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        lengths = (count, count * self._meeting.size, count * self._meeting.rank)
        buffers = (sendbuf, recvbuf)
        self._collective(
            "allGather", buffers, lengths, datatype, -1, -1, stream, lambda given, *_: b"".join(given)
        )

    def broadcast(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int
    ) -> None:
        buffers, lengths = (sendbuff, recvbuff), (count, count, 0)
        self._collective(
            "broadcast", buffers, lengths, datatype, -1, root, stream, lambda given, *_: given[root]
        )

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        if OFF:
            return
        call = _Call(self, "send", stream, [self._span("send", sendbuf, count, datatype, peer, stream)], [])
        call.make = lambda: _Message(call, [count, datatype], peer)
        _submit(call)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        if OFF:
            return
        call = _Call(self, "recv", stream, [], [self._span("recv", recvbuf, count, datatype, peer, stream)])
        call.make = lambda: _Message(call, [count, datatype], peer)
        _submit(call)

    def _span(self, name: str, at: int, elems: int, datatype: int, peer: int, stream: int) -> Span:
        """Return what a call touches of an array, with all that can be said of it checked."""
        self._need_life(name)
        given = (at, elems, datatype, peer, stream)
        need(all(type(word) is int for word in given), f"{name}: CuPy takes integers, and was given {given}")
        need(0 <= datatype < len(_TYPES), f"{name}: there is no type {datatype}")
        need(-1 <= peer < self._meeting.size, f"{name}: rank {peer} of {self._meeting.size}")
        need(elems >= 0, f"{name}: {elems} elements")
        item = _TYPES[datatype].itemsize
        need(at % item == 0 or not elems, f"{name}: {at:#x} is not aligned to an element of {item} bytes")
        _streams.stream_at(stream)
        span = at, at + elems * item
        if elems:
            _memory.block_of(Access(*span, False), f"NCCL's {name}", next(serials), float("inf"), where())
        return span

    def _collective(
        self, name: str, buffers: tuple[int, int], lengths: tuple[int, int, int], datatype: int, op: int, root: int,
        stream: int, result: Callable[..., bytes],
    ) -> None:  # fmt: skip
        """Make a call of all ranks; `op` and `root` are -1 where it has none.

        Args:
            name: NCCL's.
            buffers: addresses that are read and written.
            lengths: elements that are read and written, and how far apart they begin in place.
            datatype: NCCL's number.
            op: of a reduction.
            root: of a broadcast.
            stream: its handle.
            result: returns the bytes that are written, from those of all ranks.
        """
        if OFF:
            count("collectives", not _streams.open_groups())
            return
        sent, received, ahead = lengths
        takes_part = root in (-1, self._meeting.rank)
        target = self._span(name, buffers[1], received, datatype, root, stream)
        source = self._span(name, buffers[0], sent, datatype, root, stream) if takes_part else (0, 0)
        need(-1 <= op < len(_OPS), f"{name}: there is no op {op}")
        is_in_place = source[0] == target[0] + ahead * _TYPES[datatype].itemsize
        need(
            is_in_place or not _overlap([source], [target]),
            f"{name}: its arrays overlap, and it is not in place as NCCL has it",
        )
        call = _Call(self, name, stream, [source], [target])
        head = [name, min(sent, received), _TYPES[datatype].name, op, root]
        call.make = lambda: _Collective(call, head, source, lambda given: result(given, datatype, op))
        _submit(call)

    # ---- its life

    def commSplit(self, color: int, key: int, config: Any = None) -> NcclCommunicator | None:
        """Return a communicator of the ranks that give the same colour."""
        self._need_life("commSplit")
        need(not _streams.open_groups(), "commSplit within a group")
        is_known = all(
            _streams.known.get(stream, 0) >= n or stream.is_over for stream, n in self._clock.items()
        )
        need(OFF or is_known, "commSplit while work of the communicator may be under way: it may hang")
        self._splits += 1
        name, meeting = f"s{self._splits}", self._meeting
        meeting.post(f"{name}.{meeting.rank}", [color, key])
        meeting.wait(lambda: meeting.all_there(name), "commSplit")
        asked = [(meeting.find(f"{name}.{rank}") or ([_NO_COLOR, 0],))[0] for rank in range(meeting.size)]
        if color == _NO_COLOR:
            return None
        members = sorted(
            (its_key, rank) for rank, (its_color, its_key) in enumerate(asked) if its_color == color
        )
        made = NcclCommunicator.__new__(NcclCommunicator)
        made._set_up(
            f"{meeting.key} {name} {color}".encode(), members.index((key, meeting.rank)), len(members)
        )
        return made

    def destroy(self) -> None:
        """End it, once its work is done and all ranks do so."""
        self._need_life("destroy")
        need(not _streams.open_groups(), "destroy within a group")
        _streams.host_waits(dict(self._clock), "ncclCommDestroy")
        self._ended = "destroy"
        self._meeting.leave()
        self._meeting.wait(self._meeting.have_all_left, "ncclCommDestroy")

    def abort(self) -> None:
        """End it, and what it is doing."""
        self._need_life("abort")
        self._ended = "abort"
        self._meeting.leave()
        _streams.advance()


def _submit(call: _Call) -> None:
    if _streams.open_groups():
        _thread.calls.append(call)
    else:
        _queue([call])


def _reduced(given: list[bytes], datatype: int, op: int) -> bytes:
    """Return arrays of all ranks combined, from the last rank to the first."""
    kind = _TYPES[datatype]
    arrays = [np.frombuffer(one, kind) for one in reversed(given)]
    with np.errstate(all="ignore"):
        if op == _AVERAGE:
            arrays = [(array * kind.type(1 / len(given))).astype(kind) for array in arrays]
        total = arrays[0].copy()
        for array in arrays[1:]:
            total = _OPS[op](total, array)
    return total.astype(kind, copy=False).tobytes()
