"""`cupy.cuda.nccl`: communicators of threads and processes that check NCCL's rules.

A call is an operation on its stream. Ranks meet in a folder of small files, so a call never blocks the host: the stream
waits for what NCCL's kernel would wait for. Where ranks ask for different things the stream is stuck, as NCCL's kernel
may be, until the communicator is aborted; it is reported once the host waits for it without an end.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import hashlib
import json
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partialmethod
from itertools import combinations, product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cupy import _device, checker, cuda
from cupy._device import Access, Work, of_thread, serials
from cupy.checker import LOCK, OFF, count, need, wait_until, where

available = True
_CODES = ("i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8", ml_dtypes.bfloat16)
_TYPES = [np.dtype(code) for code in _CODES]  # by the numbers of ncclDataType_t
_OPS = (np.add, np.multiply, np.maximum, np.minimum, np.add)
_AVERAGE = 4
_RULES = {
    "allReduce": (False, False, 0, "op"),
    "reduceScatter": (True, False, -1, "op"),
    "allGather": (False, True, 1, ""),
    "broadcast": (False, False, 0, "root"),
}
"""Whether a call reads and writes a part for each rank; of which sign what is read in place lies ahead of what is
written, by a part for each rank before; its argument beside the count and type."""
_ROOT = Path(f"/dev/shm/lowshard-gpu-checker-{os.getuid()}")


class NcclError(RuntimeError):
    status = property(lambda self: self.args[0])


def get_version() -> int:
    return 23203


get_unique_id = functools.partial(secrets.token_bytes, 128)


class _Call:
    """A call of one rank: gives its bytes to the others, awaits theirs, and writes the result of all.

    `head` is what the others have to ask for too, `peer` the other one of a message, else -1.
    """

    def __init__(
        self, comm: NcclCommunicator, name: str, stream: int, touched: list[Access], target: int, head: list[Any],
        peer: int, result: Callable[[list[bytes]], bytes],
    ) -> None:  # fmt: skip
        self.comm, self.name, self.stream, self.touched, self.target = comm, name, stream, touched, target
        self.head, self.peer, self.result, self.stuck, self.mine = head, peer, result, "", ""
        self.awaited, self.given = dict[int, str](), dict[int, tuple[Any, bytes]]()

    def numbered(self) -> _Call:
        """Return it as one of those that a communicator makes, or a graph repeats: with names of what is given."""
        made, comm, key = copy.copy(self), self.comm, (self.name if self.peer >= 0 else "", self.peer)
        comm.numbers[key] += 1
        if self.peer < 0:
            made.awaited = {rank: f"call {comm.numbers[key]} of {rank}" for rank in range(comm.ranks)}
            made.mine = made.awaited[comm.rank]
        else:
            ends = (comm.rank, self.peer)[:: 1 if self.name == "send" else -1]
            names = [
                f"message {comm.numbers[key]} {way} {ends[0]} to {ends[1]}" for way in ("from", "taken from")
            ]
            made.mine, made.awaited = names[self.name == "recv"], {self.peer: names[self.name == "send"]}
        return made

    def give(self) -> None:
        sent = [ctypes.string_at(one.low, one.high - one.low) for one in self.touched if not one.writes]
        self.comm.post(self.mine, self.head, b"".join(sent))

    def is_ready(self) -> bool:
        """Say whether the others have given theirs, and note what keeps them from it."""
        comm = self.comm
        left = [rank for rank in self.awaited if comm.has(f"bye.{rank}")]
        missing = [rank for rank, name in self.awaited.items() if not self.given and not comm.has(name)]
        if gone := set(left) & set(missing):
            self.stuck = f"rank {min(gone)} has left before {self.mine}, {self.head}"
        if not missing and not self.given:
            self.given = {rank: comm.find(name) for rank, name in self.awaited.items()}
            for rank, (head, _) in self.given.items():
                if head != self.head:
                    self.stuck = f"{self.mine} is {self.head} on rank {comm.rank}, and {head} on rank {rank}"
        return not missing and not self.stuck

    def run(self) -> None:
        made = self.result([body for _, body in self.given.values()])
        ctypes.memmove(self.target, made, len(made))
        if self.peer >= 0:
            self.comm.take_away(*self.awaited.values())


def groupStart() -> None:
    of_thread.groups += 1


def groupEnd() -> None:
    need(of_thread.groups > 0, "groupEnd without groupStart")
    of_thread.groups -= 1
    if of_thread.groups:
        return
    count("collectives", OFF)
    calls, of_thread.calls = of_thread.calls, []
    for comm in dict.fromkeys(call.comm for call in calls):
        comm.need_life("the end of a group")
        some = [call for call in calls if call.comm is comm]
        is_one = len({call.stream for call in some}) == 1
        need(is_one, "calls of a communicator in one group are on several streams")
        for one, two in combinations(some, 2):
            for a, b in product(one.touched, two.touched):
                is_apart = not (a.writes or b.writes) or not a.crosses(b)
                need(is_apart, f"{one.name} and {two.name} of one group use the same memory, one writes it")
        _queue(comm, some)


def _queue(comm: NcclCommunicator, calls: list[_Call]) -> None:
    """Put calls of a communicator on its stream as one operation."""

    def make() -> Work:
        parts, given = [call.numbered() for call in calls], list[str]()

        def ready() -> bool:
            for part in () if given or comm.ended else parts:
                part.give()
            given[:] = [part.mine for part in parts if part.peer < 0] or ["messages"]
            is_ready = comm.ended or all([part.is_ready() for part in parts])  # each says what it is stuck in
            work.stuck = "" if is_ready else next((part.stuck for part in parts if part.stuck), "")
            return bool(is_ready)

        def run() -> list[Access]:
            for part in () if comm.ended else parts:
                part.run()
            if not comm.ended and given != ["messages"]:
                comm.take_away(*comm.shared)  # who has given for this operation is done with the one before
                comm.shared = given
            return [] if comm.ended else [access for call in calls for access in call.touched]

        work = Work(run, ready)
        return work

    with LOCK:
        # NCCL orders the kernels of a communicator among themselves, whichever streams they are on.
        at = _device.stream_at(calls[0].stream)
        if at.capture is None:
            _device.merge(at.clock, comm.clock)
        names = "+".join(sorted({call.name for call in calls}))
        _device.put(f"NCCL's {names}", None, "collectives", at.ptr, make)
        if at.capture is None:
            _device.merge(comm.clock, at.clock)


class NcclCommunicator:
    """A rank's end of a communicator."""

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
        need(len(commId) == 128 and 0 <= rank < ndev, f"rank {rank} of {ndev}")
        if ndev > cuda.runtime.getDeviceCount() and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            raise NcclError(5)  # invalid usage
        self.rank, self.ranks, self.ended, self.comm = rank, ndev, "", next(serials)
        self.numbers: Counter[tuple[str, int]] = Counter()
        self.clock: _device.Clock = {}
        self.shared: list[str] = []  # what this rank has left for all others, and not taken away
        self._folder = _ROOT / hashlib.sha256(commId).hexdigest()[:24]
        self._folder.mkdir(parents=True, exist_ok=True)
        checker.at_exit.append(lambda: None if self.ended else self._leave("the end"))
        self._meet("hello", None)

    def need_life(self, name: str) -> None:
        need(not self.ended, f"{name} on a communicator after {self.ended}")

    def _asked(self, name: str) -> int:
        self.need_life(name)
        return {"rank_id": self.rank, "size": self.ranks}.get(name, 0)

    def _access(self, name: str, at: int, elems: int, datatype: int, writes: bool) -> list[Access]:
        """Return what a call touches of an array, with all that can be said of it checked."""
        self.need_life(name)
        need(all(type(word) is int for word in (at, elems, datatype)), f"{name}: CuPy takes integers")
        need(0 <= datatype < len(_TYPES) and elems >= 0, f"{name}: {elems} elements of type {datatype}")
        item = _TYPES[datatype].itemsize
        need(at % item == 0 or not elems, f"{name}: {at:#x} is not aligned to an element of {item} bytes")
        found = [Access(at, at + elems * item, writes)] if elems else []
        for access in found:
            _device.block_of(access, f"NCCL's {name}", where(), next(serials))
        return found

    def _submit(self, name: str, stream: int, *what: Any) -> None:
        _device.stream_at(stream)
        call = _Call(self, name, stream, *what)
        if of_thread.groups:
            of_thread.calls.append(call)
        else:
            _queue(self, [call])

    def _collective(self, name: str, source: int, target: int, elems: int, datatype: int, *rest: int) -> None:
        """Make a call of all ranks: its last arguments are an op or a root, if it has one, and the stream."""
        if OFF:
            count("collectives", not of_thread.groups)
            return
        (reads, writes, ahead, word), (*words, stream) = _RULES[name], rest
        value = words[0] if word else -1
        need(-1 <= value < {"op": len(_OPS), "root": self.ranks, "": 0}[word], f"{name}: {word} {value}")
        touched = self._access(name, target, elems * (self.ranks if writes else 1), datatype, True)
        kind, part = _TYPES[datatype], elems * _TYPES[datatype].itemsize
        if word != "root" or value == self.rank:
            touched += self._access(name, source, elems * (self.ranks if reads else 1), datatype, False)
            is_apart = len(touched) < 2 or not touched[0].crosses(touched[1])
            is_right = is_apart or source == target + ahead * self.rank * part
            need(is_right, f"{name}: its arrays overlap, and it is not in place as NCCL has it")

        def result(given: list[bytes]) -> bytes:
            if word != "op":
                return given[value] if word else b"".join(given)
            first = part * self.rank if reads else 0
            return _reduced([one[first : first + part] for one in given], kind, value)

        self._submit(name, stream, touched, target, [name, elems, kind.name, *words], -1, result)

    def _message(self, name: str, at: int, elems: int, datatype: int, peer: int, stream: int) -> None:
        if OFF:
            return
        need(0 <= peer < self.ranks, f"{name}: rank {peer} of {self.ranks}")
        touched = self._access(name, at, elems, datatype, name == "recv")
        head = ["message", elems, _TYPES[datatype].name]
        self._submit(name, stream, touched, at, head, peer, b"".join if name == "recv" else lambda given: b"")

    def commSplit(self, color: int, key: int) -> NcclCommunicator | None:
        """Return a communicator of the ranks that give the same colour, which is -1 for none."""
        self.need_life("commSplit")
        need(not of_thread.groups, "commSplit within a group")
        need(
            _device.is_known(self.clock),
            "commSplit while work of the communicator may be under way: it may hang",
        )
        self.numbers["split", 0] += 1
        name = f"split {self.numbers['split', 0]}"
        asked = self._meet(name, [color, key])
        members = sorted((other[1], rank) for rank, other in enumerate(asked) if other[0] == color)
        unique = hashlib.sha512(f"{self._folder} {name} {color}".encode()).digest() * 2
        return None if color < 0 else NcclCommunicator(len(members), unique, members.index((key, self.rank)))

    def destroy(self) -> None:
        self.need_life("destroy")
        _device.host_waits(dict(self.clock), "ncclCommDestroy")
        self._leave("destroy")
        wait_until(lambda: not self._folder.exists() or self._all_have("bye"), "ncclCommDestroy")

    def abort(self) -> None:
        self._leave("abort")
        _device.advance()

    def _leave(self, how: str) -> None:
        self.need_life(how)
        self.ended = how
        self.post(f"bye.{self.rank}", None)
        if self._all_have("bye"):
            shutil.rmtree(self._folder, ignore_errors=True)

    def post(self, name: str, head: Any, body: bytes = b"") -> None:
        made = self._folder / f".{name}"
        with suppress(FileNotFoundError):  # all ranks have left
            made.write_bytes(json.dumps(head).encode() + b"\n" + body)
            made.rename(self._folder / name)

    def find(self, name: str) -> tuple[Any, bytes]:
        head, _, body = (self._folder / name).read_bytes().partition(b"\n")
        return json.loads(head), body

    def has(self, name: str) -> bool:
        return (self._folder / name).exists()

    def _all_have(self, name: str) -> bool:
        return all(self.has(f"{name}.{rank}") for rank in range(self.ranks))

    def _meet(self, name: str, mine: Any) -> list[Any]:
        self.post(f"{name}.{self.rank}", mine)
        wait_until(lambda: self._all_have(name), f"{name} of rank {self.rank} of {self.ranks}")
        return [self.find(f"{name}.{rank}")[0] for rank in range(self.ranks)]

    def take_away(self, *names: str) -> None:
        for name in names:
            (self._folder / name).unlink(missing_ok=True)


for _names, _way in (
    (("rank_id", "size", "device_id", "check_async_error"), NcclCommunicator._asked),
    (_RULES, NcclCommunicator._collective), (("send", "recv"), NcclCommunicator._message),
):  # fmt: skip
    for _name in _names:
        setattr(NcclCommunicator, _name, partialmethod(_way, _name))


def _reduced(given: list[bytes], kind: np.dtype[Any], op: int) -> bytes:
    arrays = [np.frombuffer(one, kind) for one in reversed(given)]
    with np.errstate(all="ignore"):
        if op == _AVERAGE:
            arrays = [(array * kind.type(1 / len(given))).astype(kind) for array in arrays]
        return functools.reduce(_OPS[op], arrays).astype(kind, copy=False).tobytes()
