"""`cupy.cuda.nccl`: communicators of threads and processes that check NCCL's rules.

A call is an operation on its stream. Ranks meet in a folder of small files, so a call never blocks the host: the stream
waits for what NCCL's kernel would wait for. Where ranks ask for different things the stream is stuck, as NCCL's kernel
may be, until the communicator is aborted; it is reported once the host waits for it without an end, or after a minute.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partialmethod
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cupy import _memory, _streams, checker, cuda
from cupy._memory import Access, serials
from cupy._streams import Work, of_thread
from cupy.checker import LOCK, OFF, count, need, wait_until, where

available = True
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
_NO_COLOR = -1
_RULES = {
    "allReduce": (False, False, 0, "op"),
    "reduceScatter": (True, False, -1, "op"),
    "allGather": (False, True, 1, ""),
    "broadcast": (False, False, 0, "root"),
}
"""Whether a call reads and writes a part for each rank; of which sign what is read in place lies ahead of what is
written, by a part for each rank before; its argument beside the count and type."""
_ROOT = (
    Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())
    / f"lowshard-gpu-checker-{os.getuid()}"
)


class NcclError(RuntimeError):
    """CuPy's."""

    def __init__(self, status: int) -> None:
        super().__init__(f"NCCL_ERROR_{status}: said by the stand-in")
        self.status = status


def get_version() -> int:
    return 23203


def get_unique_id() -> bytes:
    return secrets.token_bytes(128)


# ---- calls and groups


class _Call(NamedTuple):
    """A call of one rank."""

    comm: NcclCommunicator
    name: str
    stream: int
    touched: list[Access]
    target: int
    head: list[Any]
    """What the others have to ask for too."""
    peer: int
    """Of a message; -1: all ranks make the call."""
    result: Callable[[list[bytes]], bytes]
    """Returns what is written, from what the others give."""


class _Part:
    """A call whose turn has come: gives its bytes to the others, awaits theirs, and writes the result."""

    def __init__(self, call: _Call) -> None:
        comm, self.call = call.comm, call
        key = (call.name, call.peer) if call.peer >= 0 else ("", -1)
        comm._numbers[key] += 1
        number, self.stuck, self.given = comm._numbers[key], "", dict[int, Any]()
        if call.peer < 0:
            self.awaited = {rank: f"call {number} of {rank}" for rank in range(comm._size)}
            self.mine = self.awaited[comm._rank]
            return
        ranks = (comm._rank, call.peer) if call.name == "send" else (call.peer, comm._rank)
        names = [f"message {number} {way} {ranks[0]} to {ranks[1]}" for way in ("from", "taken from")]
        self.mine, self.awaited = names[call.name == "recv"], {call.peer: names[call.name == "send"]}

    def post(self) -> None:
        sent = [access for access in self.call.touched if not access.writes]
        body = b"".join(ctypes.string_at(access.low, access.high - access.low) for access in sent)
        self.call.comm._post(self.mine, self.call.head, body)

    def ready(self) -> bool:
        """Say whether the others have given theirs, and note what keeps them from it."""
        comm, head = self.call.comm, self.call.head
        if self.given:
            return not self.stuck
        left = [rank for rank in self.awaited if comm._has(f"bye.{rank}")]
        missing = [rank for rank, name in self.awaited.items() if not comm._has(name)]
        if gone := [rank for rank in left if rank in missing]:
            self.stuck = f"rank {gone[0]} has left before {self.mine}, {head}"
        if missing:
            return False
        self.given = {rank: comm._find(name) for rank, name in self.awaited.items()}
        for rank, (others, _) in self.given.items():
            if others != head:
                self.stuck = f"{self.mine} is {head} on rank {comm._rank}, and {others} on rank {rank}"
        return not self.stuck

    def run(self) -> None:
        made = self.call.result([body for _, body in self.given.values()])
        ctypes.memmove(self.call.target, made, len(made))
        if self.call.peer >= 0:
            self.call.comm._take_away(*self.awaited.values())


def groupStart() -> None:
    """Collect this thread's calls."""
    of_thread.groups = getattr(of_thread, "groups", 0) + 1


def groupEnd() -> None:
    """Put the collected calls on their streams, together."""
    need(getattr(of_thread, "groups", 0) > 0, "groupEnd without groupStart")
    of_thread.groups -= 1
    if of_thread.groups:
        return
    count("collectives", OFF)
    calls, of_thread.calls = getattr(of_thread, "calls", []), []
    by_comm: dict[NcclCommunicator, list[_Call]] = {}
    for call in calls:
        call.comm._need_life(f"the end of a group with {call.name}")
        by_comm.setdefault(call.comm, []).append(call)
    for some in by_comm.values():
        is_one = len({call.stream for call in some}) == 1
        need(is_one, "calls of a communicator in one group are on several streams")
        for one, two in combinations(some, 2):
            for a, b in product(one.touched, two.touched):
                is_apart = not (a.writes or b.writes) or not a.crosses(b)
                need(is_apart, f"{one.name} and {two.name} of one group use the same memory, one writes it")
        _queue(some)


def _queue(calls: list[_Call]) -> None:
    """Put calls of one communicator on its stream as one operation."""
    comm, stream = calls[0].comm, calls[0].stream

    def make() -> Work:
        parts, posted = [_Part(call) for call in calls], list[str]()

        def ready() -> bool:
            if comm._ended:
                return True
            for part in () if posted else parts:
                part.post()
            posted[:] = [part.mine for part in parts]
            is_ready = all([part.ready() for part in parts])  # all of them say what they are stuck in
            work.stuck = next((part.stuck for part in parts if part.stuck), "")
            return is_ready

        def run() -> list[Access]:
            if comm._ended:
                return []
            for part in parts:
                part.run()
            if shared := [part.mine for part in parts if part.call.peer < 0]:
                comm._take_away(*comm._shared)  # who has posted this operation is done with the one before
                comm._shared = shared
            return [access for call in calls for access in call.touched]

        work = Work(run, ready)
        return work

    with LOCK:
        # NCCL orders the kernels of a communicator among themselves, whichever streams they are on.
        at = _streams.stream_at(stream)
        if at.capture is None:
            _streams.merge(at.clock, comm._clock)
        names = "+".join(sorted({call.name for call in calls}))
        _streams.put(f"NCCL's {names}", None, "collectives", stream, make)
        if at.capture is None:
            _streams.merge(comm._clock, at.clock)


# ---- communicators


class NcclCommunicator:
    """A rank's end of a communicator."""

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
        need(isinstance(commId, bytes) and len(commId) == 128, "a unique id has 128 bytes")
        need(0 <= rank < ndev, f"rank {rank} of {ndev}")
        if ndev > cuda.runtime.getDeviceCount() and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            raise NcclError(5)  # invalid usage
        self._rank, self._size, self._ended, self._splits = rank, ndev, "", 0
        self._folder = _ROOT / hashlib.sha256(commId).hexdigest()[:24]
        self._numbers: Counter[tuple[str, int]] = Counter()
        self._shared: list[str] = []
        """What this rank has left for all others, and not taken away."""
        self._clock: _streams.Clock = {}
        self.comm = next(serials)
        self._folder.mkdir(parents=True, exist_ok=True)
        checker.at_exit.append(self._leave)
        self._post(f"hello.{rank}", None)
        wait_until(lambda: self._all_have("hello"), f"the connection of rank {rank} of {ndev}")

    def _need_life(self, name: str) -> None:
        need(not self._ended, f"{name} on a communicator after {self._ended}")

    def _asked(self, name: str) -> int:
        self._need_life(name)
        return {"rank_id": self._rank, "size": self._size}.get(name, 0)

    rank_id, size = partialmethod(_asked, "rank_id"), partialmethod(_asked, "size")
    device_id, check_async_error = (
        partialmethod(_asked, "device_id"),
        partialmethod(_asked, "check_async_error"),
    )

    # ---- calls

    def _access(self, name: str, at: int, elems: int, datatype: int, writes: bool) -> list[Access]:
        """Return what a call touches of an array, with all that can be said of it checked."""
        need(all(type(word) is int for word in (at, elems, datatype)), f"{name}: CuPy takes integers")
        need(0 <= datatype < len(_TYPES) and elems >= 0, f"{name}: {elems} elements of type {datatype}")
        item = _TYPES[datatype].itemsize
        need(at % item == 0 or not elems, f"{name}: {at:#x} is not aligned to an element of {item} bytes")
        found = [Access(at, at + elems * item, writes)] if elems else []
        for access in found:
            _memory.block_of(access, f"NCCL's {name}", where(), next(serials))
        return found

    def _submit(self, *call: Any) -> None:
        made = _Call(self, *call)
        _streams.stream_at(made.stream)
        if getattr(of_thread, "groups", 0):
            of_thread.calls = [*getattr(of_thread, "calls", []), made]
        else:
            _queue([made])

    def _collective(self, name: str, source: int, target: int, elems: int, datatype: int, *rest: int) -> None:
        """Make a call of all ranks: its last arguments are an op or a root, if it has one, and the stream."""
        if OFF:
            count("collectives", not getattr(of_thread, "groups", 0))
            return
        self._need_life(name)
        reads, writes, ahead, word = _RULES[name]
        *word_given, stream = rest
        need(len(word_given) == bool(word), f"{name}: arguments {rest}")
        value = word_given[0] if word else 0
        need(0 <= value < {"op": len(_OPS), "root": self._size, "": 1}[word], f"{name}: {word} {value}")
        kind, part = _TYPES[datatype], elems * _TYPES[datatype].itemsize
        touched = self._access(name, target, elems * (self._size if writes else 1), datatype, True)
        if word != "root" or value == self._rank:
            touched += self._access(name, source, elems * (self._size if reads else 1), datatype, False)
            is_in_place = source == target + ahead * self._rank * part
            is_apart = len(touched) < 2 or not touched[0].crosses(touched[1])
            need(
                is_in_place or is_apart, f"{name}: its arrays overlap, and it is not in place as NCCL has it"
            )

        def result(given: list[bytes]) -> bytes:
            if name == "broadcast":
                return given[value]
            if name == "allGather":
                return b"".join(given)
            first = part * self._rank if reads else 0
            return _reduced([one[first : first + part] for one in given], kind, value)

        head = [name, elems, kind.name, *word_given]
        self._submit(name, stream, touched, target, head, -1, result)

    def _message(self, name: str, at: int, elems: int, datatype: int, peer: int, stream: int) -> None:
        if OFF:
            return
        self._need_life(name)
        need(0 <= peer < self._size, f"{name}: rank {peer} of {self._size}")
        touched = self._access(name, at, elems, datatype, name == "recv")
        head = ["message", elems, _TYPES[datatype].name]
        self._submit(name, stream, touched, at, head, peer, b"".join if name == "recv" else lambda given: b"")

    allReduce, reduceScatter = (
        partialmethod(_collective, "allReduce"),
        partialmethod(_collective, "reduceScatter"),
    )
    allGather, broadcast = partialmethod(_collective, "allGather"), partialmethod(_collective, "broadcast")
    send, recv = partialmethod(_message, "send"), partialmethod(_message, "recv")

    # ---- its life, and what ranks leave for each other

    def commSplit(self, color: int, key: int) -> NcclCommunicator | None:
        """Return a communicator of the ranks that give the same colour."""
        self._need_life("commSplit")
        need(not getattr(of_thread, "groups", 0), "commSplit within a group")
        is_known = OFF or _streams.is_known(self._clock)
        need(is_known, "commSplit while work of the communicator may be under way: it may hang")
        self._splits += 1
        name = f"split {self._splits}"
        self._post(f"{name}.{self._rank}", [color, key])
        wait_until(lambda: self._all_have(name), "commSplit")
        asked = [self._find(f"{name}.{rank}")[0] for rank in range(self._size)]
        members = sorted(
            (its_key, rank) for rank, (its_color, its_key) in enumerate(asked) if its_color == color
        )
        unique = hashlib.sha512(f"{self._folder} {name} {color}".encode()).digest() * 2
        place = members.index((key, self._rank))
        return None if color == _NO_COLOR else NcclCommunicator(len(members), unique, place)

    def destroy(self) -> None:
        """End it, once its work is done and all ranks do so."""
        self._need_life("destroy")
        _streams.host_waits(dict(self._clock), "ncclCommDestroy")
        self._ended = "destroy"
        self._leave()
        wait_until(lambda: not self._folder.exists() or self._all_have("bye"), "ncclCommDestroy")

    def abort(self) -> None:
        """End it, and what it is doing."""
        self._need_life("abort")
        self._ended = "abort"
        self._leave()
        _streams.advance()

    def _leave(self) -> None:
        """Say good-bye; who is last takes the folder away."""
        self._post(f"bye.{self._rank}", None)
        if self._all_have("bye"):
            shutil.rmtree(self._folder, ignore_errors=True)

    def _post(self, name: str, head: Any, body: bytes = b"") -> None:
        made = self._folder / f".{name}"
        with suppress(FileNotFoundError):  # all ranks have left
            made.write_bytes(json.dumps(head).encode() + b"\n" + body)
            made.rename(self._folder / name)

    def _find(self, name: str) -> tuple[Any, bytes]:
        head, _, body = (self._folder / name).read_bytes().partition(b"\n")
        return json.loads(head), body

    def _has(self, name: str) -> bool:
        return (self._folder / name).exists()

    def _all_have(self, name: str) -> bool:
        return all(self._has(f"{name}.{rank}") for rank in range(self._size))

    def _take_away(self, *names: str) -> None:
        for name in names:
            (self._folder / name).unlink(missing_ok=True)


def _reduced(given: list[bytes], kind: np.dtype[Any], op: int) -> bytes:
    """Return arrays of all ranks combined, from the last rank to the first."""
    arrays = [np.frombuffer(one, kind) for one in reversed(given)]
    with np.errstate(all="ignore"):
        if op == _AVERAGE:
            arrays = [(array * kind.type(1 / len(given))).astype(kind) for array in arrays]
        total = functools.reduce(_OPS[op], arrays)
    return total.astype(kind, copy=False).tobytes()
